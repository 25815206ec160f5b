"""From a fork of the warm process to a learner's process that can reach nothing: runs inside bubblewrap, on Linux.

bubblewrap has taken away network, files and the view of other processes for all submissions together. Here each one
gets namespaces of its own, so that it meets neither the warm process nor the submission before it:

    warm process ── fork ── makes namespaces, ends
                              └─ keeper: process 1 of the namespace; when it ends, the kernel ends everything in it
                                   └─ the learner's process: private /tmp, limits, no rights, filter of system calls

Shipped beside `learner.py`; `grader.isolation.sandbox` starts bubblewrap.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from . import seccomp

# linux/sched.h and sys/mount.h
_NEWNS, _NEWUTS, _NEWIPC, _NEWPID, _NEWNET = 0x00020000, 0x04000000, 0x08000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC = 1, 2, 4, 8
# linux/prctl.h
_SET_DUMPABLE, _CAPBSET_DROP, _SET_CHILD_SUBREAPER, _CAP_AMBIENT, _AMBIENT_CLEAR_ALL = 4, 24, 36, 47, 4
_CAPABILITY_VERSION_3 = 0x20080522
NUM_CAPABILITIES = 64

WATCH_SECONDS = 0.05
OPEN_FILES = 256

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]


@dataclass(frozen=True)
class Bounds:
    """What one learner's process may use. memory, disk: bytes; uid: the user to become, None to stay.

    memory bounds each process (address space beyond what the warm process has mapped). `watch` makes the keeper bound
    all processes together; it is set where no cgroup does that.
    """

    memory: int
    disk: int
    processes: int
    uid: int | None
    watch: bool


def be_parent_of_orphans() -> None:
    """Make this process the parent of what its ended children leave behind, so that it can wait for the keepers."""
    _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start(bounds: Bounds, arrange: Callable[[list[int]], list[int]], fds: list[int], run: Callable[[], None]) -> int:
    """Fork, and in the fork become the keeper of a new namespace with `run()` in its learner's process.

    `arrange` puts `fds` in their places there and returns those of the channel and of the keeper's report. The keeper
    says hello on the channel and waits for a byte before it goes on, and so does the learner's process: the other end
    learns both process ids from the kernel. Returns the keeper's process id, as seen here.
    """
    read_fd, write_fd = os.pipe()
    middle, report_fd = os.fork(), fds[-1]
    if middle == 0:
        try:
            _need(_libc.unshare(_NEWPID | _NEWNS | _NEWIPC | _NEWNET | _NEWUTS), "namespaces cannot be made")
            keeper = os.fork()
            if keeper:
                os.write(write_fd, str(keeper).encode())
                os._exit(0)
            channel_fd, report_fd = arrange(fds)
            _keep(bounds, channel_fd, report_fd, run)
        except BaseException as error:
            _report(report_fd, problem=f"{type(error).__name__}: {error}")
        finally:
            os._exit(1)
    os.close(write_fd)
    with open(read_fd, "rb") as pipe:
        text = pipe.read()
    os.waitpid(middle, 0)
    return int(text or 0)


def _keep(bounds: Bounds, channel_fd: int, report_fd: int, run: Callable[[], None]) -> None:
    """Be process 1: mount, start the learner's process, wait for its end, report it. Never returns."""
    os.setsid()
    mapped = _mapped_bytes()
    _mount_private(bounds.disk)
    if bounds.watch and not os.path.exists("/proc/self/statm"):
        raise OSError("without a control group and without /proc nothing bounds a submission's memory")
    _meet(channel_fd)
    # From the fork on SIGTERM waits for its handler: process 1 of a namespace has no other, and would never end by it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    learner = os.fork()
    if learner == 0:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            os.close(report_fd)
            _bound(bounds, mapped)
            drop_rights(bounds.uid)
            _libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0)
            _meet(channel_fd)
            run()
        finally:
            os._exit(1)
    for fd in (0, 1, 2, channel_fd):
        os.close(fd)
    drop_rights(bounds.uid)
    _libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)  # the learner's process may have the same user: it must not look in here
    signal.signal(signal.SIGTERM, lambda *_: _asked_to_end(learner, report_fd))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    _report(report_fd, **_wait(learner, bounds))
    os._exit(0)


