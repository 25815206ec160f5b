"""The second process: it runs a learner's cells and answers the examiner's calls. It holds no test and no reference.

`grader.launcher` starts it once, from a folder that holds only codec.py, wire.py, peer.py, this file and a copy of
`reference_impl/interfaces.py`. That process imports torch, then forks one child per request, so that a submission costs
a fork and not an import. There is no sandbox around it yet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.abc
import importlib.util
import json
import linecache
import os
import resource
import signal
import socket
import sys
import traceback
import types
from collections.abc import Sequence
from typing import Any

import torch

from .peer import CELL, Peer, trace_text
from .wire import Connection

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
    """The dataclasses of the shipped `interfaces.py`, by name; `import reference_impl.interfaces` finds it too."""
    path = os.path.join(folder, "interfaces.py")
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
    except SystemExit as error:
        return f"SystemExit: {error}"
    except Exception as error:
        return trace_text(error)
    return None


def _serve(channel: socket.socket, dataclasses_by_name: dict[str, type]) -> None:
    """Be one submission's process: a fresh `__main__`, two operations (run cells, hand out names), and calls."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module  # so that dataclasses and typing find the learner's names
    peer = Peer(Connection(channel), strict=False, dataclasses_by_name=dataclasses_by_name)

    def cells(header: dict[str, Any], payload: Any) -> Any:
        return [run_cell(source, name, vars(module)) for source, name in payload]

    def names(header: dict[str, Any], payload: Any) -> Any:
        return {name: vars(module)[name] for name in payload if name in vars(module)}

    peer.operations = {"cells": cells, "names": names}
    with contextlib.suppress(ConnectionError):
        peer.serve_forever()


def _become_child(fds: list[int], dataclasses_by_name: dict[str, type]) -> None:
    channel_fd, output_fd = fds
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    channel_fd = os.dup2(channel_fd, 3)
    os.closerange(4, 4096)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # New streams, not reconfigured ones: the old ones may remember a seekable file. A character that cannot be
    # printed must not cost an honest submission anything.
    sys.stdout, sys.stderr = (open(fd, "w", 1, "utf-8", "replace", closefd=False) for fd in (1, 2))  # noqa: SIM115
    torch.manual_seed(0)
    _serve(socket.socket(fileno=channel_fd), dataclasses_by_name)


def main(control_fd: int) -> None:
    """Fork and kill on request: one JSON line per request, file descriptors beside it. Ends when the socket closes."""
    torch.set_num_threads(1)  # also: no thread pool exists when we fork
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty is NaN: the same grade every time
    folder = os.path.dirname(os.path.abspath(__file__))
    dataclasses_by_name = load_interfaces(folder)
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != os.path.dirname(folder)]
    sys.meta_path.insert(0, _NotHere())
    control = socket.socket(fileno=control_fd)
    children: set[int] = set()
    control.send(b'{"ready": true}')
    while True:
        data, fds, _, _ = socket.recv_fds(control, 4096, 4)
        if not data:
            break
        request = json.loads(data)
        if request["op"] == "fork":
            pid = os.fork()
            if pid == 0:
                status = 0
                try:
                    _become_child(fds, dataclasses_by_name)
                except BaseException:
                    traceback.print_exc()
                    status = 1
                finally:
                    os._exit(status)
            children.add(pid)
            for fd in fds:
                os.close(fd)
            control.send(json.dumps({"pid": pid}).encode())
        else:
            control.send(json.dumps({"status": _end(request["pid"], children)}).encode())
    for pid in list(children):
        _end(pid, children)


def _end(pid: int, children: set[int]) -> int:
    """Kill a child and its process group; returns its wait status (how it ended, if it had ended before)."""
    if pid not in children:
        return 0
    children.discard(pid)
    done, status = os.waitpid(pid, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    if not done:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    return status
