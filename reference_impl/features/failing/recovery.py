"""Ends a request for which a step has no token (`Reply.errors`), or no hidden state, with finish_reason "error"; the
step's result has such a request with no tokens.

What it computed may be broken, on a GPU also before the first bad number: attention multiplies what it masks by 0, and
0 x NaN is NaN. So its blocks leave the prefix cache, with all cached ones that no request holds. Requests that hold
some of them (`KVManager.commit` lets a request take over another's block) lose this step's tokens and compute all of
theirs again, alone: with a cache_salt of their own they share no blocks. So does a failed request that has full blocks,
since some may be another's; where it fails once more, it ends. A page store keeps what was saved.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from reference_impl.core.engine import Engine
from reference_impl.core.engine_feature import Afterwards, FinishedStep, Flight
from reference_impl.core.kv_manager import KVManager
from reference_impl.core.scheduler import Scheduler
from reference_impl.interfaces import BlockId, Reply, Request, RequestState

logger = logging.getLogger("inferlab.engine")
_ALONE = "\0computed again, alone: "  # what the cache_salt of such requests begins with


class Recovery:
    def __init__(self, engine: Engine):
        self.engine = engine
        # Requests that compute their tokens again, and the last step in flight that has a row of what they lost.
        self.stale: dict[Request, int] = {}
        self._num_alone = 0

    def collected(self, flight: Flight, reply: Reply, broken: Sequence[int]) -> tuple[Reply, Afterwards]:
        """See `EngineFeature.collected`. broken: the rows whose hidden states are not all finite numbers."""
        errors = {**dict.fromkeys(broken, "its hidden states are not all finite numbers"), **reply.errors}
        requests = [flight.requests[row.request_id] for row in flight.plan.rows]
        stale = self._stale_in(flight)
        # One that ended before has no use for a token.
        failed = {
            request: error
            for at, error in errors.items()
            if (request := requests[at]) not in stale and request.state is not RequestState.FINISHED
        }
        blocks, again = self._reached(flight, failed) if failed else (set(), [])
        for request in again:
            self._compute_again(request, failed.get(request, "it shares blocks with such a request"))
        lost = stale.union(again)
        lengths = {request: len(request.tokens) for request in failed if request not in lost}

        def fail(done: FinishedStep) -> FinishedStep:
            for request, length in lengths.items():
                self._fail(request, failed[request], len(request.tokens) - length)
            if failed:
                self._forget(blocks)
            tokens = {**done.output.tokens, **dict.fromkeys((request.id for request in lengths), ())}
            done = done._replace(output=replace(done.output, tokens=tokens))
            return _without({request.id for request in lost}, [request.id for request in again], done) if lost else done

        return _without_rows({at for at, request in enumerate(requests) if request in lost}, reply), fail

    def _stale_in(self, flight: Flight) -> set[Request]:
        """The requests whose row in this step is of what they lost. With the last such step they may be admitted."""
        step = flight.plan.step_id
        stale = {request for request, last in self.stale.items() if step <= last}
        for request in [request for request, last in self.stale.items() if step >= last]:
            del self.stale[request]
            request.num_in_flight = 0
        return stale

    def _reached(self, flight: Flight, failed: Collection[Request]) -> tuple[set[BlockId], list[Request]]:
        """The blocks that may hold broken numbers, and the requests that are to compute their tokens again."""
        scheduler, kv = self.engine.scheduler, self.engine.kv
        if not (isinstance(scheduler, Scheduler) and isinstance(kv, KVManager) and kv.index is not None):
            return set(), []
        if flight.plan.step_id not in scheduler.in_flight:
            scheduler.advance(flight.plan)  # which shares blocks; `update` would do it later
        blocks = {block for r in failed for block in r.block_table[r.num_cached_tokens // kv.block_size :]}
        sharing = [request for request in scheduler.running if not blocks.isdisjoint(request.block_table)]
        for request in sharing:  # and what they computed of these blocks
            first = next(i for i, block in enumerate(request.block_table) if block in blocks)
            blocks.update(request.block_table[first:])
        # Which of its full blocks a request computed itself is not known. One without blocks may have read any.
        may_share = [r for r in failed if not r.block_table or r.num_computed_tokens >= kv.block_size]
        again = [*may_share, *(r for r in sharing if r not in failed)]
        return blocks, [r for r in again if not r.holds and not (r.cache_salt or "").startswith(_ALONE)]

    def _compute_again(self, request: Request, why: str) -> None:
        """Takes the request's blocks and queues it again, as a preemption does, but nothing of it is cached, and steps
        in flight give it nothing."""
        logger.warning("request %r: %s: its tokens are computed again, alone", request.id, why)
        engine, self._num_alone = self.engine, self._num_alone + 1
        scheduler = engine.scheduler
        assert isinstance(scheduler, Scheduler)
        for step, expected in scheduler.in_flight.items():
            scheduler.in_flight[step] = [one for one in expected if one[0] is not request]
        for each in (request, *request.children):  # samples that are forked later share its blocks
            each.cache_salt = f"{_ALONE}{self._num_alone}"
        scheduler.restart(request)
        engine.planner.close(request.id)
        if engine.in_flight:
            self.stale[request] = engine.in_flight[-1].plan.step_id
            request.num_in_flight = 1  # so that it waits for these steps

    def _fail(self, request: Request, error: str, num_new: int) -> None:
        """Ends the request with an error and takes back the num_new tokens that the step gave it."""
        request.error = f"request {request.id!r}: {error}"
        warnings.warn(request.error, RuntimeWarning, stacklevel=2)
        if request.state is RequestState.FINISHED:  # by this step, with a token that is none
            request.drop(num_new)
            request.finish_reason = "error"
        else:
            self.engine.stop(request, "error", num_new)

    def _forget(self, blocks: set[BlockId]) -> None:
        kv = self.engine.kv
        if isinstance(kv, KVManager) and kv.index is not None:
            # A running step may still use those that were given up.
            kv.references.forget(blocks.union(*(given_up for _, given_up in kv.references.releasing)))


def _without_rows(at: Collection[int], reply: Reply) -> Reply:
    """The reply, without errors, and with nothing for these rows."""
    if not at:
        return replace(reply, errors={})
    by_row = {name: getattr(reply, name) for name in ("logprobs", "prompt_logprobs", "pooled")}
    kept: dict[str, Any] = {
        name: {row: found for row, found in rows.items() if row not in at} for name, rows in by_row.items()
    }
    tokens = tuple(() if row in at else new for row, new in enumerate(reply.tokens))
    return replace(reply, tokens=tokens, errors={}, **kept)


def _without(lost: Collection[str], preempted: Sequence[str], done: FinishedStep) -> FinishedStep:
    """The step without the rows of the requests that lost them, some of which were preempted now."""
    plan = done.plan
    rows = tuple(row for row in plan.rows if row.request_id not in lost)
    num_undrafted = min(plan.num_undrafted, sum(not row.num_drafts for row in rows))
    plan = replace(plan, rows=rows, preempted=(*plan.preempted, *preempted), num_undrafted=num_undrafted)
    return done._replace(plan=plan)
