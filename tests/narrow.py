"""The part of a narrow run that is inside pytest: takes the planned tests, in the planned order, while there is time.

Registered by conftest.py. Without a plan (`tests/selection.py` makes one) it only remembers how long each test took, in
`.venv/.durations.json`: the next narrow run plans with that.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / ".venv" / ".durations.json"
QUICK = "INFERLAB_QUICK"  # set in a quick run: what can be sampled is
PLAN = "INFERLAB_PLAN"  # the environment variable with the plan's path: workers of xdist inherit it

AT_LEAST = 25.0  # seconds of tests in each process
_first: dict[str, float] = {}  # when this process began its first test
_took: dict[str, float] = defaultdict(float)
_passed: set[str] = set()


@functools.cache
def plan() -> dict[str, Any] | None:
    path = os.environ.get(PLAN)
    if not path:
        return None
    made: dict[str, Any] = json.loads(Path(path).read_text("utf-8"))
    return made | {"left": set(made["left"])}


def recorded(path: Path = RECORD) -> dict[str, float]:
    """Node id -> seconds; empty if nothing was recorded, or what was is damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        return {str(name): float(seconds) for name, seconds in json.loads(path.read_text("utf-8")).items()}
    return {}


def names_of(nodeid: str, folders: list[str]) -> set[str]:
    """The labs and chapters (`02_kv_cache`) that a test's parameters name."""
    parameters = nodeid.partition("[")[2]
    return {folder for folder in folders if folder in parameters}


def is_taken(nodeid: str, made: dict[str, Any]) -> bool:
    entry = made["files"].get(nodeid.partition("::")[0])
    if entry is None or nodeid in made["left"]:
        return False
    if entry["folders"] is None:
        return True
    named = names_of(nodeid, made["folders"])
    return bool(named & set(entry["folders"])) if named or entry["strict"] else True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    made = plan()
    if made is None:
        return
    taken = [item for item in items if is_taken(item.nodeid, made)]
    chosen = set(map(id, taken))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
    order = {name: place for place, name in enumerate(made["files"])}
    long = {name for name, seconds in made["expected"].items() if seconds > 2}
    # The short tests of a file first; otherwise in their order, in which they share fixtures.
    items[:] = sorted(taken, key=lambda item: (order[item.nodeid.partition("::")[0]], item.nodeid in long))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    made = plan()
    if not made or not made["deadline"]:
        return
    now, begun = time.time(), _first.get("test")
    _first.setdefault("test", now)
    if begun is None:
        return  # however late a busy machine begins, something is tried
    if now + made["expected"].get(item.nodeid, 1.0) > max(made["deadline"], begun + AT_LEAST):
        pytest.skip("the time of a quick run is up; `make test` runs this")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the process that the results come together in."""
    _took[report.nodeid] += report.duration
    if report.when == "call" and report.passed:
        _passed.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput") or not _passed or not RECORD.parent.is_dir():
        return
    known = recorded() | {name: round(_took[name], 2) for name in _passed}
    there = {name: (ROOT / name).exists() for name in {nodeid.partition("::")[0] for nodeid in known}}
    known = {nodeid: seconds for nodeid, seconds in known.items() if there[nodeid.partition("::")[0]]}
    new = RECORD.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(known), "utf-8")
    new.replace(RECORD)
