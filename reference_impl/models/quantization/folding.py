"""Where a division of activations goes: into the norm or the matrix that computes them, so that it costs nothing.

For x = norm(h) the norm's weight is divided by s, and the columns of each matrix that reads x are multiplied by it. For
x = up(h) * act(gate(h)) the rows of up are divided. For attention's output, a weighted mean of values, the rows of v
are divided. The function of the layer stays the same but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from reference_impl.core.decoder import DecoderLayer, GatedMLP
from reference_impl.core.linear import Linear, UnquantizedLinear
from reference_impl.models.phi3 import Phi3Layer


@dataclass
class Fold:
    """A matrix and what computes its input. linear: a matrix whose input x can be divided by s [in]. divide(s): has x
    computed so, and returns what it was really divided by. shared [in] int64, or None: inputs with one number have one
    s, since one output before is read several times (grouped queries)."""

    linear: Linear
    divide: Callable[[Tensor], Tensor]
    shared: Tensor | None = None

    def apply(self, s: Tensor) -> None:
        """Divides x by s, and multiplies the matrix's columns by s."""
        matrix(self.linear).mul_(self.divide(s))

    def tied(self, values: Tensor) -> Tensor:
        """The mean over inputs that share an s: [in] -> [in]."""
        if self.shared is None:
            return values
        sums = values.new_zeros(int(self.shared.max()) + 1).index_add_(0, self.shared, values)
        counts = values.new_zeros(len(sums)).index_add_(0, self.shared, values.new_ones(len(values)))
        return (sums / counts)[self.shared]


def matrix(linear: Linear) -> Tensor:
    """The matrix [out, in], a view of the parameter: writing to it changes the layer."""
    method, weight = linear.method, linear.params["weight"]
    plain = isinstance(method, UnquantizedLinear) or getattr(method, "dense_is_plain", False)
    if not plain or weight.is_mkldnn:
        raise TypeError(f"{linear.name}: expected a matrix that is neither quantized nor packed, got {method}")
    return weight.t()


def folds(layer: DecoderLayer, stored: torch.dtype | None = None) -> dict[str, Fold]:
    """{the last word of the linear layer's name: its fold}. stored: the dtype that norms are written in afterwards.

    Raises ValueError for a family with another order of norms, or with experts: there nothing, or more than one matrix,
    reads what a norm gives.
    """
    if type(layer) not in (DecoderLayer, Phi3Layer) or not isinstance(layer.mlp, GatedMLP):
        raise ValueError(
            f"layer {layer.index}: expected a layer like Llama's (x + attention(norm(x)), then x + mlp(norm(x)) with "
            f"one gated MLP), got a {type(layer).__name__}: use rtn or gptq, which fold nothing"
        )
    c, mlp = layer.config, layer.mlp
    queries, values = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def divide_values(s: Tensor) -> Tensor:
        each = s.view(c.num_kv_heads, -1, c.head_dim)[:, 0].flatten()  # all query heads of a group have one s
        _divide_rows(layer.qkv, queries + values, each)
        return s

    head, group = torch.arange(queries), c.num_heads // c.num_kv_heads
    shared = head // (group * c.head_dim) * c.head_dim + head % c.head_dim
    return {
        "qkv_proj": Fold(layer.qkv, lambda s: _divide_norm(layer.input_norm, s, stored)),
        "o_proj": Fold(layer.o, divide_values, shared),
        "gate_up_proj": Fold(mlp.gate_up, lambda s: _divide_norm(layer.mlp_norm, s, stored)),
        "down_proj": Fold(mlp.down, lambda s: _divide_rows(mlp.gate_up, c.intermediate_size, s)),
    }


def _divide_norm(norm: Tensor, s: Tensor, stored: torch.dtype | None) -> Tensor:
    """Divides a norm, and returns by what: where the quotient is rounded when it is stored, that is not quite s."""
    before = norm.clone()
    norm.div_(s)
    if stored is None:
        return s
    norm.copy_(norm.to(stored))
    return torch.where(norm == 0, s, before / norm)


def _divide_rows(linear: Linear, start: int, s: Tensor) -> Tensor:
    """Divides rows start, start + 1, ... by s, with their bias."""
    matrix(linear)[start : start + len(s)].div_(s[:, None])
    if "bias" in linear.params:
        linear.params["bias"][start : start + len(s)].div_(s)
    return s
