"""Steps that are submitted while others run: what they take from them, what they no longer read, and their times."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from reference_impl.config import EngineConfig
from reference_impl.engine import Engine, Parts
from reference_impl.interfaces import UNKNOWN_TOKEN, Request, Row, SamplingParams, StepOutput, StepPlan
from reference_impl.sampling.sampler import sample
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
        self.engine, self.requests = engine, {}
        chance = random.Random(0)
        for i, p in enumerate(params):
            prompt = chance.choices(range(61), k=3 + 2 * i)
            table = list(range(8 * i, 8 * i + 8))
            sampling = SamplingParams(max_tokens=99, seed=i, **p)
            self.requests[f"r{i}"] = Request(f"r{i}", prompt, len(prompt), sampling, i, 0.0, block_tables=[table])
        self.num_steps = 0

    def plan(self, order: list[int]) -> StepPlan:
        """All that the host or the device knows of these requests and is not computed."""
        self.num_steps += 1
        rows = []
        for i in order:
            r = self.requests[f"r{i}"]
            rows.append(Row(r.id, r.num_computed_tokens, r.num_missing_tokens, True))
        return StepPlan(self.num_steps, tuple(rows))

    def submitted(self, plan: StepPlan) -> None:
        """What a scheduler notes that goes on without the result."""
        for row in plan.rows:
            request = self.requests[row.request_id]
            request.num_computed_tokens += row.num_tokens
            request.tokens.append(UNKNOWN_TOKEN)

    def collected(self, output: StepOutput) -> None:
        for request_id, token in output.tokens.items():
            tokens = self.requests[request_id].tokens
            tokens[tokens.index(UNKNOWN_TOKEN)] = token


def step_by_step(engine: Engine, params: list[dict[str, Any]], orders: list[list[int]]) -> list[StepOutput]:
    lane, outputs = Lane(engine, params), []
    for order in orders:
        plan = lane.plan(order)
        outputs.append(engine.executor.collect(engine.executor.submit(plan, lane.requests)))
        lane.submitted(plan)
        lane.collected(outputs[-1])
    return outputs


def two_in_flight(
    engine: Engine, params: list[dict[str, Any]], orders: list[list[int]], late: bool
) -> list[StepOutput]:
    """late: a step runs only when it is asked for, after the next one was prepared and its requests have changed."""
    lane, outputs, waiting = Lane(engine, params), [], []
    executor = engine.executor
    for order in orders:
        plan = lane.plan(order)
        step = executor.prepare(plan, lane.requests)
        waiting.append(step if late else executor.run(step))
        lane.submitted(plan)
        if len(waiting) == 2:
            outputs.append(executor.collect(executor.run(waiting.pop(0)) if late else waiting.pop(0)))
            lane.collected(outputs[-1])
    outputs.append(executor.collect(executor.run(waiting[0]) if late else waiting[0]))
    return outputs


def checked(found: list[StepOutput], expected: list[StepOutput]) -> None:
    assert [output.tokens for output in found] == [output.tokens for output in expected]
    for f, e in zip(found, expected, strict=True):
        assert f.logprobs.keys() == e.logprobs.keys()
        for name, report in e.logprobs.items():
            assert f.logprobs[name].token == report.token
            assert f.logprobs[name].logprob == pytest.approx(report.logprob, abs=1e-6)
            assert [t for t, _ in f.logprobs[name].top] == [t for t, _ in report.top]


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


def test_only_a_sampler_that_can_be_launched_lets_steps_overlap(random_model) -> None:
    model = random_model("float64")
    assert Engine(model).executor.can_overlap
    plain = Engine(model, parts=Parts(sampler=lambda logits, requests: sample(logits, requests)))
    assert not plain.executor.can_overlap
    request = plain.add([1, 2, 3], SamplingParams(max_tokens=3, temperature=0))
    while plain.has_work():
        plain.step()
    assert len(request.output_tokens) == 3


@pytest.mark.parametrize("learner", [False, True], ids=["a token of nobody", "a sampler that cannot be launched"])
def test_an_unknown_token_that_no_step_samples_is_an_error(learner: bool, random_model) -> None:
    parts = Parts(sampler=lambda logits, requests: sample(logits, requests)) if learner else Parts()
    engine = Engine(random_model("float64"), EngineConfig(num_blocks=4), parts)
    request = Request("a", [1, 2, UNKNOWN_TOKEN], 2, SamplingParams(), 0, 0.0, block_tables=[[0]])
    if learner:
        first = StepPlan(1, (Row("a", 0, 2, True),))
        engine.executor.submit(first, {"a": Request("a", [1, 2], 2, SamplingParams(), 0, 0.0, block_tables=[[0]])})
    with pytest.raises(ValueError, match="UNKNOWN_TOKEN: expected one that the step submitted just before samples"):
        engine.executor.submit(StepPlan(2, (Row("a", 2, 1, True),)), {"a": request})


def test_a_step_in_between_that_does_not_sample_it_ends_the_chain(random_model) -> None:
    """What an older step sampled is not there any more: to take the row that now stands there would be silent."""
    lane = Lane(dense_engine(dense_model(random_model("float64", device=DEVICE)), num_blocks=40), PARAMS)
    executor = lane.engine.executor
    for order in ([0, 1], [1]):
        plan = lane.plan(order)
        executor.submit(plan, lane.requests)
        lane.submitted(plan)
    with pytest.raises(ValueError, match="r0"):
        executor.submit(lane.plan([0]), lane.requests)


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
    lane = Lane(dense_engine(dense_model(random_model("float64", device=DEVICE)), num_blocks=40), PARAMS)
    executor = lane.engine.executor
    output = executor.collect(executor.submit(StepPlan(1, (), preempted=("r0",)), lane.requests))
    assert (output.tokens, output.logprobs) == ({}, {})
    chunk = StepPlan(2, (Row("r0", 0, 2, False),))
    assert executor.collect(executor.submit(chunk, lane.requests)).tokens == {}


class ReadOnce(dict[str, Request]):
    """Requests that may be looked at only while a step is prepared."""

    open = True

    def __getitem__(self, key: str) -> Request:
        assert self.open, "run read a request"
        return super().__getitem__(key)


def test_run_reads_no_request(random_model) -> None:
    """They are emptied before it: what was needed of them was read."""
    lane = Lane(dense_engine(dense_model(random_model("float64", device=DEVICE)), num_blocks=40), PARAMS)
    plan, executor = lane.plan([0, 1, 2, 3, 4]), lane.engine.executor
    expected = executor.collect(executor.submit(plan, lane.requests))
    requests: Mapping[str, Request] = ReadOnce(lane.requests)
    step = executor.prepare(plan, requests)
    requests.open = False  # type: ignore[attr-defined]
    for request in lane.requests.values():
        request.tokens[:] = [7]
        request.block_tables[:] = [[]]
    assert executor.collect(executor.run(step)).tokens == expected.tokens


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
    assert torch.is_tensor(engine.executor.graphs.previous)
