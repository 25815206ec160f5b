"""The layout of AutoAWQ (config.json: quant_method "awq", version "gemm"): codes packed along the outputs.

    qweight  int32 [in, out / 8]       8 outputs in a word, in the order 0 2 4 6 1 3 5 7 from the lowest 4 bits up
    qzeros   int32 [groups, out / 8]   zero points, in the same order
    scales   float [groups, out]       a group is of inputs side by side

    weight[o, i] = scales[g, o] x (code[i, o] - zero[g, o])   with g = i // group_size

Codes have no sign. The order is one that a kernel for half precision unpacks two at a time (AutoAWQ's
awq/utils/packing_utils.py and awq/modules/linear/gemm.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reference_impl.interfaces import TensorSpec
from reference_impl.models.quantization.config_fields import Fields
from reference_impl.models.quantization.layouts import Coded, LayoutOf
from reference_impl.models.quantization.packing import unpack_words
from reference_impl.models.quantization.scheme import Fitted, Scheme

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output, of eight, in each 4 bits of a word


@dataclass(frozen=True)
class Awq:
    """A `Layout`. group_size: inputs of a group, None: one group for all."""

    group_size: int | None
    activations: None = None

    @property
    def scheme(self) -> Scheme:
        """The scheme, whose int4 have a sign: codes and zero points less 8."""
        per: Any = "channel" if self.group_size is None else "group"
        return Scheme("int4", per, self.group_size, symmetric=False, scale_dtype=torch.float16)

    def specs(self, in_features: int, out_features: int) -> dict[str, TensorSpec]:
        size = self.group_size or in_features
        if in_features % size or out_features % 8:
            raise ValueError(f"awq: expected inputs in multiples of group_size {size}, and outputs of 8")
        return {
            "qweight": TensorSpec((in_features, out_features // 8), (torch.int32,)),
            "qzeros": TensorSpec((in_features // size, out_features // 8), (torch.int32,)),
            "scales": TensorSpec((in_features // size, out_features), (torch.float16, torch.bfloat16, torch.float32)),
        }

    def check(self, name: str, tensor: Tensor) -> None:
        pass

    def weight(self, tensors: Mapping[str, Tensor], in_features: int) -> Tensor:
        return self.coded(tensors, in_features).weight()

    def coded(self, tensors: Mapping[str, Tensor], in_features: int) -> Coded:
        codes, zeros = (unpack_interleaved(tensors[name]).t() - 8 for name in ("qweight", "qzeros"))
        fitted = Fitted(tensors["scales"].float().t().contiguous(), zeros.to(torch.int8).contiguous())
        return Coded(self.scheme, codes.to(torch.int8).contiguous(), fitted)


def unpack_interleaved(words: Tensor) -> Tensor:
    """The codes of words [rows, n] int32, with the outputs in their own order: [rows, 8 n] int32."""
    places = [ORDER.index(output) for output in range(8)]
    return unpack_words(words, 4, 8 * words.shape[1]).unflatten(1, (-1, 8))[..., places].flatten(1)


def awq_layouts(raw: dict[str, Any], where: str) -> LayoutOf:
    """The layouts of a model's linear layers; lm_head is not quantized. ConfigError for what is not read, by name."""
    older = {"bits": raw.get("w_bit"), "group_size": raw.get("q_group_size")}  # AutoAWQ's own names, as vLLM reads them
    get = Fields(older | raw, where)
    get.one_of("bits", (4,), needed=True)
    get.boolean("zero_point", True)  # auto-round writes false of symmetric codes, whose zero points are there, and 8
    for name in ("version", "format", "checkpoint_format"):
        found = raw.get(name)
        if found is not None and str(found).lower() != "gemm":
            raise get.error(name, "gemm (others pack in the order of one kernel: convert them)", found)
    layout, skipped = Awq(get.size("group_size")), get.raw.get("modules_to_not_convert") or []
    skipped = get.names(skipped, "modules_to_not_convert")
    return lambda name: None if name == "lm_head" or any(one in name for one in skipped) else layout
