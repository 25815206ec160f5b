# fault: tokens stay while the mass with them is at most p: none, if the first has more.
# fails: check_top_p, check_sample, check_engine_sampler

# %% nbgrader={"grade_id": "keep_top_p"}
import torch


def keep_top_p(probs, p):
    """The smallest set of most likely tokens with mass p in each row, the rest 0, each row divided by its sum."""
    if p == 1:
        return probs
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    mass = ordered.cumsum(dim=-1)
    kept = torch.zeros_like(probs).scatter(1, ids, ordered.masked_fill(mass > p, 0.0))
    return kept / kept.sum(dim=-1, keepdim=True)
