# fault: whether a scale is 0 is asked in the weight's own precision.
# fails: check_edge_groups

# %% nbgrader={"grade_id": "quantize_groups"}
def quantize_groups(weight, group_size, bits):
    """(codes [out, in] int8, scales [out, num_groups] float32): weight is about code x scale."""
    reach = 2 ** (bits - 1) - 1
    codes, scales = [], []
    for group in weight.float().split(group_size, 1):
        scale = group.abs().amax(1, keepdim=True) / reach
        scale = torch.where(scale.to(weight.dtype) == 0, 1.0, scale)
        codes.append((group / scale).round().to(torch.int8))
        scales.append(scale)
    return torch.cat(codes, 1), torch.cat(scales, 1)
