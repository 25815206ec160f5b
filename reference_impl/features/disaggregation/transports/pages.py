"""What transports share: the slots of a memory, its description for a peer, and a thread that does the writes."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference_impl.features.disaggregation.transports.interface import MAX_DESCRIPTION, WriteError, WriteTimeout

MAX_BYTES = 1 << 46  # of a memory: what addresses can say
Pages = Sequence[tuple[memoryview, int]]


@dataclass(frozen=True)
class Shape:
    """Of a page memory."""

    num_slots: int
    slot_bytes: int

    def __post_init__(self) -> None:
        for name, value in (("num_slots", self.num_slots), ("slot_bytes", self.slot_bytes)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: expected a whole number of at least 1, got {value!r}")
        if self.num_bytes > MAX_BYTES or self.num_slots >= 1 << 32:
            raise ValueError(f"{self.num_slots} slots of {self.slot_bytes} bytes are more than any memory has")

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.slot_bytes

    def place(self, slot: int, length: int) -> int:
        """Where in the memory so many bytes of a slot begin. ValueError if they are not all in it."""
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot {slot} is none of the slots 0 to {self.num_slots - 1}")
        if not 0 < length <= self.slot_bytes:
            raise ValueError(f"a page has 1 to {self.slot_bytes} bytes, the size of a slot; this one has {length}")
        return slot * self.slot_bytes


class Slots:
    """A PageMemory over an array of bytes. Every view of a slot keeps that array alive."""

    def __init__(self, shape: Shape, memory: NDArray[np.uint8], peer: str):
        self._shape, self._peer = shape, peer
        self._memory: memoryview | None = memory.data

    @property
    def num_slots(self) -> int:
        return self._shape.num_slots

    @property
    def slot_bytes(self) -> int:
        return self._shape.slot_bytes

    def slot(self, number: int) -> memoryview:
        return self.part(number, self._shape.slot_bytes)

    def part(self, number: int, length: int) -> memoryview:
        """The first bytes of a slot. ValueError as `slot` and `Shape.place` have it."""
        if self._memory is None:
            raise ValueError(f"{self._peer} was cut off, its pages are lost: share new memory with it")
        begin = self._shape.place(number, length)
        return self._memory[begin : begin + length]

    def end(self) -> None:
        """From now on it has no slots."""
        self._memory = None


def describe(transport: str, owner: str, shape: Shape, **more: str | int) -> bytes:
    """A memory's description for the peer that may write to it. owner: whom that peer's errors name."""
    fields = {"transport": transport, "owner": owner, "num_slots": shape.num_slots, "slot_bytes": shape.slot_bytes}
    description = json.dumps(fields | more).encode()
    if len(description) > MAX_DESCRIPTION:
        raise ValueError(f"the description of a memory has {len(description)} bytes, more than {MAX_DESCRIPTION}")
    return description


@dataclass(frozen=True)
class Description:
    owner: str
    shape: Shape
    more: dict[str, Any]

    @classmethod
    def read(cls, description: bytes, transport: str, more: dict[str, type]) -> Description:
        """more: the other fields, {name: type}. ValueError for what `describe` did not make."""
        if len(description) > MAX_DESCRIPTION:
            raise ValueError(f"a description has at most {MAX_DESCRIPTION} bytes, this one has {len(description)}")
        try:
            fields = json.loads(description)
        except (ValueError, RecursionError):
            fields = None
        wanted = {"transport": str, "owner": str, "num_slots": int, "slot_bytes": int, **more}
        if not isinstance(fields, dict) or {k: type(v) for k, v in fields.items()} != wanted:
            raise ValueError(f"expected a description with {', '.join(wanted)}, got {bytes(description[:200])!r}")
        if fields["transport"] != transport:
            raise ValueError(f"expected memory shared over {transport}, got {fields['transport'][:40]!r}")
        shape = Shape(fields["num_slots"], fields["slot_bytes"])
        return cls(fields["owner"][:200], shape, {name: fields[name] for name in more})


@dataclass(frozen=True, eq=False)
class Write:
    """Pages on their way. contents: flat bytes."""

    pages: list[tuple[memoryview, int]]
    deadline: float
    future: Future[None] = field(default_factory=Future)
    stopped: Future[None] = field(default_factory=Future)

    @classmethod
    def of(cls, pages: Pages, deadline: float, shape: Shape) -> Write:
        """ValueError for pages that do not fit, or are not contiguous."""
        flat = list[tuple[memoryview, int]]()
        for content, slot in pages:
            view = memoryview(content)
            if not view.c_contiguous:
                raise ValueError(f"the page for slot {slot} is not contiguous")
            shape.place(slot, view.nbytes)
            flat.append((view if view.ndim == 1 and view.format == "B" else view.cast("B"), slot))
        if not flat:
            raise ValueError("expected at least one page to write, got none")
        write = cls(flat, deadline)
        write.future.set_running_or_notify_cancel()  # it cannot be taken back
        write.stopped.set_running_or_notify_cancel()
        return write

    def seconds_left(self) -> float:
        """TimeoutError when there are none."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def done(self) -> None:
        self.future.set_result(None)

    def fail(self, error: WriteError) -> None:
        """A write that has not begun, or whose end is certain, fails with a WriteError of its own `stopped`."""
        self.future.set_exception(error)


class Writer:
    """A thread that does writes one after the other.

    do: ends the future of a write. interrupt: makes a `do` that waits return, for `close`.
    """

    def __init__(self, peer: str, do: Callable[[Write], None], interrupt: Callable[[], None] = lambda: None):
        self._peer, self._do, self._interrupt = peer, do, interrupt
        self._writes: queue.SimpleQueue[Write | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._over: str | None = None  # why no write is taken any longer
        self._thread = threading.Thread(target=self._run, name=f"pages to {peer}", daemon=True)
        self._thread.start()

    def add(self, write: Write) -> Future[None]:
        with self._lock:
            if (over := self._over) is None:
                self._writes.put(write)
        if over is not None:
            write.fail(WriteError(over))
        return write.future

    def refuse(self, reason: str) -> None:
        """Writes that wait and all later ones fail."""
        waiting = list[Write]()
        with self._lock:
            self._over = over = self._over or reason
            with contextlib.suppress(queue.Empty):
                while True:
                    if (write := self._writes.get_nowait()) is not None:
                        waiting.append(write)
            self._writes.put(None)
        for write in waiting:
            write.fail(WriteError(over))

    def close(self) -> None:
        """Returns when the thread has ended. Idempotent."""
        self.refuse(f"{self._peer}: the link to its memory was closed here")
        self._interrupt()
        if threading.current_thread() is not self._thread:  # futures run their callbacks in it
            self._thread.join()

    def _run(self) -> None:
        while (write := self._writes.get()) is not None:
            try:
                write.seconds_left()
            except TimeoutError:
                write.fail(WriteTimeout(f"{self._peer}: its pages were not begun by the deadline"))
                continue
            try:
                self._do(write)
            except Exception as error:  # of ours, and no reason to let anybody wait
                self.refuse(text := f"{self._peer}: the link to its memory failed: {type(error).__name__}: {error}")
                if not write.future.done():
                    write.fail(WriteError(text, write.stopped))
