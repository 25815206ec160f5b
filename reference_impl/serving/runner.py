"""The engine in a thread of its own, and the streams through which the event loop sees it.

The thread is the only one that touches the engine. What the event loop wants of it (start, abort) waits in a queue
until the step that runs is over; what a step yields is handed over with one wake-up per step, whatever the number of
streams.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from reference_impl.engine import StepResult
from reference_impl.interfaces import SamplingParams, TokenLogprobs
from reference_impl.llm import LLM, Generation

logger = logging.getLogger("inferlab.serving")


class Overloaded(Exception):
    """There are as many unfinished requests as are allowed."""


class Unavailable(Exception):
    """The engine takes no more requests: it is shutting down, or it has failed."""


@dataclass
class Piece:
    """What one sample got since the last time: text that is certain, and the tokens so far (text may lag behind)."""

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, later: Piece) -> None:
        self.text += later.text
        self.tokens += later.tokens
        self.logprobs += later.logprobs
        self.finish_reason = later.finish_reason


@dataclass(frozen=True)
class Usage:
    """Tokens of a finished answer."""

    prompt: int
    completion: int
    cached: int  # of the prompt's, those found in the prefix cache


class Stream:
    """The samples of one HTTP request, in the event loop: `async for pieces in stream`.

    Pieces that nobody took are merged, so a client that reads slowly costs no more memory than its answer is long.
    """

    def __init__(self, runner: Runner, num_samples: int):
        self._runner, self._unfinished = runner, num_samples
        self._waiting: dict[int, Piece] = {}
        self._awaited: asyncio.Future[None] | None = None  # by whoever iterates, where nothing is waiting for it
        self._failure: str | None = None
        self.num_samples, self.usage, self.generations = num_samples, Usage(0, 0, 0), list[Generation]()

    def put(self, piece: Piece) -> None:
        if piece.index in self._waiting:
            self._waiting[piece.index].add(piece)
        else:
            self._waiting[piece.index] = piece
        self._unfinished -= piece.finish_reason is not None
        self._wake()

    def fail(self, why: str) -> None:
        """The stream ends with Unavailable, after what it has got so far."""
        self._failure = why
        self._wake()

    def _wake(self) -> None:
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> list[Piece]:
        """The new pieces, at most one per sample. Raises Unavailable where the engine will not finish them."""
        while not self._waiting:
            if self._failure is not None:
                raise Unavailable(self._failure)
            if not self._unfinished:
                raise StopAsyncIteration
            self._awaited = asyncio.get_running_loop().create_future()
            await self._awaited
        pieces, self._waiting = list(self._waiting.values()), {}
        return pieces

    def close(self) -> None:
        """Whoever started a stream closes it, finished or not; what runs is aborted before the next step."""
        self._runner.close_stream(self)


@dataclass
class _Sample:
    generation: Generation
    stream: Stream
    index: int
    sent: int = 0  # tokens

    def piece(self) -> Piece:
        request = self.generation.request
        tokens = request.output_tokens[self.sent :]
        logprobs = request.logprobs[self.sent :] if request.logprobs else []
        self.sent += len(tokens)
        return Piece(self.index, self.generation.take(), tokens, logprobs, self.generation.finish_reason)


class Runner:
    """Runs an LLM's engine for the streams of one event loop.

    max_unfinished: samples that may be unfinished at once; more are refused with Overloaded.
    observe: called in the engine's thread after every step, with what it gave.
    """

    def __init__(self, llm: LLM, max_unfinished: int, observe: Callable[[StepResult], None] = lambda result: None):
        self.llm, self.max_unfinished, self.observe = llm, max_unfinished, observe
        self.num_unfinished = 0  # samples of open streams, as the event loop knows them
        self.failure: str | None = None
        self.draining = False
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._samples: dict[str, _Sample] = {}  # request id -> who is waiting; the engine thread's
        self._streams: set[Stream] = set()  # the event loop's
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    # --- called in the event loop ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Starts the thread; the event loop that calls is the one that gets the streams."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        return self.failure is None and not self.draining and self._thread.is_alive()

    async def start(
        self, request_id: str, prompts: Sequence[Sequence[int]], sampling: SamplingParams, **options: Any
    ) -> Stream:
        """A stream with sampling.n samples of each prompt: sample s of prompt p has the index p * n + s.

        Raises ValueError for what the engine refuses (then nothing was started), Overloaded, Unavailable.
        """
        self._check_available()
        count = len(prompts) * sampling.n
        if count > self.max_unfinished:  # trying again would not help
            raise ValueError(
                f"{len(prompts)} prompts with n={sampling.n}: this server takes {self.max_unfinished} samples"
            )
        if self.num_unfinished + count > self.max_unfinished:
            raise Overloaded(f"{self.num_unfinished} requests are unfinished, {self.max_unfinished} may be")
        assert self._loop is not None
        stream, started = Stream(self, count), self._loop.create_future()
        self.num_unfinished += count
        self._streams.add(stream)

        def answer(error: Exception | None) -> None:
            if not started.cancelled():
                started.set_result(None) if error is None else started.set_exception(error)

        def command() -> None:
            error = self._start(stream, request_id, prompts, sampling, options)
            self._in_loop(answer, error)

        self._commands.put(command)
        try:
            await started
        except BaseException:  # also when the client goes while it waits
            self.close_stream(stream)
            raise
        return stream

    def _check_available(self) -> None:
        if self.failure is not None:
            raise Unavailable(f"the engine has failed: {self.failure}")
        if self.draining:
            raise Unavailable("the server is shutting down")

    def close_stream(self, stream: Stream) -> None:
        if stream in self._streams:
            self._streams.remove(stream)
            self.num_unfinished -= stream.num_samples
            self._commands.put(lambda: self._leave(stream))

    def fail_streams(self, why: str) -> None:
        for stream in self._streams:
            stream.fail(why)

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def end(self, seconds: float = 10.0) -> None:
        """Ends the thread; waits that long for the step that runs."""
        self._commands.put(None)
        self._thread.join(seconds)

    # --- the engine's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._obey():
                if self.llm.engine.has_work():
                    self._step()
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            logger.exception("the engine has failed; nobody is served any more")
            self._in_loop(self.fail_streams, f"the engine has failed: {self.failure}")
            self._refuse_all()
        finally:
            self.llm.engine.close()

    def _obey(self) -> bool:
        """What was asked for meanwhile; waits for something where there is nothing to compute. False: the end."""
        while True:
            try:
                command = self._commands.get(block=not self.llm.engine.has_work())
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _refuse_all(self) -> None:
        """After a failure nobody may wait for an answer that does not come."""
        while (command := self._commands.get()) is not None:
            command()

    def _start(
        self,
        stream: Stream,
        request_id: str,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        options: dict[str, Any],
    ) -> Exception | None:
        if self.failure is not None:
            return Unavailable(f"the engine has failed: {self.failure}")
        try:
            for number, prompt in enumerate(prompts):
                name = request_id if len(prompts) == 1 else f"{request_id}-{number}"
                first = self.llm.start(prompt, sampling, request_id=name, **options)
                stream.generations.append(first)
                for s, sample in enumerate((first, *first.others)):
                    self._samples[sample.request.id] = _Sample(sample, stream, number * sampling.n + s)
        except ValueError as error:  # what was started is left when the stream is closed
            return error
        return None

    def _leave(self, stream: Stream) -> None:
        for first in stream.generations:
            for sample in (first, *first.others):
                self._samples.pop(sample.request.id, None)
            if self.failure is None:
                self.llm.leave(first)
        stream.generations.clear()

    def _step(self) -> None:
        result = self.llm.step()
        pieces = []
        for request_id in result.tokens:
            sample = self._samples.get(request_id)
            if sample is not None:
                piece = sample.piece()
                if piece.text or piece.tokens or piece.finish_reason:
                    pieces.append((sample.stream, piece))
                if piece.finish_reason is not None:
                    del self._samples[request_id]
                    sample.stream.usage = _usage(sample.stream)
        self.observe(result)
        self._in_loop(_hand_over, pieces)

    def _in_loop(self, call: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)


def _hand_over(pieces: list[tuple[Stream, Piece]]) -> None:
    for stream, piece in pieces:
        stream.put(piece)


def _usage(stream: Stream) -> Usage:
    firsts = [first.request for first in stream.generations]
    samples = [s.request for first in stream.generations for s in (first, *first.others)]
    return Usage(
        sum(r.num_prompt_tokens for r in firsts),
        sum(len(r.output_tokens) for r in samples),
        sum(min(r.num_cached_tokens, r.num_prompt_tokens) for r in firsts),
    )
