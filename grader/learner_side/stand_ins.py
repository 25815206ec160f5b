"""What stands here for what is in the other process: a `Handle` for an object, an exception for an exception.

Both are made of data alone. A handle passes on what is done with it; an exception crosses as the name of its built-in
type, its arguments and the text of its traceback. Shipped beside `peer.py` into the learner's process.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import math
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .codec import MAX_INT_BITS

if TYPE_CHECKING:
    from .peer import Peer

DUNDERS = ("__len__", "__getitem__", "__setitem__", "__contains__", "__iter__", "__next__", "__enter__", "__exit__")
CELL = "<cell "  # how the file name of a learner's cell begins: "<cell NAME>"
MAX_TEXT = 8000  # characters of an exception's text
PLAIN = (bool, int, float, str, bytes, type(None))  # what can be compared without asking the learner's code
SHOWN_WHOLE = 8  # a changed tensor of at most so many numbers is shown as a whole
SHOWN_TEXT = 200  # a changed list or dict whose text has at most so many characters, too
UNREADABLE = "(an exception whose text cannot be read)"
# Methods by which a tensor says that it is right. A handle must not answer them: its answer is the learner's.
VERDICTS = frozenset(("equal", "allclose", "isclose", "eq", "ne", "all", "any", "is_same_size"))


class Handle:
    """An object of the other process: call it, call its methods, read its public attributes, use the listed dunders.

    It is never equal to anything and never true or false: a forged answer must not be able to pass a comparison.
    """

    __slots__ = ("__weakref__", "_cls", "_dunders", "_id", "_methods", "_peer")

    def __init__(self, peer: Peer, number: int, cls: str, methods: frozenset[str], dunders: frozenset[str]):
        values = {"_peer": peer, "_id": number, "_cls": cls, "_methods": methods, "_dunders": dunders}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._peer.call(self._id, None, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{name!r} of a {self._cls} of the other process is not public")
        if name in VERDICTS:
            raise AttributeError(f"expected a tensor, got a {self._cls} of the other process: it has no {name!r}")
        if name in self._methods:
            return functools.partial(_call_method, self, name)
        return self._peer.get(self._id, name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"attributes of a {self._cls} of the other process cannot be set")

    def __del__(self) -> None:
        self._peer.forget(self._id)

    def __repr__(self) -> str:
        return f"<{self._cls} of the other process>"

    def _refuse(self, *_: Any) -> Any:
        raise TypeError(f"a {self._cls} of the other process cannot be compared, hashed or tested for truth")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = _refuse
    __hash__ = _refuse

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"a {self._cls} of the other process cannot be copied")

    def _dunder(self, name: str, *args: Any) -> Any:
        if name not in self._dunders:
            raise TypeError(f"{self._cls} has no {name}")
        return self._peer.call(self._id, name, args, {})

    def __len__(self) -> int:
        return self._dunder("__len__")

    def __getitem__(self, key: Any) -> Any:
        return self._dunder("__getitem__", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._dunder("__setitem__", key, value)

    def __contains__(self, key: Any) -> bool:
        return self._dunder("__contains__", key) is True

    def __iter__(self) -> Any:
        return self._dunder("__iter__")

    def __next__(self) -> Any:
        return self._dunder("__next__")

    def __enter__(self) -> Any:
        return self._dunder("__enter__")

    def __exit__(self, kind: Any, value: Any, trace: Any) -> Any:
        # An exception is not data: its built-in type's name and text cross, and are an exception again there.
        answer = self._dunder("__exit__", None if value is None else describe(value, with_trace=False))
        # The learner's code may swallow its own errors, but neither a failed assertion of a check nor its end.
        return answer is True and isinstance(value, Exception) and not isinstance(value, AssertionError)


def _call_method(handle: Handle, name: str, *args: Any, **kwargs: Any) -> Any:
    return handle._peer.call(handle._id, name, args, kwargs)


def marked(function: Any, mark: str, but: Sequence[int] = ()) -> Callable[..., Any] | None:
    """`function`, a handle or a method of one, as a call that says `mark` to the other side; None if it is neither.

    mark: "lent", its tensors are only lent; "unchanging", it must not change its arguments, those at the positions
    `but` excepted (`Peer.call`).
    """
    if isinstance(function, Handle):
        handle, name = function, None
    elif isinstance(function, functools.partial) and function.func is _call_method:
        handle, name = function.args
    else:
        return None
    return lambda *args, **kwargs: handle._peer.call(handle._id, name, args, kwargs, mark, but)


def answer_unchanging(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], but: Sequence[int] = ()
) -> Any:
    """What function(*args, **kwargs) returns. AssertionError: it changed an argument that is not at a position of
    `but`; the message names it by the function's own parameter, and the first place in it."""
    exempt = [args[i] for i in but]
    given = _parameters(function, args, kwargs)
    given = {name: value for name, value in given.items() if not any(value is one for one in exempt)}
    before = {name: _copied(value) for name, value in given.items()}
    answer = function(*args, **kwargs)
    for name, value in given.items():
        found = _difference(name, before[name], value)
        if found is not None:
            of, place, was, now = str(getattr(function, "__name__", "your code")), *found
            where = "" if place == name else f", at {place}"
            raise AssertionError(
                f"{of} changed its argument {name}, which belongs to the caller{where}: "
                f"expected {was!r:.{SHOWN_TEXT}}, saw {now!r:.{SHOWN_TEXT}}"
            )
    return answer


