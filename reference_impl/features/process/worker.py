"""A worker in a process of its own: steps go there as messages, replies come back.

The process that plans needs no model, no tensors and no GPU; the other one needs no scheduling. Before the first step
the worker reports its `Facts`. If a worker fails, its process ends, or it does not answer a step in time, that is an
error that names the step and the rank. When a planner's process ends, its worker's ends too, even if it is stopped.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import subprocess
from collections import deque
from collections.abc import Callable, Collection, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from reference_impl.features.grammars.drafts import AskMasks, Drafted
from reference_impl.features.process.beside import Process, how_it_ended, start_beside
from reference_impl.features.process.facts import Facts, NewWeights
from reference_impl.interfaces import Executor, Masks, Reply, Step

PROGRAM = "reference_impl.features.process.worker_main"
STARTING_SECONDS = 60.0  # without a sign of life from a worker that starts; it gives one each second
READING_SECONDS = 30.0  # for a message where a step has no limit: a worker reads in a thread of its own, at once
_MOST_SECONDS = 1e6  # that `poll` takes


class WorkerError(RuntimeError):
    """A step failed in a worker, or the worker is gone. step_id: None where it was not about a step."""

    def __init__(self, text: str, step_id: int | None, rank: int):
        super().__init__(text)
        self.step_id, self.rank = step_id, rank


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
        self._process, mine = (start or start_beside)(PROGRAM, str(rank))
        self._connection = Connection(mine.detach())
        try:
            self._connection.send_bytes(pickle.dumps(make))
            facts, self._max_in_flight = self._ready("started")
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

    def _send(self, message: Any, step_id: int | None) -> None:
        try:
            self._connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        except BlockingIOError:
            assert step_id is not None, "what is about no step is short"
            raise self._late(step_id, "read") from None
        except OSError:
            raise self._gone(step_id) from None

    def load_weights(self, folder: Path) -> None:
        """See `UpdatesWeights`. WorkerError if the worker is gone."""
        self.ask_weights(folder)
        self.took_weights()

    def use_weights(self) -> None:
        self.ask_weights(None)
        self.took_weights()

    def ask_weights(self, folder: Path | None) -> None:
        """The first half of `load_weights`; None: of `use_weights`."""
        self._send(NewWeights(folder), None)

    def took_weights(self) -> None:
        """The second half: waits."""
        self._ready("loaded weights")

    def _ready(self, meanwhile: str) -> Any:
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
            f"{meanwhile}, and was ended: it was stopped, or the machine does not let it run",
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
            assert step_id is not None, "what is about no step is short"
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
