"""The fastest operators of a CPU for few rows: products with packed weights, and one for a norm.

Packed weights have the layout that oneDNN computes with. Seen over all products of the course model on one thread,
against x @ W, on a CPU with AVX-512: bf16 0.45 of the time at 1 row and 0.7 at 16; float32 0.7 at 16 rows but 1.2 at 1.
On one with AVX2 only, each call costs some 25 us before it computes: the course model's steps in float32 took 1.3 of
the time at 1 row and 1.1 at 16. There it pays for large weights, in float32 (it has no packed product in 16 bits): of
576 inputs and 3072 outputs, 0.8 of the time of x @ W at 1 row, 0.45 at 16; of 512 and 512, 1.1 and 0.6. So: in bf16
where there is one, in float32 with AVX-512, and of large weights with AVX2.

The operators are those that torch.compile uses; where a build of torch lacks them, `available` says so and the plain
method serves.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from reference_impl.core.decoder import Decoder, DecoderLayer
from reference_impl.features.cpu.by_rows import WeightByRows
from reference_impl.interfaces import LinearMethod
from reference_impl.kernels import reference

_PACKED_FOR_ROWS = 16  # a hint: the layout is good from 1 to some hundred rows
_LARGE = 512, 1 << 18  # inputs, and values: below, seen with AVX2, one row takes up to 1.4 of the time of x @ W
FEW = 2048  # values of a row; above, its arithmetic costs more than the operators that are saved


class PackedLinear(WeightByRows):
    """y = x W^T + b with a packed W. The weight is [out_features, in_features] until finish(), opaque after."""

    def finish(self, params: dict[str, Tensor]) -> None:
        params["weight"] = torch.ops.mkldnn._reorder_linear_weight(params["weight"], _PACKED_FOR_ROWS)

    def apply(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, params["weight"], params.get("bias"), "none", [], "")
        return y


class PackedIfLarge(PackedLinear):
    """y = x W^T + b. After finish() a large weight is packed, and a smaller one is [in_features, out_features], as in
    `UnquantizedLinear`. Both products are written out in `apply`, so that a layer enters one function and not two."""

    dense_is_plain = True  # a weight that is not packed may be read and written to as one of `UnquantizedLinear`

    def finish(self, params: dict[str, Tensor]) -> None:
        if is_large(params["weight"].shape):
            super().finish(params)
        else:
            params["weight"] = params["weight"].t().contiguous()

    def apply(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        weight, bias = params["weight"], params.get("bias")
        if weight.is_mkldnn:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
            return y
        return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def is_large(shape: Sequence[int]) -> bool:
    """Whether a weight of shape [out_features, in_features] is large enough to pack with AVX2."""
    return shape[1] >= _LARGE[0] and shape[0] * shape[1] >= _LARGE[1]


def pays(dtype: torch.dtype, large: bool = False) -> bool:
    """Whether packing linear layers pays here; large: those of large weights (`is_large`). The CPU's instruction set
    decides, not a clock: two processes on one machine must compute the same bits."""
    capabilities = ("AVX512", "AVX2") if large else ("AVX512",)
    return available(dtype) and (dtype is torch.bfloat16 or torch.backends.cpu.get_cpu_capability() in capabilities)


@functools.cache
def available(dtype: torch.dtype) -> bool:
    """Whether this torch and this CPU can multiply packed weights of this dtype: tried once on a small matrix."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    weight, x = torch.eye(32, dtype=dtype), torch.arange(64, dtype=dtype).view(2, 32)
    method, params = PackedLinear(dtype), {"weight": weight}
    try:
        method.finish(params)
        return bool(torch.equal(method.apply(params, x), x))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


class HeadCopy:
    """A product (x [rows, hidden_size], lm_head [vocab_size, hidden_size]) -> logits, with a copy of lm_head that is
    made at the first call and stored by the method. lm_head itself stays: where it is tied, tokens are looked up in it.
    """

    def __init__(self, method: LinearMethod):
        self.method = method
        self.params: dict[str, Tensor] = {}

    def __call__(self, x: Tensor, lm_head: Tensor) -> Tensor:
        if not self.params:
            params = self.method.create(lm_head.shape[1], lm_head.shape[0], False)
            self.method.load(params, "weight", lm_head, 0)
            self.method.finish(params)
            self.params = params
        return self.method.apply(self.params, x)

    def weight_bytes(self) -> int:
        """The bytes of the copy; 0 before the first call."""
        return sum(tensor.nbytes for tensor in self.params.values())


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`reference.rms_norm`, to rounding, in fewer operators for a single row. F.rms_norm is ten, and for one row each
    costs more than its arithmetic. A single row has one factor, a number: its length is one operator, and its product
    with the weights another. As in torch, a row whose sum of squares is beyond its dtype becomes zeros.
    """
    size = x.shape[-1]
    # without eps a row of zeros would be divided by
    if size > FEW or x.numel() != size or not eps or (weight is not None and weight.dtype is not x.dtype):
        return reference.rms_norm(x, weight, eps)
    length: float = torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)).item()
    factor = 1 / math.sqrt(length * length / size + eps)
    return x * factor if weight is None else torch.addcmul(x.new_zeros(()), x, weight, value=factor)


def use_norm_of_few(model: Decoder) -> None:
    """Makes the model compute its norms by `rms_norm` above, if they are RMSNorm."""
    parts: list[Decoder | DecoderLayer] = [model, *(layer for layer in model.layers if isinstance(layer, DecoderLayer))]
    for part in parts:
        if part.normalize is reference.rms_norm:
            part.normalize = rms_norm
