"""A layer's products with their neighbours: norm, product, gate; product, residual. In one launch each, or one by one.

One by one, what a product adds to the residual stream is added by the next norm, which reads the stream anyway. So the
stream comes as two tensors: x, and what is still to be added to it, or None where a product has added it.

The number of tokens alone decides which way is taken, by what was measured for it (`tuning`): a CUDA graph of a step
has the same kernels whenever it is captured.
"""

from __future__ import annotations

from typing import Literal, Protocol, TypedDict, Unpack, runtime_checkable

import torch
from torch import Tensor

from reference_impl.core.linear import Linear
from reference_impl.features.fusion.kernels import Kernels
from reference_impl.interfaces import LinearMethod
from reference_impl.kernels.reference import Activation

Product = Literal["qkv", "o", "gate_up", "down"]
PRODUCTS: frozenset[Product] = frozenset(("qkv", "o", "gate_up", "down"))


class Neighbours(TypedDict, total=False):
    """The neighbours of a product; shapes and dtypes are those of `reference.fused_linear`."""

    norm: Tensor
    eps: float  # of the norm
    gate: Activation | None
    residual: Tensor


@runtime_checkable
class FusedMethod(LinearMethod, Protocol):
    """A LinearMethod that computes residual + gate(norm(x) W^T + b) in one launch, for up to few_tokens tokens."""

    few_tokens: int

    def fused(self, params: dict[str, Tensor], x: Tensor, **neighbours: Unpack[Neighbours]) -> Tensor: ...


class Fusion:
    """Chooses between one launch and single ones for each product. eps: of the norms. joins_norms: whether products can
    take the norm in, which holds for RMSNorm. chosen: {number of tokens: products that are one launch}; it holds for
    fewer tokens, too. For more tokens than were measured, all products that can be are.

    A product can be one launch where its LinearMethod is a `FusedMethod`, for up to its few_tokens. A norm stays a
    kernel of its own where it also has to add, and in float16: x times the norm's weight may leave its range. What is
    normalised before it is added is added by the next norm.
    """

    def __init__(self, kernels: Kernels, eps: float, joins_norms: bool = True):
        self.kernels, self.eps, self.joins_norms = kernels, eps, joins_norms
        self.chosen: dict[int, frozenset[Product]] = {}
        self._fused: dict[Linear, FusedMethod | None] = {}

    def method(self, linear: Linear) -> FusedMethod | None:
        """The layer's method if it is a `FusedMethod`, else None. It is looked up once: that takes longer than a
        launch."""
        if linear not in self._fused:
            self._fused[linear] = linear.method if isinstance(linear.method, FusedMethod) else None
        return self._fused[linear]

    def can(self, linear: Linear, num_tokens: int) -> bool:
        method = self.method(linear)
        return method is not None and num_tokens <= method.few_tokens

    def fuses(self, product: Product, linear: Linear, num_tokens: int) -> bool:
        return self.can(linear, num_tokens) and product in self.products(num_tokens)

    def products(self, num_tokens: int) -> frozenset[Product]:
        measured = [n for n in self.chosen if n >= num_tokens]
        return self.chosen[min(measured)] if measured else PRODUCTS

    def norm(self, x: Tensor, added: Tensor | None, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm of x + added, x + added). weight None: there is no norm, so the sum twice."""
        if weight is None:
            x = x if added is None else x + added
            return x, x
        if added is None:
            return self.kernels.rms_norm(x, weight, self.eps), x
        return self.kernels.add_rms_norm(added, x, weight, self.eps)

    def norm_then_linear(
        self,
        product: Product,
        linear: Linear,
        x: Tensor,
        added: Tensor | None,
        weight: Tensor | None,
        gate: Activation | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(gate(linear(norm(x + added))), x + added); weight None: no norm, gate None: no gate."""
        fuses = self.fuses(product, linear, len(x))
        joins = fuses and self.joins_norms and added is None and x.dtype is not torch.float16
        if joins and weight is not None:
            return self._run(linear, x, norm=weight, eps=self.eps, gate=gate), x
        h, x = self.norm(x, added, weight)
        if gate is None:
            return linear(h), x
        if fuses:
            return self._run(linear, h, gate=gate), x
        return self.kernels.gates[gate](linear(h)), x

    def add_linear(
        self, product: Product, linear: Linear, h: Tensor, x: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """(x, linear(h)), or (x + linear(h), None) where that is one launch. weight: that of a norm of linear(h), or
        None."""
        if weight is None and self.fuses(product, linear, len(h)):
            return self._run(linear, h, residual=x), None
        y = linear(h)
        return x, y if weight is None else self.kernels.rms_norm(y, weight, self.eps)

    def _run(self, linear: Linear, x: Tensor, **neighbours: Unpack[Neighbours]) -> Tensor:
        method = self.method(linear)
        assert method is not None
        return method.fused(linear.params, x, **neighbours)
