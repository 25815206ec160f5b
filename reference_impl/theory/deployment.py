"""One model on one group of devices: the shortest time of any ragged step, and what a latency budget pays for.

    step = max(FLOP / (mfu * peaks), bytes / (mbu * bandwidths)) + communication
FLOP count logits for the last new token of each row (`latency.engine_pass_flops`), bytes all weights but an untied
input embedding: with mfu = mbu = 1 and no communication this is a floor. Tensor parallelism divides FLOP and bytes by
the number of devices and adds 2 * layers all-reduces. Host work, launches and sampling are left out, so a real engine
is slower; mfu and mbu are the assumed shares of the peaks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reference_impl.theory import kv_cache, latency
from reference_impl.theory.collectives import all_reduce_message, all_reduces_per_token, ring_all_reduce
from reference_impl.theory.hardware import Device, device
from reference_impl.theory.model_shapes import ModelShape, model
from reference_impl.theory.units import Number


@dataclass(frozen=True)
class Deployment:
    """A model on devices. Raises ValueError where the weights do not fit, KeyError for a precision the device lacks.

    Tensor parallelism splits the KV heads; with more devices than heads a head is kept more than once.
    weight_bits: as stored; precision: what the matrices compute in; kv_bytes: per cached value. alpha: seconds of
    latency of one message between devices.
    """

    shape: ModelShape
    device: Device
    num_devices: int = 1
    weight_bits: float = 16
    precision: str = "bf16"
    mfu: float = 1.0
    mbu: float = 1.0
    kv_bytes: float = 2
    alpha: float = 2e-6

    def __post_init__(self) -> None:
        for name in ("mfu", "mbu"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}: expected a share above 0 and at most 1, got {getattr(self, name)!r}")
        if self.shape.active_params is not None:
            raise ValueError(
                f"{self.shape.name} is a mixture of experts: which weights a step reads depends on the tokens in it, "
                "and that is not modelled here; choose a dense model"
            )
        latency.require_fit(self.weights, self.device, self.num_devices)
        self.device.peak(self.precision)

    @property
    def weights(self) -> float:
        """Bytes of the weights, all devices together."""
        return float(kv_cache.weight_bytes(self.shape, self.weight_bits))

    @property
    def read(self) -> float:
        """Bytes of the weights that every pass reads, all devices together: all but an untied input embedding."""
        return float(kv_cache.read_bytes(self.shape, self.weight_bits))

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token's keys and values, all layers."""
        return float(kv_cache.bytes_per_token(self.shape, self.kv_bytes))

    @property
    def cache_copies(self) -> float:
        """How often each KV head is kept: once up to num_kv_heads devices, beyond that devices share a head's copy."""
        return max(1.0, self.num_devices / self.shape.num_kv_heads)

    def cache_tokens(self, utilization: float = 0.9) -> int:
        """Tokens whose keys and values fit beside the weights, over all requests."""
        memory, each = self.num_devices * self.device.capacity, self.cache_copies * self.bytes_per_token
        return int(kv_cache.tokens_that_fit(memory, self.weights, each, utilization))

    def step_seconds(self, new_tokens: Number, past_tokens: Number) -> float:
        """Seconds of one forward pass at the assumed shares of the peaks.

        Arrays with one entry per row: tokens computed, tokens already in the cache.
        """
        new, past = np.atleast_1d(new_tokens).astype(float), np.atleast_1d(past_tokens).astype(float)
        flops = np.sum(latency.engine_pass_flops(self.shape, new, past))
        cache = np.sum(latency.cache_traffic(self.shape, new, past, self.kv_bytes))
        moved = self.read + self.cache_copies * cache
        n = self.num_devices
        bound = latency.step_bound(flops / n, moved / n, self.device, self.precision, self.mfu, self.mbu)
        return float(bound) + self.communication_seconds(float(new.sum()))

    def communication_seconds(self, tokens: Number) -> float:
        """Seconds of the all-reduces of one pass over a ring, not overlapped with work; 0 on one device."""
        if self.num_devices == 1:
            return 0.0
        message = all_reduce_message(tokens, self.shape.hidden_size)
        one = ring_all_reduce(message, self.num_devices, self.alpha, self.device.link_per_direction)
        return float(all_reduces_per_token(self.shape.layers) * one)

    def prefill_seconds(self, prompt_tokens: int, cached_tokens: int = 0) -> float:
        """Seconds of one prompt alone, computed in one pass; `cached_tokens` of it were found in a prefix cache."""
        return self.step_seconds(prompt_tokens - cached_tokens, cached_tokens)

    def tpot(self, context_tokens: float, batch: int = 1) -> float:
        """Seconds of one decode step of `batch` sequences of `context_tokens` each, the new token included."""
        return self.step_seconds(np.ones(batch), np.full(batch, context_tokens - 1.0))

    def longest_prompt(self, seconds: float) -> int:
        """Longest prompt whose prefill alone takes at most `seconds`; 0 if even one token takes longer.

        The model's context and the memory are no limit here.
        """
        low, high = 0, 1
        while high < 2**26 and self.prefill_seconds(high) <= seconds:
            low, high = high, 2 * high
        while high - low > 1:  # prefill_seconds(low) <= seconds < prefill_seconds(high)
            middle = (low + high) // 2
            low, high = (middle, high) if self.prefill_seconds(middle) <= seconds else (low, middle)
        return low


