"""The decoder that Llama, Mistral, Qwen2 and Qwen3 share; what differs is read from the config.

One forward pass over a ragged batch: all tokens of all requests side by side, [num_tokens, hidden_size].
Only attention knows that they belong to different sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from reference_impl.config import ModelConfig
from reference_impl.interfaces import AttentionBackend, Batch, KVCache, LinearMethod
from reference_impl.kernels import reference
from reference_impl.layers.linear import Linear, default_method
from reference_impl.layers.rotary import RotaryTable


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        method: LinearMethod,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__()
        self.config, self.index = config, index
        c, heads, kv = (
            config,
            config.num_heads * config.head_dim,
            config.num_kv_heads * config.head_dim,
        )
        self.qkv = Linear(
            method,
            c.hidden_size,
            {"q_proj": heads, "k_proj": kv, "v_proj": kv},
            c.qkv_bias,
        )
        self.o = Linear(method, heads, {"o_proj": c.hidden_size}, c.o_bias)
        n = c.intermediate_size
        self.gate_up = Linear(method, c.hidden_size, {"gate_proj": n, "up_proj": n}, c.mlp_bias)
        self.down = Linear(method, n, {"down_proj": c.hidden_size}, c.mlp_bias)
        self.input_norm = torch.empty(c.hidden_size, dtype=dtype, device=device)
        self.post_norm = torch.empty(c.hidden_size, dtype=dtype, device=device)
        # Query and key heads are normalised together; row h is the weight of head h.
        self.qk_norm = (
            torch.empty(c.num_heads + c.num_kv_heads, c.head_dim, dtype=dtype, device=device) if c.qk_norm else None
        )

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attention: AttentionBackend,
        kv_cache: KVCache,
        batch: Batch,
    ) -> Tensor:
        c = self.config
        qkv = self.qkv(reference.rms_norm(x, self.input_norm, c.norm_eps))
        qkv = qkv.view(-1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        qk, v = qkv[:, : -c.num_kv_heads], qkv[:, -c.num_kv_heads :]
        if self.qk_norm is not None:
            qk = reference.rms_norm(qk, None, c.norm_eps) * self.qk_norm
        qk = reference.rotate(qk, cos, sin)
        q, k = qk[:, : c.num_heads], qk[:, c.num_heads :]
        o = attention.forward(q, k, v, self.index, kv_cache, batch)
        x = x + self.o(o.flatten(1))
        gate_up = self.gate_up(reference.rms_norm(x, self.post_norm, c.norm_eps))
        return x + self.down(reference.silu_and_mul(gate_up))


class Decoder(nn.Module):
    """Embedding, layers, final norm, and logits for the tokens that need them."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        max_position: int | None = None,
        linear_method: LinearMethod | None = None,
    ):
        super().__init__()
        self.config, self.dtype, self.device = config, dtype, device
        method = linear_method or default_method(dtype, device)
        self.embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(DecoderLayer(config, i, method, dtype, device) for i in range(config.num_layers))
        self.norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        self.lm_head = None if config.tied_embeddings else torch.empty_like(self.embedding)
        self.rotary = RotaryTable(
            config.rope,
            config.head_dim,
            max_position or config.max_position,
            dtype,
            device,
        )

    def forward(self, batch: Batch, kv_cache: KVCache, attention: AttentionBackend) -> Tensor:
        """Logits [num_sampling_rows, vocab_size] of the tokens at batch.logits_indices."""
        x = self.embedding[batch.input_ids]
        cos, sin = self.rotary.at(batch.positions)
        attention.plan(batch)
        for layer in self.layers:
            x = layer(x, cos, sin, attention, kv_cache, batch)
        x = reference.rms_norm(x[batch.logits_indices], self.norm, self.config.norm_eps)
        return x @ (self.embedding if self.lm_head is None else self.lm_head).T

    def linears(self) -> list[Linear]:
        """The linear layers, in order; an untied lm_head is not one of them."""
        return [module for module in self.modules() if isinstance(module, Linear)]

    def num_parameters(self) -> int:
        """Parameters in memory; a tied embedding counts once, a norm shared by heads once."""
        count = self.embedding.numel() + self.norm.numel() + (0 if self.lm_head is None else self.lm_head.numel())
        count += sum(linear.num_parameters() for linear in self.linears())
        norms = 2 * self.config.hidden_size + 2 * self.config.head_dim * self.config.qk_norm
        return count + self.config.num_layers * norms
