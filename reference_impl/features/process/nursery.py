"""Processes that are forked from one which has imported torch and done nothing else, so that several begin at once.

To import torch takes most of a worker's start, and its code is most of a worker's memory: of ranks that are forked,
both are had once. What is forked must not have run anything: no tensor operation, no call of CUDA, no second thread,
for a fork has none of its parent's threads, but their locks. So the parent is a process of its own, started by exec,
never the user's script or notebook.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback

from reference_impl.features.process.beside import end_with_the_other, ignore_signals, start_beside
from reference_impl.features.process.worker import STARTING_SECONDS

_CODE = struct.Struct("i")
_CLOSING_SECONDS = 10.0  # for the process that forks to end by itself
_TELLING_SECONDS = 5.0  # for the parent of a process that has ended to say how


def supported() -> bool:
    return hasattr(os, "pidfd_open")


class Nursery:
    """The process that forks. `close` ends it; what it has forked lives on until its own socket is closed."""

    def __init__(self) -> None:
        self._process, self._control = start_beside(__name__)
        self._control.settimeout(STARTING_SECONDS)
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, module: str, *words: str) -> tuple[ForkedProcess, socket.socket]:
        """Forks a process that calls `main` of a module; otherwise as `start_beside`. ChildProcessError if the process
        that forks is gone."""
        mine, theirs = socket.socketpair()
        status, told = os.pipe()
        try:
            with self._lock:
                socket.send_fds(self._control, [json.dumps([module, *words]).encode()], [theirs.fileno(), told])
                answer = self._control.recv(_CODE.size)
        except OSError:
            answer = b""
        finally:
            theirs.close()
            os.close(told)
        if len(answer) < _CODE.size:
            os.close(status)
            mine.close()
            raise ChildProcessError(
                f"the process {self.pid} that forks ranks has ended, or was stopped for {STARTING_SECONDS:g} s: make a "
                "new engine"
            )
        return ForkedProcess(_CODE.unpack(answer)[0], status), mine

    def close(self) -> None:
        """Idempotent."""
        self._control.close()
        try:
            self._process.wait(_CLOSING_SECONDS)
        except subprocess.TimeoutExpired:  # it was stopped
            self._process.kill()
            self._process.wait()


class ForkedProcess:
    """A process of a nursery, with what `subprocess.Popen` has. status: where the nursery writes how it ended."""

    def __init__(self, pid: int, status: int):
        self.pid, self._status = pid, status
        self._code: int | None = None
        self._pidfd: int | None = None  # tells its end, also where its parent was stopped
        with contextlib.suppress(ProcessLookupError):  # it has ended, and its parent has said how
            self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """As `Popen.returncode`; None while it runs."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """TimeoutError if it still runs after so many seconds."""
        code = self._ended(timeout)
        if code is None:
            raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _ended(self, timeout: float | None) -> int | None:
        if self._code is None:
            both = [each for each in (self._status, self._pidfd) if each is not None]
            if not _readable(both, timeout):
                return None
            self._code = self._told()
            for each in both:
                os.close(each)
        return self._code

    def _told(self) -> int:
        """How it ended, by its parent; if that is gone or stopped, it is not known, and this process is ended."""
        if _readable([self._status], _TELLING_SECONDS) and (told := os.read(self._status, _CODE.size)):
            code: int = _CODE.unpack(told)[0]
            return code
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return -signal.SIGKILL


def _readable(numbers: list[int], timeout: float | None) -> bool:
    """Whether one of these can be read, or its other end is closed. Not select, which takes no number above 1,023."""
    waited = select.poll()
    for number in numbers:
        waited.register(number, select.POLLIN)
    return bool(waited.poll(None if timeout is None else 1000 * timeout))


# --- in that process ------------------------------------------------------------------------------------------------


def main() -> None:
    ignore_signals()
    end_with_the_other(int(sys.argv[1]))  # also if it is stopped; before anything is imported
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's would start threads while it is imported
    import torch  # noqa: F401

    control = socket.socket(fileno=int(sys.argv[1]))
    children: dict[int, tuple[int, int]] = {}  # by pidfd: the process, and where to write how it ended
    while True:
        ready: list[int] = select.select([control.fileno(), *children], [], [])[0]
        for ended in children.keys() & set(ready):
            _tell(ended, *children.pop(ended))
        if control.fileno() in ready and not _fork(control, children):
            return


def _fork(control: socket.socket, children: dict[int, tuple[int, int]]) -> bool:
    """Forks what is asked for; returns whether there was anything, and not the end."""
    words, numbers, _, _ = socket.recv_fds(control, 1 << 16, 2)
    if not words:
        return False
    mine, status = numbers
    if (pid := os.fork()) == 0:
        control.close()
        for number in (status, *(number for pidfd, (_, other) in children.items() for number in (pidfd, other))):
            os.close(number)
        _become(json.loads(words), mine)
    os.close(mine)
    children[os.pidfd_open(pid)] = pid, status
    control.send(_CODE.pack(pid))
    return True


def _tell(pidfd: int, pid: int, status: int) -> None:
    """Writes how a process ended."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):  # the other end does not ask any more
        os.write(status, _CODE.pack(code))
    os.close(pidfd)
    os.close(status)


def _become(words: list[str], number: int) -> None:
    """Runs a module's `main`, and ends this process."""
    module, *rest = words
    sys.argv, code = [module, str(number), *rest], 0
    try:
        importlib.import_module(module).main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
