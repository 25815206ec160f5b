"""Linear layers with weights in 4 or 8 bits: how they are loaded and multiplied.

A tensor of the checkpoint is rounded when it arrives, so never more than one of them is in memory in its own precision.
Biases, norms, the embedding and the lm_head stay as they are: a tied lm_head is the embedding. (For int4 on a CPU a
tied lm_head is multiplied from a copy in 4 bits: `choose_head` in assembly/linear_methods.py says why.)

`Int4`, `Int8` and `Fp8` multiply with the functions of `kernels` that they are given: the Triton kernel, or its twin,
which makes a 16-bit copy of the weight for each product. The latter is right anywhere and slow: `cpu.py` has better.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from reference_impl.interfaces import LinearMethod
from reference_impl.kernels.reference import pack_int4, quantize_rows_fp8, unpack_int4
from reference_impl.models.quantization.rounding import group_size_for, quantize_int4, quantize_int8


class Quantized(ABC):
    """What the methods have in common: codes in `weight`, one row per output, and `scales`, whose last dimension is
    the outputs. The scales are no tensors of the checkpoint: they appear with the first piece of the weight.

    dtype: of the model, so of x, y and the bias.
    """

    code_dtype: ClassVar[torch.dtype]
    codes_per_byte: ClassVar[int] = 1

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device = dtype, device

    @abstractmethod
    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(rows of the parameter `weight`, [..., rows] of `scales`), from some rows of the checkpoint's [rows, in]."""

    def dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The weight that `quantize` put in place of its own: [rows, in] in the dtype of scales at least."""
        return codes.to(scales.dtype) * scales.flatten()[:, None]

    @abstractmethod
    def product(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        """x [rows, in] -> [rows, out] in the dtype of x, without the bias."""

    def create(self, in_features: int, out_features: int, bias: bool) -> dict[str, Tensor]:
        shape = (out_features, in_features // self.codes_per_byte)
        params = {"weight": torch.empty(shape, dtype=self.code_dtype, device=self.device)}
        if bias:
            params["bias"] = torch.empty(out_features, dtype=self.dtype, device=self.device)
        return params

    def load(self, params: dict[str, Tensor], name: str, tensor: Tensor, start: int) -> None:
        if name == "bias":
            params["bias"][start : start + len(tensor)].copy_(tensor)
        else:
            self.load_inputs(params, tensor, start, slice(0, tensor.shape[1]))

    def load_inputs(self, params: dict[str, Tensor], tensor: Tensor, start: int, inputs: slice) -> None:
        """Takes some inputs of a checkpoint's weight [rows, in], or all of them, for the layer's rows from `start` on.
        Codes and scales are those of the whole weight. inputs begins and ends between two groups of `group_of`."""
        codes, scales = self.quantize(tensor.to(self.device))
        if (group := self.group_of(tensor.shape[1])) is not None:
            scales = scales[inputs.start // group : inputs.stop // group]
        rows = slice(start, start + len(tensor))
        if "scales" not in params:
            params["scales"] = scales.new_empty(*scales.shape[:-1], len(params["weight"]))
        at, end = inputs.start // self.codes_per_byte, inputs.stop // self.codes_per_byte
        params["weight"][rows].copy_(codes[:, at:end])
        params["scales"][..., rows].copy_(scales)

    def group_of(self, in_features: int) -> int | None:
        """How many inputs of a layer share a scale; None: all of them do."""
        return None

    def finish(self, params: dict[str, Tensor]) -> None:  # noqa: B027 (most have nothing left to do)
        pass

    def apply(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        y = self.product(params, x)
        return y.add_(params["bias"]) if "bias" in params else y


class Int4(Quantized):
    """Weights in 4 bits with a scale per group of 128, 64 or 32 inputs (`rounding.py`); x and products in 16 bits."""

    code_dtype, codes_per_byte = torch.uint8, 2

    def __init__(self, dtype: torch.dtype, device: torch.device, gemm_w4a16: Callable[..., Tensor]):
        super().__init__(dtype, device)
        self.scale_dtype, self.gemm_w4a16 = dtype, gemm_w4a16

    def create(self, in_features: int, out_features: int, bias: bool) -> dict[str, Tensor]:
        group_size_for(in_features)  # or an error, before anything is read
        return super().create(in_features, out_features, bias)

    def group_of(self, in_features: int) -> int:
        return group_size_for(in_features)

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        group_size = group_size_for(weight.shape[1])
        codes, scales = quantize_int4(weight, group_size, self.scale_dtype)
        return pack_int4(codes, group_size), scales

    def dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        group_size = 2 * codes.shape[1] // len(scales)
        numbers = unpack_int4(codes, group_size).to(scales.dtype) - 8
        return numbers * scales.T.repeat_interleave(group_size, 1)

    def product(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        return self.gemm_w4a16(
            x, params["weight"], params["scales"], group_size=x.shape[1] // params["scales"].shape[0]
        )


class Int8(Quantized):
    """Weights in 8 bits with a scale per output; x in 16 bits, products in 16 bits."""

    code_dtype = torch.int8

    def __init__(self, dtype: torch.dtype, device: torch.device, gemm_w8a16: Callable[..., Tensor]):
        super().__init__(dtype, device)
        self.scale_dtype, self.gemm_w8a16 = dtype, gemm_w8a16

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_int8(weight, self.scale_dtype)

    def product(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        return self.gemm_w8a16(x, params["weight"], params["scales"])


class Fp8(Quantized):
    """Weights in 8-bit floats (e4m3) with a scale per output, times activations in the same, with a scale per token.

    A number has 3 bits after the point: an error of at most 1/16 of its magnitude, or 2^-10 scales for the smallest;
    the largest magnitude is 448 scales. The activations are rounded likewise, in each product.
    """

    code_dtype = torch.float8_e4m3fn

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        quantize_rows: Callable[[Tensor], tuple[Tensor, Tensor]],
        gemm_fp8: Callable[..., Tensor],
    ):
        super().__init__(dtype, device)
        self.quantize_rows, self.gemm_fp8 = quantize_rows, gemm_fp8

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_rows_fp8(weight)  # an output's weights are a row, as a token's activations are

    def product(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        return self.gemm_fp8(*self.quantize_rows(x), params["weight"], params["scales"], x.dtype)


class Dequantized:
    """A plain layer with the weights that a quantized one stands for, to check the latter against.

    So what is left between the two is arithmetic: rounded products, and the rounded activations of FP8.
    """

    def __init__(self, quantized: Quantized, plain: LinearMethod):
        self.quantized, self.plain = quantized, plain
        self.create, self.finish, self.apply = plain.create, plain.finish, plain.apply

    def load(self, params: dict[str, Tensor], name: str, tensor: Tensor, start: int) -> None:
        if name == "weight":
            codes, scales = self.quantized.quantize(tensor.to(self.quantized.device))
            tensor = self.quantized.dequantize(codes, scales.float())
        self.plain.load(params, name, tensor, start)
