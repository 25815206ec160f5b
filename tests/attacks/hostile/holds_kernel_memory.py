# attack: processes that fill sockets, pipes, shared memory and more, which belong to no process; it works all the same
# expect: passed
# says: held []

# %% first
import ctypes
import fcntl
import mmap
import os
import select
import socket

libc = ctypes.CDLL(None, use_errno=True)


def full_socket():
    one, other = socket.socketpair()
    one.setblocking(False)
    one.send(bytes(100_000))
    return other


def large_pipe():
    reading, writing = os.pipe()
    return fcntl.fcntl(writing, 1031, 1 << 20)  # F_SETPIPE_SZ


def unseen():
    shared = mmap.mmap(-1, 1 << 20)
    shared.write(bytes(1 << 20))
    shared.madvise(mmap.MADV_DONTNEED)  # it is there, and no process has it
    return shared


def memory_file():
    return os.fdopen(os.memfd_create("x"), "wb").write(bytes(1 << 20))


def spliced():
    reading, writing = os.pipe()
    with open("/proc/self/exe" if os.path.exists("/proc/self/exe") else "/bin/sh", "rb") as file:
        return os.splice(file.fileno(), writing, 4096)


def watched():
    if libc.inotify_init() == -1:
        raise OSError


def many_locks():
    with open("/tmp/locked", "w") as file:
        for place in range(0, 100, 2):
            fcntl.lockf(file, fcntl.LOCK_EX, 1, place)


held = []
for attempt in (full_socket, large_pipe, unseen, memory_file, spliced, watched, many_locks, select.epoll, os.openpty):
    try:
        attempt()
        held.append(attempt.__name__)
    except (OSError, AttributeError):
        pass
print("held", held)
