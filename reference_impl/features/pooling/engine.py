"""Hidden states instead of tokens (Engine.add(pooling=...), LLM.embed): nothing is sampled, and a request ends when its
prompt is computed.

It extends `Engine.update`; requests are checked by `check_pooling`, plans by `check_rows`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import get_args

from reference_impl.core.engine import Engine, FinishedStep
from reference_impl.interfaces import Grammar, Pooling, Reply, Request, Row, SamplingParams, Step, StepPlan


class PoolingEngine(Engine):
    def update(self, plan: StepPlan, step: Step, reply: Reply, requests: Mapping[str, Request]) -> FinishedStep:
        for at, (start, values) in reply.pooled.items():
            requests[plan.rows[at].request_id].pool(start, values)
        return super().update(plan, step, reply, requests)


def check_pooling(pooling: Pooling, sampling: SamplingParams, holds: bool, grammar: Grammar | None) -> None:
    """ValueError where there would be something to sample."""
    if pooling not in get_args(Pooling):
        raise ValueError(f"pooling: expected one of {', '.join(get_args(Pooling))}, or None, got {pooling!r}")
    asked = {"n": sampling.n != 1, "holds": holds, "grammar": grammar is not None}
    if named := [name for name, is_asked in asked.items() if is_asked]:
        raise ValueError(f"pooling={pooling!r}: nothing is sampled for such a request, leave out {', '.join(named)}")


def check_rows(rows: Iterable[Row], requests: Mapping[str, Request]) -> None:
    """ValueError where a scheduler has a row sample for such a request."""
    for row in rows:
        if row.samples and requests[row.request_id].pooling is not None:
            raise ValueError(
                f"request {row.request_id!r} asks for hidden states (pooling), and its row samples: the scheduler has "
                "to plan its rows with samples=False, and end it when its prompt is computed"
            )
