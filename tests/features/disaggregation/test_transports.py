"""One suite for all transports: what was written is in the slots, and nothing else ever is."""

from __future__ import annotations

import json
import logging
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import numpy as np
import pytest

from reference_impl.features.disaggregation.transports.interface import (
    MAX_DESCRIPTION,
    Transport,
    WriteTimeout,
)
from reference_impl.features.disaggregation.transports.pages import Shape, Write, Writer
from tests.features.disaggregation.transport_peer import transport_of
from tests.features.disaggregation.writes import KINDS, LONG, failed, page, soon, write

Make = Callable[[str], Transport]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(kind: str) -> Iterator[Make]:
    """make(owner): a transport, closed at the end; then no thread and no named segment of it is left."""
    before = set(threading.enumerate())
    made = list[Transport]()

    def one(owner: str) -> Transport:
        made.append(transport_of(kind, owner))
        return made[-1]

    yield one
    for transport in made:
        transport.close()
    assert set(threading.enumerate()) <= before


def test_every_byte_arrives_in_its_slot_and_no_other_changes(make: Make) -> None:
    memory, description = make("decode-0").share("prefill-0", 7, 1003)
    link = make("prefill-0").connect(description)
    assert (memory.num_slots, memory.slot_bytes) == (7, 1003)
    assert len(description) <= MAX_DESCRIPTION
    expected = [bytearray(1003) for _ in range(7)]
    drawn = random.Random(1)
    for turn in range(12):
        slots = drawn.sample(range(7), drawn.randint(1, 7))
        pages = [(page(10 * turn + slot, drawn.choice([1003, 1003, 1, 500])), slot) for slot in slots]
        write(link, pages)
        for content, slot in pages:
            expected[slot][: len(content)] = content
        assert [bytes(memory.slot(slot)) for slot in range(7)] == expected
    link.close()


def test_large_pages_and_many_pages_arrive(make: Make) -> None:
    large, of_large = make("decode-0").share("prefill-0", 2, 12 << 20)
    writer = make("prefill-0")
    write(writer.connect(of_large), [(page(1, 12 << 20), 1), (page(2, 12 << 20), 0)])
    assert large.slot(1) == page(1, 12 << 20)
    assert large.slot(0) == page(2, 12 << 20)
    many, of_many = make("decode-1").share("prefill-0", 1000, 40)
    write(writer.connect(of_many), [(page(number, 40), 999 - number) for number in range(1000)])
    assert [bytes(many.slot(999 - number)) for number in range(1000)] == [bytes(page(n, 40)) for n in range(1000)]


def test_arrays_of_any_shape_and_type_are_bytes(make: Make) -> None:
    memory, description = make("decode-0").share("prefill-0", 1, 48)
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    link = make("prefill-0").connect(description)
    write(link, [(memoryview(values), 0)])
    assert memory.slot(0) == values.tobytes()
    with pytest.raises(ValueError, match="the page for slot 0 is not contiguous"):
        link.write([(memoryview(values)[::2], 0)], soon())


def test_one_content_goes_into_many_slots_and_to_many_peers(make: Make) -> None:
    writer, content = make("prefill-0"), page(1, 4096)
    shared = [make(f"decode-{number}").share("prefill-0", 4, 4096) for number in range(2)]
    links = [writer.connect(description) for _, description in shared]
    under_way = [link.write([(content, slot) for slot in range(4)], soon()) for link in links for _ in range(3)]
    for future in under_way:
        future.result(LONG)
    assert {bytes(memory.slot(slot)) for memory, _ in shared for slot in range(4)} == {bytes(content)}


def test_two_peers_write_at_once_each_into_its_own_memory(make: Make) -> None:
    receiver = make("decode-0")
    shared = {peer: receiver.share(peer, 4, 1 << 16) for peer in ("prefill-0", "prefill-1")}
    links = [make(peer).connect(description) for peer, (_, description) in shared.items()]
    under_way = []
    for turn in range(8):
        for number, link in enumerate(links):
            pages = [(page(1000 * number + turn * 4 + slot, 1 << 16), slot) for slot in range(4)]
            under_way.append(link.write(pages, soon()))
    for future in under_way:
        future.result(LONG)
    for number, (memory, _) in enumerate(shared.values()):
        for slot in range(4):
            assert memory.slot(slot) == page(1000 * number + 28 + slot, 1 << 16)


