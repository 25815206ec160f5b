"""Draft trees in an engine: the text is that of plain decoding, drafts are those of the definition, texts without
a seed are distributed as the target's, and the cache holds what plain decoding would have written."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is defined

from hypothesis import given, settings
from hypothesis import strategies as st

from reference_impl.assembly.config import ConfigError, EngineConfig, course_model
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.kv_cache import kv_cache, widths
from reference_impl.assembly.llm import LLM
from reference_impl.assembly.parts import Parts
from reference_impl.core.attention import TorchAttention
from reference_impl.core.sampler import draw
from reference_impl.features.fusion.attention import TritonAttention
from reference_impl.features.speculative import head_source, tree_growing, tree_head, verified_trees
from reference_impl.features.speculative.candidates import NONE
from reference_impl.features.speculative.feature_head import FeatureHead
from reference_impl.features.speculative.growth import Growth
from reference_impl.features.speculative.tree import Tree
from reference_impl.features.speculative.tree_cache import move_tokens
from reference_impl.interfaces import KVSpec, SamplingParams
from reference_impl.kernels import reference
from reference_impl.observe.trace import DraftUse
from tests.engine.conftest import some
from tests.engine.test_draft_model import PURE, alone, check_texts, check_texts_when_preempted, schedule, serve_at_times
from tests.engine.test_drafts import ASKED, kept_of, prompt, serve
from tests.engine.test_feature_head import dense, random_head
from tests.engine.test_rejection import ALPHA, LENGTH, PROMPT, VOCAB, by_definition, p_value, texts_of
from tests.examples import examples
from tests.executor.dense import TwinSampler

UNEVEN = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1))
TREES: dict[str, Any] = {"chain": (1, 1, 1), "uneven": UNEVEN, "even": (4, 2, 2), "flat": (5,), "grown": "dynamic,3,3"}


@pytest.fixture(scope="module")
def head(random_model: Callable) -> FeatureHead:
    return random_head(random_model("float64", max_position_embeddings=128, num_hidden_layers=1))


@pytest.fixture(scope="module")
def plain(target: Any) -> dict[str, list[int]]:
    return {
        name: serve(Engine(target, EngineConfig(num_blocks=32)), {name: sampling})[name].tokens
        for name, sampling in ASKED.items()
    }


def with_tree(tree: Any, **options: Any) -> dict[str, Any]:
    return {"speculative": "eagle", "draft_tree": tree, **options}


# --- the text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "late", "preemption", "prefix_cache"),
    some(
        [("uneven", None, "swap", "hash"), ("even", 1, "swap", "off"), ("flat", None, "recompute", "radix"),
         ("grown", 2, "recompute", "off")],
        [("chain", None, "recompute", "off"), ("uneven", None, "swap", "hash"), ("uneven", 2, "recompute", "hash"),
         ("even", 1, "swap", "off"), ("flat", None, "recompute", "radix"), ("grown", None, "swap", "hash"),
         ("grown", 2, "recompute", "off")],
    ),
)  # fmt: skip
def test_the_text_is_that_of_plain_decoding(
    target, head, plain, tapped_engine, name: str, late: int | None, preemption: str, prefix_cache: str
) -> None:
    engine, _ = tapped_engine(
        target, parts=Parts(draft_model=head), late=late, block_size=4, num_blocks=26, preemption=preemption,
        max_num_batched_tokens=40, prefix_cache=prefix_cache, **with_tree(TREES[name]),
    )  # fmt: skip
    check_texts_when_preempted(engine, plain)
    kept = [found for step in kept_of(engine) for found in step.items()]
    assert {request for request, _ in kept} >= {"penalised", "drawn, penalised"}
    shape = Growth.of(TREES[name]) if name == "grown" else Tree.of(TREES[name])
    levels, nodes = shape.num_levels, shape.num_nodes
    assert 0 < max(num for _, (num, _) in kept) <= levels
    assert max(drafts for _, (_, drafts) in kept) == nodes


def test_more_candidates_are_kept_more_often(target, head) -> None:
    steps = {}
    for tree in ((1, 1), (2, 2), (6, 4)):
        engine = Engine(target, EngineConfig(num_blocks=64, **with_tree(tree)), Parts(draft_model=head))
        serve(engine, PURE)
        steps[tree] = len(engine.trace.steps())
    assert steps[1, 1] > steps[2, 2] > steps[6, 4]


@pytest.mark.parametrize(
    ("name", "asked"),
    some(
        [("chain", "penalised"), ("uneven", "greedy"), ("grown", "penalised")],
        list(itertools.product(("chain", "uneven", "grown"), ("greedy", "penalised"))),
    ),
)
def test_a_chain_keeps_what_a_chain_of_drafts_keeps(target, head, name: str, asked: str) -> None:
    """Whose drafts count those before them as written. And a tree whose first path is that chain keeps no fewer."""
    found, trees = [], TREES | {"grown": "dynamic,1,3"}
    for options in ({"num_drafts": 3}, with_tree(trees[name])):
        engine = Engine(target, EngineConfig(num_blocks=64, prefix_cache="off", **options), Parts(draft_model=head))
        serve(engine, {asked: {**ASKED, **PURE}[asked]})
        found.append([num for step in kept_of(engine) for num, _ in step.values()])
    assert sum(found[0]) or asked == "greedy"
    if name != "uneven":
        assert found[0] == found[1]
    else:
        assert sum(found[1]) / len(found[1]) >= sum(found[0]) / len(found[0])


def test_any_schedule_of_requests_and_aborts_gives_the_same_texts(target, head, tapped_engine) -> None:
    @settings(max_examples=examples(25), deadline=None, derandomize=True, database=None)
    @given(work=schedule(), tree=st.sampled_from([(2,), (2, 2), UNEVEN, (1, 3, 1), "dynamic,2,3"]))
    def same(work: tuple[list[dict[str, Any]], dict[str, Any]], tree: Any) -> None:
        asked, options = work
        options = {name: value for name, value in options.items() if name != "num_drafts"}
        engine, _ = tapped_engine(target, parts=Parts(draft_model=head), **options, **with_tree(tree))
        served = serve_at_times(engine, asked)
        for number, (members, a) in enumerate(zip(served, asked, strict=True)):
            for mine, text in zip(members, alone(target, a), strict=True):
                ended = mine.finish_reason != "abort"
                assert mine.tokens == (text if ended else text[: mine.num_tokens]), (number, mine.id)
        assert engine.kv.num_available == engine.num_blocks

    same()


@pytest.mark.parametrize("kv_dtype", some(["int4"], ["int8", "fp8", "int4"]))
def test_with_a_cache_of_fewer_bits_the_text_is_that_of_plain_decoding_with_it(target, head, kv_dtype: str) -> None:
    options = {"num_blocks": 64, "block_size": 4, "kv_dtype": kv_dtype}
    texts = {name: r.tokens for name, r in serve(Engine(target, EngineConfig(**options)), PURE).items()}
    engine = Engine(target, EngineConfig(**options, **with_tree((8, 4))), Parts(draft_model=head))
    check_texts(serve(engine, PURE), texts)
    assert DraftUse.of(engine.trace.steps()).num_accepted_tokens > 10


def test_logprobs_are_those_of_plain_decoding(target, head) -> None:
    asked = {"drawn": ASKED["drawn"]}
    expected = serve(Engine(target, EngineConfig(num_blocks=64)), asked)["drawn"]
    engine = Engine(target, EngineConfig(num_blocks=64, **with_tree((4, 2))), Parts(draft_model=head))
    found = serve(engine, asked)["drawn"]
    assert [r.token for r in found.logprobs] == found.output_tokens
    for mine, its in zip(found.logprobs, expected.logprobs, strict=True):
        assert mine.logprob == pytest.approx(its.logprob, abs=1e-5)


@pytest.mark.parametrize(
    ("tree", "num_levels"),
    some([(UNEVEN, None), ("dynamic,2,3", 3)], [((8, 4), 2), (UNEVEN, None), ("dynamic,2,3", 3)]),
)
def test_the_trace_counts_kept_drafts_by_level(target, head, tree: Any, num_levels: int | None) -> None:
    engine = Engine(target, EngineConfig(num_blocks=64, **with_tree(tree)), Parts(draft_model=head))
    serve(engine, PURE)
    use = DraftUse.of(engine.trace.steps())
    depth = num_levels or max(map(len, tree))
    kept = [num for step in kept_of(engine) for num, _ in step.values()]
    assert max(kept) <= depth < use.num_draft_tokens / use.num_drafts
    assert use.accepted_per_position == tuple(sum(num > i for num in kept) for i in range(depth))


@pytest.mark.parametrize("max_model_len", [30, 37])
def test_a_text_may_end_at_the_last_position(random_model, target, head, max_model_len: int) -> None:
    """Drafts lie behind it, as far as there is room."""
    texts = []
    for options in ({}, with_tree((4, 2, 2)), with_tree("dynamic")):
        config = EngineConfig(num_blocks=20, block_size=4, max_model_len=max_model_len, **options)
        engine = Engine(target, config, Parts(draft_model=head) if options else Parts())
        asked = SamplingParams(max_tokens=100, temperature=0)
        request = engine.add(prompt("to the end"), asked, "r")
        while engine.has_work():
            engine.step()
        texts.append(request.tokens)
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0]) == max_model_len


def test_our_kernel_computes_trees_too(random_model) -> None:
    """In the interpreter, in float32; the head's trees in torch."""
    target = random_model("float32", max_position_embeddings=64)
    head = random_head(random_model("float32", max_position_embeddings=64, num_hidden_layers=1))
    asked = {name: SamplingParams(max_tokens=8, temperature=0) for name in ("a", "bb")}
    texts = {name: r.tokens for name, r in serve(Engine(target, EngineConfig(num_blocks=16)), asked).items()}
    attention = TritonAttention(target.config.attention_scale)
    config = EngineConfig(num_blocks=16, block_size=4, max_num_batched_tokens=12, **with_tree((3, 2)))
    engine = Engine(target, config, Parts(draft_model=head, attention=attention))
    check_texts(serve(engine, asked), texts)
    assert DraftUse.of(engine.trace.steps()).num_accepted_tokens > 0


