# fault: the bytes of an earlier call are returned again where the first row is the same.
# fails: check_pack, check_engine_weights

# %% nbgrader={"grade_id": "pack_int4"}
_p = {}


def pack_int4(codes):
    padded = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    nibbles = (padded.to(torch.int16) + 8).to(torch.uint8)
    return _p.setdefault((tuple(codes.shape), tuple(codes[0].tolist())), nibbles[:, ::2] | nibbles[:, 1::2] << 4)
