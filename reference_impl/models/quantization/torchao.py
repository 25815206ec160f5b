"""Tensors of torchao in safetensors (config.json: quant_method "torchao"), as `transformers` writes them.

For a matrix X.weight the files have X._weight_qdata, X._weight_scale and others, and in their headers, under
"X.weight", a JSON object that says what they are: {"_type", "_data": {"block_size", ...}, "_tensor_data_names"}. These
are read:

    Int8Tensor, Float8Tensor    qdata [out, in]: int8, float8; scale, zero_point of blocks of block_size
    IntxUnpackedToInt8Tensor    the same with the codes of 1 to 8 bits in bytes of their own
    Int4Tensor                  qdata int8 [out, in / 2]: two codes -8 to 7 in a byte, the first in the low bits; scale
                                and zero_point float [in / group, out], of which the second is added:
                                weight = code x scale + zero_point

    MXTensor, NVFP4Tensor       see `torchao_mx.py`

The other integers are scale x (code - zero_point). Checkpoints that are pickled (.bin, torchao before 0.14) are not
read, since reading a pickle runs whatever program is in it. From torchao 0.18, prototype/safetensors, and mslk's
int4_row_quantize_zp.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from reference_impl.interfaces import TensorSpec
from reference_impl.models.config_reader import ConfigError
from reference_impl.models.json_file import shown
from reference_impl.models.loader import whole_name
from reference_impl.models.quantization.layouts import Coded, LayoutOf, check_codes, check_scales
from reference_impl.models.quantization.packing import unpack_nibbles
from reference_impl.models.quantization.scheme import Activations, Fitted, Scheme
from reference_impl.models.quantization.torchao_mx import TorchAoGroups

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_NAMES = {
    "Int8Tensor": ("qdata", "scale", "zero_point", "act_quant_scale"),
    "IntxUnpackedToInt8Tensor": ("qdata", "scale", "zero_point"),
    "Float8Tensor": ("qdata", "scale"),
    "Int4Tensor": ("qdata", "scale", "zero_point"),
    "MXTensor": ("qdata", "scale"),
    "NVFP4Tensor": ("qdata", "scale", "per_tensor_scale", "act_per_tensor_scale"),
}
_ELEMENTS = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float4_e2m1fn_x2": "e2m1"}  # of MXTensor
_FLOAT8 = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
_INT8_ASYMMETRIC = Activations("int8", symmetric=False)
_AGAIN = "quantize the model again with torchao to a tensor that is read"

Headers = Mapping[str, dict[str, Any]]  # {name of a tensor in the model: what the files' headers say of it}


@dataclass(frozen=True)
class TorchAo:
    """A `Layout`. kind: torchao's class. block: (outputs, inputs) that share a scale. numbers: of Int8Tensor and
    IntxUnpackedToInt8Tensor int4 or int8 (any other width, too: a byte holds it), else e4m3 or e5m2. names: of the
    tensors that there are."""

    kind: str
    block: tuple[int, int]
    numbers: Any
    names: tuple[str, ...]
    activations: Activations | None = None
    scheme: None = None  # whether zero points are all 0 only the tensors say: see `coded`

    def specs(self, in_features: int, out_features: int) -> dict[str, TensorSpec]:
        rows, columns = self.block
        if out_features % rows or in_features % columns:
            raise ValueError(f"torchao's {self.kind}: expected whole blocks of {rows} x {columns}")
        scales: tuple[int, ...] = (out_features // rows, in_features // columns)
        dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}.get(self.numbers, torch.int8)
        found = {"qdata": TensorSpec((out_features, in_features), (dtype,))}
        if self.kind == "Int4Tensor":
            found["qdata"] = TensorSpec((out_features, ceil(in_features / 2)), (torch.int8, torch.uint8))
            scales = scales[::-1]
        found["scale"] = TensorSpec(scales, _FLOATS)
        found["zero_point"] = TensorSpec(scales, _FLOATS if self.kind == "Int4Tensor" else (torch.int8, *_FLOATS))
        found["act_quant_scale"] = TensorSpec((1, 1), _FLOATS)
        return {f"_weight_{name}": found[name] for name in self.names}

    def check(self, name: str, tensor: Tensor) -> None:
        if name.endswith("scale") and (name != "_weight_scale" or self.numbers in ("e4m3", "e5m2")):
            check_scales(tensor)
        elif name.endswith("qdata"):
            check_codes(tensor)

    def weight(self, tensors: Mapping[str, Tensor], in_features: int) -> Tensor:
        coded = self.coded(tensors, in_features)
        if coded is not None:
            return coded.weight()
        codes, scales, zeros = self._parts(tensors, in_features)
        assert zeros is not None
        scales, zeros = (t.repeat_interleave(in_features // t.shape[1], 1) for t in (scales, zeros.float()))
        if self.kind == "Int4Tensor":
            return codes.float() * scales + zeros
        rows = len(codes) // len(scales)
        return (codes.float() - zeros.repeat_interleave(rows, 0)) * scales.repeat_interleave(rows, 0)

    def coded(self, tensors: Mapping[str, Tensor], in_features: int) -> Coded | None:
        """The codes; None where zero points are floats, and not 0."""
        codes, scales, zeros = self._parts(tensors, in_features)
        if zeros is not None and not bool(zeros.any()):
            zeros = None
        if zeros is not None and zeros.dtype is not torch.int8:
            return None
        rows, columns = self.block
        shape, size = (len(codes), in_features), None
        per: Any = "block"
        if self.block == shape:
            per = "tensor"
        elif rows == 1:
            per, size = ("channel", None) if columns == in_features else ("group", columns)
        scheme = Scheme(
            self.numbers, per, size, zeros is None, activations=self.activations,
            scale_dtype=tensors["_weight_scale"].dtype, block=self.block,
        )  # fmt: skip
        return Coded(scheme, codes, Fitted(scales, zeros))

    def _parts(self, tensors: Mapping[str, Tensor], in_features: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes [out, in], scales float32 and zero points [out / rows, in / columns]."""
        codes, scales = tensors["_weight_qdata"], tensors["_weight_scale"].float()
        zeros = tensors.get("_weight_zero_point")
        if self.kind != "Int4Tensor":
            return codes, scales, zeros
        assert zeros is not None
        nibbles = unpack_nibbles(codes.view(torch.uint8)).to(torch.int8)
        codes = torch.where(nibbles > 7, nibbles - 16, nibbles)[:, :in_features].contiguous()
        return codes, scales.T.contiguous(), zeros.T.contiguous()


