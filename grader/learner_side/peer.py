"""Calls between two processes over one `wire.Connection`: handles, methods, call-backs, exceptions.

Both ends run this code. `Peer.request` sends a call and, until its answer comes, serves the calls the other side makes
(call-backs), so calls nest and one socket is enough. An object that is not data crosses as a handle: a number here, a
`Handle` (`stand_ins.py`) there. Shipped beside `codec.py` into the learner's process.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .codec import MAX_BODY, MAX_NAMES, CannotCross, Malformed, Packer, Unpacker
from .stand_ins import DUNDERS, Handle, answer_unchanging, describe, overwrite, rebuild
from .wire import MAX_HEADER, Connection

ENDS_ITERATION = ("__next__", "send", "throw")  # methods whose StopIteration is an answer
LAB_MODULE = "lab_cells"  # __name__ of the namespace in which the examiner runs a lab's cells
LISTED = "LEARNER_SEES"  # attribute of a class of the examiner: the names of it that the learner's code may use
MAX_NESTING = 40


class TooManyCalls(Exception):
    """More calls than one check may make: it goes through answers that do not end."""


class Peer:
    """One end of a conversation.

    strict: this end is the trusted one. It shows of its own objects only what a lab's cells define (see `_shown`), and
    keeps its tracebacks to itself. call_seconds: processor time the other side may use for one call, call-backs not
    counted (`wire.Allowance`). calls_left: how many requests may still be made, if that is bounded. gone: makes the
    exception to raise when the other side died, hung or sent nonsense.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        strict: bool,
        dataclasses_by_name: dict[str, type] | None = None,
        call_seconds: float | None = None,
        gone: Callable[[Exception], BaseException] = lambda error: error,
    ):
        self.connection = connection
        self.strict = strict
        self.call_seconds = call_seconds
        self.operations: dict[str, Callable[[dict[str, Any], Any], Any]] = {}
        self.num_calls = 0
        self.calls_left: int | None = None
        self._dataclasses = dataclasses_by_name or {}
        self._gone = gone
        self._own: dict[int, Any] = {}  # handle number -> object
        self._numbers: dict[int, int] = {}  # id(object) -> handle number
        self._next = 1
        self._foreign: weakref.WeakValueDictionary[int, Handle] = weakref.WeakValueDictionary()
        self._dropped: list[int] = []
        self._lock = threading.RLock()
        self._depth = 0
        self._left = [MAX_HEADER, MAX_BODY]  # bytes that messages inside each other may still have
        self._broken: Exception | None = None

    # --- asking -----------------------------------------------------------------------------------------------------

    def call(
        self,
        number: int,
        name: str | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mark: str = "",
        but: Sequence[int] = (),
    ) -> Any:
        """Call object `number` of the other side, or its method `name`; tensors changed there are changed here.

        mark: "lent": when its answer is on the way, the other side overwrites the memory in which it has received
        tensors. "unchanging": the other side raises AssertionError where an argument, also a list or a dict, was
        changed, those at the positions `but` excepted.
        """
        header = {"m": "call", "h": number, "n": name}
        try:
            return self.request(header | {"mark": mark, "but": list(but)} if mark else header, (list(args), kwargs))
        except StopIteration as error:
            if name in ENDS_ITERATION:
                raise
            # As out of a generator: it would end a loop of the caller, over `map` or `zip`, as if all were done.
            described = {"type": "RuntimeError", "args": ["StopIteration was raised"], "name": "StopIteration"}
            raise rebuild({**described, "trace": getattr(error, "learner_traceback", "")}) from None

    def get(self, number: int, name: str) -> Any:
        """Read the public attribute `name` of object `number` of the other side."""
        return self.request({"m": "get", "h": number, "n": name}, None)

    def request(self, header: dict[str, Any], payload: Any) -> Any:
        """Send one request, serve call-backs until its answer comes, return the value or raise the exception in it."""
        with self._lock:
            if self._depth > MAX_NESTING:
                raise RecursionError(f"more than {MAX_NESTING} calls between the processes inside each other")
            if self.calls_left is not None:
                if not self.calls_left:
                    raise self._end(TooManyCalls())
                self.calls_left -= 1
            self._depth += 1
            self.num_calls += 1
            outer = self.connection.allowance
            if self.call_seconds is not None:
                self.connection.allow(self.call_seconds)
            try:
                packer = Packer(self._export, self._dataclasses)
                header["v"] = packer.pack(payload)
                header["drop"], self._dropped = self._dropped, []
                chunks, live = packer.finish()
                self._wire(self.connection.send, header, chunks)
                while True:
                    answer, received, size = self._wire(self.connection.receive, *self._left)
                    if answer.get("m") in ("ok", "err"):
                        break
                    if self.strict and answer.get("m") not in ("call", "get"):
                        raise self._end(Malformed("neither an answer nor a call"))
                    self._serve(answer, received, size)
                try:
                    for sent, changed in answer.get("w", ()):
                        live[sent].restore(received[changed])
                    value = Unpacker(received, self._import, self._dataclasses).unpack(answer.get("v"))
                except MemoryError as error:
                    raise self._end(error) from None
                except (Malformed, LookupError, TypeError, ValueError) as error:
                    raise self._end(Malformed(str(error))) from None
                if answer["m"] == "err":
                    raise rebuild(value)
                return value
            finally:
                self._depth -= 1
                self.connection.allowance = outer

    def _wire(self, step: Callable[..., Any], *args: Any) -> Any:
        if self._broken is not None:  # what comes now would be taken for the answer to another question
            raise self._gone(self._broken)
        try:
            return step(*args)
        except CannotCross:
            raise
        except (OSError, Malformed, MemoryError) as error:
            raise self._end(error) from None

    def _end(self, error: Exception) -> BaseException:
        self._broken = error
        return self._gone(error)

    # --- answering --------------------------------------------------------------------------------------------------

    def serve_forever(self) -> None:
        """Answer requests until the other side closes the connection."""
        while True:
            self._serve(*self.connection.receive())

    def _serve(self, header: dict[str, Any], chunks: list[torch.Tensor], size: int) -> None:
        started, allowance = time.monotonic(), self.connection.allowance
        self.connection.allowance = None  # what runs here is not the other side's time
        held = (size, 2 * sum(chunk.numel() for chunk in chunks))
        self._left = [left - used for left, used in zip(self._left, held, strict=True)]
        lent: list[torch.Tensor] = []
        try:
            reply, packer = self._answer(header, chunks, lent)
        finally:
            self._left = [left + used for left, used in zip(self._left, held, strict=True)]
        if allowance is not None:
            spent = time.monotonic() - started
            deadline, last = allowance.deadline + spent, allowance.last + spent
            self.connection.allowance = dataclasses.replace(allowance, deadline=deadline, last=last)
        try:
            self._wire(self.connection.send, reply, packer.finish()[0])
        except CannotCross as error:
            self._wire(self.connection.send, {"m": "err", "v": Packer(self._export, {}).pack(describe(error))}, [])
        finally:
            for tensor in lent:
                overwrite(tensor)

    def _answer(
        self, header: dict[str, Any], chunks: list[torch.Tensor], lent: list[torch.Tensor]
    ) -> tuple[dict[str, Any], Packer]:
        before = [chunk.numpy().tobytes() for chunk in chunks]  # comparing bytes is the fastest by far
        packer = Packer(self._export, self._dataclasses)
        try:
            value, kind = packer.pack(self._perform(header, chunks, lent)), "ok"
        except Exception as error:
            packer = Packer(self._export, self._dataclasses)
            value, kind = packer.pack(describe(error, with_trace=not self.strict)), "err"
        except BaseException as error:
            if self.strict:
                raise
            value, kind = packer.pack(describe(error, with_trace=True)), "err"
        changed = [i for i, (old, new) in enumerate(zip(before, chunks, strict=True)) if old != new.numpy().tobytes()]
        return {"m": kind, "v": value, "w": [[i, packer.add_bytes(chunks[i])] for i in changed]}, packer

    def _perform(self, header: dict[str, Any], chunks: list[torch.Tensor], lent: list[torch.Tensor]) -> Any:
        for number in header.get("drop", ()):
            self._numbers.pop(id(self._own.pop(number, None)), None)
        unpacker = Unpacker(chunks, self._import, self._dataclasses)
        payload = unpacker.unpack(header.get("v"))
        mark = None if self.strict else header.get("mark")
        if mark == "lent":
            lent += [tensor.detach() for tensor in unpacker.tensors]  # the called code may give its own other memory
        operation = self.operations.get(header["m"])
        if operation is not None:
            return operation(header, payload)
        target, name = self._own[header["h"]], header.get("n")
        if header["m"] == "get":
            return self._shown(target, name)
        args, kwargs = payload
        if name == "__exit__":
            error = None if args[0] is None else rebuild(args[0])
            args = [type(error) if error is not None else None, error, None]
        called = target if name is None else self._shown(target, name)
        if mark == "unchanging":
            return answer_unchanging(called, tuple(args), kwargs, header["but"])
        return called(*args, **kwargs)

    def _shown(self, target: Any, name: Any) -> Any:
        """Attribute `name` of an own object, if the other side may see it."""
        if not isinstance(name, str) or (name.startswith("_") and name not in DUNDERS):
            raise AttributeError(f"{name!r} is not public")
        if self.strict:
            # Nothing inherited from a library and nothing but instances of the lab's own classes: a generator's
            # frame or a module's functions would lead the learner's code to the tests.
            lab_classes = [c for c in type(target).__mro__ if c.__module__ == LAB_MODULE]
            listed = getattr(type(target), LISTED, None)
            own = name in getattr(target, "__dict__", {}) or any(name in vars(c) for c in lab_classes)
            if not (name in listed if listed is not None else lab_classes and own):
                raise AttributeError(f"{type(target).__name__!r} object has no attribute {name!r}")
        return getattr(target, name)

    def _export(self, obj: Any) -> dict[str, Any]:
        if isinstance(obj, Handle):
            if obj._peer is not self:
                raise CannotCross("a handle of another process cannot cross")
            return {"t": "h", "back": obj._id}
        listed = getattr(type(obj), LISTED, None) if self.strict else None
        if self.strict and not callable(obj) and type(obj).__module__ != LAB_MODULE and listed is None:
            raise CannotCross(f"a {type(obj).__name__} of the examiner is not data and is not shown to the learner")
        if isinstance(obj, (types.ModuleType, types.FrameType, types.CodeType, torch.Generator)):
            raise CannotCross(f"a {type(obj).__name__} cannot cross")
        number = self._numbers.get(id(obj))
        if number is None:
            number = self._numbers[id(obj)] = self._next
            self._own[number] = obj
            self._next += 1
        methods, dunders = _interface(obj if isinstance(obj, type) else type(obj), isinstance(obj, type))
        if listed is not None:
            methods, dunders = [n for n in methods if n in listed], [n for n in dunders if n in listed]
        return {"t": "h", "id": number, "cls": _name_of(obj)[:100], "methods": methods, "dunders": dunders}

    def _import(self, node: dict[str, Any]) -> Any:
        if "back" in node:
            return self._own[node["back"]]
        number, cls, methods, dunders = node["id"], node["cls"], node["methods"], node["dunders"]
        if type(number) is not int or type(cls) is not str or len(methods) > MAX_NAMES or len(dunders) > len(DUNDERS):
            raise Malformed("a handle is not well formed")
        handle = self._foreign.get(number)
        if handle is None:
            names = frozenset(n for n in methods if type(n) is str), frozenset(n for n in dunders if type(n) is str)
            handle = self._foreign[number] = Handle(self, number, cls[:100], *names)
            if number in self._dropped:  # it was dropped here, but the other side has not received that yet
                self._dropped.remove(number)
        return handle

    def forget(self, number: int) -> None:
        """A handle of this side is gone; the next request reports it to the other side."""
        self._dropped.append(number)


@functools.lru_cache(maxsize=256)
def _interface(cls: type, as_class: bool) -> tuple[list[str], list[str]]:
    if cls in (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial):
        return [], []
    names = [n for n in dir(cls) if not n.startswith("_") and callable(getattr(cls, n, None))]
    names = names[:MAX_NAMES]
    return names, [] if as_class else [n for n in DUNDERS if hasattr(cls, n)]


def _name_of(obj: Any) -> str:
    name = getattr(obj, "__name__", None) if callable(obj) else None
    return name if isinstance(name, str) else type(obj).__name__
