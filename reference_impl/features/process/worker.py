"""A worker in a process of its own: steps go there as messages, replies come back.

The process that plans needs no model, no tensors and no GPU; the other one needs no scheduling. Before the first step
the worker reports its `Facts`. If a worker fails, its process ends, or it does not answer a step in time, that is an
error that names the step and the rank. When a planner's process ends, its worker's ends too, even if it is stopped.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeAlias

from reference_impl.features.grammars.drafts import AskMasks, Drafted, ShowsDrafts
from reference_impl.features.process.facts import Facts
from reference_impl.interfaces import Executor, Masks, Reply, Step, TakesMasks

STARTING_SECONDS = 60.0  # without a sign of life from a worker that starts; it gives one each second
READING_SECONDS = 30.0  # for a message where a step has no limit: a worker reads in a thread of its own, at once
_MOST_SECONDS = 1e6  # that `poll` takes


class WorkerError(RuntimeError):
    """A step failed in a worker, or the worker is gone. step_id: None where it was not about a step."""

    def __init__(self, text: str, step_id: int | None, rank: int):
        super().__init__(text)
        self.step_id, self.rank = step_id, rank


class Process(Protocol):
    """What is asked of a process, as of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


class WorkerProcess:
    """An executor that works in another process. `make()`, called there, gives the executor that does the work, and its
    `Facts`. It is pickled, so it must be a function of a module, or a partial of one.

    rank: which of several workers it is. step_seconds: how long a step may take, and how long a message to the worker
    may wait to be read; None: a step may take any time, a message waits READING_SECONDS. ValueError if `make` raises
    ValueError or OSError, with the same text; WorkerError for any other error of it, or if the process ends before it
    is ready. start: see `start_beside`, which is what it is if not given.
    """

    def __init__(
        self, make: Callable[[], tuple[Executor, Facts]], rank: int = 0, step_seconds: float | None = None,
        start: Callable[..., tuple[Process, socket.socket]] | None = None,
    ):  # fmt: skip
        self.rank, self.step_seconds = rank, step_seconds
        self._waits = False  # whether the step that was sent last waits for its masks
        self._in_flight: deque[int] = deque()  # ids of steps that were sent, and whose replies were not collected
        self._process, mine = (start or start_beside)(__name__, str(rank))
        self._connection = Connection(mine.detach())
        try:
            self._connection.send_bytes(pickle.dumps(make))
            facts, self._max_in_flight = self._started()
            self.facts: Facts = facts
            self._limit_waiting()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """The number of the socket that its answers come from, so that several workers can be waited for at once."""
        return self._connection.fileno()

    @property
    def max_in_flight(self) -> int:
        return int(self._max_in_flight)

    @property
    def reads(self) -> Collection[str]:
        """The fields of SamplingParams that the worker's sampler reads: see `ReadsFields`."""
        return self.facts.reads

    def submit(self, step: Step) -> int:
        """Sends a step without waiting; returns its ticket. WorkerError if the worker is gone or does not read it."""
        self._send(step, step.step_id)
        if self._waits:  # its masks never came, so it is not answered
            self._in_flight.pop()
        self._waits = step.takes_masks
        self._in_flight.append(step.step_id)
        return step.step_id

    def finish(self, ticket: int, masks: Masks) -> None:
        """Sends the masks of a step without waiting. WorkerError if the worker is gone or does not read them."""
        self._waits = False
        self._send(masks, ticket)

    def show_drafts(self, ticket: int, ask: AskMasks) -> Sequence[Drafted]:
        """The drafts of a step that waits for masks: see `ShowsDrafts`. WorkerError if the step failed, RuntimeError
        unless it is alone in flight."""
        self.ask_drafts(ticket)
        while (found := self.drafts(ticket, ask)) is None:
            pass
        return found

    def ask_drafts(self, ticket: int) -> None:
        """The first half of `show_drafts`: asks for the drafts. Errors: see there."""
        if list(self._in_flight) != [ticket]:
            raise RuntimeError(f"drafts of step {ticket} are asked for, and in flight are {list(self._in_flight)}")
        self._send(ticket, ticket)

    def drafts(self, ticket: int, ask: AskMasks) -> Sequence[Drafted] | None:
        """The second half: reads a message. None: the worker needed masks and got them, so another message follows."""
        what, found = self._message(ticket)
        if what == "masks":
            self._send(list(ask(found)), ticket)
            return None
        drafts: Sequence[Drafted] = found
        return drafts

    def collect(self, ticket: int) -> Reply:
        """Waits for a step and returns its reply. WorkerError if the step failed, or the worker is gone; RuntimeError
        if an earlier step was not collected yet."""
        if not self._in_flight or self._in_flight[0] != ticket:
            raise RuntimeError(f"step {ticket} is collected, and in flight are {list(self._in_flight)}, oldest first")
        self._in_flight.popleft()
        reply = self._received(ticket)
        assert isinstance(reply, Reply)
        if reply.step_id != ticket:
            raise WorkerError(f"worker {self.rank} replied to step {reply.step_id}, not {ticket}", ticket, self.rank)
        return reply

    def _limit_waiting(self) -> None:
        """Bounds the time in which the other end reads or sends nothing. A stopped worker would be waited for without
        end where a message is longer than the socket's buffer, or was begun and not finished."""
        seconds = READING_SECONDS if self.step_seconds is None else min(self.step_seconds, _MOST_SECONDS)
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))  # C's timeval
        with socket.socket(fileno=os.dup(self.fileno())) as same:
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                same.setsockopt(socket.SOL_SOCKET, option, limit)

    def _send(self, message: Any, step_id: int) -> None:
        try:
            self._connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        except BlockingIOError:
            raise self._late(step_id, "read") from None
        except OSError:
            raise self._gone(step_id) from None

    def _started(self) -> Any:
        """What the worker says when it is ready. However long it loads; but a stopped one would be waited for without
        end."""
        while self._connection.poll(STARTING_SECONDS):
            what, content = self._message(None)
            if what == "ready":
                return content
        self._process.kill()
        self._process.wait()
        raise WorkerError(
            f"worker {self.rank} (process {self.pid}) gave no sign of life for {STARTING_SECONDS:g} s while it "
            "started, and was ended: it was stopped, or the machine does not let it run",
            None,
            self.rank,
        )

    def _received(self, step_id: int) -> Any:
        return self._message(step_id)[1]

    def _message(self, step_id: int | None) -> tuple[str, Any]:
        try:
            longest = None if self.step_seconds is None else min(self.step_seconds, _MOST_SECONDS)
            if step_id is not None and not self._connection.poll(longest):
                raise self._late(step_id, "answered")
            what, content = pickle.loads(self._connection.recv_bytes())
        except BlockingIOError:
            assert step_id is not None, "there is no limit before the first step"
            raise self._late(step_id, "wholly answered") from None
        except (EOFError, OSError):
            raise self._gone(step_id) from None
        if what == "refused":
            raise ValueError(content)
        if what == "failed":
            where = "before it was ready" if step_id is None else f"in step {step_id}"
            raise WorkerError(f"worker {self.rank} failed {where}:\n{content}", step_id, self.rank)
        return what, content

    def _late(self, step_id: int, done: str) -> WorkerError:
        """Ends the process, since a later answer would belong to no step, and returns the error. done: what was not."""
        self._process.kill()
        self._process.wait()
        seconds = READING_SECONDS if self.step_seconds is None else self.step_seconds
        return WorkerError(
            f"worker {self.rank} (process {self.pid}) had not {done} step {step_id} after {seconds} s, and was ended; "
            "it was stopped, or its step takes longer than step_seconds allows",
            step_id,
            self.rank,
        )

    def _gone(self, step_id: int | None) -> WorkerError:
        by = how_it_ended(self._process)
        when = "before it was ready" if step_id is None else f"before step {step_id} was done"
        return WorkerError(
            f"worker {self.rank} (process {self.pid}) {by} {when}: what its cache held is lost. Start a new worker and "
            "a new engine; a request without penalties goes on with the same text if its tokens so far"
            " are the prompt, and its seed is the same",
            step_id,
            self.rank,
        )

    def close(self) -> None:
        """Ends the process; idempotent."""
        self._connection.close()
        try:
            self._process.wait(10)
        except (subprocess.TimeoutExpired, TimeoutError):
            self._process.kill()
            self._process.wait()


