# fault: topk decides which of equal probabilities stay.
# fails: check_top_k

# %% nbgrader={"grade_id": "keep_top_k"}
import torch


def keep_top_k(probs, k):
    """The k most likely tokens of each row, the rest 0, each row divided by its sum. [rows, vocab] -> the same."""
    if k == 0:
        return probs
    ordered, ids = probs.topk(min(k, probs.shape[1]), dim=-1)
    kept = torch.zeros_like(probs).scatter(1, ids, ordered)
    return kept / kept.sum(dim=-1, keepdim=True)
