"""torchao's MXTensor and NVFP4Tensor: floats of 4 or 8 bits in groups of 32 or 16 inputs, whose scales are a byte.

    MXTensor       qdata float8 [out, in] or uint8 [out, in / 2]; scale float8_e8m0fnu [out, in / 32]
    NVFP4Tensor    qdata uint8 [out, in / 2]; scale float8_e4m3fn [out, in / 16]; per_tensor_scale float32 [], which
                   multiplies them, if there is one; act_per_tensor_scale float32 [], the same of inputs

Two e2m1 codes lie in a byte, the first in the low bits. Most scales are swizzled, as cuBLAS takes them: padded to tiles
of 128 rows and 4 columns, tile after tile along a row, and in a tile rows r, r + 32, r + 64 and r + 96 side by side.
From torchao 0.18, prototype/mx_formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

import torch
from torch import Tensor

from reference_impl.interfaces import TensorSpec
from reference_impl.models.quantization.layouts import Coded, check_codes, check_scales
from reference_impl.models.quantization.numbers import e8m0_to_scales
from reference_impl.models.quantization.packing import unpack_nibbles
from reference_impl.models.quantization.scheme import Activations, Fitted, Scheme

_TILE_ROWS, _TILE_COLUMNS, _SIDE_BY_SIDE = 128, 4, 4
_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.uint8}


@dataclass(frozen=True)
class TorchAoGroups:
    """A `Layout`. kind: torchao's class. names: of the tensors that there are."""

    kind: Literal["MXTensor", "NVFP4Tensor"]
    numbers: Any
    swizzled: bool
    names: tuple[str, ...]
    activations: Activations | None = None

    @property
    def scheme(self) -> Scheme:
        if self.kind == "MXTensor":
            return Scheme(self.numbers, "group", 32, scales="e8m0", activations=self.activations)
        return Scheme("e2m1", "group", 16, scales="e4m3", activations=self.activations)

    def specs(self, in_features: int, out_features: int) -> dict[str, TensorSpec]:
        rows, groups = self.scheme.scale_shape((out_features, in_features))
        columns = in_features // 2 if self.numbers == "e2m1" else in_features
        if self.swizzled:
            tiles = ceil(groups / _TILE_COLUMNS)
            rows, groups = ceil(rows / _TILE_ROWS) * _TILE_ROWS // _SIDE_BY_SIDE, tiles * _TILE_COLUMNS * _SIDE_BY_SIDE
        scales = torch.float8_e8m0fnu if self.kind == "MXTensor" else torch.float8_e4m3fn
        found = {
            "qdata": TensorSpec((out_features, columns), (_DTYPES[self.numbers],)),
            "scale": TensorSpec((rows, groups), (scales,)),
            "per_tensor_scale": TensorSpec((), (torch.float32,)),
            "act_per_tensor_scale": TensorSpec((), (torch.float32,)),
        }
        return {f"_weight_{name}": found[name] for name in self.names}

    def check(self, name: str, tensor: Tensor) -> None:
        if name.endswith("tensor_scale"):
            check_scales(tensor)
        elif name.endswith("qdata"):
            check_codes(tensor)
        elif self.kind == "MXTensor":
            check_scales(tensor.view(torch.uint8))
        elif wrong := int((tensor.view(torch.uint8) >= 0x7F).sum()):  # 0 is what fills a tile up
            raise ValueError(
                f"expected scales that are finite and not negative, found {wrong} of {tensor.numel()} others: the file "
                "is damaged, or was written by a tool that failed; quantize it again"
            )

    def weight(self, tensors: Mapping[str, Tensor], in_features: int) -> Tensor:
        return self.coded(tensors, in_features).weight()

    def coded(self, tensors: Mapping[str, Tensor], in_features: int) -> Coded:
        codes, scheme = tensors["_weight_qdata"], self.scheme
        shape = scheme.scale_shape((len(codes), in_features))
        scales = tensors["_weight_scale"].view(torch.uint8)
        if self.swizzled:
            scales = unswizzled(scales, *shape)
        if self.kind == "MXTensor":
            return Coded(scheme, self._codes(codes), Fitted(e8m0_to_scales(scales)))
        whole = tensors.get("_weight_per_tensor_scale", torch.ones((), device=codes.device))
        return Coded(scheme, self._codes(codes), Fitted(scales.view(torch.float8_e4m3fn).float(), None, whole))

    def _codes(self, codes: Tensor) -> Tensor:
        return unpack_nibbles(codes) if self.numbers == "e2m1" else codes


def unswizzled(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Scales [rows, columns] out of tiles as cuBLAS takes them, whatever shape they lie in."""
    down, across = ceil(rows / _TILE_ROWS), ceil(columns / _TILE_COLUMNS)
    tiles = scales.reshape(down, across, _TILE_ROWS // _SIDE_BY_SIDE, _SIDE_BY_SIDE, _TILE_COLUMNS)
    whole = tiles.permute(0, 3, 2, 1, 4).reshape(down * _TILE_ROWS, across * _TILE_COLUMNS)
    return whole[:rows, :columns].contiguous()
