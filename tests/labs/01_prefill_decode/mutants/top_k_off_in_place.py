# fault: k = 0 divides the given probabilities in place.
# fails: check_top_k

# %% nbgrader={"grade_id": "keep_top_k"}
def keep_top_k(probs, k):
    kept = probs
    if k:
        order = probs.sort(dim=-1, descending=True, stable=True)
        kept = torch.zeros_like(probs).scatter(1, order.indices[:, :k], order.values[:, :k])
    kept /= kept.sum(-1, keepdim=True)
    return kept
