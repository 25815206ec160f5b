"""Starts the process for learners' code: one warm process that has imported torch, one fork of it per submission.

With isolation (`sandbox.py`, `confine.py`, `cgroups.py`) the warm process lives in bubblewrap, and each fork in
its own namespaces. Without (`insecure=True`: a learner's own code on their own machine) it is an ordinary process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grader.isolation import sandbox
from grader.isolation.cgroups import Group, make_group
from grader.isolation.sandbox import SandboxError
from grader.learner_side.confine import Bounds
from grader.learner_side.wire import Connection

KEPT_OUTPUT = 64 << 10  # bytes of what a learner's process prints that are kept: the last ones
STACK_SECONDS = 10.0  # for a process to say where it is
# A signal's handler writes it line by line, and may have to wait for a processor between two: it is whole with its last
# line, that of learner.py's main, or of the hundredth frame.
_STACK = re.compile(
    rb"[^\n]*\(most recent call first\):\n((?:  File [^\n]*\n)+?)"
    rb'(?:  File "[^\n]*learner\.py", line \d+ in main\n  File "<string>", line 1 in <module>\n|  \.\.\.\n)'
)
START_SECONDS = 300.0  # for importing torch; only a limit for what could hang
_CREDENTIALS = struct.Struct("3i")
_request_number = itertools.count(1)

__all__ = ["Ending", "Launcher", "LearnerProcess", "SandboxError"]


@dataclass(frozen=True)
class Ending:
    """How a process ended. status: as from os.wait; out_of_memory: it was killed because it used too much; lost: the
    sandbox around it was ended from outside, so nothing is known of it.
    """

    status: int
    out_of_memory: bool = False
    problem: str = ""  # why it never began
    lost: bool = False


class LearnerProcess:
    """One forked process and the channel to it. `pid` is seen from here; `output()` is the tail of what it printed."""

    def __init__(
        self, launcher: Launcher, pid: int, number: int, channel: socket.socket, output_fd: int, group: Group | None
    ):
        self.pid = pid
        self._stat: int | None = None
        self._schedstat: int | None = None
        with contextlib.suppress(OSError):  # only Linux has it
            self._stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
            self._schedstat = os.open(f"/proc/{pid}/schedstat", os.O_RDONLY)
        self.connection = Connection(channel, self.cpu_seconds, self.waited_seconds)
        self._launcher, self._number, self._group = launcher, number, group
        self._ending: Ending | None = None
        self._tail, self._writing = b"", threading.Lock()
        self.num_printed = 0  # bytes
        self._reader = threading.Thread(target=self._drain, args=(output_fd,), daemon=True)
        self._reader.start()

    def _drain(self, fd: int) -> None:
        # A pipe drained here bounds what a submission can print, which a file would not.
        with open(fd, "rb", buffering=0) as pipe:
            while data := pipe.read(1 << 16):
                with self._writing:
                    self._tail = (self._tail + data)[-KEPT_OUTPUT:]
                self.num_printed += len(data)

    def output(self) -> str:
        """The last characters printed so far, on both streams."""
        return self._tail.decode("utf-8", "replace")

    def stack(self) -> str:
        """What the process's first thread does now, innermost call first, as faulthandler writes it.

        "" in isolation, where nothing is sent to the process but data, and when it does not answer.
        """
        if not self._launcher.insecure or self._ending is not None:
            return ""
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGUSR1)
        deadline = time.monotonic() + STACK_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.02)
            with self._writing:
                if found := _STACK.search(self._tail):
                    self._tail = self._tail[: found.start()] + self._tail[found.end() :]
                    return found.group(1).decode("utf-8", "replace")
        return ""

    def cpu_seconds(self) -> float | None:
        """Processor time the process has used, user and system; None where it cannot be read."""
        try:
            fields = os.pread(self._stat, 1024, 0).rsplit(b")", 1)[1].split() if self._stat is not None else []
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else None
        except OSError:
            return None

    def waited_seconds(self) -> float:
        """How long the process's first thread was ready to run and had no processor; 0 where it cannot be read."""
        try:
            return int(os.pread(self._schedstat, 100, 0).split()[1]) / 1e9 if self._schedstat is not None else 0.0
        except (OSError, IndexError):
            return 0.0

    def _is_gone(self) -> bool:
        """Whether the other end of the channel is closed, which happens a moment before the process has ended."""
        watch = select.poll()
        watch.register(self.connection.sock, select.POLLHUP)
        return bool(watch.poll(0))

    def end(self) -> Ending:
        """Kill the process and everything it started, and say how it ended. Calling twice does no harm."""
        if self._ending is not None:
            return self._ending
        ending = self._launcher.end(self._number, gone=self._is_gone())
        ending = dataclasses.replace(ending, lost=self._launcher.is_lost())
        if self._group is not None:
            ending = dataclasses.replace(ending, out_of_memory=ending.out_of_memory or self._group.out_of_memory())
            self._group.remove()
        self.connection.sock.close()
        self._reader.join(timeout=5)
        for fd in (self._stat, self._schedstat):
            if fd is not None:
                os.close(fd)
        self._stat = self._schedstat = None
        self._ending = ending
        return ending


