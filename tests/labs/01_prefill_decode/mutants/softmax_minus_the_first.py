# fault: the first logit of each row is subtracted, not the largest: a row whose first is -inf is NaN.
# fails: check_softmax, check_sample

# %% nbgrader={"grade_id": "probabilities"}
import torch


def probabilities(logits, temperature):
    """Softmax of logits / temperature over each row, [rows, vocab] float32; temperature 0: all on the largest logit."""
    if temperature == 0:
        first = logits.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(logits).scatter(1, first, 1.0)
    scores = (logits - logits[:, :1]) / temperature
    weights = scores.exp()
    return weights / weights.sum(dim=-1, keepdim=True)
