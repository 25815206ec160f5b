"""OLMo-2 (OLMo team 2024, "2 OLMo 2 Furious"; transformers' models/olmo2/modeling_olmo2.py): norms in other places.

Nothing is normalised on its way into attention and MLP; what comes out of them is, before it is added to the residual
stream: x + norm(attention(x)), then x + norm(mlp(x)). So the products get the stream as it is, and the norms set the
size of what a layer adds to it: training was steadier.

Queries are normalised over all heads together, and keys. Qwen3 and Gemma 3 divide each head by its own size, which our
kernel does as it rotates (`rotate_and_write`). Here a head that is larger than its neighbours stays so, and no head can
be normalised before all of them are known: hence a step of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from reference_impl.core.decoder import DecoderLayer
from reference_impl.interfaces import AttentionBackend, Batch, KVCache


class Olmo2Layer(DecoderLayer):
    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.attention_output_norm, self.mlp_output_norm = self.input_norm, self.mlp_norm
        self.input_norm = self.mlp_norm = None  # type: ignore[assignment]
        c, new = self.config, self.attention_output_norm.new_empty
        self.wide_q_norm, self.wide_k_norm = new(c.num_heads * c.head_dim), new(c.num_kv_heads * c.head_dim)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attention: AttentionBackend, kv_cache: KVCache, batch: Batch
    ) -> Tensor:
        norm, eps = self.normalize, self.config.norm_eps
        h = self.attend(self.qkv(x), cos, sin, attention, kv_cache, batch)
        x = x + norm(self.o(h), self.attention_output_norm, eps)
        return x + norm(self.mlp(x), self.mlp_output_norm, eps)

    def attend(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, attention: AttentionBackend, kv_cache: KVCache, batch: Batch
    ) -> Tensor:
        sizes = len(self.wide_q_norm), len(self.wide_k_norm)
        q, k, v = qkv.split((*sizes, sizes[1]), dim=1)
        q, k = self.normalize_heads(q, self.wide_q_norm), self.normalize_heads(k, self.wide_k_norm)
        return super().attend(torch.cat((q, k, v), dim=1), cos, sin, attention, kv_cache, batch)

    def normalize_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        """The norm over all heads together: x and weight [..., heads x head_dim]."""
        return self.normalize(x, weight, self.config.norm_eps)

    def norms(self) -> dict[str, Tensor]:
        return {
            "post_attention_layernorm.weight": self.attention_output_norm,
            "post_feedforward_layernorm.weight": self.mlp_output_norm,
            "self_attn.q_norm.weight": self.wide_q_norm,
            "self_attn.k_norm.weight": self.wide_k_norm,
        }
