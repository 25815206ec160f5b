"""Keeps an engine's books of drafts (speculative decoding, Leviathan et al. 2023): a step is planned as if all drafts
of its rows were right, and its reply says how many were."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from reference_impl.core.engine_feature import Afterwards, EngineFeature, FinishedStep, Flight
from reference_impl.core.planner import Planner
from reference_impl.interfaces import Reply, Request, Row, StepPlan

logger = logging.getLogger("inferlab.engine")


class BooksDrafts(EngineFeature):
    """Corrects plans by how many drafts were right. acceptance, num_draft_levels: see `StepPlan`, for the trace."""

    def __init__(self, planner: Planner, acceptance: str, num_draft_levels: int):
        self.planner, self.acceptance, self.num_draft_levels = planner, acceptance, num_draft_levels
        self.num_broken_drafts = 0  # that came of a draft's logits which are not numbers

    def collected(self, flight: Flight, reply: Reply) -> tuple[Reply, Afterwards]:
        if not self.planner.has_drafted:
            return reply, None
        plan, requests = flight.plan, flight.requests
        if reply.broken_drafts:
            self._note_broken(plan, reply.broken_drafts)
        settle(self.planner, plan, reply, requests)
        starts = {row.request_id: _start_of(row, requests[row.request_id]) for row in plan.rows}
        drafted = [requests[row.request_id] for row in plan.rows if row.num_drafts]
        if not drafted and all(row.start == starts[row.request_id] for row in plan.rows):
            return reply, None
        had = [(request, len(request.tokens)) for request in drafted]
        return reply, partial(self._book, starts, had)

    def _book(self, starts: dict[str, int], had: list[tuple[Request, int]], done: FinishedStep) -> FinishedStep:
        """The step as it really was. starts: where rows began. had: the requests with drafts, and how many tokens each
        had before."""
        tokens = done.output.tokens
        for request, length in had:  # of several tokens, those behind one that ends the request are not its own
            if request.id in tokens:  # one that failed is no longer among the requests
                tokens[request.id] = tuple(request.tokens[length:])
        rows = tuple(row._replace(start=starts[row.request_id]) for row in done.plan.rows)
        num_sampled = tuple(len(tokens.get(row.request_id, ())) for row in rows)
        plan = replace(done.plan, rows=rows)
        if had:
            plan = replace(plan, acceptance=self.acceptance, num_draft_levels=self.num_draft_levels)
        return done._replace(plan=plan, num_sampled=num_sampled)

    def _note_broken(self, plan: StepPlan, number: int) -> None:
        if not self.num_broken_drafts:
            logger.warning(
                "step %d: %d drafts of the draft model came of logits that are not numbers (NaN or infinite): "
                "texts stay right, and such drafts cost time for nothing. Its weights may be broken, or too large for "
                "its dtype; this is said once, Engine.num_broken_drafts counts on", plan.step_id, number,
            )  # fmt: skip
        self.num_broken_drafts += number


def settle(planner: Planner, plan: StepPlan, reply: Reply, requests: Mapping[str, Request]) -> None:
    """Corrects the planner's counts when a step is over: some drafts that it counted as right were not."""
    for row, new in zip(plan.rows, reply.tokens, strict=True):
        sent = planner.sent.get(row.request_id) if row.num_drafts else None
        if sent is not None and sent.request is requests[row.request_id]:
            wrong = row.num_drafts + 1 - len(new)
            sent.num_computed -= wrong
            sent.num_tokens -= wrong


def _start_of(row: Row, request: Request) -> int:
    """Where a row really began. A plan's rows begin where they would if all drafts of the step before were right.
    Before the step's own tokens are known, a row that samples is known to have reached the request's last."""
    return len(request.tokens) - row.num_tokens if row.samples and not request.holds else row.start