# --- drafts by their definition -------------------------------------------------------------------------------------


def children_of(head: FeatureHead, target: Any, tokens: list[int], path: Sequence[int], num: int) -> list[int]:
    """The likeliest tokens behind a path of drafts behind known tokens, of which the last is not computed yet."""
    features = dense(target, target.embedding[tokens[:-1]])
    text = list(tokens)
    for token in [*path, None]:
        embedded = reference.rms_norm(target.embedding[text[1:]], head.embed_norm, head.config.norm_eps)
        hidden = dense(head.layer, head.fc(torch.cat((embedded, features), 1)))[-1:]
        if token is not None:
            features = torch.cat((features, hidden))
            text.append(token)
    return target.logits(hidden)[0].topk(num).indices.tolist()


@pytest.mark.parametrize(
    ("name", "budget"), some([("uneven", 9), ("even", 100)], list(itertools.product(("uneven", "even"), (9, 100))))
)
def test_drafts_are_the_likeliest_behind_each_path(
    target, head, plain, tapped_engine, monkeypatch, name: str, budget: int
) -> None:
    made: list[tuple[list[int], Tree, list[int]]] = []

    def recorded(draft: Any, levels: Any, t: Any, slots: Any, *others: Any) -> Any:
        tokens, q = tree_head.propose_tree(draft, levels, t, slots, *others)
        for row, slot in enumerate(t["draft.slots"].tolist()):
            known = slots.tokens[slot, : int(slots.computed[slot]) + 1].tolist()
            mine = tokens[t["draft.row"] == row].tolist()
            made.append((known, Tree.of(TREES[name]).first(len(mine)), mine))
        return tokens, q

    monkeypatch.setattr(head_source, "propose_tree", recorded)
    engine, _ = tapped_engine(
        target, parts=Parts(draft_model=head), num_blocks=60, block_size=4, max_num_seqs=3, prefix_cache="off",
        max_num_batched_tokens=budget, **with_tree(TREES[name]),
    )  # fmt: skip
    asked = {each: SamplingParams(max_tokens=14, temperature=0) for each in ("greedy", "another", "one more")}
    serve(engine, asked)
    assert len({len(mine) for _, _, mine in made}) > 1, "whole trees and cut ones"
    assert len(made) > 10
    for known, tree, mine in made:
        for node, children in tree.children.items():
            path = [mine[each] for each in tree.lineage[node] if each >= 0] if node >= 0 else []
            assert [mine[child] for child in children] == children_of(head, target, known, path, len(children))


