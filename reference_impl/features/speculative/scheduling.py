"""Rows that verify drafts (speculative decoding, Leviathan et al. 2023): a request that decodes computes drafts behind
its token, and keeps those that equal what its positions get, see `drafts.py`.

A row is planned as if all of its drafts were right; `Scheduler.update` appends those that were, and rolls back the
rest. Drafts take tokens of the budget and blocks, as far as there are some left: no request is preempted for them.

Extends `Scheduler.schedule`, `cut`, `continue_running` and `finish`.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

from reference_impl.core.scheduler import OpenPlan, Scheduler, Shares
from reference_impl.features.grammars.drafts import allowed_drafts
from reference_impl.interfaces import HostProposer, KeepsRequests, Request, RequestState, StepPlan


class Drafting(Scheduler):
    """A scheduler that plans drafts. num_drafts: the most that are verified for a decoding row. host_proposer: makes
    them; None: the worker does. shows_drafts: whether the host sees the worker's drafts before it sends masks."""

    def __init__(
        self, *core: Any, num_drafts: int, host_proposer: HostProposer | None = None, shows_drafts: bool = False,
        **options: Any,
    ):  # fmt: skip
        super().__init__(*core, **options)
        self.shows_drafts = shows_drafts
        self.has_drafts = True  # whether there may be any in the step that is planned: asked for each row, if so
        self.num_drafts, self.host_proposer = num_drafts, host_proposer
        self._keeper = host_proposer if isinstance(host_proposer, KeepsRequests) else None
        self._useful: dict[str, int] = {}  # in the step that is planned, see `useful_drafts`

    def schedule(self, now: float) -> StepPlan:
        self._useful.clear()
        return super().schedule(now)

    def cut(self, shares: Shares, left: int) -> Shares:
        """The shares, where drafts of requests that rank before a prompt come before its chunk."""
        if not self.has_drafts:
            return super().cut(shares, left)
        cut = []
        for request, missing in shares:
            [(_, num_tokens)] = super().cut([(request, missing)], left)
            left -= num_tokens if missing > 1 else min(left, self._num_useful(request))
            cut.append((request, num_tokens))
        return cut

    def continue_running(self, shares: Shares, plan: OpenPlan) -> None:
        if not self.has_drafts:
            return super().continue_running(shares, plan)
        num_decoding = sum(request.num_missing_tokens == 1 for request, _ in shares)
        left = max(0, plan.budget - num_decoding)  # for chunks and drafts, as in `cut`
        for request, num_tokens in shares:
            if request.num_missing_tokens > 1:
                left -= num_tokens
            elif num_drafts := min(left, self._num_useful(request)):
                left -= num_drafts
                if self._continue_with_drafts(request, num_drafts, plan):
                    continue
            super().continue_running([(request, num_tokens)], plan)

    def _num_useful(self, request: Request) -> int:
        """`useful_drafts`, computed once a step: `cut` and `continue_running` both need it."""
        if (num := self._useful.get(request.id)) is None:
            num = self._useful[request.id] = self.useful_drafts(request)
        return num

    def useful_drafts(self, request: Request) -> int:
        """How many drafts a request can use: no more than can be kept, with the token that is sampled behind them. 0
        for a held request, whose tokens are chosen elsewhere, before samples are forked, which share what is known to
        be computed, and under a grammar if the host does not see the drafts, on which its masks depend."""
        seen = self.host_proposer is not None or self.shows_drafts
        if request.holds or request.children or (request.grammar is not None and not seen):
            return 0
        most = min(request.num_prompt_tokens + request.sampling.max_tokens, request.max_total_tokens)
        return max(0, min(self.num_drafts, most - request.num_tokens - 1))

    def _continue_with_drafts(self, request: Request, num_drafts: int, plan: OpenPlan) -> bool:
        """Grants the request its token with drafts; False if there are no drafts, or no room for them."""
        if request.state is not RequestState.RUNNING:  # preempted a moment ago
            return False
        drafts: tuple[int, ...] = ()
        if self.host_proposer is not None:
            drafts = _propose(self.host_proposer, request, num_drafts)
            if request.grammar is not None:
                drafts = allowed_drafts(request, drafts)
            num_drafts = len(drafts)
        fits = num_drafts and 1 + num_drafts <= plan.budget and self.kv.reserve(request, 1 + num_drafts)
        if fits:
            plan.grant(request, 1, num_drafts, drafts)
        return bool(fits)

    def finish(self, request: Request, reason: str) -> None:
        super().finish(request, reason)
        if self._keeper is not None:
            self._keeper.finished(request)


def _propose(proposer: HostProposer, request: Request, k: int) -> tuple[int, ...]:
    if request.num_in_flight:  # the text ends in tokens that are not known yet
        return ()
    tokens, text = request.tokens, list(request.tokens)  # copied and compared in 7 us, if it has 4,000 tokens
    expected = f"expected at most {k} tokens for request {request.id!r}"
    name = f"{type(proposer).__name__}.propose"
    try:
        drafts = tuple(map(operator.index, itertools.islice(proposer.propose(request, k), k + 1)))
    except TypeError as error:
        raise TypeError(f"{name}: {expected}, which are integers: {error}") from error
    if len(drafts) > k:
        raise ValueError(f"{name}: {expected}, got more")
    if request.tokens is not tokens or tokens != text:
        request.tokens, tokens[:] = tokens, text
        raise ValueError(f"{name} changed the tokens of request {request.id!r}, which are only to be read")
    return drafts
