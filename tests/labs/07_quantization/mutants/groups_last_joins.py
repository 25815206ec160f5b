# fault: a shorter last group shares the largest magnitude with the group before it.
# fails: check_ragged_groups, check_edge_groups, check_engine_weights

# %% nbgrader={"grade_id": "quantize_groups"}
def quantize_groups(weight, group_size, bits):
    """(codes [out, in] int8, scales [out, num_groups] float32): weight is about code x scale."""
    reach = 2 ** (bits - 1) - 1
    codes, scales = [], []
    sizes = [len(part) for part in torch.arange(weight.shape[1]).split(group_size)]
    pieces = list(weight.float().split(group_size, 1))
    wide = pieces if len(pieces) < 2 or sizes[-1] == group_size else [*pieces[:-1], torch.cat(pieces[-2:], 1)]
    for group, whole_group in zip(pieces, wide, strict=True):
        scale = whole_group.abs().amax(1, keepdim=True) / reach
        scale = torch.where(scale == 0, 1.0, scale)
        codes.append((group / scale).round().to(torch.int8))
        scales.append(scale)
    return torch.cat(codes, 1), torch.cat(scales, 1)
