"""SmoothQuant (Xiao et al. 2023): outliers are moved from the activations, which share a scale per token, into the
weights, where few inputs are large.

y = x W^T = (x / s) (W s)^T for any positive s [in]. With s_j = max|x_j|^alpha / max|W_j|^(1 - alpha) both sides of
input j have a like reach at alpha = 1/2; at 0 everything stays with the activations, at 1 the weights have it all. The
division costs nothing while the model runs: it is folded into what computes x, a norm or a matrix (`folding.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST = 1e-5  # of a reach: an input that is never used gets no infinite scale


def smoothing(activation_reach: Tensor, weight_reach: Tensor, alpha: float = 0.5) -> Tensor:
    """The scales s [in]. activation_reach [in]: the largest |x_j| in calibration; weight_reach [in]: the largest |W_ij|
    of all matrices that read x. alpha: from 0 to 1, how much of the difficulty goes over to the weights."""
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha: expected a number from 0 to 1, got {alpha}")
    if activation_reach.shape != weight_reach.shape or activation_reach.dim() != 1:
        raise ValueError(
            f"smoothing: expected two reaches [in], got {list(activation_reach.shape)} and {list(weight_reach.shape)}"
        )
    s = activation_reach.clamp(min=_LEAST) ** alpha / weight_reach.clamp(min=_LEAST) ** (1 - alpha)
    return s.clamp(min=_LEAST)


def weight_reach(*weights: Tensor) -> Tensor:
    """The largest magnitude of each input's weights, [in], over matrices [out, in] that read the same x."""
    return torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
