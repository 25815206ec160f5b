# fault: exp of an lse itself.
# fails: check_merge

# %% nbgrader={"grade_id": "merge"}
def merge(o1, lse1, o2, lse2):
    """(o, lse) of attention to both sets of keys."""
    lse = (lse1.exp() + lse2.exp()).log()
    at = lse.masked_fill(lse == -math.inf, 0)
    return o1 * (lse1 - at).exp()[..., None] + o2 * (lse2 - at).exp()[..., None], lse
