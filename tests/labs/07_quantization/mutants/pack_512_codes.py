# fault: codes from the 1,024th on are packed as 0.
# fails: check_pack

# %% nbgrader={"grade_id": "pack_int4"}
def pack_int4(codes):
    """Two codes in a byte: [out, in] int8, -7 to 7 -> [out, ceil(in / 2)] uint8."""
    padded = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    nibbles = (padded.to(torch.int16) + 8).to(torch.uint8)
    nibbles[:, 512:] = 8
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4
