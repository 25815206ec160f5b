"""Operation counts with and without a KV cache, and the shortest time a device needs for them.

Two kinds of work per forward pass, which grow differently (errata E02.1, E02.2, E02.13):
    linear     every new token passes every matrix once:      2 * params FLOP per token
    attention  each new token attends to itself and all before: 4 * heads * head_dim * layers FLOP per (query, key) pair
               (latent attention: see `flops_per_pair`)
Generating T tokens from a prompt of S tokens takes T forward passes, with a cache or without. The token sampled last is
never fed back, so pass number i (from 0) sees S + i tokens, and a cache holds S + T - 1 at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reference_impl.theory.hardware import Device
from reference_impl.theory.kv_cache import bytes_per_token, read_bytes
from reference_impl.theory.model_shapes import ModelShape
from reference_impl.theory.units import Number, format_bytes

# ---------------------------------------------------------------- counts


def causal_pairs(query_tokens: Number, past_tokens: Number = 0) -> Number:
    """(query, key) pairs of one causal pass, q * past + q * (q + 1) / 2: a query attends to itself and all before."""
    return query_tokens * past_tokens + query_tokens * (query_tokens + 1) // 2


def uncached_linear_tokens(prompt_tokens: Number, new_tokens: Number) -> Number:
    """Tokens sent through the matrices without a cache: S + (S+1) + ... + (S+T-1) = T * (2S + T - 1) / 2."""
    return new_tokens * (2 * prompt_tokens + new_tokens - 1) // 2


def cached_linear_tokens(prompt_tokens: Number, new_tokens: Number) -> Number:
    """Tokens sent through the matrices with a cache: the prompt once and each fed-back token once, S + T - 1."""
    return prompt_tokens + new_tokens - 1


def uncached_attention_pairs(prompt_tokens: Number, new_tokens: Number) -> Number:
    """Causal pairs without a cache: sum of n(n+1)/2 for n = S ... S+T-1, by the tetrahedral numbers n(n+1)(n+2)/6."""
    last, before = prompt_tokens + new_tokens - 1, prompt_tokens - 1
    return last * (last + 1) * (last + 2) // 6 - before * (before + 1) * (before + 2) // 6


def cached_attention_pairs(prompt_tokens: Number, new_tokens: Number) -> Number:
    """Causal pairs with a cache: each of the S+T-1 positions attends to itself and all before it, once."""
    return causal_pairs(cached_linear_tokens(prompt_tokens, new_tokens))


# ---------------------------------------------------------------- FLOP


def gpt_layer_params(layers: Number, hidden_size: Number) -> Number:
    """Matrix parameters of GPT-style layers (QKV, output, an MLP of width 4d): 12 * layers * hidden_size^2."""
    return 12 * layers * hidden_size**2


def linear_flops(params: Number, tokens: Number) -> Number:
    """FLOP of the matrices: 2 * params per token (a multiplication and an addition per weight)."""
    return 2 * params * tokens


def attention_flops(pairs: Number, layers: Number, num_heads: Number, head_dim: Number) -> Number:
    """FLOP of scores and weighted sum, 2 * head_dim each per pair, head and layer; the softmax is left out."""
    return 4 * pairs * layers * num_heads * head_dim


def flops_per_pair(shape: ModelShape) -> tuple[int, int]:
    """FLOP of attention, all layers and heads, per pair with another new token and per pair with a cached one.

    Both are 2 * (head_dim + v_head_dim) a head and layer. Latent attention reads the cache in its absorbed form: every
    head uses the latent and rotary key for the score and the latent for the output, 2 * (2 * kv_lora_rank + rope_dim);
    more FLOP than with rebuilt keys and values, and no bytes but the latent's (DeepSeek-V2, arXiv 2405.04434).
    """
    heads = 2 * shape.kv_layers * shape.num_heads
    new = heads * (shape.head_dim + shape.value_dim)
    if shape.kv_lora_rank is None or shape.rope_dim is None:
        return new, new
    return new, heads * (2 * shape.kv_lora_rank + shape.rope_dim)


def pass_flops(shape: ModelShape, query_tokens: Number, past_tokens: Number = 0) -> Number:
    """FLOP of one forward pass of `query_tokens` new tokens over `past_tokens` cached ones.

    Exact in the pairs; 2 * params uses all matrices but the input embedding (see `ModelShape.linear_params`).
    """
    query, past = _wide(query_tokens), _wide(past_tokens)
    new, cached = flops_per_pair(shape)
    return linear_flops(shape.linear_params, query) + new * causal_pairs(query) + cached * query * past


def prefill_flops(shape: ModelShape, prompt_tokens: Number) -> Number:
    """FLOP to compute a whole prompt once, logits for every token; an engine needs fewer, see `engine_pass_flops`."""
    return pass_flops(shape, prompt_tokens, 0)


def decode_flops(shape: ModelShape, context_tokens: Number) -> Number:
    """FLOP of one decode step of one sequence whose context, the new token included, is `context_tokens`."""
    return pass_flops(shape, 1, context_tokens - 1)


def engine_pass_flops(shape: ModelShape, query_tokens: Number, past_tokens: Number = 0) -> Number:
    """FLOP of one pass of one sequence in an engine: logits of its last new token only, not of every token.

    `pass_flops` less 2 * vocab_size * hidden_size for each of the other tokens: nothing in a decode step, and in a long
    prefill the output matrix's share of the weights.
    """
    head = shape.vocab_size * shape.hidden_size
    return pass_flops(shape, query_tokens, past_tokens) - linear_flops(head, _wide(query_tokens) - 1)


def _wide(count: Number) -> Number:
    """Integer arrays as floats: products that fit Python's integers would overflow 64 bits silently."""
    return count.astype(float) if isinstance(count, np.ndarray | np.generic) else count


