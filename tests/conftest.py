"""Markers of tests that need something of the machine: skipped where it is missing, and the run ends by saying so.

With INFERLAB_CI=1 a run fails if anything but a gpu test was skipped.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable

import pytest


def _no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def _no_bwrap() -> str | None:
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    command = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--dev", "/dev", "true"]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return None if tried.returncode == 0 else f"bubblewrap cannot isolate here: {tried.stderr.strip()}"


def _no_program(*alternatives: str) -> Callable[[], str | None]:
    return lambda: None if any(map(shutil.which, alternatives)) else f"not installed: {' or '.join(alternatives)}"


_MISSING: dict[str, Callable[[], str | None]] = {
    "gpu": _no_gpu,
    "bwrap": _no_bwrap,
    "browser": _no_program("chromium", "chromium-browser", "google-chrome"),
    "postgres": _no_program("postgres", "pg_ctlcluster"),
    "redis": _no_program("redis-server"),
}


@functools.cache
def _why_missing(marker: str) -> str | None:
    return _MISSING[marker]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in _MISSING:
            if item.get_closest_marker(marker) and (reason := _why_missing(marker)):
                item.add_marker(pytest.mark.skip(reason=f"{marker}: {reason}"))


def _skipped(config: pytest.Config) -> Counter[tuple[str, str]]:
    """(marker, reason) of the tests that did not run; the marker is "unmarked" where a test skipped itself."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped: Counter[tuple[str, str]] = Counter()
    for report in reporter.stats.get("skipped", []) if reporter else []:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        marker = next((name for name in _MISSING if reason.startswith(f"{name}: ")), "unmarked")
        skipped[marker, reason.removeprefix(f"{marker}: ")] += 1
    return skipped


def _forbidden(config: pytest.Config) -> bool:
    return os.environ.get("INFERLAB_CI") == "1" and any(marker != "gpu" for marker, _ in _skipped(config))


def pytest_sessionfinish(session: pytest.Session) -> None:
    controller = not hasattr(session.config, "workerinput")
    if controller and session.exitstatus == pytest.ExitCode.OK and _forbidden(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.section("skipped for want of something")
    skipped = _skipped(config)
    for (marker, reason), count in sorted(skipped.items()):
        terminalreporter.line(f"{marker}: {count} skipped: {reason}")
    if not skipped:
        terminalreporter.line("nothing")
    if "not slow" in config.option.markexpr:
        terminalreporter.line("slow: not run; `make test-all` runs them")
    if _forbidden(config):
        terminalreporter.line("FAILED: INFERLAB_CI=1 allows only gpu tests to be skipped", red=True)
