"""Requests under grammars and without, with drafts of every kind, under any schedule: the text of each, and its
log-probabilities, are those that it has alone and without drafts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.interfaces import Request, SamplingParams
from tests.engine.conftest import check_references, some
from tests.engine.test_drafts import kept_of
from tests.engine.test_grammar_drafts import VOCAB, Some
from tests.engine.test_grammar_worker_drafts import OPTIONS, Third, parts_of

GRAMMARS = {"none": None, "some": Some(), "third": Third()}
PARAMS: list[dict[str, Any]] = [
    {}, {"repetition_penalty": 1.5, "presence_penalty": 0.4}, {"logit_bias": {3: 4.0, 9: -3.0}},
    {"top_k": 6, "min_p": 0.02}, {"logprobs": 2}, {"logprobs": 0, "frequency_penalty": 1.0},
    {"stop_token_ids": tuple(range(0, VOCAB, 9))},
]  # fmt: skip


@pytest.fixture(scope="module")
def target(random_model: Callable) -> Any:
    return random_model("float64", max_position_embeddings=128)


@pytest.fixture(scope="module")
def layer(random_model: Callable) -> Any:
    return random_model("float64", max_position_embeddings=128, num_hidden_layers=1)


@st.composite
def schedule(draw: st.DrawFn) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    requests = [
        {
            "prompt": random.Random(draw(st.integers(0, 1))).choices(range(VOCAB), k=draw(st.integers(1, 14))),
            "grammar": draw(st.sampled_from(["some", "some", "third", "third", "none"])),
            "arrival": draw(st.integers(0, 6)), "abort": draw(st.sampled_from([None, None, None, 3, 8])),
            "sampling": SamplingParams(
                max_tokens=draw(st.integers(1, 16)), seed=draw(st.integers(0, 99)), n=draw(st.sampled_from([1, 1, 2])),
                temperature=draw(st.sampled_from([0, 0.7, 1.5])), **draw(st.sampled_from(PARAMS)),
            ),
        }
        for _ in range(draw(st.integers(1, 4)))
    ]  # fmt: skip
    size = draw(st.sampled_from([1, 3, 4, 16]))
    return requests, {
        "block_size": size,
        "num_blocks": -(-30 // size) + draw(st.integers(0, 60 // size)),
        "max_num_seqs": draw(st.integers(1, 5)),
        "max_num_batched_tokens": draw(st.sampled_from([3, 9, 40, 100])),
        "prefix_cache": draw(st.sampled_from(["off", "hash", "radix"])),
        "late": draw(st.sampled_from([None, None, 1, 2])),
        **draw(st.sampled_from([{}, {"preemption": "swap", "swap_bytes": 2**17}])),
    }


def serve_at_times(engine: Engine, asked: list[dict[str, Any]]) -> list[list[Request]]:
    served: dict[int, list[Request]] = {}
    for step in itertools.count():
        for number, a in enumerate(asked):
            if a["arrival"] == step:
                first = engine.add(a["prompt"], a["sampling"], f"r{number}", grammar=GRAMMARS[a["grammar"]])
                served[number] = [first, *first.children]
            if a["abort"] == step and f"r{number}" in engine.requests:
                engine.abort(f"r{number}")
        engine.step()
        if engine.depth == 1:
            check_references(engine)
        if len(served) == len(asked) and not engine.has_work():
            break
    return [served[number] for number in range(len(asked))]


def drafting(target: Any, layer: Any, kind: str, late_engine: Callable, options: dict[str, Any]) -> Engine:
    mine, late = OPTIONS.get(kind, {"num_drafts": 3}), options["late"]
    if kind == "ngram":
        mine, late = {"speculative": "ngram", "adaptive_drafts": "off"}, None
    others = {name: value for name, value in options.items() if name != "late"}
    engine: Engine = late_engine(target, late, parts_of(kind, target, layer, {}), **others, **mine)
    return engine


# Schedules of one's own, with all kinds: test_grammar_worker_drafts.py.
@pytest.mark.parametrize(
    "kind",
    some(
        ["grown", "lookahead", "model", "ngram"],
        ["tree", "grown", "lookahead", "model", "head", "heads", "early-exit", "ngram"],
    ),
)
def test_any_schedule_gives_each_request_the_text_that_it_has_alone(kind: str, target, layer, late_engine) -> None:
    bound = []

    @settings(max_examples=10, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(work=schedule())
    def same(work: tuple[list[dict[str, Any]], dict[str, Any]]) -> None:
        asked, options = work
        engine = drafting(target, layer, kind, late_engine, options)
        served = serve_at_times(engine, asked)
        for number, (members, a) in enumerate(zip(served, asked, strict=True)):
            expected = serve_at_times(Engine(target, EngineConfig(block_size=64, num_blocks=4)), [alone(a)])[0]
            for mine, its in zip(members, expected, strict=True):
                ended = mine.finish_reason != "abort"
                assert mine.tokens == (its.tokens if ended else its.tokens[: mine.num_tokens]), (number, mine.id)
                assert not ended or mine.finish_reason == its.finish_reason
                for one, other in zip(mine.logprobs, its.logprobs, strict=ended):
                    assert one.token == other.token
                    assert one.logprob == pytest.approx(other.logprob, abs=1e-6)
                    assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert engine.kv.num_available == engine.num_blocks
        bound.extend(
            pair for step in kept_of(engine) for name, pair in step.items()
            if asked[int(name[1])]["grammar"] != "none"
        )  # fmt: skip

    same()
    assert any(num for num, _ in bound) or kind in ("lookahead", "ngram")
    assert bound or kind == "ngram"


def alone(asked: dict[str, Any]) -> dict[str, Any]:
    return {**asked, "arrival": 0, "abort": None}
