"""Money: what a token costs, what a fleet saves, and the throughput that a deployment can reach at all.

A price needs a deployment that exists: weights that fit, a batch whose caches fit, a step fast enough (erratum E16.1).
Prices are inputs; none is stored here, because they change by the month.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reference_impl.theory.hardware import Device
from reference_impl.theory.kv_cache import bytes_per_token, concurrent_requests, read_bytes, weight_bytes
from reference_impl.theory.latency import cache_traffic, pass_flops, require_fit, step_bound
from reference_impl.theory.model_shapes import ModelShape
from reference_impl.theory.units import Number

HOURS_PER_YEAR = 24 * 365


def dollars_per_million_tokens(
    dollars_per_hour: Number, tokens_per_second: Number, num_devices: Number = 1, utilization: Number = 1.0
) -> Number:
    """Price of 10^6 tokens: devices * $/h / (tokens/s * 3600 * utilization) * 10^6.

    dollars_per_hour: of one device. tokens_per_second: of the whole deployment at full load; utilization: the share of
    the paid time at which it runs at that load. State whether input tokens count.
    """
    return num_devices * dollars_per_hour / (tokens_per_second * 3600 * utilization) * 1e6


def devices_saved(num_devices: Number, throughput_gain: Number) -> Number:
    """Devices no longer needed for the same work when each does (1 + gain) times as much: n * gain / (1 + gain).

    A gain of 30 % saves 23 % of the fleet, not 30 %.
    """
    return num_devices * throughput_gain / (1 + throughput_gain)


def dollars_per_year(num_devices: Number, dollars_per_hour: Number) -> Number:
    """Rent of `num_devices` for a year of 8,760 hours."""
    return num_devices * dollars_per_hour * HOURS_PER_YEAR


def devices_for_load(tokens_per_second: Number, per_device: Number, utilization: Number = 1.0) -> Number:
    """Whole devices for a load, each giving `per_device` tokens/s and kept at `utilization` of it."""
    return np.ceil(tokens_per_second / (per_device * utilization) * (1 - 1e-12))  # 3 * 1.1 / 1.1 is 3, not 4


@dataclass(frozen=True)
class Throughput:
    """The most output tokens/s of a deployment, and what keeps it from being higher.

    bound: 'capacity' (no room for one more sequence), 'compute' (no room, and the step is compute-bound already),
    'objective' (one more sequence would miss the required TPOT).
    """

    batch: int
    step_seconds: float
    bound: str

    @property
    def tokens_per_second(self) -> float:
        return self.batch / self.step_seconds


def max_throughput(
    shape: ModelShape,
    device: Device,
    context: int,
    *,
    num_devices: int = 1,
    precision: str = "bf16",
    weights: float | None = None,
    kv_bytes: float = 2,
    tpot: float | None = None,
    utilization: float = 0.9,
) -> Throughput:
    """Decode throughput at a mean `context`, by the roofline over all devices together, communication left out.

    The batch is the largest whose caches fit, or a smaller one where `tpot` (seconds) requires faster steps. Throughput
    grows with the batch as long as it fits, so capacity, not bandwidth alone, decides it (erratum E16.2).
    Raises ValueError where the weights do not fit, no sequence does, or no batch meets tpot.
    """
    held = float(weight_bytes(shape) if weights is None else weights)
    read = float(read_bytes(shape) if weights is None else weights)
    require_fit(held, device, num_devices)
    memory = num_devices * device.capacity
    per_sequence = float(cache_traffic(shape, 1, context - 1, kv_bytes))
    room = int(concurrent_requests(memory, held, context, bytes_per_token(shape, kv_bytes), utilization,
                                   fixed_state_each=shape.fixed_state_bytes))  # fmt: skip
    if room < 1:
        raise ValueError(
            f"expected room for at least one sequence of {context} tokens on {num_devices} x {device.name}, got none: "
            "use more devices, fewer bits, or a shorter context"
        )
    flops = float(pass_flops(shape, 1, context - 1))

    def seconds(batch: Number) -> Number:
        work = batch * flops / num_devices
        return step_bound(work, (read + batch * per_sequence) / num_devices, device, precision)

    batch = room
    if tpot is not None:
        # The largest batch whose operations and bytes each take no longer than tpot.
        by_compute = tpot * num_devices * device.peak(precision) / flops
        by_bandwidth = (tpot * num_devices * device.bandwidth - read) / per_sequence
        batch = min(room, int(np.floor(min(by_compute, by_bandwidth) * (1 + 1e-12))))
        if batch < 1:
            raise ValueError(
                f"expected steps of at most {tpot:g} s, got {float(seconds(1)):.3g} s with one sequence: "
                "use more devices, fewer bits, or another objective"
            )
    step = float(seconds(batch))
    compute = batch * flops / num_devices / device.peak(precision) >= step * (1 - 1e-12)
    bound = "objective" if batch < room else "compute" if compute else "capacity"
    return Throughput(batch, step, bound)
