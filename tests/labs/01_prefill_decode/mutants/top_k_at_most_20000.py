# fault: keeps 20,000 tokens at most.
# fails: check_top_k

# %% nbgrader={"grade_id": "keep_top_k"}
def keep_top_k(probs, k):
    """The k most likely tokens of each row, the rest 0, each row divided by its sum. [rows, vocab] -> the same."""
    if k == 0:
        return probs
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    kept = torch.zeros_like(probs).scatter(1, ids[:, : min(k, 20000)], ordered[:, : min(k, 20000)])
    return kept / kept.sum(dim=-1, keepdim=True)
