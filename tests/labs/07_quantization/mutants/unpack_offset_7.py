# fault: 7 is subtracted, not 8.
# fails: check_unpack, check_engine_weights

# %% nbgrader={"grade_id": "unpack_int4"}
def unpack_int4(packed, num_inputs):
    """The codes [out, num_inputs] int8 in packed [out, ceil(num_inputs / 2)] uint8."""
    pair = packed.to(torch.int16)
    nibbles = torch.stack((pair & 15, pair >> 4), 2).flatten(1)
    return (nibbles[:, :num_inputs] - 7).to(torch.int8)
