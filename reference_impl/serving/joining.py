"""Engines that join a server from elsewhere: `inferlab serve MODEL --role decode --join HOST:PORT`.

    there  load the model, connect to the router, prove the join key    ("join", role, version, vocabulary, longest,
           the format of its pages)
    here   one more engine of the fleet, until its connection ends: then it is lost    ("joined", why not)

Commands and reports are those of a process on this machine (`runner.py`), as JSON (`wire.py`); pages go over TCP, from
engine to engine. Who has the key is trusted: it may write into the pages that are sent to it. Nothing is encrypted, so
the network must be a private one.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reference_impl.features.disaggregation.authentication import LEAST_KEY, MAX_CONTENT, PeerError, check_address
from reference_impl.features.disaggregation.control import Channel, Listener, connect, listen
from reference_impl.features.disaggregation.layouts import PageFormat
from reference_impl.serving.runner import Message, Prompts
from reference_impl.serving.wire import decode, encode

if TYPE_CHECKING:
    from reference_impl.models.embedding_defaults import EmbeddingDefaults
    from reference_impl.serving.disaggregated import Disaggregated

logger = logging.getLogger("inferlab.serving")
ROLES = ("prefill", "decode")
AGAIN_SECONDS = 1.0  # until an engine that lost its router tries to join again


def version() -> str:
    return metadata.version("inferlab")


def key_of(file: Path) -> bytes:
    """The join key that a file holds. ValueError for one that is too short, OSError where it cannot be read."""
    if len(key := file.read_bytes().strip()) < LEAST_KEY:
        raise ValueError(
            f"{file}: expected a join key of at least {LEAST_KEY} bytes, got {len(key)}; make one with "
            "python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return key


def address_of(text: str) -> tuple[str, int]:
    """HOST:PORT as two. ValueError for anything else."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"expected HOST:PORT with an IP address, as 192.168.0.5:9000, got {text!r}")
    return check_address(host.removeprefix("[").removesuffix("]")), int(port)


# --- beside the router ------------------------------------------------------------------------------------------------


class RemoteEngine:
    """An `EngineHost` behind a connection. It lives as long as that."""

    def __init__(self, channel: Channel, prompts: Prompts, like: Disaggregated):
        self._channel, self.prompts, self.is_alive = channel, prompts, True
        self.vocab_size, self.max_model_len, self.acceptance = like.vocab_size, like.max_model_len, like.acceptance
        self.sampling_defaults: dict[str, Any] = like.sampling_defaults
        self.embedding_defaults: EmbeddingDefaults = like.embedding_defaults

    async def begin(self, receive: Callable[[Message], None]) -> None:
        self._receive = receive

    def send(self, command: Message) -> None:
        if not self.is_alive:
            return
        try:
            self._channel.send(encode(command))
        except ValueError as error:  # it is too long
            if command[0] in ("start", "ask"):
                self._receive(("answer", command[1], None, str(error)))
        except PeerError as error:
            logger.warning("%s", error)  # `run` sees the end, too

    async def run(self) -> None:
        """Passes on what the engine says until it ends."""
        try:
            while True:
                self._receive(decode(await self._channel.receive()))
        except (PeerError, ValueError) as error:
            why = str(error)
        except Exception as error:  # of what it said, which is then no report of an engine
            logger.exception("what an engine elsewhere said cannot be used")
            why = f"what it said cannot be used: {error!r}"
        self.is_alive = False
        self._receive(("failed", why))

    def kill(self) -> None:
        """Ends the connection: the process is on another machine, and joins again if it can."""
        asyncio.get_running_loop().create_task(self._channel.close(0.0))

    async def end(self, seconds: float) -> None:
        await self._channel.close()


