"""Steps that verify drafts, replayed: texts are those of plain decoding, and the host reads no length of the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_impl.assembly import worker_half
from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.sampler import sample
from reference_impl.features.graphs import graphs as graphs_module
from reference_impl.features.graphs.graphs import Graphs
from reference_impl.features.speculative import chain, draft_part
from reference_impl.features.speculative.draft_graphs import PassGraphs
from reference_impl.features.speculative.draft_model import DraftModel
from reference_impl.interfaces import Opened, SamplingParams
from tests.engine.conftest import some
from tests.executor.dense import DEVICE, DenseAttention, TwinSampler, dense_engine, dense_model
from tests.executor.tape import recorder
from tests.executor.test_graphs import GENERATE, KINDS, VOCAB, asked, serve
from tests.no_sync import no_sync

FEW = {"block_size": 4, "num_blocks": 90, "max_num_seqs": 4}


class Recalls:
    """Drafts the recorded text, on the device alone; every third position, as the seed has it, is drafted wrong."""

    def __init__(self, texts: Mapping[str, list[int]], seed: int):
        self.texts, self.seed, self.num_asked = texts, seed, 0
        self.recorded = torch.zeros(16, 200, dtype=torch.int64, device=DEVICE)

    def opened(self, slot: Opened) -> None:
        text = torch.tensor([*slot.tokens[: slot.num_prompt_tokens], *self.texts[slot.request_id]])
        self.recorded[slot.slot, : len(text)] = text.to(DEVICE)

    def closed(self, slot: int) -> None:
        self.recorded[slot] = 0

    def propose(self, slots: torch.Tensor, lengths: torch.Tensor, tokens: torch.Tensor, k: int) -> torch.Tensor:
        self.num_asked += 1
        at = lengths[:, None] + torch.arange(k, device=lengths.device)
        right = (at * 7 + slots[:, None] + self.seed) % 3 > 0
        recorded = self.recorded[slots[:, None], at]
        return torch.where(right, recorded, (recorded + 1) % VOCAB)


@pytest.fixture
def short_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_module, "SHORTEST", 8)


@pytest.fixture
def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any) -> None:
        raise AssertionError("the host waited for the lengths of the step before")

    monkeypatch.setattr(draft_part, "starts_of", read)


def drafting_engine(
    model: Any, proposer: Recalls, num_drafts: int, overlap: str, graphs: bool = True, **options: Any
) -> Engine:
    attention = DenseAttention(model.config.attention_scale)
    config = EngineConfig(graphs="off", overlap=overlap, num_drafts=num_drafts, **options)
    engine = Engine(model, config, Parts(attention=attention, sampler=TwinSampler(), proposer=proposer))
    if graphs:
        engine.executor.use_graphs(recorder(), config.max_num_seqs, engine.max_model_len, num_drafts)
    return engine


@pytest.mark.usefixtures("short_buckets", "no_reading")
@pytest.mark.parametrize("kind", ["full", "window"])
def test_texts_are_those_of_plain_decoding_whatever_the_schedule(kind: str, random_model) -> None:
    changes: dict[str, Any] = {"architecture": "MistralForCausalLM", "sliding_window": 6} if kind == "window" else {}
    model = dense_model(random_model("float64", device=DEVICE, max_position_embeddings=128, **changes))
    replayed, num_kept = set(), []

    @settings(max_examples=5 if kind == "full" else 4, derandomize=True, database=None, phases=GENERATE)
    @given(
        work=st.lists(asked(), min_size=2, max_size=6), blocks=st.integers(24, 60), seats=st.sampled_from([3, 6]),
        budget=st.sampled_from([9, 40]), k=st.integers(1, 4), overlap=st.sampled_from(["on", "off"]),
    )  # fmt: skip
    def same(work: list[dict[str, Any]], blocks: int, seats: int, budget: int, k: int, overlap: str) -> None:
        options = {"block_size": 4, "num_blocks": blocks, "max_num_seqs": seats, "max_num_batched_tokens": budget}
        unhurried = [{**w, "arrival": 0, "abort": None} for w in work]
        texts = serve(dense_engine(model, **{**options, "num_blocks": 200}), unhurried)
        proposer = Recalls({f"r{i}": text for i, text in enumerate(texts)}, k)
        engine = drafting_engine(model, proposer, k, overlap, **options)
        found = serve(engine, work)
        for mine, text, w in zip(found, texts, work, strict=True):
            assert mine == text or (w["abort"] is not None and mine == text[: len(mine)])
        assert engine.kv.num_available == engine.num_blocks
        replayed.update(engine.executor.graphs._graphs)
        num_kept.extend(n - 1 for step in engine.trace.steps() for n in step.num_new_tokens if n)

    same()
    assert {key.tokens_per_row for key in replayed} >= {1, 2, 3}
    assert {key.samples for key in replayed} == {True, False}
    assert 0 in num_kept
    assert max(num_kept) >= 2


@pytest.mark.usefixtures("no_reading")
def test_rows_may_have_different_numbers_of_drafts(random_model) -> None:
    """Near its last token a request has fewer: the others' are replayed beside it."""
    model = dense_model(random_model("float64", device=DEVICE))
    lengths = [(3 + i, SamplingParams(max_tokens=3 + 5 * i, seed=i)) for i in range(4)]
    work = [{"prompt": [n] * n, "sampling": sampling, "arrival": 0, "abort": None} for n, sampling in lengths]
    texts = serve(dense_engine(model, **FEW), work)
    engine = drafting_engine(model, Recalls({f"r{i}": t for i, t in enumerate(texts)}, 0), 5, "off", **FEW)
    assert serve(engine, work) == texts
    uneven = [step for step in engine.trace.steps()[1:] if len({row.num_drafts for row in step.rows}) > 1]
    assert uneven
    assert engine.executor.stats.eager_steps == 1, "the prompts'"


