"""The receiver's end of transfers, see `protocol.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from reference_impl.features.disaggregation.arrival import Arrival, Slots, State, Use
from reference_impl.features.disaggregation.messages import (
    Abort,
    Acknowledged,
    Done,
    Message,
    Offer,
    Pushed,
    Refused,
    Reserved,
    Stopped,
)
from reference_impl.features.disaggregation.protocol import (
    Action,
    Check,
    CutOff,
    Elapsed,
    Lapsed,
    MemoryFree,
    NoMore,
    PageHere,
    Send,
    Times,
)


class Receiver:
    """All transfers to this worker. Each method is an event and returns actions, to be done in this order.

    Feed every event in one thread: `join` when memory is shared with a peer; `claim` when a request waits for a
    transfer, and `release` when it needs its pages no more, whatever became of it; `received` for each control message,
    which must be the peer's own and whole; `checked` for every Check; `lost` when a peer's connection ends, `cut_off`
    when a CutOff is done, or the peer is known to be dead; `tick` a few times in each interval. `now` is in seconds, of
    a clock that only goes forward. Events that come late or twice do nothing.

    max_transfers: that one peer may have here; what it offers beyond is refused.
    """

    def __init__(self, times: Times | None = None, max_transfers: int = 4096):
        self.times, self.max_transfers = times or Times(), max_transfers
        self.refusal = ""  # if set, every offer is refused with it: the worker is about to leave
        self._transfers: dict[str, Arrival] = {}
        self._peers: dict[str, Slots] = {}
        self._clock = Elapsed()
        self._out: list[Action] = []

    @property
    def num_transfers(self) -> int:
        """Those that ended a little while ago, too."""
        return len(self._transfers)

    def free_slots(self, peer: str) -> frozenset[int]:
        """Of the memory shared with it; KeyError if it is not known (any more)."""
        return frozenset(self._peers[peer].free)

    def pools(self) -> dict[str, tuple[int, int, int]]:
        """Of each peer's memory: slots, free ones, and transfers that wait for some. It may be read in any thread."""
        return {peer: (each.num_slots, len(each.free), len(each.queue)) for peer, each in list(self._peers.items())}

    # --- peers ----------------------------------------------------------------------------------------------------

    def join(self, peer: str, num_slots: int) -> None:
        """The peer may write into slots 0 to num_slots - 1 of a memory of its own. ValueError for a known name."""
        if peer in self._peers:
            raise ValueError(f"{peer!r} is known: a worker that starts again joins under another name")
        if num_slots < 1:
            raise ValueError(f"memory for {peer!r} has 1 slot or more, not {num_slots}")
        self._peers[peer] = Slots(num_slots)

    def lost(self, peer: str, now: float) -> list[Action]:
        """The connection to the peer has ended. It may be alive, and still write: so this asks for a CutOff."""
        self._clock.at(now)
        self._lose(peer, f"the connection to {peer} was lost")
        return self._take()

    def cut_off(self, peer: str, now: float) -> list[Action]:
        """No write of the peer can land any more in memory that is read or written again."""
        self._clock.at(now)
        if (slots := self._peers.get(peer)) is not None:
            self._lose(peer, f"{peer} was cut off", is_cut_off=True)
            slots.is_cut_off = True
            for found in self._of(peer):
                self._let_go(found)
            self._forget_if_needless(peer)
        return self._take()

    # --- the request ----------------------------------------------------------------------------------------------

    def claim(self, transfer: str, peer: str, now: float) -> list[Action]:
        """A request waits for this transfer, which comes or came from the peer: its pages stay until `release`."""
        self._clock.at(now)
        found, slots = self._transfers.get(transfer), self._peers.get(peer)
        if found is not None and found.is_released:
            self._out.append(NoMore(transfer, found.error or "it was released"))
        elif found is not None and found.peer != peer:
            self._out.append(NoMore(transfer, f"it comes from {found.peer}, not from {peer}"))
        elif found is None and (slots is None or slots.is_lost):
            self._out.append(NoMore(transfer, f"{peer} is not connected"))
        else:
            found = found or self._new(transfer, peer)
            found.is_claimed = True
            self._settle(found)
        return self._take()

    def release(self, transfer: str, now: float, indices: Iterable[int] | None = None) -> list[Action]:
        """The request lets go: of these pages that are HERE, which gives credit; or (None) of all that came or will
        come, so that the transfer ends, also one that is not offered yet."""
        self._clock.at(now)
        found = self._transfers.get(transfer)
        if indices is None:
            self._release(found or self._new(transfer, ""), "the request let go")
        elif found is not None:
            for index in set(indices):
                if index in found.pages and found.pages[index].use is Use.HERE:
                    self._free(found, index)
            self._grant(found.peer)
        return self._take()

    # --- the sender -----------------------------------------------------------------------------------------------

    def received(self, peer: str, message: Message, now: float) -> list[Action]:
        """A control message of the peer."""
        self._clock.at(now)
        slots, found = self._peers.get(peer), self._transfers.get(message.transfer)
        if slots is None or slots.is_lost:
            return []
        if found is not None and found.peer not in ("", peer):
            if isinstance(message, Offer):
                self._send(peer, Refused(message.transfer, message.attempt, "another peer has a transfer of this name"))
            return self._take()
        match message:
            case Offer():
                self._offered(peer, found, message)
            case Pushed():
                self._pushed(peer, found, message)
            case Abort(attempt=attempt, reason=reason) if found is not None and attempt == found.attempt:
                self._abort(found, reason, is_final=True)
            case Stopped():
                self._stopped(peer, found, message)
        self._grant(peer)
        return self._take()

    def _offered(self, peer: str, found: Arrival | None, offer: Offer) -> None:
        if found is not None:
            if offer.attempt == found.attempt:
                self._answer(found)
            if offer.attempt <= found.attempt:
                return
            self._let_go(found)  # rule 4: the earlier attempts have stopped
        refusal = self.refusal
        if found is None and self._is_full(peer):
            refusal = f"{peer} has {self.max_transfers} transfers here already"
        elif found is not None and found.is_released:
            refusal = found.error or "the request let go"
        elif found is not None and found.keys and found.keys != offer.keys:
            refusal = "it was offered with other keys before"
        if not refusal:
            self._begin(found or self._new(offer.transfer, peer), offer)
            return
        self._send(peer, Refused(offer.transfer, offer.attempt, refusal))
        if found is not None:
            self._abort(found, refusal, is_final=True, is_told=True)

    def _begin(self, found: Arrival, offer: Offer) -> None:
        if found.is_whole:
            found.attempt = offer.attempt
        else:
            found.begin(offer.attempt, offer.keys, self._clock.now)
        if found.missing:
            self._peers[found.peer].queue[found.name] = found
            self._grant(found.peer)
        if found.arrived or not found.granted:
            self._answer(found)

    def _pushed(self, peer: str, found: Arrival | None, message: Pushed) -> None:
        if found is None or message.attempt > found.attempt:
            self._send(peer, Abort(message.transfer, message.attempt, "it is not known", is_final=True))
        if found is None or message.attempt != found.attempt:
            return
        checks = []
        for index, digest in message.pages:
            page = found.pages.get(index)
            if page is None or page.use is not Use.GRANTED:
                continue
            page.use = Use.CHECKING
            if found.is_released or found.is_told:
                self._free(found, index)
            else:
                checks.append((index, page.slot, digest))
        if checks:
            self._out.append(Check(found.name, found.attempt, peer, tuple(checks)))
        self._settle(found)
        if message.pages and found.state is State.OPEN:
            found.moved_at = self._clock.now
            here = tuple(index for index, _ in message.pages if index in found.arrived)
            self._send(peer, Acknowledged(found.name, found.attempt, here))
        else:
            self._answer(found)

    def _stopped(self, peer: str, found: Arrival | None, message: Stopped) -> None:
        if found is None and not self._is_full(peer):
            found = self._new(message.transfer, peer)
        if found is not None and message.attempt >= found.attempt:
            found.attempt = message.attempt
            self._abort(found, message.reason or "its sender ended it", is_final=True, is_told=True)
            self._let_go(found)

    def _answer(self, found: Arrival) -> None:
        """Says all of the attempt that its sender may have missed."""
        if found.is_whole:
            self._send(found.peer, Done(found.name, found.attempt))
        elif found.state is State.OPEN:
            found.moved_at = self._clock.now
            if found.granted or not found.arrived:
                self._send(found.peer, Reserved(found.name, found.attempt, found.granted))
            if found.arrived:
                self._send(found.peer, Acknowledged(found.name, found.attempt, tuple(sorted(found.arrived))))
        else:
            self._send(found.peer, Abort(found.name, found.attempt, found.error, found.is_final))

    # --- checks ---------------------------------------------------------------------------------------------------

    def checked(self, transfer: str, attempt: int, right: Mapping[int, bool], now: float) -> list[Action]:
        """What a Check found: {index: is the content right}."""
        self._clock.at(now)
        if (found := self._transfers.get(transfer)) is None:
            return []
        new = []
        for index, is_right in right.items():
            page = found.pages.get(index)
            if page is None or page.use is not Use.CHECKING or page.attempt != attempt:
                continue  # released meanwhile
            if not is_right:
                self._damaged(found, index)
                continue
            page.use = Use.HERE
            found.arrived.add(index)
            found.fed_at = self._clock.now
            new.append(index)
            self._out.append(PageHere(transfer, index, found.keys[index], found.peer, page.slot))
        if found.is_whole and new:
            self._send(found.peer, Done(transfer, found.attempt))
        elif new and found.state is State.OPEN:
            self._send(found.peer, Acknowledged(transfer, found.attempt, tuple(new)))
        self._settle(found)
        self._grant(found.peer)
        return self._take()

    def _damaged(self, found: Arrival, index: int) -> None:
        is_current = found.pages[index].attempt == found.attempt
        self._free(found, index)
        if is_current:  # within an attempt a page has one slot, so that no late message can name a wrong one
            self._abort(found, f"page {index} was damaged on the way", is_final=False)
        elif found.state is State.OPEN:
            found.missing.append(index)
            self._peers[found.peer].queue[found.name] = found

    # --- time -----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        """Repeats what was not answered, and ends what takes too long."""
        self._clock.at(now)
        now, times = self._clock.now, self.times
        for found in list(self._transfers.values()):
            quiet = now - found.moved_at
            match found.state:
                case State.EXPECTED if quiet >= times.lease:
                    self._abort(found, f"no offer came within {times.lease} s", is_final=True)
                case State.OPEN if now - found.begun_at >= times.limit:
                    self._abort(found, f"not over after {times.limit} s", is_final=True)
                case State.OPEN if now - found.fed_at >= times.credit and found.is_starved:
                    self._abort(found, f"no slot came free within {times.credit} s", is_final=True)
                case State.OPEN if quiet >= times.lease:
                    self._abort(found, f"{found.peer} said nothing for {times.lease} s", is_final=False)
                case State.ABORTING if now >= found.stop_at:
                    self._lose(found.peer, f"{found.peer} did not stop within {times.stop} s")
                case State.ABORTING if now - found.repeated_at >= times.interval:
                    found.repeated_at = now
                    self._send(found.peer, Abort(found.name, found.attempt, found.error, found.is_final))
                case State.STOPPED if found.is_released and quiet >= times.lease:
                    del self._transfers[found.name]  # until then late messages find it
                case State.STOPPED if not found.is_final and quiet >= times.lease:
                    self._abort(found, f"{found.error}, and no further attempt came", is_final=True)
                case State.STOPPED if not found.is_claimed and not found.is_released and quiet >= times.unclaimed:
                    self._out.append(Lapsed(found.name))
                    self._release(found, f"no request claimed it within {times.unclaimed} s")
        return self._take()

    # --- steps ----------------------------------------------------------------------------------------------------

    def _new(self, transfer: str, peer: str) -> Arrival:
        self._transfers[transfer] = new = Arrival(transfer, peer, self._clock.now)
        return new

    def _is_full(self, peer: str) -> bool:
        return len(self._of(peer)) >= self.max_transfers

    def _grant(self, peer: str) -> None:
        if (slots := self._peers.get(peer)) is not None:
            for found, pages in slots.grant():
                self._send(peer, Reserved(found.name, found.attempt, pages))

    def _abort(self, found: Arrival, error: str, is_final: bool, is_told: bool = False) -> None:
        """Grants nothing more in this attempt; what is granted stays so until its writer has stopped (rule 2)."""
        is_begun = found.state in (State.EXPECTED, State.OPEN)
        if found.is_whole or not (is_begun or (is_final and not found.is_final)):
            return
        found.error, found.is_final = error, is_final
        if is_begun:
            found.state, found.stop_at = State.ABORTING, self._clock.now + self.times.stop
            found.missing.clear()
            if (slots := self._peers.get(found.peer)) is not None:
                slots.queue.pop(found.name, None)
        found.repeated_at = self._clock.now
        if found.attempt and not is_told:
            self._send(found.peer, Abort(found.name, found.attempt, error, is_final))
        self._settle(found)

    def _release(self, found: Arrival, why: str) -> None:
        if found.is_released:
            return
        found.is_released = True
        for index in [index for index, page in found.pages.items() if page.use is not Use.GRANTED]:
            self._free(found, index)
        self._abort(found, why, is_final=True)
        found.moved_at = self._clock.now
        self._grant(found.peer)

    def _let_go(self, found: Arrival) -> None:
        """The writer has let go of every slot."""
        for index, _ in found.granted:
            self._free(found, index)
        self._settle(found)

    def _settle(self, found: Arrival) -> None:
        if found.settle(self._clock.now):
            self._out.append(NoMore(found.name, found.error))

    def _free(self, found: Arrival, index: int) -> None:
        self._peers[found.peer].free.append(found.pages.pop(index).slot)
        self._forget_if_needless(found.peer)

    def _forget_if_needless(self, peer: str) -> None:
        if (slots := self._peers.get(peer)) is not None and slots.is_needless:
            del self._peers[peer]
            self._out.append(MemoryFree(peer))

    def _lose(self, peer: str, error: str, is_cut_off: bool = False) -> None:
        """Believes nothing more that the peer says; asks to cut it off, unless that is done."""
        if (slots := self._peers.get(peer)) is None or slots.is_lost:
            return
        slots.is_lost = True
        if not is_cut_off:
            self._out.append(CutOff(peer))
        for found in self._of(peer):
            self._abort(found, error, is_final=True)

    def _send(self, peer: str, message: Message) -> None:
        if (slots := self._peers.get(peer)) is not None and not slots.is_lost:
            self._out.append(Send(peer, message))

    def _of(self, peer: str) -> list[Arrival]:
        return [found for found in self._transfers.values() if found.peer == peer]

    def _take(self) -> list[Action]:
        out, self._out = self._out, []
        return out
