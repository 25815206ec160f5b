"""What is made of the outcomes: intervals that hold what they promise, and failures that are never dropped."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from scipy import stats

from reference_impl.bench.load.client import Outcome
from reference_impl.bench.load.intervals import _binomial_cdf, percentile_interval, share_interval
from reference_impl.bench.load.report import Objectives, Report, report
from reference_impl.bench.load.show import remarks, show


@pytest.mark.parametrize("n", [1, 7, 200, 367, 368, 5000, 200_000])
@pytest.mark.parametrize("percent", [50, 90, 99])
def test_the_interval_is_the_narrowest_with_at_most_two_and_a_half_percent_beside_each_limit(n: int, percent: int):
    ranks = percentile_interval(np.arange(1.0, n + 1).tolist(), percent)  # the value of a rank is the rank
    binomial = stats.binom(n, percent / 100)
    if ranks.low is not None:
        assert binomial.cdf(ranks.low - 1) <= 0.025 < binomial.cdf(ranks.low)
    else:
        assert binomial.cdf(0) > 0.025
    if ranks.high is not None:
        assert 1 - binomial.cdf(ranks.high - 1) <= 0.025 < 1 - binomial.cdf(ranks.high - 2)
    else:
        assert 1 - binomial.cdf(n - 1) > 0.025
    assert (ranks.low or 0) <= ranks.value <= (ranks.high or math.inf)


def test_a_p99_has_an_upper_limit_from_368_values_on():
    assert percentile_interval([1.0] * 367, 99).high is None
    assert percentile_interval([1.0] * 368, 99).high == 1.0
    alone = percentile_interval([3.0], 50)
    assert (alone.value, alone.low, alone.high) == (3.0, None, None)


def test_the_interval_holds_the_true_percentile_as_often_as_it_says():
    rng = np.random.default_rng(0)
    true = math.exp(1.2815515655446004)  # the lognormal's 90th percentile
    intervals = [percentile_interval(rng.lognormal(size=150).tolist(), 90) for _ in range(3000)]
    held = np.mean([i.low is not None and i.low <= true <= (i.high or math.inf) for i in intervals])
    assert 0.945 < held < 0.985  # at least 95 %, more because ranks are whole


@pytest.mark.parametrize("n", [1, 10, 154, 3000, 100_000])
def test_the_binomial_distribution_is_right_where_its_first_terms_are_too_small_for_floats(n: int):
    for q in (0.5, 0.9, 0.99):
        assert np.abs(_binomial_cdf(n, q) - stats.binom(n, q).cdf(np.arange(n + 1))).max() < 1e-8


@given(st.integers(1, 500), st.data())
def test_a_share_has_wilsons_interval(n: int, data: st.DataObject):
    hits = data.draw(st.integers(0, n))
    made, wanted = share_interval(hits, n), stats.binomtest(hits, n).proportion_ci(0.95, method="wilson")
    assert (made.value, made.low, made.high) == pytest.approx((hits / n, wanted.low, wanted.high), abs=1e-12)
    with pytest.raises(ValueError, match="share of nothing"):
        share_interval(0, 0)


def outcome(i: int, planned: float, *times: float, sent: float | None = None, **more: object) -> Outcome:
    fields: dict[str, object] = {"num_output_tokens": len(times), "num_prompt_tokens": 100, "has_usage": True} | more
    end = times[-1] if times else planned + 1
    return Outcome(f"r{i}", planned, planned if sent is None else sent, end, 90, 4, times, **fields)  # type: ignore[arg-type]


def by_hand() -> list[Outcome]:
    return [
        outcome(0, 10.0, 10.5, 10.6, 10.7, 10.8),  # meets both
        outcome(1, 11.0, 13.0, 13.1, sent=12.75),  # its first token is late from planned, not from sent
        outcome(2, 12.0, 12.1, 13.1),  # too slow a second token
        outcome(3, 13.0, error="HTTP 429", detail="busy"),
        outcome(4, 14.0, 14.1, error="connection cut", detail="reset"),
        outcome(5, 15.0, 20.0, error="HTTP 429", detail="still busy"),
    ]


def test_failures_count_as_requests_that_missed():
    result = report(by_hand(), Objectives(ttft=1.0, tpot=0.5))
    assert (result.num_requests, result.num_succeeded) == (6, 3)
    assert list(result.errors.items()) == [("HTTP 429", 2), ("connection cut", 1)]
    assert result.examples == {"HTTP 429": "busy", "connection cut": "reset"}
    assert result.seconds == 10.0  # to the end of the last, which failed
    assert (result.attainment.value, result.goodput) == pytest.approx((1 / 6, 0.1))
    assert (result.attainment_from_sent.value, result.goodput_from_sent) == pytest.approx((2 / 6, 0.2))
    assert (result.num_output_tokens, result.output_rate) == pytest.approx((8, 0.8))
    assert (result.num_prompt_tokens, result.prompt_rate) == pytest.approx((300, 30.0))
    assert (result.lost_output_tokens, result.asked_output_tokens, result.asked_prompt_tokens) == (2, 12, 270)
    assert (result.planned_rate, result.request_rate) == pytest.approx((1.0, 0.3))
    rows = {row.name: row for row in result.rows}
    assert rows["TTFT from planned"].mean == pytest.approx((0.5 + 2.0 + 0.1) / 3)
    assert rows["TTFT from sent"].mean == pytest.approx((0.5 + 0.25 + 0.1) / 3)
    assert rows["delay of the client"].percentiles[99].value == pytest.approx(1.75 * 0.95)
    assert rows["ITL"].num_values == 5
    assert rows["ITL"].percentiles[50].low is None
    assert rows["latency from planned"].percentiles[50].value == pytest.approx(1.1)


def test_no_outcome_is_no_report_and_nothing_but_failures_is_one():
    with pytest.raises(ValueError, match="nothing to report"):
        report([], Objectives(1.0, 1.0))
    result = report([outcome(0, 1.0, error="timeout")], Objectives(1.0, 1.0))
    assert [row.name for row in result.rows] == ["delay of the client"]
    assert (result.goodput, result.tokens_per_chunk, result.planned_rate) == (0.0, None, 0.0)


def shown(result: Report) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    show(result, console)
    return console.export_text()


def test_what_is_printed_is_what_was_measured():
    setup = {
        "load": {"workload": "chat"}, "loop": "closed loop, 2 users", "form": "completions", "num_cut": 3,
        "num_with_images": 5, "stopped": {"of": 90, "under_way": 4, "longest_seconds": 3.21},
        "refused_forms": ["completions, prompts as token ids: HTTP 422: [no]"],
    }  # fmt: skip
    outcomes = [*by_hand(), outcome(6, 16.0, 16.2, 16.4, num_output_tokens=8, has_usage=False, has_done=False)]
    result = report(outcomes, Objectives(ttft=1.0, tpot=0.5), setup)
    text = shown(result)
    assert "TTFT from planned" in text
    assert "4 of 7 succeeded in 10.0 s" in text
    assert "2 x HTTP 429: busy" in text
    assert f"{result.attainment.value:.1%} [{result.attainment.low:.1%}, {result.attainment.high:.1%}]" in text
    assert "stopped after 7 of 90 requests; 4 were under way, the first of them for 3.2 s" in text
    notes = "\n".join(remarks(result))
    for words in (
        "refused completions, prompts as token ids: HTTP 422: [no]", "3 requests were cut", "closed loop users wait",
        "1 answers came without usage", "1 answers ended with a finish_reason and without [DONE]",
        "percentiles are of the 4 that succeeded", "5 requests have images: of them only the number of tokens was sent",
        "1.60 tokens in a chunk", "2 tokens of failed requests", "Hahn and Meeker",
    ):  # fmt: skip
        assert words in notes, words
        assert words.split(":")[0] in text
