"""Steps that are submitted while others run: what they find in their slots, what they are told, and their times."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.sampler import sample
from reference_impl.core.planner import Planner, output_of
from reference_impl.interfaces import Request, Row, Sampled, SamplingParams, Step, StepOutput, StepPlan
from tests.executor.dense import DEVICE, dense_engine, dense_model
from tests.executor.tape import recorder

PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9}, {"temperature": 0.7, "logprobs": 3},
    {"temperature": 0.0, "repetition_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": 0.6},
    {"temperature": 1.0, "frequency_penalty": -0.5, "logprobs": 0},
]  # fmt: skip


class Lane:
    """Requests that decode together, step after step, on an executor of their own."""

    def __init__(self, engine: Engine, params: list[dict[str, Any]]):
        self.engine, self.requests, self.planner = engine, {}, Planner(engine.config.block_size)
        chance = random.Random(0)
        for i, p in enumerate(params):
            prompt = chance.choices(range(61), k=3 + 2 * i)
            table = list(range(8 * i, 8 * i + 8))
            sampling = SamplingParams(max_tokens=99, seed=i, **p)
            self.requests[f"r{i}"] = Request(f"r{i}", prompt, len(prompt), sampling, i, 0.0, block_tables=[table])
        self.num_steps = 0

    def step(self, order: list[int]) -> tuple[Step, tuple[Row, ...]]:
        """All that the host or the device knows of these requests and is not computed. Noted as a scheduler does that
        goes on without the result."""
        self.num_steps += 1
        asked = [self.requests[f"r{i}"] for i in order]
        rows = tuple(Row(r.id, r.num_computed_tokens, r.num_missing_tokens, True) for r in asked)
        step = self.planner.step(StepPlan(self.num_steps, rows), self.requests)
        for request in asked:
            request.num_computed_tokens = request.num_tokens
            request.num_in_flight += 1
        return step, rows

    def collected(self, output: StepOutput) -> None:
        for request_id, (token,) in output.tokens.items():
            self.requests[request_id].num_in_flight -= 1
            self.requests[request_id].tokens.append(token)


def step_by_step(engine: Engine, params: list[dict[str, Any]], orders: list[list[int]]) -> list[StepOutput]:
    lane, outputs = Lane(engine, params), []
    for order in orders:
        step, rows = lane.step(order)
        outputs.append(output_of(engine.executor.collect(engine.executor.submit(step)), rows))
        lane.collected(outputs[-1])
    return outputs


def two_in_flight(
    engine: Engine, params: list[dict[str, Any]], orders: list[list[int]], late: bool
) -> list[StepOutput]:
    """late: a step runs only when it is asked for, after the next one was planned and its requests have changed."""
    lane, outputs, executor = Lane(engine, params), [], engine.executor
    waiting: list[tuple[Any, tuple[Row, ...]]] = []

    def collect() -> None:
        step, rows = waiting.pop(0)
        outputs.append(output_of(executor.collect(executor.submit(step) if late else step), rows))
        lane.collected(outputs[-1])

    for order in orders:
        step, rows = lane.step(order)
        waiting.append((step if late else executor.submit(step), rows))
        if len(waiting) == 2:
            collect()
    collect()
    return outputs


def checked(found: list[StepOutput], expected: list[StepOutput]) -> None:
    assert [output.tokens for output in found] == [output.tokens for output in expected]
    for f, e in zip(found, expected, strict=True):
        assert f.logprobs.keys() == e.logprobs.keys()
        for name, [report] in e.logprobs.items():
            [mine] = f.logprobs[name]
            assert mine.token == report.token
            assert mine.logprob == pytest.approx(report.logprob, abs=1e-6)
            assert [t for t, _ in mine.top] == [t for t, _ in report.top]


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_a_step_takes_tokens_from_the_one_before_without_the_host(graphs: bool, late: bool, random_model) -> None:
    """Rows come, go and change their order; penalties and log-probabilities see the token that the host does not."""
    model = dense_model(random_model("float64", device=DEVICE))
    crossed = []

    @settings(max_examples=6, derandomize=True, database=None, phases=[Phase.generate])
    @given(
        params=st.lists(st.sampled_from(PARAMS), min_size=4, max_size=4),
        orders=st.lists(st.permutations(range(4)).flatmap(lambda p: st.integers(1, 4).map(lambda n: p[:n])),
                        min_size=2, max_size=6),
    )  # fmt: skip
    def same(params: list[dict[str, Any]], orders: list[list[int]]) -> None:
        options = {"block_size": 4, "num_blocks": 40, "max_num_seqs": 4}
        engine = dense_engine(model, **options)
        if graphs:
            engine.executor.use_graphs(recorder(), 4, engine.max_model_len)
        expected = step_by_step(dense_engine(model, **options), params, orders)
        checked(two_in_flight(engine, params, orders, late), expected)
        crossed.append(len(set(orders[0]) & set(orders[1])))
        if graphs:
            assert engine.executor.stats.replayed_steps > 0

    same()
    assert sum(crossed) > 3


def test_tokens_survive_a_replay_of_the_graph_that_they_came_from(random_model) -> None:
    """They are fetched when the next step, of the same graph, was launched already."""
    model, params = dense_model(random_model("float64", device=DEVICE)), [{"temperature": 0.0}, {"temperature": 0.9}]
    options = {"block_size": 4, "num_blocks": 40, "max_num_seqs": 4}
    expected = step_by_step(dense_engine(model, **options), params, orders := [[0, 1], [1, 0], [0, 1], [0, 1]])
    engine = dense_engine(model, **options)
    engine.executor.use_graphs(recorder(), 4, engine.max_model_len)
    checked(two_in_flight(engine, params, orders, late=False), expected)
    assert (engine.executor.stats.graphs_captured, engine.executor.stats.replayed_steps) == (1, 3)
    assert len({tuple(output.tokens.items()) for output in expected}) == 4


def test_the_samplers_of_torch_can_be_launched_too(random_model) -> None:
    model, orders = dense_model(random_model("float64", device=DEVICE)), [[0, 1, 2], [2, 0], [0, 2, 1], [1]]
    options = {"block_size": 4, "num_blocks": 40, "sampler": sample}
    expected = step_by_step(dense_engine(model, **options), PARAMS, orders)
    checked(two_in_flight(dense_engine(model, **options), PARAMS, orders, late=True), expected)


def of_a_learner(logits: torch.Tensor, requests: Any) -> Sampled:
    return sample(logits, requests)


def test_only_a_sampler_that_can_be_launched_lets_steps_overlap(random_model) -> None:
    model = random_model("float64")
    assert Engine(model).executor.max_in_flight == 2
    plain = Engine(model, parts=Parts(sampler=of_a_learner))
    assert plain.executor.max_in_flight == 1
    request = plain.add([1, 2, 3], SamplingParams(max_tokens=3, temperature=0))
    while plain.has_work():
        plain.step()
    assert len(request.output_tokens) == 3


def test_a_sampler_that_is_asked_sees_what_the_requests_have(random_model) -> None:
    """Prompt, output, parameters, as they are at that moment; also of one that comes back, and of a held one."""
    model, seen = random_model("float64"), []

    def watching(logits: torch.Tensor, requests: Any) -> Sampled:
        for r in requests:
            own = engine.requests[r.id]
            assert (list(r.tokens), r.num_prompt_tokens, r.sampling, r.seed, r.sample_index) == (
                own.tokens, own.num_prompt_tokens, own.sampling, own.seed, own.sample_index,
            )  # fmt: skip
            seen.append(r.id)
        return sample(logits, requests)

    engine = Engine(model, EngineConfig(num_blocks=9, block_size=4, prefix_cache="off"), Parts(sampler=watching))
    for i in range(3):
        engine.add([i + 1] * 7, SamplingParams(max_tokens=9, seed=i, **PARAMS[3]), f"r{i}")
    held = engine.add([5, 5], SamplingParams(max_tokens=4, temperature=0), "held", holds=True)
    while any(request is not held for request in engine.requests.values()) or held.num_tokens < 5:
        engine.step()
        if "held" in engine.requests and not held.num_missing_tokens and held.num_tokens < 5:
            engine.append("held", 3)
    assert seen.count("r0") == 9
    assert seen.count("held") >= 3
    assert any(step.preempted for step in engine.trace.steps())


def test_a_row_of_tokens_that_nobody_has_is_an_error(random_model) -> None:
    lane = Lane(dense_engine(dense_model(random_model("float64", device=DEVICE)), num_blocks=40), PARAMS)
    with pytest.raises(ValueError, match=r"'r0' has 3 tokens, of which the plan computes \[0, 4\)"):
        lane.planner.step(StepPlan(1, (Row("r0", 0, 4, True),)), lane.requests)


def test_a_token_stays_where_it_was_sampled_until_its_request_is_in_a_step_again(random_model) -> None:
    """Not only the step just before it: r0 samples, rests for two steps that are in flight, and goes on."""
    model = dense_model(random_model("float64", device=DEVICE))
    orders = [[0, 1], [1], [1], [0, 1]]
    expected = step_by_step(dense_engine(model, num_blocks=40), PARAMS, orders)
    checked(two_in_flight(dense_engine(model, num_blocks=40), PARAMS, orders, late=True), expected)


def test_more_requests_than_the_worker_has_slots_for_are_refused(random_model) -> None:
    engine = dense_engine(dense_model(random_model("float64", device=DEVICE)), num_blocks=40, max_num_seqs=2)
    step, _ = Lane(engine, PARAMS).step([0, 1, 2])
    with pytest.raises(ValueError, match="slot 2; this worker has 2: the scheduler lets more requests run than max_n"):
        engine.executor.submit(step)


class Ticking:
    """Every look at the clock is a second later."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        self.time += 1.0
        return self.time


