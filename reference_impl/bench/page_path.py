"""How long pages take from one cache into another, beside one copy of their bytes, and NIXL under our transport beside
NIXL alone. For `inferlab bench disaggregation`.

The path is the product's: what a worker does between two steps, an endpoint at each end, their control messages, a
segment of shared memory. Both ends are in this process, so its processor time is that of the whole path.
"""

from __future__ import annotations

import mmap
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from reference_impl.bench import harness
from reference_impl.core.kv_cache import PagedKVCache
from reference_impl.features.disaggregation.endpoint import Endpoint
from reference_impl.features.disaggregation.layouts import page_format
from reference_impl.features.disaggregation.store import PeerStore
from reference_impl.features.disaggregation.transports.nixl import NixlTransport
from reference_impl.features.disaggregation.transports.shared_memory import SharedMemoryTransport
from reference_impl.features.transfer.pages import Pages
from reference_impl.interfaces import KVSpec, Page, PageTransfer, Transfers

SECONDS = 60.0  # that anything here may take before it counts as hung
IDLE = 1e-3  # seconds between two looks of a receiver over NIXL


@dataclass(frozen=True)
class Shape:
    """Pages of a cache in 16 bits. chunk: how many are saved at a time, as a step of 512 tokens has them."""

    num_layers: int = 16
    num_kv_heads: int = 8
    head_dim: int = 64
    num_pages: int = 64
    chunk: int = 32

    @property
    def page_bytes(self) -> int:
        return self.num_layers * 2 * 16 * self.num_kv_heads * self.head_dim * 2

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes


SHAPE = Shape()


class _End:
    """A worker's end: a cache, the store that an endpoint serves, and what moves pages between the two."""

    def __init__(self, name: str, shape: Shape):
        spec = KVSpec(shape.num_layers, shape.num_kv_heads, shape.head_dim, 16, bits_per_value=16)
        self.cache = PagedKVCache([spec], 2 * shape.num_pages, torch.bfloat16, torch.device("cpu"))
        of_page = page_format(
            spec, shape.num_layers, shape.num_kv_heads, fingerprint="", kv_format="auto", dtype="torch.bfloat16"
        )
        self.endpoint = Endpoint(
            name, of_page, SharedMemoryTransport(name), memory_bytes=shape.num_pages * of_page.page_bytes
        )
        store = PeerStore()
        store.endpoint = self.endpoint
        self.store, self.pages = store, Pages(store, self.cache)

    def move(self, transfers: Transfers) -> None:
        """Until these have ended. RuntimeError for one that failed."""
        self.pages.begin(transfers)
        num_ended = 0
        while num_ended < len(transfers.saves) + len(transfers.loads):
            self.pages.take_in(SECONDS)
            for end in self.pages.take_ended():
                num_ended += 1
                if end.error is not None:
                    raise RuntimeError(f"pages were not moved: {end.error}")


