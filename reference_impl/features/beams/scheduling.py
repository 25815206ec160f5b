"""Requests that branch: several samples of one prompt (n > 1), and held requests, whose tokens are chosen outside of
the engine (beam search).

Branches share the blocks of what they have in common, and each writes into blocks of its own (copy-on-write, as
PagedAttention, Kwon et al. 2023).
"""

from __future__ import annotations

from reference_impl.core.scheduler import OpenPlan, Scheduler, SchedulerFeature
from reference_impl.interfaces import Request, StepOutput


class Branching(SchedulerFeature):
    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler

    def enrolled(self, request: Request) -> None:
        if request.holds:
            self.scheduler.outcomes[request.id] = Held()
        for child in request.children:
            self.scheduler.requests[child.id] = child  # so that it can be aborted; it gets its rank when it is forked

    def computed(self, request: Request) -> None:
        """When a prompt is computed, the other samples share it. Each computes the prompt's last token again, into a
        block of its own, and draws from its logits."""
        if request.children and not request.num_missing_tokens:
            for child in request.children:
                child.num_computed_tokens = request.num_prompt_tokens - 1
                self.scheduler.fork(request, child)
            request.children = []

    def withdraws(self, request: Request) -> bool:
        """A sample that was not forked yet. With a parent that ends, those of its samples end, too."""
        parent = None if request.parent_id is None else self.scheduler.requests.get(request.parent_id)
        if parent is None or request not in parent.children:
            return False
        parent.children.remove(request)
        return True

    def stuck(self, plan: OpenPlan) -> None:
        """If all running requests are held, they wait for other held ones, which may be queued behind a request that
        does not fit until the held ones end: only here may some overtake."""
        s = self.scheduler
        for request in [request for request in s.waiting if request.holds]:
            if plan.budget and s.enter(request, plan):
                s.waiting.remove(request.id)
                plan.grant(request, s.chunk(request, plan.budget))


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
