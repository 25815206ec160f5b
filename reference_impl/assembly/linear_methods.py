"""Chooses a model's LinearMethod by how its weights are stored, its dtype, its device and its kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeGuard, get_args

import torch
import torch.nn.functional as F

from reference_impl.core.decoder import Head
from reference_impl.core.linear import Methods, UnquantizedLinear
from reference_impl.core.model_config import ModelConfig
from reference_impl.features.cpu.default import default_method
from reference_impl.features.cpu.half import SlowHalfLinear, slow_half_linear
from reference_impl.features.cpu.operators import HeadCopy, PackedIfLarge, PackedLinear, is_large, pays
from reference_impl.features.fusion.kernels import Kernels
from reference_impl.interfaces import LinearMethod
from reference_impl.kernels import reference

if TYPE_CHECKING:
    from reference_impl.models.quantization.stored import Stored

PLAIN = (UnquantizedLinear, PackedLinear, PackedIfLarge, SlowHalfLinear)  # whose weights are not quantized
Quantization = Literal["none", "fp8", "int8", "int4"]
Quantizations = Quantization | Callable[[str], Quantization]  # of all linear layers, or from a layer's name


def choose_method(
    quantization: Quantization, dtype: torch.dtype, device: torch.device, kernels: Kernels
) -> LinearMethod:
    """The method for this quantization. ValueError, which says what to do instead, where the machine has none.

    A CPU has fast products for int4 and int8. For fp8 it has the kernel's twin in torch, which shows on any machine
    what FP8 does to a model's answers, at a small part of the speed of 16 bits; a GPU without Triton has the twins of
    all three.
    """
    if quantization not in get_args(Quantization):
        raise ValueError(f"quantization: expected one of {', '.join(get_args(Quantization))}, got {quantization!r}")
    if kernels.backend == "triton":
        return _with_triton(quantization, dtype, device)
    if quantization == "none":
        return default_method(dtype, device)
    from reference_impl.models.quantization.cpu import CpuInt4, CpuInt8
    from reference_impl.models.quantization.methods import Fp8, Int4, Int8

    on_cpu = device.type == "cpu"
    if quantization == "int4":
        return CpuInt4(dtype) if on_cpu else Int4(dtype, device, reference.gemm_w4a16)
    if quantization == "int8":
        return CpuInt8(dtype) if on_cpu else Int8(dtype, device, reference.gemm_w8a16)
    return Fp8(dtype, device, reference.quantize_rows_fp8, reference.gemm_fp8)


def choose_methods(
    quantization: Quantizations, dtype: torch.dtype, device: torch.device, kernels: Kernels
) -> LinearMethod | Methods:
    """One method for all layers or, where quantization is a function of a layer's name, one for each of its answers."""
    if not callable(quantization):
        return choose_method(quantization, dtype, device, kernels)
    kind_of, method_of = quantization, functools.cache(lambda kind: choose_method(kind, dtype, device, kernels))
    return lambda name: method_of(kind_of(name))


def what_is_made(quantization: Quantizations, config: ModelConfig) -> str:
    """What quantization makes of the weights, in a word; "" for "none". For a function: its answers, layer by layer."""
    if not callable(quantization):
        return "" if quantization == "none" else quantization
    from reference_impl.models.moe import expert_layers

    sparse = config.experts.layers if config.experts is not None else ()
    names = [
        f"model.layers.{i}.{name}"
        for i in range(config.num_layers)
        for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
        if not (i in sparse and name.startswith("mlp"))
    ]
    return " ".join(quantization(name) for name in (*names, *expert_layers(config), "lm_head"))


def is_stored(method: LinearMethod) -> TypeGuard[Stored]:
    """Whether a method keeps weights as a quantized checkpoint has them."""
    if isinstance(method, PLAIN):
        return False
    from reference_impl.models.quantization.stored import Stored

    return isinstance(method, Stored)


def choose_head(method: LinearMethod, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Head:
    """The product with lm_head of a model whose linear layers have this method; where each has its own, method is the
    one of the name "lm_head".

    On a CPU in bfloat16 a copy of lm_head is packed, which halves the time of a product that is a third of a small
    model's step; in float32 only a large one is. The copy takes as much memory as lm_head.
    With int4 a tied lm_head is copied in 4 bits, while the embedding keeps its 16 bits for looking up: a sixth of the
    time, for 1 to 2 % more perplexity of the course model. An untied one stays in 16 bits, and so does any other.
    """
    if config.tied_embeddings and not isinstance(method, PLAIN):
        from reference_impl.models.quantization.cpu import CpuInt4

        if isinstance(method, CpuInt4):
            return HeadCopy(method)
    if device.type == "cpu" and dtype is torch.bfloat16 and pays(dtype):
        return HeadCopy(PackedLinear(dtype))
    large = is_large((config.vocab_size, config.hidden_size))
    if device.type == "cpu" and dtype is torch.float32 and large and pays(dtype, large=True):
        return HeadCopy(PackedLinear(dtype))
    if device.type == "cpu" and dtype.itemsize == 2:
        return slow_half_linear
    return F.linear


def _with_triton(quantization: Quantization, dtype: torch.dtype, device: torch.device) -> LinearMethod:
    from reference_impl.features.fusion.linear import TritonFp8, TritonInt4, TritonInt8, TritonLinear
    from reference_impl.kernels import gemm_fp8, gemm_w4a16, gemm_w8a16
    from reference_impl.kernels.launch import architecture
    from reference_impl.kernels.quantize_rows import quantize_rows_fp8

    if quantization == "none":
        return TritonLinear(dtype, device)
    if quantization == "fp8":
        gpu = architecture()
        if not gpu.has_fp8:
            raise ValueError(
                f"quantization 'fp8': expected a GPU that multiplies 8-bit floats (Ada, Hopper or later), got "
                f"{gpu.name}: use quantization='int8', which takes as little memory"
            )
        return TritonFp8(dtype, device, quantize_rows_fp8, gemm_fp8.gemm_fp8)
    if dtype.itemsize != 2:
        raise ValueError(
            f"quantization {quantization!r} with Triton's kernels: expected a model in float16 or bfloat16, got "
            f"{dtype}: pass dtype='bfloat16'"
        )
    if quantization == "int4":
        return TritonInt4(dtype, device, gemm_w4a16.gemm_w4a16)
    return TritonInt8(dtype, device, gemm_w8a16.gemm_w8a16)


def methods_of(given: LinearMethod | Methods) -> Methods:
    """A function from a layer's name to its method, for one method for all layers or such a function. TypeError for
    anything else; if a function gives it, the error names the layer."""
    expected = "expected a LinearMethod (create, load, finish, apply)"
    if isinstance(given, type):
        raise TypeError(f"linear_method: {expected}, got the class {given.__name__}: make one of it")
    if isinstance(given, LinearMethod):
        return lambda name: given
    if not callable(given):
        raise TypeError(f"linear_method: {expected}, or a function from a layer's name to one, got {given!r}")

    def ask(name: str) -> LinearMethod:
        method = given(name)
        if isinstance(method, type):
            raise TypeError(f"linear_method({name!r}): {expected}, got the class {method.__name__}: make one of it")
        if not isinstance(method, LinearMethod):
            raise TypeError(f"linear_method({name!r}): {expected}, got {method!r}")
        return method

    return ask