@pytest.mark.parametrize("sampler", ["asked", "launched", "captures"])
def test_what_reads_lengths_on_the_host_still_gets_them(sampler: str, random_model) -> None:
    model = dense_model(random_model("float64", device=DEVICE))
    samplers: dict[str, Any] = {
        "launched": sample, "captures": TwinSampler(),
        "asked": lambda logits, requests: sample(logits, requests),
    }  # fmt: skip
    work = [
        {"prompt": [2 + i] * 5, "sampling": SamplingParams(max_tokens=15, seed=i), "arrival": 0, "abort": None}
        for i in range(3)
    ]
    texts = serve(dense_engine(model, samplers[sampler], **FEW), work)
    config = EngineConfig(graphs="off", overlap="off" if sampler == "asked" else "on", num_drafts=3, **FEW)
    proposer = Recalls({f"r{i}": text for i, text in enumerate(texts)}, 1)
    attention = DenseAttention(model.config.attention_scale)
    engine = Engine(model, config, Parts(attention=attention, sampler=samplers[sampler], proposer=proposer))
    assert serve(engine, work) == texts
    assert proposer.num_asked > 3


@pytest.mark.usefixtures("no_reading")
def test_the_kernels_of_a_gpu_verify_drafts_in_a_replay(random_model) -> None:
    """Ours, in the interpreter or on a GPU: attention of several queries per row, cache write, sampling."""
    model = random_model("float32", device=DEVICE, kernels="triton", num_hidden_layers=1)
    work = [
        {"prompt": [1 + i] * (2 + i), "sampling": SamplingParams(max_tokens=3, seed=i, **params), "arrival": 0,
         "abort": None}
        for i, params in enumerate([{"temperature": 0.0}, {"temperature": 0.9, "top_k": 20}, {"top_p": 0.9}])
    ]  # fmt: skip
    options: dict[str, Any] = {"attention": "triton", "graphs": "off", **FEW}
    texts = serve(Engine(model, EngineConfig(overlap="off", **options)), work)
    proposer = Recalls({f"r{i}": text for i, text in enumerate(texts)}, 2)
    engine = Engine(model, EngineConfig(overlap="on", num_drafts=2, **options), Parts(proposer=proposer))
    engine.executor.use_graphs(recorder(), 4, engine.max_model_len, 2)
    assert serve(engine, work) == texts
    assert engine.executor.stats.eager_steps == 1
    assert ("flash_attention",) in {step.attention for step in engine.trace.steps()[1:]}


