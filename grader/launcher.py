"""Starts the process for learners' code: one warm process that has imported torch, one fork of it per submission."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from .wire import Connection

SHIPPED = ("codec.py", "wire.py", "peer.py", "learner.py")
KEPT_OUTPUT = 64 << 10  # bytes of what a learner's process prints that are kept: the last ones
START_SECONDS = 300.0  # for importing torch; only a limit for what could hang


class LearnerProcess:
    """One forked process and the channel to it. `output()` is the tail of what it printed."""

    def __init__(self, launcher: Launcher, pid: int, channel: socket.socket, output_fd: int):
        self.pid = pid
        self.connection = Connection(channel, self.cpu_seconds)
        self._stat: int | None = None
        with contextlib.suppress(OSError):  # only Linux has it
            self._stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
        self._launcher = launcher
        self._tail = b""
        self._reader = threading.Thread(target=self._drain, args=(output_fd,), daemon=True)
        self._reader.start()

    def _drain(self, fd: int) -> None:
        # A pipe drained here bounds what a submission can print, which a file would not.
        with open(fd, "rb", buffering=0) as pipe:
            while data := pipe.read(1 << 16):
                self._tail = (self._tail + data)[-KEPT_OUTPUT:]

    def output(self) -> str:
        """The last characters printed so far, on both streams."""
        return self._tail.decode("utf-8", "replace")

    def cpu_seconds(self) -> float | None:
        """Processor time the process has used, user and system; None where it cannot be read."""
        try:
            fields = os.pread(self._stat, 1024, 0).rsplit(b")", 1)[1].split() if self._stat is not None else []
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else None
        except OSError:
            return None

    def end(self) -> int:
        """Kill the process and everything in its group. Returns its wait status; calling twice does no harm."""
        status = self._launcher.end(self.pid)
        self.connection.sock.close()
        self._reader.join(timeout=5)
        if self._stat is not None:
            os.close(self._stat)
            self._stat = None
        return status


class Launcher:
    """The warm process. Use as a context manager; `fork()` gives a process for one submission."""

    def __init__(self) -> None:
        self._folder: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def __enter__(self) -> Launcher:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def start(self) -> None:
        """Begin to start the process; returns at once, the first fork waits for it."""
        here = Path(__file__).resolve().parent
        self._folder = tempfile.mkdtemp(prefix="learner-")
        package = Path(self._folder) / "learner_side"
        package.mkdir()
        (package / "__init__.py").write_text("")
        for name in SHIPPED:
            shutil.copyfile(here / name, package / name)
        interfaces = here.parent / "reference_impl" / "interfaces.py"
        if interfaces.exists():
            shutil.copyfile(interfaces, package / "interfaces.py")
        ours, theirs = socket.socketpair()
        start = (
            "import sys; sys.path.insert(0, sys.argv[1]); from learner_side.learner import main; main(int(sys.argv[2]))"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", start, self._folder, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=sys.__stderr__,
            cwd=self._folder,
            env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        theirs.close()
        ours.settimeout(START_SECONDS)
        self._control = ours

    def fork(self) -> LearnerProcess:
        """A new process for one submission. Raises ConnectionError when the warm process cannot be started."""
        for attempt in (1, 2):
            channel, theirs = socket.socketpair()
            read_fd, write_fd = os.pipe()
            try:
                answer = self._ask({"op": "fork"}, [theirs.fileno(), write_fd])
                return LearnerProcess(self, answer["pid"], channel, read_fd)
            except (OSError, ValueError):
                # Without a sandbox a submission can kill the warm process; the next one gets a new one.
                channel.close()
                os.close(read_fd)
                self.close()
                if attempt == 2:
                    raise ConnectionError("the process for learners' code cannot be started") from None
                self.start()
            finally:
                theirs.close()
                os.close(write_fd)
        raise AssertionError

    def end(self, pid: int) -> int:
        """Kill one forked process; returns its wait status, or 0 where it is not known."""
        try:
            return int(self._ask({"op": "end", "pid": pid}, [])["status"])
        except (OSError, ValueError):
            return 0

    def _ask(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        if self._control is None or self._process is None:
            raise ConnectionError("not started")
        if not hasattr(self._process, "is_ready"):
            if not self._control.recv(4096):
                raise ConnectionError("the process for learners' code ended while it started")
            self._process.is_ready = True  # type: ignore[attr-defined]
        socket.send_fds(self._control, [json.dumps(request).encode()], fds)
        answer = self._control.recv(4096)
        if not answer:
            raise ConnectionError("the process for learners' code has ended")
        return json.loads(answer)

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