class Path:
    """From the cache of `sender` into that of `receiver`."""

    def __init__(self, shape: Shape):
        self.shape, self._turn = shape, 0
        self.sender, self.receiver = _End("prefill", shape), _End("decode", shape)
        self.sender.cache.data.normal_(generator=torch.Generator().manual_seed(0))
        self._blocks = torch.randperm(2 * shape.num_pages, generator=torch.Generator().manual_seed(1)).tolist()

    def begin(self) -> None:
        said: queue.SimpleQueue[str] = queue.SimpleQueue()
        sender, receiver = self.sender.endpoint, self.receiver.endpoint
        receiver.begin(lambda _, content: sender.received("decode", content), lambda _, why: None)
        sender.begin(lambda _, content: receiver.received("prefill", content), lambda _, why: said.put(why))
        sender.meet("decode")
        if why := said.get(timeout=SECONDS):
            raise RuntimeError(f"the two ends cannot meet: {why}")

    def close(self) -> None:
        self.sender.endpoint.close()
        self.receiver.endpoint.close()

    def reserve(self) -> tuple[list[Page], threading.Event]:
        """Offers pages under new keys, as is done before a prompt is computed. Returns the pages, and what is set when
        all of them have come. RuntimeError if there is no room."""
        self._turn += 1
        name, here, missing = f"turn {self._turn}", threading.Event(), list[str]()
        keys = [self._turn.to_bytes(16, "big") + at.to_bytes(16, "big") for at in range(self.shape.num_pages)]
        answers, answered = list[str | None](), threading.Event()

        def over(why: str) -> None:
            missing.append(why)
            here.set()

        def answer(why: str | None) -> None:
            answers.append(why)
            answered.set()

        self.receiver.endpoint.expect(name, "prefill", over)
        self.sender.endpoint.offer(name, "decode", keys, answer)
        if not answered.wait(SECONDS) or answers != [None]:
            raise RuntimeError(f"there was no room for the pages: {answers}")
        return [Page(key, block, 0) for key, block in zip(keys, self._blocks, strict=False)], here

    def cross(self, pages: Sequence[Page], here: threading.Event) -> None:
        """Moves the pages, into the same blocks of the other cache."""
        for at in range(0, len(pages), self.shape.chunk):
            some = tuple(pages[at : at + self.shape.chunk])
            self.sender.store.wanted([page.key for page in some])
            self.sender.move(Transfers(saves=(PageTransfer(at, some),)))
        if not here.wait(SECONDS):
            raise RuntimeError("the pages did not come")
        self.receiver.move(Transfers(loads=(PageTransfer(0, tuple(pages)),)))
        self.receiver.endpoint.release(f"turn {self._turn}")

    @property
    def is_right(self) -> bool:
        """Whether the last pages that crossed are as they were."""
        blocks = torch.tensor(self._blocks[: self.shape.num_pages])
        mine, its = (end.cache.data[:, :, blocks] for end in (self.sender, self.receiver))
        return torch.equal(mine, its)


@contextmanager
def path(shape: Shape) -> Iterator[Path]:
    made = Path(shape)
    made.begin()
    try:
        yield made
    finally:
        made.close()


Way = Callable[[], Callable[[], object]]  # makes ready, and returns what is timed


def clocked(slow: Way, fast: Way, rounds: int) -> dict[str, dict[str, float]]:
    """How many times as fast the second one is, in interleaved rounds: by the clock, and by the processor time of this
    process, which other work on the machine disturbs less."""
    ways, seconds = {"slow": slow, "fast": fast}, {"slow": list[tuple[float, float]](), "fast": []}
    for turn in range(rounds + 1):
        for name in harness.rotated(list(ways), turn):
            timed = ways[name]()
            began, used = time.perf_counter(), time.process_time()
            timed()
            if turn:
                seconds[name].append((time.perf_counter() - began, time.process_time() - used))
    return {
        by: harness.ratio([each[n] for each in seconds["slow"]], [each[n] for each in seconds["fast"]])
        for n, by in enumerate(("clock", "processor"))
    }


def page_path(rounds: int, shape: Shape) -> dict[str, Any]:
    """The path's speed as a share of a copy's. AssertionError if pages did not come as they were."""
    source, target = (np.full(shape.num_bytes, letter, np.uint8) for letter in (1, 2))
    with path(shape) as made:
        of_a_copy = clocked(
            lambda: partial(np.copyto, target, source), lambda: partial(made.cross, *made.reserve()), rounds
        )
        assert made.is_right
    return {"bytes": shape.num_bytes, "page_bytes": shape.page_bytes, "of_a_copy": of_a_copy}


def link_rate(rounds: int, num_pages: int, page_bytes: int) -> float:
    """Bytes a second that the shared-memory transport writes, in the median."""
    sender, receiver = SharedMemoryTransport("prefill"), SharedMemoryTransport("decode")
    try:
        _, where = receiver.share("prefill", num_pages, page_bytes)
        link = sender.connect(where)
        content = np.ones((num_pages, page_bytes), np.uint8)
        pages = [(row.data, slot) for slot, row in enumerate(content)]
        found = harness.interleave(
            {"link": lambda: link.write(pages, time.monotonic() + SECONDS).result(SECONDS)}, rounds
        )
    finally:
        sender.close()
        receiver.close()
    return num_pages * page_bytes / statistics.median(found["link"])


