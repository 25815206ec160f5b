"""One suite for all transports: what was written is in the slots, and nothing else ever is.

Two tests start a process: a receiver and a writer that are stopped and killed.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference_impl.features.disaggregation.authentication import as_first, as_second
from reference_impl.features.disaggregation.transports import shared_memory, tcp_receiver
from reference_impl.features.disaggregation.transports.interface import (
    MAX_DESCRIPTION,
    Link,
    Transport,
    WriteError,
    WriteTimeout,
)
from reference_impl.features.disaggregation.transports.pages import Shape, Write, Writer
from reference_impl.features.disaggregation.transports.shared_memory import SharedMemoryTransport
from reference_impl.features.disaggregation.transports.tcp import TcpTransport
from reference_impl.features.disaggregation.transports.tcp_frames import ANSWER, FRAME, PURPOSE, shake_hands
from tests.features.disaggregation.transport_peer import KEY, SLOT, SLOTS, transport_of

LONG = 120.0  # seconds, for what would hang
KINDS = ["shared_memory", "tcp", pytest.param("nixl", marks=pytest.mark.nixl)]
ROOT = Path(__file__).resolve().parents[3]
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


def soon(seconds: float = LONG) -> float:
    return time.monotonic() + seconds


def page(number: int, length: int) -> memoryview:
    return memoryview(random.Random(number).randbytes(length))


def write(link: Link, pages: list[tuple[memoryview, int]]) -> None:
    link.write(pages, soon()).result(LONG)


def failed(future: Future[None]) -> WriteError:
    error = future.exception(LONG)
    assert isinstance(error, WriteError)
    return error


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


def test_shared_memory_leaves_no_name_and_no_descriptor() -> None:
    gc.collect()
    before = set(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
    receiver, writer = SharedMemoryTransport("decode-0"), SharedMemoryTransport("prefill-0")
    memory, description = receiver.share("prefill-0", 4, 1 << 16)
    write(writer.connect(description), [(page(1, 1 << 16), 2)])
    view = memory.slot(2)
    assert set(os.listdir("/dev/shm")) == before[1]
    writer.close()
    receiver.close()
    assert view == page(1, 1 << 16)  # still mapped: nothing that has a view of it crashes
    del view, memory, writer, receiver
    gc.collect()
    assert (set(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))) == before


def test_a_peer_cannot_shrink_or_grow_shared_memory_under_its_reader() -> None:
    receiver = SharedMemoryTransport("decode-0")
    _, description = receiver.share("prefill-0", 1, 4096)
    with open(json.loads(description)["path"], "r+b") as file:
        for size in (0, 1 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(file.fileno(), size)
    receiver.close()


def test_shared_memory_opens_nothing_but_a_segment(tmp_path: Path) -> None:
    transport = SharedMemoryTransport("prefill-0")
    path = tmp_path / "file"
    path.write_bytes(bytes(64 + 16))
    said = {
        "transport": "shared_memory", "owner": "liar", "num_slots": 1, "slot_bytes": 64, "path": str(path),
        "token": "00" * 16,
    }  # fmt: skip
    with pytest.raises(ValueError, match="expected the path of a segment"):
        transport.connect(json.dumps(said).encode())
    with path.open("r+b") as file:  # an open file of the right size and token, by a path of the right form
        said["path"] = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        link = transport.connect(json.dumps(said).encode())
        assert "is not its memory any longer" in str(failed(link.write([(page(1, 64), 0)], soon())))
    assert path.read_bytes() == bytes(64 + 16)
    # A segment of the same size, by a number that was that of another one before.
    memory, description = transport.share("prefill-1", 1, 64)
    link = transport.connect(json.dumps(json.loads(description) | {"token": "00" * 16}).encode())
    assert "is not its memory any longer" in str(failed(link.write([(page(1, 64), 0)], soon())))
    assert memory.slot(0) == bytes(64)
    transport.close()


def test_without_memfd_a_segment_is_a_file_that_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    receiver, writer = SharedMemoryTransport("decode-0"), SharedMemoryTransport("prefill-0")
    memory, description = receiver.share("prefill-0", 2, 64)
    path = Path(json.loads(description)["path"])
    assert path.exists()
    write(writer.connect(description), [(page(1, 64), 1)])
    assert memory.slot(1) == page(1, 64)
    receiver.close()
    assert not path.exists()
    writer.close()
    assert shared_memory._is_segment(0)


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


# Raw frames: what a peer could send that has the key and lies.


@pytest.fixture
def raw() -> Iterator[tuple[TcpTransport, memoryview, socket.socket]]:
    """A receiver, its only memory (2 slots of 64 bytes) as one view, and a connection that may send frames."""
    receiver = TcpTransport("decode-0", KEY)
    memory, description = receiver.share("prefill-0", 2, 64)
    with joined(description) as connection:
        yield receiver, memory.slot(0).obj.data, connection  # type: ignore[attr-defined]
    receiver.close()


def joined(description: bytes, key: bytes = KEY) -> socket.socket:
    said = json.loads(description)
    connection = socket.create_connection((said["host"], said["port"]), timeout=LONG)
    steps = as_first(key, PURPOSE, said["memory"], "it")
    shake_hands(connection, steps, "it", soon())
    connection.settimeout(LONG)
    return connection


def answer(connection: socket.socket) -> tuple[int, str]:
    """(sequence, text) of the next answer; an empty text is a confirmation."""
    head = b""
    while len(head) < ANSWER.size:
        head += connection.recv(ANSWER.size - len(head)) or b"\0" * ANSWER.size
    sequence, length = ANSWER.unpack(head)
    text = b""
    while len(text) < length:
        text += connection.recv(length - len(text))
    return sequence, text.decode()


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ((0, 64, 2, 1), "slot 2 is none of the slots 0 to 1"),
        ((0, 64, 0xFFFFFFFF, 1), "slot 4294967295 is none"),
        ((0, 65, 0, 1), "a page has 1 to 64 bytes, the size of a slot; this one has 65"),
        ((0, 128, 0, 1), "this one has 128"),
        ((0, 0, 0, 1), "this one has 0"),
        ((0, 2**64 - 64, 1, 1), "this one has 18446744073709551552"),
        ((1, 64, 0, 1), "expected frame 0, got frame 1"),
        ((2**64 - 1, 64, 0, 1), "got frame 18446744073709551615"),
        ((0, 64, 0, 7), "with 7 for its last field"),
    ],
)
def test_a_frame_that_lies_changes_nothing_and_ends_the_connection(
    raw: tuple[TcpTransport, memoryview, socket.socket], header: tuple[int, ...], expected: str
) -> None:
    _, memory, connection = raw
    connection.sendall(FRAME.pack(*header) + b"x" * 200)
    sequence, text = answer(connection)
    assert (sequence, expected in text) == (0, True)
    assert connection.recv(1) == b""
    assert bytes(memory) == bytes(128)


def test_a_frame_that_was_sent_twice_is_refused(raw: tuple[TcpTransport, memoryview, socket.socket]) -> None:
    _, memory, connection = raw
    frame = FRAME.pack(0, 64, 1, 1) + b"x" * 64
    connection.sendall(frame)
    assert answer(connection) == (1, "")
    connection.sendall(frame.replace(b"x", b"y"))
    assert answer(connection) == (1, "expected frame 1, got frame 0 with 1 for its last field")
    assert bytes(memory) == bytes(64) + b"x" * 64


def test_a_connection_that_ends_in_a_page_is_never_confirmed(
    raw: tuple[TcpTransport, memoryview, socket.socket],
) -> None:
    _, _, connection = raw
    connection.sendall(FRAME.pack(0, 64, 1, 1) + b"x" * 63)
    connection.shutdown(socket.SHUT_WR)
    assert answer(connection) == (0, "the connection ended in the page for slot 1")


def test_a_second_connection_for_a_memory_ends_the_first(raw: tuple[TcpTransport, memoryview, socket.socket]) -> None:
    receiver, memory, connection = raw
    connection.sendall(FRAME.pack(0, 64, 0, 0) + b"x" * 64 + FRAME.pack(1, 64, 1, 1) + b"x" * 10)  # in mid-page
    shared = receiver._shared["prefill-0"]
    said = {"host": "127.0.0.1", "port": connection.getpeername()[1], "memory": shared.token}
    with joined(json.dumps(said).encode()) as second:
        second.sendall(FRAME.pack(0, 64, 1, 1) + b"z" * 64)
        assert answer(second) == (1, "")
        try:
            connection.sendall(b"y" * 54)
            while connection.recv(1 << 10):
                pass
        except OSError:
            pass
        assert bytes(memory)[64:] == b"z" * 64


def test_cut_off_in_mid_page_ends_the_connection_before_it_returns(
    raw: tuple[TcpTransport, memoryview, socket.socket],
) -> None:
    receiver, memory, connection = raw
    connection.sendall(FRAME.pack(0, 64, 0, 1) + b"x" * 64)
    assert answer(connection) == (1, "")  # so it has a thread that receives
    connection.sendall(FRAME.pack(1, 64, 1, 1) + b"x" * 10)
    receiver.cut_off("prefill-0")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pages of ")]
    seen = bytes(memory)
    try:
        connection.sendall(b"y" * 54)
        while connection.recv(1 << 10):
            pass
    except OSError:
        pass
    assert bytes(memory) == seen
    assert b"y" not in seen


def test_who_has_no_key_writes_no_page(caplog: pytest.LogCaptureFixture) -> None:
    receiver = TcpTransport("decode-0", KEY)
    _, description = receiver.share("prefill-0", 1, 64)
    with pytest.raises(OSError, match="ended the connection in the handshake"):
        joined(description, b"another key, of 32 bytes in all ..")
    stranger = TcpTransport("prefill-0", b"o" * 32)
    error = failed(stranger.connect(description).write([(page(1, 64), 0)], soon()))
    assert "decode-0 at 127.0.0.1:" in str(error)
    assert "is its join key another one?" in str(error)
    assert error.stopped.done()
    with joined(description) as connection:
        assert connection.fileno() >= 0  # with the key it goes on
    stranger.close()
    receiver.close()
    assert "expected a proof of this join key, got another" in caplog.text


def test_connections_that_have_not_proved_the_key_are_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tcp_receiver, "_MAX_STRANGERS", 2)
    receiver = TcpTransport("decode-0", KEY)
    memory, description = receiver.share("prefill-0", 1, 64)
    with joined(description) as known:  # has proved it, so it does not count
        place = known.getpeername()
        known.sendall(FRAME.pack(0, 64, 0, 1) + page(2, 64))
        assert answer(known) == (1, "")
        strangers = [socket.create_connection(place, timeout=LONG) for _ in range(3)]
        assert strangers[2].recv(1) == b""
        known.sendall(FRAME.pack(1, 64, 0, 1) + page(1, 64))
        assert answer(known) == (2, "")
        for stranger in strangers:
            stranger.close()
    assert memory.slot(0) == page(1, 64)
    receiver.close()
    assert "2 others have not proved the key yet" in caplog.text


def test_a_memory_that_is_not_shared_is_refused_with_the_reason() -> None:
    receiver, writer = TcpTransport("decode-0", KEY), TcpTransport("prefill-0", KEY)
    _, description = receiver.share("prefill-0", 1, 64)
    receiver.cut_off("prefill-0")
    error = failed(writer.connect(description).write([(page(1, 64), 0)], soon()))
    assert "decode-0 at 127.0.0.1:" in str(error)
    assert "this memory is not shared: cut off, or of a process before this one" in str(error)
    writer.close()
    receiver.close()


def test_tcp_is_bound_to_an_address_that_was_said_and_looks_up_no_name() -> None:
    for host in ("localhost", "a-machine", ""):
        with pytest.raises(ValueError, match="expected an IP address such as 127.0.0.1"):
            TcpTransport("decode-0", KEY, host)
    with pytest.raises(ValueError, match="expected the address of one interface"):
        TcpTransport("decode-0", KEY, "0.0.0.0")
    with pytest.raises(ValueError, match="a join key has at least 16 bytes"):
        TcpTransport("decode-0", b"short")
    receiver = TcpTransport("decode-0", KEY)
    _, description = receiver.share("prefill-0", 1, 64)
    assert json.loads(description)["host"] == "127.0.0.1"
    for changes in ({"host": "localhost"}, {"port": 0}, {"port": 1 << 16}):
        with pytest.raises(ValueError, match="expected an IP address|expected a port"):
            receiver.connect(json.dumps(json.loads(description) | changes).encode())
    receiver.close()


def test_a_receiver_that_starts_again_at_its_address_is_another_one() -> None:
    before, writer = TcpTransport("decode-0", KEY), TcpTransport("prefill-0", KEY)
    _, old = before.share("prefill-0", 1, 64)
    link = writer.connect(old)
    write(link, [(page(1, 64), 0)])
    before.close()
    after = TcpTransport("decode-0", KEY, port=json.loads(old)["port"])
    memory, new = after.share("prefill-0", 1, 64)
    assert json.loads(new)["port"] == json.loads(old)["port"]
    assert "the connection for pages was lost" in str(failed(link.write([(page(2, 64), 0)], soon())))
    assert "of a process before this one" in str(failed(writer.connect(old).write([(page(2, 64), 0)], soon())))
    assert memory.slot(0) == bytes(64)
    write(writer.connect(new), [(page(3, 64), 0)])
    assert memory.slot(0) == page(3, 64)
    writer.close()
    after.close()


def test_tcp_leaves_no_socket() -> None:
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    receiver, writer = TcpTransport("decode-0", KEY), TcpTransport("prefill-0", KEY)
    _, description = receiver.share("prefill-0", 4, 1 << 16)
    write(writer.connect(description), [(page(1, 1 << 16), 2)])
    writer.close()
    receiver.close()
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) == before


class Peer:
    """A process of transport_peer.py, see there."""

    def __init__(self, kind: str, role: str):
        command = [sys.executable, "-P", "-m", "tests.features.disaggregation.transport_peer", kind, role]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._watchdog = threading.Timer(LONG, self.process.kill)  # then `hear` fails rather than wait
        self._watchdog.start()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exception: object) -> None:
        self._watchdog.cancel()
        self._watchdog.join()
        self.process.kill()  # also when it is stopped
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self, *kinds: str) -> list[Any]:
        """The next of its lines that begins with one of these words."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("[") and (words := json.loads(line))[0] in kinds:
                return list(words)
        raise AssertionError(f"the process ended before it said {kinds}")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        while (state := Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]) != "T":
            assert state in "RSD"
            time.sleep(0.001)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


