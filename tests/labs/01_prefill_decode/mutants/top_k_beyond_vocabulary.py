# fault: a k larger than the vocabulary is an error.
# fails: check_top_k

# %% nbgrader={"grade_id": "keep_top_k"}
import torch


def keep_top_k(probs, k):
    """The k most likely tokens of each row, the rest 0, each row divided by its sum. [rows, vocab] -> the same."""
    if k == 0:
        return probs
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    places = torch.arange(k)
    kept = torch.zeros_like(probs).scatter(1, ids[:, places], ordered[:, places])
    return kept / kept.sum(dim=-1, keepdim=True)
