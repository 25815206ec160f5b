"""A decoder layer in fewer launches: its products with their neighbours, and one kernel between qkv and attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from reference_impl.core.decoder import DecoderLayer, GatedMLP
from reference_impl.features.fusion.fusion import Fusion
from reference_impl.features.fusion.kernels import Kernels, writes_and_attends
from reference_impl.interfaces import AttentionBackend, Batch, KVCache, scales_of


class FusedLayer(DecoderLayer):
    """`DecoderLayer` in fewer launches. A norm that a family lacks is None."""

    attention_output_norm: Tensor | None = None
    mlp_output_norm: Tensor | None = None

    def __init__(self, *arguments: Any, kernels: Kernels):
        super().__init__(*arguments)
        self.kernels = kernels
        self.normalize = kernels.rms_norm  # type: ignore[assignment]

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
        """The residual stream behind the layer. It comes and goes as two tensors: x [num_tokens, hidden_size], and what
        is still to be added, or None. cos, sin: of all positions where attention finds keys and values in the cache,
        otherwise of the batch's tokens."""
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
        heads = qkv.view(-1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        q, k, v = heads.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)
        key_scale, value_scale = scales_of(kv_cache, self.index)
        q_norm, k_norm = (None, None) if self.qk_norm is None else (self.qk_norm[0], self.qk_norm[-1])
        q = rotate_and_write(
            q, k, v, batch.positions, cos, sin, *kv_cache.layer(self.index),
            batch.groups[batch.group_of_layer[self.index]].slot_mapping, q_norm, k_norm, c.norm_eps,
            key_scale=key_scale, value_scale=value_scale,
        )  # fmt: skip
        return attend(q, self.index, kv_cache, batch).flatten(1)
