"""An engine's process that hands prompts over to others: its commands, seen by its endpoint before its steps see them.

A thread reads the commands. What peers say to each other goes to the endpoint at once, also in the middle of a step.
A request that pushes its pages waits here until the other side has room for them, and one whose pages come from
elsewhere until they have come, or will not: then they are commands like any other.

    there  ("start", ..., options) with push_to=(transfer, peer): compute this prompt, and push its pages
                                   with transfers={transfer: peer}: compute what these have not brought
           ("relay", peer, content)    ("meet", peer)    ("gone", peer)    ("ping",)
    back   ("pages", their format)    ("here", name)    ("relay", peer, content)    ("met", peer, why not)    ("pong",)
           ("computed", number, seconds)    ("has", number, rest, first)    before the step that says so: see
                                            `first_tokens.py`

A peer's name is new with each process, so nobody takes a restarted engine for the one that is gone.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from reference_impl.assembly.config import ConfigError
from reference_impl.core.kv_manager import prefix_key
from reference_impl.features.disaggregation.endpoint import MEMORY_BYTES, Endpoint
from reference_impl.features.disaggregation.layouts import PageFormat, page_format
from reference_impl.features.disaggregation.store import PeerStore
from reference_impl.features.disaggregation.transports.interface import Transport
from reference_impl.features.disaggregation.transports.shared_memory import SharedMemoryTransport
from reference_impl.features.disaggregation.transports.tcp import TcpTransport
from reference_impl.features.transfer.stored import FetchingKVManager, page_keys
from reference_impl.observe.trace import StepDone, Trace
from reference_impl.serving.runner import Message
from reference_impl.serving.worker import load

if TYPE_CHECKING:
    from reference_impl.assembly.engine import Engine
    from reference_impl.assembly.llm import LLM

logger = logging.getLogger("inferlab.serving")
MOST_MEMORY_BYTES = 1 << 30  # for the pages of one peer
KeysOf = Callable[[Sequence[int], dict[str, Any]], list[bytes]]


class Connection(Protocol):
    """The two directions of the socket to the event loop."""

    def begin(self) -> None: ...

    def get(self, block: bool = True) -> Any: ...

    def put(self, message: Message) -> None: ...


@dataclass
class _Held:
    """A request that waits for pages. waits: for these transfers."""

    command: Message
    waits: set[str]


class PeerCommands:
    """The `Commands` and the report of a `Worker` with an endpoint. keys_of: the keys of a prompt's pages, given its
    tokens and the request's options. trace: the engine's, whose clock is `time.perf_counter`."""

    def __init__(self, connection: Connection, endpoint: Endpoint, keys_of: KeysOf, trace: Trace):
        self._connection, self._endpoint, self._keys_of, self._trace = connection, endpoint, keys_of, trace
        self._commands: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of all that follows
        self._held: dict[int, _Held] = {}  # by number of the stream
        self._pushed: dict[int, str] = {}  # transfers that a stream pushes
        self._taken: dict[int, list[str]] = {}  # transfers whose pages a stream uses
        self._computes: dict[int, str] = {}  # requests whose pages a stream pushes
        self._over_at: dict[int, float] = {}  # when a stream's pages had come
        self._writing = threading.Lock()

    def begin(self) -> None:
        self._endpoint.begin(self._relay, self._met)
        self._report(("pages", self._endpoint.format.to_json()))
        self._report(("here", self._endpoint.name))
        threading.Thread(target=self._read, name="commands", daemon=True).start()

    def get(self, block: bool = True) -> Message | None:
        return self._commands.get(block)

    # --- from the event loop, in a thread ----------------------------------------------------------------------------

    def _read(self) -> None:
        while (command := self._connection.get()) is not None:
            self._obey(command)
        self._commands.put(None)

    def _obey(self, command: Message) -> None:
        match command:
            case ("ping",):
                self._report(("pong",))
            case "relay", peer, content:
                self._endpoint.received(peer, content)
            case "meet", peer:
                self._endpoint.meet(peer)
            case "gone", peer:
                self._endpoint.gone(peer)
            case "start", number, _, prompts, _, options if "push_to" in options:
                self._push(number, command, prompts[0], *options.pop("push_to"))
            case "start", number, _, _, _, options if "transfers" in options:
                self._expect(number, command, options.pop("transfers"))
            case "leave", number:
                self._leave(number)
                self._commands.put(command)
            case _:
                self._commands.put(command)

    def _push(self, number: int, command: Message, prompt: Sequence[int], transfer: str, peer: str) -> None:
        with self._lock:
            self._pushed[number], self._computes[number] = transfer, command[2]

        def answered(refusal: str | None) -> None:
            if refusal is None:
                self._commands.put(command)
            else:
                self._report(("answer", number, None, refusal))

        self._endpoint.offer(transfer, peer, self._keys_of(prompt, command[-1]), answered)

    def _expect(self, number: int, command: Message, transfers: Mapping[str, str]) -> None:
        with self._lock:
            self._held[number] = _Held(command, set(transfers))
            self._taken[number] = list(transfers)
        for transfer, peer in transfers.items():
            self._endpoint.expect(transfer, peer, partial(self._over, number, transfer))

    def _over(self, number: int, transfer: str, missing: str) -> None:
        """missing: why pages of the transfer are; its tokens are computed here."""
        if missing:
            logger.info("transfer %s: %s", transfer, missing)
        with self._lock:
            if (held := self._held.get(number)) is None:  # its client has gone
                return
            held.waits.discard(transfer)
            if held.waits:
                return
            del self._held[number]
            self._over_at[number] = time.perf_counter()
        self._commands.put(held.command)

    def _leave(self, number: int) -> None:
        with self._lock:
            self._held.pop(number, None)
            pushed, taken = self._pushed.pop(number, None), self._taken.pop(number, [])
            self._computes.pop(number, None)
            self._over_at.pop(number, None)
        if pushed is not None:
            self._endpoint.end_push(pushed)
        for transfer in taken:
            self._endpoint.release(transfer)

    # --- to the event loop --------------------------------------------------------------------------------------------

    def put(self, message: Message) -> None:
        """Reports what the worker says; pages of requests that have begun to write are not needed any more."""
        match message:
            case "step", rows, _:
                for number, _, _, _, _, finish_reason, *_ in rows:
                    self._has_written(number, finish_reason is not None)
            case "answer", number, _, refusal if refusal is not None:
                self._leave(number)
        self._report(message)

    def _has_written(self, number: int, is_over: bool) -> None:
        with self._lock:
            taken = self._taken.pop(number, [])
            computed, over_at = self._computes.pop(number, None), self._over_at.pop(number, None)
            if is_over:
                self._pushed.pop(number, None)  # its prompt is computed: the last pages follow
        if computed is not None and (seconds := self._trace.metrics(computed).prefill) is not None:
            self._report(("computed", number, seconds))
        if over_at is not None:
            now, step = time.perf_counter(), self._last_step()
            self._report(("has", number, max(0.0, step - over_at), now - max(step, over_at)))
        for transfer in taken:
            self._endpoint.release(transfer)

    def _last_step(self) -> float:
        """When the step began whose tokens are reported."""
        return next(e.started_at for e in reversed(self._trace.events) if isinstance(e, StepDone))

    def _relay(self, peer: str, content: bytes) -> None:
        self._report(("relay", peer, content))

    def _met(self, peer: str, refusal: str) -> None:
        self._report(("met", peer, refusal))

    def _report(self, message: Message) -> None:
        with self._writing:
            self._connection.put(message)


def load_peer(
    model: Path,
    dtype: str | None = None,
    num_engines: int = 1,
    over_tcp: tuple[str, bytes] | None = None,
    **engine_options: Any,
) -> LLM:
    """Loads an LLM whose pages come from peers and go to them: by shared memory or, with an address of this machine and
    a join key, over TCP. Errors: see `load`; ValueError for a model or a cache whose pages cannot."""
    store = PeerStore()
    try:
        llm = load(model, dtype, num_engines, page_store=store, **engine_options)
    except ConfigError as error:
        if "page_store" not in str(error):
            raise
        raise ValueError(f"engines that compute prompts for others exchange pages, by a page store: {error}") from None
    name = uuid.uuid4().hex
    transport: Transport = SharedMemoryTransport(name)
    if over_tcp is not None:
        host, key = over_tcp
        transport = TcpTransport(name, key, host)
    format = _format(llm.engine)
    # Of a peer, as much as two of the longest prompts need: what has no slot waits, and is computed here in the end.
    longest = -(-llm.engine.max_model_len // format.page_tokens) * format.page_bytes
    memory_bytes = min(max(MEMORY_BYTES, 2 * longest), MOST_MEMORY_BYTES)
    store.endpoint = Endpoint(name, format, transport, memory_bytes=memory_bytes)
    return llm


def endpoint_of(llm: LLM) -> Endpoint:
    """That of an LLM from `load_peer`."""
    kv = llm.engine.kv
    assert isinstance(kv, FetchingKVManager)
    assert isinstance(kv.store, PeerStore)
    assert kv.store.endpoint is not None
    return kv.store.endpoint


def _format(engine: Engine) -> PageFormat:
    config, kv = engine.model.config.whole, engine.kv
    assert isinstance(kv, FetchingKVManager)
    # What keys begin with has all that makes pages differ: of model and weights, format and dtype.
    fingerprint = hashlib.sha256(kv.root).hexdigest()[:32]
    return page_format(
        engine.kv_spec, config.num_layers, config.num_kv_heads, fingerprint=fingerprint,
        kv_format=engine.config.kv_dtype, dtype=str(engine.model.dtype),
    )  # fmt: skip


def connected(llm: LLM, connection: Connection) -> Connection:
    """The way by which a worker gets its commands and reports."""
    kv = llm.engine.kv
    if not isinstance(kv, FetchingKVManager) or not isinstance(kv.store, PeerStore) or kv.store.endpoint is None:
        return connection

    def keys_of(prompt: Sequence[int], options: dict[str, Any]) -> list[bytes]:
        whole = (len(prompt) - 1) // kv.page_tokens * kv.page_tokens  # the last token is computed where it is answered
        key = kv.root + prefix_key(options.get("adapter"), options.get("cache_salt"))
        return page_keys(prompt[:whole], key, kv.page_tokens)

    return PeerCommands(connection, kv.store.endpoint, keys_of, llm.engine.trace)
