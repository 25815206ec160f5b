"""The layout of AutoGPTQ and GPTQModel (config.json: quant_method "gptq"): codes packed along the inputs.

    qweight  int32 [in bits / 32, out]       code of input i from bit i x bits on of a column's words (`packing.py`)
    qzeros   int32 [groups, out bits / 32]   zero points, packed along the outputs
    scales   float [groups, out]
    g_idx    int32 [in]                      the group of each input

    weight[o, i] = scales[g, o] x (code[i, o] - zero[g, o])   with g = g_idx[i]

Codes have no sign. Version 1 of the format ("gptq") stores each zero point less one, modulo 2^bits, as AutoGPTQ's
qlinear_cuda.py reads it; version 2 ("gptq_v2", of GPTQModel) stores it as it is. With act-order (desc_act) columns were
quantized in the order of their Hessian's diagonal, and groups were made of neighbours in that order: g_idx then says
any group for any input. Without it g_idx is in the order of inputs, or, of early writers, all zero, which means that,
too; others leave it out then.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch
from torch import Tensor

from reference_impl.interfaces import TensorSpec
from reference_impl.models.quantization.config_fields import Fields
from reference_impl.models.quantization.layouts import Coded, LayoutOf
from reference_impl.models.quantization.packing import unpack_words
from reference_impl.models.quantization.scheme import Fitted, Scheme

_VERSIONS = {"gptq": 1, "gptq_v2": 2}


@dataclass(frozen=True)
class Gptq:
    """A `Layout`. bits: 2, 3, 4 or 8. group_size: inputs of a group, None: one for all. version: of the format, 1 or
    2. has_g_idx: whether the files say the group of each input; otherwise groups are of neighbours."""

    bits: int
    group_size: int | None
    symmetric: bool
    act_order: bool
    version: int
    has_g_idx: bool = True
    activations: None = None
    scheme: None = None  # with act-order, or a group that is cut short, a matrix has none: see `coded`

    def specs(self, in_features: int, out_features: int) -> dict[str, TensorSpec]:
        each = 32 if self.bits == 3 else 32 // self.bits  # what fills whole words
        if in_features % each or out_features % each:
            raise ValueError(f"gptq of {self.bits} bits: expected inputs and outputs in multiples of {each}")
        groups = ceil(in_features / (self.group_size or in_features))  # the last one may be shorter
        own = {"g_idx": TensorSpec((in_features,), (torch.int32, torch.int64))} if self.has_g_idx else {}
        return {
            "qweight": TensorSpec((in_features * self.bits // 32, out_features), (torch.int32,)),
            "qzeros": TensorSpec((groups, out_features * self.bits // 32), (torch.int32,)),
            "scales": TensorSpec((groups, out_features), (torch.float16, torch.bfloat16, torch.float32)),
        } | own

    def check(self, name: str, tensor: Tensor) -> None:
        if name == "g_idx":
            self._check_groups(tensor)
        middle = 1 << (self.bits - 1)
        if name == "qzeros" and self.symmetric and bool((wrong := self._zeros(tensor)).ne(middle).any()):
            raise ValueError(
                f"expected zero points {middle}, since config.json says sym, found {wrong[wrong != middle][0]}; all of "
                f"them one off: checkpoint_format says the wrong version (it was read as {self.version} of 1, gptq, "
                "and 2, gptq_v2); others: sym should be false"
            )

    def _check_groups(self, g_idx: Tensor) -> None:
        size = self.group_size or len(g_idx)
        groups, in_order = ceil(len(g_idx) / size), torch.arange(len(g_idx), device=g_idx.device) // size
        if bool(((g_idx < 0) | (g_idx >= groups)).any()):
            raise ValueError(
                f"expected groups 0 to {groups - 1}, as group_size {size} of {len(g_idx)} inputs makes them, found "
                f"{int(g_idx.min())} to {int(g_idx.max())}: group_size in config.json is not that of the file"
            )
        if not self.act_order and bool(g_idx.any()) and bool((g_idx != in_order).any()):
            place = int((g_idx != in_order).nonzero()[0])
            raise ValueError(
                f"expected input // {size}, since config.json says desc_act false, found group {int(g_idx[place])} for "
                f"input {place}: set desc_act true if the file was made with act-order, or correct group_size"
            )

    def _groups(self, tensors: Mapping[str, Tensor], in_features: int) -> Tensor:
        """The group of each input, int64 [in]."""
        groups = tensors["g_idx"].long() if self.has_g_idx else None
        if groups is None or (not self.act_order and not bool(groups.any())):
            return torch.arange(in_features, device=tensors["qweight"].device) // (self.group_size or in_features)
        return groups

    def without_g_idx(self) -> Gptq:
        """The layout of a matrix whose files have no g_idx: of neighbours, unless act-order made the groups of others,
        which nothing says then; a single group has all inputs either way."""
        return self if self.act_order and self.group_size is not None else replace(self, has_g_idx=False)

    def _zeros(self, qzeros: Tensor) -> Tensor:
        """Zero points, int32 [groups, out]."""
        most = (1 << self.bits) - 1
        stored = unpack_words(qzeros, self.bits, qzeros.shape[1] * 32 // self.bits)
        return (stored + 1) & most if self.version == 1 else stored

    def weight(self, tensors: Mapping[str, Tensor], in_features: int) -> Tensor:
        groups = self._groups(tensors, in_features)
        codes, zeros, scales = self._parts(tensors, in_features)
        return (codes - zeros[:, groups]).float() * scales[:, groups]

    def coded(self, tensors: Mapping[str, Tensor], in_features: int) -> Coded | None:
        """Codes and zero points with a sign; None where groups are not of neighbours, or not all of one size."""
        size, groups = self.group_size or in_features, self._groups(tensors, in_features)
        in_order = torch.arange(in_features, device=groups.device) // size
        if in_features % size or not torch.equal(groups, in_order):
            return None
        codes, zeros, scales = self._parts(tensors, in_features)
        middle = 1 << (self.bits - 1)
        numbers: Any = f"int{self.bits}"
        scheme = Scheme(numbers, "group", size, self.symmetric, scale_dtype=tensors["scales"].dtype)
        own = None if self.symmetric else (zeros - middle).to(torch.int8).contiguous()
        return Coded(scheme, (codes - middle).to(torch.int8).contiguous(), Fitted(scales.contiguous(), own))

    def _parts(self, tensors: Mapping[str, Tensor], in_features: int) -> tuple[Tensor, Tensor, Tensor]:
        """Codes [out, in] and zero points [out, groups], int32 from 0 on; scales [out, groups] float32."""
        codes = unpack_words(tensors["qweight"].t(), self.bits, in_features)
        return codes, self._zeros(tensors["qzeros"]).t(), tensors["scales"].float().t()


def gptq_layouts(raw: dict[str, Any], where: str) -> LayoutOf:
    """The layouts of a model's linear layers. Raises ConfigError for what is not read, by name."""
    get = Fields(raw, where)
    layout = _layout(get)
    _version(get)
    get.one_of("pack_dtype", ("int32",))
    named, rules = get.raw.get("modules_in_block_to_quantize"), _rules(get, layout)
    if named is not None:
        field = "modules_in_block_to_quantize"
        named = {name for names in get.sequence(field) for name in get.names(names, field)}
    head = get.boolean("lm_head", False)

    def layout_of(name: str) -> Gptq | None:
        if name != "lm_head" and named is not None and not any(name.endswith(f".{one}") for one in named):
            return None
        default = layout if head or name != "lm_head" else None
        return next((other for pattern, other in rules if re.match(pattern, name)), default)

    return layout_of


