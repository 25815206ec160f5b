"""How pages travel from one worker to another: the rules, and the words that both ends share.

A transfer moves the pages of one prompt from a prefill worker (`sender.py`) into slots of a decode worker's memory
(`receiver.py`). The sender writes into the slots itself, so that the receiver never sees a page coming; it is told by
control messages (`messages.py`), which may be lost, repeated, reordered or late. Both ends are pure: events in, actions
out, no sockets, clocks or threads. A shell around them moves the bytes, feeds each event, and does each action.

    sender                                    receiver
      | -- Offer(keys) ------------------------> |    keys of all pages, in the order of the prompt
      | <-------------------- Reserved(slots) -- |    credit: a slot for each page that may be written now
      | == writes, by the transport ===========> |    the receiver does not see them
      | -- Pushed(digests) --------------------> |    these writes have ended: Check, then PageHere
      | <----------------- Acknowledged, Done -- |    the source of these pages is free

or, at any time,

      | <------------------------------ Abort -- |    stop writing
      | -- Stopped ----------------------------> |    nothing is written any more: the slots are free

The sender, a transfer:

    offer() --> OFFERED --Reserved--> PUSHING --Done, or all acknowledged--> ended
                 ^   |                   |
                 |   |  Refused, Abort, write failed, silence, limit, abort(), lost()
                 |   v                   v
                 +-- STOPPING <----------+
            try again    |
                         +-- no write in flight, or cut_off() --> ended (Stopped)

The receiver, an attempt and its slots:

    claim() --> EXPECTED --Offer--> OPEN --all pages checked--> STOPPED
                                     | ^                           ^
             damage, silence, limit, | | the next Offer            |
             release(), Abort        v |                           |
                                  ABORTING --Stopped, cut_off()----+

    free --Offer--> GRANTED --Pushed--> CHECKING --right--> HERE --release()--> free
                       |                   |
                       |                   +--wrong, release()----------------> free
                       +--Stopped, next Offer, cut_off()----------------------> free

The rules:

 1. A slot has two owners, the transfer's writer and the request, and is free when both have let go. The writer lets go
    of a page when it says Pushed, and of all with Stopped; the request with `release`. So has a page at its source: the
    sender's request, and the transfer until LetGo.
 2. A slot that was granted is used for nothing else until its writer has said that it stopped, or has been cut off.
    An abort, a lease that ends, a request that is gone do not free it.
 3. A page is used (PageHere) when every byte of it was checked, and stays usable until it is released, however the
    transfer ends.
 4. Each message names its attempt. No number is used twice by a sender, not even for another transfer. A new attempt
    begins when nothing of the one before is being written, so its Offer says that the earlier ones have stopped, and
    what comes late from them is ignored.
 5. A message may come twice: it is answered again, and changes nothing. Whoever waits repeats its message every
    `interval`: the sender Offer, then Pushed (without pages if it waits for none); the receiver Abort.
 6. A side that hears nothing of a transfer for `lease` gives the attempt up; so it does after `limit`, whatever it
    hears. A writer that has not stopped `stop` later is cut off. So a sender ends within limit + stop and the time that
    cutting off takes, and a receiver at most as much later, whether it is told or not.
 7. Credit is given in the order of the offers, and pages in the order of the prompt. Only the first transfer that lacks
    slots holds a part of what it needs, so that transfers do not wait for each other in a circle.
 8. Who cannot start a transfer says so: Refused, Stopped (`Sender.cannot_start`).
 9. The name of a peer is one connection with one life of a worker. One that starts again, or that was cut off, comes
    back under another name, and writes into another memory.

As KV connectors of vLLM and Mooncake do, but there a decode worker's blocks are written directly, and rule 2 was broken
in several (vllm#41269, sglang#24527).
"""

from __future__ import annotations

from dataclasses import dataclass

from reference_impl.features.disaggregation.messages import Message


@dataclass(frozen=True)
class Times:
    """Seconds; both sides may have other ones, if the lease is several intervals of the other side."""

    interval: float = 0.5  # until a message without an answer is repeated
    lease: float = 5.0  # of silence, until the other side is given up
    limit: float = 60.0  # for an attempt at the receiver, for all attempts at the sender
    credit: float = 10.0  # until a transfer that lacks slots, and gets none, is aborted: better to compute the rest
    stop: float = 5.0  # until a writer that was told to stop, or whose write hangs, is cut off
    unclaimed: float = 30.0  # until pages that came for an unknown request are dropped
    attempts: int = 3  # a number: how often a transfer is offered

    def __post_init__(self) -> None:
        for name in ("interval", "lease", "limit", "credit", "stop", "unclaimed", "attempts"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.lease < 2 * self.interval:
            raise ValueError(f"lease must be 2 intervals of {self.interval} s or more, not {self.lease} s")


# --- actions of both sides ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    """Send this message to the peer. It may be lost: nothing is to be reported."""

    peer: str
    message: Message


@dataclass(frozen=True)
class CutOff:
    """The peer is not to be reached, or does not stop. Close the connection to it, and make sure that no write of it
    (sender: no write to it) lands in memory that will be used again. Pages that are HERE, which their writer has
    finished, must stay readable until MemoryFree. Then feed `cut_off(peer)`: until then nothing of the peer is free. It
    comes once for a peer."""

    peer: str


# --- actions of a sender --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Write:
    """Write each page into its slot of the peer's memory, once; then feed `written`, once or more for parts of them."""

    peer: str
    transfer: str
    attempt: int
    pages: tuple[tuple[int, int], ...]  # (index, slot)


@dataclass(frozen=True)
class LetGo:
    """The transfer reads the source of these pages no more. It comes once for each page, before Ended."""

    transfer: str
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Ended:
    """The transfer is over on the sender's side. It comes once for each `offer`."""

    transfer: str
    num_acknowledged: int  # pages that are known to be usable at the receiver
    error: str  # why it ended early; empty if all pages were acknowledged


# --- actions of a receiver ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """Compare each slot's content with its digest; then feed `checked`, once or more for parts of them. A slot that
    cannot be read is wrong."""

    transfer: str
    attempt: int
    peer: str  # whose memory the slots are in
    pages: tuple[tuple[int, int, int], ...]  # (index, slot, xxh3_64)


@dataclass(frozen=True)
class PageHere:
    """The page with this key is in the slot, checked, and stays there until `release` or Lapsed."""

    transfer: str
    index: int
    key: bytes
    peer: str  # whose memory the slot is in
    slot: int


@dataclass(frozen=True)
class NoMore:
    """No PageHere of this transfer will follow (unless its sender offers it anew): the request can go on with what is
    here. It comes once after `claim`, unless `release` comes first."""

    transfer: str
    error: str  # why pages are missing; empty if all came


@dataclass(frozen=True)
class Lapsed:
    """No request claimed the transfer. Read none of its slots from now on."""

    transfer: str


@dataclass(frozen=True)
class MemoryFree:
    """The peer was cut off, and no page in its memory is held: give the memory back. It is the peer's last action."""

    peer: str


Action = Send | CutOff | Write | LetGo | Ended | Check | PageHere | NoMore | Lapsed | MemoryFree


class Elapsed:
    """Seconds since the first event. A clock that jumps back stands still here: no lease gets longer for it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._last: float | None = None

    def at(self, now: float) -> None:
        """Takes the shell's clock, which began anywhere."""
        if self._last is not None:
            self.now += max(0.0, now - self._last)
        self._last = now
