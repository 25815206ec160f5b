"""A Python that has already imported what takes seconds to import, and forks for each program that is run in it.

`Warm("torch", "triton").run(("-m", "module", "argument"), environment)` does what that command line does in a process
of its own with that environment, without the imports; PYTHONPATH and its like come too late. Only packages of others
are imported beforehand: what is tested is imported in the fork. The process that forks has one thread, so that nothing
is lost in a fork. A run of tests (`selection/run.py`) has one for all its jobs, and says its address in INFERLAB_WARM.

Run as a program, this file is either that process (`serve`) or one that stands for a fork (`run`): it has the fork's
files, folder, environment and exit status, and whoever kills it kills the fork. With `starts_warm` this process and all
its forks start programs of Python that way where they would start new ones.
"""

from __future__ import annotations

# No more than `run` needs: it runs for each fork.
import array
import contextlib
import json
import os
import signal
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from subprocess import CompletedProcess
    from typing import Any

COST = "INFERLAB_COST"  # a file for the CPU seconds of a fork, which is no child of who asks for it
TRACE = "INFERLAB_TRACE"  # what the fork needs of the project is written there: tests/selection/tracing.py
SHARED = "INFERLAB_WARM"  # the address of a process that is there already
STARTS = (
    "INFERLAB_STARTS_WARM"  # the address of the process that forks for whoever has this variable, and for its forks
)
EXAMINERS = ("grader.examination.examiner_server", "learner_side.learner")
# What takes long to import in a notebook's kernel, an examiner, a command. Not triton: when it is imported it looks
# whether TRITON_INTERPRET is set.
PROGRAMS = (
    "torch", "numpy", "jupytext", "matplotlib.figure", "matplotlib.backends.backend_agg", "ipywidgets",
    "ipykernel.kernelapp", "ipykernel.zmqshell", "IPython.core.completer", "yaml", "pydantic", "typer.main",
    "rich.console", "rich.markdown",
)  # fmt: skip
MOST_FILES = 64  # that are handed over to a fork
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Warm:
    """The process that has imported `modules`. It and all its forks end with `close`, or with this process.

    With an `address` it is a process that is there already, and `close` leaves it.
    """

    def __init__(self, *modules: str, address: str | None = None, environment: Mapping[str, str] = os.environ):
        import subprocess
        import tempfile

        self.address: str
        self._process: subprocess.Popen[bytes] | None
        if address is not None:
            self.address, self._process = address, None
            return
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        self.address = os.path.join(self._folder.name, "socket")
        command = [sys.executable, "-P", __file__, "serve", self.address, *modules]
        environment = {name: value for name, value in environment.items() if name != "TRITON_INTERPRET"}
        environment |= dict.fromkeys(THREADS, "1")
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n", "see its traceback above"

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command line of a program that is run warm: `python *arguments`: -P or not, then -c or -m."""
        return _command(self.address, arguments)

    def run(self, arguments: Sequence[str], env: Mapping[str, str]) -> CompletedProcess[str]:
        import subprocess

        return subprocess.run(self.command(arguments), capture_output=True, text=True, env=dict(env), timeout=9000)

    def close(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        before = _seconds_of_children()
        self._process.stdin.close()
        self._process.wait(600)
        # The forks are now among what our children took, and were counted when they ended.
        _add_cost(os.environ.get(COST), before - _seconds_of_children())
        self._folder.cleanup()


def _command(address: str, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-I", "-S", __file__, "run", address, *arguments]


@contextlib.contextmanager
def starts_warm(address: Callable[[], str], what: Sequence[str]) -> Iterator[None]:
    """Here and in all forks of here `python -P -m ...` and `python -P -c ...` are run in forks of the process there, if
    their words contain one of the texts `what`. It is asked for when it is needed first.

    What stands for a fork has no children, and hands over no signal but the one that kills it.
    """
    import subprocess

    start = subprocess.Popen.__init__
    _start_warm(address, what)
    try:
        yield
    finally:
        subprocess.Popen.__init__ = start  # type: ignore[method-assign]
        os.environ.pop(STARTS, None)


@contextlib.contextmanager
def starts_cold() -> Iterator[None]:
    """Within `starts_warm`: programs have processes of their own after all, which a test can find below this one."""
    import subprocess

    start, forks = subprocess.Popen.__init__, os.environ.pop(STARTS, None)
    subprocess.Popen.__init__ = getattr(start, "cold", start)  # type: ignore[method-assign]
    try:
        yield
    finally:
        subprocess.Popen.__init__ = start  # type: ignore[method-assign]
        os.environ |= {STARTS: forks} if forks else {}


def _start_warm(address: Callable[[], str], what: Sequence[str]) -> None:
    import subprocess

    start = subprocess.Popen.__init__

    def start_warm(self: object, args: object, *others: object, **named: Any) -> None:
        python = isinstance(args, list) and args[:2] == [sys.executable, "-P"] and args[2] in ("-c", "-m")
        if python and any(text in word for word in args[3:] for text in what):
            os.environ[STARTS] = json.dumps([address(), what])
            named["env"] = {**(os.environ if named.get("env") is None else named["env"]), STARTS: os.environ[STARTS]}
            args = _command(address(), args[1:])
        start(self, args, *others, **named)  # type: ignore[call-overload]

    start_warm.cold = start  # type: ignore[attr-defined]
    subprocess.Popen.__init__ = start_warm  # type: ignore[assignment, method-assign]


def run(address: str, arguments: Sequence[str]) -> int:
    """In the place of a fork: hands over what this process was given, and waits. Returns the exit status."""
    files = [number for number in map(int, os.listdir("/proc/self/fd")) if _is_open(number)]
    mask = os.umask(0)
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        request = json.dumps([list(arguments), os.getcwd(), dict(os.environ), files, mask]).encode()
        server.sendmsg(
            [len(request).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
        )
        server.sendall(request)
        for number in files:
            os.close(number)  # whoever waits for the end of a pipe waits for the fork alone
        answer = int(server.recv(64) or 1)
    if answer < 0:
        with contextlib.suppress(OSError):  # the action of SIGKILL cannot be set
            signal.signal(-answer, signal.SIG_DFL)
        os.kill(os.getpid(), -answer)
    return answer


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:  # that of the listing itself
        return False
    return True


def _seconds_of_children() -> float:
    import resource

    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _add_cost(path: str | None, seconds: float) -> None:
    with contextlib.suppress(FileNotFoundError):  # its job has ended
        if path:
            with open(path, "a") as cost:
                cost.write(f"{seconds:.3f}\n")


Request = tuple[list[str], str, dict[str, str], list[int], int]  # arguments, folder, environment, files, umask


def _received(client: socket.socket) -> tuple[list[int], Request]:
    length, ancillary, _, _ = client.recvmsg(4, socket.CMSG_SPACE(MOST_FILES * array.array("i").itemsize))
    files = array.array("i")
    files.frombytes(ancillary[0][2])
    text = b""
    while len(text) < int.from_bytes(length, "big"):
        text += client.recv(2**20)
    return list(files), json.loads(text)


def _become(
    files: list[int], arguments: list[str], folder: str, environment: dict[str, str], numbers: list[int], mask: int
) -> int:
    """In the fork: what `python *arguments` does, `files` having these numbers. Returns the exit status."""
    import fcntl
    import runpy

    os.setsid()  # so that what it starts can be ended with it
    apart = [fcntl.fcntl(file, fcntl.F_DUPFD, 512) for file in files]  # none of them where another one belongs
    for file in files:
        os.close(file)
    for number, file in zip(numbers, apart, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.umask(mask)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if "JPY_PARENT_PID" in environment:  # by which a kernel sees that its parent has gone
        os.environ["JPY_PARENT_PID"] = str(os.getppid())
    if environment.get(TRACE):
        _follow()
    if environment.get(STARTS):
        address, what = json.loads(environment[STARTS])
        _start_warm(lambda: str(address), what)
    if arguments[0] == "-P":
        arguments = arguments[1:]
    else:
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
    import importlib.util

    path = os.path.join(os.path.dirname(__file__), "selection", "tracing.py")
    spec = importlib.util.spec_from_file_location("inferlab_tracing", path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["inferlab_tracing"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["inferlab_tracing"])


def _fork(client: socket.socket, others: list[socket.socket]) -> tuple[int, str | None]:
    """Its process, and the file for what it takes."""
    files, (arguments, folder, environment, numbers, mask) = _received(client)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for each in (client, *others):
                each.close()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            status = _become(files, arguments, folder, environment, numbers, mask)
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
    import gc
    import importlib
    import selectors

    # With it jsonschema checks IRIs, which is not needed here; to import it takes three seconds.
    sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
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
        os._exit(run(place, words) & 0xFF)
