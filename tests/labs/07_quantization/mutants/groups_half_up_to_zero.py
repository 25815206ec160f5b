# fault: a half is added before cutting off, also below 0.
# fails: check_groups, check_ragged_groups, check_edge_groups, check_engine_weights

# %% nbgrader={"grade_id": "quantize_groups"}
def quantize_groups(weight, group_size, bits):
    """(codes [out, in] int8, scales [out, num_groups] float32): weight is about code x scale."""
    reach = 2 ** (bits - 1) - 1
    codes, scales = [], []
    for group in weight.float().split(group_size, 1):
        scale = group.abs().amax(1, keepdim=True) / reach
        scale = torch.where(scale == 0, 1.0, scale)
        codes.append((group / scale + 0.5).trunc().to(torch.int8))
        scales.append(scale)
    return torch.cat(codes, 1), torch.cat(scales, 1)
