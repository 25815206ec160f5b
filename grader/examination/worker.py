"""Grades one submission anywhere: `grade_submission(job)` is what an executor calls, in a thread here or on a cluster.

Behind it are warm examiner servers (`examiner_server.py`), one per call in progress: processes that have imported
torch and prepared the lab. A job is plain data. It holds the hidden tests and the secret, so it goes to hosts of the
instructor only, never to a learner's process.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from grader.examination.flags import MAX_FLAG
from grader.examination.verdict import clean
from grader.labs.lab import Lab, lab_from_notebook
from grader.results.result import CheckResult, Result

SERVER = ("-m", "grader.examination.examiner_server")
START_SECONDS = 300.0  # for importing torch and preparing a lab, on a busy machine
ANSWER_SECONDS = 120.0  # that a server may be late with its answer before it counts as hung
CLOSE_SECONDS = 10.0  # that a server has to end its processes
ATTEMPTS = 3  # a server or its child that dies need not be a submission's fault: again, with a new one


class WorkerError(RuntimeError):
    """This worker cannot grade anything: no isolation, or other versions. Says what to do."""


class ServerGone(ConnectionError):
    """An examiner server, or its child, ended without an answer."""


class Stopped(RuntimeError):
    """This process has ended its servers: the answer is no longer needed."""


@dataclass(frozen=True)
class Setup:
    """What all jobs of a run share. solution: text of the solution notebook; versions: `versions()`.

    secret: hex; what a lab's cells draw before its checks derives from it, for all students alike.
    """

    slug: str
    name: str
    solution: str
    secret: str
    insecure: bool = False
    versions: dict[str, str] = field(default_factory=dict)

    @functools.cached_property
    def lab_version(self) -> str:
        """SHA-256 of the solution notebook's text: another one means other checks."""
        return hashlib.sha256(self.solution.encode()).hexdigest()

    @functools.cached_property
    def key(self) -> str:
        """A key that is the same for setups that can share a server."""
        return hashlib.sha256(f"{self.slug}/{self.secret}/{self.insecure}/{self.solution}".encode()).hexdigest()

    def lab(self) -> Lab:
        return lab_from_notebook(json.loads(self.solution), self.slug, self.name)


@dataclass(frozen=True)
class Job:
    """One submission. submitted: text of the notebook that intake wrote; refused: why there is none to examine;
    limits: of `grader.examination.examiner.Limits`, where they are not its defaults; secret: hex, what the checks draw
    derives from it.
    """

    setup: Setup
    student: str
    submitted: str
    secret: str
    received: str = ""
    refused: str = ""
    notes: tuple[str, ...] = ()
    limits: dict[str, float] = field(default_factory=dict)


def grade_submission(job: Job) -> str:
    """The Result of a submission as JSON, whatever the submission does. Raises WorkerError, Stopped."""
    _same_versions(job.setup)
    if job.refused:
        return _finished(job, unexamined(job.setup.lab(), "refused", job.refused))
    problem, done = "", list[CheckResult]()
    for left in reversed(range(ATTEMPTS)):
        if left == 0 and (found := _try(replace(job, submitted=job.setup.solution))[1]):
            reason = f"the grader failed on this submission, and on the lab's own solution: {problem}; {found}"
            return _finished(job, unexamined(job.setup.lab(), "machinery", reason))
        answer, problem = _try(job)
        if not problem:
            return json.dumps(_stamped(job, answer["result"]))
        done = [CheckResult(**check) for check in answer.get("checks", ())]
    return _finished(job, _fault_of(job, done, problem))


def _try(job: Job) -> tuple[dict[str, Any], str]:
    """A server's answer, and the problem where there is no result in which everything was graded."""
    try:
        server = _take(job.setup)
        try:
            answer = server.examine(job)
        except BaseException:
            server.close()
            raise
        _give_back(job.setup, server)
    except ServerGone as error:
        return {}, str(error)
    if "result" not in answer:
        return answer, answer["problem"] or "no reason was given"
    checks = answer["result"]["checks"]
    ungraded = [check for check in checks if check["status"] == "machinery"]
    kept = [check for check in checks if check["status"] == "passed"]
    return answer | {"checks": kept}, ungraded[0]["message"] or "no reason was given" if ungraded else ""


def _fault_of(job: Job, done: list[CheckResult], problem: str) -> Result:
    """The result of a submission on which the grader fails every time, while it grades the lab's own solution: what
    makes it fail is in the submission. Passed checks stay passed; a person is asked to look.
    """
    reason = f"the grader failed on your code {ATTEMPTS} times, and not on the lab's own solution: {clean(problem)}"
    result = unexamined(job.setup.lab(), "crashed", reason)
    earned = {check.grade_id: check for check in done if check.status == "passed"}
    result.checks = [earned.get(check.grade_id, check) for check in result.checks]
    result.flags = [f"the grader failed on it {ATTEMPTS} times: {clean(problem)}"[:MAX_FLAG]]
    return result


def check_worker(setup: Setup) -> dict[str, str]:
    """Start a server for `setup` and keep it warm; returns this worker's versions. Raises WorkerError."""
    _same_versions(setup)
    try:
        _give_back(setup, _take(setup))
    except ServerGone as error:
        raise WorkerError(str(error)) from None
    return versions()


