"""The bench's fleet: what it reports of a real run in real processes, and what a simulation does not load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reference_impl.bench import memory
from reference_impl.bench.memory import PeakMemory
from reference_impl.bench.simulator import main

LINUX = Path("/proc/self/smaps_rollup").is_file()
needs_linux = pytest.mark.skipif(not LINUX, reason="needs /proc/PID/smaps_rollup")


def fleet(tmp_path: Path, *options: str) -> dict[str, Any]:
    file = tmp_path / "fleet.json"
    command = [sys.executable, "-P", "-m", "reference_impl.bench", "simulator", "fleet", "--file", str(file), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(memory.__file__).parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    assert json.loads(done.stdout) == found
    return found


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run in two processes with few blocks."""
    return fleet(tmp_path_factory.mktemp("few"), *SMALL, "--blocks", "2200", "--processes", "2")


SMALL = ("--workload", "agents", "--num", "60", "--rate", "1.5", "--replicas", "4", "--router", "prefix")


def test_fewer_blocks_find_fewer_prefixes_and_a_fleet_reports_its_processes(
    tmp_path: Path, few: dict[str, Any]
) -> None:
    many = fleet(tmp_path, *SMALL, "--blocks", "16000")
    assert [run["load"]["blocks"] for run in (few, many)] == [2200, 16000]
    assert few["load"]["router"] == "prefix"
    for run in (few, many):
        simulated = run["simulated"]
        assert simulated["requests"] + simulated["refused"] == 60
        assert run["seconds"] > 0 < run["processor_seconds"]
        assert {"date", "commit", "cpu", "versions", "load_average_before"} <= set(run["stamp"])
    assert few["simulated"]["hit_rate"] < many["simulated"]["hit_rate"] - 0.02
    assert few["simulated"]["percentiles_50_90_99"]["ttft"][2] > many["simulated"]["percentiles_50_90_99"]["ttft"][2]
    if LINUX:
        seen = many["memory_of_all_processes_bytes"]
        for kind in ("pss", "rss"):
            assert sum(seen[kind]["parts"]) == seen[kind]["peak"]
            assert len(seen[kind]["parts"]) >= 3, "the router, and a worker for each of --processes"
            assert seen[kind]["own_before"] > 0  # PSS falls when other processes map the same libraries
        assert seen["pss"]["peak"] < seen["rss"]["peak"] < 500 << 20, "three processes with torch would take more"


def test_one_process_and_two_simulate_the_same(tmp_path: Path, few: dict[str, Any]) -> None:
    one = fleet(tmp_path, *SMALL, "--blocks", "2200", "--processes", "1")
    assert one["simulated"] == few["simulated"]


def test_a_simulation_needs_no_torch() -> None:
    """It would be 185 MB in each of its processes."""
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
    environment = os.environ | {"PYTHONPATH": str(Path(memory.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


SIZE = 30 << 20
WATCHED = f"""
import json, os, subprocess, sys
from reference_impl.bench.memory import PeakMemory, family, memory_of

def pss(pid):
    return sum(memory_of(member)["Pss"] for member in family(pid))

inner = "x = b'x' * {SIZE}; input()"
code = (
    "import subprocess, sys; x = b'x' * {2 * SIZE}\\n"
    f"child = subprocess.Popen([sys.executable, '-c', {{inner!r}}], stdin=subprocess.PIPE)\\n"
    "print('ready', flush=True); input(); child.communicate(b'\\\\n')"
)
with PeakMemory(seconds=0.01) as peak:
    before = pss(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    while pss(child.pid) < 3 * {SIZE}:
        assert child.poll() is None
    looks = peak.report()["looks"]
    while peak.report()["looks"] < looks + 2:
        assert peak._thread.is_alive()
    child.communicate(b"\\n")
print(json.dumps([before, peak.report(), child.pid not in family(os.getpid())]))
"""


@needs_linux
def test_memory_is_that_of_all_processes_together() -> None:
    """A child that writes to 60 MB, and one of its own that writes to 30. What watches is a process of its own, too:
    this one has children, and threads, of other tests, which come and go."""
    environment = os.environ | {"PYTHONPATH": str(Path(memory.__file__).parents[2])}
    command = [sys.executable, "-P", "-c", WATCHED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    before, found, ended = json.loads(done.stdout)
    assert before + 3 * SIZE < found["pss"]["peak"] < before + 3 * SIZE + (60 << 20)
    assert found["pss"]["peak"] <= found["rss"]["peak"]
    assert len(found["pss"]["parts"]) == 3
    assert ended


def test_a_system_that_does_not_say_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "ROLLUP", "/proc/{pid}/no such file")
    with PeakMemory() as peak:
        pass
    assert "smaps_rollup" in peak.report()["unknown"]


def test_an_unknown_router_is_refused_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fleet", "--router", "best"])
    assert "prefix" in capsys.readouterr().err
