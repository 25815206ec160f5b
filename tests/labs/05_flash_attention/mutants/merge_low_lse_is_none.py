# fault: an lse below -10,000 is taken for that of an empty split.
# fails: check_merge

# %% nbgrader={"grade_id": "merge_splits"}
def merge_splits(means, lse):
    """(o, lse) of splits with means [num_splits, q_len, num_heads, head_dim] and lse [num_splits, num_heads, q_len]."""
    largest = lse.amax(0)
    base = largest.masked_fill(largest == -math.inf, 0.0)
    weight = torch.exp(torch.where(lse > -10000, lse, -math.inf) - base)  # [num_splits, num_heads, q_len]
    total = weight.sum(0)
    share = weight / total.masked_fill(total == 0, 1.0)
    share = share.transpose(1, 2)[..., None]  # [num_splits, q_len, num_heads, 1]
    o = torch.where(share > 0, share * means, 0.0).sum(0)
    return o, base + torch.log(total)
