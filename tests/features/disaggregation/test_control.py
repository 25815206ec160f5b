"""Control connections: who has no join key gets nothing; a message that is not the next one of the peer is noticed."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from reference_impl.features.disaggregation.authentication import (
    HEADER_BYTES,
    LENGTH,
    MAX_CONTENT,
    MAX_STEP,
    PeerError,
    Session,
    as_first,
    as_second,
)
from reference_impl.features.disaggregation.control import MAX_STRANGERS, Channel, Listener, connect, listen

KEY, OTHER = b"k" * 32, b"o" * 32
SECONDS = 60.0  # for what would hang


def run(main: Callable[[], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(SECONDS):
            return await main()

    return asyncio.run(bounded())


def met(first: bytes = KEY, second: bytes = KEY, purposes: tuple[str, str] = ("control", "control")) -> list[Session]:
    """The sessions of both ends after a handshake without sockets."""
    one, two = as_first(first, purposes[0], "prefill-0", "here"), as_second(second, purposes[1], "decode-0", "there")
    sessions: dict[int, Session] = {}
    next(two)
    sent, turn = next(one), 1
    while len(sessions) < 2:
        try:
            sent = (one, two)[turn].send(sent[LENGTH.size :])
        except StopIteration as done:
            sessions[turn] = done.value
            sent = done.value.last
        turn = 1 - turn
    return [sessions[0], sessions[1]]


@asynccontextmanager
async def joined() -> AsyncIterator[tuple[Channel, Channel, Listener]]:
    """Both ends of a connection, and the listener."""
    accepted: asyncio.Queue[Channel] = asyncio.Queue()

    async def accept(channel: Channel) -> None:
        accepted.put_nowait(channel)
        await asyncio.Event().wait()

    listener = await listen(accept, KEY, "router")
    channel = await connect(*listener.address, KEY, "decode-0")
    try:
        yield channel, await accepted.get(), listener
    finally:
        await channel.close()
        await listener.close()


def test_messages_arrive_whole_and_in_order_both_ways() -> None:
    contents = [b"", b"x", os.urandom(MAX_CONTENT), b"prefill of request 7"]

    async def main() -> None:
        async with joined() as (one, other, listener):
            assert (one.peer, other.peer) == ("router", "decode-0")
            assert listener.address[0] == "127.0.0.1"
            for sender, receiver in ((one, other), (other, one)):
                for content in contents:
                    sender.send(content)
                assert [await receiver.receive() for _ in contents] == contents

    run(main)


def test_a_thread_sends_through_the_loop() -> None:
    async def main() -> None:
        async with joined() as (one, other, _):
            loop = asyncio.get_running_loop()
            thread = threading.Thread(target=lambda: loop.call_soon_threadsafe(one.send, b"from a thread"))
            thread.start()
            assert await other.receive() == b"from a thread"
            thread.join()

    run(main)


@pytest.mark.parametrize("changed", [("first", OTHER), ("second", OTHER)])
def test_each_end_refuses_a_peer_with_another_key(changed: tuple[str, bytes]) -> None:
    with pytest.raises(PeerError, match="prefill-0 at there: expected a proof of this join key"):
        met(**dict([changed]))


def test_the_end_that_connects_refuses_a_listener_without_the_key() -> None:
    """Which does not complain itself about the proof that it was given."""
    one, two = as_first(KEY, "control", "prefill-0", "here"), as_second(OTHER, "control", "decode-0", "there")
    hello = next(one)
    next(two)
    one.send(two.send(hello[LENGTH.size :])[LENGTH.size :])
    with pytest.raises(PeerError, match="decode-0 at here: expected a proof of this join key"):
        one.send(os.urandom(32))


def test_a_proof_for_pages_does_not_open_a_control_connection() -> None:
    with pytest.raises(PeerError, match="expected a proof"):
        met(purposes=("pages", "control"))


def test_a_listener_says_nothing_that_is_made_with_the_key_before_it_has_seen_a_proof() -> None:
    seen = []
    for key in (KEY, OTHER):
        two = as_second(key, "control", "router", "there")
        assert next(two) == b""
        hello = next(as_first(KEY, "control", "prefill-0", "here"))[LENGTH.size :]
        seen.append(two.send(hello))
    for hello in seen:  # magic, a nonce of its own, name
        assert hello[LENGTH.size : LENGTH.size + 13] == b"inferlab-pd-1"
        assert hello.endswith(b"router")
    assert seen[0][20:52] != seen[1][20:52]


def test_a_recorded_proof_is_worth_nothing_in_another_connection() -> None:
    one, two = as_first(KEY, "control", "prefill-0", "here"), as_second(KEY, "control", "router", "there")
    hello = next(one)
    next(two)
    proof = one.send(two.send(hello[LENGTH.size :])[LENGTH.size :])
    again = as_second(KEY, "control", "router", "there")
    next(again)
    again.send(hello[LENGTH.size :])
    with pytest.raises(PeerError, match="expected a proof"):
        again.send(proof[LENGTH.size :])


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ([0, 0], "expected control message 1, got 0: one was lost, repeated or moved"),
        ([1], "expected control message 0, got 1"),
        ([0, 2], "expected control message 1, got 2"),
    ],
)
def test_a_repeated_lost_or_moved_message_is_noticed(order: list[int], expected: str) -> None:
    one, other = met()
    frames = [one.sealer.seal(bytes([number])) for number in range(3)]
    *before, last = [(frames[number][:HEADER_BYTES], frames[number][HEADER_BYTES:]) for number in order]
    assert [other.opener.open(*frame) for frame in before] == [bytes([number]) for number in order[:-1]]
    with pytest.raises(PeerError, match=f"prefill-0 at there: {expected}"):
        other.opener.open(*last)


def test_a_message_with_any_bit_changed_is_noticed() -> None:
    one, other = met()
    frame = one.sealer.seal(b"transfer 7, slots 1, 2, 3")
    for at in range(len(frame)):
        changed = bytearray(frame)
        changed[at] ^= 1 << at % 8
        with pytest.raises(PeerError, match="HMAC of control message 0 is wrong"):
            other.opener.open(bytes(changed[:HEADER_BYTES]), bytes(changed[HEADER_BYTES:]))
    assert other.opener.open(frame[:HEADER_BYTES], frame[HEADER_BYTES:]) == b"transfer 7, slots 1, 2, 3"


def test_a_message_of_the_other_direction_or_of_another_connection_is_noticed() -> None:
    _, other = met()
    elsewhere, _ = met()
    for sealer in (other.sealer, elsewhere.sealer):
        frame = sealer.seal(b"done")
        with pytest.raises(PeerError, match="HMAC"):
            other.opener.open(frame[:HEADER_BYTES], frame[HEADER_BYTES:])


def test_lengths_are_bounded_before_anything_is_read() -> None:
    one, other = met()
    with pytest.raises(PeerError, match=f"at most {MAX_CONTENT} bytes in a control message, got {MAX_CONTENT + 1}"):
        other.opener.length((MAX_CONTENT + 1).to_bytes(4, "little") + bytes(HEADER_BYTES))
    with pytest.raises(ValueError, match=f"at most {MAX_CONTENT} bytes, this one has {MAX_CONTENT + 1}"):
        one.sealer.seal(bytes(MAX_CONTENT + 1))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", f"expected a handshake of 1 to {MAX_STEP} bytes"),
        (LENGTH.pack(40) + bytes(40), "expected the hello of inferlab-pd-1"),
        (LENGTH.pack(0), "got 0"),
        (b"\1", "ended the connection in the handshake"),
    ],
)
def test_a_stranger_is_refused_and_the_log_says_why(
    said: bytes, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    accepted = []

    async def accept(channel: Channel) -> None:
        accepted.append(channel)

    async def main() -> None:
        listener = await listen(accept, KEY, "router")
        reader, writer = await asyncio.open_connection(*listener.address)
        writer.write(said)
        writer.write_eof()
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        await listener.close()

    run(main)
    assert not accepted
    assert expected in caplog.text


def test_who_says_nothing_is_sent_away(caplog: pytest.LogCaptureFixture) -> None:
    async def accept(channel: Channel) -> None:
        raise AssertionError

    async def main() -> None:
        listener = await listen(accept, KEY, "router", seconds=0.05)
        silent = [await asyncio.open_connection(*listener.address) for _ in range(2)]
        for reader, writer in silent:
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
        await listener.close()

    run(main)
    assert caplog.text.count("did not prove the join key within 0.05 s") == 2


def test_connections_that_have_not_proved_the_key_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    async def accept(channel: Channel) -> None:
        raise AssertionError

    async def main() -> None:
        listener = await listen(accept, KEY, "router")
        many = [await asyncio.open_connection(*listener.address) for _ in range(MAX_STRANGERS + 1)]
        ended = [asyncio.create_task(reader.read(1)) for reader, _ in many]
        done, _ = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1
        for _, writer in many:
            writer.transport.abort()
        await asyncio.gather(*ended, return_exceptions=True)
        await listener.close()

    run(main)
    assert f"{MAX_STRANGERS} others have not proved the key" in caplog.text


def test_a_peer_that_reads_nothing_cannot_hold_up_the_sender() -> None:
    async def main() -> None:
        async with joined() as (one, _, _):

            def send_much() -> None:
                for _ in range(100):
                    one.send(bytes(MAX_CONTENT))

            with pytest.raises(PeerError, match="router at .*does not read its control messages"):
                send_much()
            with pytest.raises(PeerError, match="has ended, nothing can be sent"):
                one.send(b"more")

    run(main)


def test_the_end_of_a_connection_is_an_error_that_names_the_peer() -> None:
    async def main() -> None:
        async with joined() as (one, other, _):
            one.send(b"last words")
            await one.close()
            assert await other.receive() == b"last words"
            with pytest.raises(PeerError, match="decode-0 at 127.0.0.1:.*has ended between messages"):
                await other.receive()

    run(main)


def test_a_peer_that_is_cut_off_in_a_message_is_noticed() -> None:
    async def main() -> None:
        async with joined() as (one, other, _):
            one._writer.write(one._sealer.seal(b"a long message")[:-3])
            await one.close()
            with pytest.raises(PeerError, match=f"has ended after {len(b'a long message') - 3} bytes of a control"):
                await other.receive()

    run(main)


def test_no_name_is_looked_up_and_short_keys_are_refused() -> None:
    async def accept(channel: Channel) -> None: ...

    async def main() -> None:
        with pytest.raises(ValueError, match="expected an IP address such as 127.0.0.1, got 'localhost'"):
            await listen(accept, KEY, "router", host="localhost")
        with pytest.raises(ValueError, match="expected an IP address"):
            await connect("a-machine", 1, KEY, "decode-0")
        with pytest.raises(ValueError, match="at least 16 bytes, this one has 5"):
            await listen(accept, b"short", "router")
        with pytest.raises(ValueError, match="a peer's name has 1 to 200 bytes"):
            await listen(accept, KEY, "r\n")

    run(main)


def test_nobody_listening_is_an_error_that_names_the_address() -> None:
    async def accept(channel: Channel) -> None: ...

    async def main() -> None:
        listener = await listen(accept, KEY, "router")
        await listener.close()
        with pytest.raises(PeerError, match=f"127.0.0.1:{listener.address[1]}: no connection"):
            await connect(*listener.address, KEY, "decode-0")

    run(main)


def test_a_listener_that_closes_ends_its_connections_and_leaves_no_task() -> None:
    async def main() -> None:
        async with joined() as (one, _, listener):
            await listener.close()
            with pytest.raises(PeerError, match="router at"):
                await one.receive()
            assert asyncio.all_tasks() == {asyncio.current_task()}
            await listener.close()

    run(main)


def test_one_that_is_cancelled_while_it_closes_a_connection_leaves_the_others_alone() -> None:
    async def main() -> None:
        async with joined() as (channel, accepted, _):
            closing = [asyncio.create_task(channel.close()) for _ in range(3)]
            await asyncio.sleep(0)
            closing[0].cancel()
            assert await asyncio.gather(*closing[1:]) == [None, None]
            with suppress(asyncio.CancelledError):
                await closing[0]
            await accepted.close()

    run(main)
