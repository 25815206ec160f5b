"""Log-probabilities of a prompt's tokens (SamplingParams.prompt_logprobs) go to their request, as its rows come back.

It extends `Engine.update`.
"""

from __future__ import annotations

from collections.abc import Mapping

from reference_impl.core.engine import Engine, FinishedStep
from reference_impl.interfaces import Reply, Request, Step, StepPlan


class ScoringEngine(Engine):
    def update(self, plan: StepPlan, step: Step, reply: Reply, requests: Mapping[str, Request]) -> FinishedStep:
        for at, (start, reports) in reply.prompt_logprobs.items():
            known = requests[plan.rows[at].request_id].prompt_logprobs
            known += reports[max(0, len(known) - start) :]  # preempted, it computes its prompt once more
        return super().update(plan, step, reply, requests)