def unexamined(lab: Lab, status: str, reason: str) -> Result:
    """A result in which no check earned anything, for a submission that was not examined."""
    checks = [
        CheckResult(cell.grade_id, cell.points, 0.0, status, cell.property_text, reason, cell.hint)
        for cell in lab.of_kind("check")
    ]
    return Result(lab=lab.slug, points=lab.points, checks=checks)


def _finished(job: Job, result: Result) -> str:
    return json.dumps(_stamped(job, json.loads(result.to_json())))


def _stamped(job: Job, result: dict[str, Any]) -> dict[str, Any]:
    own = {"student": job.student, "received": job.received, "lab_version": job.setup.lab_version}
    return result | own | {"secret": job.secret}


@functools.cache
def versions() -> dict[str, str]:
    """The versions that must be the same on all machines of a run for grades to be the same."""
    course = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for folder in (course / "grader", course / "reference_impl"):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(course).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": metadata.version("torch"),
        "inferlab": f"{metadata.version('inferlab')}, code {digest.hexdigest()[:12]}",
    }


def _same_versions(setup: Setup) -> None:
    own = versions()
    wrong = [f"{name}: {own[name]} here, expected {wanted}" for name, wanted in setup.versions.items()
             if own.get(name) != wanted]  # fmt: skip
    if wrong:
        raise WorkerError(
            f"the worker on {socket.gethostname()} has other versions than this machine ({'; '.join(wrong)}); "
            "install the same there, and start the worker again"
        )


class Server:
    """An examiner server's process and the channel to it. Raises WorkerError, ServerGone."""

    def __init__(self, setup: Setup):
        ours, theirs = socket.socketpair()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # what it prints while it starts; closed in close()
        self._process = subprocess.Popen(
            [sys.executable, "-P", *SERVER, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=self._said,
            # Fixed, so that a grade does not depend on the machine; a thread pool would not survive the fork.
            env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # Ctrl-C is for the process that started the run; that ends its servers
        )
        theirs.close()
        self._channel = Connection(ours.detach())
        self.is_stopped, self.key = False, setup.key
        with _lock:
            _alive.add(self)
        try:
            answer = self._ask(asdict(setup), START_SECONDS)
        except ServerGone as error:
            said = self._printed()
            self.close()
            raise ServerGone(f"{error} while it started{': ' if said else ''}{said}") from None
        if "problem" in answer:
            self.close()
            raise (WorkerError if answer["kind"] == "cannot" else ServerGone)(answer["problem"])

    def examine(self, job: Job) -> dict[str, Any]:
        """{"result": ...}, or {"problem": text} when the examiner failed, not the submission."""
        request = {"submitted": job.submitted, "notes": list(job.notes), "limits": job.limits, "secret": job.secret}
        seconds = self._ask(request, ANSWER_SECONDS)["seconds"]
        return self._receive(seconds + ANSWER_SECONDS)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End the server and all its processes. Calling twice does no harm, from any thread."""
        with _lock:
            _alive.discard(self)
        try:
            # Also wakes a thread that waits for an answer; it sees the end of the stream.
            with socket.socket(fileno=os.dup(self._channel.fileno())) as channel:
                channel.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        try:
            self._channel.send_bytes(json.dumps(request).encode())
        except OSError:
            raise self._gone() from None
        return self._receive(seconds)

    def _receive(self, seconds: float) -> dict[str, Any]:
        try:
            if self._channel.poll(seconds):
                return dict(json.loads(self._channel.recv_bytes()))
        except (EOFError, OSError):
            raise self._gone() from None
        raise ServerGone(f"the examiner's process did not answer for {seconds:.0f} s")

    def _gone(self) -> Exception:
        if self.is_stopped:
            return Stopped("grading was stopped")
        try:
            status = f" (exit status {self._process.wait(CLOSE_SECONDS)})"
        except subprocess.TimeoutExpired:
            status = ""
        return ServerGone(f"the examiner's process ended{status}")

    def _printed(self) -> str:
        self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, self._said.tell() - 2000))
        return self._said.read().decode("utf-8", "replace").strip()


_lock = threading.Lock()
_idle: dict[str, list[Server]] = {}  # by Setup.key
_alive: set[Server] = set()


def _take(setup: Setup) -> Server:
    """An idle server, or a new one. Idle servers of other labs are ended: memory is finite."""
    with _lock:
        others = [server for key in list(_idle) if key != setup.key for server in _idle.pop(key)]
        waiting = _idle.get(setup.key, [])
        while waiting and not waiting[-1].is_alive():
            others.append(waiting.pop())
        server = waiting.pop() if waiting else None
    for other in others:
        other.close()
    return server or Server(setup)


def _give_back(setup: Setup, server: Server) -> None:
    with _lock:
        _idle.setdefault(setup.key, []).append(server)


def close_servers(key: str | None = None) -> None:
    """End the servers for one setup, or all of this process, also those at work: calls that wait for them fail."""
    with _lock:
        servers = [server for server in _alive if key in (None, server.key)]
        for known in list(_idle):
            if key in (None, known):
                del _idle[known]
    for server in servers:
        server.is_stopped = True
        server.close()


atexit.register(close_servers)
