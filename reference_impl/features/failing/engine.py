"""Ends a request for which a step has no token (`Reply.errors`), or no hidden state, with finish_reason "error"; the
step's result has such a request with no tokens.

What it has put into the prefix cache may be broken, also before the first bad number: attention multiplies what it
masks by 0, and 0 x NaN is NaN. So all cached blocks that no request holds are evicted, and those that a running step
may still use are evicted when it is over. A page store keeps what was saved.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

from reference_impl.core.engine import Engine
from reference_impl.core.engine_feature import Afterwards, EngineFeature, FinishedStep, Flight
from reference_impl.core.kv_manager import KVManager
from reference_impl.interfaces import DefersReuse, Reply, Request, RequestState


class Failing(EngineFeature):
    def __init__(self, engine: Engine):
        self.engine = engine
        self._to_evict = False  # blocks of a request that has failed are still held for a running step

    def collected(self, flight: Flight, reply: Reply) -> tuple[Reply, Afterwards]:
        broken = [at for at, (_, values) in reply.pooled.items() if not all(map(math.isfinite, values))]
        if not (reply.errors or broken or self._to_evict):
            return reply, None
        errors = {**dict.fromkeys(broken, "its hidden states are not all finite numbers"), **reply.errors}
        requests = ((flight.requests[flight.plan.rows[at].request_id], error) for at, error in errors.items())
        # One that ended before has no use for a token.
        failed = [(r, error, len(r.tokens)) for r, error in requests if r.state is not RequestState.FINISHED]

        def fail(done: FinishedStep) -> FinishedStep:
            for request, error, length in failed:
                self._fail(request, error, len(request.tokens) - length)
            self._evict_cached()
            tokens = {**done.output.tokens, **dict.fromkeys((request.id for request, *_ in failed), ())}
            return done._replace(output=replace(done.output, tokens=tokens))

        return replace(reply, errors={}), fail

    def _fail(self, request: Request, error: str, num_new: int) -> None:
        """Ends the request with an error and takes back the num_new tokens that the step gave it."""
        request.error = f"request {request.id!r}: {error}"
        warnings.warn(request.error, RuntimeWarning, stacklevel=2)
        if request.state is RequestState.FINISHED:  # by this step, with a token that is none
            request.drop(num_new)
            request.finish_reason = "error"
        else:
            self.engine.stop(request, "error", num_new)

    def _evict_cached(self) -> None:
        kv = self.engine.kv
        if isinstance(kv, KVManager) and kv.index is not None:
            blocks = kv.references.take(kv.num_available)
            assert blocks is not None  # as many as there are
            kv.pool.decref(blocks)
        self._to_evict = isinstance(kv, DefersReuse) and kv.num_releasing > 0