# ---------------------------------------------------------------- time


def cache_traffic(shape: ModelShape, new_tokens: Number, past_tokens: Number, bytes_per_value: Number = 2) -> Number:
    """Bytes of cache one sequence moves in one pass: past keys and values read, new ones written.

    The fixed state of a hybrid is read and written whole, however many tokens the pass computes.
    """
    return (past_tokens + new_tokens) * bytes_per_token(shape, bytes_per_value) + 2 * shape.fixed_state_bytes


def step_bound(
    flops: Number, num_bytes: Number, device: Device, precision: str = "bf16", mfu: Number = 1.0, mbu: Number = 1.0
) -> Number:
    """Shortest seconds for a step: max(flops / (mfu * peak), bytes / (mbu * bandwidth)).

    mfu and mbu are the shares of peak compute and bandwidth that are reached. With 1.0, and with no operation and no
    byte counted that an engine can do without, it is a floor that none can beat; otherwise it is an estimate.
    """
    return np.maximum(flops / (mfu * device.peak(precision)), num_bytes / (mbu * device.bandwidth))


def require_fit(num_bytes: float, device: Device, num_devices: int = 1) -> None:
    """Refuse a deployment that cannot exist: a latency for weights that do not fit is not a latency (erratum E01.5)."""
    capacity = device.capacity * num_devices
    if num_bytes > capacity:
        needed = int(np.ceil(num_bytes / device.capacity))
        raise ValueError(
            f"expected at most {format_bytes(capacity)} on {num_devices} x {device.name}, "
            f"got {format_bytes(num_bytes)}; use at least {needed} devices, fewer bits per weight, or a larger device"
        )


def prefill_seconds(
    shape: ModelShape,
    prompt_tokens: Number,
    device: Device,
    precision: str = "bf16",
    mfu: Number = 1.0,
    weights: Number | None = None,
) -> Number:
    """Bound for prefilling one prompt: its FLOP with the logits of its last token, or reading weights, writing cache.

    weights: the bytes read, by default `kv_cache.read_bytes` in 16 bit.
    """
    moved = _weights(shape, weights) + cache_traffic(shape, prompt_tokens, 0)
    return step_bound(engine_pass_flops(shape, prompt_tokens), moved, device, precision, mfu)


def decode_seconds(
    shape: ModelShape,
    context_tokens: Number,
    device: Device,
    batch: Number = 1,
    precision: str = "bf16",
    weights: Number | None = None,
    bytes_per_value: Number = 2,
    mfu: Number = 1.0,
) -> Number:
    """Bound for one decode step of `batch` sequences: weights once, plus each sequence's own cache and fixed state.

    weights: the bytes read, by default `kv_cache.read_bytes` in 16 bit. For a mixture of experts that is what one token
    uses, a bound that is far too low for a batch: pass the bytes of the experts that its tokens are routed to.
    """
    cache = cache_traffic(shape, 1, context_tokens - 1, bytes_per_value)
    flops = 1.0 * decode_flops(shape, context_tokens)
    return step_bound(batch * flops, _weights(shape, weights) + batch * cache, device, precision, mfu)


@dataclass(frozen=True)
class DecodeParts:
    """Seconds that each part of a decode step takes by itself, at the limits of the hardware."""

    weights: float
    cache: float
    arithmetic: float

    @property
    def bound(self) -> float:
        """Seconds as in `decode_seconds`: reading is one stream, and arithmetic runs beside it."""
        return max(self.weights + self.cache, self.arithmetic)


def decode_parts(
    shape: ModelShape,
    context_tokens: int,
    device: Device,
    batch: int = 1,
    precision: str = "bf16",
    weights: float | None = None,
    bytes_per_value: float = 2,
) -> DecodeParts:
    """The parts of `decode_seconds`, with its arguments. Raises KeyError for a precision the device lacks."""
    cache = batch * cache_traffic(shape, 1, context_tokens - 1, bytes_per_value)
    flops = batch * decode_flops(shape, context_tokens)
    return DecodeParts(
        float(_weights(shape, weights) / device.bandwidth),
        float(cache / device.bandwidth),
        float(flops / device.peak(precision)),
    )


