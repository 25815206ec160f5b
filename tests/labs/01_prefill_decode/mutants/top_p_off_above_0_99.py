# fault: a p above 0.99 keeps every token.
# fails: check_top_p

# %% nbgrader={"grade_id": "keep_top_p"}
def keep_top_p(probs, p):
    """The smallest set of most likely tokens with mass p in each row, the rest 0, each row divided by its sum."""
    if p > 0.99:
        return probs
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    mass_before = ordered.cumsum(dim=-1) - ordered
    kept = torch.zeros_like(probs).scatter(1, ids, ordered.masked_fill(mass_before >= p, 0.0))
    return kept / kept.sum(dim=-1, keepdim=True)
