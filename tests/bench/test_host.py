"""`inferlab bench host`: what it measures is the engine's own step; how long that takes is nobody's to assert."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from reference_impl.bench import host
from reference_impl.cli import app


@pytest.mark.parametrize("penalties", [False, True])
def test_a_step_has_all_its_parts_and_a_message_that_does_not_grow_with_the_context(penalties: bool) -> None:
    short, long = (host.measure(4, length, penalties, steps=5) for length in (20, 700))
    assert short.keys() == {f"{name}_us" for name in ("step", "schedule", "plan", "submit", "update")} | {
        "message_bytes"
    }
    assert min(short.values()) >= 0  # a coarse clock may show no time at all
    assert 0 < short["message_bytes"] <= long["message_bytes"] < short["message_bytes"] + 40


def test_the_command_prints_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "CASES", ((1, 8, False), (3, 9, True)))
    monkeypatch.setattr(host, "STEPS", 3)
    threads = torch.get_num_threads()
    result = CliRunner().invoke(app, ["bench", "host", "--rounds", "1"])
    assert result.exit_code == 0, result.output
    assert [line[:32].strip() for line in result.output.splitlines()] == [
        "requests x context", "1 x 8 tokens", "3 x 9 tokens, penalties",
    ]  # fmt: skip
    assert torch.get_num_threads() == threads