def _asked_to_end(learner: int, report_fd: int) -> None:
    """The learner's process may have ended by itself just before it was to be ended: report which."""
    with contextlib.suppress(ChildProcessError):
        done, status = os.waitpid(learner, os.WNOHANG)
        _report(report_fd, status=status if done else int(signal.SIGKILL))
    os._exit(0)


def _wait(learner: int, bounds: Bounds) -> dict[str, object]:
    """Wait until the learner's process ends, and let orphans go. With `bounds.watch`, end all when they are too many
    or use too much memory together. Returns what to report.
    """
    while True:
        done, status = os.waitpid(-1, os.WNOHANG if bounds.watch else 0)
        if done == learner:
            return {"status": status}
        if bounds.watch and not done:
            pids = [entry for entry in os.listdir("/proc") if entry.isdigit() and entry != "1"]
            if len(pids) > bounds.processes:
                return {"status": 9, "problem": f"more than {bounds.processes} processes"}
            if _more_memory_than(bounds.memory + bounds.disk, pids):
                return {"status": 9, "out_of_memory": True}
            time.sleep(WATCH_SECONDS)


def drop_rights(uid: int | None) -> None:
    """Give up every right this process could have, for good. Raises OSError."""
    for capability in range(NUM_CAPABILITIES):
        _libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0)
    _libc.prctl(_CAP_AMBIENT, _AMBIENT_CLEAR_ALL, 0, 0, 0)
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _need(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capabilities cannot be given up")
    seccomp.install()


def _bound(bounds: Bounds, mapped: int) -> None:
    limits = {
        resource.RLIMIT_AS: mapped + bounds.memory,
        resource.RLIMIT_FSIZE: bounds.disk,
        resource.RLIMIT_NPROC: bounds.processes,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when memory is short this process goes first, not its keeper


def _mount_private(disk: int) -> None:
    """A /tmp and a /dev/shm of this namespace only, and a /proc that shows this namespace only."""
    options = f"size={disk},nr_inodes=20000,mode=1777".encode()
    for place in (b"/tmp", b"/dev/shm"):
        _need(_libc.mount(b"tmpfs", place, b"tmpfs", _NOSUID | _NODEV, options), f"no private {place.decode()}")
    flags = _NOSUID | _NODEV | _NOEXEC
    if all(_libc.mount(b"proc", b"/proc", b"proc", flags, options) for options in (b"subset=pid", None)):
        # In a container with a masked /proc none can be mounted. What is there shows other processes: cover it.
        _need(_libc.mount(b"tmpfs", b"/proc", b"tmpfs", flags | _RDONLY, b"size=4k"), "/proc cannot be covered")
    os.chdir("/tmp")


def _meet(channel_fd: int) -> None:
    """Say hello and wait for the answer; the other end gets this process's id from the kernel."""
    channel = socket.socket(fileno=os.dup(channel_fd))
    with channel:
        channel.sendall(b"!")
        if channel.recv(1) != b"!":
            raise ConnectionError("the other end is gone")


def _mapped_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _more_memory_than(limit: int, pids: list[str]) -> bool:
    """Whether these processes use more than `limit` bytes together."""
    page = os.sysconf("SC_PAGE_SIZE")
    resident = {pid: int(fields[1]) * page for pid in pids if len(fields := _read(f"/proc/{pid}/statm").split()) > 1}
    if sum(resident.values()) <= limit:
        return False
    # That counts a page once for each process that has it, and forks share most of theirs. The kernel's proportional
    # figure costs more, and a process may hide it from us: then all its pages count.
    for pid in resident:
        for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
            if line.startswith("Pss:"):
                resident[pid] = int(line.split()[1]) << 10
    return sum(resident.values()) > limit


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:  # it has ended, or does not let us
        return ""


def _report(fd: int, **what: object) -> None:
    with contextlib.suppress(OSError):
        os.write(fd, json.dumps(what).encode() + b"\n")


def _need(failed: int, what: str) -> None:
    if failed:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
