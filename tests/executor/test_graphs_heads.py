"""Draft models and heads beside steps that are replayed: a replay hands the target's hidden states out, and drafting
passes are replayed, too; drafts and texts are those behind eager steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from reference_impl.assembly import worker_half
from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.features.graphs import graphs as graphs_module
from reference_impl.features.speculative import draft_part, head_source
from reference_impl.features.speculative.draft_graphs import PassGraphs
from reference_impl.features.speculative.draft_model import DraftModel
from reference_impl.features.speculative.feature_head import FeatureDraft
from reference_impl.features.speculative.medusa import MedusaDraft
from reference_impl.features.speculative.tree import Tree
from reference_impl.interfaces import SamplingParams
from tests.engine.conftest import some
from tests.engine.test_feature_head import random_head
from tests.engine.test_medusa import random_heads
from tests.executor.dense import DEVICE, DenseAttention, TwinSampler, dense_engine, dense_model
from tests.executor.tape import Tape, recorder
from tests.executor.test_graphs import GENERATE, asked, serve
from tests.no_sync import no_sync


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short buckets; attention that waits for nothing, also the head's; nothing reads lengths, nothing waits."""

    def read(*_: Any) -> None:
        raise AssertionError("the host waited for the lengths of the step before")

    monkeypatch.setattr(graphs_module, "SHORTEST", 8)
    monkeypatch.setattr(worker_half, "make_attention", lambda model, _: DenseAttention(model.config.attention_scale))
    monkeypatch.setattr(draft_part, "starts_of", read)


@pytest.fixture(scope="module")
def model(random_model) -> Any:
    return dense_model(random_model("float64", device=DEVICE, max_position_embeddings=128))


@pytest.fixture(scope="module")
def layer(random_model) -> Any:
    return dense_model(random_model("float64", device=DEVICE, max_position_embeddings=128, num_hidden_layers=1))


def drafting(model: Any, layer: Any, kind: str, k: int, graphs: bool, overlap: str, **options: Any) -> Engine:
    drafts = {
        "head": lambda: {"draft_model": random_head(layer)},
        "medusa": lambda: {"draft_model": random_heads(device=DEVICE)},
        "model": lambda: {"draft_model": layer},
    }
    config = EngineConfig(
        graphs="off", overlap=overlap, num_drafts=k, speculative="early-exit" if kind == "early exit" else "off",
        adaptive_drafts="off", **options,
    )  # fmt: skip
    engine = Engine(model, config, Parts(sampler=TwinSampler(), **drafts.get(kind, dict)()))
    if graphs:
        engine.executor.use_graphs(recorder(), config.max_num_seqs, engine.max_model_len, k)
    return engine


TREES: dict[str, dict[str, Any]] = {
    "tree": {"speculative": "eagle", "draft_tree": (4, 2, 2)}, "small": {"speculative": "eagle", "draft_tree": (2, 2)},
    "grown": {"speculative": "eagle", "draft_tree": "dynamic,2,3"},
    "lookahead": {"speculative": "lookahead", "lookahead": (2, 3, 2)},
}  # fmt: skip


def with_tree(model: Any, layer: Any, kind: str, graphs: bool, **options: Any) -> Engine:
    head = None if kind == "lookahead" else random_head(layer)
    engine = Engine(
        model, EngineConfig(graphs="off", **TREES[kind], **options), Parts(sampler=TwinSampler(), draft_model=head)
    )
    if graphs:
        rows, most = engine.config.max_num_seqs, engine.config.num_drafts
        engine.executor.use_graphs(recorder(), rows, engine.max_model_len, most)
    return engine


def replayed_passes(engine: Engine) -> int:
    passes = engine.executor.pass_graphs
    return 0 if passes is None else passes.replayed_passes


def drafts_kept(engine: Engine) -> list[tuple[int, int]]:
    """(drafts, of them kept) of each row of each step."""
    return [
        (row.num_drafts, new - 1)
        for step in engine.trace.steps()
        for row, new in zip(step.rows, step.num_new_tokens, strict=True)
        if row.num_drafts and new
    ]


