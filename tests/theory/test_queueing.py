"""Queues have their known limits: empty, full, one server, many, constant service."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.theory import queueing as q

SERVICE, LOAD = st.floats(1e-3, 1e3), st.floats(0, 0.999)


@given(SERVICE, LOAD)
def test_mm1_is_service_and_wait_and_the_mg1_with_exponential_service(service: float, rho: float) -> None:
    time = q.mm1_seconds(service, rho)
    assert time == pytest.approx(service / (1 - rho))
    assert time == pytest.approx(service + q.mg1_wait_seconds(service, rho, scv=1))
    assert q.mm1_seconds(service, 0) == service
    assert isinstance(time, float)


@given(SERVICE, st.floats(0, 0.99))
def test_waiting_grows_with_load_without_bound(service: float, rho: float) -> None:
    assert q.mm1_seconds(service, rho + 0.005) > q.mm1_seconds(service, rho)
    assert q.mm1_seconds(service, 1 - 1e-9) > 1e8 * service


@pytest.mark.parametrize("rho", [1.0, 1.5, 100])
def test_from_full_load_on_there_is_no_steady_state(rho: float) -> None:
    assert q.mm1_seconds(0.1, rho) == math.inf
    assert q.mg1_wait_seconds(0.1, rho, 0) == math.inf
    assert q.mmc_wait_seconds(rho * 4 / 0.1, 0.1, 4) == math.inf


@given(SERVICE, st.floats(0.01, 0.99), st.floats(0, 50))
def test_wait_follows_the_variance_of_service(service: float, rho: float, scv: float) -> None:
    """Pollaczek-Khinchine: constant service waits half as long as exponential service."""
    constant, exponential = (q.mg1_wait_seconds(service, rho, v) for v in (0, 1))
    assert exponential == pytest.approx(2 * constant)
    wait = q.mg1_wait_seconds(service, rho, scv)
    assert wait == pytest.approx(constant * (1 + scv))
    # lambda E[S^2] / (2 (1 - rho)), written out
    assert wait == pytest.approx((rho / service) * (scv + 1) * service**2 / (2 * (1 - rho)))


@given(st.floats(0, 0.999), SERVICE)
def test_one_server_of_many_is_the_single_queue(rho: float, service: float) -> None:
    assert q.mmc_wait_seconds(rho / service, service, 1) == pytest.approx(q.mg1_wait_seconds(service, rho))


@given(st.integers(1, 40), st.floats(0.01, 0.98))
def test_erlang_c_by_its_sum(servers: int, rho: float) -> None:
    load = rho * servers
    terms = [load**k / math.factorial(k) for k in range(servers)]
    last = load**servers / math.factorial(servers) / (1 - rho)
    wait = last / (sum(terms) + last) / (servers - load)
    assert q.mmc_wait_seconds(load, 1.0, servers) == pytest.approx(wait)
    # Sharing a queue beats halving it.
    assert q.mmc_wait_seconds(2 * load, 1.0, 2 * servers) < q.mmc_wait_seconds(load, 1.0, servers)


def test_many_servers_do_not_overflow_and_none_is_refused() -> None:
    assert 0 < q.mmc_wait_seconds(4990, 1.0, 5000) < 1
    assert q.mmc_wait_seconds(0, 1.0, 3) == 0
    with pytest.raises(ValueError, match="expected at least one server, got 0"):
        q.mmc_wait_seconds(1, 1, 0)


@given(SERVICE, LOAD, st.floats(0.1, 99.9))
def test_percentiles_invert_an_exponential(service: float, rho: float, percent: float) -> None:
    mean = q.mm1_seconds(service, rho)
    value = q.mm1_percentile(service, rho, percent)
    assert 1 - math.exp(-value / mean) == pytest.approx(percent / 100)
    assert q.mm1_percentile(service, rho, 100 * (1 - math.exp(-1))) == pytest.approx(mean)
    assert q.mm1_percentile(service, 1.0, percent) == math.inf


def test_the_ends_of_the_percentiles_are_zero_and_infinity() -> None:
    assert q.mm1_percentile(1.0, 0.5, 0) == 0
    assert q.mm1_percentile(1.0, 0.5, 100) == math.inf
    assert q.mm1_percentile(1.0, 2.0, np.array([0, 50, 100])).tolist() == [0, math.inf, math.inf]


@given(st.floats(0, 1e4), SERVICE, st.integers(1, 100))
def test_littles_law_and_utilization_are_products(rate: float, seconds: float, servers: int) -> None:
    assert q.in_system(rate, seconds) == rate * seconds
    assert q.utilization(rate, seconds, servers) == pytest.approx(q.in_system(rate, seconds) / servers)


def test_arrays_of_mixed_shapes_give_what_scalars_give() -> None:
    service, rho = np.array([[0.1], [1.0]]), np.array([0, 0.5, 0.9, 1.0, 2.0])
    for function in (q.mm1_seconds, q.mg1_wait_seconds, lambda s, r: q.mm1_percentile(s, r, 95.0)):
        swept = function(service, rho)
        assert swept.shape == (2, 5)
        for i in range(2):
            for j in range(5):
                assert swept[i, j] == pytest.approx(function(float(service[i, 0]), float(rho[j])))


@given(SERVICE, st.floats(0.01, 0.99), st.floats(0, 50), st.integers(1, 20))
def test_the_general_queue_has_the_exact_ones_as_its_cases(
    service: float, rho: float, scv: float, servers: int
) -> None:
    rate = rho * servers / service
    assert q.ggc_wait_seconds(rate, service, servers) == pytest.approx(q.mmc_wait_seconds(rate, service, servers))
    assert q.ggc_wait_seconds(rho / service, service, service_scv=scv) == pytest.approx(
        q.mg1_wait_seconds(service, rho, scv)
    )
    calm, bursty = (q.ggc_wait_seconds(rate, service, servers, cv**2, scv) for cv in (1, 3))
    assert bursty == pytest.approx(calm * (9 + scv) / (1 + scv))
    assert q.ggc_wait_seconds(1.01 * servers / service, service, servers) == math.inf


@given(st.floats(0.01, 0.99))
def test_who_waits_at_one_server_are_those_who_find_it_busy(rho: float) -> None:
    assert q.waiting_probability(rho, 1.0) == pytest.approx(rho)
    assert q.waiting_probability(1.0, 1.0) == q.waiting_probability(7.0, 1.0) == 1.0


@given(st.floats(0.01, 0.99), st.floats(1, 99))
def test_a_percentile_of_the_wait_is_exceeded_by_the_rest(rho: float, percent: float) -> None:
    """M/M/1: P(wait > t) = rho exp(-(1 - rho) t / S)."""
    value = q.wait_percentile(q.mg1_wait_seconds(1.0, rho), q.waiting_probability(rho, 1.0), percent)
    if percent / 100 <= 1 - rho:
        assert value == 0
    else:
        assert rho * math.exp(-(1 - rho) * value) == pytest.approx(1 - percent / 100)
    assert q.wait_percentile(math.inf, 1.0, percent) == math.inf
