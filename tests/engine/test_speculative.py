"""`speculative="ngram"` and "suffix", however they are asked for: the text of plain decoding, in fewer steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from reference_impl.assembly.config import EngineConfig, course_model
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.llm import LLM
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.split import split_engine
from reference_impl.core.scheduler import Scheduler
from reference_impl.features.speculative.ngram import NgramProposer
from reference_impl.features.speculative.suffix import SuffixProposer
from reference_impl.interfaces import Request, SamplingParams
from reference_impl.observe.timeline import lives
from reference_impl.observe.trace import DraftUse

METHODS = ("ngram", "suffix")
VOCAB = 61
ASKED = {
    "greedy": SamplingParams(max_tokens=60, temperature=0),
    "drawn": SamplingParams(max_tokens=40, seed=7, temperature=0.4, logprobs=2),
    "filtered": SamplingParams(max_tokens=40, seed=8, temperature=0.7, top_k=9, top_p=0.9, min_p=0.01),
    "penalised": SamplingParams(max_tokens=30, temperature=0, repetition_penalty=1.4, frequency_penalty=0.4),
    "several": SamplingParams(max_tokens=20, seed=2, temperature=0.3, n=3),
    "ends": SamplingParams(max_tokens=50, temperature=0, stop_token_ids=(3, 4, 5, 6)),
}


def prompt(name: str) -> list[int]:
    part = random.Random(name).choices(range(VOCAB), k=5)
    return part * 3


def outputs(engine: Engine) -> dict[str, list[int]]:
    requests: list[Request] = []
    for name, sampling in ASKED.items():
        parent = engine.add(prompt(name), sampling, name)
        requests += [parent, *parent.children]
    while engine.has_work():
        engine.step()
    assert engine.kv.num_available == engine.num_blocks
    return {request.id: request.tokens for request in requests}


def kept_by(engine: Any) -> dict[str, Any]:
    """What the engine's proposer keeps, by request."""
    proposer = engine.scheduler.host_proposer
    return dict(proposer._indexes if isinstance(proposer, NgramProposer) else proposer._known)


@pytest.fixture(scope="module")
def model(random_model: Callable) -> Any:
    return random_model("float64", max_position_embeddings=128)


@pytest.fixture(scope="module")
def plain(model: Any) -> dict[str, list[int]]:
    return outputs(Engine(model, EngineConfig(num_blocks=200)))


