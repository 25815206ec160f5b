"""A warm trusted process: it has imported torch and run a lab's own cells, and forks one examiner per submission.

`python -m grader.examination.examiner_server FD`; `worker.py` starts it and speaks with it over FD, in JSON messages:
first the setup, then one submission after another. It owns the launcher of the untrusted side. When FD closes, it ends
with all its processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from grader.examination.examiner import Limits, examine, prepare
from grader.examination.intake import read_submission
from grader.examination.verdict import check_result
from grader.examination.worker import Setup
from grader.isolation.launcher import Launcher, SandboxError
from grader.results.result import CheckResult, Result

MARGIN_SECONDS = 30.0  # that an examiner gets beyond its own limits before it is killed from outside
_PR_SET_PDEATHSIG = 1


class _WorkerGone(Exception):
    """The worker has closed its end and no longer waits for an answer."""


class Examiners:
    """One lab, prepared, and the children that examine submissions, one at a time."""

    def __init__(self, setup: Setup, channel: Connection):
        self.channel = channel
        self.lab = setup.lab()
        self.launcher = Launcher(insecure=setup.insecure)
        self.launcher.start()  # imports torch beside what is done here
        self.prepared = prepare(self.lab, bytes.fromhex(setup.secret))
        self._warm_up()
        gc.collect()
        gc.freeze()  # the children's collections must not copy the pages of what is shared

    def examine(self, request: dict[str, Any]) -> dict[str, Any]:
        """What one child made of a submission: {"result": ...} or {"problem": text}."""
        limits = Limits(**request["limits"])
        seconds = limits.total + limits.check + MARGIN_SECONDS
        _send(self.channel, {"seconds": seconds})
        read_fd, write_fd = os.pipe()
        pid = os.fork()  # this process has one thread, and so no lock that would stay locked in the child
        if pid == 0:
            os.close(read_fd)
            self.channel.close()
            _child(functools.partial(self._examine_here, request, limits), Connection(write_fd, readable=False))
        os.close(write_fd)
        try:
            with Connection(read_fd, writable=False) as pipe:
                checks, last, late = self._listen(pipe, time.monotonic() + seconds)
        finally:  # also when the worker has closed its end: a living child holds the launcher's socket open
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        # A child that died may have left learners' processes behind.
        if self._launcher_ended():
            self.launcher.close()
            self.launcher.start()
            self._warm_up()
        elif "result" not in last:
            self.launcher.end_all()
        if late:
            return {"result": self._cut_short(checks, seconds)}
        if "result" in last:
            return last
        problem = last.get("problem", f"the examiner's process ended ({_how(status)})")
        return {"problem": problem, "checks": [dataclasses.asdict(check) for check in checks]}

    def _examine_here(
        self, request: dict[str, Any], limits: Limits, say: Callable[[dict[str, Any]], None]
    ) -> dict[str, Any]:
        """Examines, in the child, and reports each check as soon as it is done."""
        torch.manual_seed(0)
        random.seed(0)
        submission = read_submission(request["submitted"].encode(), self.lab)
        submission.notes = list(request["notes"])
        result = examine(
            self.lab,
            submission,
            self.launcher,
            secret=bytes.fromhex(request["secret"]),
            limits=limits,
            prepared=self.prepared,
            on_check=lambda check: say({"check": dataclasses.asdict(check)}),
        )
        return {"result": json.loads(result.to_json())}

    def _listen(self, pipe: Connection, deadline: float) -> tuple[list[CheckResult], dict[str, Any], bool]:
        """What the child sends: checks that are done, and its last message; and whether it was too late.

        Raises _WorkerGone.
        """
        checks: list[CheckResult] = []
        while True:
            ready = wait([pipe, self.channel], max(0.0, deadline - time.monotonic()))
            if self.channel in ready:
                raise _WorkerGone  # between question and answer a worker says nothing: it has closed
            if not ready:
                return checks, {}, True
            try:
                message = json.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                return checks, {}, False
            if "check" not in message:
                return checks, message, False
            checks.append(CheckResult(**message["check"]))

    def _cut_short(self, checks: list[CheckResult], seconds: float) -> dict[str, Any]:
        """The checks that were done before, which stay, and the rest as not finished."""
        for cell in self.lab.of_kind("check")[len(checks) :]:
            checks.append(check_result(cell, "timed out", f"grading was ended after {seconds:.0f} s"))
        result = Result(lab=self.lab.slug, points=self.lab.points, checks=checks, seconds=round(seconds, 3))
        return dict(json.loads(result.to_json()))

    def _warm_up(self) -> None:
        """Starts one learner's process, to see that they can be started. Raises SandboxError, ConnectionError."""
        self.launcher.fork().end()

    def _launcher_ended(self) -> bool:
        process = self.launcher._process
        return process is None or process.poll() is not None


def _child(work: Callable[[Callable[[dict[str, Any]], None]], dict[str, Any]], pipe: Connection) -> None:
    """Do the work of a forked child and end the process; never returns into the server's code.

    work(say): may send messages on the way, returns the last one.
    """
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no Linux, no harm: the pipe's end is noticed
        signal.signal(signal.SIGINT, signal.default_int_handler)
        devnull = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(devnull, fd)
        try:
            _send(pipe, work(functools.partial(_send, pipe)))
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {error} ({os.path.basename(where.filename)}, line {where.lineno})"
            _send(pipe, {"problem": text})
    finally:
        os._exit(0)


def _send(channel: Connection, message: dict[str, Any]) -> None:
    channel.send_bytes(json.dumps(message).encode())


def _how(status: int) -> str:
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit status {os.WEXITSTATUS(status)}"


def main(fd: int) -> None:
    """Serve one worker until it closes its end."""
    torch.set_num_threads(1)  # grades must not depend on the number of cores; and a thread pool forbids forks
    torch.set_deterministic_debug_mode("warn")  # as in grader.learner_side.learner: torch.empty is NaN
    channel = Connection(fd)
    examiners: Examiners | None = None
    try:
        setup = Setup(**json.loads(channel.recv_bytes()))
        try:
            examiners = Examiners(setup, channel)
        except Exception as error:
            kind = "cannot" if isinstance(error, SandboxError) else "failed"
            _send(channel, {"problem": str(error) or repr(error), "kind": kind})
            return
        _send(channel, {"ready": True})
        while True:
            _send(channel, examiners.examine(json.loads(channel.recv_bytes())))
    except (EOFError, OSError, _WorkerGone):
        pass
    finally:
        if examiners is not None:
            examiners.launcher.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
