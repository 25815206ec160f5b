"""Requests that branch: several samples of one prompt (n > 1), and held requests, whose tokens are chosen outside of
the engine (beam search).

Branches share the blocks of what they have in common, and each writes into blocks of its own (copy-on-write, from
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
        """Forks the other samples when the prompt is computed. Each computes the prompt's last token again, into a
        block of its own, and draws from its logits."""
        if request.children and not request.num_missing_tokens:
            for child in request.children:
                child.num_computed_tokens = request.num_prompt_tokens - 1
                self.scheduler.fork(request, child)
            request.children = []

    def withdraws(self, request: Request) -> bool:
        """Whether the request is a sample that was not forked yet. When a parent ends, so do these samples."""
        parent = None if request.parent_id is None else self.scheduler.requests.get(request.parent_id)
        if parent is None or request not in parent.children:
            return False
        parent.children.remove(request)
        return True

    def stuck(self, plan: OpenPlan) -> None:
        """Lets held requests overtake in the queue. If all running requests are held, they wait for other held ones,
        which may be queued behind a request that does not fit until the held ones end."""
        s = self.scheduler
        for request in [request for request in s.waiting if request.holds]:
            if plan.budget and s.enter(request, plan):
                s.waiting.remove(request.id)
                plan.grant(request, s.chunk(request, plan.budget))


class Held:
    """The `Outcome` of a held request: what is sampled for it is reported and not appended, once for each length of its
    text. After a preemption it computes its tokens again and does not sample again."""

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
