"""What a layer's matrices see: statistics of their inputs over calibration rows, without keeping these inputs.

A layer is computed a row at a time, so that beside the rows of the residual stream only one row's activations exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from reference_impl.core.decoder import Decoder, DecoderLayer
from reference_impl.core.linear import Linear
from reference_impl.interfaces import Batch, GroupTables, KVCache, LinearMethod
from reference_impl.kernels import reference


@dataclass
class Statistics:
    """Statistics of the inputs x of a matrix, over all calibration tokens.

    gram [in, in]: sum of x^T x, in the dtype of x or float32 at least, where it was asked for. sum_abs, max_abs [in].
    """

    wants_gram: bool = True
    gram: Tensor | None = None
    sum_abs: Tensor | None = None
    max_abs: Tensor | None = None
    num_tokens: int = 0

    def add(self, x: Tensor) -> None:
        """Adds x [rows, in]."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.sum_abs is None or self.max_abs is None:
            self.sum_abs, self.max_abs = x.new_zeros(x.shape[1]), x.new_zeros(x.shape[1])
            self.gram = x.new_zeros(x.shape[1], x.shape[1]) if self.wants_gram else None
        if self.gram is not None:
            self.gram.addmm_(x.T, x)
        self.sum_abs += x.abs().sum(0)
        self.max_abs = torch.maximum(self.max_abs, x.abs().amax(0))
        self.num_tokens += len(x)

    @property
    def mean_abs(self) -> Tensor:
        assert self.sum_abs is not None
        return self.sum_abs / self.num_tokens

    @property
    def known_gram(self) -> Tensor:
        assert self.gram is not None, "a Gram matrix was not asked for"
        return self.gram


@dataclass
class Outputs:
    """Outputs of a matrix [out, in] over all calibration rows: kept, or compared with those that were kept before.

    kept: [length, out] of each row; apart: the sum of squares of the differences between these and `before`.
    """

    weight: Tensor
    before: Sequence[Tensor] | None = None
    kept: list[Tensor] = field(default_factory=list)
    apart: float = 0.0
    num_rows: int = 0

    def add(self, x: Tensor) -> None:
        """Adds the outputs for x [length, in] of the next row."""
        y = x @ self.weight.T
        if self.before is None:
            self.kept.append(y)
        else:
            self.apart += float((y - self.before[self.num_rows]).square().sum())
        self.num_rows += 1


class Seeing(Protocol):
    """What is shown the inputs of a matrix, one calibration row after the other."""

    def add(self, x: Tensor) -> None: ...


Seen = TypeVar("Seen", bound=Seeing)


class _Inputs(list[Tensor]):
    """The inputs themselves, row by row."""

    add = list.append


class CausalAttention:
    """Attention within one row of tokens, without a cache."""

    def __init__(self, scale: float, softcap: float | None, windows: Sequence[int | None]):
        self.scale, self.softcap, self.windows = scale, softcap, windows

    def plan(self, batch: Batch) -> None:
        pass

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, kv_cache: KVCache, batch: Batch) -> Tensor:
        return reference.attention_one_row(q, k, v, self.scale, self.windows[layer], self.softcap)


class _Enough(Exception):
    """Raised after the watched matrix: what comes after it is not computed."""


class _Watching:
    """A LinearMethod around another one, which shows its inputs."""

    def __init__(self, method: LinearMethod, see: Callable[[Tensor], object], stop: bool):
        self.method, self.see, self.stop = method, see, stop
        self.create, self.load, self.finish = method.create, method.load, method.finish

    def apply(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        self.see(x)
        if self.stop:
            raise _Enough
        return self.method.apply(params, x)


@dataclass
class Rows:
    """Calibration rows on their way through the model: x [rows, length, hidden_size] in the residual stream before the
    next layer; ropes: of each of the decoder's tables, (cos, sin) of the row's positions."""

    x: Tensor
    ropes: list[tuple[Tensor, Tensor]]
    attention: CausalAttention
    batch: Batch = field(repr=False)

    @staticmethod
    @torch.inference_mode()
    def of(decoder: Decoder, tokens: Tensor) -> Rows:
        """The rows of tokens [rows, length] before the first layer. decoder: has the embedding and the tables."""
        length = tokens.shape[1]
        positions = torch.arange(length)
        ropes = [tuple(table.cos_sin.index_select(1, positions).unbind()) for table in decoder.rotaries]
        c = decoder.config
        attention = CausalAttention(c.attention_scale, c.attention_softcap, c.layer_windows)
        x = torch.stack([decoder.embed(row) for row in tokens])
        return Rows(x, ropes, attention, _one_row(length))  # type: ignore[arg-type]

    def run(self, layer: DecoderLayer, row: int) -> Tensor:
        cos, sin = self.ropes[layer.rotary]
        return layer(self.x[row], cos, sin, self.attention, None, self.batch)

    @torch.inference_mode()
    def advance(self, layer: DecoderLayer) -> None:
        """Replaces x by what the layer makes of it."""
        for row in range(len(self.x)):
            self.x[row] = self.run(layer, row)

    @torch.inference_mode()
    def watch(self, layer: DecoderLayer, linear: Linear, seen: Seen) -> Seen:
        """Shows `seen` the inputs of one matrix of the layer, and returns it; what comes after is not computed."""
        method = linear.method
        linear.method = _Watching(method, seen.add, stop=True)
        try:
            for row in range(len(self.x)):
                with suppress(_Enough):  # an expert may see no token of a row
                    self.run(layer, row)
        finally:
            linear.method = method
        return seen

    def inputs(self, layer: DecoderLayer, linear: Linear) -> Tensor:
        """Returns what one matrix of the layer multiplies in all rows: [tokens, in]."""
        return torch.cat(self.watch(layer, linear, _Inputs()))


def _one_row(length: int) -> Batch:
    """A batch, which the type asks for; `CausalAttention` reads none of it."""
    nothing = torch.zeros(1, dtype=torch.int32)
    return Batch(
        input_ids=nothing, positions=torch.arange(length), query_start_loc=nothing, seq_lens=nothing,
        logits_indices=nothing, request_ids=("calibration",), query_lens=(length,), context_lens=(length,),
        num_decode_rows=0, block_size=length, groups=(GroupTables(None, nothing, nothing[None]),), group_of_layer=(0,),
    )  # fmt: skip


def calibration_tokens(ids: Sequence[int], rows: int, length: int) -> Tensor:
    """Windows at even distances over a text's tokens, without overlap: [rows, length] int64. Raises ValueError if the
    text is too short."""
    if rows < 1 or length < 1:
        raise ValueError(f"calibration: expected at least 1 row of at least 1 token, got {rows} of {length}")
    if len(ids) < rows * length:
        raise ValueError(
            f"calibration: expected a text of at least {rows * length:,} tokens ({rows} rows of {length}), got "
            f"{len(ids):,}: give a longer text, or fewer or shorter rows"
        )
    step = (len(ids) - length) // max(rows - 1, 1) if rows > 1 else 0
    return torch.tensor([list(ids[i * step : i * step + length]) for i in range(rows)])
