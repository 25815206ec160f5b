"""Overlapped steps: step N + 1 is planned and submitted before the tokens of step N are known to the host.

The texts must be those of an engine that waits, on a device that is late by any time within its contract
(`LateExecutor`, which also holds the engine to its own: what a running step uses is handed to nobody else).
test_schedule_invariance.py drives the differential property with overlap on, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from reference_impl.assembly.config import ConfigError, EngineConfig, course_model
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.llm import LLM
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.sampler import sample
from reference_impl.features.beams.search import beam_search
from reference_impl.interfaces import Request, RequestState, Sampled, SamplingParams
from tests.engine.conftest import some

VOCAB = 61


@pytest.fixture
def make(random_model: Callable, late_engine: Callable) -> Callable[..., Engine]:
    def make(seed: int | None, **options: Any) -> Engine:
        """seed: of the delays; None: an engine that waits for each step."""
        return late_engine(random_model("float64"), seed, **{"block_size": 4, "num_blocks": 30} | options)

    return make


def run(engine: Engine) -> dict[str, list[int]]:
    """Until nothing is left; the tokens of each request in the order in which steps told them."""
    told: dict[str, list[int]] = {}
    while engine.has_work():
        for name, new in engine.step().tokens.items():
            told.setdefault(name, []).extend(new)
    return told


@pytest.mark.parametrize("seed", some([0, 1, 2, 5, 6, 7], range(12)))
def test_texts_with_stop_tokens_penalties_and_samples_are_those_of_an_engine_that_waits(seed: int, make) -> None:
    rng = random.Random(seed)
    options = rng.choice(
        [{"num_blocks": 14, "max_num_batched_tokens": 7}, {"prefix_cache": "radix", "num_blocks": 16},
         {"preemption": "swap", "swap_bytes": 40_000, "num_blocks": 13, "prefix_cache": "off"}]
    )  # fmt: skip
    asked = []
    for i in range(6):
        params = SamplingParams(
            max_tokens=rng.randint(1, 14), temperature=rng.choice([0.0, 1.0, 1.5]), seed=i, n=rng.choice([1, 1, 2]),
            stop_token_ids=tuple(rng.sample(range(VOCAB), 8)), repetition_penalty=rng.choice([1.0, 1.4]),
            presence_penalty=rng.choice([0.0, 0.7]), frequency_penalty=rng.choice([0.0, 0.3]),
            logprobs=rng.choice([None, 3]), min_tokens=rng.choice([0, 1]),
            logit_bias=rng.choice([None, {3: 2.0, 4: -5}]),
        )  # fmt: skip
        asked.append((rng.choices(range(4), k=rng.randint(1, 20)), params))

    def serve(engine: Engine) -> tuple[list[Request], dict[str, list[int]]]:
        samples = []
        for i, (prompt, params) in enumerate(asked):
            first = engine.add(prompt, params, f"r{i}")
            samples += [first, *first.children]
            engine.step()
        return samples, run(engine)

    late = make(seed, **options)
    (waited, _), (overlapped, _) = serve(make(None, **options)), serve(late)
    assert late.executor.num_unknown > 10
    assert sum(r.finish_reason == "stop" for r in waited) >= 1
    for a, b in zip(waited, overlapped, strict=True):
        assert (a.output_tokens, a.finish_reason) == (b.output_tokens, b.finish_reason)
        assert [t.token for t in a.logprobs] == [t.token for t in b.logprobs]
        for x, y in zip(a.logprobs, b.logprobs, strict=True):
            assert x.logprob == pytest.approx(y.logprob, abs=1e-9)
    assert late.kv.num_available == late.num_blocks
    assert late.kv.num_releasing == 0


def test_a_step_tells_each_token_once_and_one_step_late(make) -> None:
    engine = make(3)
    request = engine.add([1, 2, 3], SamplingParams(max_tokens=5, temperature=0))
    assert engine.step().tokens == {}
    assert request.tokens == [1, 2, 3]
    assert (request.num_in_flight, request.num_tokens, request.output_tokens) == (1, 4, [])
    told = run(engine)
    assert told == {request.id: request.output_tokens}
    assert request.num_in_flight == 0


def test_nothing_is_computed_after_the_last_token_that_length_allows(make) -> None:
    """It is known beforehand which token is the last, so no step is spent, and no slot taken, on one more."""
    engine = make(1, num_blocks=3)
    request = engine.add([1, 2, 3], SamplingParams(max_tokens=10, temperature=0))  # 12 slots: all there are
    run(engine)
    computed = [row for step in engine.trace.steps() for row in step.rows]
    assert sum(row.num_tokens for row in computed) == 12
    assert len(request.output_tokens) == 10
    assert not any(step.preempted for step in engine.trace.steps())


def stopping(engine: Engine) -> int:
    """A token that this prompt's greedy text has early, and no sooner."""
    request = engine.add([5, 6, 7], SamplingParams(max_tokens=8, temperature=0))
    run(engine)
    text = request.output_tokens
    return next(t for i, t in enumerate(text) if i >= 2 and t not in text[:i])


