"""Attacks on the walls: what a learner's code finds, reads, writes and reaches of the machine around it."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import tempfile
from pathlib import Path

from grader.findings import Row
from grader.isolation.launcher import Launcher
from grader.isolation.trial import Trial


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


def machine(launcher: Launcher) -> Row:
    """Neither /proc nor the host's name nor terminals are there."""
    source = """
        import os
        def look():
            paths = ("/proc/self", "/proc/mounts", "/proc/self/cgroup", "/proc/self/mountinfo", "/proc/cpuinfo")
            found = [path for path in (*paths, "/dev/ptmx", "/sys/fs/cgroup") if os.path.exists(path)]
            return [os.uname().nodename, found, os.listdir("/proc")]
    """
    with Trial(launcher, source) as trial:
        seen = trial.ask("look")
    if seen == ["learner", [], []]:
        return Row("machine", "no /proc, no groups, no terminals; its name is learner")
    return Row("machine", f"name, files and /proc: {seen}", "fail", "Please report this")
