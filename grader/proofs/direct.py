"""A lab's checks run directly, as in a learner's notebook: in forks of this process, which an endless loop or a crash
does not end."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import select
import signal
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from grader.checks import secret_seed
from grader.examination.examiner import check_result, explain
from grader.examination.reference import Reference, run_cell
from grader.examination.submission import Submission, learner_cells
from grader.labs.lab import Lab
from grader.learner_side.kernel_run import KEPT
from grader.learner_side.peer import LAB_MODULE

CELL_SECONDS = 20  # of processor time, for one cell; bounds what loops. The longest check of the course takes 4
CELL_WAIT = 600.0  # seconds, for one check; bounds what sleeps
MEMORY = 6 << 30  # bytes of a process; bounds what appends without end


def run_directly(lab: Lab, submission: Submission, secret: bytes, to_first_failure: bool = False) -> dict[str, str]:
    """Status per check with the names bound directly, in one namespace, in forks of this process.

    A check that kills or hangs its process is `crashed` or `timed out`; the rest runs in another fork.
    to_first_failure: no check runs behind the first that does not pass.
    """
    checks = [cell.grade_id for cell in lab.of_kind("check")]
    statuses: dict[str, str] = {}

    def over() -> bool:
        failed = any(status != "passed" for status in statuses.values())
        return len(statuses) == len(checks) or (to_first_failure and failed)

    while not over():
        done = len(statuses)
        read_fd, write_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read_fd)
            with contextlib.suppress(BaseException):
                _direct_child(lab, submission, secret, set(checks[done:]), write_fd, to_first_failure)
            os._exit(0)
        os.close(write_fd)
        lines = _read_lines(read_fd, CELL_WAIT)
        os.close(read_fd)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        hung = lines[-1:] == ["timed out"]
        statuses.update(zip(checks[done:], lines[:-1] if hung else lines, strict=False))
        if not over():
            statuses[checks[len(statuses)]] = "timed out" if hung else "crashed"
    return statuses


def _read_lines(fd: int, seconds: float) -> list[str]:
    """Lines until the end of file; `timed out` as the last one when none came for `seconds`."""
    text = b""
    while True:
        ready, _, _ = select.select([fd], [], [], seconds)
        data = os.read(fd, 1 << 16) if ready else b""
        text += data
        if not data:
            return [*text.decode().split("\n")[:-1], *([] if ready else ["timed out"])]


def _direct_child(
    lab: Lab, submission: Submission, secret: bytes, todo: set[str], fd: int, to_first_failure: bool
) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    answers = {name: source for source, name in learner_cells(lab, submission)}
    namespace: dict[str, Any] = {"__name__": LAB_MODULE, "reference": Reference(lab)}
    with secret_seed(secret):
        for cell in lab.cells:
            end = math.ceil(time.process_time()) + CELL_SECONDS
            resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))
            if cell.kind == "check" and cell.grade_id in todo:
                try:
                    run_cell(cell.source, cell.grade_id, namespace)
                    status = check_result(cell, "passed", "").status
                except BaseException as error:
                    status = explain(error, cell)[0]
                os.write(fd, status.encode() + b"\n")
                if to_first_failure and status != "passed":
                    return
            elif cell.kind == "solution" or (cell.kind == "code" and cell.where not in ("notebook", "milestone")):
                with contextlib.suppress(Exception, SystemExit):
                    run_cell(answers.get(cell.grade_id, cell.source), cell.grade_id, namespace)


@contextlib.contextmanager
def kept_kernels() -> Iterator[None]:
    """Keeps compiled kernels inside the block: none is compiled twice, here and in all processes started here."""
    with tempfile.TemporaryDirectory(prefix="compiled-kernels-") as folder:
        os.environ[KEPT] = folder
        try:
            yield
        finally:
            del os.environ[KEPT]


def compute_as_in_a_learners_process() -> None:
    """Sets up a process that runs checks directly, in forks. Call it before anything imports Triton."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    torch.set_num_threads(1)  # and so no thread pool exists when we fork
    # As in grader.learner_side.learner: torch.empty is NaN. What use_deterministic_algorithms does besides is to import
    # the compiler's settings, two seconds.
    torch.set_deterministic_debug_mode("warn")
