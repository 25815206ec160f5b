# fault: the line is added up in float32, in which the tiny tokens behind a likely one share a place.
# fails: check_draw

# %% nbgrader={"grade_id": "draw"}
def draw(probs, u):
    """Inverse transform in the order of ids. probs [rows, vocab], u [rows] in [0, 1) -> token ids [rows] int64."""
    ends = probs.cumsum(dim=-1)
    target = u[:, None] * ends[:, -1:]  # [rows, 1]
    return (ends <= target).sum(dim=-1)
