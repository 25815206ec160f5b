"""What the kernel bench runs: a kernel on given tensors, how its result is checked, and what else can compute it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Cast = Callable[[Any], Any]


@dataclass(frozen=True)
class Place:
    """Where and in which dtype; tiny: sizes for the interpreter."""

    device: torch.device
    dtype: torch.dtype
    tiny: bool = False

    def pick(self, real: Any, tiny: Any) -> Any:
        return tiny if self.tiny else real

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        """The same numbers in every run. Drawn on the device: there may be billions."""
        return torch.randn(shape, device=self.device, dtype=self.dtype) * scale


@dataclass(frozen=True)
class Peer:
    """prepare() gives what is timed; what it prepares, a compilation or a custom layout, is not."""

    prepare: Callable[[], Callable[[], Any]]
    compiles: bool = False  # torch.compile: takes long, and a dry run leaves it out


@dataclass
class Work:
    """ours: the kernel. part: takes from its result what `expected` computes with plain torch from tensors given to
    `cast`.

    moved: bytes that must be read and written once; precision: that of `flops`. cold: flush the L2 before each run, as
    between two layers of a decoding step. A peer's result is compared with ours in `part`, too.
    """

    ours: Callable[[], Any]
    expected: Callable[[Cast], Tensor]
    moved: float
    flops: float = 0.0
    precision: str = "16 bits"
    cold: bool = False
    part: Callable[[Any], Tensor] = lambda found: found
    peers: dict[str, Peer] = field(default_factory=dict)


def as_is(value: Any) -> Any:
    return value


def double(value: Any) -> Any:
    """float64; codes of 8 bits and whole numbers stay."""
    is_float = isinstance(value, Tensor) and value.is_floating_point() and value.element_size() > 1
    return value.double() if is_float else value


def wrong(work: Work, found: Any) -> str | None:
    """The error rule: against float64 at most twice the error of plain torch, and 2 eps max |reference|."""
    exact, plain, part = work.expected(double), work.expected(as_is), work.part(found)
    if part.shape != plain.shape:
        return f"has the shape {list(part.shape)}, expected {list(plain.shape)}"
    if not exact.is_floating_point():
        return (
            None if torch.equal(part, exact) else f"differs in {int((part != exact).sum())} of {exact.numel()} places"
        )
    error, allowed = (part.double() - exact).abs().max(), 2 * (plain.double() - exact).abs().max()
    allowed += 2 * torch.finfo(plain.dtype).eps * exact.abs().max()
    return None if bool(error <= allowed) else f"has an error of {float(error):.3g}, allowed {float(allowed):.3g}"


def bytes_of(*tensors: Tensor) -> float:
    return float(sum(t.numel() * t.element_size() for t in tensors))
