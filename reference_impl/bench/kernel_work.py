"""A case of the kernel bench: given tensors, how the result is checked, and what else can compute it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from reference_impl.kernels import reference

Cast = Callable[[Any], Any]
BLOCK_SIZE = 16
INT8, UINT8, FP8 = torch.int8, torch.uint8, torch.float8_e4m3fn


@dataclass(frozen=True)
class Place:
    """The device and dtype of a case. tiny: sizes for the interpreter."""

    device: torch.device
    dtype: torch.dtype
    tiny: bool = False

    def pick(self, real: Any, tiny: Any) -> Any:
        return tiny if self.tiny else real

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Random numbers, the same in every run. They are drawn on the device: there may be billions."""
        return torch.randn(shape, device=self.device, dtype=self.dtype) * scale


@dataclass(frozen=True)
class Peer:
    """Another way to compute it. prepare() gives what is timed; its own work (compilation, a custom layout) is not."""

    prepare: Callable[[], Callable[[], Any]]
    compiles: bool = False  # torch.compile: takes long, and a dry run leaves it out


def tensors(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


def flat(found: Any) -> Tensor:
    return found if isinstance(found, Tensor) else torch.cat([t.flatten() for t in found])


@dataclass
class Work:
    """The work of a case. ours: the kernel. expected: the same with plain torch, from tensors given to `cast`; `part`
    takes from results what is compared.

    given: tensors that must be read once, while the result must be written once; moved: their bytes, where it is not
    so. precision: that of `flops`. cold: flush the L2 before each run, as between two layers of a decoding step.
    """

    ours: Callable[[], Any]
    expected: Callable[[Cast], Any]
    given: tuple[Tensor, ...] = ()
    moved: float | None = None
    flops: float = 0.0
    precision: str = "16 bits"
    cold: bool = False
    part: Callable[[Any], Tensor] = flat
    peers: dict[str, Peer] = field(default_factory=dict)

    def bytes_moved(self, result: Any) -> float:
        return bytes_of(*self.given, *tensors(result)) if self.moved is None else self.moved


@dataclass(frozen=True)
class Goal:
    """A goal from the project's list. unit: "% of limit", "TFLOP/s", or "x PEER": times as fast as that peer."""

    value: float
    unit: str


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[Place], Work]
    goal: Goal | None = None


def as_is(value: Any) -> Any:
    return value


def double(value: Any) -> Any:
    """The value in float64, also in place of a dtype; codes of 8 bits and whole numbers stay."""
    if isinstance(value, torch.dtype):
        return torch.float64
    is_float = isinstance(value, Tensor) and value.is_floating_point() and value.element_size() > 1
    return value.double() if is_float else value


def wrong(work: Work, found: Any) -> str | None:
    """What breaks the error rule: against float64 at most twice the error of plain torch, and 2 eps max |reference|."""
    exact, plain, part = flat(work.expected(double)), flat(work.expected(as_is)), work.part(found)
    if part.shape != plain.shape:
        return f"has the shape {list(part.shape)}, expected {list(plain.shape)}"
    if not exact.is_floating_point():
        differ = int((part != exact).sum())
        return f"differs in {differ} of {exact.numel()} places" if differ else None
    error, allowed = (part.double() - exact).abs().max(), 2 * (plain.double() - exact).abs().max()
    allowed += 2 * torch.finfo(plain.dtype).eps * exact.abs().max()
    return None if bool(error <= allowed) else f"has an error of {float(error):.3g}, allowed {float(allowed):.3g}"


def kernel(name: str, module: str = "") -> Any:
    """A kernel's host function, imported when a case is made: by then it is settled whether kernels are interpreted."""
    return getattr(importlib.import_module(f"reference_impl.kernels.{module or name}"), name)


def twins(name: str, *given: Any, module: str = "", options: dict[str, Any] | None = None, **fields: Any) -> Work:
    """A kernel and the reference of the same name, given the same. fields: the others of `Work`."""
    ours, theirs, named = kernel(name, module), getattr(reference, name), options or {}
    return Work(
        lambda: ours(*given, **named),
        lambda cast: theirs(*map(cast, given), **{key: cast(value) for key, value in named.items()}),
        tuple(value for value in (*given, *named.values()) if isinstance(value, Tensor)), **fields,
    )  # fmt: skip


def bytes_of(*tensors: Tensor) -> float:
    return float(sum(t.numel() * t.element_size() for t in tensors))