@pytest.mark.parametrize("in_flight", [1, 2])
def test_steps_never_overlap_in_the_trace(in_flight: int, random_model) -> None:
    engine = dense_engine(dense_model(random_model("float64", device=DEVICE)), num_blocks=40, block_size=4)
    engine.executor.clock = Ticking()
    run: Callable[..., list[StepOutput]] = step_by_step
    if in_flight == 2:
        run = lambda e, p, o: two_in_flight(e, p, o, late=True)  # noqa: E731
    outputs = run(engine, PARAMS, [[0, 1], [1, 0], [0], [1]])
    for before, after in itertools.pairwise(outputs):
        assert before.started_at < before.finished_at <= after.started_at < after.finished_at


def test_a_step_without_rows_has_its_place_in_the_order(random_model) -> None:
    executor = dense_engine(dense_model(random_model("float64", device=DEVICE)), num_blocks=40).executor
    reply = executor.collect(executor.submit(Step(1, closed=(0,))))
    assert (reply.step_id, reply.tokens, reply.logprobs) == (1, (), {})
    lane = Lane(dense_engine(dense_model(random_model("float64", device=DEVICE)), num_blocks=40), PARAMS)
    chunk = lane.planner.step(StepPlan(2, (Row("r0", 0, 2, False),)), lane.requests)
    executor = lane.engine.executor
    assert executor.collect(executor.submit(chunk)).tokens == ((),)


