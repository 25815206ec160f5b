"""A server whose drafts are kept by a lossy rule says so, wherever a client or an operator may look."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from reference_impl import course_model
from reference_impl.models.embedding_defaults import EmbeddingDefaults
from reference_impl.serving import engines
from reference_impl.serving import server as server_module
from tests.serving.test_observability import COMPLETIONS, metrics

CHAT = "/v1/chat/completions"
NGRAM = {"speculative": "ngram", "adaptive_drafts": "off", "num_drafts": 3}


@pytest.mark.parametrize(("acceptance", "process"), [("exact", False), ("typical", True)])
def test_answers_streams_metrics_and_status_name_the_rule(serve: Any, acceptance: str, process: bool) -> None:
    running = serve(process=process, acceptance=acceptance, num_blocks=64, **NGRAM)
    expected = None if acceptance == "exact" else acceptance
    asked = {"max_tokens": 24, "ignore_eos": True, "temperature": 1, "seed": 3}
    bodies = {
        COMPLETIONS: asked | {"prompt": "x = [1, 2, 3, 4]\n" * 8},
        CHAT: asked | {"messages": [{"role": "user", "content": "x = [1, 2]\n" * 8}]},
    }
    found: list[dict[str, Any]] = []
    with httpx.Client(base_url=running.url, timeout=600) as client:
        for path, body in bodies.items():
            found.append(client.post(path, json=body).json())
            options = {"stream": True, "stream_options": {"include_usage": True}}
            with client.stream("POST", path, json=body | options) as stream:
                found += [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
        assert client.get("/status.json").json()["acceptance"] == acceptance
    assert len(found) > 2 * 4
    assert {one.get("acceptance") for one in found} == {expected}
    counted = metrics(running.url)
    rows, lossy = (counted[f"inferlab:spec_decode_num_{name}drafts_total"] for name in ("", "lossy_"))
    assert rows > 0
    assert lossy == (rows if expected else 0)


def test_it_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Engine:  # as far as a server that does not run asks for it
        def __init__(self, make: Any, prompts: Any, restarts: Any):
            self.prompts, self.vocab_size, self.max_model_len = prompts, 4096, 2048
            self.acceptance, self.sampling_defaults = make.keywords["acceptance"], {}
            self.embedding_defaults = EmbeddingDefaults()

    monkeypatch.setattr(engines, "SupervisedEngine", Engine)
    for acceptance in ("exact", "typical"):
        assert not caplog.records
        made = server_module.make(course_model("draft"), "127.0.0.1", 0, name="course", acceptance=acceptance)
        made._socket.close()
    assert "kept by typical acceptance, which is lossy" in caplog.text