@dataclass
class PeersPort:
    """Where engines join a fleet. key: that they prove to have. address: where it listens, once it does."""

    host: str
    port: int
    key: bytes
    address: tuple[str, int] = ("", 0)
    _listener: Listener | None = None

    async def open(self, fleet: Disaggregated) -> None:
        """OSError where it cannot listen."""
        self._listener = await listen(partial(self._joined, fleet), self.key, "router", self.host, self.port)
        self.address = self._listener.address

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()

    async def _joined(self, fleet: Disaggregated, channel: Channel) -> None:
        try:
            refusal = _refusal(fleet, message := decode(await channel.receive()))
        except ValueError as error:
            raise PeerError(f"{channel.peer}: {error}") from None
        channel.send(encode(("joined", refusal)))
        if refusal:
            logger.warning("%s may not join: %s", channel.peer, refusal)
            return
        engine = RemoteEngine(channel, fleet.prompts, fleet)
        await fleet.join(engine, role := message[1])
        logger.info("an engine for %s has joined: %s", role, channel.peer)
        await engine.run()


def _refusal(fleet: Disaggregated, message: Message) -> str:
    """Why the sender of this first message may not join; empty if it may. Its answers have to be those of the engines
    here: whose pages differ has another model or computes it otherwise. PeerError where no engine here has said what
    its pages are yet: it may try again."""
    match message:
        case "join", role, said, vocab_size, max_model_len, pages if role in ROLES:
            mine = version(), fleet.vocab_size, fleet.max_model_len
            if (said, vocab_size, max_model_len) != mine:
                return (
                    f"expected version, vocabulary and max_model_len of the router, {mine}, got "
                    f"{(said, vocab_size, max_model_len)}: start it with the same model and options"
                )
            if fleet.page_format is None:
                raise PeerError("no engine of the router has said what its pages are: join when one serves")
            try:
                fleet.page_format.check_meets(PageFormat.from_json(pages))
            except (ValueError, TypeError) as error:
                return str(error)
            return ""
        case other:
            return f"expected the message that joins, with a role of {ROLES}, got {str(other)[:100]}"


# --- beside the engine that joins -------------------------------------------------------------------------------------


class Refused(ValueError):
    """The router does not take this engine; trying again would not help."""


