"""Training with rounded weights (quantization-aware training): the straight-through estimator (Bengio et al. 2013).

Rounding has derivative 0 almost everywhere, so nothing could be learned through it. Going forward the weight is what
its codes stand for; going backward rounding is taken for the identity. The weights themselves stay exact and move in
small steps; a code changes when one has moved far enough. Scales are fitted anew each time, from the weights as they
are. Afterwards rounding to nearest gives the very numbers that training has seen.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from reference_impl.models.quantization.scheme import Scheme, decode, encode, fit


def straight_through(weight: Tensor, scheme: Scheme) -> Tensor:
    """The weight rounded to nearest, with the gradient of weight itself: [out, in] in its dtype."""
    with torch.no_grad():
        fitted = fit(weight, scheme)
        rounded = decode(encode(weight, scheme, fitted), scheme, fitted).to(weight.dtype)
    return _Through.apply(weight, rounded)


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, weight: Tensor, rounded: Tensor) -> Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Rounded(nn.Module):
    """Rounds for `torch.nn.utils.parametrize`: a module computes with the rounded weight and learns the exact one."""

    def __init__(self, scheme: Scheme):
        super().__init__()
        self.scheme = scheme

    def forward(self, weight: Tensor) -> Tensor:
        return straight_through(weight, self.scheme)
