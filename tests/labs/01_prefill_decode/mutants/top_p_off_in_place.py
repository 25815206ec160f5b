# fault: p = 1 divides the given probabilities in place.
# fails: check_top_p

# %% nbgrader={"grade_id": "keep_top_p"}
def keep_top_p(probs, p):
    kept = probs
    if p < 1:
        order = probs.sort(dim=-1, descending=True, stable=True)
        values = order.values * (order.values.cumsum(dim=-1) - order.values < p)
        kept = torch.zeros_like(probs).scatter(1, order.indices, values)
    kept /= kept.sum(dim=-1, keepdim=True)
    return kept
