"""The roofline: work of a given arithmetic intensity reaches min(peak, intensity * bandwidth) FLOP/s.

Arithmetic intensity is the FLOP done per byte moved between device memory and the chip (Williams et al. 2009). It
belongs to a piece of work; the ridge point, peak / bandwidth, belongs to a device and a precision. Work below the
ridge is bound by bandwidth, work above it by compute.

A step of a decoder does two kinds of work (Pope et al. 2022, arXiv 2211.05102, has the same split):
    matrices   2 * params FLOP per token over bytes that all tokens of the step share   -> intensity grows with tokens
    attention  4 * heads * head_dim FLOP per cached token and layer over bytes that each sequence reads for itself
               -> intensity stays at num_heads / num_kv_heads per pair of bytes, whatever the batch (erratum E00.3)
A step reads all weights but an untied input embedding (`kv_cache.read_bytes`), and it needs logits of the last new
token of each sequence. No engine can do without what is counted here, so times are floors. Activations are left out of
the bytes; see `activation_traffic` for their size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reference_impl.theory.hardware import Device
from reference_impl.theory.kv_cache import bytes_per_token, read_bytes
from reference_impl.theory.latency import cache_traffic, engine_pass_flops, pass_flops, step_bound
from reference_impl.theory.model_shapes import ModelShape
from reference_impl.theory.units import Number

# ---------------------------------------------------------------- intensity


def attainable_flops(intensity: Number, device: Device, precision: str = "bf16") -> Number:
    """FLOP/s that work of this intensity (FLOP/byte) can reach: min(peak, intensity * bandwidth)."""
    return np.minimum(device.peak(precision), intensity * device.bandwidth)


def weight_intensity(tokens: Number, bits: Number = 16) -> Number:
    """FLOP/byte of the matrices alone when `tokens` share one read of them: 2 * tokens / (bits / 8).

    A 16-bit weight is two bytes for two FLOP, hence 1 per token; 2 at 8 bits, 4 at 4 bits (erratum E00.2).
    """
    return 2 * tokens / (bits / 8)


def gemm_intensity(rows: Number, d_in: Number, d_out: Number, bytes_per_value: Number = 2) -> Number:
    """FLOP/byte of [rows, d_in] x [d_in, d_out], each matrix moved once.

    2 * rows * d_in * d_out / (bytes * (rows * d_in + d_in * d_out + rows * d_out)): about `rows` at 2 bytes as long as
    rows is far below both dims, then it saturates at d_in * d_out / (d_in + d_out) (erratum E00.4).
    """
    moved = bytes_per_value * (rows * d_in + d_in * d_out + rows * d_out)
    return 2 * rows * d_in * d_out / moved


def decode_attention_intensity(shape: ModelShape, bytes_per_value: Number = 2) -> Number:
    """FLOP/byte of one new query over its own cache, whatever batch and context.

    MHA, GQA, MQA: 2 * num_heads / num_kv_heads / bytes_per_value, the group size at 2 bytes. Latent attention in its
    absorbed form: every head uses the same latent and rotary key for the scores and the latent again for the output.
    """
    if shape.kv_lora_rank is not None and shape.rope_dim is not None:
        cached = shape.kv_lora_rank + shape.rope_dim
        return 2 * shape.num_heads * (cached + shape.kv_lora_rank) / (cached * bytes_per_value)
    return 2 * shape.num_heads / shape.num_kv_heads / bytes_per_value


# ---------------------------------------------------------------- a whole step


def step_bytes(
    shape: ModelShape,
    batch: Number,
    past_tokens: Number,
    new_tokens: Number = 1,
    *,
    weights: Number | None = None,
    kv_bytes: Number = 2,
) -> Number:
    """Bytes moved in one step: the weights once, and per sequence its own cache, read and extended.

    Activations are left out. `weights`: the bytes read, by default `kv_cache.read_bytes` in 16 bit. For a mixture of
    experts that is what one token uses; pass the bytes of the experts that a batch is routed to.
    """
    read = read_bytes(shape) if weights is None else weights
    return read + batch * cache_traffic(shape, new_tokens, past_tokens, kv_bytes)


def step_intensity(
    shape: ModelShape,
    batch: Number,
    past_tokens: Number,
    new_tokens: Number = 1,
    *,
    weights: Number | None = None,
    kv_bytes: Number = 2,
) -> Number:
    """FLOP/byte of a whole step: `batch` sequences, each `new_tokens` new tokens over `past_tokens` cached ones."""
    flops = batch * (1.0 * engine_pass_flops(shape, new_tokens, past_tokens))
    return flops / step_bytes(shape, batch, past_tokens, new_tokens, weights=weights, kv_bytes=kv_bytes)


def max_decode_intensity(shape: ModelShape, context: Number, kv_bytes: Number = 2) -> Number:
    """FLOP/byte of a decode step as the batch grows without bound: what no batch can exceed (erratum E00.3).

    context: tokens of each sequence, the new one included.
    """
    return pass_flops(shape, 1, context - 1) / cache_traffic(shape, 1, context - 1, kv_bytes)


def compute_bound_context(params: Number, kv_bytes_per_token: Number, ridge: Number, attention: Number) -> Number:
    """Longest mean context at which some batch still reaches the ridge: 2 * params / (KV bytes * (ridge - attention)).

    ridge and attention (its intensity, see `decode_attention_intensity`) in FLOP/byte. Where attention is at the ridge
    by itself every context qualifies: infinity.
    """
    gap = np.asarray(ridge, dtype=float) - attention
    found = np.where(gap > 0, 2 * params / (kv_bytes_per_token * np.where(gap > 0, gap, 1.0)), np.inf)
    return float(found) if found.ndim == 0 else found


def batch_for_ridge(
    shape: ModelShape, context: Number, ridge: Number, kv_bytes: Number = 2, *, weights: Number | None = None
) -> Number:
    """Smallest batch (not rounded) whose decode step reaches `ridge` FLOP/byte; infinity where none does.

    weights / (FLOP per sequence / ridge - KV bytes per sequence), from batch * FLOP = ridge * (weights + batch * KV).
    """
    read = read_bytes(shape) if weights is None else weights
    spare = pass_flops(shape, 1, context - 1) / ridge - cache_traffic(shape, 1, context - 1, kv_bytes)
    spare = np.asarray(spare, dtype=float)
    found = np.where(spare > 0, read / np.where(spare > 0, spare, 1.0), np.inf)
    return float(found) if found.ndim == 0 else found


def activation_traffic(shape: ModelShape, bytes_per_value: Number = 2) -> Number:
    """Bytes per token that the matrices of all layers read as input and write as output, each once.

    Q, K and V share one read, and so do gate and up. Norms, residuals and activation functions come on top unless they
    are fused with their neighbours. Raises ValueError where layers are not uniform and dense.
    """
    outputs = {name: wide for name, (_, wide) in shape.layer_matrices.items()}
    inputs = {name: shape.layer_matrices[name][0] for name in ("q", "o", "up", "down")}
    return shape.layers * (sum(inputs.values()) + sum(outputs.values())) * bytes_per_value


@dataclass(frozen=True)
class Ledger:
    """Bytes of device memory moved per generated token. Every way to lower them lowers one of these terms."""

    weights: Number  # shared by the batch: weight bytes / batch
    cache_read: Number  # its own context, and the fixed state of a hybrid
    cache_write: Number  # its own new key and value, and that state again
    activations: Number

    @property
    def total(self) -> Number:
        return self.weights + self.cache_read + self.cache_write + self.activations


def bytes_per_generated_token(
    shape: ModelShape, batch: Number, context: Number, *, weights: Number | None = None, kv_bytes: Number = 2
) -> Ledger:
    """The ledger of a decode step of `batch` sequences with `context` cached tokens each, divided by its tokens."""
    read = read_bytes(shape) if weights is None else weights
    per_token, fixed = bytes_per_token(shape, kv_bytes), shape.fixed_state_bytes
    return Ledger(read / batch, context * per_token + fixed, per_token + fixed, activation_traffic(shape))


# ---------------------------------------------------------------- placing work on a device


@dataclass(frozen=True)
class Placement:
    """Where a step lands on the roofline of one device. Rates in FLOP/s, intensities in FLOP/byte."""

    flops: Number
    num_bytes: Number
    ridge: float
    attainable: Number
    seconds: Number

    @property
    def intensity(self) -> Number:
        return self.flops / self.num_bytes

    @property
    def compute_bound(self) -> Number:
        return self.intensity >= self.ridge

    @property
    def utilization(self) -> Number:
        """Largest share of the peak compute that this step can use: min(1, intensity / ridge)."""
        return np.minimum(1.0, self.intensity / self.ridge)


def place(
    shape: ModelShape,
    device: Device,
    batch: Number = 1,
    past_tokens: Number = 0,
    new_tokens: Number = 1,
    *,
    precision: str = "bf16",
    weights: Number | None = None,
    kv_bytes: Number = 2,
) -> Placement:
    """A step of `batch` sequences on `device`; `precision` is that of the arithmetic, `weights` the bytes read.

    `seconds` is a floor: compute and memory overlap perfectly, and nothing else takes time. Logits are counted for the
    last new token of each sequence; a pass that verifies drafts needs those of all.
    """
    flops = batch * (1.0 * engine_pass_flops(shape, new_tokens, past_tokens))
    moved = step_bytes(shape, batch, past_tokens, new_tokens, weights=weights, kv_bytes=kv_bytes)
    return Placement(
        flops=flops,
        num_bytes=moved,
        ridge=device.ridge(precision),
        attainable=attainable_flops(flops / moved, device, precision),
        seconds=step_bound(flops, moved, device, precision),
    )
