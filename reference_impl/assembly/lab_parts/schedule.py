"""A scheduler from one that sees ids and counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from reference_impl.core.block_pool import BlockPool
from reference_impl.core.kv_manager import KVManager as BlockTables
from reference_impl.interfaces import KVManager, Request, RequestState, Row, StepOutput, StepPlan


class CountingScheduler(Protocol):
    """The scheduler that lab 03 asks for: it sees ids and counts only."""

    def add(self, info: dict[str, Any]) -> None:
        """Queues a request. info: id; num_tokens of its prompt; arrival, seconds; priority, smaller goes first."""
        ...

    def abort(self, request_id: str) -> None: ...
    def schedule(self, now: float, free_blocks: int) -> tuple[Mapping[str, int], Sequence[str]]:
        """The next step: ({id: how many of its missing tokens are computed}, [ids of the preempted])."""
        ...

    def update(self, report: dict[str, tuple[int, int, bool]]) -> None:
        """Called after a step. report: {id: (tokens computed, tokens generated, finished)} for the plan's requests that
        were not aborted."""
        ...


class SchedulerById:
    """A Scheduler over a `CountingScheduler`: keeps the requests, takes their blocks from kv, appends their tokens, and
    finishes them. For requests with one sample, whose prompt is not scored."""

    def __init__(self, counting: CountingScheduler, kv: KVManager):
        self.counting, self.kv = counting, kv
        self.requests: dict[str, Request] = {}  # those not finished
        self.step_id = 0

    def add(self, request: Request) -> None:
        """Queues a request. ValueError for one that a `CountingScheduler` cannot plan."""
        if request.sampling.n > 1 or request.scores_prompt or request.holds or request.pooling is not None:
            raise ValueError(f"request {request.id}: samples, scores and embeddings need the engine's own scheduler")
        self.requests[request.id] = request
        info = {"num_tokens": request.num_tokens, "arrival": request.arrival, "priority": request.priority}
        self.counting.add({"id": request.id, **info})

    def abort(self, request_id: str) -> None:
        self._finish(request_id, "abort")
        self.counting.abort(request_id)

    def has_work(self) -> bool:
        return bool(self.requests)

    @property
    def num_running(self) -> int:
        return sum(request.state is RequestState.RUNNING for request in self.requests.values())

    @property
    def num_waiting(self) -> int:
        return len(self.requests) - self.num_running

    def schedule(self, now: float) -> StepPlan:
        """The plan of the next step. ValueError if it names a request that it must not; RuntimeError if there are too
        few blocks for it."""
        counts, preempted = self.counting.schedule(now, self.kv.num_available)
        self._check(counts, preempted)
        for name in preempted:
            request = self.requests[name]
            self.kv.free(request)
            request.num_computed_tokens, request.state = 0, RequestState.WAITING
        admitted = [name for name in counts if self.requests[name].state is RequestState.WAITING]
        for name in sorted(counts, key=admitted.__contains__):  # running requests take blocks first
            request = self.requests[name]
            if name in admitted:
                fits = self.kv.admit(request, request.num_tokens, counts[name])
            else:
                fits = self.kv.reserve(request, counts[name])
            if not fits:
                raise RuntimeError(f"the plan does not fit: no blocks for {counts[name]} tokens of {name}")
            request.state = RequestState.RUNNING
        self.step_id += 1
        rows = tuple(self._row(name, n) for name, n in counts.items())
        entered = tuple((name, 0) for name in admitted)
        return StepPlan(self.step_id, rows, tuple(preempted), self.kv.take_transfers(), entered)

    def _check(self, counts: Mapping[str, int], preempted: Sequence[str]) -> None:
        for name, n in counts.items():
            missing = self.requests[name].num_missing_tokens if name in self.requests else 0
            if not 1 <= n <= missing or name in preempted:
                raise ValueError(f"plan {dict(counts)}, preempted {list(preempted)}: {name} misses {missing} tokens")
        for name in preempted:
            if name not in self.requests or self.requests[name].state is not RequestState.RUNNING:
                raise ValueError(f"preempted {list(preempted)}: {name} does not run")

    def _row(self, name: str, n: int) -> Row:
        request = self.requests[name]
        start = request.num_computed_tokens
        return Row(name, start, n, samples=start + n == request.num_tokens)

    def update(self, plan: StepPlan, output: StepOutput) -> list[Request]:
        report, finished = {}, []
        for row in plan.rows:
            request = self.requests.get(row.request_id)
            if request is None:  # aborted while its step ran
                continue
            request.num_computed_tokens += row.num_tokens
            reason = self._append(request, output.tokens[request.id]) if row.samples else None
            report[request.id] = (row.num_tokens, int(row.samples), reason is not None)
            if reason is not None:
                finished.append(self._finish(request.id, reason))
        self.counting.update(report)
        return finished

    def _append(self, request: Request, tokens: Sequence[int]) -> str | None:
        """Appends the tokens; returns why the request ends with them, or None."""
        request.tokens += tokens
        if request.tokens[-1] in request.stop_token_ids:
            return "stop"
        return "length" if request.num_tokens >= request.max_total_tokens else None

    def _finish(self, request_id: str, reason: str) -> Request:
        request = self.requests.pop(request_id)
        self.kv.free(request)
        request.state, request.finish_reason = RequestState.FINISHED, reason
        return request


def scheduler_parts(counting: CountingScheduler, num_blocks: int, block_size: int) -> dict[str, Any]:
    """Parts for a `LabEngine` with this scheduler, a block pool and no prefix cache. The engine's options must name the
    same num_blocks."""
    pool = BlockPool(num_blocks)
    kv = BlockTables(pool, block_size)
    return {"block_pool": pool, "kv_manager": kv, "scheduler": SchedulerById(counting, kv)}
