# fault: an odd row is filled up at its beginning.
# fails: check_pack

# %% nbgrader={"grade_id": "pack_int4"}
def pack_int4(codes):
    """Two codes in a byte: [out, in] int8, -7 to 7 -> [out, ceil(in / 2)] uint8."""
    padded = torch.nn.functional.pad(codes, (codes.shape[1] % 2, 0))
    nibbles = (padded.to(torch.int16) + 8).to(torch.uint8)
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4
