"""A whole load: probe what the server accepts, warm it up, send, collect."""

from __future__ import annotations

import asyncio
import datetime
import os
import platform
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import httpx
from rich.console import Console

from reference_impl.bench.load.client import Client, Cut, Outcome
from reference_impl.bench.load.loop import send_all
from reference_impl.bench.load.probe import ServerError, choose_form, connect, first_model, forms
from reference_impl.simulation.workloads import ClosedLoop, WorkloadRequest, workload

WARMUP_IN_FLIGHT = 4


@dataclass(frozen=True)
class Load:
    """What to send where. workload: a name, a .yaml or a .jsonl file.

    rate: requests per second, in place of the workload's own. arrivals: poisson, bursty, diurnal; None: its own.
    concurrency: users of a closed loop, who think for `think` seconds on average; with a rate or arrivals, which make
    an open loop, how many requests may be in flight.
    salt: see Client; None draws one.
    """

    base_url: str = "http://127.0.0.1:8000"  # without /v1
    workload: str = "chat"
    rate: float | None = None
    arrivals: str | None = None
    concurrency: int | None = None
    think: float = 0.0
    num_requests: int = 200
    num_warmup: int = 8
    seed: int = 0
    model: str | None = None  # None: the first that the server lists
    chat: bool = False  # /v1/chat/completions
    text: bool = False  # prompts as text, also where the server takes token ids
    vocab_size: int = 1024
    max_prompt: int | None = None
    max_output: int | None = None
    temperature: float = 0.0
    timeout: float = 600.0
    salt: int | None = None

    @property
    def is_closed(self) -> bool:
        return self.concurrency is not None and self.rate is None and self.arrivals is None

    @property
    def loop(self) -> str:
        """The kind of loop, in words."""
        if self.is_closed:
            return f"closed loop, {self.concurrency} users" + (
                f", {self.think:g} s between requests" if self.think else ""
            )
        rate = "its own rate" if self.rate is None else f"{self.rate:g} requests/s"
        limit = "" if self.concurrency is None else f", at most {self.concurrency} in flight"
        return f"{self.arrivals or 'its own'} arrivals, {rate}{limit}"

    def requests(self) -> Cut:
        """The workload's requests, endless if it is. Raises ValueError where the workload has no such rate or
        arrivals."""
        arrivals: str | ClosedLoop | None = self.arrivals
        if self.is_closed and self.concurrency:
            arrivals = ClosedLoop(num_users=self.concurrency, think=self.think)
        stream = workload(self.workload, seed=self.seed, rate=self.rate, arrivals=arrivals)
        return Cut(stream, self.max_prompt, self.max_output)

    def run(self, note: Callable[[Outcome], None], api_key: str | None = None) -> dict[str, Any]:
        """Sends everything; `note` gets each outcome that counts. Returns how the load was made.

        Ctrl-C ends it: outcomes until then count, and `stopped` says how many requests were under way and for how
        long the first of them had been. KeyboardInterrupt where nothing was sent yet that counts.
        ServerError where the server cannot be used, ValueError where the workload cannot be sent.
        """
        try:
            return asyncio.run(self._run(note, api_key))
        except ExceptionGroup as group:  # of the tasks of a loop, which all end with the first that fails
            first: BaseException = group
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            raise first from None

    async def _run(self, note: Callable[[Outcome], None], api_key: str | None) -> dict[str, Any]:
        about, requests = stamp(), self.requests()
        # A stream may take long until its first request: it is read before the clock starts.
        head = list(islice(requests, max(1, self.num_warmup)))
        num_cut = num_with_images = 0
        under_way: dict[str, float] = {}
        stopped: dict[str, Any] | None = None

        def counted(outcome: Outcome) -> None:
            nonlocal num_cut, num_with_images
            num_cut += outcome.id in requests.cut
            num_with_images += outcome.id in requests.with_images
            note(outcome)

        salt = secrets.randbits(64) if self.salt is None else self.salt
        async with connect(api_key) as http:
            client = Client(
                http,
                self.base_url,
                self.model or await first_model(http, self.base_url),
                vocab_size=self.vocab_size,
                temperature=self.temperature,
                timeout=self.timeout,
                salt=salt,
            )
            refused = await choose_form(client, forms(self.chat, self.text))
            failed = await self._warm_up(client, head[: self.num_warmup])
            at_most = None if self.is_closed else self.concurrency
            try:
                await send_all(chain(head, requests), self.num_requests, client, counted, at_most, under_way)
            except asyncio.CancelledError:  # Ctrl-C: asyncio.run cancels, and raises nothing if this returns
                now = asyncio.get_running_loop().time()
                longest = now - min(under_way.values(), default=now)
                stopped = {"of": self.num_requests, "under_way": len(under_way), "longest_seconds": longest}
        return {
            "loop": self.loop, "form": str(client.form), "refused_forms": refused, "model": client.model,
            "salt": salt, "num_cut": num_cut, "num_with_images": num_with_images, "stopped": stopped,
            "warmup": {"requests": len(head[: self.num_warmup]), "failed": failed}, "stamp": about,
        }  # fmt: skip

    async def _warm_up(self, client: Client, requests: Sequence[WorkloadRequest]) -> int:
        """Sends the first requests of the load with other prompts, so that none of the load's is in a prefix cache.

        Returns how many failed. Raises ServerError where all did.
        """
        outcomes: list[Outcome] = []
        now = [replace(r, arrival=0.0, after=None, think=0.0) for r in requests]
        other = replace(client, salt=client.salt ^ 1)
        await send_all(now, len(now), other, outcomes.append, WARMUP_IN_FLIGHT)
        failed = [o for o in outcomes if o.error is not None]
        if failed and len(failed) == len(outcomes):
            raise ServerError(
                f"all {len(failed)} warm-up requests failed, the first: {failed[0].error}: {failed[0].detail}"
            )
        return len(failed)


def watched(load: Load, api_key: str | None, console: Console) -> tuple[list[Outcome], dict[str, Any]]:
    """Runs the load under a line that shows its progress."""
    outcomes: list[Outcome] = []
    failed = 0
    with console.status("warming up") as status:

        def note(outcome: Outcome) -> None:
            nonlocal failed
            outcomes.append(outcome)
            failed += outcome.error is not None
            status.update(f"{len(outcomes)} of {load.num_requests} requests, {failed} failed")

        return outcomes, load.run(note, api_key)


def stamp() -> dict[str, Any]:
    """Date, machine and versions of the client; nothing is known of the server's."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cores": os.cpu_count(),
        "load_average_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "httpx": httpx.__version__,
    }
