"""Inside pytest, in a run that `run.py` planned: leaves out what need not run, and says what each test took.

Where the run records, it also has `tracing.py` write what each test enters to a file of that test's; what fixtures of a
module do, and imports, to the file `shared`.
"""

from __future__ import annotations

import json
import linecache
import os
import resource
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.selection.record import calibrate, short_name

JOB = "INFERLAB_JOB"  # the path of what `run.py` asks of one process of pytest
COST = "INFERLAB_COST"  # a file to which tests/warm.py adds the CPU seconds of a fork, which is no child of a test


def register(config: pytest.Config) -> None:
    if path := os.environ.pop(JOB, None):
        config.pluginmanager.register(Job(Path(path)))


class Job:
    """What `run.py` says to this process, and what it says back."""

    def __init__(self, path: Path):
        asked = json.loads(path.read_text("utf-8"))
        self.leave, self.folder = asked["leave"], path.parent
        self.tests: dict[str, dict[str, Any]] = {}
        self.left = 0
        self.tracing = sys.modules.get("inferlab_tracing") if asked["trace"] else None
        self.cost = self.folder / "cost"
        os.environ[COST] = str(self.cost)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        def stays(item: pytest.Item) -> bool:
            return short_name(item.nodeid) not in self.leave.get(item.nodeid.partition("::")[0], ())

        left = [item for item in items if not stays(item)]
        config.hook.pytest_deselected(items=left)
        self.left = len(left)
        items[:] = filter(stays, items)
        if self.tracing:
            for module in list(sys.modules.values()):
                if getattr(module, "__loader__", None) is config.pluginmanager.rewrite_hook:  # it has no marks
                    self.tracing.note(f"tests {os.path.relpath(str(module.__file__), self.tracing.ROOT)}")

    def _seconds(self) -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        forks = sum(map(float, self.cost.read_text().split())) if self.cost.exists() else 0.0
        return forks + sum(each.ru_utime + each.ru_stime for each in used)

    def _trace(self, name: str) -> None:
        if self.tracing:
            self.tracing.switch(str(self.folder / name))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        entry = {"slow": item.get_closest_marker("slow") is not None, "failed": False, "skipped": "", "say": []}
        self.tests[item.nodeid] = entry
        entry["trace"] = f"{len(self.tests)}.trace"
        if self.tracing:
            linecache.clearcache()  # what one test reads of a source the next one would not read again
        self._trace(entry["trace"])
        before = self._seconds()
        try:
            return (yield)
        finally:
            entry["seconds"] = self._seconds() - before
            self._trace("shared")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        if fixturedef.scope == "function" or not self.tracing:
            return (yield)
        before = os.environ[self.tracing.TRACE]
        self._trace("shared")
        try:
            return (yield)
        finally:
            self.tracing.switch(before)

    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        if nextitem is None or nextitem.path != item.path:
            self._trace("shared")  # here fixtures of the module end

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        entry = self.tests[report.nodeid]
        entry["failed"] |= report.failed
        if report.skipped:
            where = report.longrepr
            entry["skipped"] = where[2] if isinstance(where, tuple) else str(where)
        entry["say"] += [str(text) for key, text in report.user_properties if key == "say" and report.when == "call"]

    def pytest_sessionfinish(self) -> None:
        made = {"tests": self.tests, "left": self.left, "loop": calibrate()}
        (self.folder / "result.json").write_text(json.dumps(made), "utf-8")
