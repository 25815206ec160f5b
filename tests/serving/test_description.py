"""The server against its own OpenAPI description, by schemathesis: what it describes is taken, all else refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("phases", "examples"), [("fuzzing", "4"), pytest.param("coverage,fuzzing", "15", marks=pytest.mark.slow)]
)
def test_requests_made_from_the_description_are_answered_as_it_says(
    serve: Any, until: Any, tmp_path: Path, phases: str, examples: str
) -> None:
    """Coverage goes to the ends of every field, with 1,700 requests. test_refusals.py has those that matter by name."""
    running = serve({"max_unfinished": 10_000}, max_model_len=48)  # so that an answer without a limit is short
    schemathesis = str(Path(sys.executable).with_name("schemathesis"))
    words = [
        schemathesis,
        "run",
        f"{running.url}/openapi.json",
        "--max-examples",
        examples,
        "--no-color",
        "--seed",
        "1",
    ]
    words += ["--request-timeout", "300", "--phases", phases, "--generation-database", "none"]
    # Random prompts are sometimes too long for a model of 48 positions: the 400 that says so is right.
    words += ["--exclude-checks", "positive_data_acceptance"]
    words += ["--suppress-health-check", "too_slow"]  # of a busy machine
    environment = {**os.environ, "COLUMNS": "120"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=3500, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:]
    assert "Tested: 14" in done.stdout, done.stdout[-3000:]
    until(running.is_idle, "nothing is left")


def test_the_servers_address_alone_says_what_is_there(server: Any) -> None:
    import httpx

    found = httpx.get(server.url)
    assert found.status_code == 200
    places = [place for value in found.json().values() for place in ([value] if isinstance(value, str) else value)]
    paths = [place for place in places if place.startswith("/")]
    assert {"/v1/models", "/health", "/metrics"} < set(paths)
    for path in paths:
        assert httpx.get(server.url + path).status_code in (200, 405), path  # 405: it takes a POST