@pytest.mark.usefixtures("no_reading", "short_buckets")
@pytest.mark.parametrize("overlap", some(["on"], ["on", "off"]))
def test_a_draft_model_waits_for_nothing_beside_steps_that_are_replayed(
    overlap: str, random_model, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = dense_model(random_model("float64", device=DEVICE, max_position_embeddings=128))
    propose, passes = DraftModel.propose, []

    def watched(self: DraftModel, *given: Any) -> Any:
        passes.append(len(given[0]))
        with no_sync():
            return propose(self, *given)

    monkeypatch.setattr(DraftModel, "propose", watched)
    monkeypatch.setattr(PassGraphs, "replay_of_passes", lambda _: None)  # which packs arrays on the host
    monkeypatch.setattr(worker_half, "make_attention", lambda model, _: DenseAttention(model.config.attention_scale))
    params: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.9, "top_k": 20}, {"top_p": 0.9, "n": 2}]
    work = [
        {"prompt": [5 + i] * (1 + 4 * i), "sampling": SamplingParams(max_tokens=20 + i, seed=i, **p), "arrival": 2 * i,
         "abort": None}
        for i, p in enumerate(params)
    ]  # fmt: skip
    texts = serve(dense_engine(model, **FEW), work)
    config = EngineConfig(graphs="off", overlap=overlap, num_drafts=3, **FEW)
    engine = Engine(model, config, Parts(sampler=TwinSampler(), draft_model=model))
    engine.executor.use_graphs(recorder(), 4, engine.max_model_len, 3)
    assert serve(engine, work) == texts
    assert set(passes) >= {1, 3}
    assert {key.tokens_per_row for key in engine.executor.graphs._graphs} >= {1, 4}
    steps = [zip(step.rows, step.num_new_tokens, strict=True) for step in engine.trace.steps()]
    kept = [(new - 1, row.num_drafts) for rows in steps for row, new in rows if row.num_drafts and new]
    assert all(num == drafts for num, drafts in kept), "the target as its own draft is always right"


