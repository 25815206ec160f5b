"""The worker's side of `worker.py`: the program that its process runs, and the loop that answers steps."""

from __future__ import annotations

import contextlib
import pickle
import queue
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

from reference_impl.features.grammars.drafts import ShowsDrafts
from reference_impl.features.process.beside import end_with_the_other, ignore_signals
from reference_impl.features.process.facts import Facts, NewWeights
from reference_impl.interfaces import Executor, Masks, Step, TakesMasks, UpdatesWeights

# A step; its masks; its number, where its drafts are asked for; masks that these depend on; new weights; None: the end.
Message: TypeAlias = Step | Masks | int | list[bytes | None] | NewWeights | None


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
            elif isinstance(message, NewWeights):
                with signs_of_life(connection):
                    answer = _outcome(partial(_new_weights, executor, message.folder))
                connection.send_bytes(pickle.dumps(answer))
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


def _made(connection: Connection) -> tuple[Executor, Facts]:
    executor, facts = pickle.loads(connection.recv_bytes())()
    return executor, facts


def _new_weights(executor: Executor, folder: Path | None) -> None:
    if not isinstance(executor, UpdatesWeights):
        raise ValueError(f"update_weights: {type(executor).__name__} cannot")
    if folder is None:
        executor.use_weights()
    else:
        executor.load_weights(folder)


def _outcome(do: Callable[[], Any]) -> tuple[str, Any]:
    """The message that says what came of it."""
    try:
        return "ready", do()
    except EOFError:
        raise
    except (ValueError, OSError) as error:  # what is wrong with a folder or an option, not with the program
        return "refused", str(error)
    except Exception:
        return "failed", traceback.format_exc()


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
    connection = Connection(int(sys.argv[1]))  # the second argument, the rank, is for lists of processes
    end_with_the_other(connection.fileno())  # before anything is imported: a small process is forked
    with signs_of_life(connection):
        try:
            what, made = _outcome(partial(_made, connection))
        except EOFError:
            return
    if what != "ready":
        connection.send_bytes(pickle.dumps((what, made)))
        return
    executor, facts = made
    connection.send_bytes(pickle.dumps((what, (facts, executor.max_in_flight))))
    serve(connection, executor)
    executor.close()


if __name__ == "__main__":
    main()
