"""Several samples of one prompt, and beam search: fork, copy-on-write, free."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable

import pytest
import torch

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine, StepResult
from reference_impl.assembly.parts import Parts
from reference_impl.core.decoder import Decoder
from reference_impl.core.ranking import FirstCome
from reference_impl.features.beams.search import beam_search
from reference_impl.features.policies import ByPriority, FairShare, ShortestFirst
from reference_impl.interfaces import SamplingParams

PROMPT = random.Random(3).choices(range(61), k=21)


def finish(engine: Engine) -> None:
    while engine.has_work():
        engine.step()


def test_samples_share_the_blocks_of_their_prompt_and_copy_only_the_one_they_write(random_model: Callable) -> None:
    engine = Engine(random_model("float32"), EngineConfig(block_size=4, num_blocks=40, prefix_cache="off"))
    first = engine.add(PROMPT, SamplingParams(max_tokens=3, n=4, seed=1))
    samples = [first, *first.children]
    engine.step()
    tables = [request.block_table for request in samples]
    assert all(table[:5] == tables[0][:5] for table in tables), "21 tokens: five full blocks and one of one token"
    assert [engine.block_pool.ref_count(block) for block in tables[0][:5]] == [4] * 5
    engine.step()
    tables = [request.block_table for request in samples]
    assert len({table[5] for table in tables}) == 4
    held = engine.num_blocks - engine.block_pool.num_free
    assert held == 5 + 4, "without sharing it would be 4 x 6"
    finish(engine)
    assert engine.block_pool.num_free == 40
    assert len({tuple(request.output_tokens) for request in samples}) > 1


def test_a_prompt_that_ends_inside_a_block_is_copied_for_each_sample_but_the_last(random_model: Callable) -> None:
    """Each sample computes the prompt's last token again; that token's block is shared until then."""
    engine = Engine(random_model("float32"), EngineConfig(block_size=16, num_blocks=40, prefix_cache="off"))
    engine.add(PROMPT, SamplingParams(max_tokens=3, n=4, seed=1))
    finish(engine)
    copies = [len(step.transfers.copies) for step in engine.trace.steps()]
    assert copies == [0, 3, 0, 0], "four samples, three copies: who comes last writes the block it is left alone with"


def test_samples_differ_by_their_index_and_the_first_is_the_one_of_n_1(random_model: Callable) -> None:
    def texts(n: int, **options: int) -> list[list[int]]:
        engine = Engine(random_model("float64"), EngineConfig(block_size=4, num_blocks=60, **options))  # type: ignore
        first = engine.add(PROMPT, SamplingParams(max_tokens=6, n=n, seed=8))
        samples = [first, *first.children]
        finish(engine)
        return [request.output_tokens for request in samples]

    assert texts(1) == texts(4)[:1]
    assert texts(4) == texts(4, max_num_seqs=2) == texts(4, max_num_batched_tokens=3)


def test_an_abort_of_the_parent_before_its_prompt_is_computed_ends_the_samples_too(random_model: Callable) -> None:
    engine = Engine(random_model("float32"), EngineConfig(block_size=4, num_blocks=20, max_num_batched_tokens=5))
    first = engine.add(PROMPT, SamplingParams(max_tokens=6, n=3))
    samples = [first, *first.children]
    engine.step()
    engine.abort(samples[1].id)
    assert [request.finish_reason for request in samples] == [None, "abort", None]
    engine.abort(first.id)
    assert {request.finish_reason for request in samples} == {"abort"}
    assert engine.requests == {}
    assert not engine.has_work()
    assert engine.kv.num_available == 20


def with_ends(model: Decoder, *ends: int) -> Decoder:
    model = copy.copy(model)
    model.config = dataclasses.replace(model.config, eos_token_ids=ends)
    return model


def every_beam(model: Decoder, one_shot: Callable, width: int, max_tokens: int, penalty: float) -> list[tuple]:
    """Beam search by the book: whole sequences, computed without a cache. (score, tokens), best first."""
    ends, done, beams = model.config.eos_token_ids, [], [(0.0, [])]
    for length in range(1, max_tokens + 1):
        candidates = []
        for logprob, tokens in beams:
            step = torch.log_softmax(one_shot(model, [*PROMPT, *tokens])[-1].float(), dim=-1)
            candidates += [(logprob + float(step[t]), [*tokens, t]) for t in range(len(step))]
        candidates = sorted(candidates, key=lambda c: -c[0])[: 2 * width]
        done += [(lp / length**penalty, tokens) for lp, tokens in candidates[:width] if tokens[-1] in ends]
        done = sorted(done, key=lambda c: -c[0])[:width]
        beams = [c for c in candidates if c[1][-1] not in ends][:width]
        if len(done) == width and done[-1][0] >= beams[0][0] / length**penalty:
            return done
    done += [(lp / max_tokens**penalty, tokens) for lp, tokens in beams]
    return sorted(done, key=lambda c: -c[0])[:width]


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_beam_search_finds_what_the_book_finds(width: int, penalty: float, random_model, one_shot) -> None:
    model = with_ends(random_model("float64"), 9, 30)
    expected = every_beam(model, one_shot, width, 7, penalty)
    engine = Engine(model, EngineConfig(block_size=4, num_blocks=200, max_num_batched_tokens=11))
    found = beam_search(engine, PROMPT, width, 7, penalty)
    assert [list(beam.tokens) for beam in found] == [tokens for _, tokens in expected]
    assert [beam.score for beam in found] == pytest.approx([score for score, _ in expected], rel=1e-5)
    assert engine.requests == {}
    assert engine.kv.num_available == 200


def test_beams_among_other_requests_under_preemption_stay_the_same(random_model: Callable, one_shot: Callable) -> None:
    model = with_ends(random_model("float64"), 9, 30)
    expected = every_beam(model, one_shot, 3, 9, 1.0)
    for options in ({}, {"preemption": "swap"}, {"prefix_cache": "off"}):
        engine = Engine(model, EngineConfig(block_size=4, num_blocks=25, max_num_seqs=5, **options))  # type: ignore
        others = [engine.add(PROMPT[i:], SamplingParams(max_tokens=25, seed=i, ignore_eos=True)) for i in range(4)]
        found = beam_search(engine, PROMPT, 3, 9)
        assert [list(beam.tokens) for beam in found] == [tokens for _, tokens in expected]
        assert any(step.preempted for step in engine.trace.steps())
        finish(engine)
        assert all(len(request.output_tokens) == 25 for request in others)
        assert engine.kv.num_available == 25


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("policy", [FirstCome, FairShare, lambda: ByPriority(aging=0), ShortestFirst])
def test_beams_do_not_wait_for_each_other_behind_somebody_who_waits_for_room(
    policy: Callable, preemption: str, random_model: Callable, one_shot: Callable
) -> None:
    """A beam keeps its blocks while it waits for another beam, which may stand behind a large request; and a beam that
    was moved to the host while it waited has nothing to compute when it is back."""
    model = with_ends(random_model("float64"), 9, 30)
    expected = every_beam(model, one_shot, 3, 9, 1.0)
    config = EngineConfig(block_size=4, num_blocks=25, max_num_seqs=5, preemption=preemption)  # type: ignore[arg-type]
    engine, steps = Engine(model, config, Parts(policy=policy())), 0
    params = SamplingParams(max_tokens=25, temperature=0, ignore_eos=True)
    others = [engine.add(PROMPT[i:], params) for i in range(4)]

    def step() -> StepResult:
        nonlocal steps
        steps += 1
        assert steps < 1000, "it never ends"
        if steps == 3:
            others.extend(engine.add([n] * n, params) for n in (60, 30))
        return engine.step()

    found = beam_search(engine, PROMPT, 3, 9, step=step)
    assert [list(beam.tokens) for beam in found] == [tokens for _, tokens in expected]
    finish(engine)
    assert all(len(request.output_tokens) == 25 for request in others)
    assert engine.kv.num_available == 25


def test_beams_that_cannot_all_fit_are_refused_with_the_numbers(random_model: Callable) -> None:
    engine = Engine(random_model("float32"), EngineConfig(block_size=4, num_blocks=20, max_num_seqs=4))
    with pytest.raises(ValueError, match=r"3 beams of up to 30 tokens may need 24 KV blocks; there are 20"):
        beam_search(engine, PROMPT, 3, 9)
    with pytest.raises(ValueError, match=r"width: expected between 1 and max_num_seqs = 4, got 5"):
        beam_search(engine, [1], 5, 1)
