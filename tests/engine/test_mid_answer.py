"""A request that is handed over in mid-answer ends as it would have ended where it began: its tokens, its text in
pieces, why it ended and its log-probabilities. Each hand-over goes through JSON, to an engine with another schedule."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.core.decoder import Decoder
from reference_impl.features.handover.message import from_json, to_json
from reference_impl.features.handover.progress import Handover, Progress, hand_over, new_handover
from reference_impl.features.speculative import rejection
from reference_impl.interfaces import Grammar, Request, RequestState, SamplingParams, TokenLogprobs

VOCAB, PROMPT = 61, [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9]

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 2**64 - 3},
    "unseeded": {},
    "filters": {"temperature": 1.4, "top_k": 9, "top_p": 0.9, "min_p": 0.02, "seed": 5},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": 0.6, "seed": 6},
    "greedy penalties": {"temperature": 0, "frequency_penalty": 1.5},
    "biases": {"logit_bias": {5: 3.5, 7: -100}, "allowed_token_ids": [*range(0, 60, 2), 5, 7], "seed": 7},
    # Without min_tokens such a text ends with its first token, or the second.
    "min_tokens": {"min_tokens": 8, "stop_token_ids": tuple(range(1, 40)), "seed": 8},
    "stop tokens": {"stop_token_ids": (1, 2, 3, 4, 17), "seed": 15},
    "logprobs": {"logprobs": 3, "seed": 11},
    "prompt logprobs": {"prompt_logprobs": 2, "logprobs": 0, "seed": 12},
}


@dataclass(frozen=True)
class Some:
    """Rules out a part of the vocabulary that depends on all that was written."""

    def allowed(self, output: Sequence[int]) -> bytes:
        drawn = random.Random(f"{list(output)}")
        return sum(1 << t for t in drawn.sample(range(VOCAB), drawn.randint(2, 20))).to_bytes(8, "little")


def over_the_wire(handover: Handover) -> Handover:
    return from_json(json.loads(json.dumps(to_json(handover), allow_nan=False)))


class Guesses:
    """Drafts what comes next in a text, each token with a probability of 0.7."""

    def __init__(self, text: Sequence[int], rng: random.Random):
        self.text, self.random = list(text), rng

    def propose(self, request: Request, k: int) -> list[int]:
        length = len(request.tokens)
        truth = self.text[length : length + k] if request.tokens == self.text[:length] else []
        return [token if self.random.random() < 0.7 else (token + 1) % VOCAB for token in truth]


def an_engine(model: Decoder, rng: random.Random, text: Sequence[int] | None = None) -> Engine:
    """One with a schedule drawn by rng, and with a neighbour that is in the way. text: what drafts may be made of;
    None: there are none."""
    drafts = rng.choice(["", "", "early-exit", "host"]) if text is not None else ""
    parts = Parts(host_proposer=Guesses(text, rng)) if text is not None and drafts == "host" else None
    block_size = rng.choice([1, 2, 3, 5, 16])
    drawn: dict[str, Any] = {
        "block_size": block_size,
        "num_blocks": -(-24 // block_size) + rng.randint(0, 2),  # the longest has 23 tokens: two may not fit
        "max_num_batched_tokens": rng.choice([5, 9, 100]),
        "prefix_cache": rng.choice(["off", "hash", "radix"]),
        "overlap": "off" if parts else rng.choice(["on", "off"]),
        "speculative": "early-exit" if drafts == "early-exit" else "off",
        "num_drafts": 3 if drafts else 0,
        "adaptive_drafts": "off",
        "seed": 99,
    }
    engine = Engine(model, EngineConfig(**drawn), parts)
    sampling = SamplingParams(max_tokens=9, seed=1, ignore_eos=True)
    engine.add(rng.choice([PROMPT[:7], [1, 2, 3]]), sampling, "neighbour")
    return engine


def resumed(engine: Engine, handover: Handover, **options: Any) -> Request:
    return engine.add(list(handover.prompt), handover.sampling, "resumed", resume=handover.progress, **options)


def run(engine: Engine, request: Request, num_tokens: int = 10**6) -> None:
    """To the end, or until it has so many tokens of output."""
    while request.finish_reason is None and len(request.output_tokens) < num_tokens:
        engine.step()


def whole(model: Decoder, prompt: Sequence[int], sampling: SamplingParams, seed: int, **options: Any) -> Request:
    """The request without a hand-over, in an engine of its own."""
    engine = Engine(model, EngineConfig(block_size=16, num_blocks=32, prefix_cache="off"))
    request = engine.add(prompt, sampling, "whole", **options)
    request.seed = seed
    run(engine, request)
    return request


def check_reports(found: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs]) -> None:
    assert [report.token for report in found] == [report.token for report in expected]
    for one, other in zip(found, expected, strict=True):
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        values = (one.logprob, *(value for _, value in one.top))
        assert values == pytest.approx((other.logprob, *(value for _, value in other.top)), abs=1e-5)


def check_same(request: Request, expected: Request) -> None:
    assert request.tokens == expected.tokens
    assert (request.finish_reason, request.num_prompt_tokens) == (expected.finish_reason, expected.num_prompt_tokens)
    check_reports(request.logprobs, expected.logprobs)
    check_reports(request.prompt_logprobs, expected.prompt_logprobs)


@pytest.mark.parametrize(
    ("name", "grammar"),
    [*((name, None) for name in SAMPLINGS), *((name, Some()) for name in ("greedy", "penalties", "min_tokens"))],
)
def test_it_ends_as_without_a_hand_over_wherever_it_is_cut(name: str, grammar: Grammar | None, random_model) -> None:
    """Cut once or twice: before the first token, before the last one, and at random."""
    model, rng = random_model("float64", eos_token_id=60), random.Random(name)
    sampling = SamplingParams(max_tokens=12, **SAMPLINGS[name])
    first = new_handover(PROMPT, sampling, has_grammar=grammar is not None)
    expected = whole(model, PROMPT, sampling, first.progress.seed, grammar=grammar)
    length = len(expected.output_tokens)
    # An unseeded text keeps its tokens where no drafts are verified.
    text = None if sampling.seed is None and sampling.temperature > 0 else expected.tokens
    for cuts in ([0, rng.randrange(length)], [length - 1], sorted(rng.choices(range(length), k=2))):
        handover = first
        for cut in cuts:
            engine = an_engine(model, rng, text)
            request = resumed(engine, handover, grammar=grammar)
            run(engine, request, cut)
            if request.finish_reason is not None:  # the drafts of its last step were right
                break
            handover = over_the_wire(hand_over(request))
            engine.abort("resumed")
        else:
            engine = an_engine(model, rng, text)
            request = resumed(engine, handover, grammar=grammar)
            run(engine, request)
        check_same(request, expected)


def test_the_cases_end_in_several_ways_and_the_schedules_preempt(random_model) -> None:
    model = random_model("float64", eos_token_id=60)
    ends = {
        name: whole(model, PROMPT, SamplingParams(max_tokens=12, **given), given.get("seed", 0))
        for name, given in SAMPLINGS.items()
    }
    assert 8 < len(ends["min_tokens"].output_tokens) < 12
    assert 2 < len(ends["stop tokens"].output_tokens) < 12
    assert {request.finish_reason for request in ends.values()} == {"stop", "length"}
    preempted = 0
    for seed in range(6):
        engine = an_engine(model, random.Random(seed))
        handover = Handover(tuple(PROMPT), SamplingParams(max_tokens=12), Progress(4, (9, 8, 7)))
        run(engine, resumed(engine, handover))
        preempted += sum("resumed" in step.preempted for step in engine.trace.steps())
    assert preempted > 2


def test_a_request_is_handed_over_while_it_is_preempted(random_model) -> None:
    model, sampling = random_model("float64"), SamplingParams(max_tokens=12, seed=4, logprobs=1)
    engine = Engine(model, EngineConfig(block_size=2, num_blocks=14))
    engine.add(PROMPT, SamplingParams(max_tokens=12, seed=1))
    request = engine.add(PROMPT[1:], sampling)
    while not (request.output_tokens and request.state is RequestState.WAITING):
        engine.step()
    handover = over_the_wire(hand_over(request))
    assert 0 < len(handover.progress.tokens) < 12
    there = an_engine(model, random.Random(1))
    moved = resumed(there, handover)
    run(there, moved)
    check_same(moved, whole(model, PROMPT[1:], sampling, 4))
    run(engine, request)  # nothing was taken from it
    check_same(request, moved)


def test_layers_with_windows_read_what_another_engine_wrote(random_model) -> None:
    """Cut where the window has left the prompt: there the blocks that lie behind it are never given out."""
    model = random_model("float64", architecture="MistralForCausalLM", sliding_window=6)
    sampling = SamplingParams(max_tokens=12, seed=4)
    expected = whole(model, PROMPT, sampling, 4)
    for cut, budget in ((2, 3), (8, 100), (8, 4), (11, 1)):
        engine = Engine(model, EngineConfig(block_size=2, num_blocks=14, max_num_batched_tokens=budget))
        progress = Progress(4, tuple(expected.output_tokens[:cut]))
        request = resumed(engine, over_the_wire(Handover(tuple(PROMPT), sampling, progress)))
        run(engine, request)
        check_same(request, expected)
        assert engine.kv.num_available == 14


@pytest.mark.parametrize("after", [0, 1, 5])
def test_each_sample_of_a_prompt_goes_on_by_itself(after: int, random_model) -> None:
    """Also before they are forked. In an engine of its own each has the same name, so only its index tells them."""
    model, sampling = random_model("float64"), SamplingParams(max_tokens=9, n=3, seed=21)
    engine = Engine(model, EngineConfig(block_size=4, num_blocks=64))
    first = engine.add(PROMPT, sampling, "whole")
    samples = [first, *first.children]
    run(engine, samples[-1], after)
    handed_over = [over_the_wire(hand_over(sample)) for sample in samples]
    for sample in samples:
        run(engine, sample)
    assert len({tuple(sample.tokens) for sample in samples}) == 3
    for sample, handover in zip(samples, handed_over, strict=True):
        assert handover.sampling == replace(sampling, n=1)
        there = an_engine(model, random.Random(after))
        moved = resumed(there, handover)
        run(there, moved)
        check_same(moved, sample)


def test_who_streams_a_request_can_note_its_progress(random_model) -> None:
    """So it goes on though its engine is gone, which could not be asked any more."""
    model, sampling = random_model("float64"), SamplingParams(max_tokens=9, logprobs=2)
    handover = new_handover(PROMPT, sampling)
    expected = whole(model, PROMPT, sampling, handover.progress.seed)
    for _ in range(4):
        engine = Engine(model, EngineConfig(block_size=4, num_blocks=64, seed=7))
        request = resumed(engine, handover)
        reported = len(request.output_tokens)
        run(engine, request, reported + 2)
        new = request.output_tokens[reported:], request.logprobs[reported:]
        handover = replace(handover, progress=handover.progress.after(*new))
    assert len(handover.progress.tokens) == 8
    engine = Engine(model, EngineConfig(block_size=4, num_blocks=64))
    request = resumed(engine, over_the_wire(handover))
    run(engine, request)
    check_same(request, expected)


class Constant:
    """Drafts the same token, always."""

    def propose(self, request: Request, k: int) -> list[int]:
        return [9] * k


@pytest.mark.parametrize("is_noted", [False, True])
def test_verdicts_on_drafts_use_no_number_twice(is_noted: bool, random_model, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted by steps, and each engine's begin at 1. A number that decided what was written before the seam
    would make what comes behind it depend on that more than the model does. is_noted: who streams it hands it over, and
    knows its first seed alone."""
    model, used = random_model("float64"), []
    draw = rejection.uniform

    def noted(seed: Any, sample_index: Any, step: Any, draws: Any) -> Any:
        used.extend(zip(*(a.flat for a in np.broadcast_arrays(seed, sample_index, step, draws)), strict=True))
        return draw(seed, sample_index, step, draws)

    monkeypatch.setattr(rejection, "uniform", noted)
    handover = new_handover(PROMPT, SamplingParams(max_tokens=30))
    seeds = []
    for _ in range(4):
        config = EngineConfig(block_size=4, num_blocks=64, num_drafts=2)
        engine = Engine(model, config, Parts(host_proposer=Constant()))
        request = resumed(engine, handover)
        seeds.append(request.seed)
        had = len(request.output_tokens)
        run(engine, request, had + 4)
        noted_there = replace(handover, progress=handover.progress.after(request.output_tokens[had:]))
        handover = over_the_wire(noted_there if is_noted else hand_over(request))
    assert len(used) > 20
    assert len({*used}) == len(used)
    assert len({*seeds}) == len(seeds)
