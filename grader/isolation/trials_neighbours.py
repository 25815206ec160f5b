"""Attacks on neighbours: other processes, other submissions, the process that watches."""

from __future__ import annotations

import contextlib
import secrets
import time
from pathlib import Path

from grader.findings import Row
from grader.isolation.launcher import Launcher
from grader.isolation.trial import Trial

SOON_SECONDS = 60.0


def other_processes(launcher: Launcher) -> Row:
    """A learner's process sees and can signal only what it started; two submissions at a time do not meet."""
    source = """
        import os
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
        def offer():
            open("/tmp/offer", "w").close()
            open("/dev/shm/offer", "w").close()
        def meet():
            return [path for path in ("/tmp/offer", "/dev/shm/offer") if os.path.exists(path)]
    """
    with Trial(launcher, source) as one, Trial(launcher, source) as two:
        one.ask("offer")
        seen, met = two.ask("look"), two.ask("meet")
    # Process 1 is its keeper; for an ordinary user it has the same user, and what is sent to it is ignored.
    if isinstance(seen, list) and seen[0] == 0 and set(seen[1]) <= {1} and met == []:
        return Row("other processes", "sees only itself and its keeper; met nothing of a second submission")
    return Row("other processes", f"sees {seen}, met {met}", "fail", "Please report this")


def channels(launcher: Launcher) -> Row:
    """Neither locks nor leases nor shared memory nor news can be had of the files that two submissions see."""
    source = """
        import ctypes, fcntl, mmap, os, sys
        libc = ctypes.CDLL(None, use_errno=True)
        def reach():
            with open(sys.executable, "rb") as file:
                tries = {
                    "flock": lambda: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB),
                    "record lock": lambda: fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB),
                    "lock of an open file": lambda: fcntl.fcntl(file, 37, bytes(32)),
                    "lease": lambda: fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK),
                    "shared memory": lambda: mmap.mmap(file.fileno(), 4096, mmap.MAP_SHARED, mmap.PROT_READ),
                    "inotify": lambda: worked(libc.inotify_init()),
                    "mincore": lambda: worked(libc.mincore(0, 0, 0)),
                    "what is in memory": lambda: os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT),
                    "advice": lambda: os.posix_fadvise(file.fileno(), 0, 4096, os.POSIX_FADV_DONTNEED),
                    "read ahead": lambda: worked(libc.readahead(file.fileno(), 0, 4096)),
                    "number of processes": lambda: worked(libc.sysinfo(ctypes.create_string_buffer(512))),
                }
                return possible(tries)
    """
    with Trial(launcher, source) as trial:
        found = trial.ask("reach")
    if found == []:
        return Row("channels", "no locks, leases, memory or caches over files that another submission sees")
    return Row("channels", f"possible: {found}", "fail", "Please report this")


def keeper(launcher: Launcher) -> Row:
    """The process that watches a submission cannot be slowed down, limited, moved or ended by it."""
    source = """
        import os, resource, time
        def disturb():
            tries = {
                "renice": lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
                "renice all": lambda: os.setpriority(os.PRIO_USER, 0, 19),
                "limit": lambda: resource.prlimit(1, resource.RLIMIT_CPU, (1, 1)),
                "processor": lambda: os.sched_setaffinity(1, [0]),
                "idle": lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
            }
            found = possible(tries)
            # What process 1 has no handler for does not reach it.
            possible({number: lambda number=number: os.kill(1, number) for number in (9, 19, 20, 2)})
            time.sleep(0.5)  # for a keeper that was ended to go
            return found
    """
    with Trial(launcher, source) as trial:
        try:
            found = {tuple(trial.ask("disturb")), tuple(trial.ask("disturb"))}
        except OSError as error:
            found = {(f"ending it, and all with it: {error}",)}
    if found == {()}:
        return Row("keeper", "cannot be reniced, limited, moved, stopped or ended")
    return Row("keeper", f"possible: {sorted(found)}", "fail", "Please report this")


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
