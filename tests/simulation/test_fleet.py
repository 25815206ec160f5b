"""The bench's fleet: what it reports of a real run, and what a simulation does not load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import reference_impl
from reference_impl.bench.simulator import main


def fleet(tmp_path: Path, *options: str) -> dict[str, Any]:
    file = tmp_path / "fleet.json"
    command = [sys.executable, "-P", "-m", "reference_impl.bench", "simulator", "fleet", "--file", str(file), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(reference_impl.__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    assert json.loads(done.stdout) == found
    return found


SMALL = ("--workload", "agents", "--num", "60", "--rate", "1.5", "--replicas", "4", "--router", "prefix")


def test_fewer_blocks_find_fewer_prefixes_and_a_fleet_reports_its_memory(tmp_path: Path) -> None:
    few, many = (fleet(tmp_path, *SMALL, "--blocks", blocks) for blocks in ("2200", "16000"))
    assert [run["load"]["blocks"] for run in (few, many)] == [2200, 16000]
    assert few["load"]["router"] == "prefix"
    for run in (few, many):
        simulated = run["simulated"]
        assert simulated["requests"] + simulated["refused"] == 60
        assert run["seconds"] > 0 < run["processor_seconds"]
        assert {"date", "commit", "cpu", "versions", "load_average_before"} <= set(run["stamp"])
    assert few["simulated"]["hit_rate"] < many["simulated"]["hit_rate"] - 0.02
    assert few["simulated"]["percentiles_50_90_99"]["ttft"][2] > many["simulated"]["percentiles_50_90_99"]["ttft"][2]
    # No upper bound: Linux counts for a new process what its parent had when it was forked.
    assert few["peak_memory_bytes"] > 30 << 20


def test_a_simulation_needs_no_torch() -> None:
    """It would take 185 MB, more than the simulation."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from reference_impl.bench import simulator\n"
        "from reference_impl.assembly.config import EngineConfig\n"
        "from reference_impl.simulation import CalibratedCost, simulate\n"
        "from reference_impl.simulation.workloads import workload\n"
        "cost = CalibratedCost(7e-3, 4e-4, 1.2e-6, 3e-4, 7e-5, 2e-6, 6e-8, 4096)\n"
        "for swap in ('recompute', 'swap'):\n"
        "    config = EngineConfig(num_blocks=300, preemption=swap)\n"
        "    assert simulate(workload('chat', num_requests=20), cost, config).num_requests > 10\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(reference_impl.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_unknown_router_is_refused_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fleet", "--router", "best"])
    assert "prefix" in capsys.readouterr().err
