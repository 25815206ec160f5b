"""The decoder that Llama, Mistral, Qwen, Gemma, OLMo-2 and Phi-3 share; what differs is read from the config.

One forward pass over a ragged batch: all tokens of all requests side by side, [num_tokens, hidden_size].
Only attention knows that they belong to different sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from reference_impl.config import ModelConfig
from reference_impl.interfaces import AttentionBackend, Batch, KVCache, LinearMethod
from reference_impl.kernels import reference
from reference_impl.layers.backend import Kernels, choose_kernels
from reference_impl.layers.linear import Linear, Methods, methods_of
from reference_impl.layers.linear_methods import choose_head, choose_method
from reference_impl.layers.mlp import GatedMLP
from reference_impl.layers.rotary import RotaryTable
from reference_impl.models import olmo2, phi3
from reference_impl.models.moe import MixtureOfExperts, experts_prefix


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Gemma 2 and 3 normalise what is added, too, and OLMo-2 that alone. A norm that a family lacks has None for a weight.
    """

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        methods: Methods,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
    ):
        super().__init__()
        self.config, self.index, self.kernels = config, index, kernels
        c, heads, kv = config, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv, o = (f"model.layers.{index}.self_attn.{name}" for name in ("qkv_proj", "o_proj"))
        parts = phi3.qkv_parts(c) if c.stacked_weights else {"q_proj": heads, "k_proj": kv, "v_proj": kv}
        self.qkv = Linear(methods(qkv), c.hidden_size, parts, c.qkv_bias, qkv)
        self.o = Linear(methods(o), heads, {"o_proj": c.hidden_size}, c.o_bias, o)
        self.mlp: nn.Module
        if c.experts is not None and index in c.experts.layers:
            router = torch.empty(c.experts.num_experts, c.hidden_size, dtype=dtype, device=device)
            self.mlp = MixtureOfExperts(c, c.experts, methods, router, kernels, experts_prefix(c, index))
        else:
            sizes, prefix = (c.hidden_size, c.intermediate_size), f"model.layers.{index}.mlp."
            names = phi3.GATE_UP_DOWN if c.stacked_weights else ("gate_proj", "up_proj", "down_proj")
            self.mlp = GatedMLP(methods, *sizes, c.activation, c.mlp_bias, names, kernels, prefix)

        def weight(exists: bool, *shape: int) -> Tensor | None:
            return torch.empty(*shape, dtype=norm_dtype(c, dtype), device=device) if exists else None

        self.input_norm, self.mlp_norm = (weight(c.input_norms, c.hidden_size) for _ in range(2))
        self.attention_output_norm, self.mlp_output_norm = (weight(c.output_norms, c.hidden_size) for _ in range(2))
        # Query and key heads are normalised together; row h is the weight of head h.
        self.qk_norm = weight(c.qk_norm, c.num_heads + c.num_kv_heads, c.head_dim)
        # OLMo-2's, of all query heads and of all key heads; and the order in which Phi-3's heads are rotated.
        self.wide_q_norm, self.wide_k_norm = weight(c.wide_qk_norm, heads), weight(c.wide_qk_norm, kv)
        self.order = phi3.rotated_first(c, device)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attention: AttentionBackend, kv_cache: KVCache, batch: Batch
    ) -> Tensor:
        """x [num_tokens, hidden_size], the residual stream -> the same shape. cos, sin [num_tokens, 1, head_dim]."""
        norm = self.norm
        h = self.o(self.attend(self.qkv(norm(x, self.input_norm)), cos, sin, attention, kv_cache, batch))
        x = x + norm(h, self.attention_output_norm)
        h = self.mlp(norm(x, self.mlp_norm))
        return x + norm(h, self.mlp_output_norm)

    def norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """RMSNorm; without a weight x itself, since the family has no norm there."""
        return x if weight is None else self.kernels.rms_norm(x, weight, self.config.norm_eps)

    def attend(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, attention: AttentionBackend, kv_cache: KVCache, batch: Batch
    ) -> Tensor:
        """QK-norm, rotary embedding, cache, attention: qkv [num_tokens, width of q, k and v] -> [num_tokens, of q]."""
        c = self.config
        qk, v = self.heads(qkv)
        if self.qk_norm is not None:
            qk = (self.kernels.rms_norm(qk, None, c.norm_eps) * self.qk_norm).to(qk.dtype)
        qk = reference.rotate(qk, cos, sin)
        q, k = qk[:, : c.num_heads], qk[:, c.num_heads :]
        return attention.forward(q, k, v, self.index, kv_cache, batch).flatten(1)

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """(heads of q, then of k; heads of v), each [num_tokens, heads, head_dim]."""
        c = self.config
        if self.wide_q_norm is not None and self.wide_k_norm is not None:
            norms = self.wide_q_norm, self.wide_k_norm
            qkv = olmo2.normalise_across_heads(qkv, *norms, c.norm_eps, self.kernels.rms_norm)
        qkv = qkv.view(-1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        qk, v = qkv[:, : -c.num_kv_heads], qkv[:, -c.num_kv_heads :]
        return qk if self.order is None else qk.index_select(-1, self.order), v


class Decoder(nn.Module):
    """Embedding, layers, final norm, and logits for the tokens that need them.

    linear_method: of all linear layers, or a function from a layer's name (see `Linear`) to its method; it is also
    asked for "lm_head" (see `choose_head`). Experts that are stacked for Triton's kernel have none. kernels: of the
    small operations; with Triton's, `FusedDecoder` (fused_decoder.py) takes fewer launches.
    """

    layer_class: type[DecoderLayer] = DecoderLayer
    watched = False  # see models/watching.py: each product then by itself, and no CUDA graphs

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        max_position: int | None = None,
        linear_method: LinearMethod | Methods | None = None,
        kernels: Kernels | None = None,
    ):
        super().__init__()
        self.config, self.dtype, self.device = config, dtype, device
        self.kernels = kernels or choose_kernels("auto", device, dtype)
        if linear_method is None:
            linear_method = choose_method("none", dtype, device, self.kernels)
        methods = methods_of(linear_method)
        self.embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        # Rounded to the model's dtype, as Gemma was trained.
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            self.layer_class(config, i, methods, dtype, device, self.kernels) for i in range(config.num_layers)
        )
        self.norm = torch.empty(config.hidden_size, dtype=norm_dtype(config, dtype), device=device)
        self.lm_head = None if config.tied_embeddings else torch.empty_like(self.embedding)
        self.head = choose_head(methods("lm_head"), config.tied_embeddings, dtype, device)
        positions = max_position or config.max_position
        self.rotary = RotaryTable(config.rope, config.head_dim, positions, dtype, device)
        self.window_rotary = (
            self.rotary
            if config.window_rope is None
            else RotaryTable(config.window_rope, config.head_dim, positions, dtype, device)
        )

    def forward(self, batch: Batch, kv_cache: KVCache, attention: AttentionBackend) -> Tensor:
        """Logits [num_sampling_rows, vocab_size] of the tokens at batch.logits_indices."""
        return self.logits(self.hidden_states(batch, kv_cache, attention))

    def hidden_states(self, batch: Batch, kv_cache: KVCache, attention: AttentionBackend) -> Tensor:
        """[num_sampling_rows, hidden_size], of the tokens at batch.logits_indices, after the last norm."""
        x = self.embedding[batch.input_ids]
        if self.config.embedding_scale != 1:
            x = x * self.embedding_scale
        full = self.rotary.at(batch.positions)
        windowed = full if self.window_rotary is self.rotary else self.window_rotary.at(batch.positions)
        attention.plan(batch)
        for layer, window in zip(self.layers, self.config.layer_windows, strict=True):
            cos, sin = full if window is None else windowed
            x = layer(x, cos, sin, attention, kv_cache, batch)
        if len(batch.logits_indices) < len(x):  # else all tokens, in their order
            x = x[batch.logits_indices]
        return self.kernels.rms_norm(x, self.norm, self.config.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden_size], after the last norm -> [n, vocab_size]."""
        logits = self.head(hidden, self.embedding if self.lm_head is None else self.lm_head)
        cap = self.config.final_softcap
        return logits if cap is None else reference.soft_cap(logits, cap)

    def tune(self, num_tokens: int) -> None:
        """Called before a CUDA graph of a step of so many tokens is captured. There is nothing to choose here."""

    def choices(self) -> dict[int, dict[str, Any]]:
        """{number of tokens: what `tune` chose}."""
        return {}

    def linears(self) -> list[Linear]:
        """The linear layers, in order; an untied lm_head is not one of them."""
        return [module for module in self.modules() if isinstance(module, Linear)]

    def num_parameters(self) -> int:
        """Parameters in memory; a tied embedding counts once, a norm shared by heads once."""
        c = self.config
        count = self.embedding.numel() + self.norm.numel() + (0 if self.lm_head is None else self.lm_head.numel())
        count += sum(linear.num_parameters() for linear in self.linears())
        count += sum(module.num_parameters() for module in self.modules() if isinstance(module, MixtureOfExperts))
        norms = 2 * (c.input_norms + c.output_norms) * c.hidden_size + 2 * c.head_dim * c.qk_norm
        norms += (c.num_heads + c.num_kv_heads) * c.head_dim * c.wide_qk_norm
        return count + c.num_layers * norms

    def num_bytes(self) -> int:
        """Memory of all weights as they are stored."""
        linears = self.linears()
        others = self.num_parameters() - sum(linear.num_parameters() for linear in linears)
        return others * self.dtype.itemsize + sum(linear.weight_bytes() for linear in linears)


def norm_dtype(config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """1 + w is no number of bfloat16 for a small w, so such norms are kept, and computed, in float32 at least."""
    return torch.promote_types(dtype, torch.float32) if config.norm_plus_one else dtype
