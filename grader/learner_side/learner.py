"""The second process: it runs a learner's cells and answers the examiner's calls. It holds no test and no reference.

`grader.isolation.launcher` starts it once, from a folder that holds only copies of this package and of
`reference_impl/interfaces/`. That process imports torch, then forks one child per request, so that a submission costs
a fork and not an import. Inside bubblewrap each child is confined first (`confine.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import fcntl
import gc
import importlib
import importlib.abc
import importlib.util
import json
import linecache
import os
import resource
import signal
import socket
import sys
import time
import traceback
import types
from collections.abc import Sequence
from typing import Any

import torch

from . import confine, kernel_run
from .confine import Bounds
from .peer import Peer
from .stand_ins import CELL, trace_text
from .wire import Connection

KEEPER_SECONDS = 2.0  # for a keeper to report; then it is killed
CHANNEL = 3  # the file descriptor of the channel in a learner's process

# Machinery of the course that a solution must not lean on: in the sandbox it will not be there at all.
NOT_HERE = ("grader", "solutions", "tests", "chapters", "labs", "learner_side")


class _NotHere(importlib.abc.MetaPathFinder):
    """Refuses imports of the course's machinery; of the engine only `reference_impl.interfaces` exists."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> None:
        top = fullname.split(".")[0]
        if top in NOT_HERE or top == "reference_impl":
            raise ModuleNotFoundError(f"{fullname} is not available to a solution when it is graded", name=fullname)
        return None


def load_interfaces(folder: str) -> dict[str, type]:
    """The dataclasses of the shipped `interfaces/`, by name; `import reference_impl.interfaces` finds it too."""
    path = os.path.join(folder, "interfaces", "__init__.py")
    if not os.path.exists(path):
        return {}
    package = types.ModuleType("reference_impl")
    package.__path__ = []
    spec = importlib.util.spec_from_file_location("reference_impl.interfaces", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.update({"reference_impl": package, "reference_impl.interfaces": module})
    spec.loader.exec_module(module)
    package.interfaces = module  # type: ignore[attr-defined]
    return {n: c for n, c in vars(module).items() if isinstance(c, type) and dataclasses.is_dataclass(c)}


def run_cell(source: str, name: str, namespace: dict[str, Any]) -> str | None:
    """Run one cell; None, or the text of what went wrong (the cell's own lines only)."""
    filename = f"{CELL}{name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    try:
        exec(compile(source, filename, "exec", dont_inherit=True), namespace)
    except BaseException as error:
        try:
            return f"SystemExit: {error}" if isinstance(error, SystemExit) else trace_text(error)
        except BaseException:  # of an exception whose own methods raise
            return "the cell raised an exception that cannot be shown"
    return None


def _serve(channel: socket.socket, dataclasses_by_name: dict[str, type]) -> None:
    """Be one submission's process: a fresh `__main__`, calls, and operations: run cells, hand out names; and, where no
    cell was run, launch and compile a kernel that is given as source."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module  # so that dataclasses and typing find the learner's names
    peer = Peer(Connection(channel), strict=False, dataclasses_by_name=dataclasses_by_name)

    def cells(header: dict[str, Any], payload: Any) -> Any:
        return [run_cell(source, name, vars(module)) for source, name in payload]

    def names(header: dict[str, Any], payload: Any) -> Any:
        return {name: vars(module)[name] for name in payload if name in vars(module)}

    def launch(header: dict[str, Any], payload: Any) -> Any:
        sources, name, grid, arguments, constants = payload
        return vars(kernel_run.run_source(sources, name, grid, arguments, constants))

    def compiled(header: dict[str, Any], payload: Any) -> Any:
        return kernel_run.compile_source(*payload)

    peer.operations = {"cells": cells, "names": names, "launch": launch, "compile": compiled}
    with contextlib.suppress(ConnectionError):
        peer.serve_forever()


def _become_child(fds: list[int], dataclasses_by_name: dict[str, type]) -> None:
    """Becomes the learner's process, in a fork, where there is no isolation."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _arrange(fds)
    # A learner's own check asks where a loop is; nothing that Python code does can keep this from answering.
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)
    _begin(dataclasses_by_name)


def _arrange(fds: list[int]) -> list[int]:
    """Puts nothing on stdin, the output's pipe on stdout and stderr, the other files from 3 on; all else is closed."""
    channel, output, *others = fds
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in (output, channel, *others)]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(moved[0], 1)
    os.dup2(moved[0], 2)
    for number, fd in enumerate(moved[1:], CHANNEL):
        os.dup2(fd, number)
    os.closerange(CHANNEL + len(moved) - 1, 65536)
    return list(range(CHANNEL, CHANNEL + len(moved) - 1))


