"""A server gives requests the sampling defaults of the model's generation_config.json, as vLLM does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from reference_impl import LLM, SamplingParams, course_model
from reference_impl.serving.protocol import ChatRequest, CompletionRequest

SAID = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.05, "max_tokens": 7}
SENT = {"temperature": 1.0, "top_k": -1, "top_p": 1, "min_p": 0, "repetition_penalty": 1}


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_fields_that_a_client_sends_win_and_null_is_not_sent(kind: Any) -> None:
    said = {"prompt": "a"} if kind is CompletionRequest else {"messages": [{"role": "user", "content": "a"}]}
    assert kind(**said).sampling(30, None, None, {}) == SamplingParams(max_tokens=30)
    assert kind(**said, top_p=None).sampling(30, None, None, SAID) == SamplingParams(**SAID)
    assert kind(**said, **SENT).sampling(6, None, None, SAID) == SamplingParams(max_tokens=6)


def test_answers_and_description_have_them(serve: Any, process: bool, serial: LLM, tmp_path: Path) -> None:
    """max_new_tokens bounds every answer, as in vLLM."""
    folder, prompt = tmp_path / "greedy", "def open_file("
    shutil.copytree(course_model("draft"), folder)
    said = {"temperature": 0.0, "max_new_tokens": 5, "repetition_penalty": 1.3}
    (folder / "generation_config.json").write_text(json.dumps(said))
    asked = SamplingParams(temperature=0, max_tokens=5, repetition_penalty=1.3, ignore_eos=True)
    expected = serial.generate(prompt, asked)[0].text
    running = serve(process=process, folder=folder)
    body: dict[str, Any] = {"prompt": prompt, "ignore_eos": True}
    answers = [
        httpx.post(f"{running.url}/v1/completions", json=body | more, timeout=600).json()
        for more in ({}, {"max_tokens": 12}, {"max_tokens": 3})
    ]
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [5, 5, 3]
    assert {answer["choices"][0]["text"] for answer in answers[:2]} == {expected}
    described = httpx.get(f"{running.url}/openapi.json", timeout=600).json()["components"]["schemas"]
    for kind in ("CompletionRequest", "ChatRequest"):
        fields = described[kind]["properties"]
        assert [fields[name]["default"] for name in ("temperature", "repetition_penalty", "top_p")] == [0.0, 1.3, 1.0]
        assert "at most 5" in fields["max_tokens"]["description"]
