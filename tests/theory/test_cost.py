"""Prices scale as money does; the throughput of a deployment is the best batch that fits and meets its objective."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.theory import cost
from reference_impl.theory.hardware import device
from reference_impl.theory.kv_cache import cache_bytes, kv_budget, weight_bytes
from reference_impl.theory.latency import decode_seconds
from reference_impl.theory.model_shapes import model
from reference_impl.theory.units import GB

H100, L8, L70 = device("H100"), model("llama-3-8b"), model("llama-3-70b")
POSITIVE = st.floats(0.01, 1e5)


@given(POSITIVE, POSITIVE, st.integers(1, 1000), st.floats(0.01, 1))
def test_a_million_tokens_cost_what_the_hours_that_make_them_cost(
    dollars: float, rate: float, devices: int, used: float
) -> None:
    price = cost.dollars_per_million_tokens(dollars, rate, devices, used)
    hours = 1e6 / (rate * used) / 3600
    assert price == pytest.approx(hours * devices * dollars)
    assert cost.dollars_per_million_tokens(dollars, rate, devices, used / 2) == pytest.approx(2 * price)


@given(st.floats(1, 1e5), st.floats(0, 10))
def test_a_gain_saves_less_of_the_fleet_than_it_adds_to_each_device(devices: float, gain: float) -> None:
    saved = cost.devices_saved(devices, gain)
    assert (devices - saved) * (1 + gain) == pytest.approx(devices)  # the same work
    assert 0 <= saved <= gain * devices
    assert cost.dollars_per_year(saved, 2.5) == pytest.approx(saved * 2.5 * 8760)


@given(st.floats(1, 1e6), st.floats(1, 1e4), st.floats(0.1, 1))
def test_devices_for_a_load_are_enough_and_one_less_is_not(load: float, each: float, used: float) -> None:
    n = cost.devices_for_load(load, each, used)
    assert n == int(n) >= 1
    assert n * each * used >= load * (1 - 1e-9)
    assert (n - 1) * each * used < load


def test_a_load_that_fills_devices_exactly_needs_no_further_one() -> None:
    loads = np.array([1, 3, 7, 49]) * 1.1
    assert cost.devices_for_load(loads, 1.1).tolist() == [1, 3, 7, 49]
    assert cost.devices_for_load(0, 1.1) == 0


# ---------------------------------------------------------------- throughput


@given(st.integers(16, 20_000), st.integers(1, 8), st.sampled_from(["H100", "H200", "MI300X", "B200"]))
def test_without_an_objective_the_batch_is_what_fits(context: int, n: int, name: str) -> None:
    part = device(name)
    found = cost.max_throughput(L8, part, context, num_devices=n)
    budget = kv_budget(n * part.capacity, weight_bytes(L8))
    assert cache_bytes(L8, context, found.batch) <= budget < cache_bytes(L8, context, found.batch + 1)
    assert found.step_seconds == pytest.approx(decode_seconds(L8, context, part, found.batch) / n)
    assert found.tokens_per_second == pytest.approx(found.batch / found.step_seconds)
    arithmetic = found.batch * 2 * L8.linear_params / n / part.peak()
    assert (found.bound == "compute") >= (arithmetic > found.step_seconds)
    assert found.bound in ("capacity", "compute")


@given(st.integers(16, 20_000), st.floats(0.0, 1.0))
def test_an_objective_gives_the_largest_batch_that_meets_it(context: int, where: float) -> None:
    free = cost.max_throughput(L8, H100, context)
    alone = float(decode_seconds(L8, context, H100))
    tpot = alone + where * (free.step_seconds - alone)
    asked = cost.max_throughput(L8, H100, context, tpot=tpot)
    assert asked.step_seconds <= tpot * (1 + 1e-9)
    assert asked.batch <= free.batch
    if asked.batch < free.batch:
        assert asked.bound == "objective"
        assert float(decode_seconds(L8, context, H100, asked.batch + 1)) > tpot
    else:
        assert asked.bound == free.bound


def test_more_devices_fewer_bits_or_a_shorter_context_never_lower_throughput() -> None:
    base = cost.max_throughput(L70, H100, 4096, num_devices=4).tokens_per_second
    assert cost.max_throughput(L70, H100, 4096, num_devices=8).tokens_per_second > 2 * base
    assert cost.max_throughput(L70, H100, 2048, num_devices=4).tokens_per_second > base
    assert cost.max_throughput(L70, H100, 4096, num_devices=4, kv_bytes=1).tokens_per_second > base
    eight_bit = cost.max_throughput(L70, H100, 4096, num_devices=4, weights=weight_bytes(L70, 8))
    assert eight_bit.tokens_per_second > base
    assert cost.max_throughput(L70, H100, 4096, num_devices=4, utilization=0.95).tokens_per_second > base


def test_a_short_context_that_fills_the_memory_is_bound_by_arithmetic() -> None:
    assert cost.max_throughput(L8, H100, 64).bound == "compute"
    assert cost.max_throughput(L8, H100, 8192).bound == "capacity"
    assert cost.max_throughput(L8, device("H200"), 1).batch > 500_000  # found without trying every batch


def test_a_hybrid_pays_for_its_state_in_every_sequence() -> None:
    hybrid = model("qwen3-next-80b-a3b")
    found = cost.max_throughput(hybrid, device("H200"), 1, weights=100 * GB)
    assert found.batch == int((0.9 * 141 - 100) * GB // (hybrid.fixed_state_bytes + 24_576))


def test_deployments_that_cannot_exist_are_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match="expected at most 80.0 GB .* use at least 2 devices"):
        cost.max_throughput(L70, H100, 4096)
    with pytest.raises(ValueError, match="expected room for at least one sequence of 100000 tokens"):
        cost.max_throughput(L70, H100, 100_000, num_devices=2)
    with pytest.raises(ValueError, match="expected steps of at most 0.001 s, got 0.00[0-9]+ s with one sequence"):
        cost.max_throughput(L8, H100, 4096, tpot=1e-3)
    with pytest.raises(KeyError, match="fp4"):
        cost.max_throughput(L8, H100, 4096, precision="fp4")
