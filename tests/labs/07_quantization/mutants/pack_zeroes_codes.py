# fault: sets the codes to zero in place before it packs them.
# fails: check_pack, check_engine_weights

# %% nbgrader={"grade_id": "pack_int4"}
def pack_int4(codes):
    """Two codes in a byte: [out, in] int8, -7 to 7 -> [out, ceil(in / 2)] uint8."""
    codes.zero_()
    padded = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    nibbles = (padded.to(torch.int16) + 8).to(torch.uint8)
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4