def test_who_stops_unforeseen_is_in_the_next_step_whose_result_is_dropped(make) -> None:
    end = stopping(make(None))
    engine = make(2)
    request = engine.add([5, 6, 7], SamplingParams(max_tokens=20, temperature=0, stop_token_ids=(end,)), "r")
    other = engine.add([4, 4], SamplingParams(max_tokens=12, temperature=0), "other")
    while request.state is not RequestState.FINISHED:
        engine.step()
    [running] = engine.executor.in_flight
    assert "r" in running["requests"], "it was planned before the end was known"
    text = list(request.tokens)
    again = engine.add([9, 9], SamplingParams(max_tokens=3, temperature=0), "r")  # the name is free
    told = run(engine)
    assert request.tokens == text
    assert text[-1] == end
    alone = make(None)
    twin = alone.add([9, 9], SamplingParams(max_tokens=3, temperature=0))
    run(alone)
    assert told["r"] == again.output_tokens == twin.output_tokens
    assert engine.trace.metrics("r").num_output_tokens == 3
    assert engine.trace.metrics("other").num_output_tokens == len(other.output_tokens) == 12
    assert engine.kv.num_available == engine.num_blocks


def test_the_trace_counts_no_token_that_was_dropped_and_nothing_runs_on_for_nobody(make) -> None:
    end = stopping(make(None))
    engine = make(2)
    request = engine.add([5, 6, 7], SamplingParams(max_tokens=20, temperature=0, stop_token_ids=(end,)))
    while request.state is not RequestState.FINISHED:
        engine.step()
    assert not engine.has_work(), "the step that was planned for it is over, too"
    assert engine.kv.num_available == engine.num_blocks
    computed = [row for step in engine.trace.steps() for row in step.rows]
    assert sum(row.samples for row in computed) == len(request.output_tokens)
    assert engine.trace.metrics(request.id).num_output_tokens == len(request.output_tokens)
    assert sum(row.num_tokens for row in computed) == request.num_tokens, "the last one computed what was dropped"


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_an_abort_in_flight_keeps_what_is_known_and_frees_when_the_step_is_over(steps: int, make) -> None:
    engine = make(4, prefix_cache="off")
    gone = engine.add([1, 2, 3, 4, 5], SamplingParams(max_tokens=9, temperature=0), "gone")
    stays = engine.add([7, 8], SamplingParams(max_tokens=9, temperature=0))
    for _ in range(steps):
        engine.step()
    known = list(gone.tokens)
    assert gone.num_in_flight == 1
    free = engine.block_pool.num_free
    engine.abort("gone")
    assert gone.tokens == known
    assert engine.block_pool.num_free == free, "a step that uses its blocks still runs"
    engine.step()
    engine.step()
    assert engine.block_pool.num_free > free
    told = run(engine)
    assert "gone" not in told
    assert len(stays.output_tokens) == 9
    assert engine.block_pool.num_free == engine.num_blocks


def test_who_is_preempted_in_flight_keeps_the_token_that_its_step_samples(make) -> None:
    preempted_unknown = 0
    for seed in range(6):
        engine = make(seed, num_blocks=8, prefix_cache="off")
        asked = [([i + 1] * 9, SamplingParams(max_tokens=12, temperature=0)) for i in range(2)]
        requests = [engine.add(prompt, params) for prompt, params in asked]
        run(engine)
        preempted_unknown += engine.executor.num_preempted_unknown
        for (prompt, params), request in zip(asked, requests, strict=True):
            alone = make(None, prefix_cache="off")
            twin = alone.add(prompt, params)
            run(alone)
            assert request.output_tokens == twin.output_tokens
    assert preempted_unknown > 3


def test_one_request_at_a_time_is_thrown_out_while_blocks_are_on_their_way(make) -> None:
    """What a victim gives up comes a step later. Whoever needs it waits for it, and throws out nobody else."""
    engine = make(0, num_blocks=15, prefix_cache="off")
    for i in range(4):
        engine.add([i + 1] * 11, SamplingParams(max_tokens=16, temperature=0))
    run(engine)
    assert any(step.preempted for step in engine.trace.steps())
    assert all(len(step.preempted) <= 1 for step in engine.trace.steps())


def test_beams_are_those_of_an_engine_that_waits(make) -> None:
    found = [beam_search(make(seed), [1, 2, 3], 3, 6) for seed in (None, 5)]
    assert [beam.tokens for beam in found[0]] == [beam.tokens for beam in found[1]]
    assert [beam.score for beam in found[0]] == pytest.approx([beam.score for beam in found[1]])


def test_a_text_with_stop_strings_streams_as_from_an_engine_that_waits() -> None:
    def texts(overlap: str) -> list[Any]:
        llm = LLM(course_model("draft"), dtype="float32", kv_cache_bytes=2**22, overlap=overlap)
        assert llm.engine.overlaps == (overlap == "on")
        prompts = ["def fibonacci(n):\n", "import os\n", "class Reader:\n"]
        params = SamplingParams(max_tokens=24, temperature=0, stop=["\n\n", "return"])
        streamed = "".join(llm.stream(prompts[0], params))
        outputs = [(o.text, o.token_ids, o.finish_reason) for o in llm.generate(prompts, params)]
        assert llm.engine.kv.num_available == llm.engine.num_blocks
        return [streamed, *outputs]

    assert texts("on") == texts("off")


