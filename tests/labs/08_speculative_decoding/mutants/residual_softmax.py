# fault: a softmax in place of a division.
# fails: check_residual, check_replaced, check_distribution, check_engine_copied, check_engine_drafted

# %% nbgrader={"grade_id": "residual"}
def residual(p, q):
    """max(p - q, 0) over its sum, [vocab]; p where that sum is 0."""
    rest = (p - q).clamp(min=0)
    total = rest.sum()
    return rest.softmax(0) if total > 0 else p
