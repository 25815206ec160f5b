"""Several roles of one piece of work, each with its own state: ranks, a sender and a receiver.

Check cells use `roles` and `together` (from `grader.checks`). When graded, each role is a learner's process. In a
learner's notebook all roles share the kernel; there, what a role uses is made anew by running the cells again that
define it, so that variables beside the functions are a role's own in both.
"""

from __future__ import annotations

import ast
import contextlib
import contextvars
import copy
import io
import linecache
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Protocol, TypeVar

from grader.examination.own_process import hash_of_role
from grader.examination.written import texts_here
from grader.labs.lab import defined_names

T = TypeVar("T")
MAX_ROLES = 16

changed = threading.Condition()  # guards all groups and all queues of `grader.channel`
_making = threading.RLock()


class Deadlock(RuntimeError):
    """Every role waits for a message, and none is on its way."""


class Source(Protocol):
    """The place from which roles come."""

    def open(self, num_roles: int) -> contextlib.AbstractContextManager[list[dict[str, Any]]]: ...

    def interrupt(self) -> None: ...

    def texts(self, name: str) -> list[str]: ...


_source: ContextVar[Source | None] = ContextVar("source", default=None)


@contextlib.contextmanager
def roles_from(source: Source) -> Iterator[None]:
    """Lets `roles` take its roles from `source`, the examiner's processes, inside the block."""
    token = _source.set(source)
    try:
        yield
    finally:
        _source.reset(token)


class Role:
    """One role. Its attributes are the learner's names: `ranks[2].all_reduce(...)`."""

    def __init__(self, get: Callable[[str], Any]):
        self._get = get

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._get(name)
        except KeyError:
            raise AttributeError(f"the lab's solution cells have no {name!r}") from None


def roles(num_roles: int) -> contextlib.AbstractContextManager[list[Role]]:
    """`with roles(4) as ranks:` gives 4 roles that share nothing; at the end of the block they are gone."""
    if not 1 <= num_roles <= MAX_ROLES:
        raise ValueError(f"expected 1 to {MAX_ROLES} roles, got {num_roles}")
    return _open(num_roles, sys._getframe(1).f_globals)


@contextlib.contextmanager
def _open(num_roles: int, namespace: dict[str, Any]) -> Iterator[list[Role]]:
    source = _source.get()
    if source is None:
        yield [Role(World(namespace, role).get) for role in range(num_roles)]
        return
    with source.open(num_roles) as found:
        yield [Role(names.__getitem__) for names in found]


def texts_of(name: str) -> list[str]:
    """The texts in the learner's code, those of the cell that defines `name` first: a check tries them as separators.

    In a learner's notebook it returns those of that cell and of what it uses.
    """
    source = _source.get()
    return texts_here(name, sys._getframe(1).f_globals, _cell_of) if source is None else source.texts(name)


