"""Half-open connections end, whoever dribbles; those that ask are served beside them."""

from __future__ import annotations

import contextlib
import json
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from reference_impl.serving.limits import ConnectionLimits, LimitedProtocol

COMPLETIONS = "/v1/completions"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
SHORT = ConnectionLimits(headers=0.4, body=0.4, write=0.4)


def connect(running: Any) -> socket.socket:
    return socket.create_connection(("127.0.0.1", running.server.port), timeout=600)


@contextlib.contextmanager
def connected(running: Any, sent: bytes) -> Iterator[socket.socket]:
    """A client that has sent this before the server looks, so that no limit can end it in between."""
    done = threading.Event()
    running.server._server.servers[0].get_loop().call_soon_threadsafe(done.wait, 600)
    with connect(running) as sock:
        sock.sendall(sent)
        done.set()
        yield sock


def post(body: bytes, length: int | None = None) -> bytes:
    fields = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {length or len(body)}\r\n\r\n"
    return f"POST {COMPLETIONS} HTTP/1.1\r\n{fields}".encode() + body


def all_that_comes(sock: socket.socket, dribble: bytes = b"", piece: int = 1) -> bytes:
    """Until the server ends the connection; meanwhile so many bytes of `dribble` every 50 ms."""
    got, end = b"", time.monotonic() + 600
    try:
        while time.monotonic() < end:
            if select.select([sock], [], [], 0.05)[0]:
                if not (data := sock.recv(1 << 16)):
                    return got
                got += data
            elif dribble:
                sock.sendall(dribble[:piece])
                dribble = dribble[piece:]
    except ConnectionError:
        return got
    raise AssertionError(f"the connection is still open; it said {got[:200]!r}")


def connections(running: Any) -> int:
    return running.in_loop(lambda: len(running.server._server.server_state.connections))


@pytest.fixture(scope="module")
def short(serve: Any) -> Any:
    return serve({"limits": SHORT})


@pytest.mark.parametrize("sent", [b"", b"GE", b"GET /health HTTP/1.1\r\nHost:", b"\r\n\r\n"])
def test_half_a_request_line_or_header_ends(short: Any, sent: bytes) -> None:
    with connected(short, sent) as sock:
        got = all_that_comes(sock)
    if sent:
        head, _, body = got.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408")
        assert json.loads(body)["error"]["message"] == "the headers did not come within 0.4 s"
    else:
        assert got == b""


def test_a_byte_now_and_then_is_no_reason_to_wait(short: Any) -> None:
    endless = b"X-a: " + b"b" * 10_000
    with connected(short, b"GET /health HTTP/1.1\r\n") as sock:
        assert all_that_comes(sock, endless).startswith(b"HTTP/1.1 408")
    with connected(short, post(b"{", 10_000)) as sock:  # in the body
        all_that_comes(sock, b" " * 10_000)
    with connected(short, HEALTH + b"G") as sock:  # after an answer; without a byte of the next request it says nothing
        got = all_that_comes(sock, b"ET /" + b"a" * 10_000)
        assert got.startswith(b"HTTP/1.1 200")
        assert b"HTTP/1.1 408" in got
    with connected(short, post(b"", 1 << 30)) as sock:  # of a body that was refused before it came
        assert all_that_comes(sock, b" " * 10_000).startswith(b"HTTP/1.1 413")


def test_half_a_request_in_the_packet_of_the_one_before_it_is_told_so_too(short: Any) -> None:
    with connected(short, HEALTH + b"GE") as sock:
        got = all_that_comes(sock)
    assert re.findall(rb"HTTP/1.1 (\d+)", got) == [b"200", b"408"]


@pytest.mark.parametrize("sent", [b"", b"{", b'{"prompt": "x", ' * 50])
def test_half_a_body_ends_as_half_a_header_does(serve: Any, until: Any, sent: bytes) -> None:
    running = serve({"limits": ConnectionLimits(headers=0.4, body=10_000)}, num_blocks=64)
    with connected(running, post(sent, 10_000)) as sock:
        head, _, body = all_that_comes(sock).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    assert json.loads(body)["error"]["message"] == "nothing more of the body came within 0.4 s"
    until(lambda: not connections(running), "its place is free")
    until(running.is_idle, "nothing was begun")


