"""A fleet of engines for a script or a notebook, without HTTP: `FleetLLM(course_model("target"), prefill=1, decode=1)`.

An `LLM` has its engine in this process, where it can be looked at; here the engines are processes, and an event loop in
a thread of this one holds their router.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from reference_impl.core.llm import RequestOutput, as_list
from reference_impl.core.prompts import Prompt
from reference_impl.features.chat.prompts import ChatEncoder
from reference_impl.interfaces import SamplingParams
from reference_impl.serving.engines import make_engines
from reference_impl.serving.runner import Piece, Runner

SHUTDOWN_SECONDS = 5.0


class FleetLLM:
    """Engines of one model, each in a process of its own. Options and errors: those of `make_engines`. Close it, or use
    it in a `with`; its processes end with this one in any case."""

    def __init__(self, model: str | Path, **options: Any):
        host = make_engines(Path(model), ChatEncoder(Path(model)), **options)
        self.prompts, self._names = host.prompts, itertools.count()
        self._runner = Runner(host, max_unfinished=1 << 30)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fleet", daemon=True)
        self._thread.start()
        self._run(self._runner.begin())

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling: SamplingParams | None = None
    ) -> list[RequestOutput] | list[list[RequestOutput]]:
        """Runs all prompts together; the results are in their order. With sampling.n > 1 a result is the list of a
        prompt's samples. ValueError for what an engine refuses; `Unavailable` where no engine answers any more."""
        sampling = sampling or SamplingParams()
        tokens = [self.prompts.encode(prompt) for prompt in as_list(prompts)]

        async def all_of_them() -> list[list[RequestOutput]]:
            return await asyncio.gather(*(self._answer(each, sampling) for each in tokens))

        found = self._run(all_of_them())
        return [samples[0] for samples in found] if sampling.n == 1 else found

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[str]:
        """Yields pieces of text as they become certain, of one sample. Leaving early aborts it."""
        pieces = self._pieces(self._name(), self.prompts.encode(prompt), sampling or SamplingParams())
        try:
            while True:
                try:
                    piece = self._run(anext(pieces))
                except StopAsyncIteration:
                    return
                if piece.text:
                    yield piece.text
        finally:
            self._run(pieces.aclose())

    def status(self) -> dict[str, Any]:
        """What the engines do now: {"engines": the status of each, None while it does not serve, "roles": of each}."""
        found: dict[str, Any] = self._run(self._runner.ask("status", 100, 1.0, 1.0))
        return found

    def _name(self) -> str:
        return f"fleet-{next(self._names)}"

    async def _pieces(self, name: str, prompt: Sequence[int], sampling: SamplingParams) -> AsyncGenerator[Piece, None]:
        stream = await self._runner.start(name, [prompt], sampling)
        try:
            async for pieces in stream:
                for piece in pieces:
                    yield piece
        finally:
            stream.close()

    async def _answer(self, prompt: Sequence[int], sampling: SamplingParams) -> list[RequestOutput]:
        name, samples = self._name(), [Piece(index) for index in range(sampling.n)]
        async for piece in self._pieces(name, prompt, sampling):
            samples[piece.index].add(piece)
        return [
            RequestOutput(
                name if sample.index == 0 else f"{name}/{sample.index}", list(prompt), sample.tokens, sample.text,
                sample.finish_reason or "abort", sample.logprobs,
            )
            for sample in samples
        ]  # fmt: skip

    def close(self) -> None:
        """Ends the engines. Idempotent."""
        if self._thread.is_alive():
            self._run(self._runner.end(SHUTDOWN_SECONDS))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> FleetLLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, what: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(_awaited(what), self._loop).result()


async def _awaited(what: Any) -> Any:
    return await what
