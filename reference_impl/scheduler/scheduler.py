"""Continuous batching: before every step, decide how many tokens each request computes (Orca, Yu et al.
2022), with prompts cut into chunks so that they never hold up decoding (Sarathi-Serve, Agrawal et al. 2024).

There is no prefill and no decode here: a request has tokens, some of them computed, and gets as many of the missing
ones as the budget allows. It misses one while it decodes and many while its prompt is read. When blocks run out, the
running request that ranks last is preempted and resumes later; the tokens it has generated are kept.

    schedule: 1. of the budget, requests that miss one token get it, then prompts that are being read their next chunk
              2. of the blocks, the best rank gets its first        3. waiting requests are admitted
              -> a plan; nothing has been computed yet
    update:   commits what was computed and sampled, forks samples, finishes requests

Overlapped, the next step is planned before this one's tokens are known (vLLM's asynchronous scheduling):

    advance:  commits what a submitted step computes; its samples count as in flight
    update:   appends the tokens; a request that turns out to be finished may be in the next step
              already, whose result for it is dropped

When an executor runs stages, one step per stage is in flight, and none has tokens that another samples: a request
waits for its own before it resumes, except for the next chunk of its prompt. So that each of these steps has requests,
none takes more than its equal share of those that decode.

A row that decodes may verify drafts (speculative decoding, Leviathan et al. 2023): it is planned as if all of them were
right, and `update` rolls back the rest.
"""

from __future__ import annotations

import itertools
import operator
from bisect import insort
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from reference_impl.interfaces import (
    DefersReuse,
    FetchesPages,
    HostProposer,
    KVManager,
    Policy,
    Request,
    RequestState,
    Row,
    StepOutput,
    StepPlan,
    SwapsOut,
)
from reference_impl.scheduler.policy import FirstCome
from reference_impl.scheduler.queue import RankedQueue

Rank = tuple[Any, int]  # the policy's, and the order of arrival where that is equal


SCORED_AT_ONCE = 128  # prompt tokens in a step that need logits; with a vocabulary of 150,000, 77 MB in float32

_row = partial(tuple.__new__, Row)  # as Row(*values), in half the time: one for each row of each step


@dataclass
class _Step:
    """A plan under construction."""

    budget: int  # tokens that may still be handed out
    now: float
    rows: dict[str, Row] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    admitted: list[tuple[str, int]] = field(default_factory=list)
    waits: bool = False  # for blocks, see `_blocks_are_coming`