class Launcher:
    """The warm process. Use as a context manager; `fork()` gives a process for one submission.

    insecure: no isolation. Otherwise `start` or the first `fork` raises SandboxError where isolation is not possible:
    there is no silent way around it.
    """

    def __init__(self, insecure: bool = False) -> None:
        self.insecure = insecure
        self._isolated: sandbox.Isolation | None = None
        self._folder: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_ready = False

    def __enter__(self) -> Launcher:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def start(self) -> None:
        """Begin to start the process; returns at once, the first fork waits for it. Raises SandboxError."""
        self._isolated = None if self.insecure else sandbox.isolation()
        _sweep(Path(tempfile.gettempdir()))
        self._folder = tempfile.mkdtemp(prefix=f"learner-{os.getpid()}-")
        self._ship(Path(self._folder))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # one read is one message
        start = "import sys; sys.path[:0] = sys.argv[2:]; from learner_side.learner import main; main(int(sys.argv[1]))"
        words = [sys.executable, "-P", "-c", start, str(theirs.fileno()), self._folder]
        environment: dict[str, str] | None = {**os.environ, **sandbox.FIXED}
        if self._isolated is not None:
            inside = [*sandbox.python(), "-c", start, str(theirs.fileno()), sandbox.SIDE, sandbox.SITE]
            words = sandbox.command(self._isolated, self._folder, inside)
            environment = None  # bubblewrap makes its own
        with open(os.path.join(self._folder, "said"), "wb") as said:
            self._process = subprocess.Popen(
                words,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                cwd=self._folder,
                env=environment,
                start_new_session=True,
            )
        theirs.close()
        ours.settimeout(START_SECONDS)
        self._control, self._is_ready = ours, False

    @staticmethod
    def _ship(folder: Path) -> None:
        course = Path(__file__).resolve().parents[2]
        package = folder / "learner_side"
        package.mkdir()
        for source in (course / "grader" / "learner_side").glob("*.py"):
            shutil.copyfile(source, package / source.name)
        interfaces = sorted((course / "reference_impl" / "interfaces").glob("*.py"))
        if interfaces:
            (package / "interfaces").mkdir()
        for source in interfaces:
            shutil.copyfile(source, package / "interfaces" / source.name)

    def fork(self, memory: int = sandbox.MEMORY) -> LearnerProcess:
        """A new process for one submission, of at most `memory` bytes where it is isolated.

        Raises SandboxError, ConnectionError when there can be none.
        """
        for attempt in (1, 2):
            try:
                return self._fork(memory)
            except (OSError, ValueError) as error:
                # Without isolation a submission can kill the warm process; the next one gets a new one.
                said = self._said()
                again = self._is_ready or self._was_killed()
                self.close()
                if attempt == 2 or not again:
                    if self.insecure:
                        why = f"{error}\n{said}".strip()
                        raise ConnectionError(f"the process for learners' code cannot be started: {why}") from None
                    raise SandboxError(sandbox.diagnosis(said or str(error))) from None
                self.start()
        raise AssertionError

    def _was_killed(self) -> bool:
        """Whether the process, or bubblewrap for it, has ended by SIGKILL: one that cannot start says why and exits."""
        if self._process is None:
            return False
        try:
            return self._process.wait(timeout=5) in (-signal.SIGKILL, 128 + signal.SIGKILL)
        except subprocess.TimeoutExpired:
            return False

    def _fork(self, memory: int) -> LearnerProcess:
        group = None if self.insecure else make_group(memory + sandbox.DISK, sandbox.PROCESSES)
        channel, theirs = socket.socketpair()
        if not self.insecure:
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # before anything is sent: see `_admit`
        read_fd, write_fd = os.pipe()
        number = None
        try:
            request = {"op": "fork", "bounds": self._bounds(memory, group)}
            number = self._ask(request, [theirs.fileno(), write_fd])["number"]
            theirs.close()
            pid = self._admit(channel, number, group) if not self.insecure else number
            return LearnerProcess(self, pid, number, channel, read_fd, group)
        except BaseException:
            if number is not None:
                self.end(number)
            channel.close()
            os.close(read_fd)
            if group is not None:
                group.remove()
            raise
        finally:
            theirs.close()
            os.close(write_fd)

    def _bounds(self, memory: int, group: Group | None) -> dict[str, Any] | None:
        if self._isolated is None:
            return None
        watch = group is None or "memory" not in group.folders
        who = self._isolated
        bounds = Bounds(
            memory, sandbox.DISK, sandbox.PROCESSES, sandbox.WATCHED_PROCESSES, who.uid, who.keeper_uid, watch
        )
        return dataclasses.asdict(bounds)

    def _admit(self, channel: socket.socket, number: int, group: Group | None) -> int:
        """Meet the keeper, put it into the group, then meet the learner's process; returns its process id here."""
        channel.settimeout(START_SECONDS)
        for who in ("keeper", "learner"):
            data, extra, _, _ = channel.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
            if data != b"!":
                problem = self.end(number, gone=True).problem
                raise SandboxError(sandbox.diagnosis(problem or f"the {who} of a submission did not start"))
            pid = next(
                _CREDENTIALS.unpack(value[: _CREDENTIALS.size])[0]
                for level, kind, value in extra
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
            )
            if pid in (0, os.getpid()):
                raise SandboxError(f"the kernel does not say which process the {who} of a submission is")
            if who == "keeper" and group is not None:
                group.add(pid)
            channel.sendall(b"!")
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
        return int(pid)

    def end(self, number: int, gone: bool = False) -> Ending:
        """Kill one forked process with all it started; how it ended, if that is known. gone: it has ended already."""
        try:
            return Ending(**self._ask({"op": "end", "number": number, "gone": gone}, [])["ending"])
        except (OSError, ValueError, TypeError, KeyError):
            return Ending(0)

    def is_lost(self) -> bool:
        """Whether the sandbox has ended without being closed: that can only be done from outside."""
        if self.insecure or self._control is None:
            return False
        watch = select.poll()
        watch.register(self._control, select.POLLHUP)
        return bool(watch.poll(0))

    def end_all(self) -> None:
        """Kill all forked processes, after taking over a launcher whose user died."""
        with contextlib.suppress(OSError, ValueError):
            self._ask({"op": "end all"}, [])

    def _ask(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        if self._control is None or self._process is None:
            raise ConnectionError("not started")
        if not self._is_ready:
            if not self._control.recv(4096):
                raise ConnectionError("the process for learners' code ended while it started")
            self._is_ready = True
        request["id"] = f"{os.getpid()}-{next(_request_number)}"
        socket.send_fds(self._control, [json.dumps(request).encode()], fds)
        while True:
            data = self._control.recv(65536)
            if not data:
                raise ConnectionError("the process for learners' code has ended")
            answer: dict[str, Any] = json.loads(data)
            if answer["id"] == request["id"]:  # any other answers a killed user of this launcher
                return answer

    def _said(self) -> str:
        with contextlib.suppress(OSError, TypeError):
            return Path(self._folder or "", "said").read_bytes()[-4000:].decode("utf-8", "replace")
        return ""

    def close(self) -> None:
        """End the warm process and all its children. Calling twice does no harm."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._control = self._process = self._folder = None


def _sweep(parent: Path) -> None:
    """Remove the folders of launchers that were killed; without /proc these cannot be recognised, and stay."""
    for folder in parent.glob("learner-*-*") if os.path.isdir("/proc/self") else ():
        owner = folder.name.split("-")[1]
        if owner.isdigit() and not os.path.exists(f"/proc/{owner}"):
            shutil.rmtree(folder, ignore_errors=True)