# What replays of heads and of a draft model wait for is seen below and in test_graphs_drafts.py.
@pytest.mark.parametrize("kind", some(["head", "early exit"], ["head", "medusa", "early exit", "model"]))
def test_texts_and_drafts_are_those_of_eager_steps_whatever_the_schedule(kind: str, model, layer) -> None:
    """Requests are aborted, near their end with fewer drafts than others, or beside prompts with none."""
    replayed, kept, passes = set(), set(), []

    @settings(max_examples=4, derandomize=True, database=None, phases=GENERATE)
    @given(
        work=st.lists(asked(), min_size=4, max_size=6), blocks=st.integers(9, 20), seats=st.sampled_from([3, 6]),
        budget=st.sampled_from([9, 40]), k=st.integers(1, 4), overlap=st.sampled_from(["on", "off"]),
    )  # fmt: skip
    def same(work: list[dict[str, Any]], blocks: int, seats: int, budget: int, k: int, overlap: str) -> None:
        options = {"block_size": 4, "num_blocks": blocks, "max_num_seqs": seats, "max_num_batched_tokens": budget}
        eager, graphed = (drafting(model, layer, kind, k, graphs, overlap, **options) for graphs in (False, True))
        assert serve(graphed, work) == serve(eager, work)
        assert drafts_kept(graphed) == drafts_kept(eager), "also the wrong drafts are the same"
        assert graphed.kv.num_available == graphed.num_blocks
        replayed.update(graphed.executor.graphs._graphs)
        passes.append(replayed_passes(graphed))
        kept.update(drafts_kept(graphed))

    same()
    assert {key.tokens_per_row for key in replayed} >= {1, 2, 3}
    assert {key.samples for key in replayed} == {True, False}
    assert any(num < drafts for drafts, num in kept)
    assert any(num for _, num in kept)
    assert any(passes) == (kind != "medusa")


@pytest.mark.parametrize("kind", some(["grown", "lookahead"], ["tree", "small", "grown", "lookahead"]))
def test_steps_with_trees_are_replayed_whatever_the_schedule(kind: str, model, layer, monkeypatch) -> None:
    """What a node sees, and where it lies, are inputs: a tree that is grown in each step has the graphs of its size."""
    replayed, nums, drafts, passes = set(), set(), list[list[int]](), list[int]()
    put = draft_part.put_drafts
    monkeypatch.setattr(
        draft_part, "put_drafts", lambda slots, t: (drafts.append(t["draft.tokens"].tolist()), put(slots, t))
    )

    @settings(max_examples=2, derandomize=True, database=None, phases=GENERATE)
    @given(
        work=st.lists(asked(), min_size=4, max_size=5), seats=st.sampled_from([3, 5]),
        budget=st.sampled_from([40, 90]), overlap=st.sampled_from(["on", "off"]),
    )  # fmt: skip
    def same(work: list[dict[str, Any]], seats: int, budget: int, overlap: str) -> None:
        options = {"block_size": 4, "num_blocks": 40, "max_num_seqs": seats, "max_num_batched_tokens": budget}
        eager, graphed = (with_tree(model, layer, kind, graphs, overlap=overlap, **options) for graphs in (False, True))
        assert serve(graphed, work) == serve(eager, work)
        assert drafts_kept(graphed) == drafts_kept(eager)
        half = len(drafts) // 2
        assert drafts[:half] == drafts[half:], "also the wrong drafts are the same"
        drafts.clear()
        replayed.update(graphed.executor.graphs._graphs)
        nums.add(graphed.config.num_drafts)
        passes.append(replayed_passes(graphed))

    same()
    with_trees = {key for key in replayed if key.trees}
    assert {key.samples for key in with_trees} == {False}
    assert any(passes) == (kind != "lookahead")
    (most,) = nums
    assert {key.tokens_per_row for key in with_trees} <= {2, 4, 8, 16, 1 + most}
    assert {key.tokens_per_row for key in replayed - with_trees} == {1}


