# fault: adds 8 to the caller's codes in place.
# fails: check_pack

# %% nbgrader={"grade_id": "pack_int4"}
import torch


def pack_int4(codes):
    """Two codes in a byte: [out, in] int8, -7 to 7 -> [out, ceil(in / 2)] uint8."""
    padded = torch.nn.functional.pad(codes.add_(8), (0, codes.shape[1] % 2), value=8)
    nibbles = padded.to(torch.uint8)
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4
