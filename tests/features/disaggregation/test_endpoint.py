"""The shell around the protocol: two endpoints in one process, a transport that fails as it is told, messages that get
lost, and what stays usable."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from reference_impl.features.disaggregation.endpoint import Endpoint
from reference_impl.features.disaggregation.layouts import PageFormat
from reference_impl.features.disaggregation.protocol import Times
from reference_impl.features.disaggregation.transports.interface import Link, PageMemory, WriteError
from reference_impl.features.disaggregation.transports.shared_memory import SharedMemoryTransport

FORMAT = PageFormat("model", "auto", "torch.float32", 2, 2, 4, 16, 2 * 2 * 2 * 4 * 16 * 4 + 8)
TIMES = Times(interval=0.02)  # for what goes well, also on a busy machine


class Faulty(SharedMemoryTransport):
    """Shared memory whose writes do what the next of `faults` says: right, damaged, failed, never."""

    def __init__(self, owner: str):
        super().__init__(owner)
        self.faults: list[str] = []
        self.written = 0

    def connect(self, description: bytes) -> Link:
        return _FaultyLink(super().connect(description), self)


class _FaultyLink:
    def __init__(self, link: Link, transport: Faulty):
        self._link, self._transport = link, transport
        self.close = link.close

    def write(self, pages: Sequence[tuple[memoryview, int]], deadline: float) -> Future[None]:
        fault = self._transport.faults.pop(0) if self._transport.faults else "right"
        self._transport.written += 1
        if fault == "never":
            return Future()
        if fault == "failed":
            failed = Future[None]()
            failed.set_exception(WriteError("the wire burns"))
            return failed
        if fault == "damaged":
            pages = [(memoryview(b"\x55" * len(content)), slot) for content, slot in pages]
        return self._link.write(pages, deadline)


class Pair:
    """A sender and a receiver that speak to each other. loses: whether a message between them gets lost."""

    def __init__(self, times: Times = TIMES, **receiver: Any):
        self.loses: Callable[[bytes], bool] = lambda content: False
        self.transports = Faulty("sender"), Faulty("receiver")
        self.sender = Endpoint("sender", FORMAT, self.transports[0], times=times)
        self.receiver = Endpoint(
            "receiver", replace(FORMAT, **receiver), self.transports[1], times=times, memory_bytes=FORMAT.page_bytes * 8
        )
        self.refused: list[str] = []
        self.sender.begin(
            self._to(self.receiver, "sender"), lambda peer, why: self.refused.append(why) if why else None
        )
        self.receiver.begin(self._to(self.sender, "receiver"), lambda peer, why: None)
        self.sender.meet("receiver")

    def _to(self, other: Endpoint, name: str) -> Callable[[str, bytes], None]:
        def send(peer: str, content: bytes) -> None:
            if not self.loses(content):
                other.received(name, content)

        return send

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()

    def has_met(self) -> bool:
        return bool(self.sender._links)

    def transfer(self, name: str, pages: dict[bytes, bytes]) -> str:
        """Sends pages; returns why some are missing, or an empty text, when no more will come."""
        over: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.receiver.expect(name, "sender", over.put)
        self.offer(name, pages)
        return over.get(timeout=30)

    def offer(self, name: str, pages: dict[bytes, bytes]) -> None:
        """As an engine does: pages are ready when the other side has room for them."""
        answered = threading.Event()
        self.sender.offer(name, "receiver", list(pages), lambda refusal: answered.set())
        assert answered.wait(30)
        self.sender.push({key: memoryview(pages[key]) for key in self.sender.pages.wanted(list(pages))})


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    until(made.has_met)
    yield made
    made.close()


def contents(number: int, seed: int = 0) -> dict[bytes, bytes]:
    return {bytes([seed, i]) * 16: bytes([i + 1]) * FORMAT.page_bytes for i in range(number)}


def came(pair: Pair, pages: dict[bytes, bytes]) -> list[bool]:
    found = [pair.receiver.pages.page(key) for key in pages]
    return [page is not None and bytes(page) == content for page, content in zip(found, pages.values(), strict=True)]


def is_free(pair: Pair) -> bool:
    slots = list(pair.receiver.receiver._peers.values())
    free = [len(each.free) == each.num_slots for each in slots]
    return bool(free) and all(free) and not pair.sender.sender.num_transfers and not pair.sender._pushes


def test_pages_come_as_they_were_sent_and_slots_come_back(pair: Pair) -> None:
    for turn in range(5):  # more than there are slots
        pages = contents(6, turn)
        assert pair.transfer(f"t{turn}", pages) == ""
        assert came(pair, pages) == [True] * 6
        pair.receiver.release(f"t{turn}")
        until(lambda pages=pages: pair.receiver.pages.page(next(iter(pages))) is None)
    until(lambda: is_free(pair))


def test_a_request_that_leaves_when_all_is_given_takes_nothing_back(pair: Pair) -> None:
    over: queue.SimpleQueue[str] = queue.SimpleQueue()
    pages, more = contents(3), contents(3, 1)
    pair.receiver.expect("t", "sender", over.put)
    pair.offer("t", pages)
    pair.sender.end_push("t")
    assert over.get(timeout=30) == ""
    pair.receiver.expect("u", "sender", over.put)
    answered = threading.Event()
    pair.sender.offer("u", "receiver", list(more), lambda refusal: answered.set())
    assert answered.wait(30)
    pair.sender.end_push("u")
    assert over.get(timeout=30) == "the prompt was not computed to its end"


@pytest.mark.parametrize("fault", ["damaged", "failed"])
def test_a_write_that_goes_wrong_is_done_again(pair: Pair, fault: str) -> None:
    pair.transports[0].faults = [fault]
    pages = contents(3)
    assert pair.transfer("t", pages) == ""
    assert came(pair, pages) == [True] * 3
    pair.receiver.release("t")
    until(lambda: is_free(pair))


def test_a_write_that_never_ends_is_cut_off_and_the_two_meet_again() -> None:
    pair = Pair(replace(TIMES, lease=0.3, limit=0.5, stop=0.1))
    try:
        until(pair.has_met)
        pair.transports[0].faults = ["never"]
        pages = contents(3)
        assert pair.transfer("t", pages) != ""
        assert came(pair, pages) == [False] * 3
        pair.receiver.release("t")
        until(lambda: pair.sender._meetings["receiver"] > 1 and pair.has_met())
        names = (f"again {turn}" for turn in count())
        until(lambda: pair.transfer(next(names), pages) == "")  # on a busy machine one may take too long
        assert came(pair, pages) == [True] * 3
    finally:
        pair.close()


def test_messages_that_get_lost_are_repeated(pair: Pair) -> None:
    said: dict[bytes, int] = {}

    def loses_the_first_of_each_kind(content: bytes) -> bool:
        kind = content[:1] + content[6:7]
        said[kind] = said.get(kind, 0) + 1
        return said[kind] == 1

    pair.loses = loses_the_first_of_each_kind
    pages = contents(4)
    assert pair.transfer("t", pages) == ""
    assert came(pair, pages) == [True] * 4
    assert len(said) >= 4, "offer, credit, pushed, and an answer"


def test_a_way_that_is_cut_ends_the_wait_and_heals() -> None:
    pair = Pair(replace(TIMES, lease=0.3, stop=0.1))
    try:
        until(pair.has_met)
        pair.loses = lambda content: True
        assert pair.transfer("t", contents(2)) != ""
        pair.loses = lambda content: False
        names = (f"again {turn}" for turn in count())
        until(lambda: pair.transfer(next(names), contents(2, 9)) == "")
    finally:
        pair.close()


def test_what_came_whole_outlives_its_sender(pair: Pair) -> None:
    pages = contents(2)
    assert pair.transfer("t", pages) == ""
    pair.receiver.gone("sender")
    until(lambda: not pair.receiver.receiver._peers or pair.receiver.receiver._peers["sender~1"].is_cut_off)
    assert came(pair, pages) == [True] * 2
    pair.receiver.release("t")
    until(lambda: not pair.receiver._memories)


def test_who_has_other_pages_is_refused_when_they_meet() -> None:
    pair = Pair(fingerprint="another model")
    try:
        until(lambda: pair.refused)
        assert "fingerprint: 'another model' here, 'model' there" in pair.refused[0]
        assert pair.transfer("t", contents(2)) == "sender is not connected"
    finally:
        pair.close()


def test_pages_of_a_request_that_does_not_come_lapse() -> None:
    pair = Pair(replace(TIMES, unclaimed=0.3))
    came_at_all: list[bytes] = []
    put = pair.receiver.pages.put

    def noted(transfer: str, key: bytes, content: memoryview) -> None:
        came_at_all.append(key)
        put(transfer, key, content)

    pair.receiver.pages.put = noted  # type: ignore[method-assign]
    try:
        until(pair.has_met)
        pages = contents(2)
        pair.offer("t", pages)
        until(lambda: set(came_at_all) == set(pages) and pair.receiver.pages.is_empty)
        until(lambda: is_free(pair))
    finally:
        pair.close()


def test_nonsense_of_a_peer_is_dropped(pair: Pair) -> None:
    for content in (
        b"",
        b"m",
        b"x\x01\x00\x00\x00",
        b"m\x01\x00\x00\x00\xff\xff",
        b"h\x09\x00\x00\x00{}",
        b"w\x01\x00\x00\x00junk",
    ):
        pair.sender.received("receiver", content)
        pair.receiver.received("sender", content)
        pair.receiver.received("nobody", content)
    pages = contents(2)
    pair.sender.meet("receiver")
    until(lambda: "receiver~2" in pair.sender._links)
    assert pair.transfer("t", pages) == ""


def test_close_leaves_no_thread() -> None:
    before = threading.active_count()
    pair = Pair()
    until(pair.has_met)
    assert pair.transfer("t", contents(2)) == ""
    memory: PageMemory = pair.receiver._memories["sender~1"]
    pair.close()
    until(lambda: threading.active_count() == before)
    with pytest.raises(ValueError, match="sender~1"):
        memory.slot(0)