def start_beside(module: str, *words: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts a process that runs `module`; returns it, and this end of a socket between the two. Its first argument is
    the number of the other end; `words` follow."""
    mine, theirs = socket.socketpair()
    command = [sys.executable, "-P", "-m", module, str(theirs.fileno()), *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # so that what is pickled is found there
    with theirs:
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment)
    return process, mine


def how_it_ended(process: Process) -> str:
    """Waits for the process to end, and says how it did."""
    code = process.wait()
    return f"was killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"


def end_with_the_other(number: int) -> None:
    """Makes sure that this process is killed when the other end of socket `number` is closed, even in the middle of a
    step, and even if it is stopped: a child does that, which does nothing else and ends with this process."""
    ends_with_this, kept = os.pipe()  # `kept` stays open as long as this process
    this = os.getpid()
    if os.fork():
        os.close(ends_with_this)
        return
    try:
        os.close(kept)
        hung_up = select.poll()
        for each in (number, ends_with_this):
            hung_up.register(each, 0)
        if all(each == number for each, _ in hung_up.poll()):  # and this process has not ended itself
            os.kill(this, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has, meanwhile
    finally:
        os._exit(0)


def ignore_signals() -> None:
    """Ignores SIGINT and SIGTERM, which a terminal or a service sends to all its processes: the process at the other
    end decides when to end."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


# --- in that process ------------------------------------------------------------------------------------------------


# A step; its masks; its number, where its drafts are asked for; masks that these depend on; None: the end.
Message: TypeAlias = Step | Masks | int | list[bytes | None] | None


class _Inbox:
    """The messages that came, in order; one that was taken can be put back."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.taken: list[Message] = []

    def put(self, message: Message) -> None:
        self.queue.put(message)

    def put_back(self, message: Message) -> None:
        self.taken.append(message)

    def next(self) -> Message:
        return self.taken.pop() if self.taken else self.queue.get()

    def is_empty(self) -> bool:
        return not self.taken and self.queue.empty()


class _Abandoned(Exception):
    """Raised when masks were asked for and something else came: the other end has given the step up, or is gone."""


def serve(connection: Connection, executor: Executor) -> None:
    """Receives steps and sends replies, in order, until the other end is closed. As many steps are submitted as have
    come and may run; one that fails is answered with its traceback."""
    messages = _Inbox()
    threading.Thread(target=_read, args=(connection, messages), daemon=True).start()
    running: deque[_Submitted] = deque()
    while True:
        while not running or running[0].waits or (not messages.is_empty() and len(running) < executor.max_in_flight):
            message = messages.next()
            if message is None:
                return
            if isinstance(message, Step):
                if running and running[-1].waits:  # abandoned: a grammar failed before there were masks
                    running.pop()
                running.append(_submit(executor, message))
            elif isinstance(message, int):
                _answer(connection, messages, executor, running, message)
            elif isinstance(message, Masks):
                _finish(executor, running, message)
        oldest = running.popleft()
        try:
            failed = oldest.failed is not None
            answer = ("failed", oldest.failed) if failed else ("reply", executor.collect(oldest.ticket))
        except Exception:
            answer = ("failed", traceback.format_exc())
        try:
            connection.send_bytes(pickle.dumps(answer, pickle.HIGHEST_PROTOCOL))
        except OSError:
            return


def _answer(
    connection: Connection, messages: _Inbox, executor: Executor, running: deque[_Submitted], step_id: int
) -> None:
    """Sends the drafts of a step that waits for masks; nothing if the step failed, which was answered instead."""

    def ask(texts: Sequence[tuple[int, tuple[int, ...]]]) -> Sequence[bytes | None]:
        connection.send_bytes(pickle.dumps(("masks", texts), pickle.HIGHEST_PROTOCOL))
        answer = messages.next()
        if not isinstance(answer, list):
            messages.put_back(answer)
            raise _Abandoned
        return answer

    for submitted in running:
        if submitted.step_id == step_id and submitted.waits:
            assert isinstance(executor, ShowsDrafts)
            try:
                answer: tuple[str, Any] = "drafts", executor.show_drafts(submitted.ticket, ask)
            except _Abandoned:
                return
            except Exception:
                answer = "failed", traceback.format_exc()
            connection.send_bytes(pickle.dumps(answer, pickle.HIGHEST_PROTOCOL))


@dataclass
class _Submitted:
    step_id: int
    ticket: Any = None
    failed: str | None = None  # a traceback
    waits: bool = False  # for masks


def _submit(executor: Executor, step: Step) -> _Submitted:
    try:
        return _Submitted(step.step_id, executor.submit(step), waits=step.takes_masks)
    except Exception:
        return _Submitted(step.step_id, failed=traceback.format_exc())


def _finish(executor: Executor, running: deque[_Submitted], masks: Masks) -> None:
    """Hands masks to the step that waits for them; drops those of a step that failed and was answered."""
    for submitted in running:
        if submitted.step_id == masks.step_id and submitted.waits:
            submitted.waits = False
            try:
                if not isinstance(executor, TakesMasks):
                    raise TypeError(f"{type(executor).__name__} has no finish(ticket, masks)")
                executor.finish(submitted.ticket, masks)
            except Exception:
                submitted.failed = traceback.format_exc()


def _read(connection: Connection, messages: _Inbox) -> None:
    """Reads messages, in its own thread: if a long step could not be received while a long reply is sent, both ends
    would wait."""
    while True:
        try:
            messages.put(pickle.loads(connection.recv_bytes()))
        except (EOFError, OSError):
            messages.put(None)
            return


@contextlib.contextmanager
def signs_of_life(connection: Connection) -> Iterator[None]:
    """Says each second, in a thread of its own, that this process lives, until the block ends."""
    over = threading.Event()

    def say() -> None:
        with contextlib.suppress(OSError):
            while not over.wait(1):
                connection.send_bytes(pickle.dumps(("starts", None)))

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def main() -> None:
    ignore_signals()
    connection = Connection(int(sys.argv[1]))  # the second argument, the rank, is seen in lists of processes
    end_with_the_other(connection.fileno())  # before anything is imported: a small process is forked
    with signs_of_life(connection):
        try:
            make = pickle.loads(connection.recv_bytes())
            executor, facts = make()
            answer: tuple[str, Any] = "ready", (facts, executor.max_in_flight)
        except EOFError:
            return
        except (ValueError, OSError) as error:  # what is wrong with a folder or an option, not with the program
            answer = "refused", str(error)
        except Exception:
            answer = "failed", traceback.format_exc()
    connection.send_bytes(pickle.dumps(answer))
    if answer[0] != "ready":
        return
    serve(connection, executor)
    executor.close()


if __name__ == "__main__":
    main()
