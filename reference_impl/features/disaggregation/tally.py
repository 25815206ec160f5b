"""What a worker's endpoint has moved so far, by peer: pages, how transfers ended, and when the last of them ran."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from reference_impl.features.disaggregation.messages import Offer, Reserved
from reference_impl.features.disaggregation.protocol import Action, Ended, Lapsed, NoMore, PageHere, Send, Write

PUSHED, RECEIVED = "pushed", "received"  # directions
LAST = 1000  # transfers whose times are kept
# Why a transfer ended early, in classes: the first whose words are in what the protocol says.
_CLASSES = (
    ("was damaged", "damaged"),
    ("no slot came free", "no_slot"),
    ("said nothing", "silent"),
    ("no offer came", "silent"),
    ("not over after", "too_long"),
    ("takes too long", "too_long"),
    ("was lost", "peer_lost"),
    ("was cut off", "peer_lost"),
    ("did not stop", "peer_lost"),
    ("is not connected", "peer_lost"),
    ("has not met", "peer_lost"),
    ("let go", "cancelled"),
    ("was released", "cancelled"),
    ("not computed to its end", "cancelled"),
    ("no request claimed", "unclaimed"),
)


def outcome(error: str) -> str:
    """The class of what the protocol says of an end: "whole" without an error, "other" for what no class is about."""
    if not error:
        return "whole"
    return next((name for words, name in _CLASSES if words in error), "other")


def peer_of(met: str) -> str:
    """The name of a peer, also of one of the meetings with it ("name~2", see `endpoint.py`)."""
    return met.partition("~")[0]


@dataclass
class PeerTally:
    """Between this worker and one peer. pages: usable at the end to which they went. ended: transfers, by outcome.
    num_open: transfers that go on. Each by direction."""

    pages: Counter[str] = field(default_factory=Counter)
    num_damaged: int = 0  # pages received whose digest was wrong
    ended: Counter[tuple[str, str]] = field(default_factory=Counter)  # (direction, outcome)
    num_open: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Moved:
    """A transfer that has ended. Times: seconds of the clock. first_page_at: when its first page was written, or was
    found right; None where there was none."""

    transfer: str
    direction: str
    peer: str
    started_at: float
    first_page_at: float | None
    ended_at: float
    num_pages: int
    error: str


class Tally:
    """Counts what the endpoint's thread does; may be read in any. clock: as the engine's, so that its trace and these
    transfers fit."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock, self._lock = clock, threading.Lock()
        self._peers: dict[str, PeerTally] = {}
        self._open: dict[tuple[str, str], tuple[str, float]] = {}  # by direction and transfer: the peer, since when
        self._num_pages: Counter[str] = Counter()  # received, of open transfers
        self._first: dict[tuple[str, str], float] = {}  # when the first page of an open transfer moved
        self._last: deque[Moved] = deque(maxlen=LAST)

    def saw(self, action: Action) -> None:
        """Takes each action of both sides."""
        match action:
            case Send(peer, Offer(transfer=transfer)):
                self._begin(PUSHED, transfer, peer)
            case Send(peer, Reserved(transfer=transfer)):
                self._begin(RECEIVED, transfer, peer)
            case Write(transfer=transfer):
                self._first.setdefault((PUSHED, transfer), self._clock())
            case PageHere(transfer=transfer, peer=peer):
                self._first.setdefault((RECEIVED, transfer), self._clock())
                with self._lock:
                    self._of(peer).pages[RECEIVED] += 1
                    self._num_pages[transfer] += 1
            case Ended(transfer, num_acknowledged, error):
                self._end(PUSHED, transfer, num_acknowledged, error)
            case NoMore(transfer, error):
                self._end(RECEIVED, transfer, self._num_pages[transfer], error)
            case Lapsed(transfer):
                self._end(RECEIVED, transfer, self._num_pages[transfer], "no request claimed it")

    def expected(self, transfer: str, peer: str) -> None:
        """A request waits for it."""
        self._begin(RECEIVED, transfer, peer)

    def released(self, transfer: str) -> None:
        """Its request needs it no longer: an end, if it goes on."""
        self._end(RECEIVED, transfer, self._num_pages[transfer], "the request let go")

    def checked(self, peer: str, right: Mapping[int, bool]) -> None:
        with self._lock:
            self._of(peer).num_damaged += sum(not each for each in right.values())

    def _begin(self, direction: str, transfer: str, peer: str) -> None:
        with self._lock:
            if (direction, transfer) not in self._open:
                self._open[direction, transfer] = peer_of(peer), self._clock()
                self._of(peer).num_open[direction] += 1

    def _end(self, direction: str, transfer: str, num_pages: int, error: str) -> None:
        first = self._first.pop((direction, transfer), None)
        with self._lock:
            if direction == RECEIVED:
                self._num_pages.pop(transfer, None)
            if (begun := self._open.pop((direction, transfer), None)) is None:
                return
            peer, started_at = begun
            found = self._of(peer)
            found.num_open[direction] -= 1
            found.ended[direction, outcome(error)] += 1
            if direction == PUSHED:
                found.pages[PUSHED] += num_pages
            times = started_at, first, self._clock()
            self._last.append(Moved(transfer, direction, peer, *times, num_pages, error))

    def _of(self, peer: str) -> PeerTally:
        return self._peers.setdefault(peer_of(peer), PeerTally())

    def by_peer(self) -> dict[str, PeerTally]:
        """A copy, of every peer that was ever met."""
        with self._lock:
            return {
                peer: PeerTally(Counter(each.pages), each.num_damaged, Counter(each.ended), Counter(each.num_open))
                for peer, each in self._peers.items()
            }

    def last(self) -> tuple[Moved, ...]:
        """The transfers that ended last, the latest at the end."""
        with self._lock:
            return tuple(self._last)
