"""The README of the workloads shows what they measure now, and the command that computes it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from reference_impl.simulation.workloads import (
    WorkloadRequest,
    names,
    read_jsonl,
    read_workload,
    traces_folder,
    workload,
)
from reference_impl.simulation.workloads.table import BEGIN, END, Measured, line_of, measure, section_of, tables

ROOT = Path(__file__).resolve().parents[2]
README = (traces_folder() / "README.md").read_text(encoding="utf-8")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "reference_impl.simulation.workloads", *arguments]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=600, env=env)


SHOWN = README.split(BEGIN)[1].split(END)[0]


@pytest.mark.slow
def test_the_readme_shows_what_the_workloads_measure() -> None:
    assert SHOWN.strip() == tables().strip(), "python -m reference_impl.simulation.workloads table --write"


def test_the_readme_shows_what_one_measures_and_the_fields_of_all() -> None:
    """Their streams are fixed: test_stream.py."""
    specs = {name: read_workload(traces_folder() / f"{name}.yaml") for name in names()}
    assert f"\n{line_of(specs['batch'])}\n" in SHOWN
    for spec in specs.values():
        assert section_of(spec) in SHOWN, "python -m reference_impl.simulation.workloads table --write"


def test_measures_are_those_of_the_requests() -> None:
    requests = [
        WorkloadRequest("x-0-0.1", 0.0, 128, 10, (1, 2), session="x-0-0"),
        WorkloadRequest("x-0-0.2", 1.0, 200, 20, (1, 2, 3), session="x-0-0", images=2),
        WorkloadRequest("x-0-1.1", 4.0, 72, 30, (9,), session="x-0-1"),
    ]
    found = measure(iter(requests))
    # Two pages of 64 of 400 tokens were there before; gaps 1 and 3: mean 2, standard deviation 1.
    assert found == Measured(
        (400 / 3, 128.0, 128 + 0.98 * 72), (20.0, 20.0, 29.8), 2 / 3, 1 / 3, 128 / 400, 0.5
    )  # fmt: skip


def test_the_command_writes_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "agents.jsonl"
    done = run("write", "agents", str(path), "--num", "50", "--seed", "3", "--rate", "9", "--arrivals", "poisson")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"50 requests in {path}\n"
    assert list(read_jsonl(path)) == list(workload("agents", seed=3, rate=9.0, arrivals="poisson", num_requests=50))


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    done = run("write", "poetry", str(tmp_path / "x.jsonl"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("inferlab: error: unknown workload 'poetry': expected agents, batch")
