"""What fails while a request's output becomes text, log-probabilities or calls ends that request, and no other."""

from __future__ import annotations

from typing import Any

import pytest

from reference_impl.assembly.config import course_model
from reference_impl.assembly.llm import LLM
from reference_impl.features.chat.tool_calls import HermesParser
from reference_impl.interfaces import SamplingParams
from tests.picky import Picky

PROMPTS = ["def open_file(file):\n", "The for statement is used to"]
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> LLM:
    return LLM(course_model("draft"), dtype="float32", num_blocks=64, tool_call_parser="hermes")


@pytest.fixture
def llm(engine: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """Its tokenizer may be replaced."""
    monkeypatch.setattr(engine, "tokenizer", engine.tokenizer)
    return engine


def break_a_token(llm: LLM, at: int) -> Any:
    """The outputs as they were; from now on the tokenizer fails with token `at` of the first."""
    outputs = llm.generate(PROMPTS, GREEDY)
    bad = outputs[0].token_ids[at]
    assert bad not in outputs[0].token_ids[:at]
    assert bad not in outputs[1].token_ids
    assert llm.tokenizer is not None
    llm.tokenizer = Picky(llm.tokenizer, bad)  # type: ignore[assignment]
    return outputs


def assert_idle(llm: LLM) -> None:
    assert llm.engine.requests == {}
    assert llm.engine.kv.num_available == llm.engine.num_blocks


@pytest.mark.parametrize("options", [{}, {"stop": ["never there"]}, {"min_tokens": 2, "skip_special_tokens": False}])
def test_the_request_whose_text_fails_ends_with_an_error_and_the_others_go_on(llm: LLM, options: Any) -> None:
    before = break_a_token(llm, 5)
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, **options)
    failed, good = llm.generate(PROMPTS, sampling)
    assert (failed.finish_reason, failed.token_ids) == ("error", before[0].token_ids[:6])
    assert "no such token" in (failed.error or "")
    assert before[0].text.startswith(failed.text)
    assert failed.outputs[0].finish_reason == "error"
    assert (good.text, good.finish_reason) == (before[1].text, "length")
    assert_idle(llm)


def test_a_panic_of_the_tokenizers_library_ends_one_request_though_it_is_no_exception(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})  # the class that pyo3 raises
    monkeypatch.setattr(Picky, "error", panic)
    before = break_a_token(llm, 5)
    failed, good = llm.generate(PROMPTS, GREEDY)
    assert (failed.finish_reason, failed.token_ids) == ("error", before[0].token_ids[:6])
    assert "the tokenizers library cannot decode tokens" in (failed.error or "")
    assert (good.text, good.finish_reason) == (before[1].text, "length")
    assert_idle(llm)


def test_also_where_the_request_ends_with_that_token(llm: LLM) -> None:
    before = break_a_token(llm, 5)
    failed, good = llm.generate(PROMPTS, SamplingParams(max_tokens=6, temperature=0))
    assert (failed.finish_reason, failed.token_ids) == ("error", before[0].token_ids[:6])
    assert good.token_ids == before[1].token_ids[:6]
    assert llm.engine.trace.events[-1].reason in ("error", "length")
    assert_idle(llm)


def test_a_stream_says_why(llm: LLM) -> None:
    before = break_a_token(llm, 5)
    with pytest.raises(RuntimeError, match="no such token"):
        "".join(llm.stream(PROMPTS[0], GREEDY))
    assert "".join(llm.stream(PROMPTS[1], GREEDY)) == before[1].text
    assert_idle(llm)


def test_a_prompt_whose_text_fails_is_not_left_in_the_engine(llm: LLM) -> None:
    before = break_a_token(llm, 5)
    with pytest.raises(Exception, match="no such token"):
        llm.generate([before[0].token_ids[5:6], PROMPTS[1]], GREEDY)
    assert_idle(llm)
    assert llm.generate(PROMPTS[1], GREEDY)[0].text == before[1].text


def test_log_probabilities_that_cannot_be_named_end_their_request_alone(llm: LLM) -> None:
    before = break_a_token(llm, 5)
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=0, detokenize=False)
    failed, good = llm.generate(PROMPTS, sampling)
    assert (failed.finish_reason, failed.token_ids) == ("error", before[0].token_ids)
    assert good.finish_reason == "length"
    assert good.outputs[0].logprobs is not None
    assert_idle(llm)


def test_calls_that_cannot_be_read_end_their_answer_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [[{"role": "user", "content": text}] for text in PROMPTS]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    before = llm.chat(messages, GREEDY, tools=tools)
    push = HermesParser.push

    def fails(self: HermesParser, text: str) -> Any:
        if text == before[0].text:
            raise KeyError("a bug")
        return push(self, text)

    monkeypatch.setattr(HermesParser, "push", fails)
    failed, good = llm.chat(messages, GREEDY, tools=tools)
    assert failed.finish_reason == "error"
    assert "a bug" in (failed.error or "")
    assert good.text == before[1].text


def test_an_interrupt_ends_what_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is nobody's output that fails."""
    before = break_a_token(llm, 5)
    monkeypatch.setattr(Picky, "error", KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    assert_idle(llm)
    assert llm.generate(PROMPTS[1], GREEDY)[0].text == before[1].text
