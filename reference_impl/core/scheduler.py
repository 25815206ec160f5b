"""Continuous batching: before every step, decide how many tokens each request computes (Orca, Yu et al.
2022), with prompts cut into chunks so that they never hold up decoding (Sarathi-Serve, Agrawal et al. 2024).

There is no prefill and no decode here: a request has tokens, some of them computed, and gets as many of the missing
ones as the budget allows. It misses one while it decodes and many while its prompt is read.

    schedule: 1. each running request that misses one token gets it
              2. what is left of the budget goes to prompts that are being read, a chunk each
              3. what is left then admits waiting requests, in order, while all their known tokens fit in free blocks
    advance:  commits what a submitted step computes; the tokens that it samples count as in flight
    update:   appends these tokens, and finishes requests

Parts of it: the policy (whose turn it is), admission (how much of a request must fit), and features, which have hooks
where requests wait, run, give up blocks or end. What makes a row's drafts extends it (`cut`, `continue_running`).

Requests wait, and run, in the order of their rank. Where blocks run out, the running request that ranks last is
preempted: it gives up its blocks, keeps its tokens, and computes them again when it is admitted again.

Between `advance` and `update` the next step may be planned: a request's tokens in flight belong to one step, and the
next one computes them as if they were known.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from reference_impl.core.hooks import Hooks
from reference_impl.core.ranking import FirstCome, RankedQueue
from reference_impl.interfaces import KVManager, Outcome, Policy, Request, RequestState, Row, StepOutput, StepPlan

SCORED_AT_ONCE = 128  # prompt tokens in a step that need logits; with a vocabulary of 150,000, 77 MB in float32

Shares = list[tuple[Request, int]]  # how many tokens of the budget each request may compute, best rank first

row = partial(tuple.__new__, Row)  # as Row(*values), in half the time: one for each row of each step


@dataclass
class OpenPlan:
    """A step while it is planned. A request with tokens in it is not preempted by it: those that rank last are."""

    budget: int  # tokens that may still be granted
    granted: list[tuple[Request, int, int, tuple[int, ...]]] = field(default_factory=list)  # tokens; drafts: see Row
    preempted: list[str] = field(default_factory=list)
    admitted: list[tuple[str, int]] = field(default_factory=list)  # see StepPlan

    def grant(self, request: Request, num_tokens: int, num_drafts: int = 0, drafts: tuple[int, ...] = ()) -> None:
        self.granted.append((request, num_tokens, num_drafts, drafts))
        self.budget -= num_tokens + num_drafts


class SchedulerFeature:
    """What some requests or KV managers need of a scheduler besides. Features are independent of one another. A feature
    implements some of these hooks; each hook is called for all features that have it, in their order."""

    def begin(self, now: float) -> None:
        """Called when a step begins, before anything is planned."""

    def enrolled(self, request: Request) -> None:
        """Called when a request is added, to wait, or to run as a branch of another."""

    def able(self, requests: Sequence[Request]) -> Sequence[Request]:
        """The running requests that may get tokens in this step, of those that the features before allow."""
        return requests

    def sets_aside(self, request: Request) -> bool:
        """Whether the first request of the queue is to wait outside of it; the feature queues it again."""
        return False

    def may_preempt(self, step_id: int) -> bool:
        """Whether to preempt a request now that blocks have run out; False where blocks become free without that.
        step_id: the step that is planned."""
        return True

    def gives_up(self, request: Request) -> bool:
        """Whether the feature gave up a preempted request's blocks in a way that keeps what is computed."""
        return False

    def computed(self, request: Request) -> None:
        """Called when a step with tokens of the request's prompt was submitted."""

    def stuck(self, plan: OpenPlan) -> None:
        """Called when requests run and none has anything to compute, in this step or in one that is in flight."""

    def withdraws(self, request: Request) -> bool:
        """Whether a request that ends without running was kept by this feature and not by the queue."""
        return False


def known_tokens(request: Request) -> int:
    """The number of tokens that must fit to admit a request: all, not only this step's chunk, since a prompt that is
    preempted half-way has wasted its computation."""
    return request.num_tokens


