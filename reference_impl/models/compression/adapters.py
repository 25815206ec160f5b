"""A change of a matrix of few numbers: LoRA (Hu et al. 2022), W + s B A, and DoRA (Liu et al. 2024), which has the
length of each output's row apart from its direction: m (W + s B A) / |W + s B A|.

Both can be merged: the result is one matrix, computed once, so that an adapted model is as fast as the one before. A
merged matrix of 16 bits is rounded; unmerged, several adapters can share W (see theory/adapters.py for its price).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Delta:
    """A matrix's change. a [rank, in], b [out, rank]; scale: alpha / rank. magnitude [out]: DoRA's row lengths; None:
    LoRA."""

    a: Tensor
    b: Tensor
    scale: float = 1.0
    magnitude: Tensor | None = None

    def direction(self, weight: Tensor) -> Tensor:
        """W + s B A, [out, in]."""
        if self.a.shape[0] != self.b.shape[1] or (self.b.shape[0], self.a.shape[1]) != weight.shape:
            raise ValueError(
                f"delta: expected a [rank, {weight.shape[1]}] and b [{weight.shape[0]}, rank], got "
                f"{list(self.a.shape)} and {list(self.b.shape)}"
            )
        return weight + self.scale * (self.b @ self.a)

    def merged(self, weight: Tensor) -> Tensor:
        """The matrix that is multiplied instead of weight, [out, in] in its dtype."""
        whole = self.direction(weight)
        if self.magnitude is None:
            return whole
        return whole * (self.magnitude / whole.norm(dim=1))[:, None]

    def apply(self, weight: Tensor, x: Tensor) -> Tensor:
        """x [rows, in] -> [rows, out] without a merged matrix: two thin products more, and with DoRA a factor for each
        output, which needs the norms of the rows of W + s B A."""
        y = x @ weight.T + self.scale * (x @ self.a.T) @ self.b.T
        return y if self.magnitude is None else y * (self.magnitude / self.direction(weight).norm(dim=1))

    def num_parameters(self) -> int:
        return self.a.numel() + self.b.numel() + (0 if self.magnitude is None else self.magnitude.numel())


def fresh(weight: Tensor, rank: int, scale: float = 1.0, dora: bool = False, seed: int = 0) -> Delta:
    """A delta that changes nothing yet: b is 0, and the magnitudes are those that the rows have."""
    if rank < 1:
        raise ValueError(f"rank: expected at least 1, got {rank}")
    random = torch.Generator().manual_seed(seed)
    a = torch.randn(rank, weight.shape[1], generator=random).to(weight) / rank**0.5
    return Delta(a, weight.new_zeros(weight.shape[0], rank), scale, weight.norm(dim=1) if dora else None)
