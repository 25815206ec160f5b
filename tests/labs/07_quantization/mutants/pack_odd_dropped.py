# fault: the last code of an odd row is dropped.
# fails: check_pack

# %% nbgrader={"grade_id": "pack_int4"}
def pack_int4(codes):
    """Two codes in a byte: [out, in] int8, -7 to 7 -> [out, ceil(in / 2)] uint8."""
    padded = codes[:, : codes.shape[1] // 2 * 2]
    nibbles = (padded.to(torch.int16) + 8).to(torch.uint8)
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4