@pytest.mark.parametrize("asked", [{"temperature": 0.0}, {"seed": 3, "frequency_penalty": 0.5}], ids=str)
def test_a_kept_path_of_a_tree_is_moved_behind_a_replay(asked: dict[str, Any], model, layer, monkeypatch) -> None:
    """Of each two siblings the second is right."""
    few = {"block_size": 4, "num_blocks": 90, "max_num_seqs": 4}
    prompts = [[7, 8, 9], [5, 6]]
    work = [
        {"prompt": p, "sampling": SamplingParams(max_tokens=25, **asked), "arrival": 0, "abort": None} for p in prompts
    ]
    plain = serve(dense_engine(model, **few), work)
    texts = [torch.tensor([*p, *text, *[0] * 9], device=DEVICE) for p, text in zip(prompts, plain, strict=True)]
    depths = torch.tensor(Tree.of((4, 2, 2)).levels, device=DEVICE)

    def drafts(_: Any, levels: Any, t: Any, slots: Any, *others: Any) -> tuple[torch.Tensor, None]:
        row, nth = t["draft.row"], t["draft.nth"]
        lengths = (slots.computed[t["draft.slots"]] + t["draft.known"])[row]
        found = []
        for at, (slot, number) in enumerate(zip(t["draft.slots"][row].tolist(), nth.tolist(), strict=True)):
            text = texts[0] if slots.tokens[slot, 0] == prompts[0][0] else texts[1]
            found.append((int(text[lengths[at] + depths[number]]) + 1 - number % 2) % model.config.vocab_size)
        return torch.tensor(found, device=DEVICE), None

    monkeypatch.setattr(head_source, "propose_tree", drafts)
    engine = with_tree(model, layer, "tree", True, overlap="on", **few)
    assert serve(engine, work) == plain
    assert {num for drafts, num in drafts_kept(engine) if drafts == 28} == {3}
    assert engine.executor.stats.eager_steps == 1, "that of the prompts"


def test_wide_steps_with_trees_are_launched(model, layer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_module, "WIDEST_TREES", 20)
    engine = with_tree(model, layer, "small", True, block_size=4, num_blocks=90, max_num_seqs=4)
    graphs = engine.executor.graphs
    keys = graphs.keys()
    assert {key.rows for key in keys if key.trees} == {1, 2}, "of 7 tokens"
    assert engine.capture_graphs() == len(keys) + len(
        [key for key in engine.executor.pass_graphs.graphs.keys() if key.trees]  # noqa: SIM118, no dictionary
    )
    work = [
        {"prompt": [7 + i] * 4, "sampling": SamplingParams(max_tokens=9, temperature=0), "arrival": 0, "abort": None}
        for i in range(4)
    ]
    eager = serve(with_tree(model, layer, "small", False, block_size=4, num_blocks=90, max_num_seqs=4), work)
    assert serve(engine, work) == eager
    assert max(key.num_tokens for key in graphs._graphs if key.trees) <= 20
    assert engine.executor.stats.eager_steps > 1


@pytest.mark.parametrize("kind", some(["head"], ["head", "medusa"]))
def test_nothing_waits_for_the_device_and_all_steps_but_those_of_prompts_are_replayed(
    kind: str, model, layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PassGraphs, "replay_of_passes", lambda _: None)  # which packs arrays on the host
    for draft in (FeatureDraft, MedusaDraft):
        for name in ("propose", "keep_up"):
            inner = getattr(draft, name)

            def watched(self: Any, *given: Any, inner: Any = inner) -> Any:
                with no_sync():
                    return inner(self, *given)

            monkeypatch.setattr(draft, name, watched)
    work = [
        {"prompt": [7 + i] * (2 + i), "sampling": SamplingParams(max_tokens=(5, 17, 20)[i], seed=i, **p), "arrival": 0,
         "abort": None}
        for i, p in enumerate([{"temperature": 0.0}, {"temperature": 0.9, "top_k": 20}, {"logprobs": 1}])
    ]  # fmt: skip
    few = {"block_size": 4, "num_blocks": 90, "max_num_seqs": 4}
    plain = serve(dense_engine(model, **few), work)
    for num_blocks in (90, 9):
        engine = drafting(model, layer, kind, 3, True, "on", **few | {"num_blocks": num_blocks})
        assert serve(engine, work) == plain
        steps = engine.trace.steps()
        assert any(step.preempted for step in steps) == (num_blocks == 9)
        prompts = [step for step in steps if any(row.num_tokens > 1 for row in step.rows)]
        assert engine.executor.stats.eager_steps == len(prompts)
        assert engine.executor.stats.replayed_steps > 10


