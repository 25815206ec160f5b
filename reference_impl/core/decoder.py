"""The decoder that Llama, Mistral and Qwen share: embedding, layers, a last norm, logits.

One forward pass over a ragged batch: the tokens of all requests side by side, [num_tokens, hidden_size]. Only attention
knows that they belong to different sequences. What Gemma, OLMo-2, Phi-3, StableLM and mixtures of experts do otherwise
is in subclasses, a file for each family; `decoders.py` has the table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference_impl.core.linear import Linear, Methods, UnquantizedLinear
from reference_impl.core.model_config import ModelConfig
from reference_impl.core.rotary import RotaryTable
from reference_impl.interfaces import AttentionBackend, Batch, KVCache
from reference_impl.kernels import reference

if TYPE_CHECKING:
    from pathlib import Path

Lookup = Callable[[Tensor, Tensor], Tensor]  # (ids [rows], embedding [vocab_size, hidden_size]) -> [rows, hidden_size]
Head = Callable[[Tensor, Tensor], Tensor]  # (x, lm_head [vocab_size, hidden_size]) -> logits [len(x), vocab_size]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class GatedMLP(nn.Module):
    """The MLP down(activation(gate(x)) * up(x)) (GLU variants, Shazeer 2020): x [rows, hidden_size] -> the same shape.

    prefix: what stands before the names of its tensors in the checkpoint, such as "model.layers.3.mlp.".
    """

    def __init__(self, config: ModelConfig, intermediate_size: int, methods: Methods, prefix: str, bias: bool = False):
        super().__init__()
        first, second, parts = f"{prefix}gate_up_proj", f"{prefix}down_proj", ("gate_proj", "up_proj")
        self.gate_up = Linear(methods(first), config.hidden_size, dict.fromkeys(parts, intermediate_size), bias, first)
        self.down = Linear(methods(second), intermediate_size, {"down_proj": config.hidden_size}, bias, second)
        self.activation = config.activation
        self._act = _ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self._act(gate) * up)


class DecoderLayer(nn.Module):
    """A layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    normalize = staticmethod(reference.rms_norm)  # a family may have another; features/cpu has one for few rows
    rotary = 0  # which of the decoder's tables rotates its queries and keys

    def __init__(self, config: ModelConfig, index: int, methods: Methods, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.config, self.index = config, index
        c, heads, kv = config, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv, o = (f"model.layers.{index}.self_attn.{name}" for name in ("qkv_proj", "o_proj"))
        self.qkv = Linear(methods(qkv), c.hidden_size, {"q_proj": heads, "k_proj": kv, "v_proj": kv}, c.qkv_bias, qkv)
        self.o = Linear(methods(o), heads, {"o_proj": c.hidden_size}, c.o_bias, o)
        self.mlp = self.make_mlp(methods, dtype, device)
        new = partial(torch.empty, dtype=dtype, device=device)
        self.input_norm, self.mlp_norm = new(c.hidden_size), new(c.hidden_size)
        # Qwen3's, of query and key heads together; row h is the weight of head h.
        self.qk_norm = new(c.num_heads + c.num_kv_heads, c.head_dim) if c.qk_norm else None

    def make_mlp(self, methods: Methods, dtype: torch.dtype, device: torch.device) -> nn.Module:
        c = self.config
        return GatedMLP(c, c.intermediate_size, methods, f"model.layers.{self.index}.mlp.", c.mlp_bias)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attention: AttentionBackend, kv_cache: KVCache, batch: Batch
    ) -> Tensor:
        """The residual stream behind the layer: x [num_tokens, hidden_size] -> the same shape. cos, sin [num_tokens, 1,
        head_dim]."""
        h = self.normalize(x, self.input_norm, self.config.norm_eps)
        h = self.attend(self.qkv(h), cos, sin, attention, kv_cache, batch)
        x = x + self.o(h)
        h = self.normalize(x, self.mlp_norm, self.config.norm_eps)
        return x + self.mlp(h)

    def attend(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, attention: AttentionBackend, kv_cache: KVCache, batch: Batch
    ) -> Tensor:
        """QK-norm, rotary embedding, cache, attention: qkv [num_tokens, q, k and v widths] -> [num_tokens, q width]."""
        c = self.config
        heads = qkv.view(-1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        qk, v = heads[:, : -c.num_kv_heads], heads[:, -c.num_kv_heads :]
        if self.qk_norm is not None:
            qk = (self.normalize(qk, None, c.norm_eps) * self.qk_norm).to(qk.dtype)
        qk = reference.rotate(qk, cos, sin)
        q, k = qk[:, : c.num_heads], qk[:, c.num_heads :]
        return attention.forward(q, k, v, self.index, kv_cache, batch).flatten(1)

    def norms(self) -> dict[str, Tensor]:
        """The weights of the norms: {name in the checkpoint, below "model.layers.3.": tensor}."""
        found = {"input_layernorm.weight": self.input_norm, "post_attention_layernorm.weight": self.mlp_norm}
        if self.qk_norm is not None:  # the checkpoint has one weight for all query heads, one for all key heads
            sizes = (self.config.num_heads, self.config.num_kv_heads)
            found |= zip(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), self.qk_norm.split(sizes), strict=True)
        return found

    def num_parameters(self) -> int:
        """The layer's parameters; a norm that heads share counts once."""
        linears = sum(module.num_parameters() for module in self.modules() if isinstance(module, Linear))
        return linears + sum(weight.shape[-1] for weight in self.norms().values())


