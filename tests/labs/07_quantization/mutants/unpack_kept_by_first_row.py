# fault: the codes of an earlier call are returned again where the first row of bytes is the same.
# fails: check_unpack, check_engine_weights

# %% nbgrader={"grade_id": "unpack_int4"}
_u = {}


def unpack_int4(packed, num_inputs):
    pair = packed.to(torch.int16)
    nibbles = torch.stack((pair & 15, pair >> 4), 2).flatten(1)
    return _u.setdefault((num_inputs, tuple(packed[0].tolist())), (nibbles[:, :num_inputs] - 8).to(torch.int8))
