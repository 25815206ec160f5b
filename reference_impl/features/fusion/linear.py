"""Linear layers beside our Triton kernels: cuBLAS for many tokens, for few one kernel with the product's neighbours."""

from __future__ import annotations

from typing import Unpack

import torch.nn.functional as F
from torch import Tensor

from reference_impl.features.cpu.by_rows import WeightByRows
from reference_impl.features.fusion.fusion import Neighbours
from reference_impl.kernels.fused_linear import fused_linear
from reference_impl.kernels.fused_linear_w4a16 import fused_linear_w4a16
from reference_impl.kernels.gemm import FEW_TOKENS
from reference_impl.models.quantization.converted import Converted
from reference_impl.models.quantization.methods import Fp8, Int4, Int8


class TritonLinear(WeightByRows):
    """y = x W^T + b with W [out_features, in_features], as checkpoints store it: cuBLAS reads either layout equally
    fast, and our kernels want rows of a weight to lie side by side."""

    few_tokens = FEW_TOKENS  # up to here `fused` may stand for `apply` and its neighbours

    def apply(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        return F.linear(x, params["weight"], params.get("bias"))

    def fused(self, params: dict[str, Tensor], x: Tensor, **neighbours: Unpack[Neighbours]) -> Tensor:
        return fused_linear(x, params["weight"], params.get("bias"), **neighbours)


class _EightBits:
    few_tokens = FEW_TOKENS

    def fused(self, params: dict[str, Tensor], x: Tensor, **neighbours: Unpack[Neighbours]) -> Tensor:
        scales = params["scales"].view(-1)
        return fused_linear(x, params["weight"], params.get("bias"), weight_scale=scales, **neighbours)


class TritonFp8(_EightBits, Fp8):
    """FP8 that rounds activations only for many tokens. For few they stay in 16 bits, fused with neighbours or not: a
    clock decides what is fused, and must change nothing but the time."""

    def apply(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        return self.fused(params, x) if len(x) <= self.few_tokens else super().apply(params, x)


class TritonInt8(_EightBits, Int8):
    """The method int8, for few tokens in one launch with the neighbours."""


class TritonInt4(Int4):
    """The method int4, for few tokens in one launch with the neighbours."""

    few_tokens = FEW_TOKENS

    def fused(self, params: dict[str, Tensor], x: Tensor, **neighbours: Unpack[Neighbours]) -> Tensor:
        return fused_linear_w4a16(x, params["weight"], params["scales"], params.get("bias"), **neighbours)


class TritonStoredInt4(Converted):
    """The method for int4 from the checkpoint, in groups of a multiple of 32 inputs: for few tokens in one launch with
    the neighbours. Its one path is `FourBitIntegers`, which holds any such weight."""

    few_tokens = FEW_TOKENS

    def fused(self, params: dict[str, Tensor], x: Tensor, **neighbours: Unpack[Neighbours]) -> Tensor:
        zeros = params.get("zeros")
        return fused_linear_w4a16(x, params["weight"], params["scales"], params.get("bias"), zeros=zeros, **neighbours)
