"""Ranks as threads of one process: for tests, for labs, and where no process can be started."""

from __future__ import annotations

import itertools
import queue
import threading
import time

from torch import Tensor

from reference_impl.features.parallel.meeting import Meeting, check_calls
from reference_impl.interfaces.collectives import CollectiveError


class ThreadGroup:
    """What the ranks of one process share. seconds: how long a rank waits for the others; None: without end. width: how
    many ranks in a row meet; all, if None."""

    def __init__(self, size: int, seconds: float | None = 30, width: int | None = None):
        self.size, self.seconds, self.width = size, seconds, width or size
        # Two tables take turns: a rank that is one call ahead must not overwrite what others still read.
        self.shown: list[list[tuple[str, Tensor] | None]] = [[None] * size, [None] * size]
        self.calls = [0] * size  # to how many each rank came
        self.barriers = [threading.Barrier(self.width) for _ in range(size // self.width)]
        pairs = itertools.product(range(size), repeat=2)
        self.messages = {pair: queue.SimpleQueue[Tensor | None]() for pair in pairs}  # by (from, to)

    def rank(self, place: int) -> ThreadRank:
        return ThreadRank(place, self)

    def end(self) -> None:
        """Ends the waiting of all ranks, now and later, with an error."""
        for barrier in self.barriers:
            barrier.abort()
        for waiting in self.messages.values():
            waiting.put(None)


class ThreadRank(Meeting):
    def __init__(self, place: int, group: ThreadGroup):
        super().__init__(place, group.size, group.width)
        self.group, self.num_sent = group, 0

    def send(self, x: Tensor, to: int) -> None:
        """Does not wait for the other one."""
        self.num_sent += 1
        self.num_bytes += x.nbytes
        self.group.messages[self.place, to].put(x.clone())

    def recv(self, source: int) -> Tensor:
        messages, what = self.group.messages[source, self.place], "the group was ended"
        began = time.perf_counter()
        try:
            if (found := messages.get(timeout=self.group.seconds)) is not None:
                return found
            messages.put(None)
        except queue.Empty:
            what = f"rank {source} sent nothing in {self.group.seconds:g} s"
        finally:
            self.waited += time.perf_counter() - began
        raise CollectiveError(f"rank {self.place}, recv of step {self.step}: {what}", [source])

    def go_on(self) -> None:
        """In one process the planner need not be told."""

    def meet(self, call: str, x: Tensor) -> list[Tensor]:
        table = self.group.shown[self.num_calls % 2]
        table[self.place] = call, x.clone()  # this rank may go on and change it while others read
        self.group.calls[self.place] = self.num_calls
        began = time.perf_counter()
        try:
            self.group.barriers[self.place // self.size].wait(self.group.seconds)
        except threading.BrokenBarrierError:
            late = [place for place in self.met if self.group.calls[place] < self.num_calls]
            what = f"{' and '.join(f'rank {rank}' for rank in late)} did not come" if late else "the group was ended"
            raise CollectiveError(f"rank {self.place}, {call} of step {self.step}: {what}", late) from None
        self.waited += time.perf_counter() - began
        shown = [each for place in self.met if (each := table[place]) is not None]
        check_calls({place: name for place, (name, _) in zip(self.met, shown, strict=True)}, self.step)
        return [each for _, each in shown]
