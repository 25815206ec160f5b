"""AWQ (Lin et al. 2023): weights whose inputs are large are kept more exactly, by scaling them up before rounding.

y = x W^T = (x / s) (W s)^T. A weight that is multiplied by s is rounded with steps that are finer for it by s, as long
as the largest weight of its group, and with it the scale, stays. s_j = mean|x_j|^ratio, and the ratio is searched: 0 is
plain rounding, so that the best of all is never worse than it. The division by s is folded into what computes x
(`folding.py`).

The error is that of the matrix's own output over the calibration rows, sum |x (W - Q(W s) / s)^T|^2, from their Gram
matrix alone. (The authors' code compares outputs of a whole attention or MLP block, which needs its activations.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from reference_impl.models.quantization.gptq import ROWS, output_error
from reference_impl.models.quantization.scheme import Scheme, decode, encode, fit

RATIOS = 20
CLIPS = 10  # how many shares of a group's reach are tried, down to a half of it
_LEAST = 1e-4


def rounded(weight: Tensor, scheme: Scheme) -> Tensor:
    """RTN: [out, in] float32, what stands for the weight when it is rounded to nearest."""
    fitted = fit(weight, scheme)
    return decode(encode(weight, scheme, fitted), scheme, fitted)


def search_scales(
    weights: Sequence[Tensor], gram: Tensor, mean_abs: Tensor, scheme: Scheme, ratios: int = RATIOS
) -> Tensor:
    """s [in] for matrices [out, in] that read the same x. gram [in, in]: sum of x^T x; mean_abs [in]: mean of |x|."""
    best, least = torch.ones_like(mean_abs), float("inf")
    for step in range(ratios):
        s = candidate(mean_abs, step / ratios)
        error = sum(scaled_error(weight, s, gram, scheme) for weight in weights)
        if error < least:
            best, least = s, error
    return best


def scaled_error(weight: Tensor, s: Tensor, gram: Tensor, scheme: Scheme) -> float:
    """sum |x (W - Q(W s) / s)^T|^2. Some rows at a time where rows share no scale, so that what is made on the way is
    small beside the matrix."""
    apart = scheme.per in ("group", "channel") and scheme.scales != "e4m3"
    pieces = weight.split(ROWS) if apart else (weight,)
    return sum(output_error(piece, rounded(piece * s, scheme) / s, gram) for piece in pieces)


def candidate(mean_abs: Tensor, ratio: float) -> Tensor:
    """mean_abs^ratio, with the largest and the smallest at like distances from 1: the weights keep their size."""
    s = mean_abs.clamp(min=_LEAST) ** ratio
    return s / (s.max() * s.min()).sqrt()


def search_clipping(weight: Tensor, gram: Tensor, scheme: Scheme, clips: int = CLIPS) -> Tensor:
    """The weight with each group's extremes cut to the share, from 1/2 to 1, that gives the least error of the output:
    what is cut is wrong, what is left has finer steps. Chosen for each group and output by itself, from the part of
    gram that the group's inputs have among themselves. Only for scales per group."""
    if scheme.per != "group" or scheme.group_size is None:
        raise ValueError(f"clipping: expected a scheme with scales per group, got per {scheme.per!r}")
    size = scheme.group_size
    out = weight.clone()
    for start in range(0, weight.shape[1], size):
        group = weight[:, start : start + size]
        block = gram[start : start + size, start : start + size]
        reach, least = group.abs().amax(1, keepdim=True), None
        for clip in range(clips):
            cut = reach * (1 - clip / (2 * clips))
            clipped = group.clamp(-cut, cut)
            difference = (group - rounded(clipped, scheme)).to(gram.dtype)
            error = ((difference @ block) * difference).sum(1)
            better = error < least if least is not None else torch.ones_like(error, dtype=torch.bool)
            out[better, start : start + size] = clipped[better]
            least = error if least is None else torch.minimum(least, error)
    return out
