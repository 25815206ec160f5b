# fault: all that are as likely as the k-th stay.
# trap: ties
# fails: check_top_k

# %% nbgrader={"grade_id": "keep_top_k"}
def keep_top_k(probs, k):
    """The k most likely tokens of each row, the rest 0, each row divided by its sum. [rows, vocab] -> the same."""
    if k == 0:
        return probs
    threshold = probs.sort(dim=-1, descending=True).values[:, min(k, probs.shape[1]) - 1, None]
    kept = probs * (probs >= threshold)
    return kept / kept.sum(dim=-1, keepdim=True)