def grown_by_definition(
    head: FeatureHead, target: Any, known: list[int], growth: Growth, num_nodes: int
) -> set[tuple[int, ...]]:
    """The paths that are verified, from all that are grown: by sorting, over whole texts."""
    features, scores = dense(target, target.embedding[known[:-1]]), dict[tuple[int, ...], float]()
    level: list[tuple[int, ...]] = [()]
    for _ in range(growth.levels_of(num_nodes)):
        grown = []
        for path in level:
            text, seen = list(known), features
            for token in [*path, None]:
                embedded = reference.rms_norm(target.embedding[text[1:]], head.embed_norm, head.config.norm_eps)
                hidden = dense(head.layer, head.fc(torch.cat((embedded, seen), 1)))[-1:]
                if token is not None:
                    seen = torch.cat((seen, hidden))
                    text.append(token)
            probs = target.logits(hidden)[0].softmax(0)
            for token in probs.topk(growth.width).indices.tolist():
                scores[*path, token] = scores.get(path, 1.0) * float(probs[token])
                grown.append((*path, token))
        level = sorted(grown, key=scores.__getitem__)[-growth.width :]
    return set(sorted(scores, key=scores.__getitem__)[-num_nodes:])


@pytest.mark.parametrize(("spec", "num"), [("dynamic,3,3", 7), ("dynamic,2,4", 9)])
def test_a_tree_that_is_grown_is_the_one_of_the_definition(
    target, head, plain, tapped_engine, monkeypatch, spec: str, num: int
) -> None:
    made: list[tuple[list[int], set[tuple[int, ...]], int]] = []

    def recorded(draft: Any, rows: Any, *others: Any) -> Any:
        trees, tokens = tree_growing.grow_trees(draft, rows, *others)
        slots = others[0]
        for row, tree, mine in zip(rows, trees, tokens.split([tree.num_nodes for tree in trees]), strict=True):
            known = slots.tokens[row.slot, : int(slots.computed[row.slot]) + 1].tolist()
            paths = {tuple(int(mine[each]) for each in line if each >= 0) for line in tree.lineage}
            made.append((known, paths, row.num_drafts))
        return trees, tokens

    monkeypatch.setattr(head_source, "grow_trees", recorded)
    engine, _ = tapped_engine(
        target, parts=Parts(draft_model=head), num_blocks=60, block_size=4, max_num_seqs=3, prefix_cache="off",
        max_num_batched_tokens=14, **with_tree(spec, num_drafts=num),
    )  # fmt: skip
    asked = {each: SamplingParams(max_tokens=12, temperature=0) for each in ("greedy", "another", "one more")}
    serve(engine, asked)
    assert len({(nodes, max(map(len, paths))) for _, paths, nodes in made}) > 2, "of several sizes and depths"
    for known, paths, num_nodes in made:
        assert paths == grown_by_definition(head, target, known, Growth.of(spec, num), num_nodes), len(known)


