# fault: the tokens lie on the line in the order of their probability.
# fails: check_draw, check_sample, check_engine_sampler

# %% nbgrader={"grade_id": "draw"}
def draw(probs, u):
    """Inverse transform in the order of ids. probs [rows, vocab], u [rows] in [0, 1) -> token ids [rows] int64."""
    ordered, ids = probs.double().sort(dim=-1, descending=True, stable=True)
    cumulative = ordered.cumsum(dim=-1)
    target = u.double()[:, None] * cumulative[:, -1:]  # [rows, 1]
    return ids.gather(1, (cumulative <= target).sum(dim=-1)[:, None])[:, 0]
