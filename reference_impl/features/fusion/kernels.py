"""Which code computes attention and the small operations of a layer: our Triton kernels, or torch, which runs anywhere.

It is chosen when a model or an engine is built, by the device and the dtype. Nothing falls back while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor

from reference_impl.interfaces import AttendsToCache, AttentionBackend
from reference_impl.kernels import reference
from reference_impl.kernels.reference import Activation

Asked = Literal["auto", "triton", "torch", "compiled"]
Backend = Literal["triton", "torch"]
Norm = Callable[[Tensor, Tensor | None, float], Tensor]


@dataclass(frozen=True)
class Kernels:
    """The small operations of a layer; kernels/reference/ says what they compute.

    rotate_and_write: None where attention gets rotated queries and keys, and writes the cache itself.
    grouped_gemm: None where every expert of a mixture has linear layers of its own.
    """

    backend: Backend
    rms_norm: Norm
    add_rms_norm: Callable[[Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]
    gates: Mapping[Activation, Callable[[Tensor], Tensor]]
    rotate_and_write: Callable[..., Tensor] | None = None
    grouped_gemm: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    def with_norm(self, norm: Norm) -> Kernels:
        """The same kernels with another norm."""

        def add_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
            total = x + residual
            return norm(total, weight, eps), total

        return replace(self, rms_norm=norm, add_rms_norm=add_norm)


TORCH = Kernels("torch", reference.rms_norm, reference.add_rms_norm, reference.GATES)


def writes_and_attends(
    kernels: Kernels, attention: AttentionBackend
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]] | None:
    """(rotate_and_write, attend) if there is such a kernel and a backend that finds keys in the cache; else None."""
    # By its class: this is asked in every layer.
    if kernels.rotate_and_write is None or not issubclass(type(attention), AttendsToCache):
        return None
    return kernels.rotate_and_write, cast(AttendsToCache, attention).attend


def choose_kernels(asked: Asked, device: torch.device, dtype: torch.dtype) -> Kernels:
    """The kernels of the backend that `choose_backend` chooses; errors: see there."""
    if choose_backend(asked, device, dtype) == "torch":
        return TORCH
    return triton_kernels()


def triton_kernels() -> Kernels:
    """Our Triton kernels. ImportError where there is no Triton."""
    from reference_impl.kernels import gates, grouped_gemm, rotate_and_write
    from reference_impl.kernels import rms_norm as norms

    return Kernels(
        "triton",
        norms.rms_norm,
        norms.add_rms_norm,
        {"silu": gates.silu_and_mul, "gelu_tanh": gates.gelu_tanh_and_mul},
        rotate_and_write.rotate_and_write,
        grouped_gemm.grouped_gemm,
    )


def choose_backend(asked: Asked, device: torch.device, dtype: torch.dtype) -> Backend:
    """The backend for what was asked. "auto": Triton on a GPU that its kernels support, torch elsewhere. "compiled":
    torch on a CPU, whose layers are compiled beside it (features/compiled). ValueError where "triton" or "compiled" is
    not possible."""
    if asked == "compiled" and device.type != "cpu":
        raise ValueError(f"attention='compiled' is for a CPU, and the model is on {device}: use attention='auto'")
    if asked == "compiled":
        return "torch"
    if asked == "torch" or (asked == "auto" and device.type != "cuda"):
        return "torch"
    reason = _why_not_triton(device, dtype, interpreted_will_do=asked == "triton")
    if reason is None:
        return "triton"
    if asked == "triton":
        raise ValueError(f"attention='triton' cannot be: {reason}. Use attention='torch', or 'auto'")
    return "torch"


def _why_not_triton(device: torch.device, dtype: torch.dtype, interpreted_will_do: bool) -> str | None:
    """Why Triton's kernels cannot be used; None: they can. interpreted_will_do: accept Triton's interpreter, which runs
    kernels on any machine, a thousand times as slowly as torch."""
    try:
        from reference_impl.kernels import launch
    except ImportError as error:
        return f"there is no Triton here ({error})"
    known = [torch.float32, torch.float16]
    if launch.is_interpreted():
        if not interpreted_will_do:
            return "TRITON_INTERPRET is set"
    elif device.type != "cuda":
        return f"the model is on {device}, not on a GPU, and TRITON_INTERPRET=1 was not set when the process began"
    else:
        try:
            gpu = launch.architecture()
        except ValueError as error:
            return str(error)
        if not gpu.has_matrix:
            return f"Triton does not use the matrix units of {gpu.name}"
        known += [torch.bfloat16] * gpu.has_bf16
    if dtype not in known:
        names = ", ".join(str(d).removeprefix("torch.") for d in known)
        return f"the kernels compute {names} here, and this model is {str(dtype).removeprefix('torch.')}"
    return None
