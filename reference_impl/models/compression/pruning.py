"""Weights that become 0: the smallest (Han et al. 2015), or those that move the output least (Wanda, Sun et al. 2024).

Wanda's score of W_ij is |W_ij| times the norm of input j over calibration rows, compared within an output's row. What
zeros save depends on where they are. 2:4 (two of each four inputs in a row) has a place of 2 bits for each number kept,
and tensor cores that skip the others. Anywhere at random, a number needs its place beside it, and a product that jumps:
with half of the weights zero, torch's CSR product on a CPU takes several times as long as the dense one, and it is
faster from about nine zeros in ten (measured: bench/README.md). Zeros in a dense matrix save nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor


def magnitude(weight: Tensor) -> Tensor:
    """Scores [out, in]: the magnitudes. The smallest scores are pruned."""
    return weight.abs()


def wanda(weight: Tensor, norms: Tensor) -> Tensor:
    """Scores [out, in]. norms [in]: those of the inputs over all calibration tokens, the root of the Gram's
    diagonal."""
    if norms.shape != weight.shape[1:]:
        raise ValueError(f"wanda: expected norms [{weight.shape[1]}], one an input, got {list(norms.shape)}")
    return weight.abs() * norms


def keep(scores: Tensor, sparsity: float) -> Tensor:
    """What is kept, bool [out, in]: in each row all but the share `sparsity` of least score, rounded down."""
    if not 0 <= sparsity <= 1:
        raise ValueError(f"sparsity: expected a share from 0 to 1, got {sparsity}")
    return _largest(scores, scores.shape[1] - int(sparsity * scores.shape[1]))


def keep_two_of_four(scores: Tensor) -> Tensor:
    """What is kept, bool [out, in]: of each four inputs in a row the two of highest score. ValueError for other
    widths."""
    if scores.shape[1] % 4:
        raise ValueError(f"2:4: expected a multiple of 4 inputs, got {scores.shape[1]}")
    return _largest(scores.unflatten(1, (-1, 4)), 2).flatten(1)


def _largest(scores: Tensor, count: int) -> Tensor:
    """The `count` largest scores of the last dimension, bool like scores."""
    places = scores.topk(count, -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, places, True)


def stored_bits(out: int, inputs: int, sparsity: float, form: str, value_bits: int = 16) -> int:
    """Bits of a matrix. form: "dense"; "2:4", values and 2 bits each; "bitmap", a bit a weight and the values; "csr",
    values, a column of 16 bits each, and where each row begins, 32 bits."""
    kept = out * (inputs - int(sparsity * inputs))
    if form == "2:4":
        return out * inputs // 2 * (value_bits + 2)
    bits = {"dense": out * inputs * value_bits, "bitmap": out * inputs + kept * value_bits,
            "csr": kept * (value_bits + 16) + 32 * (out + 1)}  # fmt: skip
    if form not in bits:
        raise ValueError(f"form: expected 2:4, {', '.join(bits)}, got {form!r}")
    return bits[form]