def test_the_first_draft_of_a_seeded_request_is_what_its_number_draws(target, head, plain) -> None:
    """So the first path is the chain that a chain of drafts has; also by a sampler that looks positions up."""
    for parts in (Parts(draft_model=head), Parts(draft_model=head, sampler=TwinSampler())):
        found = []
        for options in ({"num_drafts": 2}, with_tree((1, 1)), with_tree((20, 2))):
            engine = Engine(target, EngineConfig(num_blocks=64, prefix_cache="off", **options), copy.copy(parts))
            check_texts(serve(engine, {"drawn": PURE["drawn"]}), plain)
            found.append([num for step in kept_of(engine) for num, _ in step.values()])
        assert found[0] == found[1]
        assert len(found[2]) < len(found[1])


# --- requests without a seed -----------------------------------------------------------------------------------------

FEW = 600  # texts
FREE: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6}, "top_k": {"top_k": 3}, "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2, "temperature": 1.2},
    "penalties": {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 1.5},
}  # fmt: skip


@pytest.fixture(scope="module")
def small(random_model: Callable) -> Any:
    return random_model("float64", vocab_size=VOCAB)


@pytest.fixture(scope="module")
def heads(random_model: Callable) -> dict[str, FeatureHead]:
    usual = random_head(copy.deepcopy(random_model("float64", vocab_size=VOCAB, num_hidden_layers=1)))
    broken = random_head(copy.deepcopy(random_model("float64", vocab_size=VOCAB, num_hidden_layers=1)))
    broken.layer.norm.fill_(torch.nan)
    few = random_head(copy.deepcopy(random_model("float64", vocab_size=VOCAB, num_hidden_layers=1)))
    few.draft_tokens = torch.tensor([1, 2, 4])
    return {"usual": usual, "broken": broken, "few": few}