def _parameters(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names of the function's parameters, as far as it can be asked for these."""
    try:
        return dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {f"number {i}": value for i, value in enumerate(args, 1)} | kwargs


def _copied(value: Any) -> Any:
    """A copy of tensors, lists, tuples, dicts and sets, and of what is in them; anything else is itself."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return set(value) if type(value) is set else value


def _difference(place: str, was: Any, now: Any) -> tuple[str, Any, Any] | None:
    """Where two values first differ, by its path, and what stands there in each; None if they are the same."""
    if isinstance(was, torch.Tensor):
        if not isinstance(now, torch.Tensor):
            return place, was, now
        same = was.shape == now.shape and was.dtype == now.dtype
        if same and torch.equal(*(x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (was, now))):
            return None
        if not same or was.numel() <= SHOWN_WHOLE:
            return place, was.tolist(), now.tolist()
        off = torch.nonzero((was != now) & ~((was != was) & (now != now)))
        index = tuple(off[0].tolist()) if len(off) else ()
        return (f"{place}{list(index)}", was[index].item(), now[index].item()) if index else (place, was, now)
    if type(was) in (list, tuple, dict):
        keys = list(was) if type(was) is dict else range(len(was))
        if type(was) is not type(now) or len(was) != len(now) or (type(was) is dict and list(now) != keys):
            return place, was, now
        inside = (_difference(f"{place}[{key!r}]", was[key], now[key]) for key in keys)
        found = next((difference for difference in inside if difference is not None), None)
        return (place, was, now) if found is not None and len(repr(was)) <= SHOWN_TEXT else found
    if type(was) is set:
        return None if was == now else (place, was, now)
    same = was is now or (type(was) in PLAIN and type(now) in PLAIN and (was == now or (was != was and now != now)))
    return None if same else (place, was, now)


def overwrite(tensor: torch.Tensor) -> None:
    """Fill with NaN; integers with the smallest value of their type, which is False for bool."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(math.nan)
    else:
        tensor.fill_(False if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min)


def describe(error: BaseException, with_trace: bool = True) -> dict[str, Any]:
    """An exception as data: its nearest built-in type, arguments, own type's name and the text of the traceback.

    Whatever the exception's own methods, attributes and classes do when they are asked, raise or exit, this does not.
    """
    unknown = {"type": "RuntimeError", "args": [UNREADABLE], "name": "an exception"}
    found = _asked(lambda: _type_and_args(error), unknown)
    return found | {"trace": _asked(lambda: trace_text(error), "") if with_trace else ""}


def _type_and_args(error: BaseException) -> dict[str, Any]:
    builtin = next(c for c in type(error).__mro__ if c.__module__ == "builtins")
    args = _asked(lambda: list(error.args[:8]), [None] * 8)
    if len(args) == 8 or not all(map(_is_plain, args)):
        args = [_asked(lambda: str.__str__(str(error))[:MAX_TEXT], UNREADABLE)]
    return {"type": str(builtin.__name__), "args": args, "name": str(type(error).__name__)[:200]}


def _is_plain(value: Any) -> bool:
    if type(value) is int:
        return value.bit_length() <= MAX_INT_BITS
    return type(value) in (float, bool, type(None)) or (type(value) is str and len(value) < MAX_TEXT)


def _asked(question: Callable[[], Any], otherwise: Any) -> Any:
    """The answer of an object that a learner's code made, or `otherwise` where it raises."""
    try:
        return question()
    except BaseException:
        return otherwise


def trace_text(error: BaseException) -> str:
    """The traceback of an exception: only what lies in a learner's cells; all of it, if nothing does.

    Frames of libraries lie deep, say nothing about the learner's mistake, and name folders of this machine.
    """
    described = traceback.TracebackException.from_exception(error)
    chain = [described]
    for part in chain:  # grows while it is read: what an exception was raised from, or holds
        chain += [linked for linked in (part.__cause__, part.__context__, *(part.exceptions or ())) if linked]
    if any(frame.filename.startswith(CELL) for part in chain for frame in part.stack) or _in_cell(described):
        for part in chain:
            own = [frame for frame in part.stack if frame.filename.startswith(CELL)]
            part.stack = traceback.StackSummary.from_list(own)
    return "".join(list(described.format())[-40:])[-MAX_TEXT:]


def _in_cell(error: traceback.TracebackException) -> bool:
    """Whether it is a syntax error in a cell: its place is in the exception, not in a frame."""
    return str(getattr(error, "filename", "")).startswith(CELL)


def rebuild(description: Any) -> Exception:
    """The built-in exception of a description; anything but a subclass of Exception becomes a RuntimeError."""
    try:
        kind = getattr(builtins, str(description["type"]), None)
        args, name = list(description["args"]), str(description["name"])[:200]
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            kind, args = RuntimeError, [f"{name}: {' '.join(str(a) for a in args)}"]
        trace = str(description["trace"])[:MAX_TEXT]
        try:
            error: Exception = kind(*args)
        except Exception:  # a UnicodeDecodeError, an ExceptionGroup: what they are made of does not cross
            error = RuntimeError(" ".join(str(argument) for argument in args))
    except Exception:
        error, name, trace = RuntimeError("an exception that could not be read"), "RuntimeError", ""
    error.learner_type, error.learner_traceback = name, trace  # type: ignore[attr-defined]
    return error
