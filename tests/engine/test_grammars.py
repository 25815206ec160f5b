"""Sampling under a grammar: masks come after the forward pass, and nothing that they rule out is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from reference_impl.assembly.config import EngineConfig, course_model
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.sampler import sample
from reference_impl.assembly.split import split_engine
from reference_impl.features.grammars.masks import Allowed, masked
from reference_impl.features.process.worker import WorkerError
from reference_impl.interfaces import Asking, Masks, Request, Rewound, Sampled, SamplingParams
from reference_impl.simulation.cost import CalibratedCost
from reference_impl.simulation.executor import SimulatedGPU, hollow_model

PROMPT = [3, 1, 4, 1, 5]


def bits(tokens: Sequence[int], vocab_size: int) -> bytes:
    return sum(1 << t for t in tokens).to_bytes(-(-vocab_size // 8), "little")


@dataclass
class Countdown:
    """Whatever the model wants: from `first` down to 0, over and over."""

    vocab_size: int
    first: int = 6

    def allowed(self, output: Sequence[int]) -> bytes:
        expected = [self.first - i % (self.first + 1) for i in range(len(output) + 1)]
        assert list(output) == expected[:-1]
        return bits(expected[-1:], self.vocab_size)


@dataclass
class Either:
    tokens: tuple[int, ...]
    vocab_size: int

    def allowed(self, output: Sequence[int]) -> bytes:
        return bits(self.tokens, self.vocab_size)


def finish(engine: Engine) -> None:
    while engine.has_work():
        engine.step()


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 1},
    {"seed": 2, "top_k": 3, "min_p": 0.2, "n": 3},
    {"temperature": 0, "repetition_penalty": 1.9, "presence_penalty": 2.0},
]


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("options", SAMPLINGS, ids=str)
def test_what_is_written_is_what_is_allowed(overlap: str, options: dict[str, Any], random_model) -> None:
    model = random_model("float64")
    vocab = model.config.vocab_size
    engine = Engine(model, EngineConfig(block_size=4, num_blocks=60, overlap=overlap))
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, **options)
    first = engine.add(PROMPT, sampling, grammar=Countdown(vocab))
    samples = [first, *first.children]  # before they are forked: then it has none any more
    free = engine.add(PROMPT, sampling)
    finish(engine)
    assert len(samples) == sampling.n
    for request in samples:
        assert request.output_tokens == [6, 5, 4, 3, 2, 1, 0, 6, 5, 4, 3, 2]
    alone = Engine(model, EngineConfig(block_size=4, num_blocks=60))
    other = alone.add(PROMPT, sampling)
    finish(alone)
    assert free.output_tokens == other.output_tokens  # a neighbour without a grammar writes what it would write alone


def test_the_most_likely_of_the_allowed_is_chosen_and_reported_with_the_models_own_probability(random_model) -> None:
    model = random_model("float64")
    plain = Engine(model, EngineConfig(num_blocks=9))
    asked = SamplingParams(max_tokens=1, temperature=0, logprobs=model.config.vocab_size)
    everything = plain.add(PROMPT, asked)
    finish(plain)
    report = dict(everything.logprobs[0].top)
    tokens = (2, 9, 17, 40)
    engine = Engine(model, EngineConfig(num_blocks=9))
    request = engine.add(PROMPT, asked, grammar=Either(tokens, model.config.vocab_size))
    finish(engine)
    best = max(tokens, key=lambda t: report[t])
    assert best != everything.output_tokens[0]
    assert request.output_tokens == [best]
    assert request.logprobs[0].logprob == pytest.approx(report[best])


def test_draws_follow_the_distribution_of_what_is_allowed(random_model) -> None:
    """Over all of 2,000 seeds: the share of each token is within 5 standard deviations."""
    logits = torch.tensor([[1.0, 0.5, 3.0, -1.0, 2.0]]).repeat(2000, 1)
    scores = masked(logits, Allowed(list(range(2000)), [bits([0, 3, 4], 5)] * 2000))
    requests = [_asking(seed) for seed in range(2000)]
    drawn = torch.tensor(sample(scores, requests).tokens).bincount(minlength=5) / 2000
    expected = torch.tensor([1.0, 0, 0, -1.0, 2.0]).exp() * torch.tensor([1.0, 0, 0, 1, 1])
    expected /= expected.sum()
    assert ((drawn - expected).abs() <= 5 * (expected * (1 - expected) / 2000).sqrt()).all()
    assert torch.equal(logits[:, 2], torch.full((2000,), 3.0))  # what was given is not changed


def _asking(seed: int) -> Any:
    return Request("r", [1], 1, SamplingParams(), seed, 0.0)


def test_a_sampler_of_ones_own_sees_masked_logits(random_model) -> None:
    model, seen = random_model("float64"), []

    def mine(logits: torch.Tensor, requests: Sequence[Asking]) -> Sampled:
        seen.append(torch.isfinite(logits).sum(dim=1).tolist())
        return Sampled(logits.argmax(dim=1).tolist(), [None] * len(logits))

    engine = Engine(model, EngineConfig(num_blocks=9), Parts(sampler=mine))
    request = engine.add(PROMPT, SamplingParams(max_tokens=3), grammar=Countdown(model.config.vocab_size))
    finish(engine)
    assert request.output_tokens == [6, 5, 4]
    assert seen == [[1]] * 3


def test_beams_and_drafts_and_stops_beside_a_grammar(random_model) -> None:
    """Drafts that the grammar forbids are cut. An end token that the grammar gives ends the request."""
    model = random_model("float64")
    vocab = model.config.vocab_size

    class Ones:
        def opened(self, slot: Any) -> None: ...
        def closed(self, slot: int) -> None: ...
        def propose(self, slots: Any, lengths: Any, tokens: Any, k: int) -> torch.Tensor:
            return torch.ones(len(slots), k, dtype=torch.int64)

    engine = Engine(model, EngineConfig(num_blocks=20, num_drafts=2, overlap="on"), Parts(proposer=Ones()))
    bound = engine.add(PROMPT, SamplingParams(max_tokens=9, stop_token_ids=(3,)), "a", grammar=Countdown(vocab))
    free = engine.add(PROMPT, SamplingParams(max_tokens=9, temperature=0), "b")
    finish(engine)
    assert (bound.output_tokens, bound.finish_reason) == ([6, 5, 4, 3], "stop")
    drafts = {row.request_id: row.num_drafts for step in engine.trace.steps() for row in step.rows if row.num_drafts}
    assert set(drafts) == {"a", "b"}
    assert len(free.output_tokens) == 9


def test_another_process_samples_under_a_grammar(random_model) -> None:
    engine = split_engine(course_model("draft"), EngineConfig(num_blocks=20, overlap="on"))
    vocab = engine.model.config.vocab_size
    requests = [
        engine.add(PROMPT, SamplingParams(max_tokens=8, seed=i, ignore_eos=True), grammar=Countdown(vocab))
        for i in range(3)
    ]
    plain = engine.add(PROMPT, SamplingParams(max_tokens=8, ignore_eos=True))
    finish(engine)
    assert [r.output_tokens for r in requests] == [[6, 5, 4, 3, 2, 1, 0, 6]] * 3
    assert len(plain.output_tokens) == 8
    engine.add(PROMPT, grammar=Either((), vocab))
    with pytest.raises(WorkerError, match="its grammar allows no token"):
        finish(engine)
    engine.close()


def test_a_step_that_gets_no_masks_is_given_up_in_another_process_too() -> None:
    engine = split_engine(course_model("draft"), EngineConfig(num_blocks=20, overlap="off"))
    asked = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    alone = engine.add(PROMPT, asked)
    finish(engine)
    again = engine.add(PROMPT, asked)
    engine.step()
    engine.add(PROMPT, grammar=Wrong(_raise), request_id="a")
    for _ in range(3):
        with pytest.raises(LookupError, match="no such rule"):
            engine.step()
    engine.abort("a")
    finish(engine)
    assert again.output_tokens == alone.output_tokens
    engine.close()


class Wrong:
    def __init__(self, mask: Callable[[], Any]):
        self.mask = mask

    def allowed(self, output: Sequence[int]) -> Any:
        return self.mask()


def _raise() -> bytes:
    raise LookupError("no such rule")


@pytest.mark.parametrize(
    ("mask", "error", "text"),
    [
        (lambda: bytes(8), ValueError, "request 'a': its grammar allows no token"),
        (lambda: bytes(7) + b"\xe0", ValueError, "request 'a': its grammar allows no token"),  # bits of no token
        (lambda: bytes(9), ValueError, "mask must be 8 bytes, a bit for each of 61 tokens; got 9 bytes"),
        (lambda: [1] * 61, ValueError, "mask must be 8 bytes, a bit for each of 61 tokens; got 'list'"),
        (_raise, LookupError, "no such rule"),
        (lambda: None, TypeError, "request 'a': Wrong.allowed returned None: expected bytes, a bit per token"),
    ],
)
def test_a_wrong_mask_is_an_error_and_the_others_go_on_without_that_request(mask, error, text, random_model) -> None:
    model = random_model("float64")
    engine = Engine(model, EngineConfig(num_blocks=9))
    other = engine.add(PROMPT, SamplingParams(max_tokens=5, temperature=0), "b")
    engine.step()
    engine.add(PROMPT, SamplingParams(max_tokens=5), "a", grammar=Wrong(mask))
    with pytest.raises(error, match=text):
        finish(engine)
    engine.abort("a")
    finish(engine)
    clean = Engine(model, EngineConfig(num_blocks=9))
    expected = clean.add(PROMPT, SamplingParams(max_tokens=5, temperature=0))
    finish(clean)
    assert other.output_tokens == expected.output_tokens


def test_an_executor_that_takes_no_masks_refuses_a_grammar() -> None:
    gpu = SimulatedGPU(CalibratedCost(0.125, 0, 0, 0, 0, 0, 0, 4096, 2048))
    parts = Parts(executor=gpu, clock=gpu, kv_cache=object(), attention=object())  # type: ignore[arg-type]
    engine = Engine(hollow_model(61, 512, 4096), EngineConfig(), parts)
    with pytest.raises(ValueError, match="SimulatedGPU samples without masks; it needs finish"):
        engine.add(PROMPT, grammar=Either((1,), 61))
    assert not engine.requests


def test_a_step_is_finished_once_with_its_own_masks(random_model) -> None:
    model = random_model("float64")
    engine = Engine(model, EngineConfig(num_blocks=9))
    tickets: list[Any] = []
    submit = engine.executor.submit
    engine.executor.submit = lambda step: tickets.append(submit(step)) or tickets[-1]
    engine.add(PROMPT, SamplingParams(max_tokens=2), grammar=Countdown(model.config.vocab_size))
    engine.step()
    with pytest.raises(RuntimeError, match="step 1 waits for no masks"):
        engine.executor.finish(tickets[0], Masks(1, (None,)))
    step = dataclasses.replace(tickets[0].step, step_id=7, opened=(), tables=(), rewound=(Rewound(0, 0),))
    ticket = submit(step)
    with pytest.raises(RuntimeError, match="step 7 was submitted with takes_masks: call finish before collect"):
        engine.executor.collect(ticket)
    with pytest.raises(ValueError, match="step 7 of 1 rows got masks of step 8 for 2"):
        engine.executor.finish(ticket, Masks(8, (None, None)))


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("penalty", [100, 0.01])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_strongest_penalties_leave_what_is_allowed_above_the_rest(
    dtype: str, penalty: float, temperature: float, random_model
) -> None:
    model = random_model(dtype)
    vocab = model.config.vocab_size
    for first in range(0, vocab - 1, 7):
        sampling = SamplingParams(max_tokens=6, temperature=temperature, seed=1, repetition_penalty=penalty)
        engine = Engine(model, EngineConfig(num_blocks=9))
        request = engine.add(PROMPT, sampling, grammar=Either((first, first + 1), vocab))
        finish(engine)
        assert set(request.output_tokens) <= {first, first + 1}


@pytest.mark.parametrize("strange", [float("-inf"), float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_strange_logits_leave_what_is_allowed_above_the_rest(strange: float, temperature: float) -> None:
    logits = torch.zeros(1, 10)
    logits[:, [2, 5]] = strange
    scores = masked(logits, Allowed([0], [bits([2, 5], 10)]))
    for seed in range(20):
        asked = Request("r", [1], 1, SamplingParams(temperature=temperature), seed, 0.0)
        assert sample(scores, [asked]).tokens[0] in (2, 5)
