"""The engine as the event loop sees it: requests go to it, streams come back, and nothing here waits for a step.

The engine runs elsewhere, in a process of its own (process.py) or in a thread (worker.py). Commands go to it in order,
and it runs them between two steps; what a step gave comes back as one message, whatever the number of streams:

    there  ("start", number, request_id, prompts, sampling, options)    ("leave", number)    ("ask", number, name, args)
    back   ("step", rows, usages)    ("answer", number, value, refusal)    ("failed", why)
    of a supervised engine (supervision.py) also    ("restarting", how)    ("restarted",)
    of a fleet (fleet.py) also    ("lost", numbers, why, again)    one of its engines, with these streams

number: of a command that is answered, and of the stream that it starts; the answer to "start" has the seed of each
prompt. None ends the engine.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tokenizers import Tokenizer

from reference_impl.interfaces import SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from reference_impl.models.embedding_defaults import EmbeddingDefaults

logger = logging.getLogger("inferlab.serving")
Message = tuple[Any, ...]


class Overloaded(Exception):
    """There are as many unfinished requests as are allowed."""


class Unavailable(Exception):
    """The engine accepts no more requests: it is shutting down, or it has failed."""


class Failed(Unavailable):
    """This request has failed (`Request.error`); others go on."""


class Restarting(Unavailable):
    """The engine accepts no requests now, and may again in some seconds."""


@dataclass
class Piece:
    """What one sample got since its last piece: text that is certain, and tokens (text may lag behind)."""

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    embedding: list[float] | None = None  # of a request with pooling, when it is finished
    stop_reason: str | int | None = None  # see `CompletionOutput`
    cut_by: str | None = None  # see `RequestOutput`
    prompt_logprobs: list[TokenLogprobs] | None = None  # in its first piece, of the prompt's second token and the rest

    error: str | None = None  # see `Request`

    def add(self, later: Piece) -> None:
        self.text += later.text
        self.tokens += later.tokens
        self.logprobs += later.logprobs
        self.finish_reason, self.embedding = later.finish_reason, later.embedding
        self.stop_reason, self.cut_by = later.stop_reason, later.cut_by


@dataclass(frozen=True)
class Usage:
    """Numbers of tokens of a finished answer."""

    prompt: int
    completion: int
    cached: int  # of the prompt's, those found in the prefix cache


class Prompts(Protocol):
    """Makes tokens of what clients send: an LLM, or its tokenizer alone, without the engine."""

    tokenizer: Tokenizer | None

    def encode(self, prompt: str | Sequence[int]) -> list[int]: ...

    def tokens_of(self, text: str, **options: Any) -> list[int]: ...

    def chat_prompt(self, messages: Sequence[Any], tools: Sequence[Any] | None, **options: Any) -> list[int]: ...


class EngineHost(Protocol):
    """The process or thread where the engine runs. begin: from now on `receive` is called in the event loop with what
    comes back. acceptance: see EngineConfig. sampling_defaults, embedding_defaults: see LLM."""

    prompts: Prompts
    vocab_size: int
    max_model_len: int
    acceptance: str
    sampling_defaults: dict[str, Any]
    embedding_defaults: EmbeddingDefaults

    @property
    def is_alive(self) -> bool:
        """Whether the engine answers."""
        ...

    async def begin(self, receive: Callable[[Message], None]) -> None: ...

    def send(self, command: Message) -> None:
        """Sends a command, without waiting."""
        ...

    async def end(self, seconds: float) -> None:
        """Ends the engine; waits at most this long for the running step."""
        ...

    def kill(self) -> None:
        """Ends its process at once; then it is lost, as if it had ended by itself."""
        ...


class Stream:
    """The samples of one HTTP request, in the event loop: `async for pieces in stream`.

    Pieces not yet taken are merged, so a client that reads slowly costs no more memory than its answer is long.
    """

    def __init__(self, runner: Runner, number: int, num_samples: int):
        self._runner, self.number, self._unfinished = runner, number, num_samples
        self._waiting: dict[int, Piece] = {}
        self._awaited: asyncio.Future[None] | None = None  # by the iterating task, when no piece is ready
        self._failure: Unavailable | None = None
        self.num_samples, self.usage = num_samples, Usage(0, 0, 0)

    def put(self, piece: Piece) -> None:
        if piece.index in self._waiting:
            self._waiting[piece.index].add(piece)
        else:
            self._waiting[piece.index] = piece
        self._unfinished -= piece.finish_reason is not None
        self._wake()

    def fail(self, why: Unavailable) -> None:
        """Ends the stream with this exception, after what it has got so far."""
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
            if not self._unfinished:
                raise StopAsyncIteration
            if self._failure is not None:
                raise self._failure
            self._awaited = asyncio.get_running_loop().create_future()
            await self._awaited
        pieces, self._waiting = list(self._waiting.values()), {}
        return pieces

    def close(self) -> None:
        """Aborts running samples before the next step. The caller closes every stream, finished or not."""
        self._runner.close_stream(self)


class Runner:
    """The streams of one event loop over one engine. Everything here is called in the event loop.

    max_unfinished: samples that may be unfinished at once; more are refused with Overloaded.
    """

    def __init__(self, engine: EngineHost, max_unfinished: int):
        self.engine, self.max_unfinished = engine, max_unfinished
        self.num_unfinished = 0  # samples of open streams
        self.failure: str | None = None
        self.restarting: str | None = None  # which try, and why; None while the engine serves, or has failed for good
        self.num_restarts = 0  # tries that have begun
        self.draining = False
        self._begun = False
        self._numbers = itertools.count()
        self._streams: dict[int, Stream] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}  # that are awaited

    async def begin(self) -> None:
        await self.engine.begin(self._receive)
        self._begun = True

    async def end(self, seconds: float = 10.0) -> None:
        self.draining = True
        await self.engine.end(seconds)

    @property
    def is_ready(self) -> bool:
        return self._begun and self.failure is None and self.restarting is None and not self.draining

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    async def start(
        self, request_id: str, prompts: Sequence[Sequence[int]], sampling: SamplingParams, **options: Any
    ) -> Stream:
        """A stream with sampling.n samples of each prompt: sample s of prompt p has the index p * n + s.

        Raises ValueError for what the engine refuses (then nothing was started), Overloaded, Unavailable.
        """
        if self.draining:
            raise Unavailable("the server is shutting down")
        count = len(prompts) * sampling.n
        if count > self.max_unfinished:  # trying again would not help
            raise ValueError(
                f"{len(prompts)} prompts with n={sampling.n}: this server takes {self.max_unfinished} samples"
            )
        if self.num_unfinished + count > self.max_unfinished:
            raise Overloaded(f"{self.num_unfinished} requests are unfinished, {self.max_unfinished} may be")
        stream = Stream(self, next(self._numbers), count)
        self._streams[stream.number] = stream
        self.num_unfinished += count
        try:
            await self._command("start", stream.number, request_id, prompts, sampling, options)
        except BaseException:  # also when the client leaves while it waits
            self.close_stream(stream)
            raise
        return stream

    def close_stream(self, stream: Stream) -> None:
        if self._streams.pop(stream.number, None) is not None:
            self.num_unfinished -= stream.num_samples
            self.engine.send(("leave", stream.number))

    async def ask(self, name: str, *arguments: Any) -> Any:
        """The answer of `questions.Questions`, between two steps. ValueError where it refuses, Unavailable."""
        return await self._command("ask", next(self._numbers), name, arguments)

    async def _command(self, kind: str, number: int, *arguments: Any) -> Any:
        if self.restarting is not None:
            raise Restarting(f"the engine is {self.restarting}")
        if self.failure is not None and (kind == "start" or not self.engine.is_alive):
            raise Unavailable(f"the engine has failed: {self.failure}")
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self.engine.send((kind, number, *arguments))
        try:
            return await answer
        finally:
            del self._answers[number]

    def fail_streams(self, why: str) -> None:
        self._fail_streams(Unavailable(why))

    def _fail_streams(self, why: Unavailable) -> None:
        for stream in self._streams.values():
            stream.fail(why)

    def _fail_all(self, why: Unavailable) -> None:
        """Ends all streams and open questions with this error: the engine will not answer them."""
        self._fail_streams(why)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(why)

    def metrics(self) -> bytes:
        """What is known without the engine, in Prometheus' text format: restarts, and whether it is up."""
        return (
            "# HELP inferlab:engine_restarts_total Times that a lost engine was started again\n"
            "# TYPE inferlab:engine_restarts_total counter\n"
            f"inferlab:engine_restarts_total {float(self.num_restarts)}\n"
            "# HELP inferlab:engine_up 1 while the engine serves, 0 while it restarts and when it has failed\n"
            "# TYPE inferlab:engine_up gauge\n"
            f"inferlab:engine_up {float(self._begun and self.failure is None and self.restarting is None)}\n"
        ).encode()

    # --- what the engine says -------------------------------------------------------------------------------------

    def _receive(self, message: Message) -> None:
        match message:
            case "step", rows, usages:
                for number, used in usages:
                    if number in self._streams:
                        self._streams[number].usage = Usage(*used)
                for number, *row in rows:
                    if number in self._streams:  # or it was closed while the step ran
                        piece, stream = Piece(*row), self._streams[number]
                        if piece.error is None:
                            stream.put(piece)
                        else:
                            stream.fail(Failed(piece.error))
            case "answer", number, value, refusal:
                answer = self._answers.get(number)
                if answer is not None and not answer.done():
                    answer.set_result(value) if refusal is None else answer.set_exception(ValueError(refusal))
            case "failed", why:
                logger.error("the engine has failed and serves no more requests: %s", why)
                self.failure, self.restarting = self.failure or why, None
                self._fail_all(Unavailable(f"the engine has failed: {why}"))
            case "restarting", how:
                self.restarting = how
                self.num_restarts += 1
                self._fail_all(Restarting(f"the engine is {how}; what it had begun is lost: send the request again"))
            case ("restarted",):
                self.restarting = None
            case "lost", numbers, why, again:
                self.num_restarts += again
                error = Restarting(f"{why}; what it had begun is lost: send the request again")
                for number in numbers:
                    if number in self._streams:
                        self._streams[number].fail(error)
                    answer = self._answers.get(number)
                    if answer is not None and not answer.done():
                        answer.set_exception(error)