def _begin(dataclasses_by_name: dict[str, type]) -> None:
    # New streams, not reconfigured ones: the old ones may remember a seekable file. A character that cannot be
    # printed must not cost an honest submission anything.
    sys.stdout, sys.stderr = (open(fd, "w", 1, "utf-8", "replace", closefd=False) for fd in (1, 2))  # noqa: SIM115
    torch.manual_seed(0)
    _serve(socket.socket(fileno=CHANNEL), dataclasses_by_name)


class WarmProcess:
    """Forks and kills on request: one JSON message per request, file descriptors beside it."""

    def __init__(self, control: socket.socket, dataclasses_by_name: dict[str, type]):
        self.control = control
        self.dataclasses_by_name = dataclasses_by_name
        self.children: dict[int, int | None] = {}  # process -> the pipe on which its keeper reports, if it has one

    def answer(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        if request["op"] == "fork":
            bounds = request["bounds"]
            return {"number": self.fork(fds) if bounds is None else self.fork_confined(Bounds(**bounds), fds)}
        if request["op"] == "end":
            return {"ending": self.end(request["number"], request["gone"])}
        for number in list(self.children):
            self.end(number, gone=False)
        return {}

    def fork(self, fds: list[int]) -> int:
        pid = os.fork()
        if pid == 0:
            status = 0
            try:
                _become_child(fds, self.dataclasses_by_name)
            except BaseException:
                traceback.print_exc()
                status = 1
            finally:
                os._exit(status)
        self.children[pid] = None
        return pid

    def fork_confined(self, bounds: Bounds, fds: list[int]) -> int:
        report_read, report_write = os.pipe()

        def run() -> None:
            _begin(self.dataclasses_by_name)
            os._exit(0)

        number = confine.start(bounds, _arrange, [*fds, report_write], run)
        os.close(report_write)
        self.children[number] = report_read
        return number

    def end(self, pid: int, gone: bool) -> dict[str, Any]:
        """Kill a child and all it started; how it ended, if it had ended before. gone: its channel is closed."""
        if not self.children.get(pid, 0):
            return self._end_unconfined(pid)
        report = self.children.pop(pid)
        assert report is not None
        # The channel closes a moment before the process has ended and its keeper knows how.
        if pid and not (gone and _has_ended(pid)) and not _has_ended(pid, signal.SIGTERM):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        with open(report, "rb") as pipe:
            lines = pipe.read(4096).splitlines()  # the keeper has ended, and nothing else holds the other end
        return {"status": int(signal.SIGKILL)} | (json.loads(lines[0]) if lines else {})

    def _end_unconfined(self, pid: int) -> dict[str, Any]:
        if pid not in self.children:
            return {"status": 0}
        del self.children[pid]
        done, status = os.waitpid(pid, os.WNOHANG)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        if not done:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        return {"status": status}


def _has_ended(keeper: int, asked_by: int = 0) -> bool:
    """Wait for a keeper as long as it may take to report, after sending it a signal."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(keeper, asked_by)
    deadline = time.monotonic() + KEEPER_SECONDS
    while time.monotonic() < deadline:
        if os.waitpid(keeper, os.WNOHANG)[0]:
            return True
        time.sleep(0.001)
    return False


def main(control_fd: int) -> None:
    """Be the warm process. Ends when the control socket closes."""
    torch.set_num_threads(1)  # also: no thread pool exists when we fork
    # torch.empty is NaN: the same grade every time. (use_deterministic_algorithms also imports torch._inductor: 2 s.)
    torch.set_deterministic_debug_mode("warn")
    torch.randn(1)  # reads /proc/cpuinfo: a submission cannot, and its output would begin with a complaint about that
    with contextlib.suppress(ImportError):  # there is none for macOS
        importlib.import_module("triton.language")  # with TRITON_INTERPRET set: a submission finds it imported
    folder = os.path.dirname(os.path.abspath(__file__))
    dataclasses_by_name = load_interfaces(folder)
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != os.path.dirname(folder)]
    sys.meta_path.insert(0, _NotHere())
    control = socket.socket(fileno=control_fd)
    warm = WarmProcess(control, dataclasses_by_name)
    confine.be_parent_of_orphans()
    gc.freeze()  # a fork's garbage collection need not touch, and so copy, what was there before
    control.send(b'{"ready": true}')
    while True:
        data, fds, _, _ = socket.recv_fds(control, 65536, 4)
        if not data:
            break
        request = json.loads(data)
        answer = warm.answer(request, list(fds))
        for fd in fds:
            os.close(fd)
        control.send(json.dumps(answer | {"id": request["id"]}).encode())
    warm.answer({"op": "end all"}, [])