@pytest.mark.parametrize("options", [
    {}, {"num_drafts": 1}, {"num_drafts": 9, "block_size": 3}, {"max_num_batched_tokens": 11}, {"prefix_cache": "off"},
    {"num_blocks": 20, "block_size": 4}, {"num_blocks": 20, "block_size": 4, "preemption": "swap"},
    {"batch_invariant": True},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("method", METHODS)
def test_the_text_is_that_of_plain_decoding(model, plain, method: str, options: dict[str, Any]) -> None:
    options = {"num_blocks": 200, "adaptive_drafts": "off"} | options
    engine = Engine(model, EngineConfig(speculative=method, **options))  # type: ignore[arg-type]
    assert outputs(engine) == plain
    use = DraftUse.of(engine.trace.steps())
    assert use.num_drafts > 10
    assert 0 < use.num_accepted_tokens < use.num_draft_tokens
    assert list(use.accepted_per_position) == sorted(use.accepted_per_position, reverse=True)
    assert len(use.accepted_per_position) <= engine.config.num_drafts == options.get("num_drafts", 4)
    assert kept_by(engine) == {}


@pytest.mark.parametrize("method", METHODS)
def test_nothing_of_an_aborted_request_is_kept(model, method: str) -> None:
    engine = Engine(model, EngineConfig(num_blocks=60, speculative=method, adaptive_drafts="off"))
    for name in ("a", "b"):
        engine.add(prompt(name), SamplingParams(max_tokens=60, temperature=0), name)
    for _ in range(4):
        engine.step()
    assert set(kept_by(engine)) == {"a", "b"}
    engine.abort("a")
    engine.abort("b")
    assert kept_by(engine) == {}


@pytest.mark.parametrize("method", METHODS)
def test_in_two_processes(method: str) -> None:
    folder, sampling = course_model("draft"), SamplingParams(max_tokens=40, temperature=0)
    texts = {}
    for how in ("off", method):
        engine = split_engine(folder, EngineConfig(num_blocks=40, max_model_len=256, speculative=how))
        try:
            request = engine.add([5, 6, 7, 8] * 4, sampling)
            while engine.has_work():
                engine.step()
            texts[how] = request.tokens
            assert (DraftUse.of(engine.trace.steps()).num_drafts > 0) == (how != "off")
        finally:
            engine.close()
    assert texts["off"] == texts[method]


def test_text_that_repeats_takes_fewer_steps_and_the_timeline_says_what_was_kept() -> None:
    sampling = SamplingParams(max_tokens=40, temperature=0)
    asked = {"method": "ngram", "num_speculative_tokens": 3}
    llm = LLM(course_model("target"), dtype="float64", speculative_config=asked, adaptive_drafts="off")
    ids = [*range(20, 30)] * 5
    plainly = LLM(course_model("target"), dtype="float64").generate([ids], sampling)[0]
    assert llm.generate([ids], sampling)[0].outputs[0].token_ids == plainly.outputs[0].token_ids
    steps = list(llm.engine.trace.steps())
    use = DraftUse.of(steps)
    assert len(steps) == 40 - use.num_accepted_tokens
    slices = [one.args for life in lives(llm.engine.trace.events) for one in life.steps if "drafts" in one.args]
    assert sum(args["drafts"] for args in slices) == use.num_draft_tokens > 0
    assert sum(args["accepted"] for args in slices) == use.num_accepted_tokens > 0


@pytest.mark.parametrize("options", [
    {"adaptive_drafts": "off"}, {"speculative": "draft", "num_drafts": 2}, {"worker": "process"},
], ids=str)  # fmt: skip
def test_a_draft_model_named_by_its_folder_drafts(options: dict[str, Any]) -> None:
    asked = [SamplingParams(max_tokens=24, temperature=0), SamplingParams(max_tokens=24, temperature=0.7, seed=4)]
    prompts = ["def open_file(file):\n", "class Stack:\n"]
    target, common = course_model("target"), {"dtype": "float64", "num_blocks": 60}
    plain = LLM(target, **common).generate(prompts, asked)  # type: ignore[arg-type]
    llm = LLM(target, draft_model=course_model("draft"), **common, **options)  # type: ignore[arg-type]
    try:
        assert [output.token_ids for output in llm.generate(prompts, asked)] == [output.token_ids for output in plain]
        use = DraftUse.of(llm.engine.trace.steps())
        assert use.num_drafts > 0
        if options.get("adaptive_drafts") == "off":
            assert 0 < use.num_accepted_tokens < use.num_draft_tokens
            assert len(use.accepted_per_position) == 4
    finally:
        llm.engine.close()


def test_a_draft_model_is_asked_for_by_name_and_only_one_method_can_be() -> None:
    with pytest.raises(ValueError, match=r"speculative='draft' needs a draft model"):
        LLM(course_model("draft"), speculative="draft")
    with pytest.raises(ValueError, match=r"draft_model is given, a smaller model .* and speculative='ngram'"):
        LLM(course_model("draft"), draft_model=course_model("draft"), speculative="ngram")


@pytest.mark.parametrize("part", [
    {"host_proposer": NgramProposer()}, {"host_proposer": SuffixProposer()}, {"scheduler": Scheduler(None, 1, 1)},  # type: ignore[arg-type]
])  # fmt: skip
def test_a_second_proposer_or_a_scheduler_that_would_ask_none_is_refused(model, part: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"speculative='ngram' brings a proposer.*Parts.{next(iter(part))}"):
        Engine(model, EngineConfig(num_blocks=20, speculative="ngram"), Parts(**part))


@pytest.mark.parametrize("wrong", [{}, {"method": "ngram", "prompt_lookup_max": 3}, "ngram", {"method": "eagle3"}])
def test_what_is_not_implemented_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(ValueError, match="speculative"):
        LLM(course_model("draft"), speculative_config=wrong)


@pytest.mark.parametrize("method", [{"method": "eagle"}, {"method": "draft_model"}, {}])
def test_vllms_name_for_the_draft_model_is_answered_with_ours(method: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="here: draft_model='a folder'"):
        LLM(course_model("draft"), speculative_config={**method, "model": "a folder", "num_speculative_tokens": 2})
