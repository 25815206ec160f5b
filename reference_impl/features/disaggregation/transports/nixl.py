"""Pages over NIXL, NVIDIA's library for such transfers, and UCX, which chooses the way: RDMA where there is some, the
memory of the other process on one machine, else TCP. Needs the extra `transfer`, Linux.

One agent and one thread for each transport: an agent's calls are not safe in several. Every agent has a new name, so
that a process that starts again at the same address is another agent for its peers. What NIXL does not do:

- It has no deadline. A write to a stopped peer stays under way, and cannot be taken back: it is looked at until it is
  done, however late, and its source stays where it is.
- It cannot take memory back. A peer that has a region's metadata goes on writing there after it was deregistered, also
  after the agent has ended (seen with nixl-cu12 1.5.1 on one machine). So the addresses of a peer that was cut off are
  never used again in this process; their memory goes back to the system when the last view of it has gone.
- Bounds are checked by the writer's library, not by the receiver: on one machine UCX has the kernel write into the
  receiver's process, and a peer that lies can write to all of it. Use TCP for peers that are not trusted so far.
- Its own progress thread keeps a fifth of a core busy; the thread here looks every millisecond instead.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import mmap
import queue
import threading
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from reference_impl.features.disaggregation.transports.interface import Link, PageMemory, WriteError, WriteTimeout
from reference_impl.features.disaggregation.transports.pages import Description, Pages, Shape, Slots, Write, describe

logger = logging.getLogger("inferlab.disaggregation")

T = TypeVar("T")
INSTALL = "NIXL is not installed: pip install 'inferlab[transfer]', in a checkout pip install -e '.[transfer]' (Linux)"
_UNDER_WAY, _SHARING = 5e-5, 1e-3  # seconds between two looks
_retired = list[mmap.mmap]()  # regions into which a peer that was cut off may still write


class NixlTransport:
    """See `Transport`. owner: by which name the errors of peers call this process. ImportError says what to install."""

    name = "nixl"

    def __init__(self, owner: str):
        make_agent = _agent_maker()
        self.owner = owner
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of `_closed`: no call comes behind the one that ends the thread
        self._agent: Any = None
        self._shared: dict[str, _Region] = {}
        self._under_way = list[_UnderWay]()
        self._remotes = Counter[str]()  # links by agent
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"nixl of {owner}", daemon=True)
        self._thread.start()
        try:
            self._agent = self._call(lambda: make_agent(f"{owner}-{uuid.uuid4().hex}"))
        except BaseException:
            self._calls.put(None)
            self._thread.join()
            raise

    def share(self, peer: str, num_slots: int, slot_bytes: int) -> tuple[PageMemory, bytes]:
        shape = Shape(num_slots, slot_bytes)

        def register() -> _Region:
            if peer in self._shared:
                raise ValueError(f"{peer} has a memory already: cut it off before it gets another")
            try:
                region = self._shared[peer] = _Region(shape, peer, self._agent)
            except Exception as error:  # the library's own have no common class
                raise OSError(f"NIXL cannot share {shape.num_bytes} bytes: {type(error).__name__}: {error}") from error
            return region

        region = self._call(register)
        if region is None:
            raise ValueError("the transport was closed, it shares nothing any longer")
        more: dict[str, str | int] = {"metadata": region.metadata, "address": region.address}
        return region.slots, describe(self.name, self.owner, shape, **more)

    def connect(self, description: bytes) -> Link:
        read = Description.read(description, self.name, {"metadata": str, "address": int})
        return _Link(self, read, base64.b64decode(read.more["metadata"], validate=True))

    def cut_off(self, peer: str) -> None:
        self._call(lambda: self._cut_off(peer))

    def close(self) -> None:
        def end() -> None:
            for peer in list(self._shared):
                self._cut_off(peer)
            for transfer in self._under_way:
                transfer.fail(WriteError(f"{transfer.peer}: the transport was closed here", transfer.write.stopped))
            self._under_way.clear()
            self._agent = None

        with self._lock:
            if not self._closed:
                self._closed = True
                self._calls.put(end)
                self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def start(self, link: _Link, write: Write) -> None:
        """For links: posts a write, in the thread."""
        if not self._put(lambda: self._start(link, write)):
            write.fail(WriteError(f"{link.peer}: the transport was closed here"))

    def forget(self, link: _Link) -> None:
        """For links: nothing is written over it any longer; what is under way stays."""
        self._put(lambda: self._forget(link))

    def _put(self, call: Callable[[], None]) -> bool:
        """Whether the thread will run it: not when the transport was closed."""
        with self._lock:
            if not self._closed:
                self._calls.put(call)
            return not self._closed

    def _call(self, what: Callable[[], T]) -> T | None:
        """What it returns, in the thread; None if the transport was closed."""
        if threading.current_thread() is self._thread:  # as the callback of a write
            return what()
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(what())
            except BaseException as error:
                future.set_exception(error)

        return future.result() if self._put(run) else None

    def _run(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=self._pause())
            except queue.Empty:
                pass
            else:
                if call is None:
                    return
                try:
                    call()
                except Exception:  # of this call alone: others wait for this thread
                    logger.exception("a call of NIXL failed")
            if self._shared:
                with contextlib.suppress(Exception):  # of one peer's connection, which that peer has to see
                    self._agent.get_new_notifs()  # UCX receives over TCP only within a call
            self._under_way = [transfer for transfer in self._under_way if not transfer.ended(self._agent)]

    def _pause(self) -> float | None:
        """Seconds until something has to be looked at again."""
        if any(not transfer.write.future.done() for transfer in self._under_way):
            return _UNDER_WAY
        return _SHARING if self._shared or self._under_way else None

    def _cut_off(self, peer: str) -> None:
        if (region := self._shared.pop(peer, None)) is not None:
            region.end(self._agent)

    def _start(self, link: _Link, write: Write) -> None:
        try:
            if self._agent is None or link.over is not None:
                raise WriteError(link.over or f"{link.peer}: the transport was closed here")
            if link.agent is None:
                link.agent = _text(self._agent.add_remote_agent(link.metadata))
                self._remotes[link.agent] += 1
            write.seconds_left()
            self._under_way.append(_UnderWay(self._agent, link, write))
        except TimeoutError:
            write.fail(WriteTimeout(f"{link.peer}: its pages were not begun by the deadline"))
        except WriteError as error:
            write.fail(error)
        except Exception as error:  # the library's own have no common class
            link.over = f"{link.peer}: NIXL cannot write to it: {type(error).__name__}: {error}"
            write.fail(WriteError(link.over))

    def _forget(self, link: _Link) -> None:
        for transfer in self._under_way:
            if transfer.link is link and not transfer.write.future.done():
                transfer.fail(
                    WriteError(f"{link.peer}: the link to its memory was closed here", transfer.write.stopped)
                )
        if link.agent is not None:
            self._remotes[link.agent] -= 1
            # While a write is under way it needs the connection; it goes with the agent then.
            if not self._remotes[link.agent] and not any(t.link.agent == link.agent for t in self._under_way):
                with contextlib.suppress(Exception):  # it has gone already, if the peer has ended
                    self._agent.remove_remote_agent(link.agent)
            link.agent = None


class _Region:
    """The receiver's memory for one peer, known to the agent."""

    def __init__(self, shape: Shape, peer: str, agent: Any):
        # Private to this process, so that MADV_DONTNEED frees it.
        self._map = mmap.mmap(-1, shape.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)  # a writer's kernel looks each page up, half of a write's time
        memory = np.frombuffer(self._map, np.uint8)
        memory[:: mmap.PAGESIZE] = 0  # there is such a page now, so that no first write has to wait for it
        self.address, self._memory = memory.ctypes.data, memory
        self.slots = Slots(shape, memory, peer)
        self._registered = agent.register_memory([(self.address, shape.num_bytes, 0, "")], "DRAM")
        metadata = agent.get_partial_agent_metadata(self._registered, True, ["UCX"])
        self.metadata = base64.b64encode(metadata).decode()

    def end(self, agent: Any) -> None:
        self.slots.end()
        _retired.append(self._map)
        with contextlib.suppress(Exception):  # it is not read any longer, registered or not
            agent.deregister_memory(self._registered)
        weakref.finalize(self._memory, self._map.madvise, mmap.MADV_DONTNEED).atexit = False
        del self._memory


