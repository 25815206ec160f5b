# fault: masses are added up in float16, in which they stop growing.
# fails: check_top_p

# %% nbgrader={"grade_id": "keep_top_p"}
import torch


def keep_top_p(probs, p):
    """The smallest set of most likely tokens with mass p in each row, the rest 0, each row divided by its sum."""
    if p == 1:
        return probs
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    mass_before = ordered.half().cumsum(dim=-1) - ordered.half()
    kept = torch.zeros_like(probs).scatter(1, ids, ordered.masked_fill(mass_before >= p, 0.0))
    return kept / kept.sum(dim=-1, keepdim=True)
