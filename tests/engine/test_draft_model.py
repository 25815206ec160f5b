"""Speculative decoding with a draft model.

Whatever it drafts, the text is that of plain decoding; and the target as its own draft is always right, so a key or
value of the draft that is missing, stale or another request's shows as a wrong draft token: in `tapped_engine` what
nobody owns holds NaN, in the draft's cache, too.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_impl.assembly.config import EngineConfig, course_model
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.llm import LLM
from reference_impl.assembly.model import load_model
from reference_impl.assembly.parts import Parts
from reference_impl.interfaces import Request, SamplingParams
from tests.engine.conftest import check_references, draft_of, some, spread
from tests.engine.test_drafts import ASKED, VOCAB, kept_of, prompt, serve
from tests.examples import examples

# Without penalties, biases and tokens that are ruled out.
PURE = {name: ASKED[name] for name in ("greedy", "drawn", "filtered", "short")}


@pytest.fixture(scope="module")
def drafts(target: Any, random_model: Callable) -> dict[str, Any]:
    half = copy.deepcopy(target)
    half.embedding += 0.05 * torch.randn(half.embedding.shape, generator=torch.Generator().manual_seed(1)).double()
    broken = copy.deepcopy(target)
    broken.norm.fill_(torch.nan)
    other = random_model(
        "float32", architecture="LlamaForCausalLM", num_hidden_layers=3, hidden_size=24, num_attention_heads=3,
        num_key_value_heads=1, max_position_embeddings=160,
    )  # fmt: skip
    return {"itself": target, "half": half, "other": other, "broken": broken}


@pytest.fixture(scope="module")
def plain(target: Any) -> dict[str, list[int]]:
    found = {}
    for name, sampling in ASKED.items():
        found[name] = serve(Engine(target, EngineConfig(num_blocks=32)), {name: sampling})[name].tokens
    return found


def is_right_always(engine: Engine) -> bool:
    kept = [pair for step in kept_of(engine) for pair in step.values()]
    assert kept
    return all(num == drafts for num, drafts in kept)


def check_texts(requests: dict[str, Request], plain: dict[str, list[int]]) -> None:
    for name, request in requests.items():
        assert request.tokens == plain[name], name


def check_texts_when_preempted(engine: Engine, plain: dict[str, list[int]]) -> None:
    """All of ASKED at once, in too few blocks: texts as without drafts, no block lost, and some request preempted."""
    requests = {name: engine.add(prompt(name), sampling, name) for name, sampling in ASKED.items()}
    while engine.has_work():
        engine.step()
        check_references(engine)
    check_texts(requests, plain)
    assert any(step.preempted for step in engine.trace.steps())
    assert engine.kv.num_available == engine.num_blocks


# --- the text, and what is kept --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "k", "late"),
    some(
        [("itself", 4, None), ("half", 5, 1), ("other", 3, 1), ("broken", 3, None)],
        [(kind, k, late)
         for kind, k in [("itself", 1), ("itself", 4), ("half", 2), ("half", 5), ("other", 3), ("broken", 3)]
         for late in (None, 1)],
    ),
)  # fmt: skip
def test_the_text_is_that_of_plain_decoding(
    target, drafts, plain, tapped_engine, kind: str, k: int, late: int | None
) -> None:
    engine, _ = tapped_engine(
        target, parts=Parts(draft_model=drafts[kind]), late=late, num_drafts=k, num_blocks=60, block_size=4,
        max_num_seqs=4, max_num_batched_tokens=17,
    )  # fmt: skip
    requests = serve(engine, ASKED)
    check_texts(requests, plain)
    for request in requests.values():
        assert [r.token for r in request.logprobs] == (request.output_tokens if request.logprobs else [])
    assert engine.kv.num_available == engine.num_blocks
    assert any(row.num_drafts == k for step in engine.trace.steps() for row in step.rows)


@pytest.mark.parametrize(
    ("name", "k"),
    some(
        [("greedy", 1), ("filtered", 4)],
        list(itertools.product(("greedy", "filtered"), (1, 2, 3, 4, 5))),
    ),
)
def test_the_target_as_its_own_draft_takes_a_step_for_every_k_plus_one_tokens(
    target, tapped_engine, k: int, name: str
) -> None:
    for length, max_tokens in itertools.product((1, 2, 3, 4, 5, 8), (1, 2, k + 1, k + 2, 3 * k + 6)):
        engine, _ = tapped_engine(target, parts=Parts(draft_model=target), num_drafts=k, num_blocks=20, block_size=4)
        sampling = dataclasses.replace(ASKED[name], max_tokens=max_tokens)
        engine.add([7 * i % VOCAB for i in range(length)], sampling)
        while engine.has_work():
            engine.step()
        whole, rest = divmod(max_tokens - 1, k + 1)
        expected = [1] + [k + 1] * whole + ([rest] if rest else [])
        assert [sum(step.num_new_tokens) for step in engine.trace.steps()] == expected, (length, max_tokens)
        assert engine.kv.num_available == engine.num_blocks


@pytest.mark.parametrize(("budget", "prefix_cache", "late"), spread([5, 100], ["off", "hash", "radix"], [None, 2]))
def test_chunks_cached_prefixes_and_neighbours_leave_nothing_out_of_the_drafts_cache(
    target, plain, tapped_engine, prefix_cache: str, budget: int, late: int | None
) -> None:
    engine, _ = tapped_engine(
        target, parts=Parts(draft_model=target), late=late, num_drafts=3, num_blocks=90, block_size=4,
        prefix_cache=prefix_cache, max_num_batched_tokens=budget, max_num_seqs=3,
    )  # fmt: skip
    for _ in range(2):  # again, from the cache
        check_texts(serve(engine, ASKED), plain)
    assert is_right_always(engine)
    hits = [cached for step in engine.trace.steps() for _, cached in step.admitted]
    assert (max(hits) > 0) == (prefix_cache != "off")


@pytest.mark.parametrize("max_tokens", range(6, 14))
def test_a_text_that_ends_in_a_kept_draft_is_found_again_as_a_whole(target, tapped_engine, max_tokens: int) -> None:
    """The draft model never computed that token: it is the last token of a cached block, for one of these lengths."""
    engine, _ = tapped_engine(target, parts=Parts(draft_model=target), num_drafts=3, num_blocks=60, block_size=4)
    first = engine.add([3, 1, 4], SamplingParams(max_tokens=max_tokens, temperature=0))
    while engine.has_work():
        engine.step()
    again = engine.add(first.tokens, SamplingParams(max_tokens=9, temperature=0))
    while engine.has_work():
        engine.step()
    assert is_right_always(engine)
    assert again.num_cached_tokens == (len(first.tokens) - 1) // 4 * 4


@pytest.mark.parametrize(("preemption", "late"), spread(["recompute", "swap"], [None, 3]))
def test_preempted_requests_come_back_with_what_the_draft_had(
    target, plain, tapped_engine, preemption: str, late: int | None
) -> None:
    engine, _ = tapped_engine(
        target, parts=Parts(draft_model=target), late=late, num_drafts=4, block_size=4, num_blocks=16,
        preemption=preemption, max_num_batched_tokens=24,
    )  # fmt: skip
    requests = {name: engine.add(prompt(name), sampling, name) for name, sampling in ASKED.items()}
    while engine.has_work():
        engine.step()
        check_references(engine)
    check_texts(requests, plain)
    steps = engine.trace.steps()
    assert any(step.preempted for step in steps)
    assert any(step.transfers.swap_in for step in steps) == (preemption == "swap")
    assert is_right_always(engine)
    assert engine.kv.num_available == engine.num_blocks


@pytest.mark.parametrize(
    ("late", "more"), spread([None, 4], [{}, {"repetition_penalty": 1.3, "frequency_penalty": 0.7}])
)
def test_samples_share_a_prompt_and_each_has_drafts_of_its_own(
    target, tapped_engine, late: int | None, more: dict[str, Any]
) -> None:
    sampling = SamplingParams(max_tokens=20, seed=5, n=3, **more)
    texts = []
    for draft in (None, target):
        engine, _ = tapped_engine(
            target, parts=Parts(draft_model=draft), late=late, num_drafts=3 if draft else 0, num_blocks=64, block_size=4
        )
        first = engine.add(prompt("shared"), sampling, "a")
        members = [first, *first.children]
        while engine.has_work():
            engine.step()
        texts.append([member.tokens for member in members])
    assert texts[0] == texts[1]
    assert any(step.transfers.copies for step in engine.trace.steps())
    assert is_right_always(engine)
    assert any(len(kept) == 3 for kept in kept_of(engine))


def test_a_draft_that_is_half_right_is_kept_as_far_as_it_is(target, drafts) -> None:
    engine = Engine(target, EngineConfig(num_blocks=64, num_drafts=4), Parts(draft_model=drafts["half"]))
    serve(engine, PURE)
    kept = [pair for step in kept_of(engine) for pair in step.values()]
    share = sum(num for num, _ in kept) / sum(num for _, num in kept)
    assert 0.2 < share < 0.9  # by weights and seeds that are fixed
    assert len({num for num, _ in kept}) > 2


@pytest.mark.parametrize("name", ["greedy", "drawn"])
def test_as_many_drafts_are_kept_where_steps_overlap(target, drafts, tapped_engine, name: str) -> None:
    """There a row is planned as if all drafts before it were right, and half of them are not."""
    kept = []
    for late in (None, 1, 2):
        engine, _ = tapped_engine(
            target, parts=Parts(draft_model=drafts["half"]), late=late, num_drafts=4, num_blocks=32, block_size=4
        )
        serve(engine, {name: ASKED[name]})
        pairs = [pair for step in kept_of(engine) for pair in step.values()]
        kept.append([num for num, drafts_of_row in pairs if drafts_of_row == 4])
    both = min(map(len, kept))  # near its end a request has fewer drafts, sooner where it is planned ahead
    assert both > 4
    assert kept[0][:both] == kept[1][:both] == kept[2][:both]
    assert len(set(kept[0][:both])) > 1


def test_held_requests_keep_the_draft_up_to_date(target, tapped_engine) -> None:
    """A held request has no drafts; another one finds its tokens in the cache, and is drafted well."""
    engine, _ = tapped_engine(target, parts=Parts(draft_model=target), num_drafts=3, num_blocks=64, block_size=4)
    engine.add(prompt("held"), SamplingParams(max_tokens=9, temperature=0), "held", holds=True)
    for token in range(8):
        engine.step()
        engine.append("held", token)
    engine.abort("held")
    follower = engine.add([*prompt("held"), *range(8)], SamplingParams(max_tokens=9, temperature=0), "follower")
    while engine.has_work():
        engine.step()
    assert follower.num_cached_tokens > len(prompt("held"))
    assert is_right_always(engine)


# --- where texts end -------------------------------------------------------------------------------------------------


def test_stop_strings_and_end_tokens_end_the_same_texts() -> None:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float64", "num_blocks": 64}
    prompts = ["def add(self, left, right):\n    return", "import os\n\ndef"]
    draft = load_model(course_model("draft"), torch.float64)
    usual = LLM(course_model("target"), **options)
    drafting = LLM(course_model("target"), parts=Parts(draft_model=draft), num_drafts=4, **options)
    for sampling in (
        SamplingParams(max_tokens=30, temperature=0, stop=["\n\n", "self."]),
        SamplingParams(max_tokens=30, temperature=0.8, seed=3, stop=["\n    "]),
        SamplingParams(max_tokens=25, seed=4, n=2, top_p=0.9),
    ):
        expected, found = usual.generate(prompts, sampling), drafting.generate(prompts, sampling)
        for mine, its in zip(found, expected, strict=True):
            for sample_of, other in zip(mine.outputs, its.outputs, strict=True):
                assert (sample_of.text, sample_of.token_ids) == (other.text, other.token_ids)
                assert sample_of.finish_reason == other.finish_reason
    kept = [num for step in kept_of(drafting.engine) for num, _ in step.values()]
    assert max(kept) == 4
    assert min(kept) == 0
    assert drafting.engine.kv.num_available == drafting.engine.num_blocks


@pytest.mark.parametrize("max_model_len", range(17, 23))
def test_nothing_is_written_behind_the_blocks_of_a_row(random_model, target, tapped_engine, max_model_len: int) -> None:
    """Also where both models end, and blocks are just enough for one token less than that."""
    ends = random_model("float64", max_position_embeddings=max_model_len)
    texts = []
    for draft in (None, ends):
        engine, _ = tapped_engine(
            target, parts=Parts(draft_model=draft), num_drafts=5 if draft else 0, block_size=4,
            num_blocks=-(-(max_model_len - 1) // 4), max_model_len=max_model_len,
        )  # fmt: skip
        if draft is not None:
            watch_writes(engine)
        request = engine.add(list(range(9)), SamplingParams(max_tokens=99, seed=1))
        while engine.has_work():
            engine.step()
        texts.append(request.tokens)
    assert len(texts[0]) == max_model_len
    assert texts[0] == texts[1]
    assert is_right_always(engine)


def watch_writes(engine: Engine) -> None:
    """The draft writes to blocks of the step's requests only."""
    cache = draft_of(engine).kv_cache
    write = cache.write

    def watched(layer: int, key: torch.Tensor, value: torch.Tensor, batch: Any) -> None:
        assert all(engine.block_pool.ref_count(slot // 4) and slot >= 0 for slot in batch.slot_mapping.tolist())
        write(layer, key, value, batch)

    cache.write = watched


# --- any schedule ----------------------------------------------------------------------------------------------------


@st.composite
def schedule(draw: st.DrawFn) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    requests = [
        {
            "prompt": draw(st.integers(1, 14)), "family": draw(st.integers(0, 1)), "arrival": draw(st.integers(0, 6)),
            "abort": draw(st.sampled_from([None, None, None, 3, 8])),
            "sampling": SamplingParams(
                max_tokens=draw(st.integers(1, 16)), seed=draw(st.integers(0, 99)),
                temperature=draw(st.sampled_from([0, 0.7, 1.5])), n=draw(st.sampled_from([1, 1, 1, 2])),
            ),
        }
        for _ in range(draw(st.integers(1, 5)))
    ]  # fmt: skip
    size = draw(st.sampled_from([1, 3, 4, 16]))
    return requests, {
        "block_size": size,
        "num_blocks": -(-30 // size) + draw(st.integers(0, 2 * 30 // size)),
        "max_num_seqs": draw(st.integers(1, 5)),
        "max_num_batched_tokens": draw(st.sampled_from([3, 9, 100])),
        "num_drafts": draw(st.integers(1, 5)),
        "prefix_cache": draw(st.sampled_from(["off", "hash", "radix"])),
        "seed": draw(st.integers(0, 1000)),
        "late": draw(st.sampled_from([None, None, 1, 2])),
        **draw(st.sampled_from([{}, {"preemption": "swap", "swap_bytes": 2**17}])),
    }


@pytest.mark.parametrize("kind", some(["half"], ["itself", "half", "other"]))
def test_any_schedule_of_requests_and_aborts_gives_the_same_texts(target, drafts, tapped_engine, kind: str) -> None:
    @settings(max_examples=examples(25), deadline=None, derandomize=True, database=None)
    @given(work=schedule())
    def same(work: tuple[list[dict[str, Any]], dict[str, Any]]) -> None:
        asked, options = work
        engine, _ = tapped_engine(target, parts=Parts(draft_model=drafts[kind]), **options)
        served = serve_at_times(engine, asked)
        for number, (members, a) in enumerate(zip(served, asked, strict=True)):
            expected = alone(target, a)
            for mine, text in zip(members, expected, strict=True):
                ended = mine.finish_reason != "abort"
                assert mine.tokens == (text if ended else text[: mine.num_tokens]), (number, mine.id)
        assert engine.kv.num_available == engine.num_blocks

    same()


def prompt_of(asked: dict[str, Any]) -> list[int]:
    return random.Random(asked["family"]).choices(range(VOCAB), k=asked["prompt"])


def serve_at_times(engine: Engine, asked: list[dict[str, Any]]) -> list[list[Request]]:
    served: dict[int, list[Request]] = {}
    for step in itertools.count():
        for number, a in enumerate(asked):
            if a["arrival"] == step:
                first = engine.add(prompt_of(a), a["sampling"], f"r{number}")
                served[number] = [first, *first.children]
            if a["abort"] == step and f"r{number}" in engine.requests:
                engine.abort(f"r{number}")
        engine.step()
        check_references(engine)
        if len(served) == len(asked) and not engine.has_work():
            break
    return [served[number] for number in range(len(asked))]


def alone(target: Any, asked: dict[str, Any]) -> list[list[int]]:
    engine = Engine(target, EngineConfig(block_size=64, num_blocks=4))
    first = engine.add(prompt_of(asked), asked["sampling"])
    members = [first, *first.children]
    while engine.has_work():
        engine.step()
    return [member.tokens for member in members]
