"""Runs the tests that `choice.py` chooses, records what they need, and says what ran and what it took.

    run.py test                 all short tests, what changed since its record, a tenth of the rest: `make test`
    run.py all                  everything, recorded; goes on where it was killed: `make test-all`
    run.py quick                what changed, first what is not committed, for a minute: `make test-quick`
    run.py lab 05, chapter 03   what has it in its name, or needs one of its files

With INFERLAB_RECORD=1 `test` records, too. A job is one pytest, forked from a process that has imported torch and
pytest and no file of the project (tests/warm.py); programs that tests start are forked from another one. A run that
records has a job for each file of tests, so that an import is known to be that file's; otherwise files share processes.
"""

from __future__ import annotations

import contextlib
import json
import marshal
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tests.neutral import neutral  # noqa: E402
from tests.selection import tracing  # noqa: E402
from tests.selection.choice import TURNS, Choice, Job  # noqa: E402
from tests.selection.record import LOOP, PATH, SLOW, WIDE, Line, needed, short_name  # noqa: E402
from tests.selection.sources import digest, git, marked_code  # noqa: E402
from tests.warm import PROGRAMS, SHARED, Warm  # noqa: E402

COSTLY, OWN, TOO_MUCH = 0.05, 4.0, 20.0  # seconds: does not always run; has a line of its own; should be `slow`
# What takes long to import, and looks at no variable and no home; torch.distributed.tensor for sympy.
IMPORTED = (
    "torch", "pytest", "hypothesis", "jupytext", "nbclient", "pydantic", "fastapi", "httpx", "typer", "tokenizers",
    "torch.distributed.tensor", "scipy.optimize",
)  # fmt: skip
PROGRESS = ".venv/.recorded"  # the files that a run of everything has finished so far
QUICK = 60.0  # seconds for the tests of a quick run, beside linters
SHOWN = 12


