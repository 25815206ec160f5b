"""The ranks of a group as one executor.

A rank that is lost, late or wrong ends the group, and the error names what all the others wait for, not who noticed.
What each rank gets of a step, and what their replies make together, is for `Stages` to say.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from reference_impl.features.grammars.drafts import AskMasks, Drafted, ShowsDrafts
from reference_impl.features.parallel.meeting import Meeting
from reference_impl.features.parallel.shared_memory import Board
from reference_impl.features.parallel.stages import Stages, check_alike
from reference_impl.features.parallel.threads import ThreadGroup
from reference_impl.features.process.facts import Facts, combined
from reference_impl.features.process.nursery import Nursery
from reference_impl.features.process.nursery import supported as nursery_supported
from reference_impl.features.process.worker import WorkerError, WorkerProcess
from reference_impl.interfaces import Executor, Masks, Reply, Step, TakesMasks, UpdatesWeights
from reference_impl.interfaces.collectives import CollectiveError, RankTime

Make = Callable[[], tuple[Executor, Facts]]


class RankExecutor:
    """A rank's executor, for its own thread or process. Ranks must do the same in the same order, so a step is
    collected before the next one begins, however fast they come."""

    max_in_flight = 1

    def __init__(self, executor: Executor, collectives: Meeting):
        self.executor, self.collectives = executor, collectives

    def submit(self, step: Step) -> Any:
        self.collectives.step, self.collectives.waited = step.step_id, 0.0
        return self.executor.submit(step)

    def finish(self, ticket: Any, masks: Masks) -> None:
        assert isinstance(self.executor, TakesMasks)
        self.executor.finish(ticket, masks)

    def show_drafts(self, ticket: Any, ask: AskMasks) -> Sequence[Drafted]:
        assert isinstance(self.executor, ShowsDrafts)
        return self.executor.show_drafts(ticket, ask)

    def collect(self, ticket: Any) -> Reply:
        reply = self.executor.collect(ticket)
        return replace(reply, ranks=(RankTime(reply.started_at, reply.finished_at, self.collectives.waited),))

    def load_weights(self, folder: Path) -> None:
        assert isinstance(self.executor, UpdatesWeights)
        self.executor.load_weights(folder)

    def use_weights(self) -> None:
        assert isinstance(self.executor, UpdatesWeights)
        self.executor.use_weights()

    def close(self) -> None:
        self.executor.close()


class RankReport(NamedTuple):
    """What a rank did since it began. num_bytes: of tensors that it showed to the others. waited: seconds in which it
    waited for them. expert_rows: (token, expert) pairs that its experts computed, where experts are divided. resident:
    bytes of its memory, where the system says so."""

    rank: int
    pid: int
    num_bytes: int
    waited: float
    expert_rows: int
    resident: int | None


class RankGroup:
    """What groups of processes and of threads have in common. facts: see `combined`; of all ranks the least."""

    max_in_flight = 1
    facts: Facts
    stages: Stages
    ended = ""  # by what; nothing can be submitted any more

    @property
    def num_stages(self) -> int:
        return self.stages.num_stages

    def _check_goes_on(self, step: int) -> None:
        if self.ended:
            raise WorkerError(f"step {step} cannot be done, since the ranks have ended: {self.ended}", step, 0)

    @property
    def reads(self) -> Collection[str]:
        """The fields of SamplingParams that the ranks' samplers read: see `ReadsFields`."""
        return self.facts.reads


