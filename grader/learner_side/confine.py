"""Turns a fork of the warm process into a learner's process that can reach nothing. Runs inside bubblewrap, on Linux.

bubblewrap has taken away network, files and the view of other processes for all submissions together. Here each one
gets namespaces of its own, so that it meets neither the warm process nor the submission before it:

    warm process ── fork ── makes namespaces, ends
                              └─ keeper: process 1 of the namespace; when it ends, the kernel ends everything in it
                                   └─ the learner's process: private /tmp, no /proc, limits, no rights, filter of
                                      system calls

The keeper watches the others where no control group does, and none of them can reach it: as root it is another user,
and the filter refuses all that would change a process of the same user's. It has the higher priority.

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
_SET_DUMPABLE, _SET_KEEPCAPS, _SET_CHILD_SUBREAPER = 4, 8, 36
_CAPBSET_DROP, _CAP_AMBIENT, _AMBIENT_CLEAR_ALL = 24, 47, 4
# linux/capability.h
_CAP_KILL, _CAP_SYS_PTRACE = 5, 19
_CAPABILITY_VERSION_3 = 0x20080522
NUM_CAPABILITIES = 64

WATCH_SECONDS = 0.05
OPEN_FILES = 256
ABOVE, BELOW = -10, 5  # priority of the keeper; where it cannot be raised, of the others

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]


@dataclass(frozen=True)
class Bounds:
    """What one learner's process may use. memory, disk: bytes; uid: the user to become, None to stay; keeper_uid: the
    keeper's.

    memory bounds each process (address space beyond what the warm process has mapped), processes all of the user's:
    those of several roles, for example. `watch` makes the keeper bound the memory of all processes together, and their
    number by watched_processes; it is set where no cgroup does that.
    """

    memory: int
    disk: int
    processes: int
    watched_processes: int
    uid: int | None
    keeper_uid: int | None
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
    if bounds.watch and not os.path.exists("/proc/self/status"):
        raise OSError("without a control group and without /proc nothing bounds a submission's memory")
    _meet(channel_fd)
    # From the fork on SIGTERM waits for its handler: process 1 of a namespace has no other, and would never end by it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Python's handler would let a submission end its keeper
    is_above = _raise_priority()
    learner = os.fork()
    if learner == 0:
        try:
            signal.signal(signal.SIGINT, interrupt)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            os.close(report_fd)
            os.setpriority(os.PRIO_PROCESS, 0, 0 if is_above else BELOW)
            _bound(bounds, mapped)
            _cover_proc()
            drop_rights(bounds.uid)
            _libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0)
            _meet(channel_fd)
            run()
        finally:
            os._exit(1)
    for fd in (0, 1, 2, channel_fd):
        os.close(fd)
    # Of another user, to look at memory and to stop it.
    drop_rights(bounds.keeper_uid, keep=() if bounds.keeper_uid is None else (_CAP_KILL, _CAP_SYS_PTRACE))
    _libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)  # the learner's process may have the same user: it must not look in here
    signal.signal(signal.SIGTERM, lambda *_: _asked_to_end(learner, report_fd))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    _report(report_fd, **_wait(learner, bounds))
    os._exit(0)


def _asked_to_end(learner: int, report_fd: int) -> None:
    """Reports how the learner's process ended: by itself just before it was to be ended, or killed."""
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
            if len(pids) > bounds.watched_processes:
                return {"status": 9, "problem": f"more than {bounds.watched_processes} processes"}
            started = time.monotonic()
            if _more_memory_than(bounds.memory + bounds.disk, pids):
                return {"status": 9, "out_of_memory": True}
            time.sleep(WATCH_SECONDS + 2 * (time.monotonic() - started))