class Scheduler:
    """Plans each step. max_num_seqs: how many requests may run. max_num_batched_tokens: the budget, new tokens in one
    step. admission: for how many tokens of a waiting request there must be blocks."""

    def __init__(
        self, kv: KVManager, max_num_seqs: int, max_num_batched_tokens: int, policy: Policy | None = None,
        admission: Callable[[Request], int] = known_tokens,
    ):  # fmt: skip
        self.kv, self.policy, self.admission = kv, FirstCome() if policy is None else policy, admission
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.num_stages = 1  # of the executor that it plans for: `features/stages` raises it
        self.hooks = Hooks(SchedulerFeature)
        self.waiting = RankedQueue()
        self.running: list[Request] = []  # best rank first
        self.num_waiting = self.num_running = 0
        self.requests: dict[str, Request] = {}  # those not finished
        self.ranks: dict[str, tuple[Any, int]] = {}  # the policy's, and the order of arrival where that is equal
        self.outcomes: dict[str, Outcome] = {}  # of requests that are not simply continued with what is sampled
        self._num_ranked = self.step_id = 0
        self.in_flight: dict[int, list[tuple[Request, int]]] = {}  # by step, see `advance`

    def add(self, request: Request) -> None:
        self.enroll(request)
        self.waiting.push(request, self.ranks[request.id])

    def enroll(self, request: Request) -> None:
        rank = self.policy.rank(request)
        if rank != rank:  # NaN has no order: what is queued behind it would not be found again
            raise ValueError(f"request {request.id!r}: expected a rank that can be ordered, got {rank!r}")
        self._num_ranked, self.num_waiting = self._num_ranked + 1, self.num_waiting + 1
        self.requests[request.id], self.ranks[request.id] = request, (rank, self._num_ranked)
        for enrolled in self.hooks["enrolled"]:
            enrolled(request)

    def abort(self, request_id: str) -> None:
        """Ends a request, with the samples that were not forked from it yet, and frees what they hold; also while a
        step runs."""
        request = self.requests[request_id]
        for each in (*request.children, request):
            self.finish(each, "abort")

    def fork(self, parent: Request, child: Request) -> None:
        """Adds a child that shares the blocks of its computed tokens with its parent. If the parent does not run, or
        max_num_seqs run, the child waits like any other and computes its own."""
        self.enroll(child)
        if parent.state is RequestState.RUNNING and len(self.running) < self.max_num_seqs:
            self.kv.fork(parent, child)
            child.num_cached_tokens = child.num_computed_tokens
            self.run(child)
        else:
            child.num_computed_tokens = 0
            self.waiting.push(child, self.ranks[child.id])

    def has_work(self) -> bool:
        return self.num_waiting > 0 or any(request.num_missing_tokens for request in self.running)

    def schedule(self, now: float) -> StepPlan:
        """The plan of the next step; without rows only where nothing can be computed."""
        for begin in self.hooks["begin"]:
            begin(now)
        plan = OpenPlan(self.max_num_batched_tokens)
        if self.num_waiting and self.policy.preemptive:
            self._overtake(plan)
        self.continue_running(self._shares(plan), plan)
        if self.num_waiting:
            self._admit(plan)
        rows = []
        for request, num_tokens, num_drafts, drafts in plan.granted:
            name, start = request.id, request.num_computed_tokens
            samples = start + num_tokens == len(request.tokens) + request.num_in_flight  # it reaches the last token
            if samples and name in self.outcomes:
                samples = self.outcomes[name].samples(request)
            rows.append(row((name, start, num_tokens, samples, num_drafts, drafts)))
        self.step_id += 1
        preempted, admitted = tuple(plan.preempted), tuple(plan.admitted)
        return StepPlan(self.step_id, tuple(rows), preempted, self.kv.take_transfers(), admitted)

    def _overtake(self, plan: OpenPlan) -> None:
        """Preempts running requests that rank after the first of the queue, which then runs in their place, before the
        budget is shared. It gets its tokens like any request that runs."""
        while self.running and (first := self.first()) is not None:
            if self.ranks[self.running[-1].id] < self.ranks[first.id]:
                return
            if self.enter(first, plan):
                self.waiting.pop()
            elif not self.preempt(plan):
                return

    def _shares(self, plan: OpenPlan) -> Shares:
        """The shares of the budget: one token for each request that decodes, then chunks."""
        requests: Sequence[Request] = self.running
        for able in self.hooks["able"]:
            requests = able(requests)
        shares, num_decoding = [], 0
        for request in requests:
            length = len(request.tokens) + request.num_in_flight
            if request.num_in_flight and length >= request.max_total_tokens:
                continue  # its last token is in flight, and is not computed
            if missing := length - request.num_computed_tokens:
                shares.append((request, missing))
                num_decoding += missing == 1
        return shares if num_decoding == len(shares) else self.cut(shares, max(0, plan.budget - num_decoding))

    def cut(self, shares: Shares, left: int) -> Shares:
        """The shares, where requests that miss several tokens get a chunk of what is left of the budget."""
        cut = []
        for request, num_tokens in shares:
            if num_tokens > 1:
                num_tokens = self.chunk(request, left)
                left -= num_tokens
            cut.append((request, num_tokens))
        return cut

    def chunk(self, request: Request, left: int) -> int:
        """The number of tokens that a request computes next, of `left`. At most SCORED_AT_ONCE where log-probabilities
        of its prompt are requested, since each token then needs its logits."""
        return min(request.num_missing_tokens, left, SCORED_AT_ONCE if request.scores_prompt else left)

    def continue_running(self, shares: Shares, plan: OpenPlan) -> None:
        """Grants these shares, with blocks for them, in rank order: so a request that is preempted to make room has
        nothing granted yet."""
        for request, share in shares:
            num_tokens = share if share < plan.budget else plan.budget
            if not num_tokens or request.state is not RequestState.RUNNING:
                continue
            while not self.kv.reserve(request, num_tokens):
                if not self.preempt(plan) or request.state is not RequestState.RUNNING:
                    break  # it was the last itself
            else:  # as plan.grant does, in half the time
                plan.granted.append((request, num_tokens, 0, ()))
                plan.budget -= num_tokens

    def preempt(self, plan: OpenPlan) -> bool:
        """Frees the blocks of the running request that ranks last, and queues it again at its rank. False where blocks
        become free without that."""
        if not all(may_preempt(self.step_id + 1) for may_preempt in self.hooks["may_preempt"]):
            return False
        request = self.running[-1]
        self._give_up_blocks(request)
        self._wait(request)
        plan.preempted.append(request.id)
        return True

    def _wait(self, request: Request) -> None:
        self.running.remove(request)
        request.state = RequestState.WAITING
        self.waiting.push(request, self.ranks[request.id])
        self.num_running, self.num_waiting = self.num_running - 1, self.num_waiting + 1

    def restart(self, request: Request) -> None:
        """Has a request compute all its tokens again: it is queued as if preempted, but what it computed is of no use,
        to others neither."""
        request.num_computed_tokens = request.num_cached_tokens = request.num_in_flight = 0
        if not request.output_tokens:
            request.prompt_logprobs.clear()
        self.kv.free(request)
        if request.state is RequestState.RUNNING:
            self._wait(request)

    def _give_up_blocks(self, request: Request) -> None:
        if not any(gives_up(request) for gives_up in self.hooks["gives_up"]):
            self.kv.free(request)  # first: what is computed goes into the prefix index
            request.num_computed_tokens = request.num_cached_tokens = 0

    def _admit(self, plan: OpenPlan) -> None:
        """Starts waiting requests, in order, while there is room; none in a step that preempted one."""
        while plan.budget and not plan.preempted:
            request = self.first()
            if request is None or not self.enter(request, plan):
                break
            self.waiting.pop()
            plan.grant(request, self.chunk(request, plan.budget))
        if self.running and not (plan.granted or plan.preempted or self.in_flight):
            for stuck in self.hooks["stuck"]:
                stuck(plan)

    def first(self) -> Request | None:
        """The first request of the queue; None, too, while a token of it is in flight, since it is not known yet how
        many it has to compute."""
        while self.waiting:
            first = self.waiting.first()
            if first.num_in_flight:
                return None
            if not any(sets_aside(first) for sets_aside in self.hooks["sets_aside"]):
                return first
            self.waiting.pop()
        return None

    def enter(self, request: Request, plan: OpenPlan) -> bool:
        """Gives a waiting request blocks and makes it run; False if max_num_seqs run, or too few blocks are free."""
        if len(self.running) >= self.max_num_seqs:
            return False
        if not self.kv.admit(request, self.admission(request), plan.budget):
            return False
        self.run(request)
        plan.admitted.append((request.id, request.num_cached_tokens))
        return True

    def run(self, request: Request) -> None:
        request.state = RequestState.RUNNING
        insort(self.running, request, key=lambda r: self.ranks[r.id])
        self.num_running, self.num_waiting = self.num_running + 1, self.num_waiting - 1

    def advance(self, plan: StepPlan) -> None:
        """Commits what a submitted step computes. An earlier step that samples for one of its requests must have been
        updated first."""
        expected = self.in_flight[plan.step_id] = []  # requests that get something; tokens in flight, 0 for an outcome
        for name, start, num_tokens, samples, num_drafts, _ in plan.rows:
            request = self.requests.get(name)
            if request is None or request.state is not RequestState.RUNNING:
                continue  # finished or aborted since it was planned; its id may have been reused
            request.num_computed_tokens += num_tokens + num_drafts
            if num_tokens > 1 or start < request.num_prompt_tokens:
                self.kv.commit(request)  # a prompt may be shared as soon as it is computed, an answer when it is freed
                for computed in self.hooks["computed"]:
                    computed(request)
            if name in self.outcomes:
                if self.outcomes[name].advanced(request, samples):
                    expected.append((request, 0))
            elif samples:
                request.num_in_flight += 1 + num_drafts
                expected.append((request, 1 + num_drafts))

    def update(self, plan: StepPlan, output: StepOutput) -> list[Request]:
        """Gives requests the tokens of a step that was collected; returns those that finished."""
        if plan.step_id not in self.in_flight:
            self.advance(plan)
        finished = []
        for request, num_in_flight in self.in_flight.pop(plan.step_id):
            if request.state is RequestState.FINISHED:
                continue  # aborted while its step ran; if it was only preempted, it keeps its tokens
            if num_in_flight:
                reason = self._append(request, num_in_flight, output)
            else:
                reason = self.outcomes[request.id].collected(request, output)
            if reason is not None:
                self.finish(request, reason)
                finished.append(request)
        return finished

    def _append(self, request: Request, num_in_flight: int, output: StepOutput) -> str | None:
        """Appends what was sampled, up to a token that ends the request; returns why it ends, or None."""
        request.num_in_flight -= num_in_flight
        tokens, reason = request.tokens, None
        for token in output.tokens[request.id]:
            tokens.append(token)
            if token in request.stop_token_ids or len(tokens) >= request.max_total_tokens:
                reason = "stop" if token in request.stop_token_ids else "length"
                break
        if reports := output.logprobs.get(request.id):
            request.logprobs += reports[: len(tokens) - request.num_prompt_tokens - len(request.logprobs)]
        if num_in_flight > 1:  # keys and values of drafts that were wrong are of no use
            request.num_computed_tokens = min(request.num_computed_tokens, len(tokens) - 1)
        return reason

    def finish(self, request: Request, reason: str) -> None:
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
            self.num_running -= 1
        elif not any(withdraws(request) for withdraws in self.hooks["withdraws"]):
            self.waiting.remove(request.id)
            self.num_waiting -= 1
        self.kv.free(request)
        request.num_in_flight = 0  # aborted while a token was sampled: drop it
        request.state, request.finish_reason = RequestState.FINISHED, reason
        self.policy.finished(request)
        for of_requests in (self.requests, self.ranks, self.outcomes):
            of_requests.pop(request.id, None)
