"""TCP as a transport: peers that have the key and lie, and strangers."""

from __future__ import annotations

import gc
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from reference_impl.features.disaggregation.authentication import as_first, as_second
from reference_impl.features.disaggregation.transports import tcp_receiver
from reference_impl.features.disaggregation.transports.interface import (
    WriteTimeout,
)
from reference_impl.features.disaggregation.transports.tcp import TcpTransport
from reference_impl.features.disaggregation.transports.tcp_frames import ANSWER, FRAME, PURPOSE, shake_hands
from tests.features.disaggregation.transport_peer import KEY
from tests.features.disaggregation.writes import LONG, failed, page, soon, write

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