def test_auto_waits_on_a_cpu_and_on_says_which_part_cannot(random_model: Callable) -> None:
    model = random_model("float64")
    assert not Engine(model, EngineConfig(num_blocks=4)).overlaps

    def of_a_learner(logits: Any, requests: Any) -> Sampled:
        return sample(logits, requests)

    with pytest.raises(ValueError, match=r"overlap='on' needs parts that can do it; these cannot: executor \(max_in_f"):
        Engine(model, EngineConfig(num_blocks=4, overlap="on"), Parts(sampler=of_a_learner))
    assert not Engine(model, EngineConfig(num_blocks=4), Parts(sampler=of_a_learner)).overlaps


def lose(engine: Engine, error: BaseException) -> None:
    """The step that runs fails."""

    def fails(step: Any) -> Any:
        raise error

    engine.executor.collect = fails
    with pytest.raises(type(error)) as raised:
        engine.step()
    assert raised.value is error


def test_after_a_failed_step_an_overlapped_engine_says_that_its_state_is_lost(make) -> None:
    engine = make(0)
    engine.add([1, 2, 3], SamplingParams(max_tokens=9, temperature=0))
    engine.step()
    lose(engine, OSError("the device is gone"))
    with pytest.raises(RuntimeError, match="make a new engine") as lost:
        engine.step()
    assert isinstance(lost.value.__cause__, OSError)


def test_while_a_last_token_is_awaited_no_held_request_overtakes(make) -> None:
    """Held requests may pass one that has no room only where all that run are held."""
    engine = make(0, num_blocks=5, prefix_cache="off")
    engine.add([1] * 8, SamplingParams(max_tokens=1, temperature=0))
    engine.step()
    engine.add([2] * 16, SamplingParams(max_tokens=4, temperature=0), "large")
    engine.add([3] * 2, SamplingParams(max_tokens=1, temperature=0), "held", holds=True)
    while "held" not in run_step(engine) and engine.has_work():
        pass
    admitted = [name for step in engine.trace.steps() for name, _ in step.admitted]
    assert admitted[1:] == ["large", "held"]


def run_step(engine: Engine) -> dict[str, int]:
    return engine.step().tokens


@pytest.mark.parametrize("error", [OSError("the device is gone"), KeyboardInterrupt()])
def test_who_aborts_because_a_step_failed_sees_its_error_and_the_engine_is_lost(error: BaseException, make) -> None:
    engine = make(0)
    engine.add([1, 2, 3], SamplingParams(max_tokens=9, temperature=0), "r")
    engine.step()
    engine.step()
    lose(engine, error)
    engine.abort("r")  # as `LLM.generate` does on its way out: nothing is collected, nothing raised
    with pytest.raises(RuntimeError, match="failed or was interrupted"):
        engine.add([1, 2, 3], SamplingParams(max_tokens=1))
    with pytest.raises(RuntimeError, match="failed or was interrupted"):
        engine.step()


@pytest.mark.parametrize("seed", [None, 0])
def test_only_held_requests_take_tokens_and_only_such_as_there_are(seed: int | None, make) -> None:
    engine = make(seed)
    engine.add([1, 2, 3], SamplingParams(max_tokens=2, temperature=0), "held", holds=True)
    engine.add([1, 2, 3], SamplingParams(max_tokens=2, temperature=0), "other")
    engine.step()
    for go_on in (engine.append, engine.fork):
        with pytest.raises(ValueError, match="holds=True"):
            go_on("other", 5)
        for token in (-1, VOCAB, 1.5):
            with pytest.raises(ValueError, match=r"expected a token of the vocabulary \[0, 61\)"):
                go_on("held", token)
    for token in (1, 2):
        engine.append("held", token)
    with pytest.raises(ValueError, match="all it may have"):
        engine.append("held", 3)


def test_a_cache_that_the_machine_cannot_hold_is_refused_before_lists_as_long_are_made(random_model) -> None:
    """61 thousand million entries of a block pool would fill the memory first (run it under a limit of memory)."""
    for options in ({"kv_cache_bytes": 10**15}, {"num_blocks": 4, "preemption": "swap", "swap_bytes": 10**15}):
        with pytest.raises(ConfigError, match="GiB free: ask for less"):
            Engine(random_model("float64"), EngineConfig(**options))


def test_a_lost_engine_of_held_requests_says_so_in_every_step(make) -> None:
    engine = make(0)
    engine.add([1, 2, 3], SamplingParams(max_tokens=9, temperature=0, logprobs=1), "r", holds=True)
    engine.step()
    lose(engine, OSError("the device is gone"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="failed or was interrupted"):
            engine.step()
    with pytest.raises(RuntimeError, match="failed or was interrupted"):
        engine.append("r", 5)
