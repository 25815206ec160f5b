# fault: of equal tokens those with the higher ids stay.
# fails: check_top_k

# %% nbgrader={"grade_id": "keep_top_k"}
import torch


def keep_top_k(probs, k):
    """The k most likely tokens of each row, the rest 0, each row divided by its sum. [rows, vocab] -> the same."""
    if k == 0:
        return probs
    ordered, ids = (x.flip(1) for x in probs.sort(dim=-1, stable=True))
    kept = torch.zeros_like(probs).scatter(1, ids[:, :k], ordered[:, :k])
    return kept / kept.sum(dim=-1, keepdim=True)
