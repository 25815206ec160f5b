# fault: the first row's u is used for all rows.
# fails: check_draw, check_sample, check_engine_sampler

# %% nbgrader={"grade_id": "draw"}
def draw(probs, u):
    """Inverse transform in the order of ids. probs [rows, vocab], u [rows] in [0, 1) -> token ids [rows] int64."""
    cumulative = probs.double().cumsum(dim=-1)
    target = u.double()[0] * cumulative[:, -1:]  # [rows, 1]
    return (cumulative <= target).sum(dim=-1)
