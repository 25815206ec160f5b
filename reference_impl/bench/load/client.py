"""One request over HTTP to an OpenAI-compatible server: what came back, and when.

A request has failed unless its stream ended with [DONE] after at least one token; the kind of failure is kept.
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
from reference_impl.metrics import RequestMetrics
from reference_impl.workloads import PAGE_TOKENS, WorkloadRequest, tokens_of

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
DONE = b"[DONE]"
LONGEST_RETRY = 60.0  # seconds; who asks for more than that is not waited for any longer


@dataclass(frozen=True, slots=True)
class Outcome:
    """Times are seconds on one clock. token_times: when each chunk with tokens arrived; of several tokens, one time.

    num_output_tokens: what the server's usage says, or where it says nothing the number of chunks with tokens.
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
    error: str | None = None  # its kind
    detail: str = ""
    retry_after: float = 0.0  # seconds that the server asked for with its refusal

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
    """How requests are put to this server, since not every one takes everything."""

    chat: bool = False  # /v1/chat/completions, text only
    token_ids: bool = True  # prompts as token ids; else as single letters with spaces between them
    ignore_eos: bool = True  # vLLM's addition: the output has the asked length whatever the model says

    def __str__(self) -> str:
        where = "chat completions" if self.chat else "completions"
        prompt = "token ids" if self.token_ids else "text"
        return f"{where}, prompts as {prompt}, {'ignore_eos' if self.ignore_eos else 'ends where the model ends'}"


class ServerError(Exception):
    """The server cannot be used for a load; the message says why."""


class Cut:
    """The requests, the longer ones cut to so many tokens. cut: the ids of those. An iterator: to be read once."""

    def __init__(self, requests: Iterable[WorkloadRequest], max_prompt: int | None, max_output: int | None):
        self.requests, self.max_prompt, self.max_output = iter(requests), max_prompt, max_output
        self.cut: set[str] = set()

    def __iter__(self) -> Cut:
        return self

    def __next__(self) -> WorkloadRequest:
        request = next(self.requests)
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

    salt: 64 bits that every prompt depends on. With another one no prompt begins like before, and within the load
    they share what they shared: a second run must not find the first one's prompts in the server's prefix cache.
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
        """The JSON to send. Made before the moment of sending, so that making it delays nothing."""
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
            "stream_options": {"include_usage": True},
            "max_tokens": request.num_output_tokens,
            "temperature": self.temperature,
        }
        content |= {"messages": [{"role": "user", "content": prompt}]} if self.form.chat else {"prompt": prompt}
        content |= {"ignore_eos": True} if self.form.ignore_eos else {}
        return json.dumps(content).encode()

    async def send(self, request: WorkloadRequest, body: bytes, planned: float) -> Outcome:
        """Never raises for what the server or the network does: that is an outcome."""
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
            error, detail = "not connected", _words(failure)
        except (httpx.NetworkError, httpx.RemoteProtocolError) as failure:
            error, detail = "connection cut", _words(failure)
        except httpx.RequestError as failure:
            error, detail = "request failed", _words(failure)
        except _Failed as failure:
            error, detail, retry_after = failure.kind, failure.detail, failure.retry_after
        times, tokens = answer.tokens()
        return Outcome(
            request.id, planned, sent, answer.done_at or now(), request.num_prompt_tokens, request.num_output_tokens,
            times, tokens, answer.num_prompt_tokens, answer.num_output_tokens is not None, error, detail, retry_after,
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
            if not kind.startswith("text/event-stream"):
                raise _Failed("not a stream", f"content-type {kind!r}")
            events, pieces = EventStream(), response.aiter_raw()
            async for chunk in pieces:
                arrived = now()
                for data in _feed(events, chunk):
                    answer.take(data, arrived)
                if answer.done_at is not None:
                    break
            # The end of the body, so that the connection can be used again; who does not end it is not waited for.
            with contextlib.suppress(TimeoutError, httpx.NetworkError, httpx.RemoteProtocolError):
                async with asyncio.timeout(1.0):
                    async for _ in pieces:
                        pass


class _Failed(Exception):
    def __init__(self, kind: str, detail: str, retry_after: float = 0.0):
        self.kind, self.detail, self.retry_after = kind, detail, retry_after


def _seconds(retry_after: str | None) -> float:
    """Of a Retry-After in whole seconds; one that names a date is not understood."""
    return min(float(retry_after), LONGEST_RETRY) if retry_after is not None and retry_after.isdecimal() else 0.0


def _feed(events: EventStream, chunk: bytes) -> list[bytes]:
    try:
        return list(events.feed(chunk))
    except ValueError as error:
        raise _Failed("bad event", str(error)) from None


def _words(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}"


@dataclass
class _Answer:
    """What has arrived of an answer so far."""

    times: list[float] = field(default_factory=list)
    end: float | None = None  # when a chunk came that ends the answer and has no text
    num_output_tokens: int | None = None
    num_prompt_tokens: int | None = None
    done_at: float | None = None

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
        """A chunk without text has a token too: one that has given no whole character yet, or a special one.

        Not so the chunk that opens a chat, and perhaps not the one that ends an answer: see `tokens`.
        """
        delta = choice.get("delta") or {}
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
        times, _ = self.tokens()
        if self.done_at is None:
            return "ended without [DONE]", f"after {len(times)} chunks with tokens"
        if not times:
            return "no tokens", "[DONE] and no token before it"
        return None, ""


# --- before the load --------------------------------------------------------------------------------------------------


def connect(api_key: str | None = None) -> httpx.AsyncClient:
    """As many connections as there are requests, and no proxy: a pool that is full would queue in the client."""
    return httpx.AsyncClient(
        # Idle connections are let go before a server does (uvicorn: after 5 s), or a request could run into that.
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0),
        timeout=None,
        trust_env=False,
        headers={"accept-encoding": "identity"} | ({"authorization": f"Bearer {api_key}"} if api_key else {}),
    )


async def first_model(http: httpx.AsyncClient, base_url: str) -> str:
    """The id of the first model that the server lists. ServerError where it lists none."""
    try:
        response = await http.get(f"{base_url}/v1/models", timeout=30.0)
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise ServerError(f"{base_url}/v1/models did not name a model ({_words(error)}); give --model") from None


async def choose_form(client: Client, forms: list[Form]) -> list[str]:
    """Sets client.form to the first that the server takes; returns what it said to those it refused.

    Refused is an answer 400, 404, 415 or 422. ServerError for any other failure, and where all are refused.
    """
    refused: list[str] = []
    for form in forms:
        client.form = form
        request = WorkloadRequest("probe", 0.0, 8, 1, ())
        outcome = await client.send(request, client.body(request), asyncio.get_running_loop().time())
        if outcome.error is None or outcome.error == "no tokens":
            return refused
        if outcome.error not in ("HTTP 400", "HTTP 404", "HTTP 415", "HTTP 422"):
            raise ServerError(f"a first small request failed: {outcome.error}: {outcome.detail}")
        refused.append(f"{form}: {outcome.error}: {outcome.detail}")
    raise ServerError("the server takes no form of request that is known here:\n" + "\n".join(refused))


def forms(chat: bool, text: bool) -> list[Form]:
    """From the most telling to what the plainest server takes."""
    every = [Form(chat, ids, eos) for eos in (True, False) for ids in (True, False)]
    return [form for form in every if not (form.token_ids and (chat or text))]