def test_a_step_is_a_message(random_model) -> None:
    """All that a worker needs is in it: another process could have sent it, and its requests are gone by now."""
    model = dense_model(random_model("float64", device=DEVICE))
    expected = step_by_step(dense_engine(model, num_blocks=40), PARAMS, [[0, 1, 2, 3, 4]])
    lane = Lane(dense_engine(model, num_blocks=40), PARAMS)
    step, rows = lane.step([0, 1, 2, 3, 4])
    sent = pickle.dumps(step)
    for request in lane.requests.values():
        request.tokens[:] = [7]
        request.block_tables[:] = [[]]
    executor = lane.engine.executor
    reply = pickle.loads(pickle.dumps(executor.collect(executor.submit(pickle.loads(sent)))))
    checked([output_of(reply, rows)], expected)


def test_the_size_of_a_step_does_not_depend_on_how_long_its_contexts_are(random_model) -> None:
    sizes = {}
    for length in (40, 4000):
        requests, planner = {}, Planner(16)
        for i in range(8):
            params, table = SamplingParams(repetition_penalty=1.3), list(range(300 * i, 300 * i + 260))
            requests[f"r{i}"] = Request(f"r{i}", [1] * length, length, params, 0, 0.0, block_tables=[table])
        planner.step(StepPlan(1, tuple(Row(name, 0, length, True) for name in requests)), requests)
        for request in requests.values():
            request.num_computed_tokens = length
            request.num_in_flight = 1
        plan = StepPlan(2, tuple(Row(name, length, 1, True) for name in requests))
        sizes[length] = len(pickle.dumps(planner.step(plan, requests)))
    assert sizes[4000] <= sizes[40] + 8 * 2, "only the numbers are larger"
    assert sizes[4000] < 1000


def test_texts_with_graphs_and_overlap_are_those_without(random_model) -> None:
    """The engine as it stands on a GPU: the next step planned while one runs, decoding replayed."""
    model, texts = dense_model(random_model("float64", device=DEVICE)), []
    for overlap in ("off", "on"):
        engine = dense_engine(model, block_size=2, num_blocks=16, max_num_seqs=4, overlap=overlap)
        if overlap == "on":
            engine.executor.use_graphs(recorder(), 4, engine.max_model_len)
        requests = [
            engine.add([3 * i + 1] * (2 + i), SamplingParams(max_tokens=6 + i, seed=i, **PARAMS[i % 5]), f"r{i}")
            for i in range(6)
        ]
        while engine.has_work():
            engine.step()
        texts.append([r.output_tokens for r in requests])
        assert any(step.preempted for step in engine.trace.steps())
    assert engine.executor.stats.replayed_steps > 5
    assert texts[0] == texts[1]


def test_it_counts_what_it_does(random_model) -> None:
    engine = dense_engine(dense_model(random_model("float64", device=DEVICE)), num_blocks=40, max_num_seqs=4)
    engine.executor.use_graphs(recorder(), 4, engine.max_model_len)
    for i in range(2):
        engine.add([1, 2, 3], SamplingParams(max_tokens=4, seed=i, ignore_eos=True))
    while engine.has_work():
        engine.step()
    stats = engine.executor.stats
    assert (stats.eager_steps, stats.replayed_steps, stats.graphs_captured) == (1, 3, 1)