class RouterConnection:
    """The connection to a router, for a worker with threads; a loop in a thread of its own holds it."""

    def __init__(self, host: str, port: int, key: bytes, name: str):
        self._where, self._key, self._name = (host, port), key, name
        self._commands: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._channel: Channel | None = None
        self._reading: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="router", daemon=True)
        self._thread.start()

    def join(self, role: str, vocab_size: int, max_model_len: int, pages: PageFormat) -> None:
        """Refused where the router refuses, PeerError where there is none."""
        joining = self._join(role, vocab_size, max_model_len, pages)
        asyncio.run_coroutine_threadsafe(joining, self._loop).result()

    def join_when_there(self, role: str, vocab_size: int, max_model_len: int, pages: PageFormat) -> None:
        """Waits for a router. Refused where it refuses."""
        said = ""
        while True:
            try:
                return self.join(role, vocab_size, max_model_len, pages)
            except PeerError as error:
                if str(error) != said:
                    logger.warning("%s; trying again until there is a router", error)
                said = str(error)
                time.sleep(AGAIN_SECONDS)

    async def _join(self, role: str, vocab_size: int, max_model_len: int, pages: PageFormat) -> None:
        self._channel = channel = await connect(*self._where, self._key, self._name)
        channel.send(encode(("join", role, version(), vocab_size, max_model_len, pages.to_json())))
        match decode(await channel.receive()):
            case "joined", "":
                self._reading = asyncio.create_task(self._read(channel))
            case "joined", refusal:
                raise Refused(f"the router refuses this engine: {refusal}")
            case other:
                raise Refused(f"expected the router's answer, got {str(other)[:100]}")

    async def _read(self, channel: Channel) -> None:
        try:
            while True:
                self._commands.put(decode(await channel.receive()))
        except (PeerError, ValueError) as error:
            logger.warning("%s", error)
            self._commands.put(None)

    def begin(self) -> None:
        """Commands will be asked for from now on."""

    def get(self, block: bool = True) -> Message | None:
        return self._commands.get(block)

    def put(self, message: Message) -> None:
        for content in contents_of(message):
            self._loop.call_soon_threadsafe(self._send, content)

    def _send(self, content: bytes) -> None:
        assert self._channel is not None, "join first"
        try:
            self._channel.send(content)
        except PeerError as error:
            logger.warning("%s", error)  # `_read` sees the end, too

    def close(self) -> None:
        """Leaves the router."""
        asyncio.run_coroutine_threadsafe(self._leave(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _leave(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        if self._channel is not None:
            await self._channel.close()


def contents_of(message: Message) -> list[bytes]:
    """A report as control messages, which have a longest: a step's rows go in several, and what is too long by itself
    becomes an error of its request or question."""
    content = encode(message)
    if len(content) <= MAX_CONTENT:
        return [content]
    why = f"{len(content)} bytes are more than an engine of another machine can report at once: {MAX_CONTENT}"
    match message:
        case "step", rows, usages if len(rows) > 1:
            half = len(rows) // 2
            return contents_of(("step", rows[:half], [])) + contents_of(("step", rows[half:], usages))
        case "step", [[number, index, *_]], usages:
            row: tuple[Any, ...] = (number, index, "", [], [], "error", None, None, None, None, why)
            return [encode(("step", [row], usages))]
        case "answer", number, _, _:
            return [encode(("answer", number, None, why))]
    raise ValueError(f"a report of kind {message[0]}: {why}")


def port_of(peers: str | None, join_key: Path | None) -> PeersPort | None:
    """Where engines join, as the command line says it. ValueError for one of the two alone."""
    if peers is None and join_key is not None:
        why = "without --peers or --join: give where engines join, or leave it out"
        raise ValueError(f"join key {str(join_key)!r} {why}")
    if peers is None:
        return None
    if join_key is None:
        raise ValueError("peers: whoever joins has to prove a key: give its file with --join-key")
    host, port = address_of(peers)
    try:  # here, where it is a line; it is opened when the engines are loaded
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        raise OSError(f"peers: cannot listen on {host} port {port}: {error.strerror or error}") from None
    return PeersPort(host, port, key_of(join_key))


def serve_as_told(model: Path, role: str | None, join: str | None, join_key: Path | None, **options: Any) -> None:
    """`serve_peer`, as the command line says it. ValueError where something is missing."""
    if role not in ROLES or join is None or join_key is None:
        raise ValueError(
            f"an engine that joins a server needs --role {' or '.join(ROLES)}, --join HOST:PORT and --join-key FILE; "
            f"got role {role!r}, join {join!r}, join key {join_key and str(join_key)!r}"
        )
    serve_peer(model, role, address_of(join), key_of(join_key), **options)


def own_address(router: tuple[str, int]) -> str:
    """The address of this machine on the way to a router. OSError where there is none."""
    family = socket.AF_INET6 if ":" in router[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(router)  # sends nothing
        return str(probe.getsockname()[0])


def serve_peer(model: Path, role: str, router: tuple[str, int], key: bytes, **options: Any) -> None:
    """Loads an engine, joins a router and computes what it asks for until that is gone; then again, by a new name,
    without end. A router that is not there is waited for. Refused where it refuses, and what `load` raises."""
    from reference_impl.serving.peers import connected, endpoint_of, load_peer
    from reference_impl.serving.worker import Worker

    while True:
        llm = load_peer(model, over_tcp=(own_address(router), key), **options)
        connection = RouterConnection(*router, key, endpoint_of(llm).name)
        try:
            vocab_size, pages = llm.engine.model.config.vocab_size, endpoint_of(llm).format
            connection.join_when_there(role, vocab_size, llm.engine.max_model_len, pages)
            print(f"joined the router at {router[0]}:{router[1]} for {role}; Ctrl-C leaves it", flush=True)
            commands = connected(llm, connection)
            worker = Worker(llm, commands, commands.put)
            commands.begin()
            worker.run()
        finally:
            connection.close()
            endpoint_of(llm).close()
