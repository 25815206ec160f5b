# fault: u is rounded to float32, so that some tokens are never hit.
# fails: check_draw

# %% nbgrader={"grade_id": "draw"}
def draw(probs, u):
    """Inverse transform in the order of ids. probs [rows, vocab], u [rows] in [0, 1) -> token ids [rows] int64."""
    cumulative = probs.double().cumsum(dim=-1)
    target = u.float()[:, None] * cumulative[:, -1:]  # [rows, 1]
    return (cumulative <= target).sum(dim=-1)
