"""Launch a kernel, or record what would be launched.

Every kernel's host function launches through `launch`. Inside `recording(architecture)` nothing runs: the same host
function, called with tensors on torch's "meta" device, says which machine code a GPU would need. So the compile table
holds what is launched, by construction.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from reference_impl.kernels.architectures import ARCHITECTURES, Architecture

_TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float8_e5m2: "fp8e5", torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv", torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1",
}  # fmt: skip

TICKETS = 1 << 16


@dataclass(frozen=True)
class Launch:
    """What decides a kernel's machine code.

    types: those of its run-time arguments, in Triton's notation ("*bf16", "i32"). constants: all other arguments, with
    their values. aligned: names of pointers, and of integers divisible by 16. options: num_warps, num_stages.
    """

    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...]
    options: Mapping[str, int]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__).strip("_")

    @property
    def multiplies(self) -> bool:
        """Whether it multiplies matrices, and so should use the matrix units."""
        return "tl.dot" in self.kernel.src


@dataclass
class _Recording:
    architecture: Architecture
    launches: list[Launch]


_recording: ContextVar[_Recording | None] = ContextVar("recording", default=None)


@contextmanager
def recording(architecture: Architecture) -> Iterator[list[Launch]]:
    """The launches that happen inside, in order; none of them runs."""
    launches: list[Launch] = []
    token = _recording.set(_Recording(architecture, launches))
    try:
        yield launches
    finally:
        _recording.reset(token)


def prepare(device: torch.device | str) -> None:
    """Allocates what kernels need on this GPU and what must not be allocated while a CUDA graph is captured."""
    tickets_of(torch.empty(0, device=device).device)


@functools.cache
def tickets_of(device: torch.device) -> Tensor:
    """[TICKETS] int32, for kernels whose last program to finish combines the results; device has an index.

    Tickets are zero between launches. All launches on a GPU share them: two must not run side by side in two streams.
    Raises RuntimeError if a CUDA graph is being captured and there are none yet.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"expected launch.prepare({str(device)!r}) before a CUDA graph is captured on it")
    return torch.zeros(TICKETS, dtype=torch.int32, device=device)


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1), on the CPU."""
    return bool(triton.knobs.runtime.interpret)


def architecture() -> Architecture:
    """The GPU for which a host function chooses tiles: the current one. Under the interpreter, an H100.

    Raises ValueError for a GPU that is not in the table; the entry of the nearest older one of its kind would fit it.
    """
    recorder = _recording.get()
    if recorder is not None:
        return recorder.architecture
    if is_interpreted():
        return ARCHITECTURES["sm_90"]
    if torch.version.hip:
        name = torch.cuda.get_device_properties().gcnArchName.partition(":")[0]
    else:
        major, minor = torch.cuda.get_device_capability()
        name = f"sm_{10 * major + minor}"
    if name not in ARCHITECTURES:
        raise ValueError(f"expected one of {', '.join(ARCHITECTURES)}, got a GPU of {name}: use the torch backend")
    return ARCHITECTURES[name]


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, options: Mapping[str, int], **constants: Any) -> None:
    """Runs kernel[grid](*arguments, **constants, **options), or records it.

    Raises TypeError for float64, and for bfloat16 under the interpreter, which would silently compute with its bits as
    integers; ValueError for tensors that are not on a GPU otherwise.
    """
    recorder = _recording.get()
    if recorder is not None:
        recorder.launches.append(described(kernel, arguments, constants, options))
        return
    for tensor in arguments:
        if isinstance(tensor, Tensor):
            _check(tensor)
    kernel[grid](*arguments, **constants, **options)


def _check(tensor: Tensor) -> None:
    if tensor.dtype is torch.float64:
        raise TypeError("expected 8 to 32 bits, got float64: kernels add up in float32; the twins compute in float64")
    if is_interpreted():
        if tensor.dtype is torch.bfloat16:
            raise TypeError(
                "Triton's interpreter computes bfloat16 wrongly without saying so: expected float32 or float16, or a "
                "GPU (without TRITON_INTERPRET)"
            )
    elif not tensor.is_cuda:
        raise ValueError(
            f"expected tensors on a GPU, got one on {tensor.device}. Without a GPU, set TRITON_INTERPRET=1 before the "
            "kernel is imported, or use its twin in reference_impl/kernels/reference"
        )


def described(
    kernel: Any, arguments: tuple[Any, ...], constants: Mapping[str, Any], options: Mapping[str, int]
) -> Launch:
    """The launch, specialized as in Triton's own launcher: None and 1 become constants, multiples of 16 are marked."""
    types: dict[str, str] = {}
    fixed, aligned = dict(constants), []
    for parameter, value in zip(kernel.params, arguments, strict=False):
        name = parameter.name
        if isinstance(value, Tensor):
            types[name] = "*" + _TYPES[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                aligned.append(name)
        elif isinstance(value, float):
            types[name] = "fp32"
        elif value is None or (value == 1 and not parameter.do_not_specialize):
            fixed[name] = value
        else:
            types[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                aligned.append(name)
    return Launch(kernel, types, fixed, tuple(aligned), dict(options))