class Run:
    """Jobs in processes of their own, a few at a time. What a job prints is shown if it fails.

    tests: name -> what plugin.py says of it; left: how many were left out; late: jobs for which there was no time.
    """

    def __init__(self, choice: Choice, records: bool = False, progress: Path | None = None):
        """progress: takes the names of files that are finished."""
        self.choice, self.records, self.progress = choice, records, progress
        self.tests: dict[str, dict[str, Any]] = {}
        self.left, self.done = 0, 0
        self.late, self.failed = list[Job](), list[str]()
        self.loops: list[float] = []
        self.lock = threading.Lock()

    @property
    def scale(self) -> float:
        """Seconds here for a second of the record."""
        return statistics.median(self.loops or [LOOP]) / LOOP

    def all(self, jobs: list[Job], *options: str, until: float = float("inf")) -> None:
        def one(job: Job) -> None:
            if time.time() + job.seconds * self.scale > until and self.done:
                self.late.append(job)
                return
            with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as own:
                failed, output = self._one(warm, job, Path(own), {SHARED: programs.address}, options)
                with self.lock:
                    if self.records:
                        self._record(job, Path(own), failed)
                    self.done += 1
                    print(f"[{self.done:3}/{len(jobs)}] {'FAILED' if failed else 'passed'} {job.name}", flush=True)
                    if failed:
                        print(output, flush=True)

        with (
            tempfile.TemporaryDirectory(prefix="inferlab-tests-") as folder,
            self._followed(folder),
            contextlib.closing(Warm(*IMPORTED)) as warm,
            contextlib.closing(Warm(*PROGRAMS, environment=neutral(os.environ, folder))) as programs,
            ThreadPoolExecutor((os.cpu_count() or 1) + 1) as pool,
        ):
            list(pool.map(one, jobs))

    def _one(
        self, warm: Warm, job: Job, folder: Path, variables: dict[str, str], options: tuple[str, ...]
    ) -> tuple[bool, str]:
        """Whether it failed, and what it printed."""
        (folder / "job.json").write_text(json.dumps({"leave": job.leave, "trace": self.records}), "utf-8")
        variables = os.environ | variables | {"INFERLAB_JOB": str(folder / "job.json")}
        # What files of tests share, each makes itself where it is recorded what that needs.
        variables |= {tracing.TRACE: str(folder / "shared")} if self.records else {"INFERLAB_ONCE": str(folder.parent)}
        words = ["-c", "import sys; sys.path.pop(0); import pytest; sys.exit(pytest.main(sys.argv[1:]))"]
        words += ["-q", "--no-header", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        done = warm.run([*words, "--basetemp", str(folder / "tmp"), *options, *job.files], variables)
        failed, wrong = done.returncode not in (0, 5), []
        if (answer := folder / "result.json").exists():
            result = json.loads(answer.read_text("utf-8"))
            wrong = [name for name, test in result["tests"].items() if test["failed"]]
            with self.lock:
                self.tests |= result["tests"]
                self.left += result["left"]
                self.loops.append(result["loop"])
        if failed:
            self.failed += wrong or [f"{job.name}: see its output above"]
        return failed, f"{done.stdout}{done.stderr}\nThis pytest ended with status {done.returncode}."

    @contextlib.contextmanager
    def _followed(self, folder: str) -> Iterator[None]:
        """While a run records, a Python of .venv loads `tracing.py` if INFERLAB_TRACE names a file of this run."""
        if not self.records:
            yield
            return
        root = self.choice.root
        shutil.rmtree(tracing.MARKED, ignore_errors=True)
        os.makedirs(tracing.MARKED)
        for name in self.choice.tree.modules.values():
            # What runs the tests is left out: it is tested by one that always runs.
            if not name.startswith("tests/selection/"):
                with contextlib.suppress(SyntaxError, ValueError):
                    Path(tracing.marked(name)).write_bytes(marshal.dumps(marked_code(root, name)))
        hook = Path(sysconfig.get_path("purelib"), f"inferlab_{digest(str(root))}.pth")
        hook.write_text(tracing.HOOK.format(code=tracing.__file__, variable=tracing.TRACE, folder=folder), "utf-8")
        try:
            yield
        finally:
            hook.unlink()

    def _record(self, job: Job, folder: Path, failed: bool) -> None:
        """Puts what passed in the place of what was known: a line for what takes long, for slow tests, for the others.

        What failed, or was skipped in part, is known no more.
        """
        record, [file] = self.choice.known, job.files
        record.lines = [line for line in record.lines if line.unit not in job.units]
        if not failed:
            for line, noted in self._lines(job, folder):
                found = needed(self.choice.tree, noted)
                record.lines.append(replace(line, needs=frozenset(found)))
                record.files |= {each.id: each for each in found.values()}
            if self.progress:
                with self.progress.open("a", encoding="utf-8") as finished:
                    finished.write(f"{file}\n")
        record.write(self.choice.root / PATH)

    def _lines(self, job: Job, folder: Path) -> Iterator[tuple[Line, set[str]]]:
        """Lines of units, and what their processes noted (tracing.py)."""
        [file], environment = job.files, self.choice.tree.environment
        tests = json.loads((folder / "result.json").read_text("utf-8"))["tests"]
        noted, shared = (
            {name: _noted(folder / test["trace"]) for name, test in tests.items()},
            _noted(folder / "shared"),
        )
        # What an import runs, it runs once a process, and does so for all tests there.
        shared |= {line for lines in noted.values() for line in lines if line.startswith("0 ")}
        lines = {unit: Line(unit, 0.0, environment) for unit in job.units & {file}}
        needs: dict[str, set[str]] = defaultdict(lambda: set(shared))
        skipped = set()
        for name, test in tests.items():
            took = test["seconds"] / self.scale
            unit = f"{file}::{SLOW}" if test["slow"] else name if took >= OWN else file
            if unit == file and file not in job.units:
                continue  # only its short tests ran
            costly = (
                {SLOW: 0.0} if test["slow"] else {short_name(name): took} if took >= COSTLY and unit == file else {}
            )
            line = lines.setdefault(unit, Line(unit, 0.0, environment))
            lines[unit] = replace(line, seconds=line.seconds + took, costly=line.costly | costly)
            needs[unit] |= noted[name]
            if test["skipped"] and not test["skipped"].startswith("Skipped: gpu"):
                skipped.add(unit)
        yield from ((lines[unit], needs[unit]) for unit in lines.keys() - skipped)


def _noted(path: Path) -> set[str]:
    return set(path.read_text("utf-8", "replace").splitlines()) if path.exists() else set()


# ---------------------------------------------------------------- what a run says


def say_seconds(run: Run) -> None:
    """CPU seconds by family, beside what the record has of the same tests; what costs too much for `make test`."""
    took, before, again = (defaultdict[str, float](float) for _ in range(3))
    for name, test in run.tests.items():
        folders = name.partition("::")[0].split("/")
        family = folders[1] if len(folders) > 2 else "tests"
        took[family] += test["seconds"]
        line = run.choice.lines.get(name) or run.choice.lines.get(name.partition("::")[0])
        known = line and (line.seconds if line.unit == name else line.costly.get(short_name(name)))
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
    for line in sorted({line for test in run.tests.values() for line in test["say"]}):
        print(line)
    skipped = Counter(test["skipped"].removeprefix("Skipped: ") for test in run.tests.values() if test["skipped"])
    for reason, count in sorted(skipped.items()):
        print(f"{count} skipped: {reason}")
    say_seconds(run)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(f"In all {sum(each.ru_utime + each.ru_stime for each in used):.0f} CPU seconds; "
          f"a second of the record takes {run.scale:.2f} here")  # fmt: skip
    for job in run.late:
        print(f"LEFT TO `make test`, for want of time: {job.name}")
    if run.failed:
        print("FAILED", *run.failed, sep="\n  ")
    print(f"{len(run.tests) - sum(skipped.values())} of {len(run.tests) + run.left} tests ran: {what}")
    return int(bool(run.failed))


# ---------------------------------------------------------------- the commands


def everything(choice: Choice) -> int:
    progress = choice.root / PROGRESS
    finished = progress.read_text("utf-8").splitlines() if progress.exists() else []
    jobs = choice.jobs(choice.units)
    left = [job for job in jobs if job.files[0] not in finished or job.units - choice.holding.keys()]
    if left != jobs:
        print(f"{len(jobs) - len(left)} of {len(jobs)} jobs were finished by a run that was killed; this goes on.")

    run = Run(choice, True, progress)
    # First what has no line: it may take longest.
    run.all(sorted(left, key=lambda job: (job.units <= choice.lines.keys(), -job.seconds)))
    progress.unlink(missing_ok=True)
    return say_end(run, "everything")


def chosen(choice: Choice) -> int:
    run = Run(choice, records=bool(os.environ.get("INFERLAB_RECORD")))
    jobs = choice.jobs(choice.stale | choice.drawn, share=not run.records)
    run.all(sorted(jobs, key=lambda job: -job.seconds), "-m", "not slow")
    if waiting := sorted(choice.slow & choice.why.keys()):
        print(f"{len(waiting)} slow tests whose record is older than what they need wait for make test-all:",
              ", ".join(waiting[:SHOWN]), *(["..."] if waiting[SHOWN:] else []))  # fmt: skip
    for path, count in Counter(path for paths in choice.why.values() for path in paths).most_common(SHOWN):
        print(f"{count:4} units need {path}, which has changed since they were recorded")
    new = len(choice.stale - choice.lines.keys())
    return say_end(
        run,
        f"those under 50 ms, {len(choice.stale) - new} units (files, or long tests) whose record is older than what "
        f"they need, {new} files without a record, and of {len(choice.holding)} other units the {len(choice.drawn)} "
        f"whose turn it is, {choice.turn} of {TURNS}. To run everything: make test-all",
    )


def quick(choice: Choice) -> int:
    """First what is not committed or not in origin/main touches, then all else that is older than what it needs."""
    base = git(choice.root, "merge-base", "HEAD", "origin/main") or "HEAD"
    changed = {*git(choice.root, "diff", "--name-only", "--no-renames", base).splitlines(),
               *git(choice.root, "ls-files", "--others", "--exclude-standard").splitlines()}  # fmt: skip
    print(f"{len(changed)} files differ from {base[:10]}: {', '.join(sorted(changed)[:SHOWN])}")

    def is_late(job: Job) -> tuple[bool, float]:
        why = {*job.files}.union(*(choice.why.get(unit, ()) for unit in job.units))
        return why.isdisjoint(changed), job.seconds

    run, lint = Run(choice), subprocess.Popen(["make", "--no-print-directory", "lint"], cwd=choice.root)
    jobs = [job for job in choice.jobs(choice.stale) if job.units]
    run.all(sorted(jobs, key=is_late), "-m", "not slow", until=time.time() + QUICK)
    if any(WIDE in paths for paths in choice.why.values()):
        print(f"NOT ENOUGH: every test depends on {WIDE}")
    failed = lint.wait()  # it has said what is wrong
    return say_end(run, "what changes touch, as far as time went. Before you commit: make test") or failed


def about(choice: Choice, kind: str, number: str) -> int:
    tops = {"lab": ("solutions", "labs", "tests/labs"), "chapter": ("chapters",)}[kind]
    every = {part for name in choice.tree.names for part in name.split("/")[:-1] if re.fullmatch(r"\d\d_\w+", part)}
    folders = sorted(name for name in every if f"{tops[0]}/{name}/" in choice.tree.folders)
    folder = next((name for name in folders if name[:2] == number.zfill(2)), None)
    if folder is None:
        print(f"error: there is no {kind} {number!r}; there are: {' '.join(name[:2] for name in folders)}")
        return 2
    files, others = tuple(f"{top}/{folder}/" for top in tops), every - {folder}
    named = re.compile(rf"{folder}|tests/claims/test_(ch|chapter_|register_){folder[:2]}")

    def is_about(unit: str) -> bool:
        paths = choice.known.paths(choice.lines[unit]) if unit in choice.lines else ()
        needs = any(path.startswith(files) for path in paths) and not any(name in unit for name in others)
        return needs or bool(named.search(unit))

    jobs = choice.jobs({unit for unit in choice.units - choice.slow if is_about(unit)})
    run = Run(choice)
    not_others = " and ".join(f"not {name}" for name in sorted(others))
    run.all([job for job in jobs if job.units], "-m", "not slow", "-k", not_others)
    return say_end(run, f"all about {kind} {folder}. Before you commit: make test")


def main(arguments: list[str]) -> int:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each of hundreds of processes would compile what it imports
    match arguments:
        case ["all"]:
            return everything(Choice(ROOT))
        case ["test"]:
            return chosen(Choice(ROOT))
        case ["quick"]:
            return quick(Choice(ROOT))
        case ["lab" | "chapter" as kind, number]:
            return about(Choice(ROOT), kind, number)
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
