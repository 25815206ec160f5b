"""What communication between devices costs: the alpha-beta model, and what it costs under tensor parallelism.

    time of a message = alpha + bytes / bandwidth
alpha: seconds of latency per step. bandwidth: byte/s of one device in one direction (half of what vendors print).
`num_bytes` is the size of the whole tensor on one device; `n` the number of devices. n = 1 costs nothing.
Algorithms and counts after Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from reference_impl.theory.units import Number


def ring_all_reduce(num_bytes: Number, n: Number, alpha: Number, bandwidth: Number) -> Number:
    """Seconds of reduce-scatter then all-gather round a ring: 2 (n-1) alpha + 2 (n-1)/n * bytes / bandwidth."""
    return 2 * (n - 1) * alpha + 2 * (n - 1) / n * num_bytes / bandwidth


def one_shot_all_reduce(num_bytes: Number, n: Number, alpha: Number, bandwidth: Number) -> Number:
    """Seconds if each rank sends everything to all others at once: alpha + (n-1) * bytes / bandwidth (0 for n = 1)."""
    return (np.asarray(n) > 1) * alpha + (n - 1) * num_bytes / bandwidth


def all_reduce_break_even(n: int, alpha: Number, bandwidth: Number) -> Number:
    """Message in bytes at which ring and one-shot take the same time; below it one-shot is faster.

    (2 (n-1) - 1) * alpha * bandwidth / ((n-1) - 2 (n-1)/n). With n = 2 both move the same bytes: infinity.
    """
    if n < 2:
        raise ValueError(f"expected at least 2 devices, got {n}: one device has nothing to reduce")
    extra_bytes = (n - 1) - 2 * (n - 1) / n
    return np.inf if extra_bytes == 0 else (2 * (n - 1) - 1) * alpha * bandwidth / extra_bytes


def all_gather(num_bytes: Number, n: Number, alpha: Number, bandwidth: Number) -> Number:
    """Seconds round a ring, num_bytes being the gathered tensor: (n-1) alpha + (n-1)/n * bytes / bandwidth."""
    return (n - 1) * alpha + (n - 1) / n * num_bytes / bandwidth


def reduce_scatter(num_bytes: Number, n: Number, alpha: Number, bandwidth: Number) -> Number:
    """Seconds round a ring, num_bytes being the tensor before: the mirror image of all_gather, and as long."""
    return all_gather(num_bytes, n, alpha, bandwidth)


def all_to_all(num_bytes: Number, n: Number, alpha: Number, bandwidth: Number) -> Number:
    """Seconds if every device sends 1/n of its tensor to each other in turn: (n-1) (alpha + bytes / n / bandwidth)."""
    return (n - 1) * (alpha + num_bytes / n / bandwidth)


# ---------------------------------------------------------------- tensor parallelism


def all_reduces_per_token(layers: Number, parallel_block: bool = False) -> Number:
    """All-reduces of one forward pass under tensor parallelism: two per layer (erratum E12.1).

    There is one after attention's output projection and one after the MLP's down projection (Megatron-LM, Shoeybi et
    al. 2019). parallel_block: attention and MLP side by side, as in PaLM and Falcon, share one.
    """
    return layers * (1 if parallel_block else 2)


def all_reduce_message(tokens: Number, hidden_size: Number, bytes_per_value: Number = 2) -> Number:
    """Bytes of one such all-reduce: one hidden vector per token of the step."""
    return tokens * hidden_size * bytes_per_value


def tensor_parallel_seconds(
    num_bytes: Number, bandwidth: Number, degree: Number, layers: Number, all_reduce_seconds: Number
) -> Number:
    """Floor of a decode step: each device reads its share, then 2 * layers all-reduces, not overlapped (erratum E01.7).

    num_bytes / (degree * bandwidth) + 2 * layers * all_reduce_seconds; with one device no all-reduce.
    """
    communication = np.where(np.asarray(degree) > 1, all_reduces_per_token(layers) * all_reduce_seconds, 0.0)
    total = num_bytes / (degree * bandwidth) + communication
    return float(total) if np.ndim(total) == 0 else total


def best_tensor_parallel_degree(
    num_bytes: float, bandwidth: float, layers: int, all_reduce: Callable[[int], float], degrees: Sequence[int]
) -> int:
    """The degree, among the possible ones, with the lowest floor for one stream.

    all_reduce: seconds of one all-reduce over a given number of devices, for example
    `lambda n: ring_all_reduce(all_reduce_message(1, hidden_size), n, 2e-6, 450e9)`.
    """
    return min(
        degrees,
        key=lambda n: float(tensor_parallel_seconds(num_bytes, bandwidth, n, layers, all_reduce(n) if n > 1 else 0.0)),
    )


def amdahl(share: Number, factor: Number) -> Number:
    """Share of the time that remains when `share` of it becomes `factor` times faster: 1 - share + share / factor.

    factor = infinity removes it. The speed-up is one over this.
    """
    return 1 - share + share / factor
