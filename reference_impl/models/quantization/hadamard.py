"""Orthogonal matrices that spread what lies in one coordinate over all of them (QuaRot, Ashkboos et al. 2024).

A Hadamard matrix of order n has entries +-1 / sqrt(n): a vector with one outlier of size m becomes one of entries
m / sqrt(n). Random signs in front of it keep it from meeting a vector that happens to fit it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def hadamard(order: int) -> Tensor:
    """The Hadamard matrix of this order, float64, orthogonal and symmetric (Sylvester's). Raises ValueError unless
    order is a power of 2."""
    if order < 1 or order & (order - 1):
        raise ValueError(f"hadamard: expected a power of 2, got {order}: use random_rotation, which takes any size")
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < order:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / order**0.5


def random_rotation(size: int, seed: int = 0) -> Tensor:
    """An orthogonal matrix [size, size], float64: random signs, then a Hadamard matrix of the largest power of 2 that
    divides size, in each block; blocks are mixed by a random orthogonal matrix where there are several."""
    random = torch.Generator().manual_seed(seed)
    power = size & -size
    signs = torch.randint(0, 2, (size,), generator=random).double() * 2 - 1
    blocks = size // power
    if blocks == 1:
        mixed = torch.ones(1, 1, dtype=torch.float64)
    else:
        mixed = torch.linalg.qr(torch.randn(blocks, blocks, generator=random, dtype=torch.float64))[0]
    return signs[:, None] * torch.kron(mixed.contiguous(), hadamard(power))


def incoherence(matrix: Tensor) -> float:
    """How far the largest entry stands out: max|w| x sqrt(entries) / Frobenius norm. 1 where all are alike."""
    return float(matrix.abs().max() * matrix.numel() ** 0.5 / matrix.norm())
