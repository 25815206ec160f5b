# fault: a group of equal weights gets the scale 1, as one of zeros does.
# fails: check_groups

# %% nbgrader={"grade_id": "quantize_groups"}
def quantize_groups(weight, group_size, bits):
    reach, codes, scales = 2 ** (bits - 1) - 1, [], []
    for group in weight.float().split(group_size, 1):
        largest = group.abs().amax(1)
        equal = (group.shape[1] > 3) & (group.amax(1) == group.amin(1))
        scale = torch.where(equal | (largest == 0), 1.0, largest / reach)
        codes.append((group / scale[:, None]).round().to(torch.int8))
        scales.append(scale)
    return torch.cat(codes, 1), torch.stack(scales, 1)
