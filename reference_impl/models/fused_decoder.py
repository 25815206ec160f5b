"""The decoder with Triton's kernels: what stands between two products is one launch, or part of a product's.

Norm and rotary embedding of queries and keys and the write to the cache are one kernel (`rotate_and_write`), and norms,
gates and the residual stream join products as `Fusion` chooses. What is computed is what `Decoder` computes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from reference_impl.config import ModelConfig
from reference_impl.interfaces import AttentionBackend, Batch, KVCache
from reference_impl.layers.attention import scales_of
from reference_impl.layers.backend import Kernels, writes_and_attends
from reference_impl.layers.fusion import Fusion
from reference_impl.layers.mlp import GatedMLP
from reference_impl.models.decoder import Decoder, DecoderLayer
from reference_impl.models.tuning import seconds_on_gpu, tune


class FusedLayer(DecoderLayer):
    """`DecoderLayer`, in fewer launches."""

    def compute(
        self,
        fusion: Fusion,
        x: Tensor,
        added: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        attention: AttentionBackend,
        kv_cache: KVCache,
        batch: Batch,
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream comes and goes as `fusion` says: x, and what is still to be added. cos, sin: of all
        positions where attention finds keys and values in the cache, otherwise of the batch's tokens."""
        qkv, x = fusion.norm_then_linear("qkv", self.qkv, x, added, self.input_norm)
        h = self.attend(qkv, cos, sin, attention, kv_cache, batch)
        x, added = fusion.add_linear("o", self.o, h, x, self.attention_output_norm)
        if isinstance(self.mlp, GatedMLP):
            h, x = fusion.norm_then_linear("gate_up", self.mlp.gate_up, x, added, self.mlp_norm, self.mlp.activation)
            return fusion.add_linear("down", self.mlp.down, h, x, self.mlp_output_norm)
        h, x = fusion.norm(x, added, self.mlp_norm)
        y, norm = self.mlp(h), self.mlp_output_norm
        return x, y if norm is None else self.kernels.rms_norm(y, norm, self.config.norm_eps)

    def attend(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, attention: AttentionBackend, kv_cache: KVCache, batch: Batch
    ) -> Tensor:
        fused = writes_and_attends(self.kernels, attention)
        if fused is None:
            return super().attend(qkv, cos, sin, attention, kv_cache, batch)
        c, (rotate_and_write, attend) = self.config, fused
        qk, v = self.heads(qkv)
        q, k = qk.split((c.num_heads, c.num_kv_heads), dim=1)
        key_scale, value_scale = scales_of(kv_cache, self.index)
        q_norm, k_norm = (None, None) if self.qk_norm is None else (self.qk_norm[0], self.qk_norm[-1])
        q = rotate_and_write(
            q, k, v, batch.positions, cos, sin, *kv_cache.layer(self.index),
            batch.groups[batch.group_of_layer[self.index]].slot_mapping, q_norm, k_norm, c.norm_eps,
            key_scale=key_scale, value_scale=value_scale,
        )  # fmt: skip
        return attend(q, self.index, kv_cache, batch).flatten(1)


class FusedDecoder(Decoder):
    """`Decoder`, in fewer launches. Arguments as there."""

    layer_class = FusedLayer

    def __init__(self, config: ModelConfig, *args: Any, **options: Any):
        super().__init__(config, *args, **options)
        self.fusion = Fusion(self.kernels, config.norm_eps)
        self._times: dict[int, dict[str, dict[str, float]]] = {}  # of ways to compute a step of so many tokens

    def hidden_states(self, batch: Batch, kv_cache: KVCache, attention: AttentionBackend) -> Tensor:
        x = self.embedding[batch.input_ids]
        if self.config.embedding_scale != 1:
            x = x * self.embedding_scale
        # A kernel that rotates and writes looks a position's cosine up itself.
        positions = None if writes_and_attends(self.kernels, attention) else batch.positions
        full = self.rotary.at(positions)
        windowed = full if self.window_rotary is self.rotary else self.window_rotary.at(positions)
        attention.plan(batch)
        added = None
        for layer, window in zip(self.fused_layers(), self.config.layer_windows, strict=True):
            cos, sin = full if window is None else windowed
            x, added = layer.compute(self.fusion, x, added, cos, sin, attention, kv_cache, batch)
        last = batch.logits_indices
        if len(last) < len(x):  # else all tokens, in their order
            x, added = x[last], None if added is None else added[last]
        return self.fusion.norm(x, added, self.norm)[0]

    def fused_layers(self) -> list[FusedLayer]:
        return [layer for layer in self.layers if isinstance(layer, FusedLayer)]

    @torch.inference_mode()
    def tune(self, num_tokens: int) -> None:
        """On a GPU: measures which products are one launch with their neighbours in steps of so many tokens, and keeps
        to it. To be called before a CUDA graph of such a step is captured; takes some ten milliseconds."""
        can = any(self.fusion.can(linear, num_tokens) for linear in self.linears())
        if can and self.device.type == "cuda" and num_tokens not in self._times:
            x = torch.randn(num_tokens, self.config.hidden_size, dtype=self.dtype, device=self.device)
            self._times[num_tokens] = tune(self.fusion, self.fused_layers(), x, seconds_on_gpu)

    def choices(self) -> dict[int, dict[str, Any]]:
        """{number of tokens: what `tune` chose, and the microseconds of each way}."""
        chosen = self.fusion.chosen
        return {n: {"fused": sorted(chosen[n]), "microseconds": times} for n, times in sorted(self._times.items())}


def decoder_class(kernels: Kernels) -> type[Decoder]:
    return FusedDecoder if kernels.backend == "triton" else Decoder