@pytest.mark.usefixtures("no_reading", "short_buckets")
@pytest.mark.parametrize(("drafted", "overlap"), [("model", "on"), ("worker", "off")])
def test_drafts_of_requests_without_a_seed_are_verified_behind_a_graph_and_nothing_waits(
    overlap: str, drafted: str, random_model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same numbers make the same texts, replayed or not; plain decoding with these numbers writes others."""

    def watched(function: Any) -> Any:
        def call(*given: Any) -> Any:
            with no_sync():
                return function(*given)

        return call

    model = dense_model(random_model("float64", device=DEVICE, max_position_embeddings=128))
    draft = dense_model(random_model("float64", device=DEVICE, max_position_embeddings=128, num_hidden_layers=1))
    monkeypatch.setattr(DraftModel, "propose", watched(DraftModel.propose))
    monkeypatch.setattr(PassGraphs, "replay_of_passes", lambda _: None)
    monkeypatch.setattr(chain, "verified", watched(chain.verified))
    monkeypatch.setattr(chain, "filtered", watched(chain.filtered))
    monkeypatch.setattr(worker_half, "make_attention", lambda model, _: DenseAttention(model.config.attention_scale))
    params: list[dict[str, Any]] = [{"top_p": 0.9}, {"temperature": 0.5}, {"temperature": 0.5, "seed": 3}]
    work = [
        {"prompt": [5 + i] * (1 + 4 * i), "sampling": SamplingParams(max_tokens=14, **p), "arrival": 0, "abort": None}
        for i, p in enumerate(params)
    ]
    plain, found = serve(dense_engine(model, seed=4, **FEW), work), []
    for graphs in (True, False):
        recalls = Recalls({f"r{i}": text for i, text in enumerate(plain)}, 1)
        given = {"draft_model": draft} if drafted == "model" else {"proposer": recalls}
        attention = None if drafted == "model" else DenseAttention(model.config.attention_scale)
        config = EngineConfig(graphs="off", overlap=overlap, num_drafts=3, seed=4, **FEW)
        engine = Engine(model, config, Parts(sampler=TwinSampler(), attention=attention, **given))
        if graphs:
            engine.executor.use_graphs(recorder(), 4, engine.max_model_len, 3)
        found.append(serve(engine, work))
        if graphs:
            assert any(key.tokens_per_row > 1 and not key.samples for key in engine.executor.graphs._graphs)
    assert found[0] == found[1]
    assert found[0][2] == plain[2]
    assert all(mine != other for mine, other in zip(found[0][:2], plain[:2], strict=True))


@pytest.mark.usefixtures("no_reading")
def test_the_kernels_of_a_gpu_compute_a_draft_model(random_model) -> None:
    """Ours, in the interpreter or on a GPU: rows of two tokens and of one, drafts drawn by the sampling kernel."""
    model = random_model("float32", device=DEVICE, kernels="triton", num_hidden_layers=1)
    work = [
        {"prompt": [1 + i] * (2 + i), "sampling": SamplingParams(max_tokens=4, seed=i, **params), "arrival": 0,
         "abort": None}
        for i, params in enumerate([{"temperature": 0.0}, {"temperature": 0.9, "top_k": 20}])
    ]  # fmt: skip
    options: dict[str, Any] = {"attention": "triton", "graphs": "off", **FEW}
    texts = serve(Engine(model, EngineConfig(overlap="off", **options)), work)
    engine = Engine(model, EngineConfig(overlap="on", num_drafts=2, **options), Parts(draft_model=model))
    assert serve(engine, work) == texts
    assert max(max(step.num_new_tokens) for step in engine.trace.steps()) == 3


# Of one token per row, all kinds: test_graphs.py.
@pytest.mark.parametrize("kind", some(["4-bit cache"], list(KINDS)))
def test_padding_is_inert_in_the_kernels_too(kind: str, random_model) -> None:
    """Three rows of 1 to 3 tokens in a graph of four rows; blocks that no row has are not numbers."""
    changes = dict(KINDS[kind])
    options: dict[str, Any] = {"kv_dtype": changes.pop("kv_dtype", "auto"), "attention": "triton", **FEW}
    model = random_model("float32", device=DEVICE, kernels="triton", num_hidden_layers=1, **changes)
    work = [
        {"prompt": [3 + i] * 4, "sampling": SamplingParams(max_tokens=2 + i, temperature=0.0), "arrival": 0,
         "abort": None}
        for i in range(3)
    ]  # fmt: skip
    texts = serve(Engine(model, EngineConfig(graphs="off", overlap="off", **options)), work)
    proposer = Recalls({f"r{i}": text for i, text in enumerate(texts)}, 1)
    config = EngineConfig(graphs="off", overlap="off", num_drafts=2, **options)
    engine = Engine(model, config, Parts(proposer=proposer))
    engine.executor.use_graphs(recorder(), 4, engine.max_model_len, 2)
    data = engine.kv_cache.data
    values = data.view(torch.uint8) if data.itemsize == 1 else data
    values.fill_(0x7F if data.itemsize == 1 else torch.nan)
    assert serve(engine, work) == texts
    assert {key.tokens_per_row for key in engine.executor.graphs._graphs} >= {2}


def test_the_usual_keys_are_captured_ahead(random_model) -> None:
    model = dense_model(random_model("float64", device=DEVICE))
    engine = drafting_engine(model, Recalls({}, 0), 2, "off", **FEW)
    graphs: Graphs = engine.executor.graphs
    keys = graphs.keys()
    assert {key.tokens_per_row for key in keys} == {1, 3}
    assert engine.capture_graphs() == len(keys) == len(graphs._graphs)


@pytest.mark.usefixtures("no_reading")
@pytest.mark.parametrize(
    "asked_too",
    [
        {"logprobs": 0},
        {"presence_penalty": 0.4},
        {"repetition_penalty": 1.2},
        {"logit_bias": {9: 3.0}},
        {"min_tokens": 15, "stop_token_ids": tuple(range(0, 61, 3))},
    ],
    ids=str,
)
def test_a_replay_that_gives_logits_draws_by_the_positions_on_the_device(
    asked_too: dict[str, Any], random_model
) -> None:
    """Overlapped, the host has bounds of them only; and so for rows beside the one that needs the logits."""
    model = dense_model(random_model("float64", device=DEVICE))
    params = [SamplingParams(max_tokens=20, temperature=0.9, seed=i, **(asked_too if i else {})) for i in range(3)]
    work = [{"prompt": [6, 7, 8 + i], "sampling": p, "arrival": 0, "abort": None} for i, p in enumerate(params)]
    texts = serve(dense_engine(model, **FEW), work)
    for seed in range(3):
        proposer = Recalls({f"r{i}": text for i, text in enumerate(texts)}, seed)
        engine = drafting_engine(model, proposer, 3, "on", **FEW)
        assert serve(engine, work) == texts
        assert {key.samples for key in engine.executor.graphs._graphs if key.tokens_per_row > 1} == {False}


def test_a_draft_outside_the_vocabulary_is_named(random_model) -> None:
    model = dense_model(random_model("float64"))

    class Wild(Recalls):
        def propose(self, slots: torch.Tensor, lengths: torch.Tensor, tokens: torch.Tensor, k: int) -> torch.Tensor:
            return torch.full((len(slots), k), VOCAB)

    engine = drafting_engine(model, Wild({"r0": []}, 0), 2, "off", graphs=False, **FEW)
    engine.add([1, 2], SamplingParams(max_tokens=9, ignore_eos=True), "r0")
    engine.step()
    with pytest.raises(ValueError, match=rf"Wild.propose: expected tokens of the vocabulary .*, got {VOCAB}"):
        engine.step()