def test_a_receiver_that_is_stopped_or_killed_holds_up_nobody(
    kind: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starts two processes. Shared memory can be written while its reader is stopped, and so it could by NIXL, if that
    had not to go over TCP here."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    with Peer(kind, "receive") as peer:
        description = peer.hear("shared")[1].encode()
        writer = make("prefill-0")
        link = writer.connect(description)
        pages = [(page(number, SLOT), number) for number in range(SLOTS)]
        write(link, pages)
        peer.say("sum")
        assert peer.hear("crc")[1] == [zlib.crc32(content) for content, _ in pages]
        peer.stop()
        stopped = link.write([(page(10 + number, SLOT), number) for number in range(SLOTS)], soon(1))
        if kind == "shared_memory":
            stopped.result(LONG)
        else:
            error = failed(stopped)
            assert isinstance(error, WriteTimeout)
            assert "decode-0" in str(error)
            assert not error.stopped.done()  # it may all still arrive
            assert "decode-0" in str(failed(link.write(pages, soon())))  # at once
            peer.go_on()
            error.stopped.result(LONG)
            link.close()
            link = writer.connect(description)
        peer.go_on()
        write(link, pages)
        peer.say("sum")
        assert peer.hear("crc")[1] == [zlib.crc32(content) for content, _ in pages]
        peer.process.kill()
        peer.process.wait()
        assert "decode-0" in str(failed(link.write(pages, soon(2))))
        again = writer.connect(description)
        assert "decode-0" in str(failed(again.write(pages, soon(2))))
    with Peer(kind, "receive") as peer:  # and another one takes its place
        write(writer.connect(peer.hear("shared")[1].encode()), pages)
        peer.say("sum")
        assert peer.hear("crc")[1] == [zlib.crc32(content) for content, _ in pages]


def test_a_writer_that_is_stopped_in_a_write_and_cut_off_changes_nothing_when_it_goes_on(kind: str, make: Make) -> None:
    """Starts a process."""
    receiver = make("decode-0")
    old, description = receiver.share("prefill-0", SLOTS, SLOT)
    with Peer(kind, "write") as peer:
        peer.say(description.decode())
        turn = peer.hear("written")[1]
        assert {bytes(old.slot(SLOTS - 1)[:1])} <= {bytes([ord("a") + turn % 26]), bytes([ord("a") + (turn + 1) % 26])}
        peer.stop()
        receiver.cut_off("prefill-0")
        new, of_new = receiver.share("prefill-0", SLOTS, SLOT)
        for number in range(SLOTS):
            new.slot(number)[:] = b"\0" * SLOT
        peer.go_on()
        heard = peer.hear("written", "failed")
        while heard[1] < turn + 3:  # at least one write was begun behind the cut
            heard = peer.hear("written", "failed")
        if kind == "nixl":
            assert heard[0] == "written"  # into addresses that are not used any longer
        else:
            assert heard[0] == "failed"
            assert "decode-0" in heard[2]
        assert [bytes(new.slot(number)) for number in range(SLOTS)] == [bytes(SLOT)] * SLOTS
        peer.process.kill()
        peer.process.wait()
        # One that takes its place writes into the new memory.
        write(make("prefill-0").connect(of_new), [(page(1, SLOT), 1)])
        assert new.slot(1) == page(1, SLOT)


# Receivers that do not do what they should.


def hang(connection: socket.socket, over: threading.Event) -> None:
    over.wait(LONG)


def hang_up(connection: socket.socket, over: threading.Event) -> None:
    connection.recv(10)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # as when a link is cut


def confirm_too_much(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(ANSWER.pack(7, 0))
    over.wait(LONG)


def say_too_much(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(ANSWER.pack(0, 0xFFFFFFFF) + b"no" * 1000)
    over.wait(LONG)


@contextmanager
def receiver_that(does: Callable[[socket.socket, threading.Event], None] | None) -> Iterator[bytes]:
    """The description of a memory of 8 slots of 1 MiB, whose receiver does this after the handshake; None: it does not
    even begin that."""
    over = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            if does is not None:
                shake_hands(connection, as_second(KEY, PURPOSE, "decode-0", "it"), "it", soon())
            (does or hang)(connection, over)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        said = {"host": "127.0.0.1", "port": listener.getsockname()[1], "memory": "0"}
        yield json.dumps(
            {"transport": "tcp", "owner": "decode-0", "num_slots": 8, "slot_bytes": 1 << 20} | said
        ).encode()
        over.set()
        thread.join()


@pytest.mark.parametrize(
    ("does", "expected", "is_certain"),
    [
        (None, "no answer by the deadline; 0 of 8 pages were sent", True),
        (hang, "no answer by the deadline; 8 of 8 pages were sent", False),
        (hang_up, "the connection for pages was lost", False),
        (confirm_too_much, "it confirmed 7 frames of ", False),
        (say_too_much, "nonono", True),
    ],
)
def test_a_receiver_that_does_not_do_what_it_should_is_an_error_that_names_it(
    does: Callable[[socket.socket, threading.Event], None] | None, expected: str, is_certain: bool
) -> None:
    writer = TcpTransport("prefill-0", KEY)
    with receiver_that(does) as description:
        link = writer.connect(description)
        pages = [(page(slot, 1 << 20), slot) for slot in range(8)]
        first, second = link.write(pages, soon(1)), link.write(pages, soon())
        error = failed(first)
        assert isinstance(error, WriteTimeout) == ("deadline" in expected)
        assert "decode-0 at 127.0.0.1:" in str(error)
        assert expected in str(error)
        assert error.stopped.done() == is_certain
        assert "decode-0 at 127.0.0.1:" in str(failed(second))  # at once, not at its own deadline
        writer.close()  # waits for nobody
        assert error.stopped.done() == is_certain


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
