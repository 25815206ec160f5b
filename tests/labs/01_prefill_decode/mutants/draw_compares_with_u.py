# fault: u itself is compared, and not u times the sum.
# trap: rounding
# fails: check_draw

# %% nbgrader={"grade_id": "draw"}
def draw(probs, u):
    """Inverse transform in the order of ids. probs [rows, vocab] and u [rows] in [0, 1) -> token ids [rows] int64."""
    cumulative = probs.double().cumsum(dim=-1)
    target = u.double()[:, None]
    return (cumulative <= target).sum(dim=-1).clamp(max=probs.shape[1] - 1)
