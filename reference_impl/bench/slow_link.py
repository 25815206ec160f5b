"""A transport for pages that is slow on purpose: it sleeps by the bytes that it has written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from reference_impl.features.disaggregation.transports.interface import Link, PageMemory, Transport


class SlowTransport:
    """Another transport, whose links write no faster than so many bytes a second."""

    def __init__(self, transport: Transport, rate: float):
        self._transport, self.rate, self.name = transport, rate, transport.name

    def share(self, peer: str, num_slots: int, slot_bytes: int) -> tuple[PageMemory, bytes]:
        return self._transport.share(peer, num_slots, slot_bytes)

    def connect(self, description: bytes) -> Link:
        return _SlowLink(self._transport.connect(description), self.rate)

    def cut_off(self, peer: str) -> None:
        self._transport.cut_off(peer)

    def close(self) -> None:
        self._transport.close()


class _SlowLink:
    def __init__(self, link: Link, rate: float):
        self._link, self._rate, self._free_at = link, rate, 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="slow link")  # one: writes are done one by one

    def write(self, pages: Sequence[tuple[memoryview, int]], deadline: float) -> Future[None]:
        return self._thread.submit(self._write, pages, deadline)

    def _write(self, pages: Sequence[tuple[memoryview, int]], deadline: float) -> None:
        begun = max(time.monotonic(), self._free_at)  # a link that was awake too long makes up for it
        self._link.write(pages, deadline).result()
        self._free_at = begun + sum(len(content) for content, _ in pages) / self._rate
        time.sleep(max(0.0, self._free_at - time.monotonic()))

    def close(self) -> None:
        self._link.close()
        self._thread.shutdown()
