"""How many bytes a KV cache takes, and how many tokens and requests fit beside the weights.

One token leaves, in every layer that keeps it, one key and one value per KV head:
    bytes per token = 2 * layers * num_kv_heads * head_dim * bytes_per_value
KV heads, not query heads (erratum E02.3). Latent attention keeps one latent and one shared rotary key instead:
    bytes per token = layers * (kv_lora_rank + rope_dim) * bytes_per_value
Everything is elementwise, so any number may be a NumPy array. Memory is in bytes, decimal or binary is the caller's
choice and must be said where the number is shown.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reference_impl.theory.model_shapes import ModelShape
from reference_impl.theory.units import Number, format_bytes


def attention_bytes_per_token(
    layers: Number, num_kv_heads: Number, head_dim: Number, bytes_per_value: Number = 2
) -> Number:
    """Bytes one token adds under MHA, GQA and MQA: 2 * layers * num_kv_heads * head_dim * bytes_per_value."""
    return 2 * layers * num_kv_heads * head_dim * bytes_per_value


def latent_bytes_per_token(
    layers: Number, kv_lora_rank: Number, rope_dim: Number, bytes_per_value: Number = 2
) -> Number:
    """Bytes one token adds under multi-head latent attention: layers * (kv_lora_rank + rope_dim) * bytes_per_value."""
    return layers * (kv_lora_rank + rope_dim) * bytes_per_value


def bytes_per_token(shape: ModelShape, bytes_per_value: Number = 2) -> Number:
    """Bytes one more token adds to the cache of `shape`, over all layers that keep it (any attention kind)."""
    return shape.kv_layers * shape.kv_values_per_layer * bytes_per_value


def cache_bytes(shape: ModelShape, tokens: Number, sequences: Number = 1, bytes_per_value: Number = 2) -> Number:
    """Bytes of `sequences` requests of `tokens` tokens each: sequences * (tokens * bytes per token + fixed state)."""
    return sequences * (tokens * bytes_per_token(shape, bytes_per_value) + shape.fixed_state_bytes)


def stranded_bytes(reserved_tokens: Number, used_tokens: Number, bytes_each: Number) -> Number:
    """Bytes reserved for a request and never written: (reserved - used) * bytes per token."""
    return (reserved_tokens - used_tokens) * bytes_each


def blocks_for(tokens: Number, block_size: Number) -> Number:
    """Blocks that hold `tokens` tokens of one sequence: tokens / block_size, rounded up."""
    return -(-tokens // block_size)


def tail_waste_share(tokens: Number, block_size: Number) -> Number:
    """Mean share of a paged sequence's slots that stay empty: w / (tokens + w) with w = (block_size - 1) / 2.

    The last block is part empty, by 0 to block_size - 1 tokens; the mean holds where lengths spread over whole blocks.
    """
    empty = (block_size - 1) / 2
    return empty / (tokens + empty)


def bits_per_weight(
    bits: Number, group_size: int | None = None, scale_bits: Number = 16, zero_point_bits: Number = 0
) -> Number:
    """Stored bits per weight including a scale (and zero point) shared by group_size weights: 4 at 128 gives 4.125."""
    return bits if group_size is None else bits + (scale_bits + zero_point_bits) / group_size


def weight_bytes(shape: ModelShape, bits: Number = 16, embedding_bits: Number | None = None) -> Number:
    """Bytes of the weights at `bits` per weight; `embedding_bits` keeps input embedding and output projection apart.

    Most 4-bit checkpoints leave those two in 16 bits: weight_bytes(shape, bits_per_weight(4, 128), embedding_bits=16).
    """
    if embedding_bits is None:
        return shape.num_params * bits / 8
    return ((shape.num_params - shape.embedding_params) * bits + shape.embedding_params * embedding_bits) / 8


def read_bytes(shape: ModelShape, bits: Number = 16, embedding_bits: Number | None = None) -> Number:
    """Bytes of weights that no pass can do without, from device memory; a part of `weight_bytes`.

    Every matrix counts once, the output projection among them. A pass looks up one row of the input embedding per
    token, some kilobytes that are left out; tied, it is the output projection and is read whole. A mixture of experts
    reads at least what one token uses: tight for one token, far too little for a large batch. Weights that a cache on
    the chip keeps from one pass to the next are not excluded: at most its size, 50 MB of an H100, some permille of an
    8B. `embedding_bits`: of the output projection, see `weight_bytes`.
    """
    table = shape.vocab_size * shape.hidden_size
    # Publishers count the input embedding among the active parameters.
    used = shape.linear_params - (0 if shape.active_params is None or shape.tied_embeddings else table)
    return ((used - table) * bits + table * (bits if embedding_bits is None else embedding_bits)) / 8


def kv_budget(memory: Number, weights: Number, utilization: Number = 0.9, reserve: Number = 0.0) -> Number:
    """Bytes left for keys and values: utilization * memory - weights - reserve, never below 0.

    `utilization` is the share of the device an engine may use (0.9 is a common default); `reserve` is for activations
    and logits. `memory` is the sum over the GPUs that hold one copy of the model.
    """
    return np.maximum(0.0, utilization * memory - weights - reserve)


def tokens_that_fit(memory: Number, weights: Number, bytes_each: Number, utilization: Number = 0.9) -> Number:
    """Whole tokens of context, over all requests, whose cache fits beside the weights; 0 if the weights do not fit."""
    return _floor(kv_budget(memory, weights, utilization) / bytes_each)


def max_context_for_budget(
    memory: Number, weights: Number, users: Number, bytes_each: Number, utilization: Number = 0.9
) -> Number:
    """Tokens of context per user if `users` share the budget evenly: prompt AND output together (erratum E02.14)."""
    return _floor(kv_budget(memory, weights, utilization) / users / bytes_each)


def max_new_tokens_for_budget(
    memory: Number,
    weights: Number,
    users: Number,
    bytes_each: Number,
    prompt_tokens: Number,
    shared_prefix_tokens: Number = 0,
    utilization: Number = 0.9,
) -> Number:
    """Tokens each user can still generate: what is left of its context after its prompt.

    pool = shared prefix + users * (prompt - shared prefix + new): a prefix that all requests share counts once.
    """
    if np.any(np.asarray(shared_prefix_tokens) > np.asarray(prompt_tokens)):
        raise ValueError(
            f"expected shared_prefix_tokens <= prompt_tokens, got {shared_prefix_tokens} > {prompt_tokens}; "
            "the shared prefix is the first part of each prompt"
        )
    pool = tokens_that_fit(memory, weights, bytes_each, utilization)
    per_user = _floor((pool - shared_prefix_tokens) / users)
    return np.maximum(0, per_user - (prompt_tokens - shared_prefix_tokens))


def concurrent_requests(
    memory: Number,
    weights: Number,
    context_tokens: Number,
    bytes_each: Number,
    utilization: Number = 0.9,
    fixed_state_each: Number = 0.0,
) -> Number:
    """Whole requests of `context_tokens` (prompt and output) whose caches fit at once."""
    return _floor(kv_budget(memory, weights, utilization) / (context_tokens * bytes_each + fixed_state_each))


def tokens_until_cache_equals_weights(weights: Number, bytes_each: Number) -> Number:
    """Cached tokens, over all requests, at which the cache is as large as the weights: weights / bytes per token."""
    return weights / bytes_each


def activation_bytes(shape: ModelShape, tokens_in_step: Number, bytes_per_value: Number = 2) -> Number:
    """Peak of one layer at a time, at the MLP: residual and normed input (2 * hidden) and gate, up, product (3 * f).

    Activations of earlier layers are not kept at inference, so this does not grow with the number of layers.
    """
    mlp = (3 if shape.gated_mlp else 2) * shape.intermediate_size
    return tokens_in_step * (2 * shape.hidden_size + mlp) * bytes_per_value


def logits_bytes(vocab_size: Number, positions: Number, bytes_per_value: Number = 4) -> Number:
    """Bytes of fp32 logits: one row per requested position (one per sequence is enough to sample)."""
    return vocab_size * positions * bytes_per_value


def score_bytes(num_heads: Number, query_tokens: Number, kv_tokens: Number, bytes_per_value: Number = 2) -> Number:
    """Bytes of one layer's score matrix when attention is not fused: heads * queries * keys (fused attention: 0)."""
    return num_heads * query_tokens * kv_tokens * bytes_per_value


