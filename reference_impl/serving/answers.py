"""Answers in OpenAI's shapes, whole or as server-sent events."""

from __future__ import annotations

import base64
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from pydantic_core import to_json

from reference_impl.features.chat.tool_calls import PARSERS, ToolCall, ToolCallParser
from reference_impl.features.texts.tokens import TextPlaces, TokenText
from reference_impl.interfaces import TokenLogprobs
from reference_impl.serving.runner import Piece, Stream, Usage

DONE = b"data: [DONE]\n\n"


def event(content: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % to_json(content)


def error(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def usage(used: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": used.prompt,
        "completion_tokens": used.completion,
        "total_tokens": used.prompt + used.completion,
        "prompt_tokens_details": {"cached_tokens": used.cached},
    }


async def embeddings(stream: Stream, model: str, in_base64: bool, normalized: bool) -> dict[str, Any]:
    """The answer to `EmbeddingRequest`. Raises Unavailable where the engine does not finish it."""
    found: dict[int, Any] = {}
    async for pieces in stream:
        for piece in pieces:
            vector = np.array(piece.embedding, np.float64)
            if normalized and (length := float(np.linalg.norm(vector))):
                vector /= length
            found[piece.index] = (
                base64.b64encode(vector.astype("<f4").tobytes()).decode() if in_base64 else vector.tolist()
            )
    data = [{"object": "embedding", "index": index, "embedding": found[index]} for index in sorted(found)]
    used = {"prompt_tokens": stream.usage.prompt, "total_tokens": stream.usage.prompt}
    return {"object": "list", "data": data, "model": model, "usage": used}


@dataclass
class Shape(ABC):
    """How one kind of answer is written: completions, or chat completions."""

    model: str
    object: str  # of a whole answer
    chunk_object: str
    prefix: str  # of the id
    tokens: TokenText
    logprobs: int | None  # alternatives to report; None: no logprobs
    include_usage: bool = False
    continuous_usage: bool = False  # each chunk has the usage of its choice so far
    prompt_logprobs: int | None = None  # alternatives to report for each of a prompt's tokens; None: none
    prompts: Sequence[Sequence[int]] = ()
    num_samples: int = 1  # of each prompt
    acceptance: str = "exact"  # of the engine, see EngineConfig; another one is lossy, and every answer names it
    id: str = ""
    created: int = 0
    _written: dict[int, int] = field(default_factory=dict)  # per choice, the tokens so far
    _before: bytes = b""
    _after: bytes = b""

    def __post_init__(self) -> None:
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())

    def head(self, kind: str) -> dict[str, Any]:
        found = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return found if self.acceptance == "exact" else found | {"acceptance": self.acceptance}

    @abstractmethod
    def choice(self, piece: Piece) -> dict[str, Any]:
        """One sample of a whole answer."""

    @abstractmethod
    def delta(self, piece: Piece) -> dict[str, Any]:
        """One sample's part of a chunk."""

    def prompt_of(self, piece: Piece) -> Sequence[int]:
        return self.prompts[piece.index // self.num_samples]

    def prompt_report(self, piece: Piece) -> list[dict[int, Any] | None]:
        """Log-probabilities for each of the prompt's tokens, in vLLM's shape; None for the first token."""
        found: list[dict[int, Any] | None] = [None]
        for report in piece.prompt_logprobs or ():
            top = report.top[: self.prompt_logprobs]
            ranked = {token: (logprob, rank) for rank, (token, logprob) in enumerate(top, 1)}
            both = {report.token: (report.logprob, None)} | ranked
            found.append(
                {
                    t: {"logprob": p, "rank": rank, "decoded_token": self.tokens.readable(t)}
                    for t, (p, rank) in both.items()
                }
            )
        return found

    def _finish_reason(self, piece: Piece) -> str | None:
        return piece.finish_reason

    def _end(self, piece: Piece) -> dict[str, Any]:
        """How a choice ended, in a chunk and in a whole answer. Two fields that OpenAI's answers lack are only there
        where they say something: which stop string or token it was (vLLM's), and that the cache was full."""
        found: dict[str, Any] = {"finish_reason": self._finish_reason(piece)}
        if piece.stop_reason is not None:
            found["stop_reason"] = piece.stop_reason
        if piece.cut_by == "kv_cache":
            found["cut_by"] = piece.cut_by
        return found

    def opening(self, num_samples: int) -> list[dict[str, Any]]:
        """The choices of a first chunk, before there is any token."""
        return []

    async def whole(self, stream: Stream) -> dict[str, Any]:
        """The finished answer. Raises Unavailable where the engine does not finish it."""
        choices: dict[int, Piece] = {}
        async for pieces in stream:
            for piece in pieces:
                if piece.index in choices:
                    choices[piece.index].add(piece)
                else:
                    choices[piece.index] = piece
        answers = [self.choice(choices[index]) for index in sorted(choices)]
        whole = {**self.head(self.object), "choices": answers, "usage": usage(self.used(stream.usage))}
        return whole | self.beside(choices[0])

    def used(self, used: Usage) -> Usage:
        """What the answer counts as used."""
        return used

    def beside(self, first: Piece) -> dict[str, Any]:
        """Further fields of a whole answer."""
        return {}

    def start_events(self, num_samples: int) -> bytes:
        """What comes before the first token; the head that all events share is written here, once."""
        content = {**self.head(self.chunk_object), "choices": [0], **({"usage": None} if self.include_usage else {})}
        self._before, _, self._after = event(content).partition(b"[0]")
        choices = self.opening(num_samples)
        if self.continuous_usage:
            return b"".join([self._event_with_usage(choice, 0) for choice in choices])
        return b"".join([self._event(choice) for choice in choices])

    def events(self, pieces: list[Piece]) -> bytes:
        """One event for each piece."""
        if self.continuous_usage:
            return b"".join([self._event_with_usage(self.delta(piece), len(piece.tokens)) for piece in pieces])
        return b"".join([self._event(self.delta(piece)) for piece in pieces])

    def end_events(self, used: Usage) -> bytes:
        last = {**self.head(self.chunk_object), "choices": [], "usage": usage(self.used(used))}
        return (event(last) if self.include_usage else b"") + DONE

    def _event(self, choice: dict[str, Any]) -> bytes:
        return b"%b[%b]%b" % (self._before, to_json(choice), self._after)

    def _event_with_usage(self, choice: dict[str, Any], num_new: int) -> bytes:
        index = choice["index"]
        written = self._written[index] = self._written.get(index, 0) + num_new
        prompt = len(self.prompts[index // self.num_samples])
        used = {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
        return event({**self.head(self.chunk_object), "choices": [choice], "usage": used})


@dataclass
class CompletionShape(Shape):
    """Completions. echo: for each prompt the text that comes before its samples; None: no echo. only_echo: the answer
    is the echo alone, and the one token that was computed is left out."""

    echo: Sequence[str] | None = None
    only_echo: bool = False
    skips_special: bool = True  # see SamplingParams.skip_special_tokens
    _begun: set[int] = field(default_factory=set)  # choices whose prompt was told
    _text_places: dict[int, TextPlaces] = field(default_factory=dict)  # per choice

    def choice(self, piece: Piece) -> dict[str, Any]:
        told = self.delta(piece)
        return told if self.prompt_logprobs is None else told | {"prompt_logprobs": self.prompt_report(piece)}

    def delta(self, piece: Piece) -> dict[str, Any]:
        begins = self.echo is not None and piece.index not in self._begun
        self._begun.add(piece.index)
        if self.only_echo:
            piece.text, piece.logprobs, piece.tokens = "", [], []
        before = self.echo[piece.index // self.num_samples] if self.echo is not None and begins else ""
        return {
            "index": piece.index,
            "text": before + piece.text,
            "logprobs": self._logprobs(piece, begins),
            **self._end(piece),
        }

    def used(self, used: Usage) -> Usage:
        return replace(used, completion=0) if self.only_echo else used

    def _logprobs(self, piece: Piece, echoes: bool) -> dict[str, Any] | None:
        """Four lists, one entry per token; echoes: those of the prompt, too, the first of which has no probability."""
        if self.logprobs is None:
            return None
        prompt = self.prompt_of(piece) if echoes else ()
        reports = [*(piece.prompt_logprobs or () if echoes else ()), *piece.logprobs]
        tokens = [*prompt[:1], *(report.token for report in reports)]
        before = self._places_in_prompt(piece)
        places = self._text_places[piece.index].of(tokens[len(prompt) :], ended=piece.finish_reason is not None)
        return {
            "tokens": [self.tokens.text(token) for token in tokens],
            "token_logprobs": [*(None for _ in prompt[:1]), *(report.logprob for report in reports)],
            "top_logprobs": [*(None for _ in prompt[:1]), *map(self._top, reports)],
            "text_offset": [*(before if echoes else ()), *places],
        }

    def _places_in_prompt(self, piece: Piece) -> list[int]:
        """The places of the prompt's tokens in the text, for the first piece of a choice; nothing for later ones."""
        if piece.index in self._text_places:
            return []
        places = self._text_places[piece.index] = TextPlaces(self.tokens, self.skips_special)
        if self.echo is None:
            return places.of_prompt(self.prompt_of(piece)[-4:])  # more are no character that goes on
        return places.of_prompt(self.prompt_of(piece), self.echo[piece.index // self.num_samples])

    def _top(self, report: TokenLogprobs) -> dict[str, float]:
        """Log-probabilities by text. Of two tokens with the same text, that of the likelier, so there may be fewer."""
        found: dict[str, float] = {}
        for token, logprob in [*report.top[: self.logprobs], (report.token, report.logprob)]:
            found.setdefault(self.tokens.text(token), logprob)
        return found


@dataclass
class ChatShape(Shape):
    """Chat completions. tool_call_parser: one of `PARSERS`; None: the answer is text."""

    tool_call_parser: str | None = None
    _parsers: dict[int, ToolCallParser] = field(default_factory=dict)  # per choice

    def beside(self, first: Piece) -> dict[str, Any]:
        return {} if self.prompt_logprobs is None else {"prompt_logprobs": self.prompt_report(first)}

    def opening(self, num_samples: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [
            {"index": i, "delta": delta, "logprobs": None, "finish_reason": None} for i in range(num_samples)
        ]  # fmt: skip

    def choice(self, piece: Piece) -> dict[str, Any]:
        said = self._said(piece)
        message = {"role": "assistant", "content": said.pop("content", None if said else ""), "refusal": None}
        for call in said.get("tool_calls", ()):
            del call["index"]
        return {
            "index": piece.index,
            "message": message | said,
            "logprobs": self._logprobs(piece),
            **self._end(piece),
        }

    def delta(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.index,
            "delta": self._said(piece),
            "logprobs": self._logprobs(piece),
            **self._end(piece),
        }

    def _said(self, piece: Piece) -> dict[str, Any]:
        """content and tool_calls, where there are some, as far as they are certain."""
        if self.tool_call_parser is None:
            return {"content": piece.text} if piece.text else {}
        if piece.index not in self._parsers:
            self._parsers[piece.index] = PARSERS[self.tool_call_parser]()
        parser = self._parsers[piece.index]
        before = parser.num_calls
        found = parser.push(piece.text) + (parser.finish() if piece.finish_reason is not None else [])
        text = "".join(one for one in found if isinstance(one, str))
        calls = [
            {
                "index": i,
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate((one for one in found if isinstance(one, ToolCall)), before)
        ]
        return ({"content": text} if text else {}) | ({"tool_calls": calls} if calls else {})

    def _finish_reason(self, piece: Piece) -> str | None:
        """The reason, "tool_calls" where a call was found; to be asked after `_said`, which parses the piece."""
        called = piece.index in self._parsers and self._parsers[piece.index].num_calls
        return "tool_calls" if called and piece.finish_reason == "stop" else piece.finish_reason

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        return {"content": [self._report(report) for report in piece.logprobs], "refusal": None}

    def _report(self, report: TokenLogprobs) -> dict[str, Any]:
        return {
            **self._one(report.token, report.logprob),
            "top_logprobs": [self._one(token, logprob) for token, logprob in report.top],
        }

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.tokens.text(token), "logprob": logprob, "bytes": list(self.tokens.bytes(token))}
