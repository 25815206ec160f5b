"""Draws by Gumbel noise: the numbers bit for bit, tokens by the definition, and how often two distributions agree."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from reference_impl.assembly.sampler import CalledSampler, sample
from reference_impl.core.philox import philox
from reference_impl.core.sampler import SETTINGS, settings_of
from reference_impl.core.staging import to_device
from reference_impl.features.gumbel.sampler import GumbelSampler, exponentials
from reference_impl.interfaces import SamplingParams
from tests.no_sync import no_sync
from tests.sampling.test_sampler import CASES, LOGITS, plain_probabilities, request


def numbers(seed: int, sample_index: int, position: int, vocab_size: int) -> np.ndarray:
    """u of each token, by the generator on the host."""
    low = 2**32 - 1
    counters = [(position & low, sample_index & low, token // 4, 1) for token in range(vocab_size)]
    key = np.array([[seed & low], [seed >> 32 & low]], np.uint64).repeat(vocab_size, 1)
    words = philox(np.array(counters, np.uint64).T, key)
    return (words[np.arange(vocab_size) % 4, np.arange(vocab_size)].astype(np.float64) + 0.5) / 2**32


CPU = torch.device("cpu")


class CalledGumbelSampler(CalledSampler, GumbelSampler):
    pass


sample_with_gumbel = CalledGumbelSampler()
ROWS = [(0, 0, 1), (2**64 - 1, 3, 7), (2**63 + 11, 2**31 + 1, 4095), (123456789, 2**30, 2**20)]


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 61, 130])
def test_the_numbers_are_those_of_the_generator(vocab_size: int) -> None:
    seed, sample_index, position = (torch.from_numpy(np.array(column, np.uint64).view(np.int64))
                                    for column in zip(*ROWS, strict=True))  # fmt: skip
    found = exponentials(seed, sample_index, position, vocab_size)
    assert found.dtype is torch.float64
    for row, given in zip(found, ROWS, strict=True):
        assert row.tolist() == pytest.approx((-np.log(numbers(*given, vocab_size))).tolist(), rel=1e-14)


@pytest.mark.parametrize("case", [*CASES, {"temperature": 0.0}], ids=str)
def test_a_token_is_the_largest_of_log_p_and_gumbel_noise(case: dict[str, Any]) -> None:
    requests = [request([1] * (1 + i % 9), seed=i * 10**17 % 2**64, **case) for i in range(60)]
    p = plain_probabilities(LOGITS.tolist(), SamplingParams(**case))
    expected = []
    for r in requests:
        u = numbers(r.seed, 0, r.num_tokens, len(p))
        scores = [
            math.log(share) - math.log(-math.log(v)) if share else -math.inf for share, v in zip(p, u, strict=True)
        ]
        expected.append(int(np.argmax(scores)))
    assert sample_with_gumbel(LOGITS[None].repeat(60, 1), requests).tokens == expected
    assert len(set(expected)) > 1 or case.get("temperature") == 0.0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_follow_the_exact_distribution(case: dict[str, Any]) -> None:
    n = 12_000
    exact = np.array(plain_probabilities(LOGITS.tolist(), SamplingParams(**case)))
    requests = [request([1, 2, 3], seed=seed, **case) for seed in range(n)]
    counts = np.bincount(sample_with_gumbel(LOGITS.float().expand(n, -1), requests).tokens, minlength=len(exact))
    assert not counts[exact == 0].any()
    often = exact * n >= 10
    seen, means = [*counts[often], counts[~often].sum()], [*(n * exact[often]), n * exact[~often].sum()]
    cells = [(s, m) for s, m in zip(seen, means, strict=True) if m > 0]
    statistic = sum((s - m) ** 2 / m for s, m in cells)
    assert stats.chi2(len(cells) - 1).sf(statistic) > 1e-6


def test_draws_of_one_requests_positions_and_samples_do_not_depend_on_each_other() -> None:
    """Of pairs, all 16 come as often as the product says."""
    logits, n = torch.tensor([0.0, 1.0, -0.5, 0.3], dtype=torch.float64), 20_000
    at = torch.arange(n)
    t = {"seed": torch.full((n,), 5), "sample_index": at % 2, "sample_positions": at, "temperature": torch.ones(n)}
    tokens = sample_with_gumbel.choose(logits.expand(n, -1), t)
    p = logits.softmax(0)
    for first, second in ((tokens[::2], tokens[1::2]), (tokens[:-2:2], tokens[2::2]), (tokens[1:-2:2], tokens[3::2])):
        seen = torch.bincount(4 * first + second, minlength=16)
        assert stats.chisquare(seen.numpy(), (len(first) * torch.outer(p, p)).flatten().numpy()).pvalue > 1e-6


def test_a_row_has_the_same_numbers_alone_and_beside_others() -> None:
    logits = torch.randn(9, 61, generator=torch.Generator().manual_seed(1))
    requests = [request([1] * (i + 1), seed=i, temperature=0.5 * (i % 3), top_k=i % 2 * 20) for i in range(9)]
    together = sample_with_gumbel(logits, requests).tokens
    assert [sample_with_gumbel(logits[i : i + 1], [r]).tokens[0] for i, r in enumerate(requests)] == together
    assert sample_with_gumbel(logits.flip(0), requests[::-1]).tokens == together[::-1]
    assert together[::3] == logits.argmax(-1).tolist()[::3]
    t = {name: torch.arange(9) for name in ("seed", "sample_index", "position")}
    for size in (61, 64):
        whole = exponentials(**t, vocab_size=size)
        for row in range(9):
            assert torch.equal(
                whole[row], exponentials(**{n: v[row : row + 1] for n, v in t.items()}, vocab_size=size)[0]
            )


def test_greedy_rows_need_no_numbers() -> None:
    assert sample_with_gumbel(LOGITS[None], [request([1], temperature=0)]).tokens == [int(LOGITS.argmax())]
    settings = np.zeros(3, [("temperature", "f8")])
    assert sample_with_gumbel.columns(settings, np.ones(3, np.int64)) == {}


def agreement(p: np.ndarray, q: np.ndarray) -> float:
    """The probability that both draw the same: token i wins both with 1 / sum_j max(p_j / p_i, q_j / q_i)."""
    return float(sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in range(len(p))))


def test_two_distributions_agree_as_often_as_the_formula_says_whatever_the_order_of_tokens() -> None:
    random, n = np.random.default_rng(3), 20_000
    logits = torch.from_numpy(random.normal(size=(2, 12)))
    logits[1] = logits[0] + 0.4 * logits[1]
    p, q = logits.softmax(-1).numpy()
    requests = [request([1, 2], seed=seed) for seed in range(n)]
    kept, one_number = [], []
    for order in (np.arange(12), np.argsort(p / q)):
        for found, sampler in ((kept, sample_with_gumbel), (one_number, sample)):
            a, b = (sampler(row[order].expand(n, -1), requests).tokens for row in logits)
            found.append(sum(x == y for x, y in zip(a, b, strict=True)))
    expected, tv = agreement(p, q), 0.5 * np.abs(p - q).sum()
    assert (1 - tv) / (1 + tv) <= expected <= 1 - tv
    for number in kept:
        assert stats.binomtest(number, n, expected).pvalue > 1e-6
    assert abs(one_number[0] - one_number[1]) > 5 * n**0.5  # that one depends on the order


def test_ranked_are_the_tokens_in_the_order_of_log_p_and_noise() -> None:
    requests = [request([1, 2], seed=i, temperature=0.7 * (i % 3 > 0)) for i in range(30)]
    p = np.array(plain_probabilities(LOGITS.tolist(), SamplingParams(temperature=0.7)))
    settings = np.array([settings_of(r.sampling, r.seed, 0) for r in requests], SETTINGS)
    t = to_device({**sample_with_gumbel.columns(settings, np.full(30, 2)), "sample_positions": np.full(30, 2)}, CPU)
    found = sample_with_gumbel.ranked(LOGITS[None].repeat(30, 1), t, 5).tolist()
    for i, tokens in enumerate(found):
        noisy = np.log(p) - np.log(-np.log(numbers(i, 0, 2, len(p)))) if i % 3 else p
        assert tokens == np.argsort(-noisy)[:5].tolist()
    assert sample_with_gumbel.ranked(LOGITS[None], {}, 3).tolist() == [np.argsort(-p)[:3].tolist()]


def test_nothing_waits_for_the_device() -> None:
    rows = 3
    t = {name: torch.arange(rows) for name in ("seed", "sample_index", "sample_positions")}
    t |= {"temperature": torch.ones(rows).double(), "top_p": torch.full((rows,), 0.9), "top_k": torch.tensor([0, 5, 9])}
    with no_sync():
        tokens = sample_with_gumbel.choose(torch.zeros(rows, 21), t)
    assert tokens.shape == (rows,)
