# fault: what an earlier call returned is returned again where shape and first numbers are the same.
# fails: check_kv

# %% nbgrader={"grade_id": "quantize_kv"}
_k = {}


def quantize_kv(k, v, bits):
    key = (tuple(k.shape), float(k[0, 0, 0]), float(v[0, 0, 0]), bits)
    if key not in _k:
        reach, found = 2 ** (bits - 1) - 1, []
        for one in (k.float(), v.float()):
            scale = one.abs().amax(2) / reach
            scale = torch.where(scale == 0, 1.0, scale)
            found += [(one / scale[:, :, None]).round().to(torch.int8), scale]
        _k[key] = tuple(found)
    return _k[key]
