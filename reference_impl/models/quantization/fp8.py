"""FP8 as Hugging Face, DeepSeek and AutoFP8 write it (config.json: quant_method "fp8"): e4m3 codes with float scales.

    weight                        float8_e4m3fn [out, in]
    weight_scale_inv              a factor, of blocks [out / rows, in / columns] rounded up (Hugging Face, DeepSeek)
    weight_scale                  the same by another name; of one tensor [] or [1], of channels [out] or [out, 1]
    input_scale, activation_scale with activation_scheme "static": [] or [1], what inputs are divided by

config.json says the blocks, and whether inputs have a static scale. Names, and whether a scale is a tensor's or a
channel's, only the tensors themselves say: so their shapes are looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reference_impl.interfaces import TensorSpec
from reference_impl.models.quantization.config_fields import Fields
from reference_impl.models.quantization.layouts import Coded, LayoutOf, check_codes, check_scales
from reference_impl.models.quantization.scheme import Activations, Fitted, Scheme

Shapes = Mapping[str, list[int]]  # {name of a tensor in the checkpoint: its shape}
_SCALES = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e8m0fnu)


@dataclass(frozen=True)
class Fp8:
    """A `Layout`. scale, input_scale: the last words of the tensors' names. flat: whether a scale of a tensor has no
    dimension, and one of channels has one."""

    scheme: Scheme
    scale: str
    flat: bool = False
    input_scale: str = "input_scale"
    flat_input: bool = False

    @property
    def activations(self) -> Activations | None:
        return self.scheme.activations

    def specs(self, in_features: int, out_features: int) -> dict[str, TensorSpec]:
        shape: tuple[int, ...] = self.scheme.scale_shape((out_features, in_features))
        if self.scheme.per == "tensor":
            shape = () if self.flat else (1,)
        elif self.scheme.per == "channel" and self.flat:
            shape = shape[:1]
        found = {
            "weight": TensorSpec((out_features, in_features), (torch.float8_e4m3fn,)),
            self.scale: TensorSpec(shape, _SCALES),
        }
        if self.activations is not None and not self.activations.dynamic:
            found[self.input_scale] = TensorSpec(() if self.flat_input else (1,), _SCALES)
        return found

    def check(self, name: str, tensor: Tensor) -> None:
        if "scale" in name:
            check_scales(tensor)
        elif name == "weight":
            check_codes(tensor)

    def weight(self, tensors: Mapping[str, Tensor], in_features: int) -> Tensor:
        return self.coded(tensors, in_features).weight()

    def coded(self, tensors: Mapping[str, Tensor], in_features: int) -> Coded:
        codes = tensors["weight"]
        scales = tensors[self.scale].float().reshape(self.scheme.scale_shape((len(codes), in_features)))
        return Coded(self.scheme, codes, Fitted(scales))


def fp8_layouts(raw: dict[str, Any], where: str, shapes: Shapes) -> LayoutOf:
    """The layouts of a model's linear layers. shapes: of the checkpoint's tensors. Raises ConfigError for what is not
    read, by name."""
    get = Fields(raw, where)
    static = get.one_of("activation_scheme", ("dynamic", "static")) == "static"
    get.one_of("fmt", ("e4m3",))
    block, field = raw.get("weight_block_size"), "modules_to_not_convert"
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    ):
        raise get.error("weight_block_size", "[outputs, inputs] of a block, or null", block)
    if block is not None and static:
        raise get.error("activation_scheme", "dynamic, since the weights have blocks", "static")
    ignore = [name for one in (field, "ignored_layers") for name in get.names(raw.get(one) or [], one)]
    layout = _layout(block, static, shapes)
    return lambda layer: None if any(n == layer or f".{n}." in f".{layer}." for n in ignore) else layout


def _layout(block: list[int] | None, static: bool, shapes: Shapes) -> Fp8:
    scale = _first(
        shapes, ("weight_scale_inv", "weight_scale"), "weight_scale" if block is None else "weight_scale_inv"
    )
    given = _first(shapes, ("activation_scale", "input_scale"), "input_scale")
    shape, flat_input = shapes.get(scale, [1]), shapes.get(given) == []
    word, given = scale.rpartition(".")[2], given.rpartition(".")[2]
    if block is not None:
        inputs = Activations("e4m3", "group", True, block[1])
        return Fp8(Scheme("e4m3", "block", activations=inputs, block=(block[0], block[1])), word)
    inputs = Activations("e4m3", "tensor", False) if static else Activations("e4m3", "token")
    per: Any = "tensor" if shape in ([], [1]) else "channel"
    return Fp8(
        Scheme("e4m3", per, activations=inputs), word, len(shape) < (1 if per == "tensor" else 2), given, flat_input
    )


def _first(shapes: Shapes, words: tuple[str, ...], default: str) -> str:
    """The first tensor of a layer's whose name ends in one of these words, or the default. If several words occur, it
    is the commonest, so that an error names the layer that has another."""
    found = [name for name in shapes if name.startswith("model.") and name.rpartition(".")[2] in words]
    counts = Counter(name.rpartition(".")[2] for name in found)
    return max(found, key=lambda name: counts[name.rpartition(".")[2]], default=default)
