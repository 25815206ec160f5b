"""Sampling that is launched and fetched later, and penalties of texts that grow on the device."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from reference_impl.assembly.sampler import sample
from reference_impl.features.penalties.counts import TokenCounts, penalised
from reference_impl.features.penalties.sampler import apply_penalties
from reference_impl.features.penalties.worker import has_penalties
from reference_impl.interfaces import Request, SamplingParams

VOCAB = 40
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 1.0, "logprobs": 2}, {"temperature": 0.6, "top_k": 5, "logprobs": 0},
    {"temperature": 0.0, "repetition_penalty": 1.7, "logprobs": 4}, {"temperature": 1.2, "presence_penalty": -0.8},
    {"temperature": 0.0, "frequency_penalty": 0.9, "presence_penalty": 0.3, "repetition_penalty": 0.6},
]  # fmt: skip


def requests_of(seed: int, num: int) -> list[Request]:
    """With few tokens of many kinds, so that the last one is often there before; some have no output yet."""
    chance, found = random.Random(seed), []
    for i in range(num):
        tokens = chance.choices(range(6), k=chance.randint(1, 12))
        params = SamplingParams(seed=i, **chance.choice(PARAMS))
        found.append(Request(str(i), tokens, chance.randint(1, len(tokens)), params, i, 0.0))
    return found


def logits_of(seed: int, num: int, dtype: torch.dtype) -> Tensor:
    return (3 * torch.randn(num, VOCAB, generator=torch.Generator().manual_seed(seed))).to(dtype)


def plainly_penalised(logits: Tensor, requests: list[Request]) -> Tensor:
    """Row by row, as it was written first."""
    scores = logits.clone()
    for row, request in enumerate(requests):
        p = request.sampling
        if p.repetition_penalty != 1:
            seen = torch.tensor(sorted(set(request.tokens)))
            s = scores[row, seen]
            scores[row, seen] = torch.where(s > 0, s / p.repetition_penalty, s * p.repetition_penalty)
        if request.output_tokens and (p.presence_penalty or p.frequency_penalty):
            ids, count = torch.tensor(request.output_tokens).unique(return_counts=True)
            scores[row, ids] -= p.presence_penalty + p.frequency_penalty * count.to(scores.dtype)
    return scores


@given(seed=st.integers(0, 10**6), num=st.integers(1, 8), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_penalties_have_the_bits_of_the_plain_ones(seed: int, num: int, dtype: torch.dtype) -> None:
    requests, logits = requests_of(seed, num), logits_of(seed, num, dtype)
    assert torch.equal(apply_penalties(logits, requests), plainly_penalised(logits, requests))


def test_penalties_of_bfloat16_are_taken_in_float32() -> None:
    requests, logits = requests_of(3, 8), logits_of(3, 8, torch.bfloat16)
    assert torch.equal(apply_penalties(logits, requests), plainly_penalised(logits.float(), requests))


@given(seed=st.integers(0, 10**6), num=st.integers(1, 8), data=st.data())
def test_counts_that_grow_are_those_of_the_whole_text(seed: int, num: int, data: st.DataObject) -> None:
    """A worker opens each request with some of its tokens and adds the others: sampled by itself, or told."""
    requests, counts = requests_of(seed, num), TokenCounts(torch.device("cpu"))
    slots = data.draw(st.permutations(range(num)))
    told = [data.draw(st.integers(r.num_prompt_tokens, len(r.tokens))) for r in requests]
    params = [r.sampling for r in requests]
    for slot, request, known in zip(slots, requests, told, strict=True):
        if has_penalties(request.sampling):
            if data.draw(st.booleans()):  # somebody had the place before
                counts.open(slot, [1, 2, 3], 1)
                counts.catch_up(VOCAB)
                counts.close(slot)
            counts.open(slot, request.tokens[:known], request.num_prompt_tokens)
    penalties = counts.of(slots, params)
    logits = logits_of(seed, num, torch.float64)
    for at in range(max(map(len, (r.tokens for r in requests)))):
        if penalties is not None:
            penalised(logits, penalties)  # as in the step that samples it
        for row, (request, known) in enumerate(zip(requests, told, strict=True)):
            if penalties is None or known + at >= len(request.tokens) or row not in penalties.arrays["rows"]:
                continue
            token = request.tokens[known + at]
            if data.draw(st.booleans()):
                counts.append(slots[row], [token])
            else:
                one = counts.of([slots[row]], [request.sampling])
                assert one is not None
                counts.add(one, torch.tensor([token]), [False])
                counts.add(one, torch.tensor([0]), [True])  # held: nothing is added
    found = logits if penalties is None else penalised(logits, penalties)
    assert torch.equal(found, plainly_penalised(logits, requests))


def test_log_probabilities_are_those_of_each_row_alone() -> None:
    """They are taken together, as many as who wants most; each gets its own number of them."""
    requests = [Request(str(k), [1], 1, SamplingParams(temperature=0, logprobs=k), 0, 0.0) for k in (3, 0, 7, 50)]
    requests.insert(1, Request("none", [1], 1, SamplingParams(temperature=0), 0, 0.0))
    logits = logits_of(0, 5, torch.float32)
    reports = sample(logits, requests).logprobs
    assert reports[1] is None
    for row, request in enumerate(requests):
        if (report := reports[row]) is not None:
            own = logits[row].log_softmax(-1)
            assert report.token == int(own.argmax())
            assert report.logprob == pytest.approx(float(own.max()), abs=1e-6)
            values, ids = own.topk(min(request.sampling.logprobs or 0, VOCAB))
            assert [t for t, _ in report.top] == ids.tolist()
            assert [v for _, v in report.top] == pytest.approx(values.tolist(), abs=1e-6)


def test_a_large_batch_without_penalties_builds_nothing_for_them() -> None:
    requests = [Request(str(i), [1, 2, 3], 1, SamplingParams(temperature=0), 0, 0.0) for i in range(3)]
    counts = TokenCounts(torch.device("cpu"))
    assert counts.of(range(3), [r.sampling for r in requests]) is None
    logits = logits_of(0, 3, torch.bfloat16)
    assert apply_penalties(logits, requests) is logits
