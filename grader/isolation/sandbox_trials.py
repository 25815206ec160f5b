"""Attacks on the sandbox, one per property, for `inferlab grade doctor` and for the tests.

Each runs hostile code where a learner's code would run, and says whether the property held.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

from grader.findings import Row
from grader.isolation import sandbox
from grader.isolation.launcher import Launcher, LearnerProcess
from grader.learner_side.peer import Peer

SOON_SECONDS = 60.0
CALL_SECONDS = 300.0  # for what hangs; to fill memory takes minutes where a virtual machine gives it out slowly


class Trial:
    """One learner's process in which a piece of hostile code has been run; `ask` calls its functions."""

    def __init__(self, launcher: Launcher, source: str, seconds: float = CALL_SECONDS):
        self.process: LearnerProcess = launcher.fork()
        self.peer = Peer(self.process.connection, strict=True, call_seconds=seconds)
        self.broken = self.peer.request({"m": "cells"}, [[textwrap.dedent(source), "trial"]])[0]

    def ask(self, name: str, *args: Any) -> Any:
        """What function `name` returned, or the exception it raised, as text. Raises OSError: the process is gone."""
        try:
            return self.peer.request({"m": "names"}, [name])[name](*args)
        except Exception as error:
            if not hasattr(error, "learner_type"):
                raise  # it was not raised there: the process is gone, or took too long
            return f"{error.learner_type}: {error}"

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.end()


def packages(launcher: Launcher) -> Row:
    """torch, numpy and the interfaces are there; the engine, the grader, solutions and tests are not."""
    source = """
        import importlib
        def there(names):
            found = []
            for name in names:
                try:
                    importlib.import_module(name)
                    found.append(name)
                except ImportError:
                    pass
            return found
    """
    wanted = ["torch", "numpy", "torch.nn.utils.parametrize", "reference_impl.interfaces"]
    unwanted = ["reference_impl.assembly.engine", "grader", "solutions", "tests", "chapters", "nbgrader", "pytest"]
    with Trial(launcher, source) as trial:
        found = trial.ask("there", wanted + unwanted)
    if found == wanted:
        return Row("packages", "torch, numpy, interfaces; nothing of the course")
    advice = "Missing ones may be files that only their owner can read: reinstall the environment with umask 022"
    return Row("packages", f"importable there: {found}", "fail", advice)


