"""One request over HTTP to an OpenAI-compatible server: what came back, and when.

A request has failed unless its stream came to its end with at least one token: to [DONE], or where a server sends none,
to the end of the body after a finish_reason. The kind of failure is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from reference_impl.bench.load.sse import EventStream
from reference_impl.observe.metrics import RequestMetrics
from reference_impl.simulation.workloads import PAGE_TOKENS, WorkloadRequest, tokens_of

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
DONE = b"[DONE]"
LONGEST_RETRY = 60.0  # seconds; a longer Retry-After counts as this
REST_SECONDS = 1.0  # for the end of a body whose answer has ended


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a request. Times are seconds on one clock. token_times: when each chunk with tokens arrived; one
    time for a chunk of several.

    num_output_tokens: from the server's usage, or without usage the number of chunks with tokens.
    """

    id: str
    planned: float  # when it was to be sent
    sent: float
    ended: float
    asked_prompt_tokens: int
    asked_output_tokens: int
    token_times: tuple[float, ...] = ()
    num_output_tokens: int = 0
    num_prompt_tokens: int | None = None  # as the server counts them
    has_usage: bool = False
    has_done: bool = True  # the stream ended with [DONE]
    error: str | None = None  # its kind
    detail: str = ""
    retry_after: float = 0.0  # seconds, from the server's Retry-After

    def metrics(self, since: float) -> RequestMetrics:
        """Latencies from `since` (planned or sent). A failed request has none, so that it meets no objective.

        TPOT divides by the tokens, not by the chunks: (last - first) / (tokens - 1).
        """
        if self.error is not None or not self.token_times:
            return RequestMetrics.of(since, ())
        by_chunk = RequestMetrics.of(since, self.token_times)
        gaps = self.num_output_tokens - 1
        tpot = (self.token_times[-1] - self.token_times[0]) / gaps if gaps > 0 else None
        return replace(by_chunk, num_output_tokens=self.num_output_tokens, tpot=tpot)


@dataclass(frozen=True)
class Form:
    """The form of requests that a server accepts: not every server accepts every field."""

    chat: bool = False  # /v1/chat/completions, text only
    token_ids: bool = True  # prompts as token ids; else as single letters with spaces between them
    ignore_eos: bool = True  # vLLM's addition: the output has the requested length whatever the model generates
    usage: bool = True  # stream_options: the server is to count the tokens

    def __str__(self) -> str:
        where = "chat completions" if self.chat else "completions"
        prompt = "token ids" if self.token_ids else "text"
        end = "ignore_eos" if self.ignore_eos else "ends where the model ends"
        return f"{where}, prompts as {prompt}, {end}" + ("" if self.usage else ", usage not asked for")


class Cut:
    """The requests, the longer ones cut to these numbers of tokens. An iterator: it can be read once.

    cut, with_images: the ids of those that were cut, and of those with images.
    """

    def __init__(self, requests: Iterable[WorkloadRequest], max_prompt: int | None, max_output: int | None):
        self.requests, self.max_prompt, self.max_output = iter(requests), max_prompt, max_output
        self.cut: set[str] = set()
        self.with_images: set[str] = set()

    def __iter__(self) -> Cut:
        return self

    def __next__(self) -> WorkloadRequest:
        request = next(self.requests)
        if request.images:
            self.with_images.add(request.id)
        prompt = min(request.num_prompt_tokens, self.max_prompt or request.num_prompt_tokens)
        output = min(request.num_output_tokens, self.max_output or request.num_output_tokens)
        if (prompt, output) == (request.num_prompt_tokens, request.num_output_tokens):
            return request
        self.cut.add(request.id)
        pages = request.pages[: prompt // PAGE_TOKENS]
        return replace(request, num_prompt_tokens=prompt, num_output_tokens=output, pages=pages)


@dataclass
class Client:
    """Sends requests of a workload. vocab_size: token ids are below it. timeout: seconds for a whole request.

    salt: 64 bits that every prompt depends on. With another salt no prompt begins as before, and within the load they
    share as much as before: a second run must not find the first one's prompts in the server's prefix cache.
    """

    http: httpx.AsyncClient
    base_url: str
    model: str
    form: Form = Form()
    vocab_size: int = 1024
    temperature: float = 0.0
    timeout: float = 600.0
    salt: int = 0

    def body(self, request: WorkloadRequest) -> bytes:
        """The JSON to send. It is made before the moment of sending, so that making it delays nothing."""
        salted = replace(request, id=f"{self.salt}:{request.id}", pages=tuple(p ^ self.salt for p in request.pages))
        prompt: list[int] | str
        if self.form.token_ids:
            prompt = tokens_of(salted, self.vocab_size)
        else:
            # A letter after a space is one token in the byte-pair vocabularies in use; the server's count is reported.
            prompt = " ".join(LETTERS[token] for token in tokens_of(salted, len(LETTERS), low=0))
        content: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "max_tokens": request.num_output_tokens,
            "temperature": self.temperature,
        }
        content |= {"messages": [{"role": "user", "content": prompt}]} if self.form.chat else {"prompt": prompt}
        content |= {"ignore_eos": True} if self.form.ignore_eos else {}
        content |= {"stream_options": {"include_usage": True}} if self.form.usage else {}
        return json.dumps(content).encode()

    async def send(self, request: WorkloadRequest, body: bytes, planned: float) -> Outcome:
        """Sends a request. It never raises for what the server or the network does: that is an outcome."""
        now = asyncio.get_running_loop().time
        answer = _Answer()
        sent = now()
        error, detail, retry_after = None, "", 0.0
        try:
            async with asyncio.timeout(self.timeout):
                await self._exchange(body, answer)
            error, detail = answer.verdict()
        except TimeoutError:
            late = "timeout", f"no end after {self.timeout:g} s"
            error, detail = late if answer.done_at is None else answer.verdict()
        except httpx.ConnectError as failure:
            error, detail = "not connected", words(failure)
        except (httpx.NetworkError, httpx.RemoteProtocolError) as failure:
            error, detail = "connection cut", words(failure)
        except httpx.RequestError as failure:
            error, detail = "request failed", words(failure)
        except _Failed as failure:
            error, detail, retry_after = failure.kind, failure.detail, failure.retry_after
        times, tokens = answer.tokens()
        return Outcome(
            request.id, planned, sent, answer.done_at or now(), request.num_prompt_tokens, request.num_output_tokens,
            times, tokens, answer.num_prompt_tokens, answer.num_output_tokens is not None, answer.done_at is not None,
            error, detail, retry_after,
        )  # fmt: skip

    async def _exchange(self, body: bytes, answer: _Answer) -> None:
        now = asyncio.get_running_loop().time
        path = "chat/completions" if self.form.chat else "completions"
        headers = {"content-type": "application/json", "accept": "text/event-stream"}
        async with self.http.stream("POST", f"{self.base_url}/v1/{path}", content=body, headers=headers) as response:
            if response.status_code != 200:
                said = (await response.aread()).decode(errors="replace")
                raise _Failed(f"HTTP {response.status_code}", said[:500], _seconds(response.headers.get("retry-after")))
            kind = response.headers.get("content-type", "")
            if not kind.lower().startswith("text/event-stream"):
                raise _Failed("not a stream", f"content-type {kind!r}")
            events, pieces = EventStream(), response.aiter_raw()
            async for chunk in pieces:
                arrived = now()
                for data in _feed(events, chunk):
                    answer.take(data, arrived)
                if answer.done_at is not None:
                    break
            # Read to the end of the body, so that the connection can be used again; if it does not come, do not wait.
            with contextlib.suppress(TimeoutError, httpx.NetworkError, httpx.RemoteProtocolError):
                async with asyncio.timeout(REST_SECONDS):
                    async for _ in pieces:
                        pass