class RankProcesses(RankGroup):
    """makes: for each rank a function that is called in its process, see `WorkerProcess`. seconds: how long a step may
    go on without any rank coming to a meeting. ValueError or WorkerError if a rank does not start."""

    def __init__(self, makes: Sequence[Make], board: Board, seconds: float, stages: Stages):
        self.board, self.seconds, self.stages = board, seconds, stages
        self.ranks: list[WorkerProcess] = []
        self._waits: int | None = None  # the step that waits for masks
        try:
            self._nursery = Nursery() if nursery_supported() else None
            start = partial(WorkerProcess, start=None if self._nursery is None else self._nursery.start)
            with ThreadPoolExecutor(len(makes)) as pool:
                starting = [pool.submit(start, make, rank) for rank, make in enumerate(makes)]
        finally:
            board.close_path()  # all ranks have opened it
        self.ranks = [each.result() for each in starting if each.exception() is None]
        try:
            for each in starting:
                each.result()  # raises what went wrong
            self.facts = combined([rank.facts for rank in self.ranks])
        except BaseException:
            self.close()
            raise

    def submit(self, step: Step) -> int:
        self._check_goes_on(step.step_id)
        if self._waits is not None:  # its masks never came, so it is not collected: who did not wait has answered
            for rank in self.ranks[: self.stages.last.start]:
                self._or_end(self._waits, rank.collect, self._waits)
        self._waits = step.step_id if step.takes_masks else None
        for rank, own in zip(self.ranks, self.stages.steps(step), strict=True):
            self._or_end(step.step_id, rank.submit, own)
        return step.step_id

    def finish(self, ticket: int, masks: Masks) -> None:
        self._waits = None
        for rank in self.stages.last:
            self._or_end(ticket, self.ranks[rank].finish, ticket, masks)

    def show_drafts(self, ticket: int, ask: AskMasks) -> Sequence[Drafted]:
        for rank in self.ranks:
            self._or_end(ticket, rank.ask_drafts, ticket)
        found = self._answers(ticket, lambda rank: rank.drafts(ticket, ask))
        return self._or_end(ticket, check_alike, ticket, range(len(found)), found, "drafts")

    def collect(self, ticket: int) -> Reply:
        replies = self._answers(ticket, lambda rank: rank.collect(ticket))
        return self._or_end(ticket, self.stages.reply, ticket, replies)

    def load_weights(self, folder: Path | None) -> None:
        """See `UpdatesWeights`; None: `use_weights`."""
        wrong = []
        try:
            for rank in self.ranks:
                rank.ask_weights(folder)
            for rank in self.ranks:
                try:
                    rank.took_weights()
                except ValueError as error:
                    wrong.append(error)
        except WorkerError as error:
            self.ended = f"{error}. All {len(self.ranks)} ranks were ended, and what their caches held is lost"
            self.close()
            raise WorkerError(self.ended, None, error.rank) from None
        if wrong:
            raise wrong[0]

    def use_weights(self) -> None:
        self.load_weights(None)

    def _answers(self, step: int, read: Callable[[WorkerProcess], Any]) -> list[Any]:
        """What all ranks answer, as it comes: each may wait for the others. read: a rank's message; None: another
        follows."""
        answers: dict[int, Any] = {}
        while waiting := [rank for rank in self.ranks if rank.rank not in answers]:
            progress = self.board.progress()
            answered = connection.wait([rank.fileno() for rank in waiting], self.seconds)
            if not answered and self.board.progress() == progress:
                self._end(step, f" within {self.seconds:g} s", None, [rank.rank for rank in waiting])
            for rank in waiting:
                if rank.fileno() in answered and (answer := self._or_end(step, read, rank)) is not None:
                    answers[rank.rank] = answer
        return [answers[rank.rank] for rank in self.ranks]

    def reports(self) -> list[RankReport]:
        """What each rank did since it began."""
        found = []
        for rank in self.ranks:
            memory = Path(f"/proc/{rank.pid}/statm")
            pages = int(memory.read_text().split()[1]) if memory.exists() else None
            resident = None if pages is None else pages * os.sysconf("SC_PAGE_SIZE")
            found.append(RankReport(rank.rank, rank.pid, *self.board.figures(rank.rank), resident))
        return found

    def close(self) -> None:
        """Ends all processes; idempotent."""
        self.ended = self.ended or "they were closed"
        for rank in self.ranks:
            rank.close()
        if self._nursery is not None:
            self._nursery.close()

    def _or_end(self, step: int, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except WorkerError as error:
            self._end(step, "", error)

    def _end(self, step: int, within: str, error: WorkerError | None, unanswered: Sequence[int] = ()) -> NoReturn:
        """Ends all ranks, since none of them can go on without the others, and raises what is known. unanswered: the
        ranks whose reply is awaited."""
        late, what = self.stages.late(self.board, step, within, unanswered)
        said = [] if error is None else [str(error)]
        if late:
            said.append(" and ".join(f"rank {rank} (process {self.ranks[rank].pid})" for rank in late) + f" {what}")
        elif error is None:
            said.append(f"no rank answered step {step}{within}")
        said.append(f"All {len(self.ranks)} ranks were ended, and what their caches held is lost")
        rank = late[0] if late else (0 if error is None else error.rank)
        self.ended = ". ".join(said)
        self.close()
        raise WorkerError(self.ended, step, rank) from None


class RankThreads(RankGroup):
    """The same with ranks that are threads. makes: for each rank a function that is called in its thread."""

    def __init__(self, makes: Sequence[Make], group: ThreadGroup, stages: Stages):
        self.group, self.stages = group, stages
        self._threads = [ThreadPoolExecutor(1, f"rank-{rank}") for rank in range(len(makes))]
        self._running: dict[int, list[Future[Any]]] = {}  # by step, of each rank
        self._waits: int | None = None  # the step that waits for masks
        self.executors: list[Executor] = []
        try:
            made = self._all([thread.submit(make) for thread, make in zip(self._threads, makes, strict=True)])
            self.executors = [executor for executor, _ in made]
            self.facts = combined([facts for _, facts in made])
        except BaseException:
            self._end()
            raise

    def submit(self, step: Step) -> int:
        self._check_goes_on(step.step_id)
        if self._waits is not None:  # its masks never came
            del self._running[self._waits]
        self._waits = step.step_id if step.takes_masks else None
        self._running[step.step_id] = [
            thread.submit(_do, executor, own)
            for thread, executor, own in zip(self._threads, self.executors, self.stages.steps(step), strict=True)
        ]
        return step.step_id

    def finish(self, ticket: int, masks: Masks) -> None:
        self._waits, running = None, self._running[ticket]
        for rank in self.stages.last:
            begun = running[rank]
            running[rank] = self._threads[rank].submit(_finish, self.executors[rank], begun, masks)

    def show_drafts(self, ticket: int, ask: AskMasks) -> Sequence[Drafted]:
        turn = threading.Lock()

        def ask_in_turn(texts: Sequence[tuple[int, tuple[int, ...]]]) -> Sequence[bytes | None]:
            with turn:  # all ask the same grammar
                return ask(texts)

        runs = self._all(self._running[ticket])  # drafts may need collectives, so ranks make them at the same time
        ranks = zip(self._threads, self.executors, runs, strict=True)
        found = self._all([each.submit(own.show_drafts, run, ask_in_turn) for each, own, run in ranks])  # type: ignore[attr-defined]
        return self._or_end(check_alike, ticket, range(len(found)), found, "drafts")

    def collect(self, ticket: int) -> Reply:
        if self._waits == ticket:
            raise RuntimeError(f"step {ticket} was submitted with takes_masks: call finish before collect")
        return self._or_end(self.stages.reply, ticket, self._all(self._running.pop(ticket)))

    def load_weights(self, folder: Path) -> None:
        """See `UpdatesWeights`."""
        self._in_threads([partial(each.load_weights, folder) for each in self.executors])  # type: ignore[attr-defined]

    def use_weights(self) -> None:
        self._in_threads([each.use_weights for each in self.executors])  # type: ignore[attr-defined]

    def _in_threads(self, calls: Sequence[Callable[[], None]]) -> None:
        running = [thread.submit(call) for thread, call in zip(self._threads, calls, strict=True)]
        concurrent.futures.wait(running)
        for each in running:
            each.result()

    def close(self) -> None:
        """Ends all threads; idempotent."""
        self.ended = self.ended or "they were closed"
        for executor in self.executors:
            executor.close()
        self.executors = []
        self._end()

    def _all(self, futures: Sequence[Future[Any]]) -> list[Any]:
        """The results of all ranks. What went wrong first ends the waiting of the others."""
        concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
        if any(future.done() and future.exception() is not None for future in futures):
            self.group.end()
        errors = [error for future in futures if (error := future.exception()) is not None]
        # A CollectiveError is what follows from another rank's error: that one is the cause.
        for error in sorted(errors, key=lambda error: isinstance(error, CollectiveError)):
            self.ended = self.ended or f"{type(error).__name__}: {error}"
            raise error
        return [future.result() for future in futures]

    def _or_end(self, check: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return check(*arguments)
        except WorkerError as error:
            self.ended = str(error)
            self.group.end()
            raise

    def _end(self) -> None:
        self.group.end()
        for thread in self._threads:
            thread.shutdown()


def _do(executor: Executor, step: Step) -> Any:
    """Runs a step to its end: returns its reply, or, if it waits for masks, its ticket."""
    ticket = executor.submit(step)
    return ticket if step.takes_masks else executor.collect(ticket)


def _finish(executor: Executor, begun: Future[Any], masks: Masks) -> Reply:
    assert isinstance(executor, TakesMasks)
    executor.finish(begun.result(), masks)
    return executor.collect(begun.result())
