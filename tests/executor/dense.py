"""A model whose cache write and attention are a few operators of torch that need no decision of the host.

What our Triton kernels are to a CUDA graph, at a speed at which many schedules can be tried: padding is written nowhere
and sees nothing, and only positions below the longest context that the host states are looked at.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is defined

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.sampler import CalledSampler
from reference_impl.core.decoder import Decoder
from reference_impl.core.sampler import TorchSampler
from reference_impl.features.fusion.decoder import FusedDecoder, FusedLayer
from reference_impl.features.fusion.fusion import Fusion
from reference_impl.features.fusion.kernels import TORCH
from reference_impl.features.triton_sampler.sampler import TritonSampler
from reference_impl.interfaces import Batch, KVCache
from reference_impl.kernels import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def rotate_and_write(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor,
    slots: Tensor, q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 1e-6, **_: None,
) -> Tensor:  # fmt: skip
    q, k = (x if w is None else reference.rms_norm(x, w, eps) for x, w in ((q, q_norm), (k, k_norm)))
    q, k = (reference.rotate(x, cos[positions], sin[positions]) for x in (q, k))
    for cache, fresh in ((keys.flatten(0, 1), k), (values.flatten(0, 1), v)):
        hits = slots[:, None] == torch.arange(len(cache), device=slots.device)  # [tokens, slots]
        written = fresh.index_select(0, hits.int().argmax(0))
        cache.copy_(torch.where(hits.any(0)[:, None, None], written, cache))
    return q


class DenseAttention:
    """Every query against the whole table, with a mask."""

    takes_bounds = takes_trees = True

    def __init__(self, scale: float):
        self.scale = scale
        self.ran = {"dense"}

    def plan(self, batch: Batch) -> None:
        batch.attention_plan = max(batch.context_lens)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, kv_cache: KVCache, batch: Batch) -> Tensor:
        raise NotImplementedError("the fused path only")

    def attend(self, q: Tensor, layer: int, kv_cache: KVCache, batch: Batch) -> Tensor:
        group = batch.groups[batch.group_of_layer[layer]]
        ends = batch.query_start_loc[1:].contiguous()
        row = torch.searchsorted(ends, torch.arange(len(q), device=q.device, dtype=ends.dtype), right=True)
        position = torch.arange(batch.attention_plan, device=q.device)
        block = group.block_table.index_select(1, position // batch.block_size).long()
        slots = (block * batch.block_size + position % batch.block_size)[row]  # [tokens, positions]
        seen = (position <= batch.positions[:, None]) & (position < batch.seq_lens[row, None])
        if group.window is not None:
            seen &= position > batch.positions[:, None] - group.window
        if batch.ancestors is not None:
            assert group.window is None, "no test needs trees in a window"
            first = (batch.seq_lens - ends + batch.query_start_loc[:-1])[row]  # where the row's own tokens begin
            own = position - first[:, None]
            bit = (batch.ancestors[:, None] >> own.clamp(0, 63)) & 1
            in_tree = ((own < 0) | ((own < 64) & (bit == 1))) & (position < batch.seq_lens[row, None])
            seen = torch.where(batch.ancestors[:, None] != 0, in_tree, seen)
        keys, values = (t.flatten(0, 1)[slots] for t in kv_cache.layer(layer))  # [tokens, positions, kv_heads, d]
        kv_head = torch.arange(q.shape[1], device=q.device) // (q.shape[1] // keys.shape[2])
        keys, values = (torch.where(seen[:, :, None, None], t, 0)[:, :, kv_head] for t in (keys, values))
        scores = torch.einsum("thd,tphd->thp", q, keys) * self.scale
        weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1).nan_to_num()
        return torch.einsum("thp,tphd->thd", weights, values)


class TwinSampler(CalledSampler, TritonSampler):
    """The kernel's twin: tokens from what lies on the device alone."""

    def choose(self, scores: Tensor, t: Mapping[str, Tensor]) -> Tensor:
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "sample_index", "sample_positions")
        return reference.sample_tokens(scores, *(t[name] for name in names))


def dense_model(model: Decoder) -> FusedDecoder:
    """The same weights, in the class that asks kernels to rotate and write."""
    dense = copy.copy(model)
    dense.__class__ = FusedDecoder
    dense._modules = {**model._modules, "layers": copy.deepcopy(model.layers)}
    dense.kernels = replace(TORCH, rotate_and_write=rotate_and_write)
    dense.fusion = Fusion(dense.kernels, model.config.norm_eps)
    dense._times = {}
    for layer in dense.layers:
        layer.__class__ = FusedLayer
        layer.kernels = dense.kernels
    return dense


def dense_engine(model: Decoder, sampler: TorchSampler | None = None, **options: Any) -> Engine:
    """Step by step and eagerly, unless the options say otherwise."""
    attention = DenseAttention(model.config.attention_scale)
    options = {"overlap": "off", "graphs": "off", **options}
    return Engine(model, EngineConfig(**options), Parts(attention=attention, sampler=sampler or TwinSampler()))
