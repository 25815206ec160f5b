"""Engines that join a router: who may, what becomes of their commands, and what is lost with them."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reference_impl.features.disaggregation.authentication import MAX_CONTENT, PeerError
from reference_impl.features.disaggregation.endpoint import Endpoint
from reference_impl.features.disaggregation.layouts import PageFormat
from reference_impl.features.disaggregation.transports.shared_memory import SharedMemoryTransport
from reference_impl.features.transfer.seals import SEAL_BYTES
from reference_impl.serving.disaggregated import Disaggregated
from reference_impl.serving.joining import (
    PeersPort,
    Refused,
    RouterConnection,
    address_of,
    contents_of,
    key_of,
    port_of,
    serve_as_told,
)
from reference_impl.serving.wire import decode
from tests.serving.test_fleet import Recorded, in_a_loop

KEY = b"k" * 32
PAGES = PageFormat("weights", "auto", "torch.float64", 2, 2, 8, 16, 2 * 2 * 16 * 2 * 8 * 8 + SEAL_BYTES)


class Router:
    """Two recorded engines, and a port where others join them. seconds: in which those have to answer."""

    def __init__(self, seconds: float = 30.0):
        self.seconds = seconds

    async def __aenter__(self) -> Router:
        self.said: list[Any] = []
        self.port = PeersPort("127.0.0.1", 0, KEY)
        engines: list[Any] = [Recorded(), Recorded()]
        self.fleet = Disaggregated(engines, 1, "round_robin", seconds=self.seconds, peers_port=self.port)
        beginning = asyncio.create_task(self.fleet.begin(self.said.append))
        await asyncio.sleep(0)
        self.fleet.said(0, ("pages", PAGES.to_json()))
        self.fleet.said(0, ("here", "p"))
        self.fleet.said(1, ("here", "d"))
        self.fleet.said(0, ("met", "d", ""))
        await beginning
        self.fleet._unanswered.clear()  # these two do not answer pings
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.fleet.end(0)


async def joined(
    connection: RouterConnection,
    role: str = "decode",
    vocab_size: int = 97,
    longest: int = 64,
    pages: PageFormat = PAGES,
) -> None:
    await asyncio.to_thread(connection.join_when_there, role, vocab_size, longest, pages)


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


@in_a_loop
async def test_an_engine_that_joins_gets_requests_until_it_leaves() -> None:
    async with Router() as router:
        connection = RouterConnection(*router.port.address, KEY, "theirs")
        await joined(connection)
        await until(lambda: len(router.fleet.serving) == 3)
        assert router.fleet.questions.roles == ["prefill", "decode", "decode"]
        connection.put(("here", "their name"))
        await until(lambda: router.fleet.names.get(2) == "their name")
        for number in range(2):
            router.fleet.send(("ask", number, "metrics", ()))
        assert await asyncio.to_thread(connection.get) == ("ask", 0, "metrics", [])
        connection.put(("relay", "nobody", b"\x00\xff"))
        assert await asyncio.to_thread(connection.get) == ("ask", 1, "metrics", [])
        assert await asyncio.to_thread(connection.get) == ("gone", "nobody")
        connection.close()
        await until(lambda: 2 not in router.fleet.serving)
        assert router.said[-1][:2] == ("lost", [])


@in_a_loop
async def test_another_model_or_role_is_refused_and_another_key_gets_nothing() -> None:
    async with Router() as router:
        for what, expected in (
            (
                {"vocab_size": 98},
                r"expected version, vocabulary and max_model_len of the router, .*97, 64\), got .*98, 64",
            ),
            ({"pages": replace(PAGES, dtype="torch.float32")}, "dtype: 'torch.float64' here, 'torch.float32' there"),
            ({"pages": replace(PAGES, fingerprint="others")}, "fingerprint: 'weights' here, 'others' there"),
            ({"role": "both"}, "expected the message that joins, with a role of"),
        ):
            with pytest.raises(Refused, match=expected):
                await joined(RouterConnection(*router.port.address, KEY, "theirs"), **what)  # type: ignore[arg-type]
        stranger = RouterConnection(*router.port.address, b"x" * 32, "stranger")
        with pytest.raises(PeerError, match="join key"):
            await asyncio.to_thread(stranger.join, "decode", 97, 64, PAGES)
        assert len(router.fleet.engines) == 2


@in_a_loop
async def test_who_joins_and_says_nonsense_is_lost_and_its_place_is_taken() -> None:
    async with Router() as router:
        for nonsense in ("step", 5), ("here", ["no", "name"]), ("answer", [1], None, None):
            connection = RouterConnection(*router.port.address, KEY, "theirs")
            await joined(connection)
            await until(lambda: 2 in router.fleet.serving)
            connection.put(nonsense)
            await until(lambda: 2 not in router.fleet.serving)
            connection.close()
        assert len(router.fleet.engines) == 3


@in_a_loop
async def test_who_joins_and_says_nothing_is_ended() -> None:
    async with Router(seconds=0.04) as router:
        connection = RouterConnection(*router.port.address, KEY, "theirs")
        await joined(connection)
        await until(lambda: 2 not in router.fleet.serving and len(router.fleet.engines) == 3)
        connection.close()


@in_a_loop
async def test_an_engine_that_joins_while_none_serves_lets_the_server_answer_again() -> None:
    async with Router() as router:
        for number in range(2):
            router.fleet.said(number, ("restarting", "restarting: killed"))
        assert router.said[-1] == ("restarting", "restarting: killed")
        await joined(RouterConnection(*router.port.address, KEY, "theirs"))
        await until(lambda: router.said[-1] == ("restarted",))
        router.fleet.said(0, ("restarted",))
        assert router.fleet.serving == {0, 2}
        assert router.said.count(("restarted",)) == 1


@in_a_loop
async def test_roles_change_while_it_serves_and_each_keeps_an_engine() -> None:
    async with Router() as router:
        with pytest.raises(ValueError, match="so that each has an engine, got 'prefill'"):
            router.fleet.assign(1, "prefill")
        await router.fleet.join(Recorded(), "decode")  # type: ignore[arg-type]
        router.fleet.assign(1, "prefill")
        assert (router.fleet.prefill, router.fleet.decode) == ([0, 1], [2])


def test_what_the_command_line_says(tmp_path: Path) -> None:
    assert address_of("10.0.0.1:9000") == ("10.0.0.1", 9000)
    assert address_of("[::1]:9000") == ("::1", 9000)
    with pytest.raises(ValueError, match="expected an IP address such as 127.0.0.1, got 'localhost'"):
        address_of("localhost:9000")
    for text in ("10.0.0.1", ":9000", "10.0.0.1:port", "10.0.0.1:70000"):
        with pytest.raises(ValueError, match="expected HOST:PORT"):
            address_of(text)
    (key := tmp_path / "key").write_text("short\n")
    with pytest.raises(ValueError, match="expected a join key of at least 16 bytes, got 5"):
        key_of(key)
    with pytest.raises(ValueError, match="give its file with --join-key"):
        port_of("127.0.0.1:9000", None)
    with pytest.raises(ValueError, match="without --peers or --join: give where engines join, or leave it out"):
        port_of(None, key)
    with pytest.raises(ValueError, match="needs --role prefill or decode, --join HOST:PORT and --join-key FILE"):
        serve_as_told(tmp_path, "decode", None, None)


def test_an_endpoint_that_never_began_can_be_closed() -> None:
    """As that of an engine which the router refuses: else this error would hide that one."""
    Endpoint("refused", PAGES, SharedMemoryTransport("refused")).close()


def test_a_report_that_is_too_long_goes_in_parts_or_is_an_error_of_its_own() -> None:
    def row(number: int, text: str) -> list[Any]:
        return [number, 0, text, [1], [], None, None, None, None, None, None]

    rows = [row(number, "x" * (MAX_CONTENT // 3)) for number in range(4)]
    parts = [decode(content) for content in contents_of(("step", rows, [[3, [1, 2, 3]]]))]
    assert [row for part in parts for row in part[1]] == rows
    assert [usage for part in parts for usage in part[2]] == [[3, [1, 2, 3]]]
    [content] = contents_of(("step", [row(7, "x" * MAX_CONTENT)], []))
    [[number, *_, finish_reason, _, _, _, _, error]] = decode(content)[1]
    assert (number, finish_reason) == (7, "error")
    assert "are more than an engine of another machine can report at once" in error
    [content] = contents_of(("answer", 5, b"x" * MAX_CONTENT, None))
    assert decode(content)[:3] == ("answer", 5, None)


def test_a_port_in_use_is_said_before_engines_load(tmp_path: Path) -> None:
    (key := tmp_path / "key").write_text("k" * 32)
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(OSError, match=r"peers: cannot listen on 127.0.0.1 port .*in use"),
    ):
        port_of(f"127.0.0.1:{taken.getsockname()[1]}", key)
