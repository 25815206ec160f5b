# fault: groups go on from one row to the next.
# fails: check_ragged_groups, check_edge_groups, check_engine_weights

# %% nbgrader={"grade_id": "quantize_groups"}
def quantize_groups(weight, group_size, bits):
    """(codes [out, in] int8, scales [out, num_groups] float32): weight is about code x scale."""
    reach = 2 ** (bits - 1) - 1
    flat = weight.float().flatten()
    groups = list(flat.split(group_size))
    each = [torch.full_like(g, float(g.abs().max()) / reach or 1.0) for g in groups]
    scale = torch.cat(each).view(weight.shape)
    return (weight.float() / scale).round().to(torch.int8), scale[:, ::group_size].contiguous()
