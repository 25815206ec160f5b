"""Models whose steps of one token are compiled (`features/compiled`): attention="compiled"."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from reference_impl.assembly.linear_methods import Quantizations, choose_methods
from reference_impl.core.decoder import Decoder
from reference_impl.core.linear import Methods, UnquantizedLinear
from reference_impl.features.compiled.decoder import Product, Rows, compiled, row_times
from reference_impl.features.cpu.by_rows import WeightByRows
from reference_impl.features.cpu.operators import HeadCopy
from reference_impl.features.fusion.kernels import TORCH
from reference_impl.interfaces import LinearMethod
from reference_impl.models.quantization.cpu import CpuInt4, CpuInt8


def _eight_bits(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    return (row_times(params["weight"], x) * params["scales"]).to(x.dtype)


def _four_bits(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The product by torch's own operator, since compiled code does not widen 4 bits fast."""
    return CpuInt4(x.dtype).product(dict(params), x)


PRODUCTS: dict[type, Product] = {Rows: Rows.one_row, CpuInt8: _eight_bits, CpuInt4: _four_bits}


def methods_to_compile(quantization: Quantizations, dtype: torch.dtype) -> Methods:
    """The methods of `choose_methods` for a CPU, but weights that are not quantized are stored by rows."""
    cpu = torch.device("cpu")
    rows, given = Rows(dtype), choose_methods(quantization, dtype, cpu, TORCH)

    def method_of(name: str) -> LinearMethod:
        found = given if isinstance(given, LinearMethod) else given(name)
        return rows if isinstance(found, WeightByRows | UnquantizedLinear) else found

    return method_of


def compile_one_row(model: Decoder) -> Decoder:
    """The model with compiled steps of one token. model: with its weights, and the methods of `methods_to_compile`.
    ValueError for one that cannot be compiled."""
    head = model.head
    in_4_bits = isinstance(head, HeadCopy) and isinstance(head.method, CpuInt4)
    return compiled(model, PRODUCTS, compiles_head=not in_4_bits)
