"""One definition of each metric: the identities, the two weighted means, percentiles, goodput."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.observe.metrics import RequestMetrics, WorkloadMetrics, percentile

times = st.lists(st.floats(0, 1e3), min_size=1, max_size=20).map(sorted)


def load(*requests: tuple[float, list[float]]) -> WorkloadMetrics:
    return WorkloadMetrics.of((arrival, RequestMetrics.of(arrival, tokens)) for arrival, tokens in requests)


@given(arrival=st.floats(-1e3, 0), tokens=times)
def test_ttft_plus_all_gaps_is_the_latency(arrival: float, tokens: list[float]) -> None:
    m = RequestMetrics.of(arrival, tokens)
    assert m.ttft is not None
    assert m.ttft + sum(m.itl) == pytest.approx(m.latency, abs=1e-9)
    assert len(m.itl) == len(tokens) - 1
    assert m.ttft + (len(tokens) - 1) * (m.tpot or 0) == pytest.approx(m.latency, abs=1e-9)


@given(wait=st.floats(0, 10), work=st.floats(0, 10))
def test_queue_and_prefill_add_up_to_ttft(wait: float, work: float) -> None:
    m = RequestMetrics.of(5.0, [5.0 + wait + work], scheduled=5.0 + wait)
    assert (m.queue, m.prefill) == pytest.approx((wait, work), abs=1e-12)
    assert m.ttft == pytest.approx(wait + work, abs=1e-12)


def test_mean_tpot_weighs_requests_and_mean_itl_weighs_tokens() -> None:
    # E01.9: nine gaps of 10 ms and gaps of 10, 10, 200 ms; then nine gaps of 100 ms and three of 10 ms.
    for gaps, tpot, itl in (
        (([10] * 9, [10, 10, 200]), (10 + 220 / 3) / 2, (90 + 220) / 12),
        (([100] * 9, [10] * 3), 55.0, (900 + 30) / 12),
    ):
        found = load(*((0.0, [float(sum(g[:i])) for i in range(len(g) + 1)]) for g in gaps))
        assert sum(found.tpot) / len(found.tpot) == pytest.approx(tpot)
        assert sum(found.itl) / len(found.itl) == pytest.approx(itl)


def test_throughput_counts_from_the_first_arrival_to_the_last_token_of_anybody() -> None:
    found = load((2.0, [4.0, 5.0]), (1.0, [3.0]), (9.0, []))
    assert (found.duration, found.num_output_tokens, found.throughput) == (4.0, 3, 0.75)


def test_goodput_counts_requests_that_meet_both_objectives() -> None:
    found = load(
        (0.0, [0.5, 0.6]),  # meets both
        (0.0, [1.5, 1.6]),  # first token late
        (0.0, [0.5, 1.5]),  # slow stream
        (0.0, [1.0]),  # a lone token, on the limit
        (0.0, []),  # none at all
    )
    assert found.attainment(ttft=1.0, tpot=0.2) == 2 / 5
    assert found.goodput(ttft=1.0, tpot=0.2) == 2 / 1.6


def test_nothing_to_measure_is_zero_throughput_and_an_error_for_shares() -> None:
    empty = load()
    assert (empty.throughput, empty.goodput(1, 1), empty.ttft, empty.itl) == (0.0, 0.0, (), ())
    with pytest.raises(ValueError, match="at least one request"):
        empty.attainment(1, 1)
    with pytest.raises(ValueError, match="at least one value"):
        percentile(empty.ttft, 50)


def test_percentiles_interpolate_between_neighbours() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([10.0, 20.0], 99) == pytest.approx(19.9)