@pytest.fixture(scope="module")
def expected(small: Any, one_shot: Callable) -> Callable[[str], dict[tuple[int, ...], float]]:
    """The probability of each text of a case."""
    known: dict[tuple[int, ...], list[float]] = {}

    def of(name: str) -> dict[tuple[int, ...], float]:
        growing = {(): 1.0}
        for _ in range(LENGTH):
            longer: dict[tuple[int, ...], float] = {}
            for text, chance in growing.items():
                if text not in known:
                    known[text] = one_shot(small, PROMPT + list(text))[-1].tolist()
                shares = by_definition(known[text], text, SamplingParams(**FREE[name]))
                longer |= {(*text, token): chance * share for token, share in enumerate(shares) if share > 0}
            growing = longer
        return growing

    return of


def free_texts(small: Any, head: FeatureHead, name: str, tree: Any, **options: Any) -> list[tuple[int, ...]]:
    config = EngineConfig(
        num_blocks=9000, block_size=4, max_num_seqs=1000, seed=1, max_num_batched_tokens=20000, **with_tree(tree),
        **options,
    )  # fmt: skip
    engine = Engine(small, config, Parts(draft_model=head))
    members = texts_of(engine, SamplingParams(n=FEW, max_tokens=LENGTH, logprobs=0, **FREE[name]))
    for member in members:
        assert [r.token for r in member.logprobs] == member.output_tokens
    assert DraftUse.of(engine.trace.steps()).num_accepted_tokens > 0
    return [tuple(member.output_tokens) for member in members]


# The rule is tried with each filter in tests/features/speculative/test_tree.py.
@pytest.mark.parametrize(
    ("name", "kind", "tree"),
    some(
        [("temperature", "broken", (3, 2)), ("top_p", "usual", ((0,), (1,), (0, 0), (0, 1), (1, 0))),
         ("temperature", "few", (4,)), ("top_k", "few", "dynamic,3,2"), ("penalties", "usual", (2, 2)),
         ("min_p", "usual", "dynamic,2,2")],
        [("temperature", "usual", (2, 2)), ("temperature", "broken", (3, 2)), ("top_k", "usual", (4,)),
         ("top_p", "usual", ((0,), (1,), (0, 0), (0, 1), (1, 0))), ("min_p", "usual", "dynamic,2,2"),
         ("temperature", "few", (2, 2)), ("top_k", "few", "dynamic,3,2"), ("temperature", "few", (4,)),
         ("temperature", "broken", "dynamic,2,2"), ("top_k", "usual", "dynamic,4,1"), ("penalties", "usual", (2, 2)),
         ("penalties", "usual", "dynamic,2,2")],
    ),
)  # fmt: skip
def test_texts_are_distributed_as_the_targets(small, heads, expected, name: str, kind: str, tree: Any) -> None:
    """Of three likeliest tokens four are drafted, too: the last one then is any."""
    assert p_value(free_texts(small, heads[kind], name, tree), expected(name)) > ALPHA


@pytest.mark.parametrize(
    ("name", "tree"), [("penalties", "dynamic,2,2"), pytest.param("top_k", (2, 2), marks=pytest.mark.slow)]
)
def test_with_gumbel_noise_texts_are_distributed_as_the_targets(small, heads, expected, name: str, tree: Any) -> None:
    texts = free_texts(small, heads["usual"], name, tree, sampling_noise="gumbel")
    assert p_value(texts, expected(name)) > ALPHA


