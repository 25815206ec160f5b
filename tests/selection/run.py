"""Chooses tests by the record of what they needed (`record.py`), runs them, and says what ran and what it took.

    run.py test                 all short tests, what changed since its record, a tenth of the rest: `make test`
    run.py all                  everything, recorded; goes on where it was killed: `make test-all`
    run.py quick                what changed, first what needs least beside it, for 90 seconds: `make test-quick`
    run.py lab 05, chapter 03   what has it in its name, or needs one of its files

With INFERLAB_RECORD=1 `test` records, too. A job is one pytest, forked from a process that has imported torch and
pytest and no file of the project (tests/warm.py); programs that tests start are forked from another one. A run that
records has a job for each file of tests, so that an import is known to be that file's; otherwise files share processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tests.neutral import neutral  # noqa: E402
from tests.selection import record, tracing  # noqa: E402
from tests.selection.record import COSTLY, LOOP, OWN, PATH, SLOW, TOO_MUCH, WIDE, Line, Record  # noqa: E402
from tests.selection.sources import Tree, digest  # noqa: E402
from tests.warm import PROGRAMS, SHARED, Warm  # noqa: E402

TURNS = 10  # commits in which all that is left out has its turn
BATCH, STARTS = 25.0, 0.4  # seconds of tests that share a process; seconds for a file's imports
APART = ("tests/labs/test_", "tests/chapters/test_notebooks.py")  # their long tests share nothing: jobs of their own
# What takes long to import, and looks at no variable and no home.
IMPORTED = (
    "torch",
    "pytest",
    "hypothesis",
    "jupytext",
    "nbclient",
    "pydantic",
    "fastapi",
    "httpx",
    "typer",
    "tokenizers",
    "torch.distributed.tensor",  # and with it sympy: like scipy, a good part of what transformers imports
    "scipy.optimize",
)
BYTECODE = ("reference_impl", "grader", "chapters")
PROGRESS = ".venv/.record"  # what a run that records has so far
QUICK = 60.0  # seconds for the tests of a quick run, beside linters
SHOWN = 12
LINT = (["ruff", "check", "-q", "."], ["ruff", "format", "-q", "--check", "."], ["mypy"],
        ["grader.chapter_source", "--check"], ["grader.labs.lab_source", "--check"])  # fmt: skip


@dataclass
class Job:
    """One pytest. only: these units alone; but: no test that names one of these folders; leave: of a file the short
    names of tests that need not run; whole: files that run whole, but for tests with lines of their own."""

    files: list[str]
    seconds: float
    leave: dict[str, list[str]] = field(default_factory=dict)
    only: list[str] | None = None
    but: list[str] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)
    # what comes back
    tests: dict[str, dict[str, Any]] = field(default_factory=dict)
    left: int = 0
    peak: int = 0
    failed: bool = False

    @property
    def name(self) -> str:
        names = self.only or self.files
        return names[0].removeprefix("tests/") + (f" and {len(names) - 1} more" if names[1:] else "")

    def progress(self, root: Path) -> Path:
        return root / PROGRESS / f"{digest(*(self.only or self.files), length=16)}.txt"


class Choice:
    """Which units hold, by the record, whose turn it is, and the jobs that follow."""

    def __init__(self, root: Path):
        self.root, self.tree, self.known = root, Tree(root, PATH), Record.read(root / PATH)
        self.now = record.environment(self.tree)
        self.holding, self.why = self.known.judge(self.tree, self.now)
        self.costs = {line.unit: line.seconds for line in (*self.known.lines, *self.holding.values())}
        self.slow = {line.unit for line in self.known.lines if SLOW in line.costly}
        self.files = sorted(name for name in self.tree.names if re.fullmatch(r"tests/(.+/)?test_\w+\.py", name))
        count = git(root, "rev-list", "--count", "--first-parent", "HEAD")
        self.turn, self.drawn = int(count or 0) % TURNS, set[str]()

    def draw(self) -> None:
        """The dearest are dealt out first, so that all turns cost about the same."""
        load = [0.0] * TURNS
        lines = (line for unit, line in self.holding.items() if unit not in self.slow)
        for line in sorted(lines, key=lambda line: (-line.seconds, line.unit)):
            slot = load.index(min(load))
            load[slot] += line.seconds
            if slot == self.turn:
                self.drawn.add(line.unit)

    def own(self, file: str) -> list[str]:
        """The tests of a file that have lines of their own."""
        return [unit for unit in self.costs if unit.startswith(f"{file}::")]

    def jobs(self, everything: bool, records: bool) -> list[Job]:
        made, shared = list[Job](), Job([], 0.0)
        for file in self.files:
            own = {unit for unit in self.own(file) if unit not in self.holding or unit in self.drawn} - self.slow
            own = {*self.own(file)} if everything else own
            left = {record.short_name(unit) for unit in self.own(file)} - {record.short_name(unit) for unit in own}
            line = self.holding.get(file)
            whole = everything or line is None or file in self.drawn
            seconds = STARTS + self.costs.get(file, 1.0)
            if line and not whole:
                left |= set(line.costly)
                seconds -= sum(line.costly.values())
            if file.startswith(APART):
                made += [Job([file], self.costs[unit], only=[unit]) for unit in own]
                left |= {record.short_name(unit) for unit in own}
            else:
                seconds += sum(self.costs[unit] for unit in own)
            job = Job([file], seconds, {file: sorted(left)}, whole=[file] if whole else [])
            if records or seconds > BATCH:
                made.append(job)
                continue
            if shared.seconds + seconds > BATCH:
                made.append(shared)
                shared = Job([], 0.0)
            shared.files.append(file)
            shared.seconds += seconds
            shared.leave |= job.leave
        return sorted([*made, shared] if shared.files else made, key=lambda job: -job.seconds)

    def units(self, units: Iterable[str], but: Iterable[str] = ()) -> list[Job]:
        """Jobs for these alone."""
        made: dict[str, Job] = {}
        for unit in units:
            file = unit.partition("::")[0]
            job = made.setdefault(unit if file.startswith(APART) else file, Job([file], STARTS, only=[], but=[*but]))
            job.only = [*(job.only or ()), unit]
            job.seconds += self.costs.get(unit, 1.0)
        for job in made.values():  # a file's own line is not about the tests that have lines of their own
            job.leave = {
                file: [record.short_name(u) for u in self.own(file) if u not in (job.only or ())] for file in job.files
            }
        return list(made.values())


class Run:
    """Jobs in processes of their own, a few at a time. What a job prints is shown if it fails."""

    def __init__(self, choice: Choice, records: bool):
        self.choice, self.records = choice, records
        self.done: list[Job] = []
        self.late: list[Job] = []
        self.loops: list[float] = []
        self.lock = threading.Lock()

    @property
    def scale(self) -> float:
        """Seconds here for a second of the record."""
        return statistics.median(self.loops or [LOOP]) / LOOP

    def all(self, jobs: list[Job], *options: str, until: float = float("inf")) -> None:
        # Once, and not in each of the processes, where PYTHONDONTWRITEBYTECODE is set.
        command = [sys.executable, "-m", "compileall", "-q", "-j", "0", *BYTECODE]
        subprocess.run(command, cwd=self.choice.root, stdout=subprocess.DEVNULL)

        def one(job: Job) -> None:
            if time.time() + job.seconds * self.scale > until and self.done:
                self.late.append(job)
                return
            with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as own:
                output = self._one(warm, job, Path(own), Path(folder), options)
            with self.lock:
                self.done.append(job)
                print(f"[{len(self.done):3}/{len(jobs)}] {'FAILED' if job.failed else 'passed'} {job.name}", flush=True)
                if job.failed:
                    print(output, flush=True)

        with (
            tempfile.TemporaryDirectory(prefix="inferlab-tests-") as folder,
            self._followed(folder),
            contextlib.closing(Warm(*IMPORTED)) as warm,
            contextlib.closing(Warm(*PROGRAMS, environment=neutral(os.environ, folder))) as self.programs,
            ThreadPoolExecutor((os.cpu_count() or 1) + 1) as pool,
        ):
            list(pool.map(one, jobs))

    def _one(self, warm: Warm, job: Job, folder: Path, shared: Path, options: Iterable[str]) -> str:
        asked = {"leave": job.leave, "only": job.only, "but": job.but, "trace": self.records}
        (folder / "job.json").write_text(json.dumps(asked), "utf-8")
        own = {"INFERLAB_JOB": str(folder / "job.json"), SHARED: self.programs.address}
        # What files of tests share, each makes itself where it is recorded what that needs.
        own |= {tracing.TRACE: str(folder / "shared")} if self.records else {"INFERLAB_ONCE": str(shared)}
        words = ["-c", "import sys; sys.path.pop(0); import pytest; sys.exit(pytest.main(sys.argv[1:]))"]
        words += ["-q", "--no-header", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        done = warm.run([*words, "--basetemp", str(folder / "tmp"), *options, *job.files], os.environ | own)
        answer = folder / "result.json"
        job.failed = done.returncode not in (0, 5) or not answer.exists()
        if answer.exists():
            result = json.loads(answer.read_text("utf-8"))
            job.tests, job.left, job.peak = result["tests"], result["left"], result["peak"]
            with self.lock:
                self.loops += result["loops"]
                if self.records:
                    self._record(job, folder)
        return f"{done.stdout}{done.stderr}\nThis pytest ended with status {done.returncode}."

    @contextlib.contextmanager
    def _followed(self, folder: str) -> Iterator[None]:
        """While a run records, a Python of .venv loads `tracing.py` if INFERLAB_TRACE names a file of this run."""
        hook = Path(sysconfig.get_path("purelib"), f"inferlab_{digest(str(self.choice.root))}.pth")
        if self.records:
            shutil.rmtree(tracing.CODE, ignore_errors=True)
            os.makedirs(tracing.CODE)
            table = {name: number * tracing.EACH for number, name in enumerate(self.choice.tree.modules)}
            Path(tracing.TABLE).write_text(json.dumps(table), "utf-8")
            hook.write_text(tracing.HOOK.format(code=tracing.__file__, variable=tracing.TRACE, folder=folder), "utf-8")
        try:
            yield
        finally:
            hook.unlink(missing_ok=True)

    def _record(self, job: Job, folder: Path) -> None:
        """What passed gets a line: tests that take long their own, the others of the file one together."""
        made, failed, shared = Record(), set[str](), _traced(folder / "shared")
        traced = {name: _traced(folder / test["trace"]) for name, test in job.tests.items()}
        # What an import runs, it runs once a process, and does so for all tests there.
        shared[1].update(mark for _, marks in traced.values() for mark in marks if mark % tracing.EACH == 0)
        lines = {file: Line(file, 0.0, self.choice.now) for file in job.whole}
        needs: dict[str, tuple[set[str], set[int]]] = defaultdict(lambda: (set(shared[0]), set(shared[1])))
        for name, test in job.tests.items():
            took, file = test["seconds"] / self.scale, name.partition("::")[0]
            own = job.only or (name.startswith(APART) if test["slow"] else took >= OWN)
            unit = name if own else f"{file}::{SLOW}" if test["slow"] else file
            if unit == file and file not in job.whole:
                continue  # only its short tests ran
            line = lines.setdefault(unit, Line(unit, 0.0, self.choice.now))
            costly = (
                {SLOW: 0.0} if test["slow"] else {record.short_name(name): took} if took >= COSTLY and not own else {}
            )
            lines[unit] = replace(line, seconds=line.seconds + took, costly=line.costly | costly)
            for gathered, found in zip(needs[unit], traced[name], strict=True):
                gathered |= found
            if test["failed"] or (test["skipped"] and not test["skipped"].startswith("Skipped: gpu")):
                failed.add(unit)
        for unit in lines.keys() - failed:
            masks, files = record.needed(self.choice.tree, *needs[unit])
            made.add(replace(lines[unit], needs=masks), files)
        path = job.progress(self.choice.root)
        if any(test["failed"] for test in job.tests.values()):
            path = path.with_suffix(".failed")  # what passed counts, but the job is not finished
        path.parent.mkdir(parents=True, exist_ok=True)
        made.write(path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)


def _traced(path: Path) -> tuple[set[str], set[int]]:
    """The lines and the marks that processes of a test wrote (tracing.py)."""
    lines = set(path.read_text("utf-8", "replace").splitlines()) if path.exists() else set()
    marks = path.with_name(f"{path.name}.map")
    return lines, {at.start() for at in re.finditer(b"\1", marks.read_bytes())} if marks.exists() else set()


def git(root: Path, *arguments: str) -> str:
    """Empty where git is missing, or has no answer."""
    try:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""


# ---------------------------------------------------------------- what a run says


def say_seconds(run: Run, choice: Choice) -> None:
    """CPU seconds by family, beside what the record has of the same tests; what costs too much for `make test`."""
    took, before, again = (defaultdict[str, float](float) for _ in range(3))
    for name, test in ((name, test) for job in run.done for name, test in job.tests.items()):
        family = name.split("/")[1] if name.count("/") > 1 else "tests"
        took[family] += test["seconds"]
        line = choice.holding.get(name) or choice.holding.get(name.partition("::")[0])
        known = line and (line.seconds if line.unit == name else line.costly.get(record.short_name(name)))
        if known:
            before[family] += known
            again[family] += test["seconds"] / run.scale
        if test["seconds"] / run.scale > TOO_MUCH and not test["slow"]:
            print(f"{name} took {test['seconds']:.0f} s: over {TOO_MUCH:.0f} s, and not marked slow")
    print("CPU seconds:", ", ".join(f"{name} {took[name]:.0f}" for name in sorted(took, key=lambda name: -took[name])))
    for family, known in before.items():
        if again[family] > known * 1.1 + 1:
            more = again[family] / known - 1
            print(f"{family}: tests that took {known:.0f} s when they were recorded took {more:.0%} more")


def say_end(run: Run, what: str) -> int:
    tests = [test for job in run.done for test in job.tests.values()]
    for line in sorted({line for test in tests for line in test["say"]}):
        print(line)
    skipped = Counter(test["skipped"].removeprefix("Skipped: ") for test in tests if test["skipped"])
    for reason, count in sorted(skipped.items()):
        print(f"{count} skipped: {reason}")
    say_seconds(run, run.choice)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    largest = max(run.done, key=lambda job: job.peak, default=Job([""], 0.0))
    print(
        f"In all {sum(each.ru_utime + each.ru_stime for each in used):.0f} CPU seconds; a second of the record takes "
        f"{run.scale:.2f} here; the largest process of tests had {largest.peak} MB: {largest.name}"
    )
    for job in run.late:
        print(f"LEFT TO `make test`, for want of time: {job.name}")
    for job in run.done:
        if job.failed:
            wrong = [name for name, test in job.tests.items() if test["failed"]]
            print("FAILED", *(wrong or [f"{job.name}: see its output above"]), sep="\n  ")
    left = sum(job.left for job in run.done)
    print(f"{len(tests) - sum(skipped.values())} of {len(tests) + left} tests ran: {what}")
    return int(any(job.failed for job in run.done))


# ---------------------------------------------------------------- the commands


def whole(choice: Choice, everything: bool) -> int:
    """`make test-all` and `make test`."""
    records = everything or bool(os.environ.get("INFERLAB_RECORD"))
    if not everything:
        choice.draw()
    jobs = choice.jobs(everything, records)
    if records:
        left = [job for job in jobs if not _finished(choice, job)]
        if left != jobs:
            print(f"{len(jobs) - len(left)} of {len(jobs)} jobs were finished by a run that was killed; this goes on.")
        jobs = left
    run = Run(choice, records)
    run.all(jobs, *([] if everything else ["-m", "not slow"]))
    if records:
        _close(choice, everything)
    if everything:
        return say_end(run, "everything")
    new = sum(file not in choice.costs for file in choice.files)
    waiting, stale = sorted(choice.slow & choice.why.keys()), len(choice.why.keys() - choice.slow)
    if waiting:
        print(f"{len(waiting)} slow tests whose record is older than what they need wait for make test-all:",
              ", ".join(waiting[:SHOWN]), *(["..."] if waiting[SHOWN:] else []))  # fmt: skip
    for path, count in Counter(path for paths in choice.why.values() for path in paths).most_common(SHOWN):
        print(f"{count:4} units need {path}, which has changed since they were recorded")
    return say_end(
        run,
        f"those under 50 ms, {stale} units (files, or long tests) whose record is older than what they need, "
        f"{new} files without a record, and of {len(choice.holding)} other units the {len(choice.drawn)} whose turn it "
        f"is, {choice.turn} of {TURNS}. To run everything: make test-all",
    )


def _finished(choice: Choice, job: Job) -> bool:
    """Whether a run that was killed did this, and nothing that it needs has changed since."""
    there = Record.read(job.progress(choice.root))
    return bool(there.lines) and there.judge(choice.tree, choice.now)[0].keys() >= {line.unit for line in there.lines}


def _close(choice: Choice, everything: bool) -> None:
    """What was recorded takes the place of what was known of the same tests."""
    known, folder = choice.known, choice.root / PROGRESS
    # What did not hold was run: where it has no new line it failed, or is part of another one.
    kept = set() if everything else choice.holding.keys() | choice.slow
    known.lines = [line for line in known.lines if line.unit in kept]
    for found in map(Record.read, sorted(folder.glob("*.*"))):
        for line in found.lines:
            known.add(line, found.files.values())
    known.lines = [line for line in known.lines if line.file in choice.tree.names]
    known.write(choice.root / PATH)
    shutil.rmtree(folder, ignore_errors=True)


def quick(choice: Choice) -> int:
    """First what is not committed or not in origin/main touches, then all else that is older than what it needs."""
    base = git(choice.root, "merge-base", "HEAD", "origin/main") or "HEAD"
    changed = set(git(choice.root, "diff", "--name-only", "--no-renames", base).splitlines())
    changed |= set(git(choice.root, "ls-files", "--others", "--exclude-standard").splitlines())
    print(f"{len(changed)} files differ from {base[:10]}: {', '.join(sorted(changed)[:SHOWN])}")
    needs = {line.unit: len(line.needs) for line in choice.known.lines}
    units = sorted(choice.why, key=lambda unit: (not choice.why[unit] & changed, needs[unit], choice.costs[unit]))
    units = [file for file in choice.files if file in changed and file not in choice.costs] + units
    run, python = Run(choice, False), [sys.executable, "-P", "-m"]
    checks = [subprocess.Popen([*python, *words], cwd=choice.root) for words in LINT]
    checks.append(subprocess.Popen([Path(sys.executable).with_name("lint-imports"), "--no-logo"], cwd=choice.root))
    run.all(choice.units(units), "-m", "not slow", until=time.time() + QUICK)
    if WIDE in {path for paths in choice.why.values() for path in paths}:
        print(f"NOT ENOUGH: every test depends on {WIDE}")
    failed = sum(bool(check.wait()) for check in checks)  # they have said what is wrong
    return say_end(run, "what changes touch, as far as time went. Before you commit: make test") or int(failed > 0)


def about(choice: Choice, kind: str, number: str) -> int:
    tops = {"lab": ("solutions", "labs", "tests/labs"), "chapter": ("chapters",)}
    every = sorted({found[2] for name in choice.tree.names if (found := re.match(r"(.*/)?(\d\d_\w+)/", name))})
    folders = [name for name in every if (choice.root / tops[kind][0] / name).is_dir()]
    folder = next((name for name in folders if name[:2] == number.zfill(2)), None)
    if folder is None:
        print(f"error: there is no {kind} {number!r}; there are: {' '.join(name[:2] for name in folders)}")
        return 2
    files = tuple(f"{top}/{folder}/" for top in tops[kind])
    named = re.compile(rf"{folder}|tests/claims/test_(ch|chapter_|register_){folder[:2]}")
    others = [name for name in every if name != folder]
    units = {line.unit for line in choice.known.lines if any(p.startswith(files) for p in choice.known.paths(line))}
    units = {unit for unit in {*units, *choice.files, *choice.costs}
             if named.search(unit) or (unit in units and not any(name in unit for name in others))}  # fmt: skip
    run = Run(choice, False)
    run.all(choice.units(sorted(units), others), "-m", "not slow")
    return say_end(run, f"all about {kind} {folder}. Before you commit: make test")


def main(arguments: list[str]) -> int:
    match arguments:
        case ["all" | "test" as kind]:
            return whole(Choice(ROOT), kind == "all")
        case ["quick"]:
            return quick(Choice(ROOT))
        case ["lab" | "chapter" as kind, number]:
            return about(Choice(ROOT), kind, number)
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