def _raise_priority() -> bool:
    """Whether this process now comes before those it watches, which may be many and busy."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, ABOVE)
    return os.getpriority(os.PRIO_PROCESS, 0) <= ABOVE


def drop_rights(uid: int | None, keep: tuple[int, ...] = ()) -> None:
    """Give up every right this process could have, for good, but for the capabilities `keep`, where it has them.

    Raises OSError.
    """
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable: the low words, then the high ones
    _need(_libc.capget(header, sets), "capabilities cannot be read")
    kept = sets[1] & sum(1 << capability for capability in keep)
    _libc.prctl(_SET_KEEPCAPS, 1 if kept else 0, 0, 0, 0)
    for capability in range(NUM_CAPABILITIES):
        _libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0)
    _libc.prctl(_CAP_AMBIENT, _AMBIENT_CLEAR_ALL, 0, 0, 0)
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _need(_libc.capset(header, (ctypes.c_uint32 * 6)(kept, kept)), "capabilities cannot be given up")
    seccomp.install()


def _bound(bounds: Bounds, mapped: int) -> None:
    limits = {
        resource.RLIMIT_AS: mapped + bounds.memory,
        resource.RLIMIT_FSIZE: bounds.disk,
        resource.RLIMIT_NPROC: bounds.processes,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        # What else the kernel keeps for a process: signals that wait, message queues, memory that is not swapped out.
        resource.RLIMIT_SIGPENDING: 1024,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when memory is short this process goes first, not its keeper


def _mount_private(disk: int) -> None:
    """A /tmp and a /dev/shm of this namespace only, no terminals, and a /proc that shows this namespace only."""
    options = f"size={disk},nr_inodes=20000,mode=1777".encode()
    for place in (b"/tmp", b"/dev/shm"):
        _need(_libc.mount(b"tmpfs", place, b"tmpfs", _NOSUID | _NODEV, options), f"no private {place.decode()}")
    flags = _NOSUID | _NODEV | _NOEXEC
    if os.path.isdir("/dev/pts"):  # terminals are the whole machine's, and each has buffers
        _need(_libc.mount(b"tmpfs", b"/dev/pts", b"tmpfs", flags | _RDONLY, b"size=4k"), "/dev/pts cannot be covered")
    if all(_libc.mount(b"proc", b"/proc", b"proc", flags, options) for options in (b"subset=pid", None)):
        # In a container with a masked /proc none can be mounted. What is there shows other processes: cover it.
        _need(_libc.mount(b"tmpfs", b"/proc", b"tmpfs", flags | _RDONLY, b"size=4k"), "/proc cannot be covered")
    os.chdir("/tmp")


def _cover_proc() -> None:
    """Take /proc from this process and its children, not from the keeper: it tells about the machine."""
    _need(_libc.unshare(_NEWNS), "namespaces cannot be made")
    flags = _NOSUID | _NODEV | _NOEXEC | _RDONLY
    _need(_libc.mount(b"tmpfs", b"/proc", b"tmpfs", flags, b"size=4k"), "/proc cannot be covered")


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
    """Whether these processes use more than `limit` bytes together, with their files and their page tables."""
    files = sum((seen.f_blocks - seen.f_bfree) * seen.f_frsize for seen in map(os.statvfs, ("/tmp", "/dev/shm")))
    tables, resident = 0, dict[str, int]()
    for pid in pids:
        status = _sizes(f"/proc/{pid}/status")
        tables += status.get("VmPTE", 0)
        resident[pid] = status.get("VmRSS", 0) + status.get("VmSwap", 0)
    if files + tables + sum(resident.values()) <= limit:
        return False
    # That counts a page once for each process that has it, and forks share most of theirs. The kernel's proportional
    # figure costs more, so that all of them are stopped meanwhile: they would use more while they are counted. Where it
    # cannot be read, all pages count.
    os.kill(-1, signal.SIGSTOP)
    for pid in resident:
        shares = _sizes(f"/proc/{pid}/smaps_rollup")
        if "Pss" in shares:
            resident[pid] = shares["Pss"] + shares.get("SwapPss", 0)
    is_more = files + tables + sum(resident.values()) > limit
    if not is_more:
        os.kill(-1, signal.SIGCONT)
    return is_more


def _sizes(path: str) -> dict[str, int]:
    """The sizes in a file of lines "Name: 12 kB", in bytes."""
    lines = (line.split() for line in _read(path).splitlines())
    return {words[0][:-1]: int(words[1]) << 10 for words in lines if len(words) == 3 and words[2] == "kB"}


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
