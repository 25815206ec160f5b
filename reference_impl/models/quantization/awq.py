"""AWQ (Lin et al. 2023): weights whose inputs are large are kept more exactly, by scaling them up before rounding.

y = x W^T = (x / s) (W s)^T. A weight that is multiplied by s is rounded with steps that are finer for it by s, as long
as the largest weight of its group, and with it the scale, stays. The division by s is folded into what computes x
(`folding.py`). Which s is searched: mean|x_j|^ratio, and the same over a mean of the weights that read x_j, as shares
of the largest in their group, to the power 1 - ratio ("duo scaling" of llm-compressor). s = 1, plain rounding, is
tried first, so that the best of all is never worse than it.

The error of a matrix that ends a block, attention or MLP, is that of its own output over the calibration rows,
sum |x (W - Q(W s) / s)^T|^2, from their Gram matrix alone. That of a matrix that begins one is the error of the block's
output, as in the authors' code: how much an error of a query counts, or of a gate, only shows after it
(`one_layer.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from reference_impl.models.quantization.gptq import ROWS, output_error
from reference_impl.models.quantization.scheme import Scheme, decode, encode, fit

RATIOS = 20
CLIPS = 10  # how many shares of a group's reach are tried, down to a half of it
_LEAST = 1e-4


def rounded(weight: Tensor, scheme: Scheme) -> Tensor:
    """What stands for the weight when it is rounded to nearest (RTN): float32 [out, in]."""
    fitted = fit(weight, scheme)
    return decode(encode(weight, scheme, fitted), scheme, fitted)


def search_scales(
    weights: Sequence[Tensor], gram: Tensor, mean_abs: Tensor, scheme: Scheme, ratios: int = RATIOS
) -> Tensor:
    """The s [in] = mean|x|^ratio with which matrices [out, in] that read the same x have the least error of their own
    outputs. gram [in, in]: sum of x^T x; mean_abs [in]: mean of |x|."""
    tried = (candidate(mean_abs, step / ratios) for step in range(ratios))
    return min(tried, key=lambda s: sum(scaled_error(weight, s, gram, scheme) for weight in weights))


def scaled_error(weight: Tensor, s: Tensor, gram: Tensor, scheme: Scheme) -> float:
    """The error sum |x (W - Q(W s) / s)^T|^2."""
    return sum(output_error(weight[rows], stands, gram) for rows, stands in rounded_pieces(weight, s, scheme))


def rounded_pieces(weight: Tensor, s: Tensor, scheme: Scheme) -> Iterator[tuple[slice, Tensor]]:
    """Yields (rows, Q(W s) / s of them). Where rows share no scale it takes some at a time, so that temporary memory is
    small beside the matrix."""
    apart = scheme.per in ("group", "channel") and scheme.scales != "e4m3"
    each = ROWS if apart else len(weight)
    for start in range(0, len(weight), each):
        rows = slice(start, start + each)
        yield rows, rounded(weight[rows] * s, scheme) / s


def mean_share(weight: Tensor, scheme: Scheme) -> Tensor:
    """The mean over outputs of |w|, [in], as a share of the largest that shares a scale with it in its row."""
    size = scheme.group_size if scheme.per == "group" and scheme.group_size else weight.shape[1]
    sums = weight.new_zeros(weight.shape[1])
    for rows in weight.split(ROWS):
        groups = rows.abs().unflatten(1, (-1, size))
        sums += (groups / groups.amax(-1, keepdim=True).clamp(min=_LEAST**2)).flatten(1).sum(0)
    return sums / len(weight)


def candidates(mean_abs: Tensor, shares: Tensor, count: int = RATIOS) -> list[Tensor]:
    """Scales to try, [in] each, 1 first: half of them from the inputs alone, half from both sides. mean_abs: mean of
    |x|; shares: `mean_share` of what reads x."""
    half, least = count // 2, shares.clamp(min=_LEAST)
    ratios = [(step + 1) / half for step in range(half)]
    both = [_of_like_size(mean_abs.clamp(min=_LEAST) ** ratio / least ** (1 - ratio)) for ratio in ratios]
    return [candidate(mean_abs, step / half) for step in range(half)] + both


def candidate(mean_abs: Tensor, ratio: float) -> Tensor:
    """mean_abs^ratio, with the size that `_of_like_size` gives."""
    return _of_like_size(mean_abs.clamp(min=_LEAST) ** ratio)


def _of_like_size(s: Tensor) -> Tensor:
    """The scales with the largest and the smallest at like distances from 1: the weights keep their size."""
    return s / (s.max() * s.min()).sqrt()


def search_clipping(weight: Tensor, gram: Tensor, scheme: Scheme, clips: int = CLIPS) -> Tensor:
    """The weight with each group's extremes cut to the share, from 1/2 to 1, that gives the least error of the output:
    what is cut is wrong, what is left has finer steps. The share is chosen for each group and output by itself, from
    the part of gram that the group's inputs have among themselves. Only for scales per group."""
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
