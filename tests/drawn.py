"""The part inside pytest of a run that draws from tests which were tried before: `tests/unchanged.py` says which.

Registered by conftest.py, which every test depends on: so nothing of the repository is named here.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

SAMPLE = "INFERLAB_SAMPLE"  # the environment variable that `make test` sets
PLAN = ".venv/.unchanged.json"  # what the run found out when it began
THIRD = 3


@functools.cache
def _plan() -> dict[str, Any]:
    path = Path(__file__).resolve().parent.parent / PLAN
    made: dict[str, Any] = json.loads(path.read_text("utf-8")) if os.environ.get(SAMPLE) else {}
    return made


def is_drawn(nodeid: str, commit: str) -> bool:
    return int(hashlib.sha256(f"{commit} {nodeid}".encode()).hexdigest(), 16) % THIRD == 0


def is_left(nodeid: str, made: dict[str, Any]) -> bool:
    """Whether a test belongs to a unit that did not change, and is not drawn."""
    tried_before = any(nodeid.startswith(begins) and nodeid.endswith(ends) for begins, ends in made["unchanged"])
    return tried_before and not is_drawn(nodeid, made["commit"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if made := _plan():
        os.environ.pop(SAMPLE, None)  # what a test starts draws nothing
        left = [item for item in items if is_left(item.nodeid, made) and not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=left)
        known = set(map(id, left))
        items[:] = [item for item in items if id(item) not in known]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if (made := _plan()) and made["unchanged"]:
        terminalreporter.section("what was drawn")
        terminalreporter.line(
            f"Of {len(made['unchanged'])} notebooks and files of tests that compute and need nothing that has changed "
            f"since a whole run that passed recorded them: a third of the tests, drawn by {made['commit'][:12]}. "
            "To have all run: make test-all"
        )
