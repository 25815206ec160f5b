"""An executor that runs stages: several steps in flight, none of which has the tokens that another samples.

The executor computes each step as late as it may, and looks at the rows that it gets (`StagedExecutor`).
test_schedule_invariance.py draws stages with everything else, and compares texts and logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.kv import kv_manager
from reference_impl.assembly.parts import Parts
from reference_impl.core.block_pool import BlockPool
from reference_impl.core.scheduler import Scheduler
from reference_impl.features.beams.search import beam_search
from reference_impl.features.policies import ByPriority
from reference_impl.interfaces import PlansStages, RequestState, RunsStages, SamplingParams
from tests.engine.conftest import HostOracle, StagedExecutor, check_references, staged
from tests.engine.test_abilities import PlainKV
from tests.engine.test_overlap_order import first_to_finish

VOCAB = 61
STAGES = [2, 3, 4]
Make = Callable[..., Engine]


@pytest.fixture
def make(random_model: Callable) -> Make:
    def make(num_stages: int | None, model: Any = None, parts: Parts | None = None, **options: Any) -> Engine:
        """None: an engine that waits for each step."""
        model, options = model or random_model("float64"), {"block_size": 4, "num_blocks": 60} | options
        if num_stages is None:
            return Engine(model, EngineConfig(**options), parts)
        return staged(model, num_stages, parts, **options)

    return make


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **options)


def run(engine: Engine) -> dict[str, list[int]]:
    found_tokens: dict[str, list[int]] = {}
    while engine.has_work():
        for name, new in engine.step().tokens.items():
            found_tokens.setdefault(name, []).extend(new)
        check_references(engine)
    assert engine.kv.num_available == engine.num_blocks
    return found_tokens


def alone(make: Make, prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
    engine = make(None, prefix_cache="off")
    request = engine.add(prompt, sampling)
    run(engine)
    return request.output_tokens


@pytest.mark.parametrize("num_stages", STAGES)
@pytest.mark.parametrize("num_requests", [1, 3, 8, 9])
def test_as_many_steps_as_stages_are_in_flight_and_share_the_requests_that_decode(
    num_stages: int, num_requests: int, make: Make
) -> None:
    engine = make(num_stages, prefix_cache="off")
    requests = [engine.add([i + 1] * 3, greedy(8)) for i in range(num_requests)]
    run(engine)
    for i, request in enumerate(requests):
        assert request.output_tokens == alone(make, [i + 1] * 3, greedy(8))
    assert isinstance(engine.executor, StagedExecutor)
    assert engine.executor.most_in_flight == min(num_stages, num_requests)
    decoding = [[row.request_id for row in s.rows] for s in engine.trace.steps() if all(r.start >= 3 for r in s.rows)]
    assert {len(rows) for rows in decoding} <= {max(1, num_requests // num_stages), -(-num_requests // num_stages)}
    ids = [request.id for request in requests]
    assert [name for rows in decoding for name in rows] == ids * 7, "they take turns, in the order of rank"


@pytest.mark.parametrize("num_stages", STAGES)
def test_the_chunks_of_a_prompt_follow_each_other_through_the_stages(num_stages: int, make: Make) -> None:
    engine = make(num_stages, max_num_batched_tokens=4)
    request = engine.add([*range(1, 24)], greedy(3))
    in_flight = []
    while not request.num_in_flight:
        engine.step()
        in_flight.append(len(engine.in_flight))
    assert max(in_flight) == num_stages - 1, "between two steps; the next one is planned on top of these"
    assert engine.executor.most_in_flight == num_stages  # type: ignore[attr-defined]
    run(engine)
    assert [row.num_tokens for step in engine.trace.steps() for row in step.rows] == [4, 4, 4, 4, 4, 3, 1, 1]
    assert request.output_tokens == alone(make, [*range(1, 24)], greedy(3))


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_request_preempted_with_a_token_in_flight_comes_back_when_that_is_there(preemption: str, make: Make) -> None:
    """Also if there are a seat and blocks at once; and what ranks behind it in the queue does not pass it."""
    parts = Parts(policy=ByPriority(aging=0))
    engine = make(4, None, parts, max_num_seqs=2, prefix_cache="off", preemption=preemption)
    prompts = [[9] * 9, [5] * 9, [7] * 4]
    requests = [engine.add(prompt, greedy(8), priority=1) for prompt in prompts[:2]]
    last = requests[1]
    while not (len(last.output_tokens) == 3 and last.num_in_flight):
        engine.step()
    engine.add([3] * 26, greedy(8), "urgent", priority=0)
    engine.step()
    assert (last.state, last.num_in_flight) == (RequestState.WAITING, 1)
    engine.abort("urgent")
    requests.append(engine.add(prompts[2], greedy(8), priority=1))
    waited = 0
    while last.num_in_flight:
        assert last.state is requests[2].state is RequestState.WAITING
        engine.step()
        check_references(engine)
        waited += 1
    assert waited > 0
    run(engine)
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.output_tokens == alone(make, prompt, greedy(8))
    order = [name for step in engine.trace.steps() for name, _ in step.admitted]
    assert order.index(last.id, 2) < order.index(requests[2].id)


@pytest.mark.parametrize("num_stages", STAGES)
def test_an_abort_in_flight_drops_what_its_step_samples_and_frees_its_blocks_later(num_stages: int, make: Make) -> None:
    engine = make(num_stages, prefix_cache="off")
    gone = engine.add([1, 2, 3, 4, 5], greedy(9), "gone")
    stays = [engine.add([7, i], greedy(9)) for i in range(5)]
    while not (gone.output_tokens and gone.num_in_flight):
        engine.step()
    known, free = list(gone.tokens), engine.block_pool.num_free
    engine.abort("gone")
    again = engine.add([4, 4], greedy(4), "gone")  # the name is free, the blocks are not
    assert engine.block_pool.num_free == free
    found_tokens = run(engine)
    assert gone.tokens == known
    assert found_tokens["gone"] == again.output_tokens == alone(make, [4, 4], greedy(4))
    assert [len(request.output_tokens) for request in stays] == [9] * 5
    assert engine.trace.metrics("gone").num_output_tokens == 4


def test_when_the_last_request_is_aborted_all_steps_in_flight_are_collected(make: Make) -> None:
    engine = make(4, max_num_batched_tokens=4)
    engine.add([*range(1, 24)], greedy(3), "only")
    for _ in range(3):
        engine.step()
    assert len(engine.in_flight) == 3
    engine.abort("only")
    assert not engine.has_work()
    assert (len(engine.in_flight), engine.kv.num_available, engine.kv.num_releasing) == (0, 60, 0)
    assert len(engine.trace.steps()) == 3


def test_a_request_that_stops_was_not_planned_once_more(make: Make) -> None:
    """Overlapped, the step after a stop token computes a row for nothing; here its request waits for each token."""
    text = alone(make, [5, 6, 7], greedy(8))
    end = next(t for i, t in enumerate(text) if i >= 2 and t not in text[:i])
    engine = make(3)
    request = engine.add([5, 6, 7], greedy(20, stop_token_ids=(end,)))
    engine.add([4, 4], greedy(12))
    run(engine)
    assert request.output_tokens == text[: text.index(end) + 1]
    computed = [row for step in engine.trace.steps() for row in step.rows if row.request_id == request.id]
    assert sum(row.num_tokens for row in computed) == len(request.tokens) - 1


@pytest.mark.parametrize("num_stages", STAGES)
def test_beams_samples_and_drafts_are_those_of_an_engine_that_waits(num_stages: int, make: Make, oracle: Any) -> None:
    found = [beam_search(make(stages), [1, 2, 3], 3, 6) for stages in (None, num_stages)]
    assert [beam.tokens for beam in found[0]] == [beam.tokens for beam in found[1]]
    assert [beam.score for beam in found[0]] == pytest.approx([beam.score for beam in found[1]])
    sampling = SamplingParams(max_tokens=9, seed=3, n=3)
    engine = make(None)
    first = engine.add([1, 2, 3, 4, 5], sampling, "r")
    samples = [first, *first.children]
    run(engine)
    texts = {sample.id: list(sample.tokens) for sample in samples}
    for parts in (
        Parts(proposer=oracle(texts, 0.7, VOCAB)), Parts(host_proposer=HostOracle(texts, 0.7, VOCAB)),
    ):  # fmt: skip
        engine = make(num_stages, None, parts, num_drafts=3, overlap="on")
        first = engine.add([1, 2, 3, 4, 5], sampling, "r")
        samples = [first, *first.children]
        run(engine)
        assert {sample.id: sample.tokens for sample in samples} == texts
        assert any(n > 1 for step in engine.trace.steps() for n in step.num_new_tokens)


def test_the_first_in_rank_does_not_wait_until_windows_give_up_no_more_blocks(
    random_model: Callable, make: Make
) -> None:
    """A window gives up blocks with every step, and with four in flight some are always on their way. If that were
    waited for, those that rank after it would take them, until they have finished."""
    window = random_model("float64", architecture="MistralForCausalLM", sliding_window=6)
    parts = Parts(policy=ByPriority(aging=0))
    engine = make(4, window, parts, block_size=1, num_blocks=25, max_num_batched_tokens=12)
    assert first_to_finish(engine, late_by=30) == ["urgent"]


class Sums:
    """A grammar whose masks depend on all that was written."""

    def allowed(self, output: Sequence[int]) -> bytes:
        token = (sum(output) + 7 * len(output)) % VOCAB
        return (1 << token | 1 << (token + 5) % VOCAB).to_bytes(8, "little")


@pytest.mark.parametrize("num_stages", STAGES)
def test_masks_are_made_of_all_tokens_that_came_before(num_stages: int, make: Make) -> None:
    texts = []
    for stages in (None, num_stages):
        engine = make(stages)
        requests = [engine.add([i, 2], greedy(9), grammar=[Sums(), None][i % 2]) for i in range(6)]
        run(engine)
        texts.append([request.output_tokens for request in requests])
    assert texts[0] == texts[1]


def test_after_a_failed_step_the_engine_says_that_its_state_is_lost(make: Make) -> None:
    engine = make(3)
    for i in range(6):
        engine.add([i, 2, 3], greedy(9), str(i))
    for _ in range(4):
        engine.step()
    assert len(engine.in_flight) == 2

    def fails(ticket: Any) -> Any:
        raise OSError("the device is gone")

    engine.executor.collect = fails  # type: ignore[method-assign]
    with pytest.raises(OSError, match="the device is gone"):
        engine.step()
    for i in range(6):
        engine.abort(str(i))  # collects nothing, raises nothing
    with pytest.raises(RuntimeError, match="make a new engine"):
        engine.add([1], greedy(1))
    engine.close()


def test_with_overlap_off_one_step_runs_at_a_time(make: Make) -> None:
    engine = make(3, overlap="off")
    assert engine.depth == 1
    assert engine.scheduler.num_stages == 1
    for i in range(6):
        engine.add([i, 2, 3], greedy(4))
    run(engine)
    assert engine.executor.most_in_flight == 1  # type: ignore[attr-defined]
    assert len(engine.trace.steps()) == 4


def test_parts_that_cannot_have_several_steps_in_flight_are_named(make: Make, random_model: Callable) -> None:
    model, config = random_model("float64"), EngineConfig(block_size=4, num_blocks=30, overlap="on")
    parts = Parts(executor=StagedExecutor(3))
    engine = Engine(model, config, parts)
    assert isinstance(engine.executor, RunsStages)
    assert isinstance(engine.scheduler, PlansStages)
    assert (engine.depth, engine.scheduler.num_stages) == (3, 3)
    kv = PlainKV(engine.kv)
    with pytest.raises(ValueError, match=r"these cannot: kv_manager \(step_submitted, step_collected\)$"):
        Engine(model, config, replace(parts, kv_manager=kv, block_pool=engine.block_pool))
    auto = Engine(model, replace(config, overlap="auto"), replace(parts, kv_manager=kv, block_pool=engine.block_pool))
    assert auto.depth == 1
    assert auto.scheduler.num_stages == 1
    mine = Scheduler(kv_manager(BlockPool(30), 4), 4, 100)
    with pytest.raises(ValueError, match=r"these cannot: scheduler \(advance, num_stages=3\)$"):
        Engine(model, config, replace(parts, scheduler=mine))
    mine.num_stages = 2
    for executor, overlap in ((StagedExecutor(3), "auto"), (StagedExecutor(2), "off"), (None, "auto")):
        with pytest.raises(ValueError, match="Scheduler plans for num_stages=2; here at most 1 steps are in flight"):
            Engine(model, replace(config, overlap=overlap), Parts(executor=executor, scheduler=mine))
    with pytest.raises(ValueError, match="StagedExecutor.num_stages: expected at least 1, got 0"):
        Engine(model, config, Parts(executor=StagedExecutor(0)))
    with pytest.raises(ValueError, match=r"these cannot: executor \(max_in_flight"):
        Engine(model, config, Parts(executor=StagedExecutor(1)))
