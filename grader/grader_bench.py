"""`inferlab bench grader`: seconds a submission of a lab, against stock nbgrader on the same submissions in one run; of
the clock, and of processors (user and system, of all processes of a command that have ended).

The class is made of the lab's own cases: the reference, correct variants and wrong solutions, in turn. Ours is the
whole command `inferlab grade run`, with its sandbox; stock is the whole command `nbgrader autograde`, which runs every
cell of a notebook, checks included, in the learner's process without isolation. Stock takes its submissions one after
another, so it gets a sample of them. A command's start is part of what it costs: there is no warm-up.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

GOAL_SECONDS = 0.8  # a submission, with two workers
GOAL_MINUTES, GOAL_GIB = 6.0, 2.0  # for 500 submissions
SAMPLE_SECONDS = 1.0
STOCK_CELL_SECONDS = 60  # stock's limit for one cell, so that a mutant which never ends costs no more


def grader(
    lab: Annotated[str, typer.Option(help="Which lab, by its number.")] = "02",
    submissions: Annotated[int, typer.Option(min=2, help="How many the class hands in.")] = 40,
    stock: Annotated[int, typer.Option(min=1, help="How many of them stock nbgrader grades.")] = 8,
    workers: Annotated[int, typer.Option(min=1, help="Submissions at once in our run.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved runs of both.")] = 2,
    save: Annotated[bool, typer.Option(help="Write reference_impl/bench/results/grader.json.")] = False,
) -> None:
    """Grading a lab, isolated and with several workers, against stock nbgrader autograde without isolation."""
    from reference_impl.bench import harness

    result = {
        "stamp": harness.stamp(),
        "goal": _goal(),
        **run(lab, submissions, min(stock, submissions), workers, rounds),
    }
    ours, theirs, ratio, of_cpu = (result[name] for name in ("ours", "stock", "ratio", "cpu_ratio"))
    typer.echo(f"ours:  {ours['seconds_a_submission']['median']:.2f} s a submission, {submissions} in "
               f"{ours['seconds']['median']:.0f} s, peak {ours['peak_bytes'] / 2**30:.2f} GiB")  # fmt: skip
    typer.echo(f"stock: {theirs['seconds_a_submission']['median']:.2f} s a submission, {theirs['submissions']} of them")
    typer.echo(f"ratio: {ratio['median']:.1f}x faster ({ratio['min']:.1f} to {ratio['max']:.1f})")
    typer.echo(f"processor seconds: ours {ours['cpu_seconds']['median']:.0f} for {submissions}, stock "
               f"{theirs['cpu_seconds']['median']:.0f} for {theirs['submissions']}; a submission takes ours "
               f"{of_cpu['median']:.2f}x of stock's ({of_cpu['min']:.2f} to {of_cpu['max']:.2f})")  # fmt: skip
    if save:
        typer.echo(f"wrote {harness.save('grader', result)}")


def run(lab: str, submissions: int, stock: int, workers: int, rounds: int) -> dict[str, Any]:
    """Times both commands in turn, in folders of their own. Raises CourseError, RuntimeError where one of them
    fails."""
    from reference_impl.bench import harness

    ours, theirs, our_cpu, their_cpu, peaks = list[float](), list[float](), list[float](), list[float](), list[int]()
    with tempfile.TemporaryDirectory(prefix="bench-grader-") as folder:
        course, plain = Path(folder, "course"), Path(folder, "stock")
        slug = _make_course(course, lab, submissions)
        _make_stock(plain, course, slug, stock)
        ours_command = [*_python("grader.entry", "command"), "grade", "run", slug, "--all", "--workers", str(workers),
                        "--course", str(course)]  # fmt: skip
        stock_command = [*_python("nbgrader.apps.nbgraderapp", "main"), "autograde", slug, "--force",
                         f"--ExecutePreprocessor.timeout={STOCK_CELL_SECONDS}",
                         f"--Execute.timeout={STOCK_CELL_SECONDS}"]  # fmt: skip
        for _ in range(rounds):
            seconds, cpu, peak = _timed(ours_command, course)
            ours.append(seconds)
            our_cpu.append(cpu)
            peaks.append(peak)
            seconds, cpu, _ = _timed(stock_command, plain)
            theirs.append(seconds)
            their_cpu.append(cpu)
        statuses = _statuses(course, slug, submissions)
    each, each_stock = [s / submissions for s in ours], [s / stock for s in theirs]
    return {
        "lab": slug,
        "ours": {
            "submissions": submissions, "workers": workers, "seconds": harness.spread(ours),
            "cpu_seconds": harness.spread(our_cpu),
            "seconds_a_submission": harness.spread(each), "peak_bytes": max(peaks), "statuses": statuses,
        },
        "stock": {
            "submissions": stock, "seconds": harness.spread(theirs), "cpu_seconds": harness.spread(their_cpu),
            "seconds_a_submission": harness.spread(each_stock),
        },
        "ratio": harness.ratio(each_stock, each),
        "cpu_ratio": harness.ratio([s / submissions for s in our_cpu], [s / stock for s in their_cpu]),
    }  # fmt: skip


def _goal() -> dict[str, float]:
    return {"seconds_a_submission": GOAL_SECONDS, "minutes_for_500": GOAL_MINUTES, "peak_gib": GOAL_GIB}


def _environment() -> dict[str, str]:
    """This one, where nbgrader finds the program alembic also if .venv is not activated."""
    folder = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": os.pathsep.join([folder, os.environ.get("PATH", "")])}


def _python(module: str, name: str) -> list[str]:
    return [sys.executable, "-P", "-c", f"from {module} import {name}; {name}()"]


def _make_course(course: Path, lab: str, submissions: int) -> str:
    """A course with this many submissions taken in; returns the lab's slug."""
    from grader.course import new_course, open_course
    from grader.courses import grading
    from grader.study.workspace import data_root
    from grader.submissions.collect import collect

    new_course(course)
    root = open_course(course)
    slug, release = grading.release(root, lab, data_root() / "solutions")
    handed = course.parent / "handed"
    handed.mkdir()
    classes = _cases(root / "solutions" / slug / release.name, data_root() / "tests" / "labs" / slug)
    for number in range(submissions):
        name, cells = classes[number % len(classes)]
        notebook = json.loads(release.read_text("utf-8"))
        for cell in notebook["cells"]:
            cell["source"] = cells.get(cell["id"], cell["source"])
        (handed / f"s{number:04}-{name}.ipynb").write_text(json.dumps(notebook), "utf-8")
    collect(root, slug, handed)
    return slug


