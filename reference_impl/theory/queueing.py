"""How waiting grows with load: Little's law, and the queues that have a closed form.

Times in seconds, rates in requests per second. `utilization` rho = arrival rate * service time / servers. From rho = 1
on no steady state exists: the queue grows as long as the load lasts, and the formulas give infinity.
A serving engine is none of these queues: it serves many requests at once and slows down as it does. Use them for the
shape of the curve, and the simulator for numbers.
"""

from __future__ import annotations

import math

import numpy as np

from reference_impl.theory.units import Number


def in_system(arrival_rate: Number, seconds_in_system: Number) -> Number:
    """Little's law: mean number in the system, waiting and running, L = lambda * W (Little 1961; erratum E15.3).

    An identity for any stable system. It does not say how W grows with lambda.
    """
    return arrival_rate * seconds_in_system


def utilization(arrival_rate: Number, service_seconds: Number, servers: Number = 1) -> Number:
    """Share of the time that a server is busy, rho = lambda * S / c; above 1 the load cannot be served."""
    return arrival_rate * service_seconds / servers


def mm1_seconds(service_seconds: Number, rho: Number) -> Number:
    """Mean time in an M/M/1 system, waiting and service: W = S / (1 - rho). 2, 5, 10, 20 S at 50, 80, 90, 95 %."""
    return _over(service_seconds, rho)


def mm1_percentile(service_seconds: Number, rho: Number, percent: Number) -> Number:
    """Time in an M/M/1 system that `percent` of the requests stay below: it is exponential, so -W * ln(1 - p/100)."""
    with np.errstate(divide="ignore"):  # 100 %: infinity
        means = -np.log1p(-np.asarray(percent, dtype=float) / 100)
    # 0 % is 0 even where the mean is infinite.
    found = np.where(means > 0, mm1_seconds(service_seconds, rho) * np.where(means > 0, means, 1.0), 0.0)
    return float(found) if found.ndim == 0 else found


def mg1_wait_seconds(service_seconds: Number, rho: Number, scv: Number = 1.0) -> Number:
    """Mean wait before service in an M/G/1 queue (Pollaczek-Khinchine): rho / (1 - rho) * (1 + scv) / 2 * S.

    scv: variance of the service time over its mean squared; 1 exponential, 0 constant. Long prompts among short ones
    raise it, and with it all waits.
    """
    return _over(rho * (1 + scv) / 2 * service_seconds, rho)


def waiting_probability(arrival_rate: float, service_seconds: float, servers: int = 1) -> float:
    """Share of the requests that find all servers of an M/M/c queue busy (Erlang C); rho for one server."""
    if servers < 1:
        raise ValueError(f"expected at least one server, got {servers}")
    load = arrival_rate * service_seconds
    if load >= servers:
        return 1.0
    blocking = 1.0  # Erlang B by its recursion, which does not overflow
    for server in range(1, servers + 1):
        blocking = load * blocking / (server + load * blocking)
    return blocking / (1 - load / servers * (1 - blocking))


def mmc_wait_seconds(arrival_rate: float, service_seconds: float, servers: int) -> float:
    """Mean wait in an M/M/c queue (Erlang C): probability of waiting * S / (c - a), a = lambda * S."""
    waiting, load = waiting_probability(arrival_rate, service_seconds, servers), arrival_rate * service_seconds
    return waiting * service_seconds / (servers - load) if load < servers else math.inf


def ggc_wait_seconds(
    arrival_rate: float, service_seconds: float, servers: int = 1, arrival_scv: float = 1.0, service_scv: float = 1.0
) -> float:
    """Mean wait in a GI/G/c queue (Allen and Cunneen): that of M/M/c times (arrival_scv + service_scv) / 2.

    arrival_scv: of the gaps between arrivals, 1 for Poisson. Exact for M/M/c and for one server with Poisson arrivals
    (Pollaczek-Khinchine), else an approximation that improves as the load comes near 1.
    """
    return mmc_wait_seconds(arrival_rate, service_seconds, servers) * (arrival_scv + service_scv) / 2


def wait_percentile(mean_seconds: float, probability: float, percent: float) -> float:
    """Wait that `percent` of the requests stay below, if `probability` of them wait, and those exponentially long.

    Exact for M/M/c; near full load a good approximation for any queue.
    """
    if not probability > 1 - percent / 100:
        return 0.0
    return mean_seconds / probability * math.log(probability / (1 - percent / 100))


def _over(value: Number, rho: Number) -> Number:
    """value / (1 - rho), infinity from rho = 1 on."""
    spare = 1 - np.asarray(rho, dtype=float)
    found = np.where(spare > 0, value / np.where(spare > 0, spare, 1.0), np.inf)
    return float(found) if found.ndim == 0 else found
