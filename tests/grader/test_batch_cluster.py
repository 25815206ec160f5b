"""A run on a Dask cluster: a scheduler and two workers as processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

SLUG = "01_toy"
# For the file with this name it waits as long as its limits allow; they bound what hangs, and nothing here does.
WAITING = "import os, time\nwhile not os.path.exists({0!r}): time.sleep(0.02)"
PATIENT = {"call": 1000.0, "check": 3000.0, "total": 3000.0}


class Cluster:
    """Processes that are ended with the test."""

    def __init__(self, folder: Path):
        self.folder, self.processes = folder, []  # type: ignore[var-annotated]
        self.file = folder / "scheduler.json"
        self.start("scheduler", "--port", "0", "--host", "127.0.0.1", "--scheduler-file", str(self.file))
        while not (self.file.exists() and self.file.read_text()):  # it is there before its text is; pytest's time limit
            time.sleep(0.05)  # bounds it
        self.address = json.loads(self.file.read_text())["address"].replace("tcp://", "dask://")

    def start(self, what: str, *words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "dask", what, "--no-dashboard", *words]
        log = (self.folder / f"{what}-{len(self.processes)}.log").open("wb")
        self.processes.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder))
        return self.processes[-1]

    def worker(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a worker; it is known to the scheduler when this returns."""
        from distributed import Client

        words = ("--scheduler-file", str(self.file), "--nthreads", "1", "--no-nanny", *words)
        words += ("--local-directory", str(self.folder))
        with Client(self.address.replace("dask://", "tcp://"), set_as_default=False) as client:
            known = len(client.nthreads())
            started = self.start("worker", "--host", "127.0.0.1", *words)
            client.wait_for_workers(known + 1)
        return started

    def stop(self) -> None:
        for process in self.processes:
            process.kill()  # a worker that is asked to end while its scheduler ends may wait for ever
            process.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    running = Cluster(tmp_path)
    yield running
    running.stop()


def inferlab(*arguments: str, ok: bool = True) -> str:
    from grader.commands.grade_cli import app

    done = CliRunner().invoke(app, list(arguments))
    assert (done.exit_code == 0) == ok, done.output + str(done.exception)
    return " ".join(done.output.split())


@pytest.fixture(scope="module")
def course(
    tmp_path_factory: pytest.TempPathFactory, released_course: Callable[[Path], Path], solution_text: str
) -> Path:
    """Six submissions: the empty lab, the solution, and four times one that waits until there is a file `go on`."""
    folder = tmp_path_factory.mktemp("cluster")
    root, handed = released_course(folder / "course"), folder / "handed"
    handed.mkdir()
    (handed / "empty.ipynb").write_text((root / "labs" / SLUG / "toy.ipynb").read_text())
    (handed / "right.ipynb").write_text(solution_text)
    solution, source = json.loads(solution_text), WAITING.format(str(folder / "go on"))
    solution["cells"].insert(0, {"cell_type": "code", "metadata": {}, "source": source, "id": "first"})
    for number in range(4):
        (handed / f"s{number}.ipynb").write_text(json.dumps(solution))
    inferlab("collect", "01", str(handed), "--course", str(root))
    return root


def run(course: Path, *words: str, ok: bool = True) -> str:
    return inferlab("run", "01", "--insecure", "--course", str(course), *words, ok=ok)


def results(course: Path) -> dict[str, Any]:
    """All results without their times."""
    found = {}
    for path in (course / "results" / SLUG).glob("*.json"):
        result = json.loads(path.read_text())
        found[path.stem] = {**result, "seconds": 0, "checks": [{**check, "seconds": 0} for check in result["checks"]]}
    return found


@pytest.fixture(scope="module")
def found_here(course: Path) -> dict[str, Any]:
    """The results of a run on this machine."""
    (course.parent / "go on").touch()
    assert "6 graded" in run(course, "--workers", "1")
    return results(course)


# Where one is killed, results of a cluster come before and after; that a run comes to its end with two is for test-all.
@pytest.mark.parametrize("kill", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_cluster_of_two_workers_gives_the_same_results_even_if_one_is_killed(
    course: Path, found_here: dict[str, Any], cluster: Cluster, monkeypatch: pytest.MonkeyPatch, kill: bool
) -> None:
    from grader.courses import batch

    first, go_on, keep = cluster.worker(), course.parent / "go on", batch._keep
    cluster.worker()

    def kill_a_worker_after_the_first(*arguments: Any) -> Any:
        if first.poll() is None:
            os.kill(first.pid, signal.SIGKILL)
            first.wait()
        go_on.touch()
        return keep(*arguments)

    if kill:
        go_on.unlink()
        monkeypatch.setattr(batch, "LIMITS", PATIENT)
        monkeypatch.setattr(batch, "_keep", kill_a_worker_after_the_first)
    assert "6 graded" in run(course, "--all", "--executor", cluster.address)
    assert (first.poll() is not None) == kill
    assert results(course) == found_here
    earned = {"empty": 0, "right": 6, "s0": 6, "s1": 6, "s2": 6, "s3": 6}
    assert {student: result["earned"] for student, result in found_here.items()} == earned


def test_a_cluster_that_cannot_grade_is_refused_before_the_first_submission(
    course: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grader.courses import cluster as connecting

    before = results(course)
    assert "expected dask://HOST:PORT" in run(course, "--all", "--executor", "tcp://x:1", ok=False)
    with monkeypatch.context() as patch:
        patch.setattr(connecting, "CONNECT_SECONDS", 0.5)  # for nobody is there; it tries again until these are over
        said = run(course, "--all", "--executor", "dask://127.0.0.1:1", ok=False)
    assert "no Dask scheduler answers at 127.0.0.1:1" in said
    assert "has no workers" in run(course, "--all", "--executor", cluster.address, ok=False)
    (cluster.folder / "older.py").write_text(
        "from grader.examination import worker\n"
        "older = {**worker.versions(), 'torch': '1.0'}\nworker.versions = lambda: older\n"
    )
    cluster.worker("--preload", str(cluster.folder / "older.py"))
    said = run(course, "--all", "--executor", cluster.address, ok=False)
    assert "has other versions than this machine (torch: 1.0 here, expected" in said
    assert results(course) == before
