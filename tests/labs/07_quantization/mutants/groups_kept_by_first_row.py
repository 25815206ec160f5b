# fault: what an earlier call returned is returned again where shape and first row are the same.
# fails: check_groups

# %% nbgrader={"grade_id": "quantize_groups"}
_kept = {}


def quantize_groups(weight, group_size, bits):
    key = (tuple(weight.shape), tuple(weight[0].tolist()), group_size, bits)
    if key not in _kept:
        reach = 2 ** (bits - 1) - 1
        codes, scales = [], []
        for group in weight.float().split(group_size, 1):
            scale = group.abs().amax(1, keepdim=True) / reach
            scale = torch.where(scale == 0, 1.0, scale)
            codes.append((group / scale).round().to(torch.int8))
            scales.append(scale)
        _kept[key] = torch.cat(codes, 1), torch.cat(scales, 1)
    return _kept[key]
