# fault: u is ignored, torch draws.
# fails: check_draw, check_sample, check_engine_sampler

# %% nbgrader={"grade_id": "draw"}
import torch


def draw(probs, u):
    """Inverse transform in the order of ids. probs [rows, vocab], u [rows] in [0, 1) -> token ids [rows] int64."""
    return torch.multinomial(probs, 1)[:, 0]
