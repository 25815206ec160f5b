"""First come, first served, under a budget of new tokens per step (continuous batching with chunked prefill).

There is no prefill and no decode here: a request has tokens, some of them computed, and gets as many
of the missing ones as the budget allows. A running request misses one token when it decodes and many
while its prompt is read. When blocks run out, the request that came last gives its blocks back and
computes its tokens again later; the tokens it has generated are kept.
"""

from __future__ import annotations

from collections import deque

from reference_impl.interfaces import (
    KVManager,
    Request,
    RequestState,
    Row,
    StepOutput,
    StepPlan,
)


class Scheduler:
    def __init__(self, kv: KVManager, max_num_seqs: int, max_num_batched_tokens: int):
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of arrival
        self._step_id = 0

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def abort(self, request_id: str) -> None:
        for request in [*self.running, *self.waiting]:
            if request.id == request_id:
                self._finish(request, "abort")

    def schedule(self, now: float) -> StepPlan:
        """Running requests first, then as many waiting ones as fit. May be empty only when nothing waits."""
        budget, rows, preempted = self.max_num_batched_tokens, [], []

        for request in list(self.running):
            if request.state is not RequestState.RUNNING or not budget:  # preempted a moment ago
                continue
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            while not self.kv.reserve(request, num_tokens):
                victim = self.running[-1]
                self._preempt(victim)
                preempted.append(victim.id)
                if victim is request:
                    break
            else:
                rows.append(self._row(request, num_tokens))
                budget -= num_tokens

        while self.waiting and budget and len(self.running) < self.max_num_seqs and not preempted:
            request = self.waiting[0]
            missing = request.num_tokens - request.num_computed_tokens
            # Room for all of it, not only for this step's chunk: a prompt that is let in and then preempted
            # half-way has computed for nothing.
            if not self.kv.reserve(request, missing):
                break  # first come, first served: nobody overtakes
            num_tokens = min(missing, budget)
            self.waiting.popleft()
            request.state = RequestState.RUNNING
            self.running.append(request)
            rows.append(self._row(request, num_tokens))
            budget -= num_tokens

        self._step_id += 1
        return StepPlan(self._step_id, tuple(rows), tuple(preempted))

    def update(self, plan: StepPlan, output: StepOutput) -> list[Request]:
        by_id = {request.id: request for request in self.running}
        finished = []
        for row in plan.rows:
            request = by_id.get(row.request_id)
            if request is None:  # aborted while its step ran
                continue
            request.num_computed_tokens += row.num_tokens
            if row.samples:
                request.tokens.append(output.tokens[request.id])
                if request.id in output.logprobs:
                    request.logprobs.append(output.logprobs[request.id])
                if reason := self._finish_reason(request):
                    self._finish(request, reason)
                    finished.append(request)
        return finished

    def _row(self, request: Request, num_tokens: int) -> Row:
        start = request.num_computed_tokens
        return Row(
            request.id,
            start,
            num_tokens,
            samples=start + num_tokens == request.num_tokens,
        )

    def _finish_reason(self, request: Request) -> str | None:
        if request.tokens[-1] in request.stop_token_ids:
            return "stop"
        num_output = request.num_tokens - request.num_prompt_tokens
        if num_output >= request.sampling.max_tokens or request.num_tokens >= request.max_total_tokens:
            return "length"
        return None

    def _preempt(self, request: Request) -> None:
        self.kv.free(request)
        request.num_computed_tokens = 0
        request.state = RequestState.WAITING
        self.running.remove(request)
        self.waiting.appendleft(request)  # it keeps its place in the queue

    def _finish(self, request: Request, reason: str) -> None:
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self.kv.free(request)
        request.state, request.finish_reason = RequestState.FINISHED, reason
