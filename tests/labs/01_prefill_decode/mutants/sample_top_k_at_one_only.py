# fault: top-k is left out where the temperature is not 1.
# fails: check_sample, check_engine_sampler

# %% nbgrader={"grade_id": "sample"}
def sample(logits, u, temperature, top_k, top_p):
    """Next token of each row. logits [rows, vocab] float32, u [rows] in [0, 1) -> token ids [rows] int64."""
    probs = probabilities(logits, temperature)
    probs = keep_top_k(probs, top_k if temperature == 1 else 0)
    probs = keep_top_p(probs, top_p)
    return draw(probs, u)
