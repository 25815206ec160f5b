"""Requests that branch: several samples of one prompt (n > 1), and held requests, whose tokens are chosen outside of
the engine (beam search).

Branches share the blocks of what they have in common, and each writes into blocks of its own (copy-on-write, as
PagedAttention, Kwon et al. 2023).

Extends `Scheduler.add`, `abort`, `_enroll`, `_commit`, `_admit` and `_withdraw`; adds `fork`.
"""

from __future__ import annotations

from reference_impl.core.scheduler import OpenPlan, Scheduler
from reference_impl.interfaces import Request, RequestState, StepOutput


class Branching(Scheduler):
    def add(self, request: Request) -> None:
        super().add(request)
        for child in request.children:
            self._requests[child.id] = child  # so that it can be aborted; it gets its rank when it is forked

    def abort(self, request_id: str) -> None:
        """Its children that were not forked yet end, too."""
        for child in [*self._requests[request_id].children]:
            super().abort(child.id)
        super().abort(request_id)

    def _enroll(self, request: Request) -> None:
        super()._enroll(request)
        if request.holds:
            self._outcomes[request.id] = Held()

    def fork(self, parent: Request, child: Request) -> None:
        """The child shares the blocks of its computed tokens, which are the parent's. If the parent was preempted,
        or no seat is free, the child waits like any other and computes its own."""
        self._enroll(child)
        if parent.state is RequestState.RUNNING and len(self.running) < self.max_num_seqs:
            self.kv.fork(parent, child)
            child.num_cached_tokens = child.num_computed_tokens
            self._run(child)
        else:
            child.num_computed_tokens = 0
            self.waiting.push(child, self._ranks[child.id])

    def _commit(self, request: Request) -> None:
        """When a prompt is computed, the other samples share it. Each computes the prompt's last token again, into a
        block of its own, and draws from its logits."""
        super()._commit(request)
        if request.children and not request.num_missing_tokens:
            for child in request.children:
                child.num_computed_tokens = request.num_prompt_tokens - 1
                self.fork(request, child)
            request.children = []

    def _withdraw(self, request: Request) -> None:
        parent = None if request.parent_id is None else self._requests.get(request.parent_id)
        if parent is not None and request in parent.children:  # not forked yet
            parent.children.remove(request)
        else:
            super()._withdraw(request)

    def _admit(self, plan: OpenPlan) -> None:
        """If all running requests are held, they wait for other held ones, which may be queued behind a request that
        does not fit until the held ones end: only here may some overtake."""
        super()._admit(plan)
        if not self.running or plan.granted or plan.preempted or self._in_flight:
            return
        for request in [request for request in self.waiting if request.holds]:
            if plan.budget and self._enter(request, plan):
                self.waiting.remove(request.id)
                plan.grant(request, self._chunk(request, plan.budget))


class Held:
    """The `Outcome` of a held request: its tokens are reported and not appended, once for each length of its text. It
    is sampled from at the length that it has; preempted, it computes its tokens again and does not sample again."""

    def __init__(self) -> None:
        self.sampled_at = -1  # with how many tokens it was sampled from last

    def samples(self, request: Request) -> bool:
        return len(request.tokens) != self.sampled_at

    def advanced(self, request: Request, samples: bool) -> bool:
        if samples:
            self.sampled_at = len(request.tokens)
        return samples

    def collected(self, request: Request, output: StepOutput) -> str | None:
        request.logprobs += output.logprobs.get(request.id, ())
        return None
