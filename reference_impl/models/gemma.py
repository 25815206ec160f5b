"""Gemma 1 to 3, text only (Gemma team 2024 and 2025; transformers' modeling_gemma.py, _gemma2.py and _gemma3.py).

A Llama with a scaled embedding and norms that multiply by 1 + weight. Gemma 2 and 3 also normalise what attention and
MLP put out, before it is added to the residual stream, and may cap the logits softly. Gemma 3 rotates the layers with a
window by frequencies of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from reference_impl.core.decoder import Decoder, DecoderLayer
from reference_impl.core.rotary import RotaryTable
from reference_impl.interfaces import AttentionBackend, Batch, KVCache
from reference_impl.kernels import reference


class GemmaLayer(DecoderLayer):
    """A layer with norms of 1 + weight; the loader stores that sum."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.input_norm, self.mlp_norm = widened(self.input_norm), widened(self.mlp_norm)
        if self.qk_norm is not None:
            self.qk_norm = widened(self.qk_norm)


class Gemma2Layer(GemmaLayer):
    """A layer of Gemma 2 or 3: x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.attention_output_norm, self.mlp_output_norm = (torch.empty_like(self.mlp_norm) for _ in range(2))
        if self.config.window_rope is not None and self.config.layer_windows[self.index] is not None:
            self.rotary = 1

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attention: AttentionBackend, kv_cache: KVCache, batch: Batch
    ) -> Tensor:
        norm, eps = self.normalize, self.config.norm_eps
        h = self.attend(self.qkv(norm(x, self.input_norm, eps)), cos, sin, attention, kv_cache, batch)
        x = x + norm(self.o(h), self.attention_output_norm, eps)
        h = self.mlp(norm(x, self.mlp_norm, eps))
        return x + norm(h, self.mlp_output_norm, eps)

    def norms(self) -> dict[str, Tensor]:
        """The norms by name. post_attention_layernorm is another one here than in a Llama."""
        return super().norms() | {
            "post_attention_layernorm.weight": self.attention_output_norm,
            "pre_feedforward_layernorm.weight": self.mlp_norm,
            "post_feedforward_layernorm.weight": self.mlp_output_norm,
        }


class GemmaDecoder(Decoder):
    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        c = self.config
        self.norm = widened(self.norm)
        # Rounded to the model's dtype, as Gemma was trained.
        self.embedding_scale = torch.tensor(c.embedding_scale, dtype=self.dtype, device=self.device)
        if c.window_rope is not None:
            positions = self.rotary.max_position
            self.rotaries.append(RotaryTable(c.window_rope, c.head_dim, positions, self.dtype, self.device))

    def embed(self, input_ids: Tensor) -> Tensor:
        return super().embed(input_ids) * self.embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        logits, cap = super().logits(hidden), self.config.final_softcap
        return logits if cap is None else reference.soft_cap(logits, cap)


def widened(norm: Tensor) -> Tensor:
    """The norm in float32 at least, as it is kept and computed: for a small w, 1 + w is no number of bfloat16."""
    return norm.to(torch.promote_types(norm.dtype, torch.float32))
