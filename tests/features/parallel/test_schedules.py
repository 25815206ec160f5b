"""Whatever the schedule, ranks write the texts of one process: chunks, prefix hits, preemption, samples, drafts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
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
from reference_impl.assembly.ranks import ranked_engine
from reference_impl.interfaces import Request, SamplingParams
from reference_impl.observe.trace import DraftUse
from tests.examples import examples

VOCAB = 97
KINDS: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 2},
    {"temperature": 1.0, "prompt_logprobs": 1},
    {"temperature": 1.0, "n": 2},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "logprobs": 1},
    {"temperature": 0.8, "min_p": 0.02, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
]


@st.composite
def workloads(draw: st.DrawFn) -> tuple[list[tuple[list[int], SamplingParams]], dict[str, Any]]:
    shared = random.Random(7).choices(range(VOCAB), k=draw(st.integers(0, 20)))
    asked = [
        (
            [*shared, *random.Random(i).choices(range(VOCAB), k=draw(st.integers(1, 25)))],
            SamplingParams(
                max_tokens=draw(st.integers(1, 12)), seed=i, ignore_eos=True, **draw(st.sampled_from(KINDS))
            ),
        )
        for i in range(draw(st.integers(1, 4)))
    ]
    block_size = draw(st.sampled_from([2, 4, 16]))
    longest = max(len(prompt) + s.max_tokens for prompt, s in asked)
    num_blocks = -(-longest // block_size) + draw(st.sampled_from([1, 2, 30]))
    drafts = draw(st.sampled_from(["off", "off", "ngram", "early-exit", "lookahead"]))
    return asked, {
        "block_size": block_size, "num_blocks": num_blocks, "speculative": drafts,
        "max_num_seqs": draw(st.integers(1, 5)), "max_num_batched_tokens": draw(st.sampled_from([5, 9, 200])),
        "prefix_cache": draw(st.sampled_from(["off", "hash", "radix"])),
        "preemption": draw(st.sampled_from(["recompute", "swap"])),
        "sampling_noise": draw(st.sampled_from(["one-number", "gumbel"])),
        "overlap": draw(st.sampled_from(["auto", "off"])),
    }  # fmt: skip


@contextmanager
def closing(engine: Engine) -> Iterator[Engine]:
    try:
        yield engine
    finally:
        engine.close()


def serve(engine: Engine, asked: list[tuple[list[int], SamplingParams]]) -> list[Request]:
    firsts = [engine.add(prompt, sampling, f"r{i}") for i, (prompt, sampling) in enumerate(asked)]
    while engine.has_work():
        engine.step()
    return [request for first in firsts for request in (first, *first.children)]


def check_alike(found: list[Request], expected: list[Request]) -> None:
    for mine, its in zip(found, expected, strict=True):
        assert (mine.id, mine.tokens, mine.finish_reason) == (its.id, its.tokens, its.finish_reason)
        for name in ("logprobs", "prompt_logprobs"):
            for a, b in zip(getattr(mine, name), getattr(its, name), strict=True):
                assert (a is None) == (b is None)
                assert a is None or a.logprob == pytest.approx(b.logprob, abs=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.models.conftest import _build

    path = tmp_path_factory.mktemp("model")
    _build("llama_biases", num_attention_heads=6, num_key_value_heads=3).to(torch.float64).save_pretrained(path)
    return path


@given(workload=workloads(), size=st.sampled_from([2, 3, 6]))
@settings(max_examples=examples(20))
def test_texts_are_those_of_one_process(folder: Path, workload: Any, size: int) -> None:
    asked, options = workload
    plain = EngineConfig(num_blocks=200, prefix_cache="off", sampling_noise=options["sampling_noise"])
    expected = serve(Engine(load_model(folder, torch.float64), plain), asked)
    config = EngineConfig(**options, tensor_parallel_size=size)
    with closing(ranked_engine(folder, config, dtype="float64", ranks="threads")) as engine:
        check_alike(serve(engine, asked), expected)
        assert engine.kv.num_available == engine.num_blocks


def test_a_draft_model_is_whole_on_each_rank(folder: Path) -> None:
    asked = [([5, 9, 3] * 4, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))]
    expected = serve(Engine(load_model(folder, torch.float64), EngineConfig(num_blocks=50)), asked)
    config = EngineConfig(num_blocks=50, speculative="draft", adaptive_drafts="off", tensor_parallel_size=2)
    make_parts = partial(draft_of, folder)
    with closing(ranked_engine(folder, config, dtype="float64", make_parts=make_parts, ranks="threads")) as engine:
        check_alike(serve(engine, asked), expected)
        assert DraftUse.of(engine.trace.steps()).num_accepted_tokens > 5, "its drafts are the target's own tokens"


def draft_of(folder: Path) -> Parts:
    return Parts(draft_model=load_model(folder, torch.float64))


@pytest.mark.parametrize("method", ["eagle", "mtp", "medusa"])
def test_heads_on_hidden_states_read_embedding_and_logits_of_all_ranks(method: str) -> None:
    prompt, sampling = "class Stack:", SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    options: dict[str, Any] = {"dtype": "float64", "device": "cpu", "num_blocks": 60}
    drafts = {"speculative": method, "draft_model": course_model(method), "adaptive_drafts": "off"}
    expected = LLM(course_model("target"), **options).generate(prompt, sampling)[0].outputs[0].token_ids
    llm = LLM(course_model("target"), **options, **drafts, tensor_parallel_size=2, worker="threads")
    with closing(llm.engine) as engine:
        assert llm.generate(prompt, sampling)[0].outputs[0].token_ids == expected
        assert DraftUse.of(engine.trace.steps()).num_accepted_tokens > 0


@pytest.mark.parametrize("method", ["draft", "early-exit"])
def test_ranks_make_drafts_under_a_grammar_at_the_same_time(method: str) -> None:
    """The forward pass begins where the host asks for drafts: asked one by one, a rank waited in it for the others."""
    sampling = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, bad_words=["a", "self"])
    options: dict[str, Any] = {"dtype": "float64", "device": "cpu", "num_blocks": 60}
    drafts: dict[str, Any] = {"speculative": method, "num_drafts": 2, "adaptive_drafts": "off", "step_seconds": 5}
    model = {"draft_model": course_model("draft")} if method == "draft" else {}
    expected = LLM(course_model("draft"), **options).generate([[5, 9, 3]], sampling)[0].outputs[0].token_ids
    ranks: dict[str, Any] = {"tensor_parallel_size": 2, "worker": "threads"}
    llm = LLM(course_model("draft"), **options, **drafts, **model, **ranks)
    with closing(llm.engine):
        assert llm.generate([[5, 9, 3]], sampling)[0].outputs[0].token_ids == expected
