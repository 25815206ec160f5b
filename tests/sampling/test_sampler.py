"""Sampling against the exact distribution, and the distribution against a plain one-row-at-a-time version."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_impl.assembly.sampler import probabilities, sample
from reference_impl.core.philox import uniform
from reference_impl.core.sampler import draw
from reference_impl.features.penalties.sampler import apply_penalties
from reference_impl.interfaces import Request, SamplingParams
from tests.examples import examples

RANDOM = torch.Generator().manual_seed(3)
LOGITS = torch.randn(24, generator=RANDOM, dtype=torch.float64) * 2


def request(tokens: list[int], num_prompt: int | None = None, seed: int = 0, **sampling: Any) -> Request:
    params = SamplingParams(**sampling)
    return Request("r", list(tokens), len(tokens) if num_prompt is None else num_prompt, params, seed, 0.0)


# ---- the same thing written plainly: Python floats, one row


def plain_probabilities(logits: list[float], p: SamplingParams) -> list[float]:
    if p.temperature == 0:
        best = max(logits)
        return [1.0 if i == logits.index(best) else 0.0 for i in range(len(logits))]
    scores = [x / p.temperature for x in logits]
    kept = set(range(len(scores)))
    by_score = sorted(kept, key=lambda i: (-scores[i], i))
    if p.top_k:
        kept = set(by_score[: p.top_k])
    if p.top_p < 1:
        probs, mass, nucleus = softmax(scores, kept), 0.0, set()
        for i in by_score:
            if i in kept and mass < p.top_p:
                nucleus.add(i)
                mass += probs[i]
        kept = nucleus
    if p.min_p:
        probs = softmax(scores, kept)
        kept = {i for i in kept if probs[i] >= p.min_p * max(probs)}
    return softmax(scores, kept)


def softmax(scores: list[float], kept: set[int]) -> list[float]:
    highest = max(scores[i] for i in kept)
    weights = [math.exp(s - highest) if i in kept else 0.0 for i, s in enumerate(scores)]
    return [w / math.fsum(weights) for w in weights]


def plain_penalties(logits: list[float], prompt: list[int], output: list[int], p: SamplingParams) -> list[float]:
    scores = list(logits)
    for i in range(len(scores)):
        if i in prompt or i in output:
            scores[i] = scores[i] / p.repetition_penalty if scores[i] > 0 else scores[i] * p.repetition_penalty
        if i in output:
            scores[i] -= p.presence_penalty + p.frequency_penalty * output.count(i)
    return scores


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 1.3, 5.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 12, 100]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.503, 0.2, 1e-6]),
    min_p=st.sampled_from([0.0, 0.0, 0.03, 0.3, 1.0]),
)
ROW = st.lists(st.integers(-60, 60).map(lambda n: n / 7), min_size=12, max_size=12)


@settings(max_examples=examples(150), deadline=None, derandomize=True, database=None)
@given(rows=st.lists(st.tuples(ROW, PARAMS), min_size=1, max_size=4))
def test_the_distribution_is_the_plain_one_for_every_row(rows: list[tuple[list[float], SamplingParams]]) -> None:
    found = probabilities(torch.tensor([r for r, _ in rows], dtype=torch.float64), [p for _, p in rows])
    for row, (logits, params) in zip(found.tolist(), rows, strict=True):
        assert row == pytest.approx(plain_probabilities(logits, params), abs=1e-12)


@settings(max_examples=examples(60), deadline=None, derandomize=True, database=None)
@given(rows=st.lists(st.tuples(ROW, PARAMS), min_size=2, max_size=5))
def test_a_row_has_the_same_bits_alone_and_beside_others(rows: list[tuple[list[float], SamplingParams]]) -> None:
    logits = torch.tensor([r for r, _ in rows], dtype=torch.float32)
    together = probabilities(logits, [p for _, p in rows])
    for i, (_, params) in enumerate(rows):
        assert torch.equal(together[i], probabilities(logits[i : i + 1], [params])[0])


@settings(max_examples=examples(80), deadline=None, derandomize=True, database=None)
@given(
    logits=ROW,
    prompt=st.lists(st.integers(0, 11), min_size=1, max_size=6),
    output=st.lists(st.integers(0, 11), max_size=8),
    repetition=st.sampled_from([1.0, 1.2, 0.5, 3.0]),
    presence=st.sampled_from([0.0, 0.7, -1.5]),
    frequency=st.sampled_from([0.0, 0.3, -0.4]),
)
def test_penalties_are_the_plain_ones(
    logits: list[float], prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float
) -> None:
    penalties = {
        "repetition_penalty": repetition, "presence_penalty": presence, "frequency_penalty": frequency,
    }  # fmt: skip
    rows = torch.tensor([logits, logits, logits], dtype=torch.float64)
    neighbours = request([3]), request([4, 5], 1, repetition_penalty=2.0)
    asked = request(prompt + output, len(prompt), **penalties)
    found = apply_penalties(rows, [neighbours[0], asked, neighbours[1]])
    assert found[1].tolist() == pytest.approx(plain_penalties(logits, prompt, output, asked.sampling), abs=1e-12)
    assert found[0].tolist() == logits, "a row without penalties is left alone"
    assert rows[1].tolist() == logits, "the model's logits are not changed in place"


CASES = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0, "top_k": 6},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.5, "top_k": 15, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sampled_tokens_follow_the_exact_distribution(case: dict[str, Any]) -> None:
    n = 10_000
    exact = plain_probabilities(LOGITS.tolist(), SamplingParams(**case))
    requests = [request([1, 2, 3], seed=seed, **case) for seed in range(n)]
    counts = Counter(sample(LOGITS.float().expand(n, -1), requests).tokens)
    assert all(exact[token] > 0 for token in counts)
    # Pearson's chi-squared; tokens expected less than 10 times are put together. Its mean is the number of
    # degrees of freedom and its variance twice that; 5 standard deviations above is one in ten thousand or rarer.
    expected = {t: n * p for t, p in enumerate(exact) if n * p >= 10}
    rest = n - sum(expected.values())
    chi_squared = sum((counts[t] - e) ** 2 / e for t, e in expected.items())
    if rest >= 10:
        chi_squared += (n - sum(counts[t] for t in expected) - rest) ** 2 / rest
    freedom = len(expected) - (rest < 10)
    assert chi_squared <= freedom + 5 * (2 * freedom) ** 0.5


def test_one_request_follows_the_exact_distribution_over_its_positions() -> None:
    exact = plain_probabilities(LOGITS.tolist(), SamplingParams())
    requests = [request([0] * n, seed=99) for n in range(1, 3001)]
    counts = Counter(sample(LOGITS.float().expand(3000, -1), requests).tokens)
    total_variation = sum(abs(counts[t] / 3000 - p) for t, p in enumerate(exact)) / 2
    assert total_variation < 0.04  # its mean is about sqrt(24 / (2 pi 3000)) = 0.036 at most


def test_the_draw_is_the_inverse_of_the_cumulative_distribution() -> None:
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]], dtype=torch.float64)
    for u, token in ((1e-9, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (1 - 2**-24, 4)):
        assert draw(probs, torch.tensor([u], dtype=torch.float64)).item() == token


def test_a_token_of_probability_zero_is_never_drawn_even_at_the_ends() -> None:
    probs = torch.tensor([[0.0, 0.3, 0.7, 0.0]]).expand(3, -1)
    assert draw(probs, torch.tensor([2.0**-24, 0.5, 1 - 2.0**-24])).tolist() == [1, 2, 2]


def test_greedy_is_the_argmax_alone_and_among_requests_that_draw() -> None:
    logits = torch.randn(40, 33, generator=RANDOM)
    greedy = [request([1], temperature=0) for _ in range(40)]
    expected = logits.argmax(-1).tolist()
    assert sample(logits, greedy).tokens == expected
    mixed = [request([1], seed=i, temperature=0 if i % 2 else 1.0, top_p=0.9) for i in range(40)]
    assert sample(logits, mixed).tokens[1::2] == expected[1::2]


def test_greedy_ignores_filters_and_seed() -> None:
    logits = torch.randn(1, 33, generator=RANDOM)
    for extra in ({"top_k": 3}, {"top_p": 0.1}, {"min_p": 0.9}, {"seed": 5}):
        assert sample(logits, [request([1], temperature=0, **extra)]).tokens == [int(logits.argmax())]


def test_of_equal_logits_greedy_and_top_k_take_the_lower_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    assert sample(logits, [request([1], temperature=0)]).tokens == [1]
    both = [request([1], temperature=0), request([1], temperature=1)]
    assert sample(logits.expand(2, -1), both).tokens[0] == 1
    assert probabilities(logits, [SamplingParams(top_k=2)]).tolist() == [[0, 0.5, 0.5, 0, 0]]


def test_top_p_stops_exactly_where_the_mass_reaches_it() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64).log()
    for top_p, kept in ((0.4, 1), (0.499, 1), (0.501, 2), (0.74, 2), (0.76, 3), (0.88, 4), (1.0, 4)):
        found = probabilities(logits, [SamplingParams(top_p=top_p)])[0]
        assert int((found > 0).sum()) == kept, top_p
        assert found.sum().item() == pytest.approx(1, abs=1e-12)


def test_a_top_p_of_almost_nothing_keeps_the_best_token() -> None:
    assert probabilities(LOGITS[None], [SamplingParams(top_p=1e-9)]).argmax().item() == LOGITS.argmax().item()
    assert probabilities(LOGITS[None], [SamplingParams(top_p=1e-9)]).max().item() == 1


def test_top_p_counts_the_mass_within_the_top_k() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()
    found = probabilities(logits, [SamplingParams(top_k=2, top_p=0.56)])[0]
    assert found.tolist() == [1, 0, 0, 0], "0.4 of 0.7 is 0.571, which reaches 0.56"


@pytest.mark.parametrize("temperature", [1e-3, 1e-8, 1e-30, 1e-38, 1e-45, 1e-300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_tiny_temperature_is_greedy_and_never_nan(temperature: float, dtype: torch.dtype) -> None:
    logits = torch.tensor([[-50.0, 90.0, 89.0, -torch.inf, 0.0]], dtype=dtype)
    for extra in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}):
        found = probabilities(logits, [SamplingParams(temperature=temperature, **extra)])
        assert found.tolist() == [[0, 1, 0, 0, 0]]


def test_a_huge_temperature_is_uniform_over_what_is_allowed() -> None:
    logits = torch.tensor([[-50.0, 90.0, -torch.inf, 0.0]])
    for temperature in (1e30, 1e300):
        found = probabilities(logits, [SamplingParams(temperature=temperature)])[0]
        assert found.tolist() == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])


def test_a_logit_of_minus_infinity_is_never_sampled() -> None:
    logits = LOGITS.float().clone()
    logits[::2] = -torch.inf
    for case in CASES:
        requests = [request([1, 2], seed=s, repetition_penalty=1.2, **case) for s in range(300)]
        assert all(token % 2 for token in sample(logits.expand(300, -1), requests).tokens)


def test_half_precision_logits_give_a_float32_distribution() -> None:
    found = probabilities(LOGITS.bfloat16()[None], [SamplingParams()])
    assert found.dtype is torch.float32
    assert found[0].tolist() == pytest.approx(LOGITS.bfloat16().double().softmax(-1).tolist(), abs=1e-6)


def test_same_seed_same_tokens_whatever_the_batch() -> None:
    logits = torch.randn(8, 50, generator=RANDOM)
    requests = [request([1] * (i + 1), seed=i * 10**17, temperature=1.2) for i in range(8)]
    together = sample(logits, requests).tokens
    assert [sample(logits[i : i + 1], [requests[i]]).tokens[0] for i in range(8)] == together
    backwards = sample(logits.flip(0), requests[::-1]).tokens
    assert backwards[::-1] == together


def test_the_number_drawn_is_that_of_seed_and_position() -> None:
    logits = LOGITS.float()[None]
    r = request([1, 2, 3, 4], 2, seed=2**63 + 11)
    exact = np.cumsum(plain_probabilities(LOGITS.tolist(), r.sampling))
    assert sample(logits, [r]).tokens == [int(np.searchsorted(exact, uniform(2**63 + 11, 0, 4), side="right"))]


def test_logprobs_are_the_models_own_whatever_the_sampling() -> None:
    own = LOGITS.log_softmax(-1)
    plain = {"temperature": 0.3, "top_k": 2, "repetition_penalty": 2.0}
    asked = [request([int(LOGITS.argmax())], logprobs=k, **plain) for k in (0, 3, 1000)] + [request([1])]
    found = sample(LOGITS.float().expand(4, -1), asked)
    assert found.logprobs[3] is None
    order = LOGITS.argsort(descending=True).tolist()
    for report, k in zip(found.logprobs[:3], (0, 3, 24), strict=True):
        assert report is not None
        assert report.logprob == pytest.approx(own[report.token].item(), abs=1e-5)
        assert [t for t, _ in report.top] == order[:k]
        assert [v for _, v in report.top] == pytest.approx(own[order[:k]].tolist(), abs=1e-5)
