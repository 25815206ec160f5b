"""Errata of serving (E15.x) that have a closed form; the simulator shows the rest."""

import numpy as np
import pytest

from reference_impl.theory import adapters, kv_cache, queueing
from reference_impl.theory.hardware import device
from reference_impl.theory.links import transfer_seconds
from reference_impl.theory.model_shapes import model
from reference_impl.theory.units import MB

H100, L8 = device("H100"), model("llama-3-8b")


def test_e15_01_one_base_product_for_all_adapters_instead_of_one_pass_for_each() -> None:
    """Claim: most systems group requests by adapter and run the groups one after another.

    64 requests with 64 adapters of an 8B would read the weights 64 times: 307 ms per step. Computed once, with adapters
    of rank 16 (0.52 % of the model, 84 MB each) gathered beside it: 6.4 ms.
    """
    weights, adapter = kv_cache.weight_bytes(L8), adapters.lora_params(L8, 16)
    assert adapter / 1e6 == pytest.approx(41.9, abs=0.05)
    assert adapter / L8.num_params == pytest.approx(0.0052, abs=5e-5)
    assert 2 * adapter / MB == pytest.approx(84, abs=0.5)
    grouped = 64 * transfer_seconds(weights, H100.bandwidth)
    gathered = transfer_seconds(weights + 64 * 2 * adapter, H100.bandwidth)
    assert [grouped * 1e3, gathered * 1e3] == pytest.approx([307, 6.4], abs=0.5)
    assert gathered * 1e3 == pytest.approx(6.4, abs=0.05)


def test_e15_03_littles_law_counts_everyone_in_the_system_and_a_model_says_how_time_grows() -> None:
    """Claim: the law gives the mean queue length and shows how load inflates the wait.

    L = lambda W counts waiting and running, and says nothing about W. M/M/1 does: 2, 5, 10, 20 times the service at 50,
    80, 90, 95 %. 10 requests/s of 6 s each are 60 at once.
    """
    assert queueing.in_system(10, 6) == 60
    load = np.array([0.5, 0.8, 0.9, 0.95])
    assert queueing.mm1_seconds(1.0, load) == pytest.approx([2, 5, 10, 20])
    # The queue alone, without those in service, is shorter by the load.
    service, rate = 0.5, 1.6
    rho = queueing.utilization(rate, service)
    in_system = queueing.in_system(rate, queueing.mm1_seconds(service, rho))
    waiting = queueing.in_system(rate, queueing.mg1_wait_seconds(service, rho))
    assert (in_system, waiting) == (pytest.approx(4), pytest.approx(3.2))


def test_e15_03_a_simulated_queue_obeys_the_law_and_the_formula() -> None:
    """Little's law is counted on arrivals and departures, without assuming how they are spread."""
    rng, rate, service = np.random.default_rng(0), 0.8, 1.0
    arrivals = np.cumsum(rng.exponential(1 / rate, 200_000))
    needs = rng.exponential(service, arrivals.size)
    ends = np.empty_like(arrivals)
    free = 0.0
    for i, (arrival, need) in enumerate(zip(arrivals, needs, strict=True)):
        free = max(free, arrival) + need
        ends[i] = free
    mean_time = float(np.mean(ends - arrivals))
    assert mean_time == pytest.approx(queueing.mm1_seconds(service, rate * service), rel=0.1)
    sampled = np.linspace(arrivals[1000], arrivals[-1], 50_000)
    present = np.searchsorted(arrivals, sampled, "right") - np.searchsorted(np.sort(ends), sampled, "right")
    assert present.mean() == pytest.approx(queueing.in_system(rate, mean_time), rel=0.03)
    p95 = queueing.mm1_percentile(service, rate * service, 95)
    assert np.percentile(ends - arrivals, 95) == pytest.approx(p95, rel=0.1)