def _cases(solution: Path, folder: Path) -> list[tuple[str, dict[str, str]]]:
    """Names and solution cells of the reference, the variants and the mutants: a third of them correct."""
    from grader.labs.lab import load_lab
    from grader.labs.percent_file import percent_cells_of

    solved = {cell.grade_id: cell.source for cell in load_lab(solution).of_kind("solution")}
    found: dict[str, list[tuple[str, dict[str, str]]]] = {"variants": [("reference", solved)], "mutants": []}
    for kind, cases in found.items():
        for path in sorted((folder / kind).glob("*.py")):
            text = path.read_text("utf-8")
            start = re.search(r"^# %%", text, re.MULTILINE)
            raw = percent_cells_of(text[start.start() :], path.name) if start else []
            cells = {cell["metadata"]["nbgrader"]["grade_id"]: cell["source"] for cell in raw}
            cases.append((path.stem, {**solved, **cells}))
    right, wrong = found["variants"], found["mutants"]
    mixed = [(right[n % len(right)], *wrong[2 * n : 2 * n + 2]) for n in range((len(wrong) + 1) // 2)]
    return [case for cases in mixed for case in cases]


def _make_stock(plain: Path, course: Path, slug: str, stock: int) -> None:
    """A course of nbgrader's own, with the same lab and a sample of the same submissions, evenly spaced."""
    shutil.copytree(course / "solutions" / slug, plain / "source" / slug)
    waiting = sorted((course / "submitted").iterdir())
    for number in range(stock):
        student = waiting[number * len(waiting) // stock].name
        shutil.copytree(course / "submitted" / student / slug, plain / "submitted" / student / slug)
    made = subprocess.run(
        [*_python("nbgrader.apps.nbgraderapp", "main"), "generate_assignment", slug],
        cwd=plain, capture_output=True, text=True, env=_environment(),
    )  # fmt: skip
    if made.returncode:
        raise RuntimeError(f"stock nbgrader could not release the lab: {made.stderr[-2000:]}")


def _timed(command: list[str], folder: Path) -> tuple[float, float, int]:
    """Seconds of a command, processor seconds, and the most memory that it and its processes held at once, in bytes."""
    began = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, cwd=folder, stdout=said, stderr=said, env=_environment())
        peak = _Peak(process.pid)
        _, ended, used = os.wait4(process.pid, 0)
        status = process.returncode = os.waitstatus_to_exitcode(ended)
        seconds = time.perf_counter() - began
        peak.stop()
        said.seek(0)
        if status:
            raise RuntimeError(f"{' '.join(command[3:])} failed: {said.read()[-2000:].decode('utf-8', 'replace')}")
    return seconds, used.ru_utime + used.ru_stime, peak.bytes


class _Peak:
    """Samples the memory of a process and of all that it started: proportional set size, so shared pages count once."""

    def __init__(self, pid: int):
        self.bytes = 0
        self._pid, self._over = pid, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            self.bytes = max(self.bytes, sum(_proportional(pid) for pid in _tree(self._pid)))


def _tree(root: int) -> list[int]:
    """Process ids of a process and its descendants. Linux only; empty elsewhere."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents.setdefault(int(path.read_text().rsplit(")", 1)[1].split()[1]), []).append(int(path.parent.name))
    found = [root]
    for pid in found:
        found += parents.get(pid, [])
    return found


def _proportional(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    with contextlib.suppress(OSError):  # another user's process: all its pages, shared ones too
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _statuses(course: Path, slug: str, submissions: int) -> dict[str, int]:
    """How many results have which status. Raises RuntimeError where one is missing."""
    found = [json.loads(path.read_text("utf-8")) for path in (course / "results" / slug).glob("*.json")]
    if len(found) != submissions:
        raise RuntimeError(f"{submissions} submissions, but {len(found)} results")
    return dict(Counter(result["status"].split(" in ")[0] for result in found))
