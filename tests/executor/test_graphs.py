"""Steps that are replayed give what eager steps give; on the CPU with a tape, on a GPU with CUDA graphs."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from reference_impl.assembly.config import EngineConfig, course_model
from reference_impl.assembly.engine import Engine
from reference_impl.core.planner import Planner
from reference_impl.features.graphs import graphs as graphs_module
from reference_impl.features.graphs.graphs import GraphKey, Graphs, longest_bucket, rows_bucket
from reference_impl.interfaces import Request, Row, SamplingParams, StepPlan
from reference_impl.serving.worker import load
from tests.executor.dense import DEVICE, dense_engine, dense_model
from tests.executor.tape import Tape, recorder

VOCAB = 61
QUIET: dict[str, Any] = {"graphs": "off", "overlap": "off", "block_size": 4, "num_blocks": 40, "max_num_seqs": 4}
GENERATE = [Phase.generate]  # an example takes seconds: none is made smaller


def with_graphs(engine: Engine) -> Engine:
    engine.executor.use_graphs(recorder(), engine.config.max_num_seqs, engine.max_model_len)
    return engine


@pytest.fixture
def short_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that contexts of a few tokens meet several buckets."""
    monkeypatch.setattr(graphs_module, "SHORTEST", 8)


def serve(engine: Engine, work: list[dict[str, Any]]) -> list[list[int]]:
    requests: dict[int, Request] = {}
    for step in range(10_000):
        for i, w in enumerate(work):
            if w["arrival"] == step:
                requests[i] = engine.add(w["prompt"], w["sampling"], f"r{i}", priority=i % 2)
            if w["abort"] == step and f"r{i}" in engine.requests:
                engine.abort(f"r{i}")
        engine.step()
        if len(requests) == len(work) and not engine.has_work():
            return [requests[i].output_tokens for i in range(len(work))]
    raise AssertionError("it never ends")


