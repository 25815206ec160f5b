# fault: the filters see the probabilities at temperature 1.
# trap: order
# fails: check_sample, check_engine_sampler

# %% nbgrader={"grade_id": "sample"}
def sample(logits, u, temperature, top_k, top_p):
    """Next token of each row. logits [rows, vocab] float32, u [rows] in [0, 1) -> token ids [rows] int64."""
    kept = keep_top_p(keep_top_k(probabilities(logits, 1.0), top_k), top_p) > 0
    return draw(probabilities(logits, temperature) * kept, u)
