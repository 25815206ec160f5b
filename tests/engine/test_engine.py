"""The engine's own promises: ids, aborts, swapped parts, and a trace that tells the truth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from torch import Tensor

from reference_impl.assembly.config import ConfigError, EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.core.scheduler import Scheduler
from reference_impl.features.prefix.radix_index import RadixIndex
from reference_impl.interfaces import Request, RequestState, Sampled, SamplingParams, StepPlan
from tests.engine.conftest import OwnCache

GREEDY = SamplingParams(max_tokens=4, temperature=0)


class Ticking:
    """A clock that moves one second whenever somebody looks."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        self.time += 1.0
        return self.time


@pytest.fixture
def engine(random_model: Callable) -> Engine:
    return Engine(random_model("float32"), EngineConfig(block_size=4, num_blocks=20), Parts(clock=Ticking()))


def run(engine: Engine) -> None:
    while engine.has_work():
        engine.step()


def test_ids_are_unique_whoever_chooses_them(engine: Engine) -> None:
    engine.add([1], GREEDY, "1")
    names = {engine.add([1], GREEDY).id for _ in range(4)}
    assert len(names) == 4
    assert "1" not in names
    with pytest.raises(ValueError, match="request id '1' is in use"):
        engine.add([1], GREEDY, "1")


def test_an_abort_frees_the_blocks_and_names_unknown_requests(engine: Engine) -> None:
    a, b = engine.add([1] * 9, GREEDY), engine.add([2] * 9, GREEDY)
    engine.step()
    engine.abort(a.id)
    assert (a.state, a.finish_reason) == (RequestState.FINISHED, "abort")
    with pytest.raises(KeyError, match="no unfinished request"):
        engine.abort(a.id)
    run(engine)
    assert b.finish_reason == "length"
    assert engine.kv.num_available == 20


def test_a_step_without_work_does_nothing(engine: Engine) -> None:
    result = engine.step()
    assert result.tokens == {}
    assert result.finished == ()
    assert engine.trace.steps() == []


def test_the_caller_keeps_his_own_list_of_ids(engine: Engine) -> None:
    prompt = [1, 2, 3]
    request = engine.add(prompt, GREEDY)
    run(engine)
    assert prompt == [1, 2, 3]
    assert request.tokens[:3] == prompt


def test_more_logprobs_than_tokens_in_the_vocabulary_do_not_break_the_batch(engine: Engine) -> None:
    wide, other = engine.add([1, 2], SamplingParams(max_tokens=2, logprobs=1000)), engine.add([3], GREEDY)
    run(engine)
    assert len(wide.logprobs[0].top) == 61
    assert len(other.output_tokens) == 4


def test_the_trace_tells_what_was_computed_and_when(engine: Engine) -> None:
    request = engine.add([1, 2, 3, 4, 5], GREEDY)
    run(engine)
    steps = engine.trace.steps()
    assert [[(r.start, r.num_tokens, r.samples) for r in s.rows] for s in steps] == [
        [(0, 5, True)], [(5, 1, True)], [(6, 1, True)], [(7, 1, True)]
    ]  # fmt: skip
    assert [s.step_id for s in steps] == [1, 2, 3, 4]
    assert [s.num_free_blocks for s in steps] == [18, 18, 18, 20]
    metrics = engine.trace.metrics(request.id)
    times = [s.finished_at for s in steps]
    assert metrics.num_output_tokens == 4
    assert metrics.ttft == times[0] - request.arrival
    assert metrics.itl == tuple(b - a for a, b in pairwise(times))
    assert metrics.tpot == pytest.approx((times[3] - times[0]) / 3)
    assert metrics.latency == times[3] - request.arrival
    assert metrics.tokens_per_second == pytest.approx(4 / metrics.latency)


def test_waiting_in_the_queue_counts_towards_the_first_token(random_model: Callable) -> None:
    config = EngineConfig(block_size=4, num_blocks=20, max_num_seqs=1)
    engine = Engine(random_model("float32"), config, Parts(clock=Ticking()))
    first, second = engine.add([1, 2], GREEDY), engine.add([1, 2], GREEDY)
    run(engine)
    assert engine.trace.metrics(second.id).ttft > engine.trace.metrics(first.id).latency


