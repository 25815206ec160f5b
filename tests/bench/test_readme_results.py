"""README's results are what the files say, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reference_impl.bench import gpu, gpu_rows, harness, readme
from reference_impl.bench.gpu_cases import BATCH, STREAM, with_goal
from reference_impl.bench.gpu_rows import Row

BF16, FP8 = BATCH.format("bf16"), STREAM.format("llama-3-8b FP8 linears")
ROOT = Path(__file__).resolve().parents[2]


def gpu_result(**fields: Any) -> dict[str, Any]:
    rows = [
        with_goal(Row(BF16, "tokens/s", harness.spread([27_000.0, 28_500.0, 28_600.0]), 36_400.0)),
        with_goal(Row("decode, context 512, qwen3-0.6b bf16, B 2", "tokens/s", harness.spread([4000.0]), 6000.0)),
        with_goal(Row(FP8, problem="ValueError: no FP8")),
    ]
    stamp = {
        "gpu": "NVIDIA H200", "driver": "580", "python": "3.12", "date": "2027-01-02 03:04 UTC", "commit": "abc",
        "versions": {"torch": "2.11.0", "triton": "3.6.0", "transformers": "5.17.0"},
    }  # fmt: skip
    return {"rows": [row.to_json() for row in rows], "stamp": stamp, "dry_run": False, "complete": True} | fields


def test_readme_has_what_the_files_say() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "reference_impl.bench", "readme", "--check"],
        capture_output=True, text=True, cwd=ROOT, timeout=600,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_an_edit_of_a_figure_is_found_and_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = readme.README.read_text("utf-8")
    inside = right.index("x |", right.index(readme.BEGIN))
    assert inside < right.index(readme.END)
    copy = tmp_path / "README.md"
    copy.write_text(right[:inside] + "9" + right[inside:], "utf-8")
    monkeypatch.setattr(readme, "README", copy)
    assert readme.main(["--check"]) == 1
    assert "python -m reference_impl.bench readme" in capsys.readouterr().err
    assert readme.main([]) == 0
    assert copy.read_text("utf-8") == right


def test_without_a_result_it_says_that_nothing_was_measured(tmp_path: Path) -> None:
    found = readme.written(tmp_path)
    assert "No speed has been measured on a CPU" in found
    assert "No speed has been measured on a GPU" in found
    assert "|" not in found


def test_a_result_of_a_gpu_gets_in_with_its_machine_and_date(tmp_path: Path) -> None:
    (tmp_path / "gpu.json").write_text(json.dumps(gpu_result()))
    found = readme.written(tmp_path)
    assert "No speed has been measured on a GPU" not in found
    assert f"{gpu_rows.COLUMNS}\n| {BF16} | 28,500 tokens/s (27,000-28,600) | - | 36,400 | 78 % | 28,000" in found
    assert "NVIDIA H200, driver 580, torch 2.11.0, triton 3.6.0, transformers 5.17.0, Python 3.12, 2027-01-02" in found
    assert f"| {FP8} | ValueError: no FP8 | - | - | - | 420 tokens/s, stretch 480 |" in found
    assert "B 2 |" not in found, "what has neither goal nor peer stands in gpu.md"
    assert "ended before its last case" not in found
    assert "ended before its last case" in gpu.markdown(gpu_result(complete=False))


def test_kernels_get_in_too(tmp_path: Path) -> None:
    us = harness.spread([1000.0])
    first = Row(
        "kernel: w4a16, m 1",
        "µs",
        us,
        800.0,
        peer=("cuBLAS", 2900.0),
        note="reached 2.9",
        goal=3.0,
        goal_unit="x cuBLAS",
    )
    rows = [
        replace(first, less_is_better=True),
        Row("kernel: gemm, m 16", "µs", us, 500.0, less_is_better=True),
        Row("kernel: x", problem="bad"),
    ]
    (tmp_path / "kernels.json").write_text(json.dumps(gpu_result(rows=[row.to_json() for row in rows])))
    lines = readme.written(tmp_path).splitlines()
    assert (
        "| kernel: w4a16, m 1 | 1,000 µs (1,000-1,000) | cuBLAS 2,900 | 800 | 80 % | 3 x cuBLAS (reached 2.9) |"
        in lines
    )
    assert "| kernel: gemm, m 16 | 1,000 µs (1,000-1,000) | - | 500 | 50 % | - |" in lines
    assert "| kernel: x | bad | - | - | - | - |" in lines


@pytest.mark.parametrize("text", ["nothing", readme.BEGIN, f"{readme.END}\n{readme.BEGIN}", f"{readme.BEGIN}\n" * 2])
def test_without_its_markers_it_says_what_it_expects(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected these two lines"):
        readme.renewed(text, tmp_path)


def test_what_stands_around_stays(tmp_path: Path) -> None:
    found = readme.renewed(f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n", tmp_path)
    assert found.startswith(f"before\n{readme.BEGIN}\nNo speed")
    assert found.endswith(f"\n{readme.END}\nafter\n")
