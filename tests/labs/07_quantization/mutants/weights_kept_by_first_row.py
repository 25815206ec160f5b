# fault: what an earlier call returned is returned again where the first row is the same.
# fails: check_dequantize

# %% nbgrader={"grade_id": "dequantize"}
_w = {}


def dequantize(codes, scales, group_size):
    key = (tuple(codes.shape), tuple(codes[0].tolist()), tuple(scales[0].tolist()) if scales.dim() > 1 else 0)
    group = torch.arange(codes.shape[1]) // group_size
    return _w.setdefault(key, codes.float() * scales[:, group])
