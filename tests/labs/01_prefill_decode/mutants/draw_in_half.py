# fault: the line is added up in float16, where 2048 places are all there is.
# fails: check_draw

# %% nbgrader={"grade_id": "draw"}
def draw(probs, u):
    """Inverse transform in the order of ids. probs [rows, vocab], u [rows] in [0, 1) -> token ids [rows] int64."""
    cumulative = probs.half().cumsum(dim=-1)
    target = u[:, None] * cumulative[:, -1:]  # [rows, 1]
    return (cumulative <= target).sum(dim=-1)
