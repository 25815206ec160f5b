# fault: the residual is not divided.
# fails: check_residual

# %% nbgrader={"grade_id": "residual"}
def residual(p, q):
    """max(p - q, 0) over its sum, [vocab]; p where that sum is 0."""
    rest = (p - q).clamp(min=0)
    total = rest.sum()
    return rest if total > 0 else p
