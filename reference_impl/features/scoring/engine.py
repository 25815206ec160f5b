"""Gives log-probabilities of a prompt's tokens (SamplingParams.prompt_logprobs) to its request as rows come back."""

from __future__ import annotations

from reference_impl.core.engine_feature import Afterwards, EngineFeature, Flight
from reference_impl.interfaces import Reply


class Scoring(EngineFeature):
    def collected(self, flight: Flight, reply: Reply) -> tuple[Reply, Afterwards]:
        for at, (start, reports) in reply.prompt_logprobs.items():
            known = flight.requests[flight.plan.rows[at].request_id].prompt_logprobs
            known += reports[max(0, len(known) - start) :]  # preempted, it computes its prompt once more
        return reply, None
