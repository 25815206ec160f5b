"""Calls of tools in the text that a model writes, found while it grows.

hermes        text <tool_call>{"name": ..., "arguments": {...}}</tool_call> <tool_call>...      Hermes, Qwen 2.5 and 3
llama3_json   {"name": ..., "parameters": {...}}; {...}, maybe behind text and <|python_tag|>   Llama 3.1 and later

Everything else stays text, as it was written: JSON that is broken or not a call, or a tag that is never closed.
A call is given when it is complete; text as soon as it cannot be the beginning of one.
"""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool. arguments: a JSON object as a text, like in OpenAI's answers."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}", compare=False)


Piece = str | ToolCall


class ToolCallParser(ABC):
    """Finds the calls in one answer. Every character that is pushed is given back in order, or belongs to a call; white
    space before, between and behind calls is dropped."""

    arguments_name = "arguments"
    _space = " \t\r\n"

    def __init__(self) -> None:
        self._waiting = ""  # neither text nor call yet
        self._held = ""  # white space that may stand before a call
        self._gap = True  # nothing but white space since the beginning, or since a call
        self._json = _ObjectEnd()
        self.num_calls = 0

    def push(self, text: str) -> list[Piece]:
        """The pieces that became certain by this text."""
        self._waiting += text
        found: list[Piece] = []
        while (piece := self._next()) is not None:
            self._give(piece, found)
        return found

    def finish(self) -> list[Piece]:
        """The pieces that are left when the text has ended."""
        found: list[Piece] = []
        last, self._waiting = self._last(self._waiting), ""
        for piece in last:
            self._give(piece, found)
        if self._held and not self.num_calls:
            found.append(self._held)
        return found

    @abstractmethod
    def _next(self) -> Piece | None:
        """Takes the next piece from what is waiting; None if it is not certain yet."""

    @abstractmethod
    def _last(self, text: str) -> list[Piece]:
        """The pieces that the rest of the text is made of, when it has ended."""

    def _give(self, piece: Piece, found: list[Piece]) -> None:
        if isinstance(piece, ToolCall):
            self._held, self._gap = "", True
            self.num_calls += 1
            found.append(piece)
            return
        if self._gap and not piece.strip(self._space):
            self._held += piece
            return
        found.append(self._held + piece)
        self._held, self._gap = "", False

    def _call(self, text: str) -> ToolCall | None:
        """The call that a JSON text is; None if it is not a call."""
        try:
            found: Any = json.loads(text)
            if not isinstance(found, dict):
                return None
            name, arguments = found.get("name"), found.get(self.arguments_name, found.get("arguments"))
            if not isinstance(name, str) or not name or not isinstance(arguments, dict):
                return None
            return ToolCall(_valid(name), _valid(json.dumps(arguments, ensure_ascii=False, allow_nan=False)))
        except (ValueError, RecursionError):  # not JSON, or what an answer in JSON cannot hold: NaN, half a character
            return None

    def _take(self, num: int) -> str:
        taken, self._waiting = self._waiting[:num], self._waiting[num:]
        self._json = _ObjectEnd()
        return taken


class HermesParser(ToolCallParser):
    begin, end = "<tool_call>", "</tool_call>"

    def _next(self) -> Piece | None:
        at = self._waiting.find(self.begin)
        if at != 0:  # text, up to a tag or to what may be the beginning of one
            num = at if at > 0 else len(self._waiting) - _overlap(self._waiting, self.begin)
            return self._take(num) if num else None
        inside = self._waiting[len(self.begin) :]
        if not inside.lstrip(self._space):
            return None
        start = len(self.begin) + len(inside) - len(inside.lstrip(self._space))
        if self._waiting[start] != "{":
            return self._take(start)
        stop = self._json.find(self._waiting, start)
        if stop is None:
            return None
        behind = self._waiting[stop:].lstrip(self._space)
        if self.end.startswith(behind) and behind != self.end:
            return None
        call = self._call(self._waiting[start:stop]) if behind.startswith(self.end) else None
        taken = self._take(len(self._waiting) - len(behind) + len(self.end) if call else stop)
        return call or taken

    def _last(self, text: str) -> list[Piece]:
        """The last piece, if there is one. A last call may lack its closing tag: the model's end token can stand for
        it."""
        if not text.startswith(self.begin):
            return [text] if text else []
        body = text[len(self.begin) :].strip(self._space)
        at = _ObjectEnd().find(body, 0) if body.startswith("{") else None
        call = self._call(body) if at == len(body) else None
        return [call or text]


class Llama3JsonParser(ToolCallParser):
    arguments_name = "parameters"
    tag = "<|python_tag|>"

    def _next(self) -> Piece | None:
        """The next piece. An object can be a call only at the beginning, behind a call, or behind a tag."""
        text = self._waiting
        between = self._space + (";" if self.num_calls else "")
        start = len(text) - len(text.lstrip(between)) if self._gap else 0
        if start == len(text):
            return None
        if text.startswith(self.tag, start):
            return self._after_tag(start + len(self.tag))
        if text[start] == "{" and self._gap:
            return self._object(start)
        at = text.find(self.tag)
        num = at if at >= 0 else len(text) - _overlap(text, self.tag)
        return self._take(num) if num > start else None

    def _after_tag(self, behind: int) -> Piece | None:
        inside = self._waiting[behind:]
        start = behind + len(inside) - len(inside.lstrip(self._space))
        if start == len(self._waiting):
            return None
        return self._object(start) if self._waiting[start] == "{" else self._take(behind)

    def _object(self, start: int) -> Piece | None:
        stop = self._json.find(self._waiting, start)
        if stop is None:
            return None
        call = self._call(self._waiting[start:stop])
        taken = self._take(stop)
        return call or taken

    def _last(self, text: str) -> list[Piece]:
        rest = text.strip(self._space + ";") if self.num_calls else text
        return [text] if rest else []


PARSERS: dict[str, type[ToolCallParser]] = {"hermes": HermesParser, "llama3_json": Llama3JsonParser}


def check_parser(name: str | None) -> str | None:
    """The name, if there is a parser of that name, or None; otherwise ValueError."""
    if name is not None and name not in PARSERS:
        raise ValueError(f"tool_call_parser: expected {' or '.join(map(repr, PARSERS))}, got {name!r}")
    return name


def parse(text: str, parser: ToolCallParser) -> tuple[str, list[ToolCall]]:
    """The text beside the calls in a whole answer, and the calls."""
    pieces = [*parser.push(text), *parser.finish()]
    calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
    return "".join(piece for piece in pieces if isinstance(piece, str)), calls


def _valid(text: str) -> str:
    text.encode()  # UnicodeEncodeError, a ValueError, for half a character
    return text


def _overlap(text: str, tag: str) -> int:
    """The length of the text's end that may be the beginning of the tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


class _ObjectEnd:
    """Finds where a JSON object ends, and goes on where it stopped when there is more text."""

    def __init__(self) -> None:
        self._at: int | None = None
        self._end: int | None = None
        self._depth, self._in_text, self._escaped = 0, False, False

    def find(self, text: str, start: int) -> int | None:
        """The position behind the object that begins at `start`; None while it is not complete."""
        if self._end is not None:
            return self._end
        for at in range(start if self._at is None else self._at, len(text)):
            character = text[at]
            if self._escaped:
                self._escaped = False
            elif self._in_text:
                self._escaped, self._in_text = character == "\\", character != '"'
            elif character == '"':
                self._in_text = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self._end = at + 1
                    return self._end
        self._at = len(text)
        return None