class Scheduler:
    """Requests wait in the order of their rank and run in the order of their rank.

    max_num_seqs: how many may run. max_num_batched_tokens: new tokens in one step. policy: whose turn it is.
    admission: "fill" lets a request in when its known tokens fit, and preempts when blocks run out later;
    "worst_case" when all it may ever have fits, so that none is preempted and fewer run (unless windows come and go).
    preemption: "recompute" drops the blocks, "swap" moves them to the host (and drops them where that is full).
    num_drafts: guesses that a decoding row has verified, as far as budget and blocks allow. host_proposer: what
    makes them; None: the worker's own proposer. num_stages: of an executor that `RunsStages`, otherwise 1.
    """

    def __init__(
        self,
        kv: KVManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: Policy | None = None,
        admission: Literal["fill", "worst_case"] = "fill",
        preemption: Literal["recompute", "swap"] = "recompute",
        num_drafts: int = 0,
        host_proposer: HostProposer | None = None,
        num_stages: int = 1,
    ):
        self.kv, self.policy = kv, FirstCome() if policy is None else policy
        self._reuse = kv if isinstance(kv, DefersReuse) else None  # the KV manager again, if it has the ability
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.admission, self.preemption, self.num_drafts = admission, preemption, num_drafts
        self.host_proposer, self.num_stages = host_proposer, num_stages
        self._pages = kv if isinstance(kv, FetchesPages) else None
        self._host = kv if isinstance(kv, SwapsOut) else None
        self.waiting = RankedQueue()
        self.loading: list[Request] = []  # set aside until their pages are loaded; they hold no seat
        self.running: list[Request] = []  # best rank first
        self._requests: dict[str, Request] = {}  # those not finished
        self._ranks: dict[str, Rank] = {}
        self._num_ranked = 0
        self._step_id = 0
        self._wait_ends: int | None = None  # when this step is collected, blocks have been waited for long enough
        self._booked: dict[int, list[tuple[Request, int]]] = {}  # of steps not collected: rows that sample, with drafts
        self._sampled: dict[str, int] = {}  # held requests: with how many tokens each was sampled from last

    # --- add and abort requests -----------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        self._enroll(request)
        for child in request.children:
            self._requests[child.id] = child  # so that it can be aborted; it gets its rank when it is forked
        self.waiting.push(request, self._ranks[request.id])

    def _enroll(self, request: Request) -> None:
        rank = self.policy.rank(request)
        if rank != rank:  # NaN has no order: what is queued behind it would not be found again
            raise ValueError(f"request {request.id!r}: expected a rank that can be ordered, got {rank!r}")
        self._num_ranked += 1
        self._requests[request.id], self._ranks[request.id] = request, (rank, self._num_ranked)

    def abort(self, request_id: str) -> None:
        """Frees what the request holds, now; also while a step runs. Its children that were not forked yet end too."""
        request = self._requests[request_id]
        for child in [*request.children]:
            self._finish(child, "abort")
        self._finish(request, "abort")

    def has_work(self) -> bool:
        """Whether there is a token to compute; a held request has none until one is appended."""
        return bool(self.waiting or self.loading) or any(request.num_missing_tokens for request in self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.loading)

    @property
    def num_running(self) -> int:
        return len(self.running)

    # --- before a step --------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """The next step's plan; without rows only where nothing can be computed."""
        step = _Step(self.max_num_batched_tokens, now)
        if self.loading:
            self._queue_again()
        if self.policy.preemptive:
            self._overtake(step)
        for request, num_tokens, num_drafts in self._shares():
            drafts: tuple[int, ...] = ()
            if num_drafts and self.host_proposer is not None:
                drafts = self._propose(request, num_drafts)
                num_drafts = len(drafts)
            self._continue(request, num_tokens, num_drafts, step, drafts)
        if self.waiting:
            self._let_in(step)
        if not step.waits:
            self._wait_ends = None
        self._step_id += 1
        return StepPlan(
            self._step_id,
            tuple(step.rows.values()),
            tuple(step.preempted),
            self.kv.take_transfers(),
            tuple(step.admitted),
        )

    def _shares(self) -> list[tuple[Request, int, int]]:
        """How many of the budget's tokens, and of these how many drafts, each running request gets, in rank order: so
        a request that lacks blocks preempts one that ranks after it and is not yet in this step, or itself."""
        work, num_decoding, staged = [], 0, self.num_stages > 1
        most_decoding = self._decoding_share() if staged else len(self.running)
        for request in self.running:
            in_flight = request.num_in_flight
            # Its token is not there yet, or is its last one, whatever is sampled, if all drafts are right.
            if in_flight and (staged or _is_full(request)):
                continue
            missing = (
                len(request.tokens) + in_flight - request.num_computed_tokens
            )  # num_missing_tokens, at half the cost
            if missing == 1:
                if num_decoding == most_decoding:  # the next step takes it
                    continue
                num_decoding += 1
            work.append((request, missing))
        if num_decoding == len(work) and not self.num_drafts:
            return [(request, 1, 0) for request, _ in work]
        left = max(0, self.max_num_batched_tokens - num_decoding)  # for chunks of prompts, and drafts
        shares = []
        for request, missing in work:
            num_tokens, num_drafts = missing, 0
            if missing > 1:
                num_tokens = _chunk(request, min(missing, left))
                left -= num_tokens
            elif self.num_drafts and missing:
                num_drafts = min(left, self._useful_drafts(request))
                left -= num_drafts
            shares.append((request, num_tokens, num_drafts))
        return shares

    def _decoding_share(self) -> int:
        """How many requests may decode in this step, with stages: an equal share per stage.

        Of R that run, in flight or not, it is R/S, rounded up in some steps and down in others, so that any S steps in
        a row have room for all R, and no stage idles; but at least one."""
        of, turn, num_running = self.num_stages, self._step_id % self.num_stages, len(self.running)
        return max(1, num_running * (turn + 1) // of - num_running * turn // of)

    def _useful_drafts(self, request: Request) -> int:
        """No more than can be kept, with the token that is sampled behind them. None for a held request, whose tokens
        are chosen elsewhere, before samples are forked, which share what is known to be computed, and under a grammar,
        whose masks would depend on the guesses."""
        if request.holds or request.children or request.grammar is not None:
            return 0
        most = min(request.num_prompt_tokens + request.sampling.max_tokens, request.max_total_tokens)
        return max(0, min(self.num_drafts, most - request.num_tokens - 1))

    def _propose(self, request: Request, k: int) -> tuple[int, ...]:
        assert self.host_proposer is not None
        if request.num_in_flight:  # the text ends in tokens that are not known yet
            return ()
        length, expected = len(request.tokens), f"expected at most {k} tokens for request {request.id!r}"
        name = f"{type(self.host_proposer).__name__}.propose"
        try:
            drafts = tuple(map(operator.index, itertools.islice(self.host_proposer.propose(request, k), k + 1)))
        except TypeError as error:
            raise TypeError(f"{name}: {expected}, which are integers: {error}") from error
        if len(drafts) > k:
            raise ValueError(f"{name}: {expected}, got more")
        if len(request.tokens) != length:
            raise ValueError(f"{name} changed the tokens of request {request.id!r}, which are only to be read")
        return drafts

    def _continue(
        self, request: Request, num_tokens: int, num_drafts: int, step: _Step, drafts: tuple[int, ...] = ()
    ) -> None:
        """A running request gets its next tokens, if need be at the cost of those that rank last; drafts only if there
        are blocks for them."""
        if num_tokens > step.budget:
            num_tokens = step.budget
        if request.state is not RequestState.RUNNING or not num_tokens:  # preempted a moment ago, or nothing to do
            return
        wanted = num_tokens + num_drafts
        if num_drafts and wanted <= step.budget and self.kv.reserve(request, wanted):
            self._give(request, num_tokens, step, num_drafts, drafts)
            return
        while not self.kv.reserve(request, num_tokens):
            if self._blocks_are_coming(step):
                return
            victim = self.running[-1]
            self._preempt(victim, step)
            if victim is request:
                return
        self._give(request, num_tokens, step)

    def _let_in(self, step: _Step) -> None:
        """Waiting requests start while there is room, in order, and none in a step that preempted one."""
        while step.budget and not step.preempted and (first := self._first(step.now)) and self._enter(first, step):
            request = self.waiting.pop()
            self._give(request, _chunk(request, min(request.num_missing_tokens, step.budget)), step)
        if self.running and not step.rows and not step.preempted and not self._booked:
            self._let_held_in(step)

    def _first(self, now: float) -> Request | None:
        """Of the queue. Requests whose pages a store has are set aside until these have come; not more than may run,
        since blocks are taken for them. None also while a token of the first is in flight, since it was preempted: what
        it has to compute turns out with that step's reply."""
        while self.waiting:
            first = self.waiting.first()
            if first.num_in_flight:
                return None
            if self._pages is None or len(self.loading) >= self.max_num_seqs or not self._pages.fetch(first, now):
                return first
            self.loading.append(self.waiting.pop())
            first.state = RequestState.LOADING
        return None

    def _queue_again(self) -> None:
        """Requests whose pages have come, or will not come."""
        assert self._pages is not None
        for request in [request for request in self.loading if not self._pages.is_fetching(request)]:
            self.loading.remove(request)
            request.state = RequestState.WAITING
            self.waiting.push(request, self._ranks[request.id])

    def _let_held_in(self, step: _Step) -> None:
        """All running requests are held, and wait for other held ones, which may be queued behind a request that does
        not fit until the held ones end: only here may some overtake."""
        for request in [request for request in self.waiting if request.holds]:
            if step.budget and self._enter(request, step):
                self.waiting.remove(request.id)
                self._give(request, _chunk(request, min(request.num_missing_tokens, step.budget)), step)

    def _overtake(self, step: _Step) -> None:
        """The first of the queue preempts running requests that rank after it."""
        while self.running and (first := self._first(step.now)):
            last = self.running[-1]
            if self._ranks[last.id] < self._ranks[first.id]:
                return
            if self._enter(first, step):
                self.waiting.pop()
            elif self._blocks_are_coming(step):
                return
            else:
                self._preempt(last, step)

    def _blocks_are_coming(self, step: _Step) -> bool:
        """Given up, and still in use by a running step, or by loads, which are cancelled now: waiting for them is
        better than preempting one more request. Not forever: where windows give up some with every step, and as many
        steps are in flight, some are always coming. Those that were, when the wait began, are there when the step that
        was planned then is collected."""
        if self._pages is not None:
            self._pages.cancel_loads()
        if self._reuse is None or not self._reuse.num_releasing:
            return False
        planned = self._step_id + 1
        if self._wait_ends is None:
            self._wait_ends = planned
        step.waits = next(iter(self._booked), planned) <= self._wait_ends
        if not step.waits:
            self._wait_ends = None
        return step.waits

    def _enter(self, request: Request, step: _Step) -> bool:
        """Room for all its known tokens, not only for this step's chunk: a prompt that is admitted and preempted
        half-way has wasted its computation."""
        wanted = (
            request.num_tokens if self.admission == "fill" else max(request.num_tokens, request.max_total_tokens - 1)
        )
        if len(self.running) >= self.max_num_seqs or not self.kv.admit(request, wanted, step.budget):
            return False
        request.state = RequestState.RUNNING
        self._line_up(request)
        step.admitted.append((request.id, request.num_cached_tokens))
        return True

    def _give(
        self, request: Request, num_tokens: int, step: _Step, num_drafts: int = 0, drafts: tuple[int, ...] = ()
    ) -> None:
        start, name, length = request.num_computed_tokens, request.id, len(request.tokens) + request.num_in_flight
        samples = start + num_tokens == length
        if request.holds:  # preempted and recomputed, it was sampled from before
            samples = samples and length != self._sampled.get(name)
        elif request.pooling is not None:
            samples = False
        step.rows[name] = _row((name, start, num_tokens, samples, num_drafts, drafts))
        step.budget -= num_tokens + num_drafts

    def _preempt(self, request: Request, step: _Step) -> None:
        """It keeps its tokens and its rank, so it is among the first to come back."""
        if self.preemption == "recompute" or self._host is None or not self._host.swap_out(request):
            self.kv.free(request)
            request.num_computed_tokens = request.num_cached_tokens = 0
        request.state = RequestState.WAITING
        self.running.remove(request)
        self.waiting.push(request, self._ranks[request.id])
        step.preempted.append(request.id)

    def _line_up(self, request: Request) -> None:
        insort(self.running, request, key=lambda r: self._ranks[r.id])

    # --- after a step ---------------------------------------------------------------------------------------------

    def advance(self, plan: StepPlan) -> None:
        """Commits a submitted step, so that the next can be planned while it runs. A request's tokens in flight belong
        to one step: an earlier step that samples for one of its requests must have been updated first."""
        booked = self._booked[plan.step_id] = []
        for name, _, num_tokens, samples, num_drafts, _ in plan.rows:
            request = self._requests.get(name)
            if request is None or request.state is not RequestState.RUNNING:
                continue  # finished or aborted since it was planned; its id may have been reused
            request.num_computed_tokens += num_tokens + num_drafts
            if num_tokens > 1:  # a prompt may be shared as soon as it is computed, an answer when it is finished
                self.kv.commit(request)
            if samples:
                if request.children:
                    self._fork_samples(request)
                booked.append((request, num_drafts))
                if request.holds:
                    self._sampled[name] = len(request.tokens)
                else:
                    request.num_in_flight += 1 + num_drafts
            elif request.pooling is not None and not request.num_missing_tokens:
                booked.append((request, 0))

    def update(self, plan: StepPlan, output: StepOutput) -> list[Request]:
        """Returns the requests that finished."""
        if plan.step_id not in self._booked:
            self.advance(plan)
        finished = []
        for request, num_drafts in self._booked.pop(plan.step_id):
            # Aborted while its step ran; if only preempted, it keeps its tokens.
            if request.state is not RequestState.FINISHED and self._take(request, num_drafts, output):
                finished.append(request)
        return finished

    def _take(self, request: Request, num_drafts: int, output: StepOutput) -> bool:
        """The sampled tokens join their request, up to one that ends it; true if there is one."""
        reports = output.logprobs.get(request.id, ()) if output.logprobs else ()
        if request.holds:
            request.logprobs += reports
            return False
        if request.pooling is not None:
            self._finish(request, "stop")
            return True
        request.num_in_flight -= 1 + num_drafts
        reason = None
        for token in output.tokens[request.id]:
            request.tokens.append(token)
            if token in request.stop_token_ids:
                reason = "stop"
                break
            if _is_full(request):
                reason = "length"
                break
        if reports:
            request.logprobs += reports[: len(request.tokens) - request.num_prompt_tokens - len(request.logprobs)]
        if num_drafts:  # keys and values of guesses that were wrong are of no use
            request.num_computed_tokens = min(request.num_computed_tokens, len(request.tokens) - 1)
        if reason is not None:
            self._finish(request, reason)
        return reason is not None

    def _fork_samples(self, parent: Request) -> None:
        """Its prompt is computed, so the other samples share it. Each computes the prompt's last token again, into a
        block of its own, and draws from its logits."""
        for child in parent.children:
            child.num_computed_tokens = parent.num_prompt_tokens - 1
            self.fork(parent, child)
        parent.children = []

    def fork(self, parent: Request, child: Request) -> None:
        """The child shares the blocks of its computed tokens, which are the parent's. If the parent was preempted,
        or no seat is free, the child waits like any other and computes its own."""
        self._enroll(child)
        if parent.state is RequestState.RUNNING and len(self.running) < self.max_num_seqs:
            self.kv.fork(parent, child)
            child.num_cached_tokens = child.num_computed_tokens
            child.state = RequestState.RUNNING
            self._line_up(child)
        else:
            child.num_computed_tokens = 0
            self.waiting.push(child, self._ranks[child.id])

    def _finish(self, request: Request, reason: str) -> None:
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
        elif request.state is RequestState.LOADING:
            self.loading.remove(request)
        elif request.id in self.waiting:
            self.waiting.remove(request.id)
        else:  # a sample that was not forked yet
            assert request.parent_id is not None
            self._requests[request.parent_id].children.remove(request)
        self.kv.free(request)
        request.num_in_flight = 0  # aborted while a token was sampled: drop it
        request.state, request.finish_reason = RequestState.FINISHED, reason
        self.policy.finished(request)
        del self._requests[request.id]
        self._ranks.pop(request.id, None)
        self._sampled.pop(request.id, None)


def _chunk(request: Request, num_tokens: int) -> int:
    """Limits a scored prompt to as many tokens at a time as there is room for logits."""
    return min(num_tokens, SCORED_AT_ONCE) if request.scores_prompt else num_tokens


def _is_full(request: Request) -> bool:
    """Whether it has all the tokens it may have."""
    length = len(request.tokens) + request.num_in_flight
    return length - request.num_prompt_tokens >= request.sampling.max_tokens or length >= request.max_total_tokens
