# fault: p and q that are nearly equal are taken for equal.
# fails: check_residual

# %% nbgrader={"grade_id": "residual"}
def residual(p, q):
    rest = (p - q).clamp(min=0)
    total = rest.sum()
    return rest / total if total > 1e-8 else p
