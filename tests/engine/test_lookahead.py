"""Lookahead decoding: windows, pools and candidates are those of the definition, computed here one token list at a
time; the text is that of plain decoding, and without a seed it is distributed as the target's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.llm import LLM
from reference_impl.assembly.parts import Parts
from reference_impl.core.attention import TorchAttention
from reference_impl.features.speculative.lookahead import Shape
from reference_impl.features.speculative.lookahead_pool import Lookahead
from reference_impl.interfaces import Proposer, SamplingParams
from reference_impl.observe.trace import DraftUse
from tests.engine.conftest import FakeStore, some
from tests.engine.test_draft_model import PURE, alone, check_texts, check_texts_when_preempted, schedule, serve_at_times
from tests.engine.test_drafts import ASKED, kept_of, prompt, serve
from tests.engine.test_rejection import ALPHA, LENGTH, PROMPT, VOCAB, by_definition, p_value, texts_of
from tests.examples import examples

SHAPES = [(3, 3, 3), (5, 4, 2), (1, 2, 1), (2, 5, 3)]


@pytest.fixture(scope="module")
def plain(target: Any) -> dict[str, list[int]]:
    return plain_of(target)


def plain_of(model: Any) -> dict[str, list[int]]:
    return {
        name: serve(Engine(model, EngineConfig(num_blocks=48)), {name: sampling})[name].tokens
        for name, sampling in ASKED.items()
    }


def by(shape: tuple[int, ...] = (), **options: Any) -> dict[str, Any]:
    return {"speculative": "lookahead", "lookahead": shape, **options}


# --- the shape -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SHAPES)
def test_the_window_is_a_tree_with_the_mask_of_the_paper(spec: tuple[int, int, int]) -> None:
    """Of level l and column j: level 0 up to j, and of the levels between the same column."""
    shape = Shape.of(spec)
    tree, names = shape.tree, [node[1:] for node in shape.nodes]
    for node, (of_window, a, b) in enumerate(names):
        seen = {names[each] for each in tree.lineage[node] if each >= 0}
        if of_window:
            assert seen == {(True, 0, j) for j in range(b + 1)} | {(True, level, b) for level in range(a + 1)}
            assert tree.depths[node] == a + b
        else:
            assert seen == {(False, a, i) for i in range(b + 1)}
    assert [names[node] for node in shape.newest] == [(True, spec[1] - 2, j) for j in range(spec[0])]
    assert len(names) == (spec[1] - 1) * (spec[0] + spec[2]) == len(set(names))


# --- drafts by their definition -------------------------------------------------------------------------------------


class ByDefinition:
    """One request's window and pool, in lists."""

    def __init__(self, spec: tuple[int, int, int], tokens: list[int]):
        self.columns, self.length, self.candidates = spec
        size = (self.length - 1) * self.columns
        last = tokens[-size:] * size
        self.window = [last[at : at + self.columns] for at in range(0, size, self.columns)]
        self.pool: list[tuple[int, ...]] = []  # the newest last

    def drafts(self, known: list[int]) -> dict[tuple[bool, int, int], int]:
        found = {(True, i, j): token for i, level in enumerate(self.window) for j, token in enumerate(level)}
        fitting = [gram[1:] for gram in reversed(self.pool) if gram[0] == known[-1]]
        for g in range(self.candidates):
            gram = fitting[g] if g < len(fitting) else (0,) * (self.length - 1)
            found |= {(False, g, i): token for i, token in enumerate(gram)}
        return found

    def iterate(self, known: list[int], num_kept: int, likeliest: Callable[[list[int]], int]) -> None:
        grams = []
        for j in range(self.columns):
            column = [level[j] for level in self.window]
            grams.append((*column, likeliest(known + self.window[0][:j] + column)))
        self.pool = [gram for gram in self.pool if gram not in grams]
        self.pool += [gram for j, gram in enumerate(grams) if gram not in grams[j + 1 :]]
        moved = [grams[min(j + num_kept, self.columns - 1)] for j in range(self.columns)]
        self.window = [[gram[level] for gram in moved] for level in range(1, self.length)]