class _Link:
    """The writer's end; all but `write` and `close` belongs to the transport's thread."""

    def __init__(self, transport: NixlTransport, description: Description, metadata: bytes):
        self._transport, self.metadata = transport, metadata
        self.peer, self.shape = description.owner, description.shape
        self.address: int = description.more["address"]
        self.agent: str | None = None
        self.over: str | None = None  # why nothing can be written any longer

    def write(self, pages: Pages, deadline: float) -> Future[None]:
        write = Write.of(pages, deadline, self.shape)
        self._transport.start(self, write)
        return write.future

    def close(self) -> None:
        self.over = f"{self.peer}: the link to its memory was closed here"
        self._transport.forget(self)


def _merged(ranges: list[tuple[int, int, int]]) -> list[tuple[int, int, int, str]]:
    """(address, length, device) as they are registered: adjacent ones as one, and none twice, since NIXL ends the
    process when a list with the same range twice is deregistered."""
    merged = list[tuple[int, int]]()  # from, to
    for address, length, _ in sorted(ranges):
        if merged and address <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], address + length)
        else:
            merged.append((address, address + length))
    return [(begin, end - begin, 0, "") for begin, end in merged]


class _UnderWay:
    """A write that was posted. It keeps its source alive."""

    def __init__(self, agent: Any, link: _Link, write: Write):
        self.link, self.peer, self.write = link, link.peer, write
        sources = [np.frombuffer(content, np.uint8) for content, _ in write.pages]
        local = [(source.ctypes.data, source.nbytes, 0) for source in sources]
        remote = [
            (link.address + link.shape.place(slot, len(content)), len(content), 0) for content, slot in write.pages
        ]
        self._sources = sources
        self._registered = agent.register_memory(_merged(local), "DRAM")
        try:
            descriptors = [agent.get_xfer_descs(side, "DRAM") for side in (local, remote)]
            self._handle = agent.initialize_xfer("WRITE", *descriptors, link.agent)
            self._state: str = agent.transfer(self._handle)
        except BaseException:
            agent.deregister_memory(self._registered)
            raise

    def fail(self, error: WriteError) -> None:
        if not self.write.future.done():
            self.write.future.set_exception(error)

    def ended(self, agent: Any) -> bool:
        """Looks at it once; ends the future when it is done, when it has failed, or at its deadline."""
        if self._state == "PROC":
            try:
                self._state = agent.check_xfer_state(self._handle)
            except Exception as error:
                self._state = f"{type(error).__name__}: {error}"
        if self._state == "PROC":
            if not self.write.future.done() and time.monotonic() >= self.write.deadline:
                self.link.over = f"{self.peer}: a write before has not ended: stopped, overloaded or unreachable"
                text = f"{self.peer}: not written by the deadline; NIXL cannot take it back"
                self.fail(WriteTimeout(text, self.write.stopped))
            return False
        with contextlib.suppress(Exception):
            self._handle.release()
            agent.deregister_memory(self._registered)
        if self._state == "DONE":
            if not self.write.future.done():
                self.write.done()
            self.write.stopped.set_result(None)
        else:
            self.link.over = f"{self.peer}: a write failed ({self._state}): it has ended or is unreachable"
            # What left before may still be on its way, so that `stopped` stays open.
            self.fail(WriteError(self.link.over, self.write.stopped))
        return True


def _agent_maker() -> Callable[[str], Any]:
    raises = logging.raiseExceptions
    try:
        import nixl_cu12
    except ImportError as error:
        raise ImportError(f"{INSTALL}; {error}") from error
    finally:
        logging.raiseExceptions = raises  # which the import sets to False for the whole process
    logging.getLogger("nixl").setLevel(logging.WARNING)  # two lines on stdout for each agent
    config = nixl_cu12.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
    return lambda name: nixl_cu12.nixl_agent(name, config)


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
