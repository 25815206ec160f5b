"""What schedulers before paging have in common: a request gets all of its memory at once and computes its prompt whole.

Requests enter in order of arrival. None is preempted, and no budget limits a step: a prompt of any length is computed
in one, and the whole batch waits for it. Samples of one prompt (n > 1) are separate requests that share nothing.
"""

from __future__ import annotations

from collections import deque

from reference_impl.interfaces import KVManager, Request, RequestState, Row, StepOutput, StepPlan


class WholeRequests:
    """The bookkeeping of such schedulers; a subclass decides when a request may enter and leave.

    max_num_seqs: rows in a batch. The memory reserved is that of the longest output: max_total_tokens - 1 slots (the
    last token is never read), in the engine's paged cache. What contiguous reservation wastes beyond that is counted
    in contiguous_allocator.py.
    """

    def __init__(self, kv: KVManager, max_num_seqs: int):
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs: expected at least 1, got {max_num_seqs}")
        self.kv, self.max_num_seqs = kv, max_num_seqs
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._step_id = 0

    def add(self, request: Request) -> None:
        if request.holds:
            raise ValueError(f"request {request.id!r}: beam search needs the engine's own scheduler")
        if request.pooling is not None:
            raise ValueError(f"request {request.id!r}: pooling needs the engine's own scheduler")
        self.waiting += (request, *request.children)
        request.children = []

    def abort(self, request_id: str) -> None:
        """Ends a request and frees what it holds. KeyError if there is none of this name."""
        for queue in (self.running, self.waiting):
            for request in queue:
                if request.id == request_id:
                    queue.remove(request)
                    self._leave(request)
                    request.finish_reason = "abort"
                    return
        raise KeyError(request_id)

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.running)

    def _let_in(self) -> list[Request]:
        """Lets in as many of the first waiting requests as there are free rows and blocks for, and returns them.
        RuntimeError if one does not fit even alone."""
        entered = []
        while self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            longest = max(request.num_tokens, request.max_total_tokens - 1)
            if not self.kv.admit(request, longest, budget=longest):
                if not self.running:
                    raise RuntimeError(
                        f"request {request.id!r} may need {longest} tokens of KV cache, and alone it cannot get them "
                        f"({self.kv.num_available} blocks are free): lower its max_tokens or give the cache more blocks"
                    )
                break
            self.running.append(self.waiting.popleft())
            request.state = RequestState.RUNNING
            entered.append(request)
        return entered

    def _plan(self, rows: list[Row], entered: list[Request]) -> StepPlan:
        self._step_id += 1
        admitted = tuple((request.id, request.num_cached_tokens) for request in entered)
        return StepPlan(self._step_id, tuple(rows), transfers=self.kv.take_transfers(), admitted=admitted)

    def row_of(self, request: Request) -> Row:
        """The request's row: all tokens that it has yet to compute, its prompt or one token."""
        num_tokens = request.num_missing_tokens
        if not self.kv.reserve(request, num_tokens):
            raise RuntimeError(f"request {request.id!r} has no block, although all its memory was reserved")
        return Row(request.id, request.num_computed_tokens, num_tokens, samples=True)

    def _append(self, plan: StepPlan, output: StepOutput) -> list[Request]:
        """Appends sampled tokens to their requests; returns those that ended, which now have a finish_reason."""
        running = {request.id: request for request in self.running}
        ended = []
        for row in plan.rows:
            request = running.get(row.request_id)
            if request is None or not row.samples:  # aborted while its step ran; padding
                continue
            request.num_computed_tokens += row.num_tokens
            request.tokens += output.tokens[request.id]
            if request.id in output.logprobs:
                request.logprobs += output.logprobs[request.id]
            request.finish_reason = _finish_reason(request)
            if request.finish_reason:
                ended.append(request)
        return ended

    def _leave(self, request: Request) -> None:
        self.kv.free(request)
        request.state = RequestState.FINISHED


def _finish_reason(request: Request) -> str | None:
    if request.tokens[-1] in request.stop_token_ids:
        return "stop"
    longest = min(request.max_total_tokens, request.num_prompt_tokens + request.sampling.max_tokens)
    return "length" if request.num_tokens >= longest else None