@dataclass(frozen=True)
class GenerationCost:
    """What one generation costs: exact counts, and a lower bound in seconds for one sequence alone on the device.

    flops: 2 * params per token, logits of every token included; the bound needs those of each pass's last token only.
    """

    forward_passes: int
    linear_tokens: int
    attention_pairs: int
    flops: float
    seconds: float


def generation_cost(
    shape: ModelShape,
    prompt_tokens: int,
    new_tokens: int,
    device: Device,
    cached: bool,
    precision: str = "bf16",
    mfu: float = 1.0,
    weights: float | None = None,
) -> GenerationCost:
    """Cost of generating `new_tokens` after `prompt_tokens`, with or without a KV cache, summed pass by pass."""
    if prompt_tokens < 1 or new_tokens < 1:
        raise ValueError(
            f"expected at least one prompt token and one new token, got {prompt_tokens} and {new_tokens}; "
            "the first pass needs at least one token"
        )
    length = np.arange(prompt_tokens, prompt_tokens + new_tokens, dtype=np.float64)  # context of each pass
    query = length if not cached else np.where(length == prompt_tokens, length, 1.0)
    past = length - query
    flops = pass_flops(shape, query, past)
    moved = _weights(shape, weights) + (cache_traffic(shape, query, past) if cached else 0.0)
    count_linear, count_pairs = (
        (cached_linear_tokens, cached_attention_pairs) if cached else (uncached_linear_tokens, uncached_attention_pairs)
    )
    return GenerationCost(
        forward_passes=new_tokens,
        linear_tokens=count_linear(prompt_tokens, new_tokens),
        attention_pairs=count_pairs(prompt_tokens, new_tokens),
        flops=float(flops.sum()),
        seconds=float(np.sum(step_bound(engine_pass_flops(shape, query, past), moved, device, precision, mfu))),
    )


def _weights(shape: ModelShape, weights: Number | None) -> Number:
    return read_bytes(shape) if weights is None else weights


def tiered_read_seconds(parts: Sequence[tuple[Number, Number]], overlapped: bool) -> Number:
    """Time to read (bytes, byte/s) from several memories: the slowest if they overlap, the sum if not (E12.13)."""
    times = np.broadcast_arrays(*(num_bytes / bandwidth for num_bytes, bandwidth in parts))
    return np.max(times, axis=0) if overlapped else np.sum(times, axis=0)


# ---------------------------------------------------------------- shares and regimes


def attention_over_linear(params: Number, pairs: Number, tokens: Number, per_pair: Number) -> Number:
    """FLOP of attention over FLOP of the matrices, for `tokens` tokens and `pairs` (query, key) pairs.

    per_pair: 4 * layers * num_heads * head_dim. A prefill of L tokens has about L^2 / 2 pairs, a decode step `context`.
    """
    return per_pair * pairs / linear_flops(params, tokens)


def equal_prompt_length(params: Number, per_pair: Number) -> Number:
    """Prompt length at which attention costs what the matrices cost: 4 * params / per_pair (L^2 / 2 pairs)."""
    return 4 * params / per_pair


def flat_prefill_tokens(device: Device, precision: str = "bf16", bits: Number = 16, mfu: Number = 1.0) -> Number:
    """Tokens that a pass computes in the time its weights take to be read: ridge * (bits / 8) / 2 * mfu.

    Up to about here a prefill takes as long as a decode step: the flat regime (erratum E01.3).
    """
    return device.ridge(precision) * bits / 16 * mfu


def model_flops_utilization(flops: Number, seconds: Number, device: Device, precision: str = "bf16") -> Number:
    """MFU: the share of the dense peak that useful work used."""
    return flops / seconds / device.peak(precision)


def model_bandwidth_utilization(num_bytes: Number, seconds: Number, device: Device) -> Number:
    """MBU: the share of the peak bandwidth that the bytes a step must read used."""
    return num_bytes / seconds / device.bandwidth


# ---------------------------------------------------------------- one request


def request_seconds(queue: Number, prefill: Number, tpot: Number, output_tokens: Number) -> Number:
    """End-to-end latency: queue + prefill + (N - 1) * TPOT; the first token ends the prefill (erratum E01.9)."""
    return queue + prefill + (output_tokens - 1) * tpot


def max_output_tokens(budget: Number, ttft: Number, tpot: Number) -> Number:
    """Tokens that a latency budget in seconds pays for: 1 + floor((budget - TTFT) / TPOT), at least 0."""
    return np.maximum(0, np.floor((budget - ttft) / tpot + 1e-9) + 1)
