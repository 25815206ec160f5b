"""What a receiver knows of a transfer, and of the memory that it shares with a peer; see `protocol.py`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto


class Use(Enum):
    """Of a slot that is not free."""

    GRANTED = auto()  # held by the transfer: its writer may write
    CHECKING = auto()  # held for the request, as from then on: its writer has finished
    HERE = auto()


@dataclass(eq=False)
class Page:
    slot: int
    attempt: int  # in which it was granted
    use: Use = Use.GRANTED


class State(Enum):
    """Of a transfer's last attempt."""

    EXPECTED = auto()  # there is none
    OPEN = auto()
    ABORTING = auto()  # some slots are GRANTED still
    STOPPED = auto()  # none is


@dataclass(eq=False)
class Arrival:
    """A transfer at its receiver. It outlives its end a little, so that late messages find it."""

    name: str
    peer: str  # empty: the request let go before anything came
    moved_at: float
    begun_at: float = 0.0  # of the attempt
    fed_at: float = 0.0  # when its last page came
    attempt: int = 0
    keys: tuple[bytes, ...] = ()
    state: State = State.EXPECTED
    missing: deque[int] = field(default_factory=deque)  # pages that need a slot
    pages: dict[int, Page] = field(default_factory=dict)
    arrived: set[int] = field(default_factory=set)  # checked at some time
    # The request:
    is_claimed: bool = False
    is_released: bool = False
    is_told: bool = False  # NoMore
    # If the attempt was aborted:
    error: str = ""
    is_final: bool = False
    stop_at: float = 0.0
    repeated_at: float = 0.0

    @property
    def is_whole(self) -> bool:
        return bool(self.keys) and len(self.arrived) == len(self.keys)

    @property
    def granted(self) -> tuple[tuple[int, int], ...]:
        """(index, slot)"""
        return tuple((index, page.slot) for index, page in self.pages.items() if page.use is Use.GRANTED)

    @property
    def is_starved(self) -> bool:
        """All that it waits for is credit."""
        return bool(self.missing) and not self.granted and not self.is_checking

    @property
    def is_checking(self) -> bool:
        return any(page.use is Use.CHECKING for page in self.pages.values())

    def begin(self, attempt: int, keys: tuple[bytes, ...], now: float) -> None:
        self.attempt, self.keys, self.state = attempt, keys, State.OPEN
        self.begun_at = self.moved_at = self.fed_at = now
        self.error, self.is_final, self.is_told = "", False, False
        self.missing = deque(i for i in range(len(keys)) if i not in self.arrived and i not in self.pages)

    def settle(self, now: float) -> bool:
        """After any change: is the attempt over? Returns whether NoMore is due."""
        if self.is_whole:
            self.is_final, self.error = True, ""
        is_over = (self.is_whole or self.state is State.ABORTING) and not self.granted
        if is_over and self.state is not State.STOPPED:
            self.state, self.moved_at = State.STOPPED, now
        is_due = self.is_final and self.is_claimed and not (self.is_released or self.is_told or self.is_checking)
        self.is_told |= is_due
        return is_due


class Slots:
    """The memory that one peer may write into, in slots."""

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self.free = list(reversed(range(num_slots)))
        self.queue: dict[str, Arrival] = {}  # transfers that lack slots, in the order of their offers
        self.is_lost = False  # nothing is believed that the peer says
        self.is_cut_off = False  # nor can it write

    @property
    def is_needless(self) -> bool:
        return self.is_cut_off and len(self.free) == self.num_slots

    def grant(self) -> list[tuple[Arrival, tuple[tuple[int, int], ...]]]:
        """Gives free slots to the transfers that lack some (rule 7). Returns the pages (index, slot) of each."""
        given = []
        while self.queue and self.free:
            arrival = next(iter(self.queue.values()))
            new = []
            while arrival.missing and self.free:
                new.append((arrival.missing.popleft(), self.free.pop()))
            arrival.pages |= {index: Page(slot, arrival.attempt) for index, slot in new}
            given.append((arrival, tuple(new)))
            if not arrival.missing:
                del self.queue[arrival.name]
        return given
