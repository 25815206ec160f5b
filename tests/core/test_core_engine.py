"""The core engine, made of core parts alone: what it writes is what the model alone would write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference_impl.core.alone import core_engine
from reference_impl.core.decoder import Decoder
from reference_impl.core.engine import Engine
from reference_impl.core.llm import LLM
from reference_impl.interfaces import (
    Batch,
    Event,
    GroupTables,
    Request,
    RequestArrived,
    RequestFinished,
    SamplingParams,
    StepDone,
)

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.9, top_k=20, top_p=0.95, min_p=0.01, seed=7, ignore_eos=True)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], list(range(1, 31)), [5] * 17]


class WithoutCache:
    """Causal attention of one sequence over its own keys and values, from the definition."""

    def plan(self, batch: Batch) -> None:
        pass

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, kv_cache: Any, batch: Batch) -> Tensor:
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), v)


def logits_of(model: Decoder, tokens: Sequence[int]) -> Tensor:
    """[vocab_size], of the token behind these, computed all anew."""
    n = len(tokens)
    at, lens, table = torch.arange(n), torch.tensor([n]).int(), torch.zeros(1, 1).int()
    batch = Batch(
        torch.tensor(tokens), at, torch.tensor([0, n]).int(), lens, torch.tensor([n - 1]), ("r",), (n,), (n,), 0, n,
        (GroupTables(None, at, table),), (0,) * model.config.num_layers,
    )  # fmt: skip
    with torch.inference_mode():
        return model(batch, None, WithoutCache())[0]  # type: ignore[arg-type]


def greedy_alone(model: Decoder, prompt: Sequence[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(logits_of(model, tokens).argmax()))
    return tokens[len(prompt) :]


def run(engine: Engine, *requests: Request, limit: int = 1000) -> list[list[int]]:
    """Until all are finished; their outputs. Then no block is used."""
    while engine.has_work():
        engine.step()
        assert (limit := limit - 1), "it does not come to an end"
    assert not engine.requests
    assert engine.kv.num_available == engine.num_blocks
    return [request.output_tokens for request in requests]


def serve(engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[list[int]]:
    return run(engine, *(engine.add(prompt, sampling) for prompt in prompts))


class Events(list[Event]):
    add = list.append

    def of(self, kind: type) -> list[Any]:
        return [event for event in self if isinstance(event, kind)]


def test_greedy_text_equals_a_loop_that_computes_everything_anew(model, make_engine) -> None:
    expected = [greedy_alone(model, prompt, GREEDY.max_tokens) for prompt in PROMPTS]
    assert serve(make_engine(), PROMPTS, GREEDY) == expected


@pytest.mark.parametrize("budget", [1, 3, 7])
def test_prompts_in_chunks_give_the_same_text_and_never_more_tokens_than_the_budget(budget: int, make_engine) -> None:
    events = Events()
    whole = serve(make_engine(), PROMPTS, GREEDY)
    assert serve(make_engine(max_num_batched_tokens=budget, trace=events), PROMPTS, GREEDY) == whole
    rows = [step.rows for step in events.of(StepDone)]
    assert max(sum(row.num_tokens for row in step) for step in rows) == budget
    assert any(not row.samples for step in rows for row in step), "no prompt was cut"


def test_where_blocks_run_out_requests_are_preempted_and_write_the_same_text(make_engine) -> None:
    events, whole = Events(), serve(make_engine(), PROMPTS, SAMPLED)
    assert serve(make_engine(num_blocks=14, trace=events), PROMPTS, SAMPLED) == whole
    assert sum(len(step.preempted) for step in events.of(StepDone)) >= 1


class ExactPrompts:
    """The smallest prefix index: a dict from a prefix, as tokens, to the block that holds its end. It forgets the
    longest prefixes first, so that none is continued."""

    def __init__(self, block_size: int):
        self.size, self.blocks = block_size, dict[tuple[bytes, tuple[int, ...]], int]()

    def match(self, tokens: Sequence[int], key: bytes) -> list[int]:
        found = []
        for end in range(self.size, len(tokens) + 1, self.size):
            block = self.blocks.get((key, tuple(tokens[:end])))
            if block is None:
                break
            found.append(block)
        return found

    def insert(self, tokens: Sequence[int], key: bytes, blocks: Sequence[int]) -> list[int]:
        return [
            self.blocks.setdefault((key, tuple(tokens[: (i + 1) * self.size])), block) for i, block in enumerate(blocks)
        ]

    def evict(self, num_blocks: int, evictable: Callable[[int], bool]) -> list[int]:
        by_length = sorted(self.blocks, key=lambda prefix: -len(prefix[1]))
        gone = [prefix for prefix in by_length if evictable(self.blocks[prefix])][:num_blocks]
        return [self.blocks.pop(prefix) for prefix in gone]

    def __len__(self) -> int:
        return len(self.blocks)


def test_a_prefix_index_is_plugged_in_by_hand_and_saves_what_was_computed(make_engine) -> None:
    prompts = [list(range(1, 21)), [*range(1, 17), 40, 41], list(range(1, 21))]
    expected = [serve(make_engine(), [prompt], GREEDY)[0] for prompt in prompts]
    engine = make_engine(index=ExactPrompts(4))
    found = []
    for prompt, text in zip(prompts, expected, strict=True):
        request = engine.add(prompt, GREEDY)
        assert run(engine, request) == [text]
        found.append(request.num_cached_tokens)
    assert found == [0, 16, 16]  # of the last one its end is computed again: its logits are needed


def test_a_full_cache_evicts_what_is_not_in_use(make_engine) -> None:
    prompts = [[first, *range(1, 20)] for first in range(30, 40)]
    expected = [serve(make_engine(), [prompt], GREEDY)[0] for prompt in prompts]
    engine = make_engine(index=(index := ExactPrompts(4)), num_blocks=20)
    for prompt, text in zip(prompts, expected, strict=True):
        assert serve(engine, [prompt], GREEDY) == [text]
    assert 0 < len(index) <= 20


@settings(max_examples=15, deadline=None)
@given(
    budget=st.integers(1, 40),
    blocks=st.integers(12, 64),
    seats=st.integers(1, 4),
    indexed=st.booleans(),
    late=st.lists(st.integers(0, 6), min_size=4, max_size=4),
)
def test_seeded_samples_do_not_depend_on_the_schedule(
    budget: int, blocks: int, seats: int, indexed: bool, late: list[int], model, make_engine
) -> None:
    sampling = [replace(SAMPLED, seed=seed) for seed in (1, 1, 2, 3)]
    expected = [serve(make_engine(), [p], s)[0] for p, s in zip(PROMPTS, sampling, strict=True)]
    engine = make_engine(
        num_blocks=blocks, max_num_batched_tokens=budget, max_num_seqs=seats,
        index=ExactPrompts(4) if indexed else None,
    )  # fmt: skip
    requests: dict[int, Request] = {}
    for step in range(7):
        for i, (prompt, params) in enumerate(zip(PROMPTS, sampling, strict=True)):
            if late[i] == step:
                requests[i] = engine.add(prompt, params)
        if engine.has_work():
            engine.step()
    assert run(engine, *(requests[i] for i in range(4))) == expected


def test_an_aborted_request_gives_back_its_blocks_and_its_neighbours_go_on(make_engine) -> None:
    events = Events()
    engine = make_engine(trace=events)
    gone, stays = engine.add(PROMPTS[0], GREEDY, "gone"), engine.add(PROMPTS[1], GREEDY)
    engine.step()
    engine.abort("gone")
    assert run(engine, stays) == serve(make_engine(), [PROMPTS[1]], GREEDY)
    assert (gone.finish_reason, stays.finish_reason) == ("abort", "length")
    assert [e.request_id for e in events.of(RequestArrived)] == ["gone", "0"]
    assert [(e.request_id, e.reason) for e in events.of(RequestFinished)] == [("gone", "abort"), ("0", "length")]


def test_a_step_that_failed_can_be_tried_again(make_engine, monkeypatch) -> None:
    engine = make_engine()
    request = engine.add(PROMPTS[0], GREEDY)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, "collect", lambda ticket: (_ for _ in ()).throw(OSError("the device is busy")))
        with pytest.raises(OSError, match="busy"):
            engine.step()
    assert run(engine, request) == serve(make_engine(), [PROMPTS[0]], GREEDY)


def test_what_only_features_have_is_refused_by_name(model, make_engine) -> None:
    engine = make_engine()
    for name, value in (
        ("n", 2),
        ("prompt_logprobs", 0),
        ("presence_penalty", 0.5),
        ("logit_bias", {1: 2}),
        ("min_tokens", 1),
        ("include_stop_str_in_output", True),
        ("skip_special_tokens", False),
    ):
        with pytest.raises(
            ValueError, match=rf"SamplingParams.{name}: the core engine has only .*reference_impl.Engine"
        ):
            engine.add([1], SamplingParams(**{name: value}))
    with pytest.raises(ValueError, match="KV cache 64 blocks of 4"):
        engine.add([1] * 200)
    windows = replace(model.config, layer_windows=(8, None))
    with pytest.raises(ValueError, match="sliding windows need reference_impl.Engine"):
        core_engine(type("Windowed", (), {"config": windows})(), num_blocks=4)  # type: ignore[arg-type]


def test_the_core_llm_generates_and_streams_token_ids_without_a_tokenizer(make_engine) -> None:
    llm = LLM(make_engine(), None)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == serve(make_engine(), PROMPTS, GREEDY)
    assert {output.finish_reason for output in outputs} == {"length"}
    assert "".join(llm.stream(PROMPTS[0], GREEDY)) == ""
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        llm.generate(PROMPTS[0], replace(GREEDY, stop=("x",)))