@pytest.mark.parametrize(
    ("began", "came", "said"),
    [
        (9_000, 0, ""),
        (50, 50, ""),
        (101, 101, "nothing more of the body came within 100 s"),
        (10_001, 0, "the body did not come within 10000 s"),
    ],
)
def test_a_body_may_take_long_as_long_as_it_comes(serve: Any, until: Any, began: int, came: int, said: str) -> None:
    """It began, and its last piece came, so many seconds ago."""
    running = serve({"limits": ConnectionLimits(headers=100, body=10_000)}, num_blocks=64)
    body, asked = b'{"prompt": "x", "max_tokens": 1}', threading.Event()
    with connect(running) as sock:
        sock.sendall(post(body[:5], len(body)))
        until(lambda: _bodies(running) == 1, "it is read")
        connection = _of(running, sock)

        def pretend() -> None:
            connection._timer.cancel()
            connection._began -= began
            connection._came -= came
            connection._wait_for_body()
            asked.set()

        running.server._server.servers[0].get_loop().call_soon_threadsafe(pretend)
        assert asked.wait(600)
        if not said:
            sock.sendall(body[5:])
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
        else:
            assert said.encode() in all_that_comes(sock)


def test_those_that_sent_half_a_body_make_room(serve: Any, until: Any) -> None:
    running = serve({"limits": ConnectionLimits(headers=10_000, body=10_000, connections=3)}, num_blocks=64)
    half = [connect(running) for _ in range(3)]
    for number, sock in enumerate(half):
        sock.sendall(post(b"{", 10_000))
        until(lambda count=number: _bodies(running) > count, "it is read")
    half[0].sendall(b" ")  # so the second is the one that has waited longest
    until(lambda: _longest_waiting(running) is not _of(running, half[0]), "that is read")
    with httpx.Client(base_url=running.url, timeout=600) as client:
        assert client.get("/health").status_code == 200
    got = all_that_comes(half[1])
    assert got.startswith(b"HTTP/1.1 503")
    assert b"try again" in got
    for sock in half:
        sock.close()


def _served(running: Any) -> list[LimitedProtocol]:
    return running.in_loop(lambda: list(running.server._server.server_state.connections))


def _longest_waiting(running: Any) -> LimitedProtocol:
    waiting = _served(running)[0]._waiting
    return running.in_loop(lambda: next(iter(waiting)))


def _bodies(running: Any) -> int:
    def begun() -> int:
        served = running.server._server.server_state.connections
        return sum(one.cycle is not None and one.cycle.more_body for one in served)

    return running.in_loop(begun)


def _of(running: Any, sock: socket.socket) -> LimitedProtocol:
    return next(one for one in _served(running) if one.client == sock.getsockname())