def test_a_part_of_your_own_serves_the_same_tokens(random_model: Callable, engine: Engine) -> None:
    """Last come, first served: another order, the same tokens."""

    class LastComeFirst(Scheduler):
        def enroll(self, request) -> None:
            super().enroll(request)
            self.ranks[request.id] = (-len(self.ranks), 0)

    model, config = random_model("float32"), EngineConfig(block_size=4, num_blocks=20, max_num_seqs=1)
    mine = Engine(model, config)
    mine = Engine(
        model, config, Parts(scheduler=LastComeFirst(mine.kv, 1, 2048), kv_manager=mine.kv, block_pool=mine.block_pool)
    )
    requests = [(engine.add([i] * 3, GREEDY), mine.add([i] * 3, GREEDY)) for i in range(3)]
    run(engine)
    run(mine)
    assert [a.output_tokens for a, _ in requests] == [b.output_tokens for _, b in requests]
    first_rows = [s.rows[0].request_id for s in mine.trace.steps()]
    assert first_rows[0] == requests[-1][1].id


def test_a_scheduler_that_starves_everyone_is_reported_not_waited_for(random_model: Callable) -> None:
    class Lazy(Scheduler):
        def schedule(self, now: float) -> StepPlan:
            return StepPlan(0, ())

    model = random_model("float32")
    spare = Engine(model, EngineConfig(num_blocks=2))
    engine = Engine(model, EngineConfig(num_blocks=2), Parts(scheduler=Lazy(spare.kv, 1, 1)))
    engine.add([1], GREEDY)
    with pytest.raises(RuntimeError, match="planned nothing although requests wait"):
        engine.step()


def test_the_cache_is_as_large_as_the_bytes_allow(random_model: Callable) -> None:
    model = random_model("float32")
    engine = Engine(model, EngineConfig(block_size=4, kv_cache_bytes=10_000))
    per_token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, KV heads, head_dim, bytes
    assert engine.kv_spec.bytes_per_token == per_token
    assert engine.num_blocks == 10_000 // (4 * per_token)
    assert engine.kv_cache.data.nbytes == engine.num_blocks * 4 * per_token


def test_a_sampler_of_your_own_chooses_every_token(random_model: Callable) -> None:
    def least_likely(logits: Tensor, requests: Sequence[Request]) -> Sampled:
        return Sampled(logits.argmin(dim=-1).tolist(), [None] * len(requests))

    config = EngineConfig(block_size=4, num_blocks=20)
    outputs = []
    for parts in (Parts(sampler=least_likely), Parts()):
        engine = Engine(random_model("float32"), config, parts)
        requests = [engine.add([token, 2, 3], GREEDY) for token in (1, 7)]
        run(engine)
        outputs.append([r.output_tokens for r in requests])
    assert [len(tokens) for tokens in outputs[0]] == [4, 4]
    assert outputs[0][0][0] != outputs[1][0][0]


def test_a_part_that_is_empty_is_a_part(random_model: Callable) -> None:
    """`parts.prefix_index or the engine's own` dropped an index with nothing in it yet: its length is 0."""

    class Watched(RadixIndex):
        inserted = 0

        def insert(self, *args) -> list[int]:
            self.inserted += 1
            return super().insert(*args)

    index = Watched(4)
    assert len(index) == 0
    engine = Engine(random_model("float32"), EngineConfig(block_size=4, num_blocks=20), Parts(prefix_index=index))
    engine.add([1] * 9, GREEDY)
    run(engine)
    assert index.inserted > 0
    assert len(index) == 3


def test_a_cache_of_your_own_is_not_measured_against_this_machines_memory(random_model: Callable) -> None:
    config = EngineConfig(num_blocks=10**5, block_size=2**14)
    engine = Engine(random_model("float32"), config, Parts(kv_cache=OwnCache()))
    assert engine.num_blocks == 10**5
    with pytest.raises(ConfigError, match="100,000 KV blocks of 4,194,304 bytes need"):
        Engine(random_model("float32"), config)


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        ({"policy": "p", "scheduler": "s"}, r"Parts\.policy is for the engine's own scheduler, and Parts\.scheduler"),
        ({"prefix_index": "p", "kv_manager": "k"}, r"Parts\.prefix_index is for the engine's own kv_manager"),
        ({"sampler": "s", "executor": "e"}, r"the sampler would never be asked\. Hand it to your str, or leave one"),
    ],
)
def test_a_part_that_nobody_would_ask_is_refused(parts: dict[str, str], fault: str, random_model: Callable) -> None:
    with pytest.raises(ValueError, match=fault):
        Engine(random_model("float32"), EngineConfig(num_blocks=4), Parts(**parts))


def test_a_manager_with_more_blocks_than_the_cache_is_refused(random_model: Callable) -> None:
    model = random_model("float32")
    larger = Engine(model, EngineConfig(num_blocks=9)).kv
    with pytest.raises(
        ValueError, match=r"Parts\.kv_manager has 9 blocks to give; the KV cache has 8: pass num_blocks=9"
    ):
        Engine(model, EngineConfig(num_blocks=8), Parts(kv_manager=larger))
    assert Engine(model, EngineConfig(num_blocks=10), Parts(kv_manager=larger)).kv is larger
