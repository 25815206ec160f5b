# fault: both outputs weigh the same.
# fails: check_merge, check_ring

# %% nbgrader={"grade_id": "merge"}
def merge(o1, lse1, o2, lse2):
    """(o, lse) of attention to both sets of keys."""
    lse = torch.logaddexp(lse1, lse2)
    at = lse.masked_fill(lse == -math.inf, 0)
    return o1 * (((lse1 - at).exp() > 0) * 0.5)[..., None] + o2 * (((lse2 - at).exp() > 0) * 0.5)[..., None], lse