def test_clients_that_read_nothing_cost_no_more_than_a_buffer_and_are_given_up(
    serve: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of answers of megabytes; meanwhile others are answered."""
    buffered, send = [0], RequestResponseCycle.send

    async def watched(cycle: RequestResponseCycle, message: Any) -> None:
        await send(cycle, message)
        buffered.append(cycle.transport.get_write_buffer_size())

    monkeypatch.setattr(RequestResponseCycle, "send", watched)
    running = serve({"limits": ConnectionLimits(write=1.0)})
    running.server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)  # accepted ones inherit it
    body = {"prompt": "x", "max_tokens": 1900, "n": 12, "logprobs": 20, "ignore_eos": True, "stream": True}
    silent = []
    for _ in range(4):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.connect(("127.0.0.1", running.server.port))
        sock.sendall(post(json.dumps(body).encode()))
        silent.append(sock)
    until(lambda: max(buffered) > 1 << 16, "one has more to read than it is sent")
    answer = httpx.post(running.url + COMPLETIONS, json={"prompt": "y", "max_tokens": 8}, timeout=600)
    assert answer.status_code == 200
    until(running.is_idle, "they were given up")
    until(lambda: not connections(running), "and so were their connections")
    assert max(buffered) < 1 << 20
    ended = [request for request in running.engine.trace.counts.last if request.reason == "abort"]
    assert len(ended) == 4 * 12
    assert all(request.metrics.num_output_tokens < 1900 for request in ended)
    for sock in silent:
        sock.close()


def test_an_idle_connection_ends_without_a_word(short: Any) -> None:
    with connected(short, HEALTH) as sock:
        assert all_that_comes(sock).count(b"HTTP/1.1") == 1


LATE = {"prompt": "x", "max_tokens": 20, "ignore_eos": True, "stream": True}


@pytest.fixture
def go_on(short: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """For this the engine of `short` waits when it has made a few steps, the first token's among them."""
    step, steps, event = short.llm.step, iter(range(5)), threading.Event()
    monkeypatch.setattr(short.llm, "step", lambda: (next(steps, None) is not None or event.wait(600)) and step())
    yield event
    event.set()


def longer_than_any_limit() -> None:
    time.sleep(3 * SHORT.headers)


def test_an_answer_may_take_longer_than_any_limit(short: Any, go_on: threading.Event) -> None:
    with connected(short, post(json.dumps(LATE).encode())) as sock:
        got = sock.recv(1)
        longer_than_any_limit()
        go_on.set()
        got += all_that_comes(sock)
    assert got.count(b"data: [DONE]") == 1


def test_a_request_that_waits_for_the_answer_before_it_may_wait_longer_than_any_limit(
    short: Any, until: Any, go_on: threading.Event
) -> None:
    with connected(short, post(json.dumps(LATE).encode())) as sock:
        got = sock.recv(1)  # the first is being answered: from now on nothing is read
        next_one = post(b'{"prompt": "x", "max_tokens": 1}')
        sock.sendall(next_one[:-5])
        until(lambda: any(connection.pipeline for connection in _served(short)), "the next one waits")
        longer_than_any_limit()
        sock.sendall(next_one[-5:] + HEALTH)  # sent before its turn comes: from then on there is a limit
        go_on.set()
        got += all_that_comes(sock)
    assert got.count(b"data: [DONE]") == 1
    assert b'"text_completion"' in got.partition(b"[DONE]")[2]
    assert got.endswith(b'{"status":"ok"}')
    until(short.is_idle, "it is idle")


@pytest.mark.parametrize(
    ("start", "endless"),
    [
        (b"GET /", b"a"),
        (b"GET /health HTTP/1.1\r\n", b"X-a: b\r\n"),
        (post(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + b"0\r\n", b"X-a: b\r\n"),
    ],
    ids=["path", "headers", "trailers"],
)
def test_headers_without_end_are_refused(server: Any, start: bytes, endless: bytes) -> None:
    with connect(server) as sock:
        sock.sendall(start)
        assert all_that_comes(sock, endless * 100_000, 8000).startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("count", [1, 400], ids=["less than a buffer", "more"])
def test_a_client_that_reads_nothing_keeps_no_connection(
    serve: Any, until: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, connection_lost = [], LimitedProtocol.connection_lost
    monkeypatch.setattr(
        LimitedProtocol, "connection_lost", lambda one, error: lost.append(one) or connection_lost(one, error)
    )
    running = serve({"limits": SHORT})
    running.server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)  # accepted ones inherit it
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.connect(("127.0.0.1", running.server.port))
        sock.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * count)
        until(lambda: lost and not connections(running), "it was given up")


def test_a_client_is_served_beside_hundreds_of_half_open_ones(serve: Any, until: Any) -> None:
    running = serve({"limits": ConnectionLimits(connections=100)})
    half = [connect(running) for _ in range(300)]
    for sock in half[::2]:
        with contextlib.suppress(ConnectionError):  # it had to make room
            sock.sendall(b"GET /health HTT")
    with httpx.Client(base_url=running.url, timeout=600) as client:
        body = {"prompt": "x", "max_tokens": 50, "ignore_eos": True, "stream": True}
        with client.stream("POST", COMPLETIONS, json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            half += [connect(running) for _ in range(150)]  # more than there may be: it runs and keeps its place
            assert [line for line in lines if line][-1] == "data: [DONE]"
    until(lambda: connections(running) <= 100, "there are no more than there may be")
    for sock in half:
        sock.close()


def test_where_everybody_is_being_answered_another_is_told_so(serve: Any, until: Any) -> None:
    running = serve({"limits": ConnectionLimits(connections=1)})
    body = json.dumps({"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True}).encode()
    with connect(running) as first:
        first.sendall(post(body))
        assert first.recv(100).startswith(b"HTTP/1.1 200")
        with connect(running) as second:
            got = all_that_comes(second)
        assert got.startswith(b"HTTP/1.1 503")
        assert b"try again" in got
    until(running.is_idle, "the first has gone")
    assert httpx.get(f"{running.url}/health", timeout=600).status_code == 200


def test_half_open_connections_do_not_use_up_the_files_of_the_process(until: Any, inferlab: Any) -> None:
    running = inferlab(max_files=300)
    url, half = running.url, []
    try:
        until(lambda: httpx.get(f"{url}/ready", timeout=600).status_code == 200, "it is ready")
        port = int(url.rpartition(":")[2])
        running.send_signal(signal.SIGSTOP)  # so that they all stand before the door when it looks again
        half = [socket.socket() for _ in range(600)]
        for sock in half:
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", port))
        running.send_signal(signal.SIGCONT)
        answer = httpx.post(f"{url}{COMPLETIONS}", json={"prompt": "x", "max_tokens": 2}, timeout=600)
        assert answer.status_code == 200
        assert "What the engine does" in httpx.get(f"{url}/status", timeout=600).text  # a file of its own
    finally:
        running.terminate()
        _, said = running.communicate(timeout=600)
        for sock in half:
            sock.close()
    assert said == ""
