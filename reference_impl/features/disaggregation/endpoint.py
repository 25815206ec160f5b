"""The shell around a worker's transfers: one thread, which feeds every event to `Sender` and `Receiver` and does what
they ask for. It owns the memory that peers write into, and the links to theirs.

Two workers first meet: the one that will send says what its pages are; the other compares, makes memory that this peer
alone may write into, and tells where it is. Workers whose pages differ are refused there, not with the first request.

    hello     sender -> receiver    the sender's `PageFormat`
    welcome   receiver -> sender    where its memory is
    refused   receiver -> sender    what differs
    message   both ways             a control message of the protocol
    cut       receiver -> sender    this memory is no more: meet again

What a peer says comes through `received` from whatever carries it, and goes out through `send`.

Who was cut off, because it or the way to it stood still, can come back: it meets the other again, as another peer of
the protocol ("name~2"), with another memory. So each message says of which meeting it is.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import xxhash

from reference_impl.features.disaggregation.layouts import PageFormat
from reference_impl.features.disaggregation.messages import Reserved, decode, encode
from reference_impl.features.disaggregation.page_table import PageTable
from reference_impl.features.disaggregation.protocol import (
    Action,
    Check,
    CutOff,
    Ended,
    Lapsed,
    LetGo,
    MemoryFree,
    NoMore,
    PageHere,
    Send,
    Times,
    Write,
)
from reference_impl.features.disaggregation.receiver import Receiver
from reference_impl.features.disaggregation.sender import Sender
from reference_impl.features.disaggregation.tally import Tally
from reference_impl.features.disaggregation.transports.interface import Link, PageMemory, Transport, WriteError

logger = logging.getLogger("inferlab.disaggregation")
HELLO, WELCOME, REFUSED, MESSAGE, CUT = b"h", b"w", b"r", b"m", b"c"
MOST_MEETINGS = 1 << 16  # of two workers
MEMORY_BYTES = 64 << 20  # for the pages of one peer, as many as fit


@dataclass
class _Push:
    """A transfer that is sent. sources: contents that the transfer still reads, by index."""

    index_of: dict[bytes, int]  # of a key
    answered: Callable[[str | None], None]
    sources: dict[int, memoryview] = field(default_factory=dict)
    num_ready: int = 0  # pages whose contents were given
    is_answered: bool = False

    def answer(self, refusal: str | None) -> None:
        """Says whether there is room; only once."""
        if not self.is_answered:
            self.is_answered = True
            self.answered(refusal)


class Endpoint:
    """The transfers of a worker. name: as its peers know it, of this one life. format: what its pages are. transport:
    moves them. memory_bytes: for each peer. pages: those to push and those that have come.

    `begin` starts the thread; everything else may be called in any thread, and does not wait."""

    def __init__(
        self,
        name: str,
        format: PageFormat,
        transport: Transport,
        *,
        memory_bytes: int = MEMORY_BYTES,
        times: Times | None = None,
    ):
        self.name, self.format, self.transport = name, format, transport
        self.num_slots = max(1, memory_bytes // format.page_bytes)
        self.times = times or Times()
        self.sender, self.receiver = Sender(self.times), Receiver(self.times)
        self.tally, self.pages = Tally(), PageTable()
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="endpoint", daemon=True)
        # In the thread alone:
        self._meetings: dict[str, int] = {}  # how often a peer was met to send to it, by name
        self._links: dict[str, Link] = {}  # by name and number of the meeting, as all that follow
        self._memories: dict[str, PageMemory] = {}
        self._senders: dict[str, str] = {}  # of the last meeting with a peer that sends, by its name
        self._source: dict[str, str] = {}  # who sent the pages of a transfer
        self._pushes: dict[str, _Push] = {}
        self._expected: dict[str, Callable[[str], None]] = {}

    def begin(self, send: Callable[[str, bytes], None], met: Callable[[str, str], None]) -> None:
        """send: takes a peer's name and what to tell it. met: a peer that was met, and why it is of no use, if it is
        not; called in another thread."""
        self._send, self._has_met = send, met
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, the links and the memory."""
        self._events.put(None)
        if self._thread.ident is not None:  # else it has not begun
            self._thread.join()
        for link in self._links.values():
            link.close()
        self.transport.close()

    # --- peers ----------------------------------------------------------------------------------------------------

    def meet(self, peer: str) -> None:
        """Makes ready to push pages to this peer."""
        self._do(lambda: self._meet(peer))

    def gone(self, peer: str) -> None:
        """The peer's process is known to be dead."""

        def lose() -> None:
            if peer in self._meetings:
                self._cut(_met(peer, self._meetings.pop(peer)))
            if (met := self._senders.pop(peer, None)) is not None:
                self._cut(met)

        self._do(lose)

    def received(self, peer: str, content: bytes) -> None:
        self._do(lambda: self._heard(peer, content))

    # --- a sender's requests ----------------------------------------------------------------------------------------

    def offer(self, transfer: str, peer: str, keys: Sequence[bytes], answered: Callable[[str | None], None]) -> None:
        """Offers a prompt's pages. answered: called once, in another thread, with None when the peer has room for some
        of them, or with the reason why nothing will be pushed."""
        self._do(lambda: self._offer(transfer, peer, keys, answered))

    def push(self, pages: Mapping[bytes, memoryview]) -> None:
        """Pushes pages where they are wanted. What they point to must stay as it is."""
        takers = self.pages.takers(pages)
        self._do(lambda: self._push(pages, takers))

    def end_push(self, transfer: str) -> None:
        """The request has ended here: what it has not pushed by now is not pushed any more."""
        self._do(lambda: self._end_push(transfer))

    # --- a receiver's requests --------------------------------------------------------------------------------------

    def expect(self, transfer: str, peer: str, over: Callable[[str], None]) -> None:
        """over: called once, in another thread, when no more pages of this transfer will come, with the reason if some
        are missing, else with an empty one. Its pages stay until `release`."""

        def claim() -> None:
            self._expected[transfer] = over
            self.tally.expected(transfer, peer)
            self._act(self.receiver.claim(transfer, self._senders.get(peer, peer), _now()))

        self._do(claim)

    def release(self, transfer: str) -> None:
        """The request needs the pages of this transfer no longer, or will not come."""

        def let_go() -> None:
            self._expected.pop(transfer, None)
            self.tally.released(transfer)
            self._forget(transfer)
            self._act(self.receiver.release(transfer, _now()))

        self._do(let_go)

    # --- the thread -------------------------------------------------------------------------------------------------

    def _do(self, event: Callable[[], None]) -> None:
        self._events.put(event)

    def _run(self) -> None:
        wait = self.times.interval / 4
        due = _now() + wait
        while True:
            try:
                event = self._events.get(timeout=max(0.0, due - _now()))
            except queue.Empty:
                event = _nothing
            if event is None:
                return
            try:
                event()
                if _now() >= due:
                    due = _now() + wait
                    self._act(self.sender.tick(_now()))
                    self._act(self.receiver.tick(_now()))
            except Exception:  # of this event alone: other transfers go on
                logger.exception("an event of a transfer failed")
            event = None  # it may hold pages

    def _meet(self, peer: str) -> None:
        self._meetings[peer] = number = self._meetings.get(peer, 0) + 1
        self._tell(_met(peer, number), HELLO, self.format.to_json())

    def _tell(self, met: str, kind: bytes, content: bytes) -> None:
        peer, _, number = met.rpartition("~")
        self._send(peer, kind + int(number).to_bytes(4, "little") + content)

    def _heard(self, peer: str, content: bytes) -> None:
        kind, number, content = content[:1], int.from_bytes(content[1:5], "little"), content[5:]
        met = _met(peer, number)
        if kind == MESSAGE:
            self._take_message(met, content)
        elif kind == HELLO:
            self._welcome(peer, met, content)
        elif kind in (WELCOME, CUT, REFUSED) and number != self._meetings.get(peer):
            logger.info("%s answers an older meeting", peer)
        elif kind == WELCOME:
            try:
                self._links[met] = self.transport.connect(content)
                self._has_met(peer, "")
            except (ValueError, OSError) as error:
                self._has_met(peer, str(error))
        elif kind == CUT:
            self._cut(met)
            self._meet_again(peer)
        elif kind == REFUSED:
            self._has_met(peer, content.decode(errors="replace"))
        else:
            logger.warning("%s said something of an unknown kind: %r", peer, kind)

    def _welcome(self, peer: str, met: str, content: bytes) -> None:
        if (before := self._senders.get(peer)) is not None:
            self._cut(before)
        try:
            self.format.check_meets(PageFormat.from_json(content))
            memory, where = self.transport.share(met, self.num_slots, self.format.page_bytes)
        except (ValueError, OSError) as error:
            self._tell(met, REFUSED, str(error).encode())
            return
        self._senders[peer], self._memories[met] = met, memory
        self.receiver.join(met, memory.num_slots)
        self._tell(met, WELCOME, where)

    def _cut(self, met: str) -> None:
        """Nothing of this meeting is written any more. What has come whole is kept: its seal is looked at again."""
        if (link := self._links.pop(met, None)) is not None:
            link.close()
        if met in self._memories:
            self.pages.copy({transfer for transfer, source in self._source.items() if source == met})
            self.transport.cut_off(met)
        self._act(self.sender.cut_off(met, _now()))
        self._act(self.receiver.cut_off(met, _now()))

    def _meet_again(self, peer: str) -> None:
        if self._meetings.get(peer, MOST_MEETINGS) < MOST_MEETINGS:
            self._meet(peer)

    def _take_message(self, peer: str, content: bytes) -> None:
        try:
            message = decode(content)
        except ValueError as error:
            logger.warning("a control message of %s is dropped: %s", peer, error)
            return
        if isinstance(message, Reserved) and (push := self._pushes.get(message.transfer)) is not None:
            push.answer(None)
        self._act(self.sender.received(peer, message, _now()))
        self._act(self.receiver.received(peer, message, _now()))

    def _offer(self, transfer: str, peer: str, keys: Sequence[bytes], answered: Callable[[str | None], None]) -> None:
        met = _met(peer, self._meetings.get(peer, 0))
        if met not in self._links:
            why = f"this worker has not met {peer}"
            self._act(self.sender.cannot_start(transfer, met, why))
            answered(why)
            return
        self._pushes[transfer] = _Push({key: index for index, key in enumerate(keys)}, answered)
        self.pages.want(transfer, keys)
        self._act(self.sender.offer(transfer, met, keys, _now()))

    def _push(self, pages: Mapping[bytes, memoryview], takers: Mapping[bytes, set[str]]) -> None:
        ready: dict[str, dict[int, int]] = defaultdict(dict)
        for key, content in pages.items():
            digest = xxhash.xxh3_64_intdigest(content)
            for transfer in takers[key]:
                if (push := self._pushes.get(transfer)) is not None:
                    index = push.index_of[key]
                    push.sources[index] = content
                    push.num_ready += 1
                    ready[transfer][index] = digest
        for transfer, digests in ready.items():
            self._act(self.sender.pages_ready(transfer, digests, _now()))

    def _end_push(self, transfer: str) -> None:
        if (push := self._pushes.get(transfer)) is None:
            return
        if push.num_ready < len(push.index_of):
            self._act(self.sender.abort(transfer, "the prompt was not computed to its end", _now()))

    # --- actions ----------------------------------------------------------------------------------------------------

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self.tally.saw(action)
            match action:
                case Send(peer, message):
                    self._tell(peer, MESSAGE, encode(message))
                case Write():
                    self._write(action)
                case LetGo(transfer, indices):
                    push = self._pushes[transfer]
                    for index in indices:
                        push.sources.pop(index, None)
                case Ended(transfer, _, error):
                    self._ended(transfer, error)
                case CutOff(met):
                    self._do(partial(self._cut_off, met))
                case Check(transfer, attempt, peer, pages):
                    memory = self._memories[peer]
                    right = {i: xxhash.xxh3_64_intdigest(memory.slot(slot)) == digest for i, slot, digest in pages}
                    self.tally.checked(peer, right)
                    self._act(self.receiver.checked(transfer, attempt, right, _now()))
                case PageHere(transfer, _, key, peer, slot):
                    self._source[transfer] = peer
                    self.pages.put(transfer, key, self._memories[peer].slot(slot))
                case NoMore(transfer, error):
                    if (over := self._expected.pop(transfer, None)) is not None:
                        over(error)
                case Lapsed(transfer):
                    self._forget(transfer)
                case MemoryFree(peer):
                    del self._memories[peer]

    def _cut_off(self, met: str) -> None:
        """One of the two ends asks for it."""
        peer, _, number = met.rpartition("~")
        receives = met in self._memories
        self._cut(met)
        if receives:
            self._tell(met, CUT, b"")
        elif self._meetings.get(peer) == int(number):
            self._meet_again(peer)

    def _write(self, write: Write) -> None:
        push = self._pushes[write.transfer]
        indices = [index for index, _ in write.pages]

        def over(error: str, is_over: bool, _: object = None) -> None:
            attempt = write.transfer, write.attempt
            self._do(lambda: self._act(self.sender.written(*attempt, indices, _now(), error=error, is_over=is_over)))

        def done(future: Future[None]) -> None:
            error = future.exception()
            if isinstance(error, WriteError) and not error.stopped.done():
                over(str(error), False)
                error.stopped.add_done_callback(partial(over, str(error), True))
            else:
                over("" if error is None else str(error), True)

        link = self._links.get(write.peer)
        if link is None:
            over("the link is gone", True)
            return
        pages = [(push.sources[index], slot) for index, slot in write.pages]
        link.write(pages, _now() + self.times.limit).add_done_callback(done)

    def _ended(self, transfer: str, error: str) -> None:
        push = self._pushes.pop(transfer)
        self.pages.want_no_more(transfer, push.index_of)
        push.answer(error or None)

    def _forget(self, transfer: str) -> None:
        self._source.pop(transfer, None)
        self.pages.forget(transfer)


def _now() -> float:
    return time.monotonic()


def _met(peer: str, number: int) -> str:
    """The name of a peer in a meeting."""
    return f"{peer}~{number}"


def _nothing() -> None:
    """What happens in time alone."""
