"""A Python that has already imported what takes seconds to import, and forks for each program that is run in it.

`Warm("torch", "triton").run(("-m", "module", "argument"), environment)` does what that command line does in a process
of its own with that environment, without the imports; PYTHONPATH and its like come too late. Only packages of others
are imported beforehand: what is tested is imported in the fork. The process that forks has one thread, so that nothing
is lost in a fork.

Run as a program, this file is either that process (`serve`) or one that stands for a fork (`run`): it has the fork's
input, outputs, folder, environment and exit status, and whoever kills it kills the fork.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

COST = "INFERLAB_COST"  # a file for the CPU seconds of a fork, which is no child of who asks for it
TRACE = "INFERLAB_TRACE"  # what the fork needs of the project is written there: tests/selection/tracing.py
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Warm:
    """The process that has imported `modules`. It and all its forks end with `close`, or with this process."""

    def __init__(self, *modules: str):
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        self._address = str(Path(self._folder.name) / "socket")
        command = [sys.executable, "-P", __file__, "serve", self._address, *modules]
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= dict.fromkeys(THREADS, "1")
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n", "see its traceback above"

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command line of a program that is run warm: `python *arguments`, where these begin with -c or -m."""
        return [sys.executable, "-I", "-S", __file__, "run", self._address, *arguments]

    def run(self, arguments: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(arguments), capture_output=True, text=True, env=dict(env), timeout=9000)

    def close(self) -> None:
        assert self._process.stdin is not None
        before = _seconds_of_children()
        self._process.stdin.close()
        self._process.wait(600)
        # The forks are now among what our children took, and were counted when they ended.
        _add_cost(os.environ.get(COST), before - _seconds_of_children())
        self._folder.cleanup()


def run(address: str, arguments: Sequence[str]) -> int:
    """In the place of a fork: hands over what this process was given, and waits."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        request = json.dumps([list(arguments), os.getcwd(), dict(os.environ)]).encode()
        standard = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
        server.sendmsg([len(request).to_bytes(4, "big")], standard)
        server.sendall(request)
        answer = server.recv(64)
    return int(answer or 1)


def _seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _add_cost(path: str | None, seconds: float) -> None:
    with contextlib.suppress(FileNotFoundError):  # its job has ended
        if path:
            with open(path, "a") as cost:
                cost.write(f"{seconds:.3f}\n")


def _received(client: socket.socket) -> tuple[list[int], tuple[list[str], str, dict[str, str]]]:
    length, ancillary, _, _ = client.recvmsg(4, socket.CMSG_SPACE(3 * array.array("i").itemsize))
    files = array.array("i")
    files.frombytes(ancillary[0][2])
    text = b""
    while len(text) < int.from_bytes(length, "big"):
        text += client.recv(2**20)
    return list(files), json.loads(text)


def _become(files: list[int], arguments: list[str], folder: str, environment: dict[str, str]) -> int:
    """In the fork: what `python *arguments` does. Returns the exit status."""
    import runpy

    os.setsid()  # so that what it starts can be ended with it
    for number, file in enumerate(files):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if "JPY_PARENT_PID" in environment:  # by which a kernel sees that its parent has gone
        os.environ["JPY_PARENT_PID"] = str(os.getppid())
    if environment.get(TRACE):
        _follow()
    sys.path.insert(0, folder)
    kind, what, *rest = arguments
    try:
        if kind == "-c":
            sys.argv = ["-c", *rest]
            main = type(sys)("__main__")
            sys.modules["__main__"] = main
            exec(compile(what, "<string>", "exec"), vars(main))
        else:
            sys.argv = [what, *rest]
            runpy.run_module(what, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, int | None):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _follow() -> None:
    """What a Python of a run that records does at its start."""
    if tracing := sys.modules.get("inferlab_tracing"):
        tracing.switch(os.environ[TRACE])
        return
    path = Path(__file__).parent / "selection" / "tracing.py"
    spec = importlib.util.spec_from_file_location("inferlab_tracing", path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["inferlab_tracing"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["inferlab_tracing"])


def _fork(client: socket.socket, others: list[socket.socket]) -> tuple[int, str | None]:
    """Its process, and the file for what it takes."""
    files, (arguments, folder, environment) = _received(client)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for each in (client, *others):
                each.close()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            status = _become(files, arguments, folder, environment)
            import threading

            threading._shutdown()  # type: ignore[attr-defined]  # threads that are waited for, as at any exit
            import atexit

            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status & 0xFF)
    for file in files:
        os.close(file)
    return pid, environment.get(COST)


def serve(address: str, modules: Sequence[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    if "matplotlib.figure" in modules:
        _draw()
    gc.freeze()  # a fork's collections would look through all of it, and copy its pages
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has only the thread that forks"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    woken, waker = os.pipe()
    for end in (woken, waker):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C ends the tests, and they end this
    signal.set_wakeup_fd(waker)
    running: dict[int, tuple[socket.socket, str | None]] = {}
    chosen = selectors.DefaultSelector()
    for what in (0, woken, listener):
        chosen.register(what, selectors.EVENT_READ)
    print("ready", flush=True)
    while True:
        for key, _ in chosen.select():
            if key.fileobj == 0:  # whoever started this has ended
                for pid in running:
                    _kill(pid)
                os._exit(0)  # to take torch down in order takes seconds
            if key.fileobj == woken:
                os.read(woken, 4096)
            elif key.fileobj is listener:
                client, _ = listener.accept()
                pid, cost = _fork(client, [listener, *(each for each, _ in running.values())])
                running[pid] = client, cost
                chosen.register(client, selectors.EVENT_READ)
            else:  # its client was killed, or has its answer
                chosen.unregister(key.fileobj)
                for pid, (client, _) in running.items():
                    if client is key.fileobj:
                        _kill(pid)
        for pid in list(running):
            ended, status, used = os.wait4(pid, os.WNOHANG)
            if ended:
                client, cost = running.pop(pid)
                _add_cost(cost, used.ru_utime + used.ru_stime)
                _answer(client, str(os.waitstatus_to_exitcode(status)))


def _answer(client: socket.socket, answer: str) -> None:
    """It ends when it has read this; the selector then forgets it."""
    with contextlib.suppress(OSError):
        client.sendall(answer.encode())
        client.shutdown(socket.SHUT_RDWR)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _draw() -> None:
    """What matplotlib does once: it looks for fonts, and compiles the first figure's text."""
    import io

    from matplotlib.figure import Figure

    figure = Figure()
    figure.subplots().set_title("$x$")
    for kind in ("svg", "png"):
        figure.savefig(io.BytesIO(), format=kind)


if __name__ == "__main__":
    mode, place, *words = sys.argv[1:]
    if mode == "serve":
        serve(place, words)
    else:
        sys.exit(run(place, words))
