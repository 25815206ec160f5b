"""The sender's end of transfers, see `protocol.py`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from reference_impl.features.disaggregation.messages import (
    MAX_DIGEST,
    Abort,
    Acknowledged,
    Done,
    Message,
    Offer,
    Pushed,
    Refused,
    Reserved,
    Stopped,
    check_keys,
)
from reference_impl.features.disaggregation.protocol import Action, CutOff, Elapsed, Ended, LetGo, Send, Times, Write


class _State(Enum):
    OFFERED = auto()
    PUSHING = auto()
    STOPPING = auto()


@dataclass(eq=False)
class _Transfer:
    name: str
    peer: str
    keys: tuple[bytes, ...]
    attempt: int
    begun_at: float
    heard_at: float  # of the peer, in this attempt
    repeated_at: float
    held: set[int]  # pages that are read here: until they are acknowledged, and while they are being written
    num_attempts: int = 1
    state: _State = _State.OFFERED
    digests: dict[int, int] = field(default_factory=dict)  # of pages whose content is ready
    slots: dict[int, int] = field(default_factory=dict)  # credit of this attempt
    waiting: dict[int, int] = field(default_factory=dict)  # the part of it that was not used: writes that are to begin
    in_flight: set[int] = field(default_factory=set)
    pushed: set[int] = field(default_factory=set)  # and not acknowledged
    acknowledged: set[int] = field(default_factory=set)
    # While stopping:
    error: str = ""
    is_final: bool = False
    is_told: bool = False  # the peer knows that it is over, or is gone
    stop_at: float = 0.0


class Sender:
    """All transfers from this worker. Each method is an event and returns actions, to be done in this order.

    Feed every event in one thread: `offer` when the keys of a prompt's pages are known, `pages_ready` as they are
    computed, `written` for every write, `abort` if the request is cancelled or fails, `received` for each control
    message, which must be the peer's own and whole; `lost` when a peer's connection ends, `cut_off` when a CutOff is
    done, or the peer's process is known to be dead; `tick` a few times in each interval. `now` is in seconds, of a
    clock that only goes forward. Events of transfers that have ended do nothing. Every offer ends with Ended.
    """

    def __init__(self, times: Times | None = None):
        self.times = times or Times()
        self._transfers: dict[str, _Transfer] = {}
        self._attempts = itertools.count(1)
        self._clock = Elapsed()
        self._cutting: set[str] = set()  # peers
        self._out: list[Action] = []

    @property
    def num_transfers(self) -> int:
        return len(self._transfers)

    # --- the request ----------------------------------------------------------------------------------------------

    def offer(self, transfer: str, peer: str, keys: Sequence[bytes], now: float) -> list[Action]:
        """Begins a transfer. The pages' sources are held for it until LetGo. ValueError if it is going on already."""
        self._clock.at(now)
        if transfer in self._transfers:
            raise ValueError(f"transfer {transfer!r} is going on already: wait for Ended, or give it another name")
        check_keys(tuple(keys))
        time = self._clock.now
        self._transfers[transfer] = new = _Transfer(
            transfer, peer, tuple(keys), next(self._attempts), time, time, time, set(range(len(keys)))
        )
        self._send(new, Offer(transfer, new.attempt, new.keys))
        return self._take()

    def cannot_start(self, transfer: str, peer: str, reason: str) -> list[Action]:
        """Says to the peer that there will be no offer: the request was refused here, or failed before. ValueError if
        the transfer is going on: `abort` ends it."""
        if transfer in self._transfers:
            raise ValueError(f"transfer {transfer!r} is going on already: abort() ends it")
        return [Send(peer, Stopped(transfer, next(self._attempts), reason))]

    def pages_ready(self, transfer: str, digests: Mapping[int, int], now: float) -> list[Action]:
        """The contents of pages are at their source: {index: xxh3_64}. ValueError for an index out of bounds."""
        self._clock.at(now)
        if (found := self._transfers.get(transfer)) is not None:
            for index, digest in digests.items():
                if not 0 <= index < len(found.keys) or not 0 <= digest <= MAX_DIGEST:
                    raise ValueError(
                        f"transfer {transfer!r} has pages 0 to {len(found.keys) - 1}, with digests of 64 bits; "
                        f"page {index} came with {digest}"
                    )
            found.digests |= digests
            self._write(found, digests)
        return self._take()

    def abort(self, transfer: str, reason: str, now: float) -> list[Action]:
        """The request is gone: nothing more is written."""
        self._clock.at(now)
        if (found := self._transfers.get(transfer)) is not None:
            self._stop(found, reason, is_final=True)
        return self._take()

    # --- the transport --------------------------------------------------------------------------------------------

    def written(
        self, transfer: str, attempt: int, indices: Iterable[int], now: float, error: str = "", is_over: bool = True
    ) -> list[Action]:
        """What became of writes. error: they failed. is_over=False: a deadline has passed, but they may still land; the
        event comes again when they cannot. It must never say that a write is over of which anything may still land."""
        self._clock.at(now)
        found = self._transfers.get(transfer)
        if found is None or found.attempt != attempt:
            return self._take()
        known = found.in_flight.intersection(indices)
        if error or not is_over:
            found.in_flight -= known if is_over else set()
            if known:
                self._stop(found, error or "a write takes too long", is_final=False)
        elif known:
            # Also while stopping: what was written whole need not be written again, and is of use to the request.
            found.in_flight -= known
            found.pushed |= known
            self._send(found, self._pushed(found, known))
        self._go_on(found)
        return self._take()

    def lost(self, peer: str, now: float) -> list[Action]:
        """The connection to the peer has ended. Writes that hang are cut off later."""
        self._clock.at(now)
        for found in self._of(peer):
            found.is_told = True
            self._stop(found, f"the connection to {peer} was lost", is_final=True)
        return self._take()

    def cut_off(self, peer: str, now: float) -> list[Action]:
        """No write to the peer is in flight any more, none lands, and no message reaches it."""
        self._clock.at(now)
        self._cutting.discard(peer)
        for found in self._of(peer):
            found.in_flight.clear()
            found.is_told = True
            self._stop(found, f"{peer} was cut off", is_final=True)
        return self._take()

    # --- the receiver ---------------------------------------------------------------------------------------------

    def received(self, peer: str, message: Message, now: float) -> list[Action]:
        """A control message. One of an attempt that is not going on is not believed, but may be answered with Stopped:
        the receiver waits for that."""
        self._clock.at(now)
        found = self._transfers.get(message.transfer)
        if found is None or message.attempt < found.attempt:
            if isinstance(message, (Abort, Reserved)):
                self._out.append(Send(peer, Stopped(message.transfer, message.attempt, "it has ended")))
        elif message.attempt == found.attempt and peer == found.peer:
            found.heard_at = self._clock.now
            self._heard(found, message)
        return self._take()

    def _heard(self, found: _Transfer, message: Message) -> None:
        match message:
            case Reserved(pages=pages) if found.state is not _State.STOPPING:
                found.state = _State.PUSHING
                for index, slot in pages:
                    if index not in found.slots and index not in found.acknowledged:  # else it is repeated
                        found.slots[index] = found.waiting[index] = slot
                self._write(found, [index for index, _ in pages])
            case Acknowledged(indices=indices):
                if found.state is _State.OFFERED:
                    found.state = _State.PUSHING
                self._acknowledge(found, (index for index in indices if index < len(found.keys)))
            case Done():
                found.is_told = True
                self._acknowledge(found, range(len(found.keys)))
            case Refused(reason=reason):
                found.is_told = True
                self._stop(found, reason, is_final=True)
            case Abort(reason=reason, is_final=is_final):
                self._stop(found, reason, is_final)

    def _acknowledge(self, found: _Transfer, indices: Iterable[int]) -> None:
        for index in indices:
            found.acknowledged.add(index)
            found.pushed.discard(index)
            found.waiting.pop(index, None)
        if len(found.acknowledged) == len(found.keys):
            self._stop(found, "", is_final=True)
        self._go_on(found)

    # --- time -----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        """Repeats what was not answered, and ends what takes too long."""
        self._clock.at(now)
        now, times = self._clock.now, self.times
        for found in list(self._transfers.values()):
            if found.state is _State.STOPPING:
                if now >= found.stop_at and found.peer not in self._cutting:
                    self._cutting.add(found.peer)
                    self._out.append(CutOff(found.peer))
            elif now - found.begun_at >= times.limit:
                self._stop(found, f"not over after {times.limit} s", is_final=True)
            elif now - found.heard_at >= times.lease:
                self._stop(found, f"{found.peer} said nothing for {times.lease} s", is_final=True)
            elif now - found.repeated_at >= times.interval:
                found.repeated_at = now
                is_offered = found.state is _State.OFFERED
                again = (
                    Offer(found.name, found.attempt, found.keys) if is_offered else self._pushed(found, found.pushed)
                )
                self._send(found, again)
        return self._take()

    # --- steps ----------------------------------------------------------------------------------------------------

    def _write(self, found: _Transfer, indices: Iterable[int]) -> None:
        """Begins to write those of these pages that are ready and have a slot."""
        able = [index for index in indices if index in found.waiting and index in found.digests]
        if able:
            found.in_flight.update(able)
            pages = tuple((index, found.waiting.pop(index)) for index in able)
            self._out.append(Write(found.peer, found.name, found.attempt, pages))

    def _stop(self, found: _Transfer, error: str, is_final: bool) -> None:
        """Begins nothing more in this attempt; when what is in flight is over, `_go_on` goes on."""
        found.is_final |= is_final
        if found.state is not _State.STOPPING:
            found.state, found.error = _State.STOPPING, error
            found.stop_at = self._clock.now + self.times.stop
            found.waiting.clear()
            if found.in_flight and self._is_last(found):
                self._send(found, Abort(found.name, found.attempt, error, is_final=True))
        self._go_on(found)

    def _is_last(self, found: _Transfer) -> bool:
        return found.is_final or found.num_attempts >= self.times.attempts

    def _go_on(self, found: _Transfer) -> None:
        """Lets go of what is not needed; once stopped, offers again, or ends."""
        if self._transfers.get(found.name) is not found:
            return
        is_stopping = found.state is _State.STOPPING
        needless = found.held if is_stopping and self._is_last(found) else found.held & found.acknowledged
        if let_go := tuple(sorted(needless - found.in_flight)):
            found.held -= set(let_go)
            self._out.append(LetGo(found.name, let_go))
        if not is_stopping or found.in_flight:
            return
        if self._is_last(found):
            del self._transfers[found.name]
            self._send(found, Stopped(found.name, found.attempt, found.error))
            is_whole = len(found.acknowledged) == len(found.keys)
            self._out.append(Ended(found.name, len(found.acknowledged), "" if is_whole else found.error))
        else:
            self._offer_again(found)

    def _offer_again(self, found: _Transfer) -> None:
        found.attempt, found.num_attempts = next(self._attempts), found.num_attempts + 1
        found.state, found.error = _State.OFFERED, ""
        found.slots, found.pushed = {}, set()
        found.heard_at = found.repeated_at = self._clock.now
        self._send(found, Offer(found.name, found.attempt, found.keys))

    def _pushed(self, found: _Transfer, indices: Iterable[int]) -> Pushed:
        return Pushed(found.name, found.attempt, tuple((index, found.digests[index]) for index in sorted(indices)))

    def _send(self, found: _Transfer, message: Message) -> None:
        if not found.is_told:
            self._out.append(Send(found.peer, message))

    def _of(self, peer: str) -> list[_Transfer]:
        return [found for found in self._transfers.values() if found.peer == peer]

    def _take(self) -> list[Action]:
        out, self._out = self._out, []
        return out
