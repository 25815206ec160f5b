# fault: the lse of both is the larger one.
# fails: check_merge, check_ring

# %% nbgrader={"grade_id": "merge"}
def merge(o1, lse1, o2, lse2):
    """(o, lse) of attention to both sets of keys."""
    lse, both = torch.maximum(lse1, lse2), torch.logaddexp(lse1, lse2)
    at = both.masked_fill(both == -math.inf, 0)
    return o1 * (lse1 - at).exp()[..., None] + o2 * (lse2 - at).exp()[..., None], lse