def _layout(get: Fields) -> Gptq:
    bits = get.one_of("bits", (2, 3, 4, 8), needed=True)
    size = get.size("group_size")
    return Gptq(bits, size, get.boolean("sym", True), get.boolean("desc_act", False), _version(get))


def _version(get: Fields) -> int:
    """The version of the format: config.json may leave it out, and then means the first."""
    names = [name for name in ("checkpoint_format", "format") if get.raw.get(name) is not None]
    if not names:
        return 1
    form = get.raw[names[0]]
    if not isinstance(form, str) or form not in _VERSIONS:
        raise get.error(names[0], "gptq or gptq_v2 (others are of one kernel: convert them)", form)
    return _VERSIONS[form]


def _rules(get: Fields, layout: Gptq) -> list[tuple[str, Gptq | None]]:
    """The rules of GPTQModel's `dynamic`: {"-:" and a regular expression: layers that are not quantized; "+:" and one:
    {bits, group_size, sym, desc_act} of its layers}."""
    rules: list[tuple[str, Gptq | None]] = []
    for pattern, changes in get.mapping("dynamic").items():
        expression = get.expression(pattern.removeprefix("-:").removeprefix("+:"), "dynamic")
        if pattern.startswith("-:"):
            rules.append((expression, None))
            continue
        if not isinstance(changes, dict):
            raise get.error(f"dynamic.{pattern}", "an object", changes)
        other = _layout(Fields(get.raw | changes, get.where))
        rules.append((expression, replace(other, version=layout.version)))
    return rules