SAMPLING = st.sampled_from(
    [
        {"temperature": 0.0}, {"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 1.3, "top_k": 9},
        {"temperature": 1.0, "top_p": 0.8, "min_p": 0.01}, {"temperature": 0.7, "logprobs": 2},
        {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 0.3},
        {"temperature": 0.9, "logit_bias": {3: 4.0, 7: -2.0}}, {"min_tokens": 1, "stop_token_ids": tuple(range(30))},
    ]
)  # fmt: skip


@st.composite
def asked(draw: st.DrawFn) -> dict[str, Any]:
    chance = random.Random(draw(st.integers(0, 99)))
    params = SamplingParams(max_tokens=draw(st.integers(1, 12)), seed=draw(st.integers(0, 9)), **draw(SAMPLING))
    return {
        "prompt": chance.choices(range(VOCAB), k=draw(st.integers(1, 14))), "sampling": params,
        "arrival": draw(st.integers(0, 6)), "abort": draw(st.one_of(st.none(), st.none(), st.integers(2, 9))),
    }  # fmt: skip


@pytest.mark.usefixtures("short_buckets")
@pytest.mark.parametrize(
    ("kind", "examples"),
    [("full", 6), ("full and windows", 3), pytest.param("full and windows", 5, marks=pytest.mark.slow)],
)
def test_texts_are_those_of_eager_steps_whatever_the_schedule(kind: str, examples: int, random_model) -> None:
    """Batches grow, shrink and change their order; requests are thrown out and come back."""
    changes: dict[str, Any] = {"window": {"architecture": "MistralForCausalLM", "sliding_window": 6}}.get(kind, {})
    if kind == "full and windows":
        changes = {
            "architecture": "Gemma3ForCausalLM", "sliding_window": 5, "num_hidden_layers": 3,
            "query_pre_attn_scalar": 8, "sliding_window_pattern": 2, "hidden_activation": "gelu_pytorch_tanh",
        }  # fmt: skip
    model = dense_model(random_model("float64", device=DEVICE, **changes))
    replayed = set()

    @settings(max_examples=examples, derandomize=True, database=None, phases=GENERATE)
    @given(
        work=st.lists(asked(), min_size=2, max_size=6), blocks=st.integers(14, 60), seats=st.sampled_from([3, 6]),
        block_size=st.sampled_from([1, 2, 4]), budget=st.sampled_from([5, 40]),
    )  # fmt: skip
    def same(work: list[dict[str, Any]], blocks: int, seats: int, block_size: int, budget: int) -> None:
        options = {
            "block_size": block_size, "num_blocks": 30 + blocks * (2 if changes else 1) * 4 // block_size,
            "max_num_seqs": seats, "max_num_batched_tokens": budget,
        }  # fmt: skip
        plain, graphed = dense_engine(model, **options), with_graphs(dense_engine(model, **options))
        assert serve(graphed, work) == serve(plain, work)
        replayed.update(graphed.executor.graphs._graphs)
        assert graphed.executor.stats.eager_steps < len(plain.trace.steps()) or not replayed

    same()
    assert {key.rows for key in replayed} >= {1, 2}
    assert {key.longest for key in replayed} >= {8, 16}
    assert {key.samples for key in replayed} == {True, False}


class Bench:
    """Two engines whose caches begin with the same bits: one replays, one does not."""

    def __init__(self, model: Any, seed: int = 0, **options: Any):
        sizes = {"block_size": 4, "num_blocks": 40, "max_num_seqs": 6, **options}
        self.plain, self.graphed = dense_engine(model, **sizes), with_graphs(dense_engine(model, **sizes))
        start = torch.randn(self.plain.kv_cache.data.shape, generator=torch.Generator().manual_seed(seed)).double()
        for engine in (self.plain, self.graphed):
            engine.kv_cache.data.copy_(start)
        self.num_steps = 0

    def step(self, contexts: list[int], seed: int, **sampling: Any) -> None:
        self.run(decoding(contexts, seed, **sampling))

    def run(self, requests: dict[str, Request]) -> None:
        """One step in both: the same tokens and, to rounding, the same cache."""
        self.num_steps += 1
        plan = StepPlan(self.num_steps, tuple(Row(i, r.num_tokens - 1, 1, True) for i, r in requests.items()))
        step = Planner(4).step(plan, requests)  # one that was told nothing: every step opens all its slots
        outputs = [e.executor.collect(e.executor.submit(step)) for e in (self.plain, self.graphed)]
        assert outputs[0].tokens == outputs[1].tokens
        assert outputs[0].logprobs.keys() == outputs[1].logprobs.keys()
        torch.testing.assert_close(
            self.graphed.kv_cache.data, self.plain.kv_cache.data, rtol=1e-12, atol=1e-12, equal_nan=True
        )


def decoding(contexts: list[int], seed: int, **sampling: Any) -> dict[str, Request]:
    """Requests of so many tokens, all but the last in the cache, in blocks of their own."""
    chance = random.Random(seed)
    blocks = chance.sample(range(40), k=sum(-(-n // 4) for n in contexts))
    requests = {}
    for i, n in enumerate(contexts):
        table = [blocks.pop() for _ in range(-(-n // 4))]
        params = SamplingParams(seed=seed, **(sampling or {"temperature": 0.8}))
        tokens = chance.choices(range(VOCAB), k=n)
        requests[f"r{i}"] = Request(f"r{i}", tokens, n, params, seed + i, 0.0, block_tables=[table])
    return requests


STEPS = st.lists(
    st.tuples(st.lists(st.integers(1, 16), min_size=1, max_size=4), st.integers(0, 9)), min_size=5, max_size=8
)


@pytest.mark.usefixtures("short_buckets")
def test_a_recording_of_one_step_serves_any_other_of_its_key(random_model) -> None:
    """The key is complete: steps in any order, of any shape, whoever was captured first."""
    model = dense_model(random_model("float64", device=DEVICE))
    replays = []

    @settings(max_examples=5, derandomize=True, database=None, phases=GENERATE)
    @given(steps=STEPS)
    def same(steps: list[tuple[list[int], int]]) -> None:
        bench = Bench(model)
        for contexts, seed in steps:
            bench.step(contexts, seed)
        stats = bench.graphed.executor.stats
        assert stats.replayed_steps == len(steps)
        assert stats.eager_steps == 0
        replays.append(stats.replayed_steps - stats.graphs_captured)

    same()
    assert sum(replays) > 10, "some graph served more than the step it was captured in"


@pytest.mark.usefixtures("short_buckets")
def test_padding_writes_nothing_and_reads_nothing(random_model) -> None:
    """Three rows in a graph of four: what nobody owns is NaN, in blocks, in stale inputs, and stays as it is."""
    model = dense_model(random_model("float64", device=DEVICE))
    bench = Bench(model)
    bench.step([7, 8, 3, 6], 1)  # now the fourth row of the inputs is somebody's
    for contexts in ([8, 5, 2], [8, 8, 8]):
        requests = decoding(contexts, 2)
        owned = sorted(block for r in requests.values() for block in r.block_table)
        cache = bench.graphed.kv_cache.data
        for engine in (bench.plain, bench.graphed):
            engine.kv_cache.data.fill_(torch.nan)
            engine.kv_cache.data[:, :, owned] = 0.25
        before = cache.clone()
        bench.run(requests)
        assert bench.graphed.executor.stats.graphs_captured == 1, "both are steps of four rows"
        changed = (cache.view(torch.int64) != before.view(torch.int64)).any(0).any(0).flatten(2).any(-1)
        slots = {(r.block_table[(r.num_tokens - 1) // 4], (r.num_tokens - 1) % 4) for r in requests.values()}
        assert {tuple(slot) for slot in changed.nonzero().tolist()} == slots, "only the new tokens' slots have new bits"


def test_the_kernels_of_a_gpu_give_the_same_replayed(random_model) -> None:
    """Ours, in the interpreter or on a GPU, sampling kernel included: nothing of them waits for the device."""
    model = random_model("float32", device=DEVICE, kernels="triton", num_hidden_layers=1)
    texts = []
    for graphs in (False, True):
        config = EngineConfig(
            attention="triton", graphs="off", overlap="off", block_size=4, num_blocks=40, max_num_seqs=4
        )
        engine = Engine(model, config)
        if graphs:
            with_graphs(engine)
        cases: list[tuple[int, dict[str, Any]]] = [
            (3, {"temperature": 0.0}), (5, {"temperature": 0.8, "top_k": 20}), (2, {"temperature": 1.0, "top_p": 0.9}),
        ]  # fmt: skip
        requests = [
            engine.add([i + 1] * n, SamplingParams(max_tokens=2 + i, seed=i, **params), f"r{i}")
            for i, (n, params) in enumerate(cases)
        ]
        while engine.has_work():
            engine.step()
        texts.append([r.output_tokens for r in requests])
        if graphs:
            assert engine.executor.stats.replayed_steps == 3
            assert engine.executor.stats.eager_steps == 1
            assert {step.attention for step in engine.trace.steps()[1:]} == {("paged_decode",)}
    assert texts[0] == texts[1]


KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": {"architecture": "MixtralForCausalLM", "num_local_experts": 4, "num_experts_per_tok": 2},
    "window": {"architecture": "MistralForCausalLM", "sliding_window": 6},
    "8-bit cache": {"kv_dtype": "fp8"},
    "4-bit cache": {"kv_dtype": "int4"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_inert_in_the_kernels_too(kind: str, random_model) -> None:
    """Three rows in a graph of four; what nobody owns is not a number. And the tape sees that nothing waits."""
    changes = dict(KINDS[kind])
    options = {"kv_dtype": changes.pop("kv_dtype", "auto"), **QUIET}
    model = random_model("float32", device=DEVICE, kernels="triton", num_hidden_layers=1, **changes)
    engine = with_graphs(Engine(model, EngineConfig(attention="triton", **options)))
    requests, cache = decoding([8, 5, 2], 2, temperature=0.0), engine.kv_cache
    parts = [cache.data, cache.scale] if kind.endswith("bit cache") else [cache.data]
    for part in parts:  # blocks are their third dimension
        values = part.view(torch.uint8) if part.itemsize == 1 else part
        values.fill_(0x7F if part.itemsize == 1 else torch.nan)  # of e4m3, too, not a number
        values[:, :, sorted(block for r in requests.values() for block in r.block_table)] = 0.25
    before = [part.view(torch.uint8).clone() for part in parts]
    plan = StepPlan(1, tuple(Row(i, r.num_tokens - 1, 1, True) for i, r in requests.items()))
    tokens = engine.executor.collect(engine.executor.submit(Planner(4).step(plan, requests))).tokens
    assert engine.executor.stats.replayed_steps == 1
    changed = (cache.data.view(torch.uint8) != before[0]).any(0).any(0).flatten(2).any(-1)
    slots = {(r.block_table[(r.num_tokens - 1) // 4], (r.num_tokens - 1) % 4) for r in requests.values()}
    assert {tuple(slot) for slot in changed.nonzero().tolist()} == slots
    engine.executor.graphs = None
    for part, bits in zip(parts, before, strict=True):
        part.view(torch.uint8).copy_(bits)
    assert engine.executor.collect(engine.executor.submit(Planner(4).step(plan, requests))).tokens == tokens


@pytest.mark.gpu
def test_by_itself_the_engine_replays_and_overlaps_on_a_gpu(random_model) -> None:
    texts = []
    for config in (EngineConfig(graphs="off", overlap="off"), EngineConfig()):
        engine = Engine(random_model("float32", device="cuda"), config)
        if config.graphs == "auto":
            engine.capture_graphs()
            assert engine.executor.stats.graphs_captured == len(engine.executor.graphs.keys())
        requests = [engine.add([i + 1] * (3 + i), SamplingParams(max_tokens=20, seed=i), f"r{i}") for i in range(9)]
        while engine.has_work():
            engine.step()
        texts.append([r.output_tokens for r in requests])
    assert engine.executor.stats.replayed_steps >= 19
    assert texts[0] == texts[1]


# ---- keys


@given(rows=st.integers(1, 600), max_rows=st.integers(1, 600), longest=st.integers(1, 9000))
def test_buckets_hold_what_they_are_for(rows: int, max_rows: int, longest: int) -> None:
    rows, max_len = min(rows, max_rows), 8192
    assert rows <= rows_bucket(rows, max_rows) <= min(max_rows, max(2 * rows, 8), rows + 31)
    longest = min(longest, max_len)
    assert longest <= longest_bucket(longest, max_len) <= max(512, 2 * longest)
    assert longest_bucket(longest, 700) <= 700


def test_the_buckets_of_rows() -> None:
    sizes = sorted({rows_bucket(n, 300) for n in range(1, 301)})
    assert sizes == [1, 2, 4, 8, *range(16, 65, 8), *range(80, 257, 16), 288, 300]


def graphs_of(max_rows: int, max_len: int, **options: Any) -> Graphs:
    def compute(host: Any, tensors: Any, samples: bool) -> torch.Tensor:
        return tensors["slots"] * 2 if samples else tensors["slots"][:, None] * torch.ones(1, 3, device=DEVICE)

    device = torch.device(DEVICE)
    return Graphs(compute, lambda: ("it",), max_rows, max_rows, max_len, device, recorder(), **options)


def test_all_keys_are_those_that_steps_can_have() -> None:
    graphs = graphs_of(20, 3000)
    met = {
        GraphKey(rows_bucket(r, 20), longest_bucket(n, 3000), True) for r in range(1, 21) for n in range(1, 3001)
    }  # fmt: skip
    assert set(graphs.keys()) == met
    assert len(graphs.keys()) == len(met)


def test_capturing_ahead_leaves_nothing_for_later_and_writes_nothing(random_model) -> None:
    bench = Bench(dense_model(random_model("float64", device=DEVICE)))
    before = bench.graphed.kv_cache.data.clone()
    bench.graphed.capture_graphs()
    stats = bench.graphed.executor.stats
    assert stats.graphs_captured == len(bench.graphed.executor.graphs.keys()) == 4
    assert torch.equal(bench.graphed.kv_cache.data, before)
    for contexts in ([20], [3, 9], [1, 2, 3, 4], [5] * 6):
        bench.step(contexts, 3)
    assert stats.graphs_captured == 4
    assert stats.replayed_steps == 4


def test_graphs_keep_nothing_alive_that_nobody_uses(random_model) -> None:
    """Else the weights and the cache of an engine of before would fill the GPU until Python's collector runs."""
    engine = with_graphs(dense_engine(dense_model(random_model("float64", device=DEVICE)), **QUIET))
    assert engine.capture_graphs() == len(engine.executor.graphs.keys()) > 0
    assert engine.capture_graphs() == 0
    gone = weakref.ref(engine.kv_cache)
    gc.collect()
    gc.disable()
    try:
        del engine
        assert gone() is None
    finally:
        gc.enable()


def test_a_closed_engine_has_no_graphs_and_one_without_captures_none(random_model) -> None:
    engine = with_graphs(dense_engine(dense_model(random_model("float64", device=DEVICE)), **QUIET))
    engine.capture_graphs()
    recording = weakref.ref(next(iter(engine.executor.graphs._graphs.values())))
    engine.close()
    assert engine.executor.graphs is None
    gc.collect()
    assert recording() is None
    assert engine.capture_graphs() == 0


def test_there_is_room_for_every_graph_that_steps_can_have() -> None:
    many = graphs_of(2048, 1 << 17)
    assert many.limit == len(many.keys()) > graphs_module.LIMIT == graphs_of(8, 600).limit


def test_only_so_many_graphs_are_kept_and_the_unused_one_goes() -> None:
    graphs = graphs_of(8, 600, limit=2)
    keys = [GraphKey(rows, 600, True) for rows in (1, 2, 4)]
    for key in (keys[0], keys[1], keys[0], keys[2]):
        graphs.run(key, graphs_module.inert(key, graphs.padding))
    assert [key in graphs for key in keys] == [True, False, True]


def test_what_suits_so_many_rows_is_measured_once(random_model) -> None:
    seen: list[int] = []
    model, tape = dense_model(random_model("float64", device=DEVICE)), Tape()
    engine = dense_engine(model, **QUIET)
    engine.executor.use_graphs(tape, 4, engine.max_model_len)
    model.tune = seen.append
    for i in range(3):
        engine.add([i + 1] * 3, SamplingParams(max_tokens=4, temperature=0), f"r{i}")
    while engine.has_work():
        engine.step()
    assert seen == [4]


def test_an_error_while_capturing_says_which_graph_it_was() -> None:
    graphs = graphs_of(8, 600)
    key = GraphKey(4, 600, True)

    def fails(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs.compute = fails
    with pytest.raises(RuntimeError, match="not permitted") as caught:
        graphs.run(key, graphs_module.inert(key, graphs.padding))
    assert "GraphKey(rows=4, longest=600, samples=True, tokens_per_row=1, trees=False)" in caught.value.__notes__[0]
    assert "graphs='off'" in caught.value.__notes__[0]
    assert key not in graphs


def test_graphs_that_cannot_be_are_refused(random_model) -> None:
    model = random_model("float32", device=DEVICE, kernels="torch")
    with pytest.raises(ValueError, match="graphs='on' cannot be: .*(only a GPU|fused kernel)"):
        Engine(model, EngineConfig(graphs="on", attention="torch"))
    assert Engine(model, EngineConfig(attention="torch")).executor.graphs is None


@pytest.mark.skipif(DEVICE == "cuda", reason="unmarked: the tape is for the CPU")
def test_the_tape_repeats_what_was_recorded_and_nothing_else() -> None:
    """The double itself: a number of the host is frozen, a tensor is not; what is in between is gone."""
    state, x = {"factor": 2.0, "between": torch.empty(0)}, torch.arange(3.0)

    def compute() -> torch.Tensor:
        state["between"] = x * state["factor"]
        return state["between"] + 1

    tape = Tape()
    out, replay = tape.record(compute)
    between = state["between"]
    assert out.isnan().all()
    x.add_(10)
    state["factor"] = 100.0
    replay()
    assert out.tolist() == [21, 23, 25]
    assert between.isnan().all()


def test_a_server_captures_all_graphs_before_it_is_ready(monkeypatch, caplog) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Engine, "capture_graphs", lambda engine, *given: asked.append((engine, *given)) or 7)
    with caplog.at_level("INFO", "inferlab.serving"):
        llm = load(course_model("draft"), kv_cache_bytes=16 << 20)
    assert asked == [(llm.engine,)]
    assert "7 CUDA graphs captured in " in caplog.text
