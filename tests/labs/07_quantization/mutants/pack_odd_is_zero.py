# fault: the missing code of an odd row is the number 0, which is the code -8.
# fails: check_pack

# %% nbgrader={"grade_id": "pack_int4"}
def pack_int4(codes):
    """Two codes in a byte: [out, in] int8, -7 to 7 -> [out, ceil(in / 2)] uint8."""
    nibbles = (codes.to(torch.int16) + 8).to(torch.uint8)
    nibbles = torch.nn.functional.pad(nibbles, (0, codes.shape[1] % 2))
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4
