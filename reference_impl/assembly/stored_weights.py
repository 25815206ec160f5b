"""The linear method of each layer of a checkpoint that is quantized already: by config.json's quantization_config.

What it is multiplied with, in the order of preference; the first that holds the stored weights exactly, layer by layer:

    GPU with Triton     the kernel for the format; decoded once
    CPU, 16-bit model   torch's product for int4 or int8; decoded once
    CPU, float32        decoded once; torch's product for int4, which rounds x to bfloat16; int8 copied in float32
    CPU, float64; other GPUs    decoded once

"Decoded once" is a plain layer in the model's dtype. It is left out where such a model would take more than half of the
memory that is free. What remains is decoded anew for each product: right, and many times slower. `paths_of` says which.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reference_impl.core.decoder import Decoder
from reference_impl.core.linear import Methods
from reference_impl.core.model_config import ModelConfig
from reference_impl.features.cpu.default import default_method
from reference_impl.features.fusion.kernels import Kernels
from reference_impl.interfaces import LinearMethod
from reference_impl.models.checkpoints import quantization_of
from reference_impl.models.loader import CACHE_SCALES, is_decoder_alone, weight_files
from reference_impl.models.moe import expert_names
from reference_impl.models.quantization.auto_awq import awq_layouts
from reference_impl.models.quantization.auto_gptq import Gptq, gptq_layouts
from reference_impl.models.quantization.compressed_tensors import compressed_layouts
from reference_impl.models.quantization.config_fields import Fields
from reference_impl.models.quantization.converted import PER_PRODUCT, Converted, Decoded
from reference_impl.models.quantization.converted import Path as Form
from reference_impl.models.quantization.fp8 import Shapes, fp8_layouts
from reference_impl.models.quantization.head import all_linears
from reference_impl.models.quantization.layouts import Dense, Layout, LayoutOf, OfAnyGroups
from reference_impl.models.quantization.mixed_up import stored_head, tensor_shapes
from reference_impl.models.quantization.paths import (
    CpuEightBits,
    CpuFourBits,
    EightBitIntegers,
    EightBitsBothSides,
    FourBitFloats,
    FourBitIntegers,
    Fp8Blocks,
)
from reference_impl.models.quantization.stored import Stored
from reference_impl.models.quantization.torchao import refuse_pickled, torchao_layouts
from reference_impl.models.sizes import least_weights

logger = logging.getLogger("inferlab.engine")
_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def stored_methods(
    folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, kernels: Kernels,
    free: int | None = None,
) -> Methods | None:  # fmt: skip
    """The methods of a checkpoint's layers by its quantization_config; None where config.json has none. ConfigError for
    a form that is not read.

    free: bytes of memory; None: enough.
    """
    raw = quantization_of(folder)
    if not raw:
        return None
    if config.architecture != "Phi3ForCausalLM":
        raw = with_parts(raw)
    return methods_of_layouts(_layouts(raw, folder / "config.json"), config, dtype, device, kernels, free)


def _layouts(raw: Any, path: Path) -> LayoutOf:
    """`layouts`, completed by what only the headers of the files beside config.json say."""
    folder, method = path.parent, raw.get("quant_method") if isinstance(raw, dict) else None
    if method == "torchao":
        refuse_pickled(folder)
        return torchao_layouts(folder, weight_files(folder))
    headers = functools.cache(lambda: tensor_shapes(weight_files(folder)))
    layout_of = layouts(raw, str(path), headers() if method == "fp8" else {})
    unused = {name.partition(".self_attn.")[2] for name in headers()} & CACHE_SCALES
    if isinstance(raw, dict) and raw.get("kv_cache_scheme") is not None:
        unused |= {"kv_cache_scheme"}
    if unused:
        logger.warning(
            "%s: %s: scales of attention that come with a checkpoint are not used: queries and probabilities are not "
            "rounded, and kv_dtype='fp8' keeps the cache in 8 bits, with a scale for each head of each token",
            folder, ", ".join(sorted(unused)),
        )  # fmt: skip
    alone = is_decoder_alone(folder)

    def of_file(name: str) -> Layout | None:
        """The layout of a matrix in the files. Act-order "group" says nothing by itself: where later versions leave out
        g_idx, groups are in order; so are GPTQ's without act-order. A decoder alone may have names without `model.`,
        and so may its config, each for itself."""
        layout = layout_of(name)
        if alone and layout is not None:
            layout = layout_of(name.removeprefix("model."))
        if isinstance(layout, OfAnyGroups) and f"{name}.weight_g_idx" not in headers():
            return layout.base
        if isinstance(layout, Gptq) and f"{name}.g_idx" not in headers():
            return layout.without_g_idx()
        return layout

    # Some configs do not mention lm_head and mean that it is not quantized: so its tensors are looked at.
    plain_head = layout_of("lm_head") is not None and not stored_head(weight_files(folder))
    return lambda name: None if name == "lm_head" and plain_head else of_file(name)


def embedding_layout(folder: Path) -> Layout | None:
    """The layout of model.embed_tokens if it comes quantized, which torchao's headers say by name; otherwise None."""
    raw = quantization_of(folder)
    if not isinstance(raw, dict) or raw.get("quant_method") != "torchao":
        return None
    return torchao_layouts(folder, weight_files(folder))("model.embed_tokens")