@pytest.mark.parametrize(
    ("length", "slot", "expected"),
    [
        (64, 4, "slot 4 is none of the slots 0 to 3"),
        (64, -1, "slot -1 is none"),
        (65, 0, "a page has 1 to 64 bytes, the size of a slot; this one has 65"),
        (0, 0, "this one has 0"),
    ],
)
def test_a_page_that_fits_no_slot_is_refused_at_once(make: Make, length: int, slot: int, expected: str) -> None:
    memory, description = make("decode-0").share("prefill-0", 4, 64)
    link = make("prefill-0").connect(description)
    with pytest.raises(ValueError, match=expected):
        link.write([(page(1, 64), 0), (page(2, length), slot)], soon())
    with pytest.raises(ValueError, match="expected at least one page"):
        link.write([], soon())
    write(link, [(page(3, 64), 3)])
    assert [bytes(memory.slot(number)) for number in range(4)] == [bytes(64)] * 3 + [bytes(page(3, 64))]
    with pytest.raises(ValueError, match="slot 4 is none"):
        memory.slot(4)


def test_a_deadline_that_has_passed_ends_a_write_before_it_begins(make: Make) -> None:
    memory, description = make("decode-0").share("prefill-0", 1, 64)
    link = make("prefill-0").connect(description)
    error = failed(link.write([(page(1, 64), 0)], time.monotonic() - 1))
    assert isinstance(error, WriteTimeout)
    assert str(error) == "decode-0: its pages were not begun by the deadline" or "decode-0 at 127.0.0.1:" in str(error)
    assert error.stopped.done()
    write(link, [(page(2, 64), 0)])
    assert memory.slot(0) == page(2, 64)


def test_what_a_peer_that_was_cut_off_writes_is_never_read(make: Make) -> None:
    receiver = make("decode-0")
    old, of_old = receiver.share("prefill-0", 2, 4096)
    link = make("prefill-0").connect(of_old)
    write(link, [(page(1, 4096), 0)])
    view = old.slot(0)  # whoever still has one reads what was there, or what comes late
    receiver.cut_off("prefill-0")
    assert view == page(1, 4096)
    new, of_new = receiver.share("prefill-0", 2, 4096)
    assert of_new != of_old
    with pytest.raises(ValueError, match="prefill-0 was cut off, its pages are lost: share new memory with it"):
        old.slot(0)
    late = link.write([(page(2, 4096), 0), (page(2, 4096), 1)], soon(5))
    error = late.exception(LONG)
    if receiver.name != "nixl":  # which says that all is well: nobody told it
        assert "decode-0" in str(error)
    assert bytes(view) in (page(1, 4096), page(2, 4096))
    assert [bytes(new.slot(number)) for number in range(2)] == [bytes(4096)] * 2
    write(make("prefill-0").connect(of_new), [(page(3, 4096), 1)])
    assert [bytes(new.slot(number)) for number in range(2)] == [bytes(4096), bytes(page(3, 4096))]


def test_another_peer_goes_on_when_one_is_cut_off(make: Make) -> None:
    receiver = make("decode-0")
    receiver.share("prefill-0", 1, 64)
    memory, description = receiver.share("prefill-1", 1, 64)
    link = make("prefill-1").connect(description)
    receiver.cut_off("prefill-0")
    receiver.cut_off("prefill-0")  # nothing is left to cut off
    receiver.cut_off("nobody")
    write(link, [(page(1, 64), 0)])
    assert memory.slot(0) == page(1, 64)


def test_a_peer_gets_one_memory_at_a_time(make: Make) -> None:
    receiver = make("decode-0")
    receiver.share("prefill-0", 1, 64)
    with pytest.raises(ValueError, match="prefill-0 has a memory already: cut it off before it gets another"):
        receiver.share("prefill-0", 1, 64)
    for sizes in ((0, 64), (1, 0), (1, -1), (1 << 33, 1), (1 << 30, 1 << 30)):
        with pytest.raises(ValueError, match="expected a whole number of at least 1|more than any memory has"):
            receiver.share("prefill-1", *sizes)