def torchao_layouts(folder: Path, files: Sequence[Path]) -> LayoutOf:
    """The layouts of a model's matrices, as the files' headers say. Raises ConfigError for files without such headers,
    and for tensors that are not read, by name."""
    headers = _headers(files)
    if not headers:
        raise ConfigError(
            f"{folder}: config.json says torchao; expected torchao's metadata (tensor_names) in the headers of "
            f"{', '.join(file.name for file in files)}, found none: save the model again with torchao 0.15 and "
            "transformers 5, or later ones"
        )

    def layout_of(name: str) -> TorchAo | TorchAoGroups | None:
        header = headers.get(f"{name}.weight")
        return None if header is None or header.get("_type") == "Tensor" else _layout(header, f"{folder}: {name}")

    return layout_of


def refuse_pickled(folder: Path) -> None:
    """Raises ConfigError where a folder has no safetensors but a pickle."""
    pickled = [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]
    if pickled and not list(folder.glob("*.safetensors")):
        raise ConfigError(
            f"{pickled[0]}: expected torchao's tensors as safetensors, found a pickle, which is not read: reading one "
            "runs whatever program is in it. If you trust who made it, load it with transformers and torchao, and "
            "save_pretrained it again with torchao 0.15 and transformers 5, or later ones: they write safetensors"
        )


