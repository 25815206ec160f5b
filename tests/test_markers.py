"""A run says what it skipped, why and how to have it run; in continuous integration only gpu tests may be skipped."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CI = (ROOT / ".ci" / "run").read_text("utf-8")
HEAD = "import pytest\n\ndef test_passes(): pass\n\n"
MARKED = HEAD + "@pytest.mark.{}\ndef test_needs_something(): pass\n"
# The need is a fixture's; the tests say nothing of it, and the second only has it by way of another fixture.
BY_FIXTURE = f"""{HEAD}
@pytest.fixture(scope="session")
def server(redis: None): raise AssertionError("it was set up all the same")

@pytest.fixture
def client(server): pass

def test_needs_a_server(server): pass

def test_needs_a_client(client): pass
"""


def run(folder: Path, tests: str, *arguments: str, ci: bool = False) -> subprocess.CompletedProcess[str]:
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    (folder / "test_it.py").write_text(tests, "utf-8")
    markers = "".join(f"    {name}: for this test\n" for name in ("redis", "gpu", "slow"))
    (folder / "pytest.ini").write_text(f"[pytest]\nmarkers =\n{markers}", "utf-8")
    # Without a PATH no program is found; without a visible device there is no GPU; no kernel runs in the interpreter.
    own = {"PATH": "", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "", "INFERLAB_CI": "1" if ci else ""}
    # To load what others plug in takes longer than all else.
    own |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment = os.environ | own
    command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", *arguments, str(folder)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def test_what_was_skipped_is_said_last_with_its_marker_its_reason_and_the_remedy(tmp_path: Path) -> None:
    result = run(tmp_path, MARKED.format("redis"), "-ra")
    assert result.returncode == 0, result.stdout
    said, counts = result.stdout.splitlines()[-2:]
    remedy = "To have them run: apt-get install redis-server"
    assert said == f"redis: 1 skipped: not installed: redis-server. {remedy}"
    assert "1 passed, 1 skipped" in counts


def test_what_a_fixture_needs_is_needed_by_every_test_that_uses_it(tmp_path: Path) -> None:
    result = run(tmp_path, BY_FIXTURE)
    assert result.returncode == 0, result.stdout
    assert "redis: 2 skipped: not installed: redis-server" in result.stdout
    chosen = run(tmp_path, BY_FIXTURE, "-m", "not redis and not slow")
    assert "1 passed, 2 deselected" in chosen.stdout.splitlines()[-1]
    assert "slow: left out. To have them run: make test-all" in chosen.stdout


@pytest.mark.parametrize("marker", ["redis", "skip(reason='not today')"])
def test_continuous_integration_fails_if_anything_but_gpu_was_skipped(tmp_path: Path, marker: str) -> None:
    result = run(tmp_path, MARKED.format(marker), ci=True)
    assert result.returncode == 1, result.stdout
    assert "FAILED: INFERLAB_CI=1 allows only gpu tests to be skipped" in result.stdout


def test_continuous_integration_goes_on_without_a_gpu(tmp_path: Path) -> None:
    result = run(tmp_path, MARKED.format("gpu"), ci=True)
    assert result.returncode == 0, result.stdout
    assert "gpu: 1 skipped: torch sees no CUDA device" in result.stdout


def test_continuous_integration_installs_what_the_tests_ask_for(pytestconfig: pytest.Config) -> None:
    """It searches for their names before there is a pytest that could say them."""
    needs = {line.partition(":")[0] for line in pytestconfig.getini("markers") if ": needs " in line}
    assert set(re.findall(r"\bmarked (\w+)", CI)) == needs - {"gpu"}