class _Failed(Exception):
    def __init__(self, kind: str, detail: str, retry_after: float = 0.0):
        self.kind, self.detail, self.retry_after = kind, detail, retry_after


def _seconds(retry_after: str | None) -> float:
    """The seconds of a Retry-After in whole seconds; one that gives a date counts as absent."""
    return min(float(retry_after), LONGEST_RETRY) if retry_after is not None and retry_after.isdecimal() else 0.0


def _feed(events: EventStream, chunk: bytes) -> list[bytes]:
    try:
        return list(events.feed(chunk))
    except ValueError as error:
        raise _Failed("bad event", str(error)) from None


def words(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}"


@dataclass
class _Answer:
    """What has arrived of an answer so far."""

    times: list[float] = field(default_factory=list)
    end: float | None = None  # arrival of a chunk that ends the answer and has no text
    num_output_tokens: int | None = None
    num_prompt_tokens: int | None = None
    done_at: float | None = None
    finished: bool = False  # a finish_reason came

    def take(self, data: bytes, arrived: float) -> None:
        if self.done_at is not None:
            raise _Failed("bad event", "an event after [DONE]")
        if data == DONE:
            self.done_at = arrived
            return
        try:
            content = json.loads(data)  # of bytes: bad UTF-8 is an error too
        except ValueError as error:
            raise _Failed("bad event", f"{error}: {data[:200]!r}") from None
        if not isinstance(content, dict):
            raise _Failed("bad event", f"expected an object: {data[:200]!r}")
        if content.get("error"):
            raise _Failed("error in the stream", json.dumps(content["error"])[:500])
        try:
            self._usage(content.get("usage"))
            for choice in content.get("choices") or ():
                self._choice(choice, arrived)
        except (AttributeError, TypeError, ValueError) as error:
            raise _Failed("bad event", f"{error}: {data[:200]!r}") from None

    def _usage(self, usage: dict[str, Any] | None) -> None:
        if usage:
            self.num_output_tokens = int(usage["completion_tokens"]) if "completion_tokens" in usage else None
            self.num_prompt_tokens = int(usage["prompt_tokens"]) if "prompt_tokens" in usage else None

    def _choice(self, choice: dict[str, Any], arrived: float) -> None:
        """Notes a choice. A chunk without text has a token too: one that does not complete a character, or a special
        one.

        The chunk that opens a chat has none, and the one that ends an answer may have none: see `tokens`.
        """
        delta = choice.get("delta") or {}
        self.finished |= choice.get("finish_reason") is not None
        text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
        if text or (choice.get("finish_reason") is None and "role" not in delta):
            self.times.append(arrived)
        elif choice.get("finish_reason") is not None:
            self.end = arrived

    def tokens(self) -> tuple[tuple[float, ...], int]:
        """When tokens came, and how many. An empty last chunk is a token where the usage counts one more than came."""
        times = list(self.times)
        if self.end is not None and self.num_output_tokens is not None and len(times) < self.num_output_tokens:
            times.append(self.end)
        return tuple(times), len(times) if self.num_output_tokens is None else self.num_output_tokens

    def verdict(self) -> tuple[str | None, str]:
        """What is wrong with an answer whose body has ended: the kind of failure (or None), and details."""
        times, _ = self.tokens()
        if self.done_at is None and not self.finished:
            return "ended without [DONE]", f"nor a finish_reason, after {len(times)} chunks with tokens"
        if not times:
            return "no tokens", "an end and no token before it"
        return None, ""
