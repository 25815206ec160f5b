"""Products in which each token has its own matrix: an expert's, or a low-rank adapter's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_gemm(x: Tensor, weights: Tensor, expert_offsets: Tensor) -> Tensor:
    """Row t of expert e gives weights[e] x[t]: x [tokens, in], weights [experts, out, in] -> [tokens, out].

    Expert e owns rows [expert_offsets[e], expert_offsets[e + 1]), perhaps none; expert_offsets [experts + 1] int32,
    starting at 0, never decreasing. Rows from expert_offsets[-1] on belong to no expert: they are not computed, and
    their values in the result are arbitrary.
    """
    out = x.new_empty(len(x), weights.shape[1])
    for expert, (start, end) in enumerate(itertools.pairwise(expert_offsets.tolist())):
        out[start:end] = F.linear(x[start:end], weights[expert])
    return out


def lora_shrink(x: Tensor, a: Tensor, adapter_index: Tensor, scale: float = 1.0) -> Tensor:
    """The first half of a low-rank adapter (LoRA, Hu et al. 2021): scale x a[adapter] x[t] for each token t.

    x [tokens, in], a [adapters, rank, in], adapter_index [tokens] int32, in any order; negative: the token has none,
    and its row is 0. scale is alpha / rank in the paper. -> [tokens, rank].
    """
    h = x.new_zeros(len(x), a.shape[1])
    for adapter, rows in _segments(adapter_index):
        h[rows] = F.linear(x[rows], a[adapter]) * scale
    return h


def lora_expand(h: Tensor, b: Tensor, adapter_index: Tensor, out: Tensor) -> Tensor:
    """The second half: adds b[adapter] h[t] to out[t], in place, and returns out.

    h [tokens, rank], b [adapters, out, rank], adapter_index [tokens] int32, out [tokens, out]: often the columns of one
    part of a stacked layer. The output of a token without an adapter is unchanged.
    """
    for adapter, rows in _segments(adapter_index):
        out[rows] += F.linear(h[rows], b[adapter])
    return out


def _segments(adapter_index: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yields each adapter that is used, with its tokens."""
    for adapter in adapter_index.unique().tolist():
        if adapter >= 0:
            yield adapter, torch.nonzero(adapter_index == adapter).flatten()