def test_texts_of_requests_without_a_seed_are_those_of_eager_steps(model, layer) -> None:
    """By rejection, behind logits that a replay gives; the numbers are the same."""
    work = [
        {"prompt": [5 + i] * (1 + 4 * i), "sampling": SamplingParams(max_tokens=14, **p), "arrival": i, "abort": None}
        for i, p in enumerate([{"top_p": 0.9}, {"temperature": 0.5}, {"presence_penalty": 0.5}])
    ]
    few = {"block_size": 4, "num_blocks": 90, "max_num_seqs": 4, "seed": 4}
    for kind in ("head", "medusa"):
        eager, graphed = (drafting(model, layer, kind, 3, graphs, "on", **few) for graphs in (False, True))
        assert serve(graphed, work) == serve(eager, work)
        assert any(key.tokens_per_row > 1 and not key.samples for key in graphed.executor.graphs._graphs)


def test_the_keys_are_captured_ahead_and_change_no_slot(model, layer) -> None:
    engine = drafting(model, layer, "head", 2, True, "off", block_size=4, num_blocks=90, max_num_seqs=2)
    ahead = engine.executor.draft.ahead.clone()
    graphs, passes = engine.executor.graphs, engine.executor.pass_graphs.graphs
    assert engine.capture_graphs() == len(graphs.keys()) + len(passes.keys())
    assert engine.capture_graphs() == 0
    assert (engine.executor.draft.ahead == ahead).all()
    for key in graphs._graphs:
        assert graphs.hidden_of(key).shape == (key.num_tokens, model.config.hidden_size)


class Launches(TorchDispatchMode):
    """Counts operators, but for those of a replay, which is one launch."""

    num = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return operator(*args, **kwargs or {})


class Counted(Tape):
    def record(self, compute: Any) -> Any:
        out, replay = super().record(compute)

        def one_launch() -> None:
            with _disable_current_modes():
                replay()

        return out, one_launch


@pytest.mark.skipif(DEVICE != "cpu", reason="counts what the stand-in for a GPU's graphs launches")
@pytest.mark.parametrize("kind", some(["head"], ["head", "early exit", "model"]))
def test_a_drafting_pass_that_is_replayed_is_launched_at_once(
    kind: str, model, layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of it draws and writes the drafts. The sampler counts as the one launch that it is on a GPU."""
    counted: dict[bool, list[int]] = {}
    choose, drafting_now = TwinSampler.choose, list[Launches]()

    def chosen(self: Any, *given: Any) -> Any:
        before = [launches.num for launches in drafting_now]
        found = choose(self, *given)
        for launches, num in zip(drafting_now, before, strict=True):
            launches.num = num + 1
        return found

    monkeypatch.setattr(TwinSampler, "choose", chosen)
    for draft in (FeatureDraft, DraftModel):
        inner = draft.propose

        def propose(self: Any, passes: Any, *given: Any, inner: Any = inner) -> Any:
            with Launches() as launches:
                drafting_now.append(launches)
                found = inner(self, passes, *given)
            drafting_now.clear()
            counted[given[-1] is not None].append(launches.num)
            return found

        monkeypatch.setattr(draft, "propose", propose)
    work = [{"prompt": [7] * 3, "sampling": SamplingParams(max_tokens=12, temperature=0), "arrival": 0, "abort": None}]
    texts = []
    for graphs in (False, True):
        counted[graphs] = []
        few = {"block_size": 4, "num_blocks": 90, "max_num_seqs": 1}
        engine = drafting(model, layer, kind, 4, False, "on", **few)
        if graphs:
            engine.executor.use_graphs(Counted(), 1, engine.max_model_len, 4)
            engine.capture_graphs()
        texts.append(serve(engine, work))
    assert texts[0] == texts[1]
    assert max(counted[True]) < 0.5 * max(counted[False])
