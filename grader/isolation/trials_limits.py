"""Attacks on the limits: processes, memory of every kind, files, time."""

from __future__ import annotations

import time

from grader.findings import Row
from grader.isolation import sandbox
from grader.isolation.launcher import Launcher
from grader.isolation.trial import Trial

_FORKS = """
    import os, time
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
                kept = [bytes([1]) * (1 << 20) for _ in range(mebibytes)]
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


def held_by_the_kernel(launcher: Launcher) -> Row:
    """What the kernel would hold for a process, and which no limit of the process counts, cannot be had."""
    source = """
        import ctypes, fcntl, mmap, os, select, socket
        libc = ctypes.CDLL(None, use_errno=True)
        x86 = os.uname().machine == "x86_64"
        def have():
            pair = os.pipe()
            tries = {
                "sockets": lambda: socket.socketpair(),
                "a socket": lambda: socket.socket(socket.AF_UNIX),
                "large pipes": lambda: fcntl.fcntl(pair[1], 1031, 1 << 20),
                "pages in pipes": lambda: worked(libc.vmsplice(pair[1], None, 0, 0)),
                "files in pipes": lambda: worked(libc.splice(pair[0], None, pair[1], None, 1, 2)),
                "memory without a file": lambda: worked(libc.memfd_create(b"x", 0)),
                "shared memory": lambda: mmap.mmap(-1, 4096),
                "shared zeros": lambda: mmap.mmap(os.open("/dev/zero", os.O_RDWR), 4096),
                "shared segments": lambda: worked(libc.shmget(0, 4096, 0o1600)),
                "message queues": lambda: worked(libc.msgget(0, 0o1600)),
                "semaphores": lambda: worked(libc.semget(0, 1, 0o1600)),
                "named queues": lambda: worked(libc.syscall(240 if x86 else 180, b"q", 0o102, 0o600, None)),
                "io_uring": lambda: worked(libc.syscall(425, 8, bytes(200))),
                "asynchronous files": lambda: worked(libc.syscall(206 if x86 else 0, 8, bytes(8))),
                "epoll": lambda: select.epoll(),
                "inotify": lambda: worked(libc.inotify_init()),
                "attributes of files": lambda: os.setxattr("/tmp", "user.x", b"x"),
                "locks": lambda: fcntl.lockf(open("/tmp/locked", "w"), fcntl.LOCK_EX, 1),
                "terminals": lambda: os.openpty(),
                "locked memory": lambda: worked(libc.mlockall(3)),
            }
            return [len(tries), possible(tries)]
    """
    with Trial(launcher, source) as trial:
        answer = trial.ask("have")
    if isinstance(answer, list) and answer[1] == []:
        return Row("memory, the kernel's", f"{answer[0]} kinds tried, none to be had")
    return Row("memory, the kernel's", f"to be had: {answer}", "fail", "Please report this")


def disk(launcher: Launcher) -> Row:
    """/tmp is full before the machine is."""
    with Trial(launcher, _FORKS) as trial:
        answers = [trial.ask("fill", path, 600) for path in ("/tmp/x", "/dev/shm/x")]
    if all("No space" in str(answer) or "File too large" in str(answer) for answer in answers):
        return Row("disk", f"full at {sandbox.DISK >> 20} MiB")
    return Row("disk", f"600 MiB: {answers}", "fail", "Please report this")


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
