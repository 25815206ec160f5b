"""Hidden states instead of tokens (Engine.add(pooling=...), LLM.embed): nothing is sampled, and a request ends when its
prompt is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from reference_impl.core.engine_feature import Afterwards, EngineFeature, Flight
from reference_impl.interfaces import Grammar, Pooling, Reply, Request, SamplingParams, Step, StepPlan


class PoolsRequests(EngineFeature):
    def message(self, step: Step, plan: StepPlan, requests: Mapping[str, Request]) -> Step:
        """The step, unchanged. ValueError if a scheduler has a row sample for such a request."""
        for row in plan.rows:
            if row.samples and requests[row.request_id].pooling is not None:
                raise ValueError(
                    f"request {row.request_id!r} asks for hidden states (pooling), and its row samples: the scheduler "
                    "has to plan its rows with samples=False, and end it when its prompt is computed"
                )
        return step

    def collected(self, flight: Flight, reply: Reply) -> tuple[Reply, Afterwards]:
        for at, (start, values) in reply.pooled.items():
            flight.requests[flight.plan.rows[at].request_id].pool(start, values)
        return reply, None


def check_pooling(pooling: Pooling, sampling: SamplingParams, holds: bool, grammar: Grammar | None) -> None:
    """Raises ValueError for an unknown pooling, and for options of the request that would sample."""
    if pooling not in get_args(Pooling):
        raise ValueError(f"pooling: expected one of {', '.join(get_args(Pooling))}, or None, got {pooling!r}")
    asked = {"n": sampling.n != 1, "holds": holds, "grammar": grammar is not None}
    if named := [name for name, is_asked in asked.items() if is_asked]:
        raise ValueError(f"pooling={pooling!r}: nothing is sampled for such a request, leave out {', '.join(named)}")