# --- NIXL -------------------------------------------------------------------------------------------------------------


def nixl(rounds: int, sizes: Sequence[int], page_bytes: int) -> dict[str, Any]:
    """Our transport's speed as a share of that of NIXL alone, by size in bytes; {"not_measured": why} without NIXL.

    Alone: memory registered once, pages of the same size, the end awaited in a loop. Both write into memory of the same
    other process; it was touched, as the sources were."""
    try:
        ours = NixlTransport("bench")
    except ImportError as error:
        return {"not_measured": str(error)}
    here, there = get_context("spawn").Pipe()
    receiver = get_context("spawn").Process(target=_receive, args=(there, max(sizes) // page_bytes, page_bytes))
    receiver.start()
    try:
        if not here.poll(SECONDS):
            raise RuntimeError("the process that is written to did not begin")
        where, metadata, address = here.recv()
        link, bare = ours.connect(where), _Bare(metadata, address, max(sizes))
        found = {}
        for size in sizes:
            content = _touched(size).reshape(-1, page_bytes)
            pages = [(row.data, slot) for slot, row in enumerate(content)]

            def written(pages: Any = pages) -> None:
                link.write(pages, time.monotonic() + SECONDS).result(SECONDS)

            alone = partial(bare.write, size, page_bytes)
            found[str(size)] = clocked(lambda alone=alone: alone, lambda ours=written: ours, rounds)  # type: ignore[misc]
        return {"of_bare": found}
    finally:
        here.close()
        receiver.join(SECONDS)
        receiver.kill()
        ours.close()


class _Bare:
    """An agent of NIXL that writes from a memory of its own, registered once, to an address of another agent."""

    def __init__(self, metadata: bytes, address: int, num_bytes: int):
        self._agent, self._address = _agent("bare sender"), address
        self._source = _touched(num_bytes)
        self._agent.register_memory([(self._source.ctypes.data, num_bytes, 0, "")], "DRAM")
        self._remote = self._agent.add_remote_agent(metadata)

    def write(self, size: int, page_bytes: int) -> None:
        starts = range(0, size, page_bytes)
        local, remote = (
            self._agent.get_xfer_descs([(base + at, page_bytes, 0) for at in starts], "DRAM")
            for base in (self._source.ctypes.data, self._address)
        )
        handle = self._agent.initialize_xfer("WRITE", local, remote, self._remote)
        until, state = time.monotonic() + SECONDS, self._agent.transfer(handle)
        while state == "PROC":
            if time.monotonic() > until:
                raise RuntimeError("NIXL did not end")
            state = self._agent.check_xfer_state(handle)
        handle.release()
        if state != "DONE":
            raise RuntimeError(f"NIXL: {state}")


def _touched(num_bytes: int) -> NDArray[np.uint8]:
    """Memory as the transport has it, in huge pages and aligned: the kernel's copy is a third slower where source and
    target are not aligned alike."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    touched = np.frombuffer(memory, np.uint8)
    touched[:] = 1
    return touched


def _agent(name: str) -> Any:
    import nixl_cu12

    return nixl_cu12.nixl_agent(name, nixl_cu12.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))


def _receive(there: Any, num_pages: int, page_bytes: int) -> None:
    """The process that is written to. Ends when the other one closes its end of the pipe."""
    transport = NixlTransport("receiver")
    _, where = transport.share("bench", num_pages, page_bytes)
    agent, memory = _agent("bare receiver"), _touched(num_pages * page_bytes)
    registered = agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    there.send((where, agent.get_partial_agent_metadata(registered, True, ["UCX"]), memory.ctypes.data))
    while not there.poll(IDLE):
        agent.get_new_notifs()
    transport.close()
