"""The benchmark of the grader: what its class is made of, and what it counts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from grader import grader_bench

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_class_is_the_reference_variants_and_every_mutant_one_right_for_two_wrong() -> None:
    folder = REPOSITORY / "tests" / "labs" / "02_kv_cache"
    cases = grader_bench._cases(REPOSITORY / "solutions" / "02_kv_cache" / "kv_cache.ipynb", folder)
    mutants = {path.stem for path in (folder / "mutants").glob("*.py")}
    wrong = [name in mutants for name, _ in cases]
    assert wrong[:6] == [False, True, True] * 2
    assert mutants < {name for name, _ in cases}
    assert cases[0][0] == "reference"
    assert all("NotImplementedError" not in cells["attend"] for _, cells in cases)


def test_memory_is_summed_over_a_command_and_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both hold theirs until as much has been seen."""
    monkeypatch.setattr(grader_bench, "SAMPLE_SECONDS", 0.01)
    seen, proportional = tmp_path / "seen", grader_bench._proportional
    sizes: dict[int, int] = {}

    def watched(pid: int) -> int:
        sizes[pid] = proportional(pid)
        if sum(size >= 64 << 20 for size in sizes.values()) == 2:
            seen.touch()
        return sizes[pid]

    monkeypatch.setattr(grader_bench, "_proportional", watched)
    hold = f"""
import os, time
x = bytearray(b'1' * (64 << 20))
while not os.path.exists({str(seen)!r}): time.sleep(0.01)
time.sleep(0.2)
"""
    code = f"import subprocess, sys; x = bytearray(b'1' * (64 << 20)); subprocess.run([sys.executable, '-c', {hold!r}])"
    seconds, _, peak = grader_bench._timed([sys.executable, "-c", code], tmp_path)
    assert seconds > 0.2
    assert peak >= 128 << 20


def test_a_command_that_fails_is_no_measurement(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="failed: no lab"):
        grader_bench._timed([sys.executable, "-P", "-c", "import sys; sys.exit('no lab')"], tmp_path)


def test_a_missing_result_is_no_measurement(tmp_path: Path) -> None:
    (tmp_path / "results" / "02").mkdir(parents=True)
    (tmp_path / "results" / "02" / "a.json").write_text(json.dumps({"status": "timed out in check_x"}))
    assert grader_bench._statuses(tmp_path, "02", 1) == {"timed out": 1}
    with pytest.raises(RuntimeError, match="2 submissions, but 1 results"):
        grader_bench._statuses(tmp_path, "02", 2)
