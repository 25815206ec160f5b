"""What generation_config.json says of sampling is what a request that does not say it gets, as in vLLM."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from reference_impl import LLM, SamplingParams, course_model
from reference_impl.models.config_reader import ConfigError
from reference_impl.models.sampling_defaults import sampling_defaults

SAID = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.05, "max_new_tokens": 7}
OURS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.05, "max_tokens": 7}


def folder(place: Path, **said: Any) -> Path:
    place.mkdir(exist_ok=True)
    (place / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **said}))
    return place


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (SAID, OURS),
        ({"do_sample": True, "temperature": None, "num_beams": 4, "max_length": 20, "penalty_alpha": 0.5}, {}),
        ({"do_sample": False, "temperature": 0.0, "top_k": -1}, {"temperature": 0.0, "top_k": -1}),
        ({}, {}),
    ],
)
def test_what_vllm_takes_is_taken_and_said(
    said: Any, expected: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = folder(tmp_path, **said)
    assert sampling_defaults(place, "vllm") == sampling_defaults(None, "auto") == {}
    assert not caplog.records
    assert sampling_defaults(place, "auto") == expected
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * bool(expected)
    assert all(f"{name}={value!r}" in caplog.text for name, value in expected.items())
    assert ("generation_config.json" in caplog.text and "generation_config='vllm'" in caplog.text) == bool(expected)


@pytest.mark.parametrize(
    "said",
    [{"temperature": "hot"}, {"top_p": 1.5}, {"top_k": 0.5}, {"repetition_penalty": [1]}, {"max_new_tokens": 0}],
)
def test_what_cannot_be_is_named_with_its_file(said: dict[str, Any], tmp_path: Path) -> None:
    [name] = said
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {name}: expected .* got .*='vllm'$"):
        sampling_defaults(folder(tmp_path, **said), "auto")


def test_another_choice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="^generation_config: expected 'auto' or 'vllm', got 'no'$"):
        sampling_defaults(tmp_path, "no")


@pytest.fixture(scope="module")
def llms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LLM]:
    place = tmp_path_factory.mktemp("models") / "greedy"
    shutil.copytree(course_model("draft"), place)
    folder(place, temperature=0.0, max_new_tokens=5, repetition_penalty=1.3)
    return {how: LLM(place, dtype="float32", num_blocks=64, generation_config=how) for how in ("auto", "vllm")}


def test_requests_that_ask_for_nothing_get_them_and_others_do_not(llms: dict[str, LLM]) -> None:
    """As in vLLM: SamplingParams that are given are taken as they are."""
    prompt, asked = "def open_file(", SamplingParams(temperature=0, max_tokens=5, repetition_penalty=1.3)
    llm, plain = llms["auto"], llms["vllm"]
    expected = plain.generate(prompt, asked)[0].text
    assert llm.generate(prompt)[0].text == expected == "".join(llm.stream(prompt))
    message = [{"role": "user", "content": "open a file"}]
    assert llm.chat(message, chat_template="{{ messages[0].content }}")[0].text == (
        plain.chat(message, asked, chat_template="{{ messages[0].content }}")[0].text
    )
    assert len(llm.generate(prompt, SamplingParams(max_tokens=9, ignore_eos=True))[0].token_ids) == 9
    assert llm.get_default_sampling_params() == asked
    assert plain.get_default_sampling_params() == SamplingParams()
