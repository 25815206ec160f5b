"""A lab's waiting submissions over many workers: results/LAB/STUDENT.json for each, and one writer to the gradebook.

A kill at any moment does no harm: a result is a whole file or none, a recording is one transaction, and the next run
does what is missing. Two runs in one course exclude each other.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from grader.course import FULL, CourseError, course_lock, course_secret, is_full, student_secret
from grader.courses.recorded import damage
from grader.examination.worker import (
    Job,
    Setup,
    WorkerError,
    check_worker,
    close_servers,
    grade_submission,
    unexamined,
    versions,
)
from grader.results.result import Result, result_from_json
from grader.study.workspace_files import sweep
from grader.submissions.history import DamagedReceipt
from grader.submissions.submitted import take_in

if TYPE_CHECKING:
    from grader.courses.recorder import Recorder

LIMITS: dict[str, float] = {}  # of grader.examination.examiner.Limits, where they differ from its defaults
IN_FLIGHT = 2  # jobs per worker that are handed out: one at work, one waiting


@dataclass(frozen=True)
class Plan:
    """What a run has to do. examine: new or changed; record: examined, but not in the gradebook; done: the rest;
    outdated: those of them that were examined with other checks than the lab has now; damaged: left as they are,
    because it is unknown what they handed in.
    """

    examine: list[str] = field(default_factory=list)
    record: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    outdated: list[str] = field(default_factory=list)
    damaged: list[DamagedReceipt] = field(default_factory=list)


def plan(root: Path, slug: str, students: Iterable[str], again: bool = False) -> Plan:
    """Sort the submissions into what is to be done with them; all are examined with `again`."""
    from grader.courses.nbgrader_hooks import load_result, read_intake
    from grader.courses.recorder import Journal, in_gradebook

    found, journal, version = Plan(), Journal(root, slug), lab_setup(root, slug).lab_version
    recorded = in_gradebook(root, slug)
    for student in students:
        try:
            take_in(root, slug, student)  # what came by another way than `collect`, such as nbgrader's exchange
            received = read_intake(root, slug, student).get("received", "")
        except DamagedReceipt as error:
            found.damaged.append(error)
            continue
        except (OSError, ValueError):
            found.examine.append(student)  # this fails, for this student only, and a person will look
            continue
        try:
            result = load_result(root, slug, student)
        except (OSError, ValueError):
            result = None  # not graded yet, or damaged
        if again or result is None or result.received != received or result.status == "machinery":
            found.examine.append(student)
            continue
        (found.done if student in recorded and journal.has(student) else found.record).append(student)
        if result.lab_version != version:
            found.outdated.append(student)
    return found


def grade_students(
    root: Path,
    slug: str,
    students: Iterable[str],
    *,
    workers: int | None = None,
    executor: str = "",
    insecure: bool = False,
) -> Generator[Result, None, None]:
    """Examine and record these submissions, in the order in which they are finished, whatever happens to any of them.

    workers: submissions at once, as many as there are cores if not given. executor: dask://HOST:PORT for a cluster.
    Raises CourseError before the first one where nothing can be graded.
    """
    from grader.courses.recorder import Recorder

    waiting = list(students)
    if not waiting:
        return
    setup = lab_setup(root, slug, insecure)
    jobs = ((student, functools.partial(job_of, root, setup, student)) for student in waiting)
    with (
        course_lock(root),
        _pool(executor, workers or os.cpu_count() or 1, setup) as (pool, slots),
        Recorder(root, slug) as recorder,
    ):
        sweep(root / "results" / slug)  # no other process writes results while the lock is held
        for student, outcome in _results(pool, jobs, IN_FLIGHT * slots):
            yield _keep(root, setup, student, outcome, recorder)


def record_students(root: Path, slug: str, students: Iterable[str]) -> Iterator[Result]:
    """Record results that are there already."""
    from grader.courses.recorder import Recorder

    waiting = list(students)
    if waiting:
        with course_lock(root), Recorder(root, slug) as recorder:
            for student in waiting:
                yield _record(root, lab_setup(root, slug), student, recorder)


def lab_setup(root: Path, slug: str, insecure: bool = False) -> Setup:
    """The lab's checks and the course's secret for it."""
    path = next((root / "solutions" / slug).glob("*.ipynb"), None)
    if path is None:
        raise CourseError(f"solutions/{slug} holds no notebook; first: inferlab grade release {slug}")
    secret = course_secret(root, slug).hex()
    return Setup(slug, path.stem, path.read_text("utf-8"), secret, insecure, versions())


def job_of(root: Path, setup: Setup, student: str) -> Job:
    """The job for a submission as it lies in submitted/."""
    from grader.courses.nbgrader_hooks import read_intake

    intake = read_intake(root, setup.slug, student)
    path = root / "submitted" / student / setup.slug / f"{setup.name}.ipynb"
    return Job(
        setup=setup,
        student=student,
        submitted=path.read_text("utf-8"),
        secret=student_secret(root, setup.slug, student).hex(),
        received=intake.get("received", ""),
        refused=intake.get("refused", ""),
        notes=tuple(intake.get("notes", [])),
        limits=LIMITS,
    )


def replay(root: Path, slug: str, student: str, insecure: bool = False) -> tuple[Result, list[str]]:
    """Examine a submission again with the secret that its result names, and record nothing.

    Returns the result and what differs from when it was graded. Raises CourseError.
    """
    from grader.courses.nbgrader_hooks import load_result, result_path

    try:
        before = load_result(root, slug, student)
    except OSError:
        raise CourseError(f"{student} has no result for {slug}; first: inferlab grade run {slug}") from None
    except ValueError as error:
        raise CourseError(str(damage(root, slug, result_path(root, slug, student), error))) from None
    setup = lab_setup(root, slug, insecure)
    job = job_of(root, setup, student)
    job = replace(job, secret=before.secret or job.secret)
    try:
        result = result_from_json(grade_submission(job))
    except WorkerError as error:
        raise CourseError(str(error)) from None
    finally:
        close_servers(setup.key)
    differs = []
    if before.lab_version != setup.lab_version:
        differs.append("the lab's checks have changed since")
    if before.received != job.received:
        differs.append("the submission has changed since")
    return result, differs


def _results(
    pool: Executor, jobs: Iterator[tuple[str, Callable[[], Job]]], in_flight: int
) -> Iterator[tuple[str, str | Exception]]:
    """Yields each student with the Result as JSON or what went wrong. Jobs are made when there is room for them."""
    running: dict[Future[str], str] = {}
    while True:
        while len(running) < in_flight and (following := next(jobs, None)) is not None:
            student, job = following
            try:
                running[pool.submit(grade_submission, job())] = student
            except (OSError, ValueError) as error:  # its files cannot be read
                yield student, error
        if not running:
            return
        finished, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in [one for one in running if one in finished]:
            student = running.pop(future)
            try:
                yield student, future.result()
            except CancelledError:
                raise CourseError("the workers are gone; what is graded is recorded. Then run again") from None
            except WorkerError as error:
                raise CourseError(str(error)) from None
            except Exception as error:
                yield student, error


def _keep(root: Path, setup: Setup, student: str, outcome: str | Exception, recorder: Recorder) -> Result:
    """Write the result, then record it."""
    from grader.courses.nbgrader_hooks import read_intake, save_result

    if isinstance(outcome, OSError) and is_full(str(outcome)):
        raise outcome
    if isinstance(outcome, Exception):
        result = unexamined(setup.lab(), "machinery", f"the grader failed: {type(outcome).__name__}: {outcome}")
        result.student, result.lab_version = student, setup.lab_version
        with contextlib.suppress(OSError, ValueError):  # then this is the failure that the result names
            result.received = read_intake(root, setup.slug, student).get("received", "")
    else:
        result = result_from_json(outcome)
    if result.status == "machinery" and is_full(result.reason):  # no zero is recorded: the run stops, and is done again
        raise CourseError(f"{FULL} ({result.reason[:300]})")
    save_result(root, result)
    return _record(root, setup, student, recorder)


def _record(root: Path, setup: Setup, student: str, recorder: Recorder) -> Result:
    from grader.courses.nbgrader_hooks import load_result, save_result
    from grader.courses.recorder import RecordingFailed

    try:
        recorder.record(student)
    except RecordingFailed as error:
        result = load_result(root, setup.slug, student)
        failed = unexamined(setup.lab(), "machinery", f"nbgrader could not record this submission: {error}")
        save_result(root, replace(result, checks=failed.checks))
        recorder.record_failure(student)
    return load_result(root, setup.slug, student)


@contextlib.contextmanager
def _pool(executor: str, workers: int, setup: Setup) -> Iterator[tuple[Executor, int]]:
    """An executor and how many submissions it grades at once. Raises CourseError where its workers cannot grade."""
    if executor:
        from grader.courses.cluster import cluster

        with cluster(executor, setup) as found:
            yield found
        return
    pool = ThreadPoolExecutor(workers, thread_name_prefix="worker")
    try:
        try:
            pool.submit(check_worker, setup).result()
        except WorkerError as error:
            raise CourseError(str(error)) from None
        yield pool, workers
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        ending = threading.Thread(target=pool.shutdown, name="ends the workers")
        ending.start()
        # Wakes the threads that wait for an answer no longer needed. Again and again, since a thread may be starting a
        # server that is not known yet; and once more when no thread is left that could.
        while ending.is_alive():
            close_servers(setup.key)
            ending.join(1)
        close_servers(setup.key)
