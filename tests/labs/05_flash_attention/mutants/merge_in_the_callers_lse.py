# fault: subtracts the largest from the caller's lse in place.
# fails: check_merge, check_merge_empty, check_engine

# %% nbgrader={"grade_id": "merge_splits"}
import math
import torch


def merge_splits(means, lse):
    """(o, lse) of splits with means [num_splits, q_len, num_heads, head_dim] and a changed lse."""
    largest = lse.amax(0)
    base = largest.masked_fill(largest == -math.inf, 0.0)
    weight = torch.exp(lse.sub_(base))  # [num_splits, num_heads, q_len]
    total = weight.sum(0)
    share = weight / total.masked_fill(total == 0, 1.0)
    share = share.transpose(1, 2)[..., None]  # [num_splits, q_len, num_heads, 1]
    o = torch.where(share > 0, share * means, 0.0).sum(0)
    return o, base + torch.log(total)
