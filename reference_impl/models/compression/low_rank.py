"""A matrix as a product of two thin ones: W [out, in] is about A [out, rank] B [rank, in].

The nearest to W itself is its singular value decomposition, cut (Eckart and Young 1936). What counts is the output over
calibration rows, |x (W - A B)^T|: with x^T x = L L^T that is |(W - A B) L|, so it is W L that is cut, and L is divided
out again (as in SVD-LLM, Wang et al. 2024). Both factors have rank (out + in) numbers: fewer than the matrix only below
out in / (out + in), for a square one a half of its rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

DAMPING = 1e-3  # of the Gram's mean diagonal: so that it has a factor


def factors(weight: Tensor, rank: int, gram: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(A [out, rank], B [rank, in]), float64, of weight [out, in]. gram [in, in]: sum of x^T x, for the nearest output;
    None: for the nearest matrix. Raises ValueError for a rank that the matrix does not have."""
    if not 1 <= rank <= min(weight.shape):
        raise ValueError(f"rank: expected a number from 1 to {min(weight.shape)}, got {rank}")
    weight = weight.double()
    if gram is None:
        u, s, v = torch.linalg.svd(weight, full_matrices=False)
        return u[:, :rank] * s[:rank], v[:rank]
    wide = gram.double().clone()
    wide.diagonal().add_(DAMPING * float(wide.diagonal().mean()))
    factor = torch.linalg.cholesky(wide)
    u, s, v = torch.linalg.svd(weight @ factor, full_matrices=False)
    return u[:, :rank] * s[:rank], torch.linalg.solve_triangular(factor, v[:rank], upper=False, left=False)


def rank_for(out: int, inputs: int, share: float) -> int:
    """The largest rank whose factors have at most this share of the matrix's numbers. ValueError where not even 1."""
    rank = int(share * out * inputs / (out + inputs))
    if rank < 1:
        raise ValueError(f"share: expected at least {(out + inputs) / (out * inputs):.4f}, rank 1, got {share}")
    return rank