def with_parts(raw: Any) -> Any:
    """A quantization_config in whose lists qkv_proj and gate_up_proj, vLLM's names for joined layers, also stand for
    their parts: in names, and in regular expressions behind re:."""
    if isinstance(raw, dict):
        return {key: with_parts(value) for key, value in raw.items()}
    if not isinstance(raw, list):
        return raw
    found: list[Any] = []
    for one in raw:
        joined = next((j for j in _PARTS if isinstance(one, str) and j in one), None)
        if joined is None:
            found.append(with_parts(one))
        elif one.startswith("re:"):
            found.append(one.replace(joined, f"(?:{'|'.join((joined, *_PARTS[joined]))})"))
        else:
            found += [one, *(one.replace(joined, part) for part in _PARTS[joined])]
    return found


def layouts(raw: Any, where: str, shapes: Shapes | None = None) -> LayoutOf:
    """A function from a matrix's name in the checkpoint to its layout. shapes: those of the checkpoint's tensors, which
    FP8 needs. ConfigError, with the field's name, for what is not read."""
    get = Fields(raw if isinstance(raw, dict) else {}, where)
    if not isinstance(raw, dict):
        raise get.error("", "an object", raw)
    method = raw.get("quant_method")
    if method == "gptq":
        return gptq_layouts(raw, where)
    if method == "awq":
        return awq_layouts(raw, where)
    if method == "fp8":
        return fp8_layouts(raw, where, shapes or {})
    if method == "compressed-tensors":
        return compressed_layouts(raw, where)
    known = "compressed-tensors, fp8, gptq, awq or torchao (others need a method: load_model(..., linear_method=...))"
    if method in ("auto-round", "intel/auto-round"):
        known += "; auto-round writes them with format='auto_gptq', 'auto_awq' or 'llm_compressor'"
    raise get.error("quant_method", known, method)


def methods_of_layouts(
    layout_of: LayoutOf, config: ModelConfig, dtype: torch.dtype, device: torch.device, kernels: Kernels,
    free: int | None = None,
) -> Methods:  # fmt: skip
    """The method of each layer, by the layouts of its parts. A layer without a quantized part has the method that any
    model has. free: see `stored_methods`."""
    fits = free is None or decoded_bytes(config, dtype) <= free // 2

    def method(name: str) -> LinearMethod:
        prefix = name.rpartition(".")[0]
        found: dict[str, Layout] = {}
        for part in part_names(config, name):
            layout = layout_of(f"{prefix}.{part}" if prefix else part)
            found[part] = Dense() if layout is None else layout
        if all(isinstance(layout, Dense) for layout in found.values()):
            return _plain(dtype, device, kernels)
        if kernels.backend == "triton":
            return _with_triton(found, dtype, device, kernels, fits)
        return Converted(found, dtype, device, paths=_forms_of_torch(dtype, device, kernels, fits))

    return method


def decoded_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """The bytes that the matrices of all layers take in dtype."""
    return least_weights(config)[1] * dtype.itemsize