class Decoder(nn.Module):
    """A model, still without weights. methods: gives the method of a linear layer by its name (see `Linear`); None: all
    are `UnquantizedLinear`. layer: makes a layer, from the arguments of `DecoderLayer`."""

    normalize = staticmethod(reference.rms_norm)
    checkpoint: object = None  # what its weights were loaded from, if anything
    load_again: Callable[[Path], Decoder] | None = None  # loads another checkpoint in the same way

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        max_position: int | None = None,
        methods: Methods | None = None,
        layer: Callable[..., DecoderLayer] = DecoderLayer,
    ):
        super().__init__()
        self.config, self.dtype, self.device = config, dtype, device
        plain = UnquantizedLinear(dtype, device)
        methods = methods or (lambda name: plain)
        self.embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(layer(config, i, methods, dtype, device) for i in config.layers)
        self.norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        self.lm_head = None if config.tied_embeddings else torch.empty_like(self.embedding)
        self.rotary = RotaryTable(config.rope, config.head_dim, max_position or config.max_position, dtype, device)
        self.rotaries = [self.rotary]  # see DecoderLayer.rotary
        self.lookup: Lookup = F.embedding
        self.head: Head = F.linear

    def forward(self, batch: Batch, kv_cache: KVCache, attention: AttentionBackend) -> Tensor:
        """Logits [num_sampling_rows, vocab_size] of the tokens at batch.logits_indices."""
        return self.logits(self.hidden_states(batch, kv_cache, attention))

    def hidden_states(self, batch: Batch, kv_cache: KVCache, attention: AttentionBackend) -> Tensor:
        """Hidden states [num_sampling_rows, hidden_size] of the tokens at batch.logits_indices, after the last norm."""
        x = self.embed(batch.input_ids)
        ropes = [table.cos_sin.index_select(1, batch.positions).unbind() for table in self.rotaries]
        attention.plan(batch)
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            cos, sin = ropes[layer.rotary]
            x = layer(x, cos, sin, attention, kv_cache, batch)
        if len(batch.logits_indices) < len(x):  # else all tokens, in their order
            x = x[batch.logits_indices]
        return self.normalize(x, self.norm, self.config.norm_eps)

    def embed(self, input_ids: Tensor) -> Tensor:
        """The embeddings of input_ids [num_tokens]: [num_tokens, hidden_size]."""
        return self.lookup(input_ids, self.embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits of hidden [rows, hidden_size], after the last norm: [rows, vocab_size]."""
        return self.head(hidden, self.embedding if self.lm_head is None else self.lm_head)

    def norms(self) -> dict[str, Tensor]:
        """The weight of the last norm: {name in the checkpoint: tensor}."""
        return {"model.norm.weight": self.norm}

    def linears(self) -> list[Linear]:
        return [module for module in self.modules() if isinstance(module, Linear)]

    def num_parameters(self) -> int:
        """Parameters in memory; a tied embedding counts once."""
        count = self.embedding.numel() + (0 if self.lm_head is None else self.lm_head.numel())
        count += sum(tensor.numel() for tensor in self.norms().values())
        return count + sum(module.num_parameters() for module in self.modules() if isinstance(module, DecoderLayer))
