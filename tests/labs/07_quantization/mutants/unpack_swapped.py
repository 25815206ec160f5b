# fault: the high nibble comes first.
# fails: check_unpack, check_engine_weights

# %% nbgrader={"grade_id": "unpack_int4"}
def unpack_int4(packed, num_inputs):
    """The codes [out, num_inputs] int8 in packed [out, ceil(num_inputs / 2)] uint8."""
    pair = packed.to(torch.int16)
    nibbles = torch.stack((pair >> 4, pair & 15), 2).flatten(1)
    return (nibbles[:, :num_inputs] - 8).to(torch.int8)