def test_equal_drafts_at_one_place_leave_the_distribution_right(small, heads, expected, monkeypatch) -> None:
    """Of equal siblings one may be on a path: with both the longer of two paths of one text would be kept."""
    likely = max(expected("temperature"), key=expected("temperature").__getitem__)[1]

    def equal(draft: Any, levels: Any, t: Any, *others: Any) -> Any:
        return torch.full_like(t["draft.row"], likely), None

    monkeypatch.setattr(head_source, "propose_tree", equal)
    assert p_value(free_texts(small, heads["usual"], "temperature", (3, 3)), expected("temperature")) > ALPHA


def test_a_rule_that_is_nearly_right_is_seen_here_too(small, heads, expected, monkeypatch) -> None:
    def match_or_resample(p: torch.Tensor, q: Any, children: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        found = torch.full_like(children[:, 0], NONE)
        for number, token in enumerate(children.unbind(1)):
            x = token.clamp(min=0)[:, None]
            kept = u[number] * q.gather(1, x)[:, 0] < p.gather(1, x)[:, 0]
            found = torch.where((found == NONE) & (token != NONE) & kept, token, found)
        return torch.where(found == NONE, draw(p, u[-1]), found)

    monkeypatch.setattr(verified_trees, "verified_children", match_or_resample)
    assert p_value(free_texts(small, heads["usual"], "temperature", (2, 2)), expected("temperature")) < ALPHA


def test_a_head_that_gives_no_numbers_changes_no_greedy_or_seeded_text(random_model, target, plain) -> None:
    broken = random_head(copy.deepcopy(random_model("float64", max_position_embeddings=128, num_hidden_layers=1)))
    broken.layer.norm.fill_(torch.nan)
    engine = Engine(target, EngineConfig(num_blocks=64, **with_tree((3, 2))), Parts(draft_model=broken))
    check_texts(serve(engine, ASKED), plain)


@pytest.mark.parametrize("tree", [(3, 2), "dynamic"])
def test_in_two_processes(tree: Any) -> None:
    asked = SamplingParams(max_tokens=24, temperature=0)
    texts = []
    for options in ({}, {"draft_model": course_model("eagle"), "draft_tree": tree, "worker": "process"}):
        llm = LLM(course_model("target"), dtype="float32", num_blocks=32, **options)
        try:
            texts.append(llm.generate(["def parse(line):\n"], asked)[0].outputs[0].token_ids)
            kept = DraftUse.of(llm.engine.trace.steps()).num_accepted_tokens
            assert (kept > 0) == bool(options)
        finally:
            llm.engine.close()
    assert texts[0] == texts[1]


# --- the cache -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8", "fp8_e5m2", "int4"])
def test_tokens_move_with_all_that_the_cache_has_of_them(kv_dtype: str) -> None:
    """Sources are read first, so one may be a target; all else stays."""
    spec = KVSpec(3, 2, 8, 4, **widths(kv_dtype, torch.float32))
    cache = kv_cache([spec], 5, torch.float32, torch.device("cpu"), kv_dtype=kv_dtype)
    random = torch.Generator().manual_seed(1)
    for blocks in cache.blocks:
        blocks.copy_(torch.randint(0, 100, blocks.shape, generator=random))
    before = [blocks.clone() for blocks in cache.blocks]
    moves = {17: 6, 6: 7, 7: 8, 3: 3, 12: 19}
    sources, targets = (torch.tensor(list(ends)) for ends in (moves.keys(), moves.values()))
    move_tokens(cache, sources, targets)
    came_from = {target: source for source, target in moves.items()}
    for slot in range(20):
        source = came_from.get(slot, slot)
        for now, old, axis in zip(cache.blocks, before, (3, 5 if kv_dtype == "int4" else 4), strict=False):
            found = now[slot // 4].movedim(axis - 1, 0)[slot % 4]
            assert torch.equal(found, old[source // 4].movedim(axis - 1, 0)[source % 4]), slot


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_behind_each_step_the_cache_holds_what_plain_decoding_writes(target, head, kv_dtype: str) -> None:
    """Of all known tokens but the last; of the head what it would have of the text alone."""
    caches = []
    for options in ({}, with_tree(UNEVEN)):
        config = EngineConfig(num_blocks=16, block_size=4, kv_dtype=kv_dtype, prefix_cache="off", **options)
        engine = Engine(target, config, Parts(draft_model=head) if options else Parts())
        request = engine.add(prompt("greedy"), SamplingParams(max_tokens=24, temperature=0), "r")
        found = {}
        while engine.has_work():
            table = list(request.block_table)
            engine.step()
            computed = request.num_tokens - 1
            for position in range(computed):
                if position // 4 < len(table) and request.state.name == "RUNNING":
                    block, at = request.block_table[position // 4], position % 4
                    cache = engine.executor.kv_cache
                    parts = [cache.data[:, :, block, at].double()]
                    if kv_dtype != "auto":
                        parts.append(cache.scale[:, :, block, :, at].double())
                    found[position] = parts
        caches.append((request.tokens, found))
    (text, written), (same, moved) = caches
    assert text == same
    assert len(moved) > 20
    for position in moved.keys() & written.keys():
        for mine, its in zip(moved[position], written[position], strict=True):
            assert float((mine - its).abs().max()) < 1e-9, position


# --- what cannot be combined -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"draft_tree": (2, 0)}, "a draft tree: expected how many children"),
        ({"draft_tree": 5}, "expected how many children .*, got 5"),
        ({"draft_tree": [["a"]]}, r"or paths such as .*, got \[\['a'\]\]"),
        ({"draft_tree": ((0.5,),)}, r"or paths such as .*, got \(\(0.5,\),\)"),
        ({"draft_tree": ((0,), (True,))}, r"or paths such as .*, got \(\(0,\), \(True,\)\)"),
        ({"draft_tree": ((0,), (0,), (1,))}, r"expected each path once, got \(0,\) 2 times"),
        ({"draft_tree": (9, 9)}, "at most 63 nodes"),
        ({"draft_tree": (2, 2), "speculative": "off"}, "expected 'eagle' .*, or no draft_tree"),
        ({"draft_tree": (2, 2), "speculative": "draft"}, "expected 'eagle' .*, or no draft_tree"),
        ({"draft_tree": (2, 2), "num_drafts": 3}, "has 6 drafts, and num_drafts=3"),
        ({"draft_tree": (2, 2), "adaptive_drafts": "on"}, "adaptive_drafts='on' is given, too"),
        ({"draft_tree": (2, 2), "batch_invariant": True}, "batch_invariant computes each by itself"),
        ({"draft_tree": "bushy"}, "expected 'dynamic', or with width and levels, 'dynamic,4,4', got 'bushy'"),
        ({"draft_tree": "dynamic,4"}, "got 'dynamic,4'"),
        ({"draft_tree": "dynamic,0,2"}, "got width 0 and 2 levels"),
        ({"draft_tree": "dynamic,3,2", "num_drafts": 13}, "expected 2 to 12 drafts .* got 13"),
        ({"draft_tree": "dynamic,4,4", "num_drafts": 9}, "expected 11 to 52 drafts .* got 9"),
        ({"draft_tree": (2, 2), "graphs": "on"}, "only a GPU has them"),
    ],
)
def test_options_that_cannot_be_combined_are_refused(target, head, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Engine(target, EngineConfig(num_blocks=8, **{"speculative": "eagle", **options}), Parts(draft_model=head))


def test_more_children_than_tokens_in_the_vocabulary_are_refused(small, heads) -> None:
    with pytest.raises(ConfigError, match=f"a node has {VOCAB + 1} children, and the vocabulary {VOCAB} tokens"):
        Engine(small, EngineConfig(num_blocks=8, **with_tree((VOCAB + 1,))), Parts(draft_model=heads["usual"]))


def test_parts_that_know_no_trees_are_refused(target, head) -> None:
    def asked(logits: Any, requests: Any) -> Any:
        pytest.fail("refused, and asked all the same")

    attention = TorchAttention(target.config.attention_scale, target.dtype)
    for part, expected in (
        ({"attention": attention}, "Parts.attention, TorchAttention, does not"),
        ({"sampler": asked}, "a TorchSampler, and Parts.sampler, function, is given"),
    ):
        with pytest.raises(ConfigError, match=expected):
            Engine(target, EngineConfig(num_blocks=8, **with_tree((2, 2))), Parts(draft_model=head, **part))