def privileges(launcher: Launcher) -> Row:
    """An unused user id, no capability, no new privileges, a filter of system calls."""
    source = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        def who():
            return [os.getuid(), os.geteuid()]
        def refused():
            calls = {
                "unshare": lambda: libc.unshare(0x10000000),
                "mount": lambda: libc.mount(b"x", b"/tmp", b"tmpfs", 0, None),
                "ptrace": lambda: libc.ptrace(16, 1, 0, 0),
                "setuid": lambda: libc.setuid(0),
                "memfd": lambda: libc.memfd_create(b"x", 0),
                "keyctl": lambda: libc.syscall(250 if os.uname().machine == "x86_64" else 219, 0, -3, 1),
                "prctl": lambda: libc.prctl(24, 0, 0, 0, 0),
            }
            return [name for name, call in calls.items() if call() == -1]
        def locked():
            no_new_privileges = libc.prctl(39, 0, 0, 0, 0) == 1
            header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
            return no_new_privileges and libc.capget(header, sets) == 0 and not any(sets)
    """
    with Trial(launcher, source) as trial:
        uids, refused, locked = trial.ask("who"), trial.ask("refused"), trial.ask("locked")
    wanted = ["unshare", "mount", "ptrace", "setuid", "memfd", "keyctl", "prctl"]
    if locked is True and refused == wanted and 0 not in uids:
        return Row("privileges", f"user {uids[0]}, no capability, {len(wanted)} of {len(wanted)} system calls refused")
    return Row("privileges", f"user {uids}, locked: {locked}, refused: {refused}", "fail", "Please report this")


def network(launcher: Launcher) -> Row:
    """No connection to this machine or out, by address, by netlink, or by an abstract local socket."""
    source = """
        import socket
        def reach(port, name):
            found = []
            tries = {
                "tcp": (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", port)),
                "tcp6": (socket.AF_INET6, socket.SOCK_STREAM, ("::1", port)),
                "udp": (socket.AF_INET, socket.SOCK_DGRAM, ("192.0.2.1", 53)),
                "netlink": (socket.AF_NETLINK, socket.SOCK_RAW, (0, 0)),
                "abstract": (socket.AF_UNIX, socket.SOCK_STREAM, chr(0) + name),
            }
            for what, (family, kind, address) in tries.items():
                try:
                    with socket.socket(family, kind) as sock:
                        sock.settimeout(2)
                        sock.connect(address)
                    found.append(what)
                except OSError:
                    pass
            return found
    """
    name = secrets.token_hex(8)
    with socket.socket() as listener, socket.socket(socket.AF_UNIX) as abstract:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        abstract.bind("\0" + name)
        abstract.listen()
        with Trial(launcher, source) as trial:
            found = trial.ask("reach", listener.getsockname()[1], name)
    if found == []:
        return Row("network", "none: tcp, udp, netlink, abstract sockets tried")
    return Row("network", f"reached by: {found}", "fail", "Learners' code must not have a network. Please report this")


def reading(launcher: Launcher) -> Row:
    """A secret in the grader's folders and environment is out of reach."""
    secret = secrets.token_hex(16)
    source = """
        import os
        def find(paths, secret):
            found = [path for path in paths if os.path.exists(path)]
            found += [name for name, value in os.environ.items() if secret in value]
            for number in range(256):
                try:
                    found.append(os.readlink(f"/proc/self/fd/{number}"))
                except OSError:
                    pass
            return [name for name in found if not name.startswith(("pipe:", "socket:", "/dev/null"))]
    """
    with contextlib.ExitStack() as stack:
        paths = ["/etc/shadow", "/etc/hosts", os.path.expanduser("~/.ssh"), str(Path(__file__).resolve())]
        for folder in (Path.cwd(), Path.home(), Path(tempfile.gettempdir()), Path("/var/tmp"), Path("/usr/local")):
            with contextlib.suppress(OSError):
                file = stack.enter_context(tempfile.NamedTemporaryFile("w", dir=folder, prefix="inferlab-doctor-"))
                file.write(secret)
                file.flush()
                os.chmod(file.name, 0o644)
                paths.append(file.name)
        with Trial(launcher, source) as trial:
            found = trial.ask("find", [path for path in paths if path != "/proc/1/environ"], secret)
    if found == []:
        return Row(
            "reading", f"{len(paths)} files of this machine tried, none found; no secret in environment or files"
        )
    return Row("reading", f"can be seen: {found}", "fail", "Keep course and home outside of /usr. Please report this")


def writing(launcher: Launcher) -> Row:
    """Nothing can be written but a private /tmp and /dev/shm."""
    source = """
        import os
        def write():
            done = []
            for folder, _, _ in os.walk("/"):
                if folder.startswith(("/proc", "/tmp", "/dev/shm", "/sys", "/usr/share", "/usr/include")):
                    continue
                path = os.path.join(folder, "inferlab-planted.pth")
                try:
                    open(path, "w").close()
                    os.remove(path)
                    done.append(folder)
                except OSError:
                    pass
            return done[:5]
    """
    with Trial(launcher, source) as trial:
        done = trial.ask("write")
    if done == []:
        return Row("writing", "every folder it can see was tried: only its own /tmp and /dev/shm take files")
    return Row("writing", f"could write in {done}", "fail", "Please report this")


def other_processes(launcher: Launcher) -> Row:
    """It sees and can signal only what it started; two submissions at a time do not meet."""
    source = """
        import os, socket
        def look():
            others = [entry for entry in os.listdir("/proc") if entry.isdigit()]
            signalled = []
            for pid in range(1, 40000):
                if pid != os.getpid():
                    try:
                        os.kill(pid, 0)
                        signalled.append(pid)
                    except OSError:
                        pass
            return [len(others), signalled]
        def offer(name):
            open("/tmp/offer", "w").close()
            open("/dev/shm/offer", "w").close()
            global kept
            kept = socket.socket(socket.AF_UNIX)
            kept.bind(chr(0) + name)
            kept.listen()
        def meet(name):
            found = [path for path in ("/tmp/offer", "/dev/shm/offer") if os.path.exists(path)]
            try:
                socket.socket(socket.AF_UNIX).connect(chr(0) + name)
                found.append("abstract socket")
            except OSError:
                pass
            return found
    """
    with Trial(launcher, source) as one, Trial(launcher, source) as two:
        one.ask("offer", "doctor")
        seen, met = two.ask("look"), two.ask("meet", "doctor")
    # Process 1 is its keeper: it has the same user and gave up all rights too; what is sent to it is ignored.
    if isinstance(seen, list) and seen[0] <= 2 and set(seen[1]) <= {1} and met == []:
        return Row("other processes", "sees only itself and its keeper; met nothing of a second submission")
    return Row("other processes", f"sees {seen}, met {met}", "fail", "Please report this")


_FORKS = """
    import mmap, os, time
    def many(count):
        for number in range(count):
            try:
                if os.fork() == 0:
                    time.sleep(3600)
                    os._exit(0)
            except OSError as error:
                return number
        return count
    def grab(mebibytes):
        return len(bytearray(mebibytes << 20))
    def grab_in_many(count, mebibytes):
        full, tell = os.pipe()
        for _ in range(count):
            if os.fork() == 0:
                shared = mmap.mmap(-1, mebibytes << 20)
                for _ in range(mebibytes):
                    shared.write(bytes(1 << 20))
                os.close(tell)
                time.sleep(3600)
                os._exit(0)
        os.close(tell)
        os.read(full, 1)  # until every one of them is full, or killed
        time.sleep(1)
        return "survived"
    def fill(path, mebibytes):
        block = bytes(1 << 20)
        for number in range(mebibytes // 100):
            with open(path + str(number), "wb") as file:
                for _ in range(100):
                    file.write(block)
        return "written"
"""


def number_of_processes(launcher: Launcher) -> Row:
    """300 processes are not possible."""
    with Trial(launcher, _FORKS) as trial:
        try:
            number = trial.ask("many", 300)
        except OSError:  # it is gone, or takes too long
            number = 0
        ending = trial.process.end()
    if isinstance(number, int) and number <= sandbox.PROCESSES:
        return Row("processes", f"stopped at {number or ending.problem} (limit {sandbox.PROCESSES})")
    advice = "Learners' code runs as a user whose processes the kernel does not count, and there is no control group"
    return Row("processes", f"{number} of 300 were possible", "fail", advice)


def memory_of_one(launcher: Launcher) -> Row:
    """One process gets a MemoryError, which a learner can read, beyond the limit."""
    with Trial(launcher, _FORKS) as trial:
        small, large = trial.ask("grab", 512), trial.ask("grab", 2 * sandbox.MEMORY >> 20)
    if small == 512 << 20 and str(large).startswith("MemoryError"):
        return Row("memory, one process", f"512 MiB are fine, {2 * sandbox.MEMORY >> 30} GiB raise MemoryError")
    return Row("memory, one process", f"512 MiB: {small}, more than allowed: {large}", "fail", "Please report this")


def memory_of_many(launcher: Launcher) -> Row:
    """Many processes together, with memory they share, are killed, and the grader survives."""
    with Trial(launcher, _FORKS) as trial:
        mebibytes = (sandbox.MEMORY + sandbox.DISK) // 4 >> 20
        try:
            answer = trial.ask("grab_in_many", 8, mebibytes)
        except OSError:  # it is gone, or takes too long
            answer = "killed"
        ending = trial.process.end()
    if ending.out_of_memory:
        return Row("memory, together", f"8 processes of {mebibytes} MiB: killed, and recorded as that")
    return Row("memory, together", f"8 processes of {mebibytes} MiB: {answer}", "fail", "Please report this")


def disk(launcher: Launcher) -> Row:
    """/tmp is full before the machine is."""
    with Trial(launcher, _FORKS) as trial:
        answers = [trial.ask("fill", path, 600) for path in ("/tmp/x", "/dev/shm/x")]
    if all("No space" in str(answer) or "File too large" in str(answer) for answer in answers):
        return Row("disk", f"full at {sandbox.DISK >> 20} MiB")
    return Row("disk", f"600 MiB: {answers}", "fail", "Please report this")


def survival(launcher: Launcher) -> Row:
    """A daemon ends with its submission, and the next one finds nothing of it."""
    mark = secrets.token_hex(8)
    source = """
        import os
        def stay(mark):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    os.execv("/bin/sh", ["/bin/sh", "-c", "sleep 3600; : " + mark])
                os._exit(0)
        def look():
            return sorted(os.listdir("/tmp"))
        def leave():
            open("/tmp/left", "w").close()
    """
    with Trial(launcher, source) as trial:
        trial.ask("leave")
        trial.ask("stay", mark)
        alive = _becomes(True, mark)
    with Trial(launcher, source) as trial:
        left = trial.ask("look")
    ended = _becomes(False, mark)
    if alive and ended and left == []:
        return Row("survival", "a daemon was running, and ended with its submission; /tmp was empty again")
    return Row("survival", f"daemon ran: {alive}, runs on: {not ended}, left: {left}", "fail", "Please report this")


def _becomes(running: bool, mark: str) -> bool:
    """Whether a process with this mark is running, or is not, after a moment: to start and to die takes some time."""
    end = time.monotonic() + SOON_SECONDS
    while _running(mark) != running:
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def _running(mark: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes():
                return True
    return False


def time_limit(launcher: Launcher) -> Row:
    """A call that swallows interrupts is ended from outside."""
    source = """
        def hang():
            while True:
                try:
                    while True:
                        pass
                except BaseException:
                    pass
    """
    started = time.monotonic()
    with Trial(launcher, source) as trial:
        hang = trial.peer.request({"m": "names"}, ["hang"])["hang"]
        trial.peer.call_seconds = 1.0
        try:
            hang()
            ended = "returned"
        except TimeoutError:
            ended = "ended"
    seconds = time.monotonic() - started
    return (
        Row("time", f"a hanging call with 1 s to go ended after {seconds:.1f} s")
        if ended == "ended"
        else Row("time", "a hanging call returned", "fail", "Please report this")
    )


ALL = (
    packages,
    privileges,
    network,
    reading,
    writing,
    other_processes,
    number_of_processes,
    memory_of_one,
    memory_of_many,
    disk,
    survival,
    time_limit,
)
