"""A draft model beside other parts of an engine: a sampler, 8 bits, memory, a process; and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import importlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from reference_impl.assembly.config import ConfigError, EngineConfig, course_model
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.model import load_model
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.sampler import sample
from reference_impl.assembly.split import split_engine
from reference_impl.interfaces import Row, SamplingParams, StepPlan
from tests.engine.conftest import FakeStore, draft_of
from tests.engine.test_draft_model import PURE, check_texts, is_right_always
from tests.engine.test_drafts import VOCAB, serve


def test_a_sampler_that_is_asked_verifies_what_is_drawn_as_ours_would(target) -> None:
    expected = {name: r.tokens for name, r in serve(Engine(target, EngineConfig(num_blocks=64)), PURE).items()}
    parts = Parts(draft_model=target, sampler=lambda logits, requests: sample(logits, requests))
    engine = Engine(target, EngineConfig(num_blocks=64, num_drafts=3), parts)
    check_texts(serve(engine, PURE), expected)
    assert is_right_always(engine)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "int4"])
def test_a_cache_of_8_bits_is_the_drafts_too(target, kv_dtype: str) -> None:
    config = EngineConfig(num_blocks=64, block_size=4, kv_dtype=kv_dtype)
    expected = {name: r.tokens for name, r in serve(Engine(target, config), PURE).items()}
    engine = Engine(target, dataclasses.replace(config, num_drafts=3), Parts(draft_model=target))
    check_texts(serve(engine, PURE), expected)
    assert draft_of(engine).kv_cache.data.dtype == engine.kv_cache.data.dtype != torch.float64
    assert is_right_always(engine)


def test_both_caches_are_paid_for(target, random_model) -> None:
    draft = random_model("float32", num_hidden_layers=3, num_key_value_heads=1)
    plain_engine = Engine(target, EngineConfig(kv_cache_bytes=2**20, preemption="swap", swap_bytes=2**19))
    config = EngineConfig(kv_cache_bytes=2**20, preemption="swap", swap_bytes=2**19, num_drafts=2)
    engine = Engine(target, config, Parts(draft_model=draft))
    caches = (engine.kv_cache, draft_of(engine).kv_cache)
    each = sum(cache.data[:, :, 0].nbytes for cache in caches)
    assert plain_engine.num_blocks > engine.num_blocks == 2**20 // each
    assert plain_engine.num_host_blocks > engine.num_host_blocks == 2**19 // each
    for cache in caches:
        assert cache.data.shape[2] == engine.num_blocks
        assert cache.host.host[0].shape[0] == engine.num_host_blocks


IN_THE_OTHER_PROCESS = """
import torch

from reference_impl.assembly.config import course_model
from reference_impl.assembly.model import load_model
from reference_impl.assembly.parts import Parts


def parts() -> Parts:
    return Parts(draft_model=load_model(course_model("draft"), torch.float64))
"""


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_the_draft_model_is_in_the_process_of_the_worker(
    preemption: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "has_a_draft_model.py").write_text(IN_THE_OTHER_PROCESS, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    make_parts = importlib.import_module("has_a_draft_model").parts
    folder, asked = course_model("draft"), SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    options: dict[str, Any] = {"kv_cache_bytes": 2**21, "preemption": preemption, "swap_bytes": 2**21}
    config = EngineConfig(num_drafts=4, **options)
    with pytest.raises(ValueError, match="these parts would be in the other process: draft_model; give them by make_"):
        split_engine(folder, config, dtype="float64", parts=make_parts())
    plain_engine = Engine(load_model(folder, torch.float64), EngineConfig(**options))
    engine = split_engine(folder, config, dtype="float64", make_parts=make_parts)
    texts = []
    for each in (plain_engine, engine):
        request = each.add([5, 17, 40, 9], asked, "a")
        while each.has_work():
            each.step()
        texts.append(request.tokens)
    engine.close()
    assert texts[0] == texts[1]
    assert is_right_always(engine)
    assert engine.num_blocks == plain_engine.num_blocks // 2
    assert engine.num_host_blocks == plain_engine.num_host_blocks // 2


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_draft_model_that_cannot_draft_for_the_target_is_refused_by_name(random_model, target) -> None:
    config = EngineConfig(num_blocks=8, num_drafts=2, block_size=4)
    window = partial(random_model, "float64", architecture="MistralForCausalLM", sliding_window=6)
    elsewhere = copy.copy(target)
    elsewhere.device = torch.device("meta")
    wrong: list[tuple[Any, str]] = [
        (random_model("float64", vocab_size=62), "61 tokens, found 62: take a draft whose .* Padding counts, too"),
        (random_model("float64", max_position_embeddings=100), r"for 128 tokens .* found 100: set max_model_len=100"),
        (window(), "Parts.draft_model, Decoder has layers with a sliding window of 6 tokens"),
        (elsewhere, "expected it on cpu, with the target, found it on meta"),
        ("Qwen/Qwen3-0.6B", "Parts.draft_model, str: expected a model, as load_model gives one, got 'Qwen"),
        (type(target), "expected a model, as load_model gives one"),
    ]
    for draft, text in wrong:
        with pytest.raises(ConfigError, match=text):
            Engine(target, config, Parts(draft_model=draft))
    with pytest.raises(ConfigError, match="the target has layers with a sliding window of 6 tokens"):
        Engine(window(), config, Parts(draft_model=target))
    with pytest.raises(ConfigError, match=r"Parts.draft_model, Decoder, and Parts.page_store are given"):
        Engine(target, config, Parts(draft_model=target, page_store=FakeStore(["now"])))
    short = dataclasses.replace(config, max_model_len=5)  # no window is left
    Engine(window(), short, Parts(draft_model=window()))


def test_a_draft_model_and_what_else_makes_drafts_are_refused(target, oracle) -> None:
    config = EngineConfig(num_blocks=8, num_drafts=2)
    with pytest.raises(ValueError, match="Parts.proposer and Parts.draft_model are given: only one can make the"):
        Engine(target, config, Parts(draft_model=target, proposer=oracle({}, 1.0, VOCAB)))
    with pytest.raises(ValueError, match="Parts.draft_model is given, and num_drafts is 0"):
        Engine(target, EngineConfig(num_blocks=8), Parts(draft_model=target))
    own = Engine(target, EngineConfig(num_blocks=8)).executor
    with pytest.raises(ValueError, match="Parts.draft_model is for the engine's own executor"):
        Engine(target, config, Parts(draft_model=target, executor=own))
    engine = Engine(target, config, Parts(draft_model=target))
    request = engine.add([1, 2], SamplingParams(max_tokens=9), "a")
    engine.step()
    step = engine.planner.step(StepPlan(2, (Row("a", 2, 1, True, 1, (5,)),)), {"a": request})
    with pytest.raises(ValueError, match="step 2 names drafts, and this worker's draft model makes them"):
        engine.executor.submit(step)