def test_a_receiver_that_has_closed_is_an_error_that_names_it(make: Make) -> None:
    receiver = make("decode-0")
    _, description = receiver.share("prefill-0", 1, 64)
    writer = make("prefill-0")
    link = writer.connect(description)
    if receiver.name != "nixl":  # which would write to this very process
        write(link, [(page(1, 64), 0)])
        receiver.close()
        assert "decode-0" in str(failed(link.write([(page(1, 64), 0)], soon())))
        again = writer.connect(description)
        assert "decode-0" in str(failed(again.write([(page(1, 64), 0)], soon())))
    receiver.close()
    receiver.close()


def test_writes_to_a_link_that_was_closed_fail_and_what_was_begun_ends(make: Make) -> None:
    _, description = make("decode-0").share("prefill-0", 4, 1 << 20)
    writer = make("prefill-0")
    link = writer.connect(description)
    content = page(1, 1 << 20)
    under_way = [link.write([(content, slot) for slot in range(4)], soon()) for _ in range(10)]
    link.close()
    for future in under_way:
        if (error := future.exception(LONG)) is not None:
            assert "decode-0" in str(error)
    error = failed(link.write([(content, 0)], soon()))
    assert "the link to its memory was closed here" in str(error)
    link.close()
    again = writer.connect(description)
    write(again, [(content, 1)])
    writer.close()
    assert "closed here" in str(failed(again.write([(content, 0)], soon())))


def test_a_callback_of_a_write_may_write_and_close(make: Make) -> None:
    memory, description = make("decode-0").share("prefill-0", 2, 64)
    link = make("prefill-0").connect(description)
    second: Future[Future[None]] = Future()
    first = link.write([(page(1, 64), 0)], soon())
    first.add_done_callback(lambda _: second.set_result(link.write([(page(2, 64), 1)], soon())))
    second.result(LONG).result(LONG)
    assert memory.slot(1) == page(2, 64)


@pytest.mark.parametrize(
    "change",
    [
        lambda said: b"",
        lambda said: b"[" * 5000,
        lambda said: said[:-1],
        lambda said: b" " * MAX_DESCRIPTION + said,
        lambda said: json.dumps(json.loads(said) | {"num_slots": True}).encode(),
        lambda said: json.dumps(json.loads(said) | {"num_slots": 1 << 40}).encode(),
        lambda said: json.dumps(json.loads(said) | {"slot_bytes": -64}).encode(),
        lambda said: json.dumps(json.loads(said) | {"transport": "carrier pigeon"}).encode(),
        lambda said: json.dumps(json.loads(said) | {"more": 1}).encode(),
    ],
)
def test_what_is_no_description_is_refused(make: Make, change: Callable[[bytes], bytes]) -> None:
    receiver = make("decode-0")
    _, description = receiver.share("prefill-0", 1, 64)
    with pytest.raises(ValueError, match="description|memory|whole number"):
        receiver.connect(change(description))


def test_a_description_of_other_sizes_writes_nothing_elsewhere(make: Make) -> None:
    """A peer that was told of more slots than there are."""
    receiver = make("decode-0")
    memory, description = receiver.share("prefill-0", 2, 64)
    false = json.dumps(json.loads(description) | {"num_slots": 2000}).encode()
    error = failed(receiver.connect(false).write([(page(1, 64), 0), (page(1, 64), 1999)], soon()))
    assert "decode-0" in str(error)
    assert bytes(memory.slot(1)) == bytes(64)


def test_without_nixl_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    with pytest.raises(
        ImportError, match=r"^NIXL is not installed: pip install 'inferlab\[transfer\]', .*Linux.*nixl_cu12"
    ):
        transport_of("nixl", "decode-0")


@pytest.mark.nixl
def test_nixl_changes_no_logging_of_others() -> None:
    transport_of("nixl", "decode-0").close()
    assert logging.raiseExceptions


def test_an_error_of_ours_in_a_write_ends_it_and_all_that_follow() -> None:
    def do(write: Write) -> None:
        raise ZeroDivisionError("of ours")

    before = set(threading.enumerate())
    writer = Writer("decode-0", do)
    one, two = (Write.of([(page(1, 64), 0)], soon(), Shape(1, 64)) for _ in range(2))
    error = failed(writer.add(one))
    assert str(error) == "decode-0: the link to its memory failed: ZeroDivisionError: of ours"
    assert not error.stopped.done()
    assert str(failed(writer.add(two))) == str(error)
    writer.close()
    assert set(threading.enumerate()) == before