def paths_of(model: object) -> Counter[str]:
    """How many of a model's linear layers whose weights came quantized are multiplied in which way: {way: number}.
    Empty for a model that computes in another process, since none of its layers are here."""
    found: Counter[str] = Counter()
    for linear in all_linears(model) if isinstance(model, Decoder) else ():
        if isinstance(linear.method, Stored):
            form = linear.method.path(linear.params) if isinstance(linear.method, Converted) else None
            found[PER_PRODUCT if form is None else form.name] += 1
    return found


def _plain(dtype: torch.dtype, device: torch.device, kernels: Kernels) -> LinearMethod:
    if kernels.backend == "triton":
        from reference_impl.features.fusion.linear import TritonLinear

        return TritonLinear(dtype, device)
    return default_method(dtype, device)


def _forms_of_torch(dtype: torch.dtype, device: torch.device, kernels: Kernels, fits: bool) -> Sequence[Form]:
    decoded: list[Form] = [Decoded(_plain(dtype, device, kernels))] if fits else []
    if device.type != "cpu" or dtype is torch.float64:
        return decoded
    packed: list[Form] = [CpuFourBits(dtype), CpuEightBits(dtype)]
    return packed + decoded if dtype.itemsize == 2 else decoded + packed


def _with_triton(
    layouts: dict[str, Layout], dtype: torch.dtype, device: torch.device, kernels: Kernels, fits: bool
) -> Converted:
    from reference_impl.features.fusion.linear import TritonStoredInt4
    from reference_impl.kernels import gemm_fp4, gemm_fp8, gemm_fp8_blocks, gemm_w4a16, gemm_w8a8, gemm_w8a16
    from reference_impl.kernels.launch import architecture
    from reference_impl.kernels.quantize_rows import quantize_groups_fp8, quantize_rows_fp8, quantize_rows_int8

    four_bits = FourBitIntegers(gemm_w4a16.gemm_w4a16)
    if dtype.itemsize == 2 and _fits_one_launch(layouts):
        return TritonStoredInt4(layouts, dtype, device, paths=[four_bits])
    forms: list[Form] = [
        four_bits,
        EightBitIntegers(gemm_w8a16.gemm_w8a16),
        EightBitsBothSides("int8", quantize_rows_int8, gemm_w8a8.gemm_w8a8),
        FourBitFloats(gemm_fp4.gemm_fp4),
    ]
    if architecture().has_fp8:
        forms.append(EightBitsBothSides("e4m3", quantize_rows_fp8, gemm_fp8.gemm_fp8))
        forms.append(Fp8Blocks(quantize_groups_fp8, gemm_fp8_blocks.gemm_fp8_blocks))
    if fits:
        forms.append(Decoded(_plain(dtype, device, kernels)))
    return Converted(layouts, dtype, device, paths=forms)


def _fits_one_launch(layouts: dict[str, Layout]) -> bool:
    """Whether all parts have one scheme that one launch can multiply: int4 in groups of a multiple of 32 inputs."""
    first, *others = (layout.scheme for layout in layouts.values())
    if first is None or any(other != first for other in others):
        return False
    in_groups = first.per == "group" and (first.group_size or 1) % 32 == 0
    return first.numbers == "int4" and in_groups and first.activations is None


def part_names(config: ModelConfig, name: str) -> tuple[str, ...]:
    """The names of a linear layer's parts in the checkpoint, their last words only. name: see `Linear`."""
    last = name.rpartition(".")[2]
    if config.architecture == "Phi3ForCausalLM":
        return (last,)
    if ".experts." in name:
        gate, up, down = expert_names(config)
        return (gate, up) if last == "gate_up_proj" else (down,)
    return _PARTS.get(last, (last,))


def spare_tensors(model: Decoder) -> dict[str, Callable[[Tensor], object]]:
    """Tensors that a checkpoint may have besides those that the model needs, {name: check}: AutoGPTQ gives each layer a
    bias."""
    return {
        f"{linear.name.rpartition('.')[0]}.{part}.bias".lstrip("."): _zero_bias
        for linear in all_linears(model)
        if isinstance(linear.method, Stored) and not linear.has_bias
        for part, layout in linear.method.layouts.items()
        if isinstance(layout, Gptq)
    }


def _zero_bias(bias: Tensor) -> None:
    if bool(bias.any()):
        raise ValueError("expected zeros, since this layer has no bias in this architecture, found others")
