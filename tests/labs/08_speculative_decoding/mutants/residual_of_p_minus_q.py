# fault: divided by the sum of p - q, which is 0 but for rounding, so that p is left.
# trap: normaliser
# fails: check_residual, check_replaced, check_distribution, check_engine_copied, check_engine_drafted

# %% nbgrader={"grade_id": "residual"}
def residual(p, q):
    """max(p - q, 0) over its sum, [vocab]; p where that sum is 0."""
    rest = (p - q).clamp(min=0)
    total = (p - q).sum()
    return rest / total if total > 1e-9 else p