# The deployment of the worked problems of all chapters, at the limits of the hardware: mfu and mbu are 1, and a message
# between two GPUs takes 2 us beside its bytes. `dataclasses.replace(WORKED, mfu=0.5)` is one whose problem says so.
WORKED = Deployment(model("llama-3-70b"), device("H100"), num_devices=4)


@dataclass(frozen=True)
class RequestTime:
    """Where the seconds of one request go: latency = queue + prefill + (N - 1) * tpot (erratum E01.9)."""

    queue: float
    prefill: float
    tpot: float
    output_tokens: int

    @property
    def ttft(self) -> float:
        return self.queue + self.prefill

    @property
    def decode(self) -> float:
        return (self.output_tokens - 1) * self.tpot

    @property
    def latency(self) -> float:
        return float(latency.request_seconds(self.queue, self.prefill, self.tpot, self.output_tokens))

    def tokens_within(self, budget: float) -> int:
        """Output tokens that a total of `budget` seconds pays for."""
        return int(latency.max_output_tokens(budget, self.ttft, self.tpot))


def request_time(
    deployment: Deployment, prompt_tokens: int, output_tokens: int, queue: float = 0.0, batch: int = 1
) -> RequestTime:
    """A request that waits `queue` seconds, is prefilled alone, and decodes in a batch of `batch` such requests.

    The step time is taken at the middle of the output; it grows linearly, so its mean is exact as long as one bound
    holds throughout. Raises ValueError where `batch` such requests do not fit beside the weights.
    """
    if min(prompt_tokens, output_tokens, batch) < 1 or queue < 0:
        raise ValueError(
            f"expected prompt, output and batch of at least 1 and a queue of at least 0 s, got {prompt_tokens}, "
            f"{output_tokens}, {batch} and {queue}"
        )
    needed = batch * (prompt_tokens + output_tokens - 1)
    if needed > deployment.cache_tokens():
        raise ValueError(
            f"expected at most {deployment.cache_tokens():,} cached tokens beside the weights on "
            f"{deployment.num_devices} x {deployment.device.name}, got {needed:,} for {batch} requests; use a smaller "
            "batch, a shorter context, more devices, or fewer bits per weight"
        )
    # Output token number i (from 2) comes from a pass whose context is prompt + i - 1.
    middle = prompt_tokens + max(1.0, output_tokens / 2)
    return RequestTime(queue, deployment.prefill_seconds(prompt_tokens), deployment.tpot(middle, batch), output_tokens)
