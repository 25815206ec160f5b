"""Weights in 4 and 8 bits on a CPU, with the products that torch has for them.

Both are made for x in bfloat16 (in float32 they take ten times as long). Those in 4 bits are computed in it whatever
the dtype of the model; those in 8 in float32 and float64 where the model is in these, unless bfloat16 is asked for.
They save memory traffic, which is what one or a few rows cost; many rows cost arithmetic.
Seen on one thread of an AVX512-BF16 CPU over the products of a 135M model, in times of the packed bfloat16 product:
int4 0.25-0.4 at 1 row, 1.5 at 16, 2.5 at 256; int8 0.6-0.9, 1.5, 1.15. A float32 model's products with int8 weights,
one thread, in float32 over bfloat16: 1.5-4.4 times at 1 row, 0.8-2.7 at 16, 0.8-1.1 at 64 (576 x 576 to 3072 x 576).
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_impl.kernels.reference import gemm_w4a16, gemm_w8a16, gemm_widened, unpack_int4
from reference_impl.models.quantization.methods import Int4, Int8

_MULTIPLE = 16  # of outputs in 4 bits, of inputs in 8: with others torch refuses, or reads beyond the end
# From here on a copy of the weight in 16 or 32 bits is cheaper than the product in 8: where the CPU multiplies
# bfloat16, and where it does not (seen with AVX2, 3072 x 576: 16 rows 1.3 ms and 2.6 with a copy, 64 rows 4.2 and 4.2).
_FROM_ROWS = {True: 8, False: 48}


class CpuInt4(Int4):
    """`_weight_int4pack_mm_for_cpu`. The weight is as in `Int4` until finish(), opaque after; a group's zero is 0."""

    def __init__(self, dtype: torch.dtype):
        super().__init__(dtype, torch.device("cpu"), gemm_w4a16)
        self.scale_dtype = torch.bfloat16

    def finish(self, params: dict[str, Tensor]) -> None:
        scales = params["scales"]
        codes = unpack_int4(params["weight"], params["weight"].shape[1] * 2 // len(scales))
        if missing := -len(codes) % _MULTIPLE:
            params["outputs"] = torch.arange(len(codes))  # the columns of the product that are meant
            codes, scales = F.pad(codes, (0, 0, 0, missing)), F.pad(scales, (0, missing))
        params["weight"] = torch._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        params["scales"] = torch.stack((scales, torch.zeros_like(scales)), -1)

    def product(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        scales = params["scales"]
        y = torch._weight_int4pack_mm_for_cpu(
            x.to(torch.bfloat16).contiguous(), params["weight"], x.shape[1] // scales.shape[0], scales
        )
        return (y.index_select(1, params["outputs"]) if "outputs" in params else y).to(x.dtype)


class CpuInt8(Int8):
    """`_weight_int8pack_mm` for few rows. For more, a product with a copy of the weight in bfloat16, or in float32 on a
    CPU that does not multiply bfloat16. With x in float32 or float64, a product with a copy in that dtype, for any
    number of rows.

    in_bfloat16: x is rounded to bfloat16, and so is y, also in float32 and float64. Faster for few rows.
    """

    def __init__(self, dtype: torch.dtype, in_bfloat16: bool = False):
        super().__init__(dtype, torch.device("cpu"), gemm_w8a16)
        self.scale_dtype, self.in_bfloat16 = torch.bfloat16, in_bfloat16

    def product(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        weight, scales = params["weight"], params["scales"][0]
        if x.dtype.itemsize > 2 and not self.in_bfloat16:
            return gemm_widened(x, weight).mul_(scales)
        x16 = x.to(torch.bfloat16)
        if x.shape[0] <= few_rows() and weight.shape[1] % _MULTIPLE == 0:
            y = torch._weight_int8pack_mm(x16.contiguous(), weight, scales)
        elif _multiplies_bf16():
            y = F.linear(x16, weight.to(torch.bfloat16)).mul_(scales)  # which holds any code of 8 bits exactly
        else:
            y = gemm_widened(x16.float(), weight).mul_(scales)
        return y.to(x.dtype)


def few_rows() -> int:
    """The most rows for which `CpuInt8` takes torch's product in 8 bits, where it computes in bfloat16."""
    return _FROM_ROWS[_multiplies_bf16()] - 1


@functools.cache
def _multiplies_bf16() -> bool:
    """Whether the CPU multiplies bfloat16. If not, torch's loop is several times slower than a product in float32."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
