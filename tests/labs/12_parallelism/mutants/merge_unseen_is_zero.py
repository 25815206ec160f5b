# fault: where nothing was seen the lse is 0.
# fails: check_merge

# %% nbgrader={"grade_id": "merge"}
def merge(o1, lse1, o2, lse2):
    """(o, lse) of attention to both sets of keys."""
    lse = torch.logaddexp(lse1, lse2)
    at = lse.masked_fill(lse == -math.inf, 0)
    return o1 * (lse1 - at).exp()[..., None] + o2 * (lse2 - at).exp()[..., None], at