@dataclass(frozen=True)
class MemoryPlan:
    """Where the memory of one prefill goes, in bytes. `usable` is utilization times the device memory."""

    usable: float
    weights: float
    cache: float
    activations: float
    scores: float
    logits: float

    @property
    def total(self) -> float:
        return self.weights + self.cache + self.activations + self.scores + self.logits

    @property
    def fits(self) -> bool:
        return self.total <= self.usable

    @property
    def components(self) -> dict[str, float]:
        """Component name -> bytes, in the order in which a reader should suspect them."""
        names = ("weights", "cache", "activations", "scores", "logits")
        return {name: getattr(self, name) for name in names}

    def report(self, binary: bool = False) -> str:
        """One line per component and the verdict."""
        lines = [f"{name:<12}{format_bytes(size, binary):>12}" for name, size in self.components.items()]
        gap = format_bytes(abs(self.usable - self.total), binary)
        verdict = f"fits, {gap} left" if self.fits else f"out of memory by {gap}"
        return "\n".join([*lines, f"{'total':<12}{format_bytes(self.total, binary):>12}  {verdict}"])


def plan_memory(
    shape: ModelShape,
    memory: float,
    prompt_tokens: int,
    sequences: int = 1,
    *,
    weights: float | None = None,
    utilization: float = 0.9,
    bytes_per_value: float = 2,
    chunk_tokens: int | None = None,
    fused_attention: bool = True,
    logits_for_all_positions: bool = False,
) -> MemoryPlan:
    """Memory of prefilling `sequences` prompts together, component by component (why long prompts run out of memory).

    chunk_tokens  tokens computed per step (chunked prefill); None: the whole prompt of every sequence at once
    """
    in_step = sequences * prompt_tokens if chunk_tokens is None else min(chunk_tokens, sequences * prompt_tokens)
    queries = prompt_tokens if chunk_tokens is None else min(chunk_tokens, prompt_tokens)
    # Unfused scores: each sequence of the step has its own [heads, queries, keys]; whole prompts are square.
    unfused = score_bytes(shape.num_heads, queries, prompt_tokens, bytes_per_value) * (in_step / queries)
    return MemoryPlan(
        usable=utilization * memory,
        weights=float(weight_bytes(shape) if weights is None else weights),
        cache=float(cache_bytes(shape, prompt_tokens, sequences, bytes_per_value)),
        activations=float(activation_bytes(shape, in_step)),
        scores=0.0 if fused_attention else float(unfused),
        logits=float(logits_bytes(shape.vocab_size, in_step if logits_for_all_positions else sequences)),
    )


def _floor(value: Number) -> Number:
    """Whole tokens: int for a scalar, an integer array for an array."""
    whole = np.floor(value)
    return int(whole) if np.ndim(whole) == 0 else whole.astype(np.int64)
