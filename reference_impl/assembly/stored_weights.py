"""The linear method of each layer of a checkpoint that is quantized already: by config.json's quantization_config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reference_impl.annexes.cpu.default import default_method
from reference_impl.core.decoder import Decoder
from reference_impl.core.linear import Methods
from reference_impl.core.model_config import ModelConfig
from reference_impl.interfaces import LinearMethod
from reference_impl.models.config_json import MOST_BYTES
from reference_impl.models.config_reader import ConfigError
from reference_impl.models.json_file import read_object
from reference_impl.models.loader import weight_files
from reference_impl.models.moe import expert_names
from reference_impl.models.quantization.auto_awq import awq_layouts
from reference_impl.models.quantization.auto_gptq import Gptq, gptq_layouts
from reference_impl.models.quantization.compressed_tensors import compressed_layouts
from reference_impl.models.quantization.config_fields import Fields
from reference_impl.models.quantization.fp8 import Shapes, fp8_layouts
from reference_impl.models.quantization.layouts import Dense, Layout, LayoutOf
from reference_impl.models.quantization.mixed_up import tensor_shapes
from reference_impl.models.quantization.stored import Stored

_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def stored_methods(folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Methods | None:
    """None where config.json says nothing of quantization. ConfigError for a form that is not read."""
    path = folder / "config.json"
    raw = read_object(path, ConfigError, MOST_BYTES).get("quantization_config") if path.is_file() else None
    if not raw:
        return None
    if config.architecture != "Phi3ForCausalLM":
        raw = with_parts(raw)
    shapes = tensor_shapes(weight_files(folder)) if isinstance(raw, dict) and raw.get("quant_method") == "fp8" else {}
    return methods_of_layouts(layouts(raw, str(path), shapes), config, dtype, device)


def with_parts(raw: Any) -> Any:
    """A quantization_config in whose lists of names qkv_proj and gate_up_proj, as vLLM calls what it joins, also stand
    for their parts: in names, and in regular expressions behind re:."""
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
    """The layout of each matrix by its name in the checkpoint. shapes: of its tensors, which FP8 needs. ConfigError for
    what is not read, by name."""
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
    known = "compressed-tensors, fp8, gptq or awq (others need a method: load_model(..., linear_method=...))"
    raise get.error("quant_method", known, method)


def methods_of_layouts(layout_of: LayoutOf, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Methods:
    """A layer none of whose parts is quantized has the method that any model has."""

    def method(name: str) -> LinearMethod:
        prefix = name.rpartition(".")[0]
        found: dict[str, Layout] = {}
        for part in part_names(config, name):
            layout = layout_of(f"{prefix}.{part}" if prefix else part)
            found[part] = Dense() if layout is None else layout
        plain = all(isinstance(layout, Dense) for layout in found.values())
        return default_method(dtype, device) if plain else Stored(found, dtype, device)

    return method


def part_names(config: ModelConfig, name: str) -> tuple[str, ...]:
    """Of a linear layer, by its name in `Linear`: the last words of what the checkpoint has of it."""
    last = name.rpartition(".")[2]
    if config.architecture == "Phi3ForCausalLM":
        return (last,)
    if ".experts." in name:
        gate, up, down = expert_names(config)
        return (gate, up) if last == "gate_up_proj" else (down,)
    return _PARTS.get(last, (last,))


def spare_tensors(model: Decoder) -> dict[str, Callable[[Tensor], object]]:
    """Tensors that a checkpoint may have beside those that the model needs: AutoGPTQ gives each layer a bias."""
    return {
        f"{linear.name.rpartition('.')[0]}.{part}.bias": _zero_bias
        for linear in model.linears()
        if isinstance(linear.method, Stored) and not linear.has_bias
        for part, layout in linear.method.layouts.items()
        if isinstance(layout, Gptq)
    }


def _zero_bias(bias: Tensor) -> None:
    if bool(bias.any()):
        raise ValueError("expected zeros, since this layer has no bias in this architecture, found others")
