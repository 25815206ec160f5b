"""Ranks as threads of one process: for tests, for labs, and where no process can be started."""

from __future__ import annotations

import itertools
import queue
import threading

from torch import Tensor

from reference_impl.features.parallel.meeting import Meeting, check_calls
from reference_impl.interfaces.collectives import CollectiveError


class ThreadGroup:
    """What the ranks of one process share. seconds: how long a rank waits for the others; None: without end."""

    def __init__(self, size: int, seconds: float | None = 30):
        self.size, self.seconds = size, seconds
        # Two tables take turns: a rank that is one call ahead must not overwrite what others still read.
        self.shown: list[list[tuple[str, Tensor] | None]] = [[None] * size, [None] * size]
        self.calls = [0] * size  # to how many each rank came
        self.barrier = threading.Barrier(size)
        pairs = itertools.product(range(size), repeat=2)
        self.messages = {pair: queue.SimpleQueue[Tensor | None]() for pair in pairs}  # by (from, to)

    def rank(self, rank: int) -> ThreadRank:
        return ThreadRank(rank, self)

    def end(self) -> None:
        """Ends the waiting of all ranks, now and later, with an error."""
        self.barrier.abort()
        for waiting in self.messages.values():
            waiting.put(None)


class ThreadRank(Meeting):
    def __init__(self, rank: int, group: ThreadGroup):
        super().__init__(rank, group.size)
        self.group, self.num_sent = group, 0

    def send(self, x: Tensor, to: int) -> None:
        """Leaves a copy for another rank; does not wait for it."""
        self.num_sent += 1
        self.num_bytes += x.nbytes
        self.group.messages[self.rank, to].put(x.clone())

    def recv(self, source: int) -> Tensor:
        """The next tensor from that rank. CollectiveError where none comes in time."""
        messages, what = self.group.messages[source, self.rank], "the group was ended"
        try:
            if (found := messages.get(timeout=self.group.seconds)) is not None:
                return found
            messages.put(None)
        except queue.Empty:
            what = f"rank {source} sent nothing in {self.group.seconds:g} s"
        raise CollectiveError(f"rank {self.rank}, recv of step {self.step}: {what}", [source])

    def go_on(self) -> None:
        """Tells the planner that this rank is at work: in one process it need not be told."""

    def meet(self, call: str, x: Tensor) -> list[Tensor]:
        table = self.group.shown[self.num_calls % 2]
        table[self.rank] = call, x.clone()  # this rank may go on and change it while others read
        self.group.calls[self.rank] = self.num_calls
        try:
            self.group.barrier.wait(self.group.seconds)
        except threading.BrokenBarrierError:
            late = [rank for rank, came in enumerate(self.group.calls) if came < self.num_calls]
            what = f"{' and '.join(f'rank {rank}' for rank in late)} did not come" if late else "the group was ended"
            raise CollectiveError(f"rank {self.rank}, {call} of step {self.step}: {what}", late) from None
        shown = [each for each in table if each is not None]
        check_calls([name for name, _ in shown], self.step)
        return [each for _, each in shown]