@pytest.mark.parametrize("spec", [(4, 4, 2), (2, 2, 3), pytest.param((3, 3, 3), marks=pytest.mark.slow)])
def test_windows_pools_and_candidates_are_those_of_the_definition(
    target, one_shot, plain, monkeypatch, spec: tuple[int, int, int]
) -> None:
    made: list[tuple[int, int, list[int]]] = []
    inner = Lookahead.propose

    def propose(self: Lookahead, slots: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        found = inner(self, slots, last)
        [slot] = slots.tolist()
        computed = int(engine.executor.slots.computed[slot])
        made.append((slot, computed + 1, found[0].tolist()))
        return found

    monkeypatch.setattr(Lookahead, "propose", propose)
    engine = Engine(target, EngineConfig(num_blocks=64, **by(spec)))
    for name in ("greedy", "drawn"):
        made.clear()
        text = serve(engine, {name: ASKED[name]})[name].tokens
        assert text == plain[name]
        by_hand, shape = ByDefinition(spec, prompt(name)), Shape.of(spec)
        rows = [row.num_drafts for step in engine.trace.steps() for row in step.rows if row.num_drafts][-len(made) :]
        for (_, length, drafts), (_, after, _), num in zip(made, made[1:], rows, strict=False):
            known, expected = text[:length], by_hand.drafts(text[:length])
            assert drafts == [expected[node[1:]] for node in shape.nodes], length
            if num == len(shape.nodes):
                by_hand.iterate(known, after - length - 1, lambda tokens: int(one_shot(target, tokens)[-1].argmax()))
        assert len(made) > 5


# --- the text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "late", "preemption", "prefix_cache"),
    [((3, 3, 3), None, "recompute", "off"), pytest.param((3, 3, 3), None, "swap", "hash", marks=pytest.mark.slow),
     ((2, 5, 3), 2, "recompute", "hash"), ((1, 2, 1), 1, "swap", "radix")],
)  # fmt: skip
def test_the_text_is_that_of_plain_decoding(
    target, plain, tapped_engine, spec: tuple[int, ...], late: int | None, preemption: str, prefix_cache: str
) -> None:
    engine, _ = tapped_engine(
        target, late=late, block_size=4, num_blocks=26, preemption=preemption, max_num_batched_tokens=40,
        prefix_cache=prefix_cache, **by(spec),
    )  # fmt: skip
    check_texts_when_preempted(engine, plain)
    kept = [found for step in kept_of(engine) for found in step.items()]
    assert any("penalised" in request for request, _ in kept)
    assert max(num for _, (num, _) in kept) > 0


def test_any_schedule_of_requests_and_aborts_gives_the_same_texts(target, tapped_engine) -> None:
    @settings(max_examples=examples(15), deadline=None, derandomize=True, database=None)
    @given(work=schedule())
    def same(work: tuple[list[dict[str, Any]], dict[str, Any]]) -> None:
        asked, options = work
        options = {name: value for name, value in options.items() if name != "num_drafts"}
        engine, _ = tapped_engine(target, **options, **by((2, 3, 2)))
        served = serve_at_times(engine, asked)
        for number, (members, a) in enumerate(zip(served, asked, strict=True)):
            for mine, text in zip(members, alone(target, a), strict=True):
                ended = mine.finish_reason != "abort"
                assert mine.tokens == (text if ended else text[: mine.num_tokens]), (number, mine.id)
        assert engine.kv.num_available == engine.num_blocks

    same()


def test_a_model_with_windows_and_a_page_store_may_stand_beside_it(target, plain, windowed, tapped_engine) -> None:
    engine, _ = tapped_engine(windowed, num_blocks=90, block_size=4, max_num_batched_tokens=30, **by())
    assert len(engine.kv_specs) == 2
    check_texts(serve(engine, PURE), plain_of(windowed))
    engine, _ = tapped_engine(target, parts=Parts(page_store=FakeStore(["now"])), num_blocks=60, block_size=4, **by())
    for _ in range(2):
        check_texts(serve(engine, PURE), plain)


