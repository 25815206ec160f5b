"""What a rank keeps to train a model: weights, gradients, optimizer state, by how data parallelism divides them.

Mixed precision with Adam, 16 bytes per parameter: a 16-bit weight, a 16-bit gradient, and for the optimizer a 32-bit
weight and two 32-bit moments. Activations are not counted. Source: Rajbhandari et al. 2020, ZeRO.
"""

from __future__ import annotations

from typing import NamedTuple


class State(NamedTuple):
    """Bytes of one rank."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


def state(num_params: float, ranks: int, zero: int) -> State:
    """What each of `ranks` data-parallel ranks keeps. zero: 0 divides nothing (DDP), 1 the optimizer's state, 2 also
    gradients, 3 also weights (FSDP; erratum E12.11). ValueError for another stage, or fewer than one rank."""
    if zero not in (0, 1, 2, 3) or ranks < 1:
        raise ValueError(f"expected zero to be 0, 1, 2 or 3 and at least 1 rank, got {zero} and {ranks}")
    parts = zip((2, 2, 12), (3, 2, 1), strict=True)  # bytes per parameter, and the stage from which they are divided
    return State(*(size * num_params / (ranks if zero >= since else 1) for size, since in parts))


def sent_bytes(num_params: float, ranks: int, zero: int) -> float:
    """What a rank sends in a step, in 16 bits round rings. Gradients are reduced and scattered, then gradients or new
    weights are gathered; with zero = 3 weights are gathered twice, for the forward and for the backward pass."""
    return (3 if zero == 3 else 2) * (ranks - 1) / ranks * 2 * num_params
