"""What a transport promises.

The receiver has page memory for each peer: `num_slots` slots of `slot_bytes`. It sends the memory's description to
that peer, over a connection that is authenticated, and the peer writes pages into slots. Which slots it may write to,
and when they are read, is agreed in other messages (the protocol): a transport only moves bytes, into that memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

MAX_DESCRIPTION = 1 << 16  # bytes


class WriteError(OSError):
    """A write failed; the text names the peer. Slots that it was for may hold anything.

    stopped: done when nothing of this write can change the peer's memory any longer, mostly at once. Until then the
    peer must not use these slots for anything else; where it never comes, the peer has to cut this end off.
    """

    def __init__(self, text: str, stopped: Future[None] | None = None):
        super().__init__(text)
        if stopped is None:
            stopped = Future()
            stopped.set_result(None)
        self.stopped = stopped


class WriteTimeout(WriteError, TimeoutError):
    """A write was not done by its deadline."""


class PageMemory(Protocol):
    """The receiver's memory for one peer's pages."""

    @property
    def num_slots(self) -> int: ...

    @property
    def slot_bytes(self) -> int: ...

    def slot(self, number: int) -> memoryview:
        """The bytes of a slot, numbered from 0. ValueError for any other number, and once the peer was cut off: then no
        view that was given out before means anything."""
        ...


class Link(Protocol):
    """A way into the memory that one peer shares with this process. A write that fails may end it, so that later ones
    fail for the same reason: close it and connect again."""

    def write(self, pages: Sequence[tuple[memoryview, int]], deadline: float) -> Future[None]:
        """Starts to write contents into slots: (content of 1 to slot_bytes bytes, slot). Never waits. Writes of a link
        may be done one after the other, and then a deadline is looked at when those before it have ended.

        The future is done when every byte is in the peer's memory. It ends with a WriteError, at the deadline (seconds
        of `time.monotonic`) with a WriteTimeout. Contents must not change before it is done, or before `stopped` of its
        error is. ValueError, raised at once, for pages that do not fit.
        """
        ...

    def close(self) -> None:
        """Ends the link; writes that are not done fail. Idempotent."""
        ...


class Transport(Protocol):
    """One end, which can receive and write. Methods may be called in any thread."""

    @property
    def name(self) -> str:
        """Of the kind of transport, the same at both ends."""
        ...

    def share(self, peer: str, num_slots: int, slot_bytes: int) -> tuple[PageMemory, bytes]:
        """Memory into which this one peer may write, and its description for that peer, at most MAX_DESCRIPTION bytes.
        ValueError if the peer has some already: cut it off first."""
        ...

    def connect(self, description: bytes) -> Link:
        """A way into the memory that a peer's `share` described. Connects with the first write, so it never waits.
        ValueError for what is no description of this transport."""
        ...

    def cut_off(self, peer: str) -> None:
        """After it returns the peer can change nothing that `share` gives out from now on. What it wrote before is
        lost, too. No error where it has no memory."""
        ...

    def close(self) -> None:
        """Cuts off every peer and ends every link. Leaves no thread, socket or file. Idempotent."""
        ...
