# fault: a dimension of size 1 is lost where there is one row.
# fails: check_draw, check_sample, check_engine_sampler

# %% nbgrader={"grade_id": "draw"}
def draw(probs, u):
    """Inverse transform in the order of ids. probs [rows, vocab], u [rows] in [0, 1) -> token ids [rows] int64."""
    cumulative = probs.double().cumsum(dim=-1)
    target = u[:, None] * cumulative[:, -1:]  # [rows, 1]
    return (cumulative <= target).sum(dim=-1).squeeze()
