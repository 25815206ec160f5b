"""A run says what it skipped and why, and in continuous integration it fails if that was more than gpu tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TESTS = """
import pytest

def test_passes(): pass

@pytest.mark.{marker}
def test_needs_something(): pass
"""


def run(folder: Path, marker: str, *arguments: str, ci: bool) -> subprocess.CompletedProcess[str]:
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    (folder / "test_it.py").write_text(TESTS.format(marker=marker))
    (folder / "pytest.ini").write_text(f"[pytest]\nmarkers =\n    {marker.split('(')[0]}: for this test\n")
    # Without a PATH no program is found; without a visible device there is no GPU; no kernel runs in the interpreter.
    own = {"PATH": "", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "", "INFERLAB_CI": "1" if ci else ""}
    environment = os.environ | own
    command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", *arguments, str(folder)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("arguments", [(), ("-n", "2")])
def test_what_was_skipped_is_said_with_its_marker_and_reason(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = run(tmp_path, "redis", *arguments, ci=False)
    assert result.returncode == 0, result.stdout
    assert "redis: 1 skipped: not installed: redis-server" in result.stdout
    assert "1 passed, 1 skipped" in result.stdout.splitlines()[-1]


@pytest.mark.parametrize("marker", ["redis", "skip(reason='not today')"])
def test_continuous_integration_fails_if_anything_but_gpu_was_skipped(tmp_path: Path, marker: str) -> None:
    result = run(tmp_path, marker, "-n", "2", ci=True)
    assert result.returncode == 1, result.stdout
    assert "FAILED: INFERLAB_CI=1 allows only gpu tests to be skipped" in result.stdout


def test_continuous_integration_goes_on_without_a_gpu(tmp_path: Path) -> None:
    result = run(tmp_path, "gpu", ci=True)
    assert result.returncode == 0, result.stdout
    assert "gpu: 1 skipped: torch sees no CUDA device" in result.stdout
