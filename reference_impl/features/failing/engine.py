"""A request for which a step has no token (`Reply.errors`), or no hidden state, ends with finish_reason "error".

Extends `Engine.update`; the step's result has such a request with no tokens.

What it has put into the prefix cache may be broken, also in front of the first bad number: attention multiplies what it
masks by 0, and 0 x NaN is NaN. So all cached blocks that no request holds are evicted then, and those that a running
step may still use when it is over. A page store keeps what was saved.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace

from reference_impl.core.engine import Engine, FinishedStep
from reference_impl.core.kv_manager import KVManager
from reference_impl.interfaces import DefersReuse, Reply, Request, RequestState, Step, StepPlan


class FailingEngine(Engine):
    _to_evict = False  # blocks of a request that has failed are still held for a running step

    def update(self, plan: StepPlan, step: Step, reply: Reply, requests: Mapping[str, Request]) -> FinishedStep:
        broken = [at for at, (_, values) in reply.pooled.items() if not all(map(math.isfinite, values))]
        if not (reply.errors or broken):
            done = super().update(plan, step, reply, requests)
            if self._to_evict:
                self._evict_cached()
            return done
        errors = {**dict.fromkeys(broken, "its hidden states are not all finite numbers"), **reply.errors}
        failed = {plan.rows[at].request_id: error for at, error in errors.items()}
        lengths = {name: len(requests[name].tokens) for name in failed}
        done = super().update(plan, step, replace(reply, errors={}), requests)
        for name, error in failed.items():
            self._fail(requests[name], error, lengths[name])
        self._evict_cached()
        tokens = {**done.output.tokens, **dict.fromkeys(failed, ())}
        return done._replace(output=replace(done.output, tokens=tokens))

    def _fail(self, request: Request, error: str, length: int) -> None:
        """length: its tokens before the step."""
        if request.finish_reason == "abort":
            return
        request.error = f"request {request.id!r}: {error}"
        warnings.warn(request.error, RuntimeWarning, stacklevel=2)
        if request.state is RequestState.FINISHED:  # by this step, with a token that is none
            request.drop(len(request.tokens) - length)
            request.finish_reason = "error"
        else:
            self.abort(request.id, "error", len(request.tokens) - length)

    def _evict_cached(self) -> None:
        kv = self.kv
        if isinstance(kv, KVManager) and kv.index is not None:
            blocks = kv.references.take(kv.num_available)
            assert blocks is not None  # as many as there are
            kv.pool.decref(blocks)
        self._to_evict = isinstance(kv, DefersReuse) and kv.num_releasing > 0