def together(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Runs `calls` at the same time, one per role, and returns their results in order.

    Raises the exception of a call that failed. Where all that still run wait for messages that none of them can send,
    they get `Deadlock`. What the calls share must be thread-safe: ports of a `grader.channel.Network` are.
    """
    import torch

    group, num_threads = Group(len(calls)), torch.get_num_threads()
    results: dict[int, T] = {}

    def run(number: int, call: Callable[[], T]) -> None:
        torch.set_num_threads(num_threads)  # every thread has its own setting
        _member.set((group, number))
        try:
            results[number] = call()
        except BaseException as error:
            group.fail(number, error)
        finally:
            group.leave()

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(run, number, call), daemon=True)
        for number, call in enumerate(calls)
    ]
    try:
        for thread in threads:
            thread.start()
        group.wait()
    except BaseException:  # a time limit, or an interrupt
        _stop(group, threads)
        raise
    error = group.error()
    if error is not None:
        if not isinstance(error, Exception):
            _stop(group, threads)
        raise error
    return [results[number] for number in range(len(calls))]


def _stop(group: Group, threads: list[threading.Thread]) -> None:
    """Ends what can be ended: waiting for messages, and calls into other processes."""
    group.stop()
    source = _source.get()
    if source is not None:
        source.interrupt()
        for thread in threads:
            if thread.ident is not None:
                thread.join(timeout=10)


@dataclass(eq=False)
class Wait:
    """One role that waits. inbox: empty as long as there is nothing for it; text: what it waits for."""

    inbox: Any
    text: str
    doomed: str = ""


_member: ContextVar[tuple[Group, int] | None] = ContextVar("member", default=None)


@dataclass(eq=False)
class Group:
    """The calls of one `together`: how many still run, which of them wait, what went wrong."""

    running: int
    waiting: list[Wait] = field(default_factory=list)
    errors: list[tuple[bool, bool, int, BaseException]] = field(default_factory=list)
    doomed: bool = False  # after a deadlock
    stopped: bool = False

    def wait(self) -> None:
        """Waits until all calls have ended, or one with what is no Exception: the others need not end then."""
        with changed:
            while self.running and all(isinstance(error, Exception) for *_, error in self.errors):
                changed.wait()

    def fail(self, number: int, error: BaseException) -> None:
        with changed:
            self.errors.append((isinstance(error, Exception), self.doomed, number, error))

    def error(self) -> BaseException | None:
        """The error to raise: an end rather than an error, a cause rather than its consequence; the same every time."""
        with changed:
            return min(self.errors, key=lambda entry: entry[:3])[3] if self.errors else None

    def leave(self) -> None:
        with changed:
            self.running -= 1
            self._look()
            changed.notify_all()

    def stop(self) -> None:
        with changed:
            self.stopped = True
            changed.notify_all()

    def wait_for(self, inbox: Any, text: str) -> None:
        """Returns when `inbox` is not empty; the caller holds `changed`. Raises Deadlock."""
        wait = Wait(inbox, text)
        self.waiting.append(wait)
        try:
            self._look()
            while not inbox:
                if self.stopped or wait.doomed:
                    raise Deadlock(wait.doomed or "the call was ended")
                changed.wait()
        finally:
            self.waiting.remove(wait)

    def _look(self) -> None:
        # A role whose message has come but that has not woken up yet is still listed as waiting.
        # So is one whose wait was ended; it may go on and send something.
        idle = [wait for wait in self.waiting if not (wait.inbox or wait.doomed)]
        if idle and len(idle) == self.running:
            self.doomed = True
            text = "no role can go on: " + "; ".join(sorted(wait.text for wait in idle))
            for wait in idle:
                wait.doomed = text
            changed.notify_all()


def wait_for(inbox: Any, text: str) -> None:
    """Waits until `inbox` is not empty, for a port's `recv`; the caller holds `changed`. Raises Deadlock."""
    member = _member.get()
    if member is not None:
        member[0].wait_for(inbox, text)
    elif not inbox:
        raise Deadlock(f"{text}, and no other role is running")


class World:
    """The names of a notebook as a process of its own would have them.

    `get(name)` runs the cell again that defines the function or class `name`, and before it the cells of what that
    one uses. Other values are shared, but for lists, dicts, sets and tensors, which are copied. role: whose hash() of
    text the cells find, unless they define one.
    """

    def __init__(self, namespace: dict[str, Any], role: int = 0):
        self._from = namespace
        self._names = dict(namespace)
        if "hash" not in namespace:
            exec(hash_of_role(role), self._names)
        self._done: set[str] = set()
        self._copied: set[str] = set()

    def get(self, name: str) -> Any:
        with _making:  # the roles ask for their names in their own threads
            return self._get(name)

    def _get(self, name: str) -> Any:
        cells: set[str] = set()
        self._find(name, cells, set())
        order = {filename: number for number, filename in enumerate(linecache.cache)}  # in which they were first run
        for filename in sorted(cells - self._done, key=lambda filename: order[filename]):
            self._run(filename)
        return self._names[name]

    def _run(self, filename: str) -> None:
        source = "".join(linecache.getlines(filename))
        cells = {name: _cell_of(self._from.get(name), self._from) for name in defined_names(source)}
        newer = {name: self._names[name] for name, cell in cells.items() if cell != filename and cell in self._done}
        self._done.add(filename)
        code = compile(source, filename, "exec", dont_inherit=True, optimize=0)
        # As when graded: a cell that stops half-way has defined what comes before.
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Exception):
            exec(code, self._names)
        self._names.update(newer)

    def _find(self, name: str, cells: set[str], seen: set[str]) -> None:
        """Collect the cells that define `name` and all it uses; copy the plain values among these, once."""
        if name in seen or name not in self._from:
            return
        seen.add(name)
        filename = _cell_of(self._from[name], self._from)
        if filename is None:
            value = self._from[name]
            if name not in self._copied and (isinstance(value, (list, dict, set)) or hasattr(value, "untyped_storage")):
                self._copied.add(name)
                with contextlib.suppress(Exception):
                    self._names[name] = copy.deepcopy(value)
        elif filename not in cells:
            cells.add(filename)
            for node in ast.walk(ast.parse("".join(linecache.getlines(filename)))):
                if isinstance(node, ast.Name):
                    self._find(node.id, cells, seen)


def _cell_of(value: Any, namespace: dict[str, Any]) -> str | None:
    """The file name of the cell that defined a function or class in `namespace`; None for anything else."""
    found = [value] if isinstance(value, FunctionType) else []
    if isinstance(value, type) and value.__module__ == namespace.get("__name__"):
        members = [getattr(member, "__func__", getattr(member, "fget", member)) for member in vars(value).values()]
        found = [member for member in members if isinstance(member, FunctionType)]
    for function in found:
        function = getattr(function, "__wrapped__", function)
        filename = function.__code__.co_filename
        if function.__globals__ is namespace and filename in linecache.cache:
            return str(filename)
    return None