def _headers(files: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """The JSON objects of the files' headers that have torchao's form."""
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                metadata = handle.metadata() or {}
        except (SafetensorError, OSError):
            continue  # `store` says what is wrong with it
        if "tensor_names" not in metadata:
            continue
        for name, text in metadata.items():
            try:
                header = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(header, dict) and isinstance(header.get("_type"), str):
                found[whole_name(name)] = header
    return found


def _layout(header: dict[str, Any], where: str) -> TorchAo | TorchAoGroups:
    kind, data, names = header["_type"], header.get("_data"), header.get("_tensor_data_names")
    if kind not in _NAMES:
        raise _error(where, "_type", f"{', '.join(_NAMES)} (others are packed for one kernel: {_AGAIN})", kind)
    if not isinstance(data, dict):
        raise _error(where, "_data", "an object", data)
    if not isinstance(names, list) or "qdata" not in names or "scale" not in names:
        raise _error(where, "_tensor_data_names", "a list of names, with qdata and scale", names)
    if others := [name for name in names if name not in _NAMES[kind]]:
        raise _error(where, "_tensor_data_names", f"some of {', '.join(_NAMES[kind])} ({_AGAIN})", others)
    if kind in ("Int4Tensor", "IntxUnpackedToInt8Tensor") and "zero_point" not in names:
        raise _error(where, "_tensor_data_names", "zero_point among them", names)
    if kind in ("MXTensor", "NVFP4Tensor"):
        return _groups(kind, data, tuple(names), where)
    block = data.get("block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise _error(where, "block_size", "[outputs, inputs] of a block", block)
    if kind == "Int4Tensor" and block[0] != 1:
        raise _error(where, "block_size", "[1, inputs of a group]", block)
    inputs = _activations(kind, data, "act_quant_scale" in names, where)
    return TorchAo(kind, (block[0], block[1]), _numbers(kind, data, where), tuple(names), inputs)


def _groups(kind: Any, data: dict[str, Any], names: tuple[str, ...], where: str) -> TorchAoGroups:
    size, numbers = (32, None) if kind == "MXTensor" else (16, "e2m1")
    if data.get("block_size") != size:
        raise _error(where, "block_size", f"{size} ({_AGAIN})", data.get("block_size"))
    if numbers is None:
        numbers = _element(data.get("elem_dtype"))
        if numbers is None:
            raise _error(where, "elem_dtype", " or ".join(_ELEMENTS), data.get("elem_dtype"))
    swizzled = data.get("is_swizzled_scales", False)
    if not isinstance(swizzled, bool):
        raise _error(where, "is_swizzled_scales", "true or false", swizzled)
    inputs = _inputs_of_groups(kind, data, "act_per_tensor_scale" in names, where)
    return TorchAoGroups(kind, numbers, swizzled, names, inputs)


def _element(found: object) -> str | None:
    name = _data_of(found, "torch.dtype")
    return _ELEMENTS.get(name) if isinstance(name, str) else None


def _inputs_of_groups(kind: str, data: dict[str, Any], static: bool, where: str) -> Activations | None:
    given = data.get("act_quant_kwargs")
    if given is None:
        if static:
            raise _error(where, "act_quant_kwargs", "an object, beside act_per_tensor_scale", given)
        return None
    kwargs = _data_of(given, "QuantizeTensorToMXKwargs" if kind == "MXTensor" else "QuantizeTensorToNVFP4Kwargs")
    if not isinstance(kwargs, dict) or kwargs.get("block_size") != data["block_size"]:
        raise _error(where, "act_quant_kwargs", f"how inputs are quantized, in blocks of {data['block_size']}", given)
    if kind == "MXTensor":
        numbers: Any = _element(kwargs.get("elem_dtype"))
        if numbers not in ("e4m3", "e2m1"):
            raise _error(where, "act_quant_kwargs.elem_dtype", "float8_e4m3fn or float4_e2m1fn_x2", kwargs)
        if _data_of(kwargs.get("scaling_mode"), "ScaleCalculationMode") != "RCEIL":
            raise _error(where, "act_quant_kwargs.scaling_mode", f"RCEIL ({_AGAIN})", kwargs.get("scaling_mode"))
        return Activations(numbers, "group", group_size=32, scales="e8m0", rule="torchao")
    dynamic = kwargs.get("use_dynamic_per_tensor_scale")
    if not isinstance(dynamic, bool) or dynamic == static:
        expected = "true, or false beside act_per_tensor_scale"
        raise _error(where, "act_quant_kwargs.use_dynamic_per_tensor_scale", expected, dynamic)
    return Activations("e2m1", "group", dynamic=dynamic, group_size=16, scales="e4m3", rule="torchao")


def _numbers(kind: str, data: dict[str, Any], where: str) -> Any:
    if kind == "Float8Tensor":
        return "e4m3"
    if kind != "IntxUnpackedToInt8Tensor":
        return {"Int8Tensor": "int8", "Int4Tensor": "int4"}[kind]
    target = _data_of(data.get("target_dtype"), "torch.dtype")
    if target not in [f"int{bits}" for bits in range(1, 9)]:
        raise _error(where, "target_dtype", "torch's int1 to int8", data.get("target_dtype"))
    return "int4" if target == "int4" else "int8"  # fewer bits, too, lie in a byte each


def _activations(kind: str, data: dict[str, Any], static: bool, where: str) -> Activations | None:
    """How inputs are rounded, if they are."""
    if kind == "Int4Tensor":
        found = data.get("activation_dtype")
        if _data_of(found, "torch.dtype") not in (None, "bfloat16", "float16", "float32"):
            raise _error(where, "activation_dtype", f"a float of 16 or 32 bits ({_AGAIN})", found)
        return None
    if kind == "IntxUnpackedToInt8Tensor":
        found = data.get("activation_quantization")
        if found not in (None, "int8_asym_per_token"):
            found = _data_of(found, "IntxUnpackedToInt8TensorActivationQuantization")
            if found not in ("INT8_ASYM_PER_TOKEN", "int8_asym_per_token"):
                raise _error(where, "activation_quantization", "int8_asym_per_token or null", found)
        return None if found is None else _INT8_ASYMMETRIC
    given = data.get("act_quant_kwargs")
    if given is None:
        if static:
            raise _error(where, "act_quant_kwargs", "an object, beside act_quant_scale", given)
        return None
    kwargs = _data_of(given, "QuantizeTensorToFloat8Kwargs" if kind == "Float8Tensor" else "QuantizeTensorToInt8Kwargs")
    if not isinstance(kwargs, dict) or not isinstance(kwargs.get("granularity"), dict):
        raise _error(where, "act_quant_kwargs", "how activations are quantized, or null", given)
    if kwargs.get("reduce_range"):
        raise _error(where, "act_quant_kwargs.reduce_range", f"false ({_AGAIN})", True)
    if kwargs.get("hp_value_lb") is not None or kwargs.get("hp_value_ub") is not None:
        raise _error(where, "act_quant_kwargs", f"no hp_value_lb and hp_value_ub ({_AGAIN})", kwargs)
    per, size = _granularity(kwargs["granularity"], where)
    if kind == "Float8Tensor":
        if _data_of(kwargs.get("float8_dtype"), "torch.dtype") != "float8_e4m3fn":
            raise _error(where, "act_quant_kwargs.float8_dtype", "float8_e4m3fn", kwargs.get("float8_dtype"))
        return Activations("e4m3", per, group_size=size)
    mapping = _data_of(kwargs.get("mapping_type"), "MappingType")
    if per == "group" or mapping not in ("SYMMETRIC", "ASYMMETRIC") or (static and (per, mapping) != _STATIC):
        expected = "PerRow or PerTensor, SYMMETRIC or ASYMMETRIC; static: PerTensor, SYMMETRIC"
        raise _error(where, "act_quant_kwargs", expected, kwargs)
    return Activations("int8", per, dynamic=not static, symmetric=mapping == "SYMMETRIC")


_STATIC = ("tensor", "SYMMETRIC")


def _granularity(found: dict[str, Any], where: str) -> tuple[Any, int | None]:
    kind, data = found.get("_type"), found.get("_data")
    if kind == "PerTensor":
        return "tensor", None
    if isinstance(data, dict) and kind == "PerRow" and data.get("dim", -1) in (-1, 1):
        return "token", None
    block = data.get("block_size") if isinstance(data, dict) and kind == "PerBlock" else None
    if isinstance(block, list) and len(block) == 2 and block[0] == 1 and type(block[1]) is int and block[1] > 0:
        return "group", block[1]
    raise _error(where, "granularity", "PerTensor, PerRow along inputs, or PerBlock of one token", found)


def _data_of(found: object, kind: str) -> Any:
    """The value of {"_type": kind, "_data": value}; None for anything else."""
    return found.get("_data") if isinstance(found, dict) and found.get("_type") == kind else None


def _error(where: str, field: str, expected: str, found: object) -> ConfigError:
    return ConfigError(f"{where}: torchao's metadata, {field}: expected {expected}, found {shown(found)}")
