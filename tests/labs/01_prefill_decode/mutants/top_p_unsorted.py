# fault: the mass is counted in the order of ids.
# fails: check_top_p, check_sample, check_engine_sampler

# %% nbgrader={"grade_id": "keep_top_p"}
def keep_top_p(probs, p):
    """The smallest set of most likely tokens with mass p in each row, the rest 0, each row divided by its sum."""
    if p == 1:
        return probs
    mass_before = probs.cumsum(dim=-1) - probs
    kept = probs.masked_fill(mass_before >= p, 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)
