# fault: k = 0 keeps the most likely token.
# fails: check_top_k, check_sample, check_engine_sampler

# %% nbgrader={"grade_id": "keep_top_k"}
import torch


def keep_top_k(probs, k):
    """The k most likely tokens of each row, the rest 0, each row divided by its sum. [rows, vocab] -> the same."""
    k = max(1, k)
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    kept = torch.zeros_like(probs).scatter(1, ids[:, :k], ordered[:, :k])
    return kept / kept.sum(dim=-1, keepdim=True)