@pytest.mark.parametrize("kv_dtype", some(["int8"], ["int8", "fp8", "int4"]))
def test_with_a_cache_of_eight_bits_the_text_is_that_of_plain_decoding_with_it(target, kv_dtype: str) -> None:
    options = {"num_blocks": 64, "block_size": 4, "kv_dtype": kv_dtype}
    texts = {name: r.tokens for name, r in serve(Engine(target, EngineConfig(**options)), PURE).items()}
    engine = Engine(target, EngineConfig(**options, **by()))
    check_texts(serve(engine, PURE), texts)
    assert DraftUse.of(engine.trace.steps()).num_accepted_tokens > 0


@pytest.mark.parametrize("spec", [(2, 2, 2), pytest.param((3, 3, 2), marks=pytest.mark.slow)])
def test_texts_without_a_seed_are_distributed_as_the_targets(random_model, one_shot, spec: tuple[int, ...]) -> None:
    """Of three tokens: the last two may be drafted."""
    small, asked = random_model("float64", vocab_size=VOCAB), {"temperature": 0.6}
    expected = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for text, chance in expected.items():
            shares = by_definition(one_shot(small, PROMPT + list(text))[-1].tolist(), text, SamplingParams(**asked))
            longer |= {(*text, token): chance * share for token, share in enumerate(shares) if share > 0}
        expected = longer
    config = EngineConfig(
        num_blocks=9000, block_size=4, max_num_seqs=1000, seed=1, max_num_batched_tokens=20000, **by(spec)
    )
    engine = Engine(small, config)
    members = texts_of(engine, SamplingParams(n=600, max_tokens=LENGTH, **asked))
    assert DraftUse.of(engine.trace.steps()).num_accepted_tokens > 0
    assert p_value([tuple(member.output_tokens) for member in members], expected) > ALPHA


def test_in_two_processes() -> None:
    from reference_impl.assembly.config import course_model

    asked = SamplingParams(max_tokens=24, temperature=0)
    texts = []
    for options in ({}, {**by(), "worker": "process"}):
        llm = LLM(course_model("target"), dtype="float32", num_blocks=32, **options)
        texts.append(llm.generate(["def parse(line):\n"], asked)[0].outputs[0].token_ids)
        if options:
            assert DraftUse.of(llm.engine.trace.steps()).num_accepted_tokens > 0
        llm.engine.close()
    assert texts[0] == texts[1]


# --- what cannot be combined -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"lookahead": (3, 3)}, "expected three integers"),
        ({"lookahead": 5}, "expected three integers, .*, got 5"),
        ({"lookahead": None}, "expected three integers, .*, got None"),
        ({"lookahead": (3, 1, 3)}, r"at least \(1, 2, 1\)"),
        ({"lookahead": (20, 3, 12)}, "up to 63 drafts, got 20, 3 and 12: 64 drafts"),
        ({"lookahead": (3, 3, 3), "speculative": "ngram"}, "is for speculative='lookahead', and it is 'ngram'"),
        ({"num_drafts": 3}, "has 12 drafts, and num_drafts=3"),
        ({"draft_tree": (2, 2)}, "expected 'eagle' .*, or no draft_tree"),
        ({"adaptive_drafts": "on"}, "is of one size, and adaptive_drafts='on'"),
        ({"batch_invariant": True}, "batch_invariant computes each by itself"),
        ({"graphs": "on"}, "only a GPU has them"),
    ],
)
def test_options_that_cannot_be_combined_are_refused(target, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Engine(target, EngineConfig(num_blocks=8, **{"speculative": "lookahead", **options}))


def test_parts_that_know_no_trees_and_other_proposers_are_refused(target, oracle) -> None:
    proposer: Proposer = oracle({}, {}, VOCAB, 1.0)
    attention = TorchAttention(target.config.attention_scale, target.dtype)
    for part, expected in (({"attention": attention}, "TorchAttention, does not"), ({"proposer": proposer}, "Oracle")):
        with pytest.raises(ValueError, match=expected):
            Engine(target, EngineConfig(num_blocks=8, **by()), Parts(**part))
