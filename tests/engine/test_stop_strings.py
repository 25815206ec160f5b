"""A stop string is found wherever it falls: across tokens, chunks, preemptions, prefix hits, and pieces of a stream."""

from __future__ import annotations

import random
from typing import Any

import pytest

from reference_impl.assembly.config import course_model
from reference_impl.assembly.llm import LLM
from reference_impl.interfaces import SamplingParams

PROMPT = "The for statement is used to"
TIGHT: tuple[dict[str, Any], ...] = (
    {},
    {"max_num_batched_tokens": 3},
    {"num_blocks": 10, "block_size": 4, "max_num_batched_tokens": 7, "prefix_cache": "off"},
    {"num_blocks": 10, "block_size": 4, "preemption": "swap", "swap_bytes": 2**20, "prefix_cache": "radix"},
)


def params(stop: list[str] | None = None, max_tokens: int = 24) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, stop=stop or ())


@pytest.fixture(scope="module")
def whole_text() -> str:
    return LLM(course_model("target"), dtype="float32").generate(PROMPT, params())[0].text


@pytest.mark.parametrize("options", TIGHT, ids=str)
@pytest.mark.parametrize("every", [11, pytest.param(5, marks=pytest.mark.slow)])
def test_the_text_ends_before_its_first_stop_string_however_the_work_is_cut(
    options, every: int, whole_text: str
) -> None:
    llm = LLM(course_model("target"), dtype="float32", **({"num_blocks": 64} | options))
    rng = random.Random(4)
    places = [(i, rng.randint(1, 6)) for i in range(0, len(whole_text) - 6, every)]
    stops = [whole_text[i : i + length] for i, length in places]
    outputs = []
    for first in range(0, len(stops), 2):  # two at a time and one that goes on, so that they are in each other's way
        batch = [params(["never there"]), *(params([stop, "never there"]) for stop in stops[first : first + 2])]
        outputs += llm.generate([PROMPT] * len(batch), batch)[1:]
    for stop, output in zip(stops, outputs, strict=True):
        assert output.text == whole_text[: whole_text.find(stop)]
        assert output.finish_reason == "stop"
    if "num_blocks" in options:
        assert any(step.preempted for step in llm.engine.trace.steps())
    assert llm.engine.kv.num_available == llm.engine.num_blocks


@pytest.mark.parametrize("options", TIGHT, ids=str)
@pytest.mark.parametrize("every", [17, pytest.param(7, marks=pytest.mark.slow)])
def test_a_stream_never_shows_a_piece_of_a_stop_string(options, every: int, whole_text: str) -> None:
    llm = LLM(course_model("target"), dtype="float32", **({"num_blocks": 64} | options))
    for i in range(3, len(whole_text) - 8, every):
        stop = whole_text[i : i + 8]
        shown = ""
        other = llm.stream(PROMPT[5:], params(max_tokens=9))  # somebody else's steps move this stream too
        next(other)
        for piece in llm.stream(PROMPT, params([stop])):
            shown += piece
            assert whole_text[: whole_text.find(stop)].startswith(shown)
        assert shown == whole_text[: whole_text.find(stop)]
        other.close()
    assert llm.engine.requests == {}


def test_each_sample_of_a_prompt_stops_by_itself() -> None:
    llm = LLM(course_model("target"), dtype="float32", num_blocks=64)
    sampling = SamplingParams(max_tokens=40, temperature=1.5, n=5, seed=3, ignore_eos=True)
    free = llm.generate(PROMPT, sampling)[0]
    texts = [free.text, *(other.text for other in free.others)]
    stop = next(a for a in texts[0] if texts[0].index(a) > 3)
    stopping = SamplingParams(max_tokens=40, temperature=1.5, n=5, seed=3, ignore_eos=True, stop=stop)
    first = llm.generate(PROMPT, stopping)[0]
    for sample, text in zip((first, *first.others), texts, strict=True):
        assert sample.text == text.split(stop)[0]
        assert sample.finish_reason == ("stop" if stop in text else "length")
