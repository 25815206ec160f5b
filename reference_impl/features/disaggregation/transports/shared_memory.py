"""Processes of one machine that map the same memory: a segment for each peer, which nothing else is in.

A segment is anonymous memory (memfd), which the peer opens by the receiver's file descriptor: it has no name that could
be left behind, and is gone when no process maps it. Its size is sealed: a peer cannot shrink it under its reader. Where
there is no memfd (macOS) it is a file in the temporary folder, removed when the peer is cut off.

Nothing can take memory back that a peer has mapped. So a peer that was cut off keeps its segment, which is never read
or given out again. The receiver holds a lock on the segment while it shares it: a peer that gets the lock knows that it
was cut off, or that the receiver has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import sys
import tempfile
import threading
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from reference_impl.features.disaggregation.transports.interface import Link, PageMemory, WriteError, WriteTimeout
from reference_impl.features.disaggregation.transports.pages import (
    Description,
    Pages,
    Shape,
    Slots,
    Write,
    Writer,
    describe,
)

# Nothing else is opened, whatever a description says.
_PATH = re.compile(rf"/proc/\d+/fd/\d+|{re.escape(tempfile.gettempdir())}/inferlab-pages-\w+")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if sys.platform == "linux" else 0
_MAP = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # all its pages at once, not one fault each


class SharedMemoryTransport:
    """See `Transport`. owner: by which name the errors of peers call this process."""

    name = "shared_memory"

    def __init__(self, owner: str):
        self.owner = owner
        self._lock = threading.Lock()
        self._shared: dict[str, _Segment] = {}
        self._links = set[_Link]()

    def share(self, peer: str, num_slots: int, slot_bytes: int) -> tuple[PageMemory, bytes]:
        shape = Shape(num_slots, slot_bytes)
        with self._lock:
            if peer in self._shared:
                raise ValueError(f"{peer} has a memory already: cut it off before it gets another")
            segment = self._shared[peer] = _Segment(shape, peer)
        return segment.slots, describe(self.name, self.owner, shape, path=segment.path, token=segment.token)

    def connect(self, description: bytes) -> Link:
        read = Description.read(description, self.name, {"path": str, "token": str})
        if not _PATH.fullmatch(read.more["path"]):
            raise ValueError(f"expected the path of a segment, got {read.more['path'][:200]!r}")
        link = _Link(read)
        with self._lock:
            self._links = {other for other in self._links if not other.closed} | {link}
        return link

    def cut_off(self, peer: str) -> None:
        with self._lock:
            segment = self._shared.pop(peer, None)
        if segment is not None:
            segment.end()

    def close(self) -> None:
        for peer in list(self._shared):
            self.cut_off(peer)
        for link in list(self._links):
            link.close()
        self._links = set()


class _Segment:
    """The receiver's end."""

    def __init__(self, shape: Shape, peer: str):
        token = os.urandom(16)  # says that it is this one: a file descriptor's number is used again
        self.token = token.hex()
        self._file, self.path, self._has_name = _new_file(len(token) + shape.num_bytes)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        memory = np.frombuffer(mmap.mmap(self._file, len(token) + shape.num_bytes, _MAP), np.uint8)
        memory[shape.num_bytes :] = np.frombuffer(token, np.uint8)
        self.slots = Slots(shape, memory[: shape.num_bytes], peer)

    def end(self) -> None:
        self.slots.end()
        fcntl.flock(self._file, fcntl.LOCK_UN)  # the mapping, which views keep, has the same lock
        os.close(self._file)
        if self._has_name:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)


class _Link:
    """The writer's end."""

    def __init__(self, description: Description):
        self._peer, self._shape = description.owner, description.shape
        self._path, self._token = description.more["path"], description.more["token"]
        self._opened: tuple[int, NDArray[np.uint8]] | None = None
        self.closed = False
        self._writer = Writer(self._peer, self._do)

    def write(self, pages: Pages, deadline: float) -> Future[None]:
        return self._writer.add(Write.of(pages, deadline, self._shape))

    def close(self) -> None:
        self._writer.close()
        self.closed = True
        if self._opened is not None:
            os.close(self._opened[0])
        self._opened = None

    def _do(self, write: Write) -> None:
        written = 0
        try:
            file, memory = self._opened = self._opened or self._open()
            self._check_shared(file)
            for content, slot in write.pages:
                write.seconds_left()
                begin = self._shape.place(slot, len(content))
                # Unlike a memoryview's, numpy's copy lets other threads run.
                np.copyto(memory[begin : begin + len(content)], np.frombuffer(content, np.uint8))
                written += 1
            self._check_shared(file)
        except TimeoutError:
            text = f"{self._peer}: the deadline passed after {written} of {len(write.pages)} pages were written"
            write.fail(WriteTimeout(text))
        except OSError as error:
            self._writer.refuse(str(error))
            write.fail(error if isinstance(error, WriteError) else WriteError(str(error)))
        else:
            write.done()

    def _open(self) -> tuple[int, NDArray[np.uint8]]:
        size = self._shape.num_bytes + len(self._token) // 2
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise WriteError(
                f"{self._peer}: cannot open its memory ({error}): it has ended, or cut this process off, or is on "
                "another machine, in another container or of another user; there use TCP"
            ) from error
        try:
            if os.fstat(file).st_size == size and _is_segment(file):
                memory = np.frombuffer(mmap.mmap(file, size, _MAP), np.uint8)
                if memory[self._shape.num_bytes :].tobytes().hex() == self._token:
                    return file, memory
            raise WriteError(f"{self._peer}: {self._path} is not its memory any longer: it has ended or cut this off")
        except BaseException:
            os.close(file)
            raise

    def _check_shared(self, file: int) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        fcntl.flock(file, fcntl.LOCK_UN)
        raise WriteError(f"{self._peer}: has ended, or has cut this process off: nobody reads its memory")


def _is_segment(file: int) -> bool:
    """Whether it is memory made by `_new_file`, and no file that happens to have its size."""
    if not hasattr(os, "memfd_create"):
        return True
    try:
        return fcntl.fcntl(file, fcntl.F_GET_SEALS) == _SEALS
    except OSError:
        return False


def _new_file(size: int) -> tuple[int, str, bool]:
    """A file descriptor of so many bytes, the path by which another process opens it, and whether that is a name to be
    removed."""
    if not hasattr(os, "memfd_create"):
        file, path = tempfile.mkstemp(prefix="inferlab-pages-")
        os.ftruncate(file, size)
        return file, path, True
    file = os.memfd_create("inferlab-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(file, 0, size)  # an error here, if there is no such memory, and no SIGBUS later
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(file)
        raise
    return file, f"/proc/{os.getpid()}/fd/{file}", False
