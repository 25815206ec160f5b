"""The engine: requests in, one ragged step at a time, tokens out.

    schedule -> plan -> submit -> collect -> update -> trace

Overlapped (EngineConfig.overlap), step N + 1 is scheduled and submitted before step N is collected, and where an
executor runs stages, as many steps are in flight: `pipeline.py`.

It owns no policy and no tensor: each is a part, and each part can be replaced by passing `Parts`.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from reference_impl import trace as events
from reference_impl.annexes.windows.groups import longest_sequence
from reference_impl.config import EngineConfig
from reference_impl.default_parts import Assembly
from reference_impl.interfaces import (
    BlockId,
    CapturesGraphs,
    FetchesPages,
    Grammar,
    KVSpec,
    PinsPrefixes,
    Pooling,
    Request,
    RequestState,
    SamplingParams,
    StepPlan,
    TakesMasks,
    Transfers,
    WaitsOnPurpose,
)
from reference_impl.kv.cache_key import prefix_key
from reference_impl.parts import Parts
from reference_impl.pipeline import Booked, Pipeline
from reference_impl.planner import Planner

if TYPE_CHECKING:
    from reference_impl.models.decoder import Decoder


@dataclass(frozen=True)
class StepResult:
    """One step as the engine's user sees it. tokens: of each request that got any, in order."""

    tokens: dict[str, tuple[int, ...]]
    finished: tuple[Request, ...]


@dataclass(frozen=True, eq=False)
class Pin:
    """A cached prefix that stays."""

    blocks: tuple[BlockId, ...]
    num_tokens: int


class Engine:
    def __init__(
        self,
        model: Decoder,
        config: EngineConfig | None = None,
        parts: Parts | None = None,
    ):
        made = Assembly(model, config or EngineConfig(), parts or Parts())
        self.model, self.config, self.max_model_len = model, made.config, made.max_model_len
        self.kv_specs, self.num_blocks, self.num_host_blocks = made.kv_specs, made.num_blocks, made.num_host_blocks
        self.scheduler, self.block_pool, self.kv = made.scheduler, made.block_pool, made.kv
        self.executor, self.attention, self.kv_cache = made.executor, made.attention, made.kv_cache
        self.clock, self.trace = made.clock, made.trace
        self.planner = Planner(made.config.block_size)
        self.pipeline = Pipeline(self.scheduler, self.kv, self.planner, self.executor, made.depth)
        self.requests: dict[str, Request] = {}  # those not finished
        self.pins: list[Pin] = []
        self._pages = self.kv if isinstance(self.kv, FetchesPages) else None
        self._num_added = self._num_forked = 0

    @property
    def kv_spec(self) -> KVSpec:
        """Of the first KV group, the only one unless the model has layers of several kinds."""
        return self.kv_specs[0]

    def add(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        deadline: float | None = None,
        cache_salt: str | None = None,
        holds: bool = False,
        grammar: Grammar | None = None,
        pooling: Pooling | None = None,
    ) -> Request:
        """Queues a prompt of token ids. ValueError if it is empty, holds unknown ids, or can never fit; RuntimeError if
        an overlapped step failed.

        priority (smaller goes first), tenant and deadline (seconds on the engine's clock) are for the policy.
        Requests with different cache_salt share no prefixes. holds: see `append`. grammar: what may be written; the
        executor must take masks. With sampling.n > 1 the request returned is sample 0, and its `children` are the
        others. pooling: nothing is sampled; when the prompt is computed, the request is finished and has an `embedding`
        (which a simulated GPU does not compute). For the mean no prefix is taken from the cache.
        """
        if deadline is not None and not math.isfinite(deadline):
            raise ValueError(f"deadline: expected finite seconds on the engine's clock, or None, got {deadline}")
        if grammar is not None and not isinstance(self.executor, TakesMasks):
            name = type(self.executor).__name__
            raise ValueError(
                f"grammar: {name} samples without masks; it needs finish(ticket, masks), as LocalExecutor has"
            )
        if self.pipeline.lost is not None:
            self.pipeline.raise_lost()
        sampling = sampling or SamplingParams()
        if pooling is not None:
            _check_pooling(pooling, sampling, holds, grammar)
        request_id = request_id if request_id is not None else self._new_id()
        prompt = self._check(prompt, request_id)
        ends = () if sampling.ignore_eos else self.model.config.eos_token_ids
        request = Request(
            id=request_id,
            tokens=prompt,
            num_prompt_tokens=len(prompt),
            sampling=sampling,
            seed=sampling.seed if sampling.seed is not None else int.from_bytes(os.urandom(8), "big"),
            arrival=self.clock.now(),
            stop_token_ids=frozenset((*sampling.stop_token_ids, *ends)),
            max_total_tokens=min(len(prompt) + (sampling.max_tokens if pooling is None else 0), self.max_request_len),
            block_tables=[[] for _ in self.kv_specs],
            holds=holds,
            grammar=grammar,
            pooling=pooling,
            cache_salt=cache_salt,
            priority=priority,
            tenant=tenant,
            deadline=deadline,
        )
        request.children = [self._child(request, i, f"{request_id}/{i}") for i in range(1, sampling.n)]
        members = (request, *request.children)
        self.scheduler.add(request)  # first: if it is refused, there is nothing to clean up
        for member in members:
            self._arrived(member)
        return request

    def fork(self, request_id: str, token: int) -> Request:
        """A request of its own that begins like a held one and goes on with `token`; it shares the blocks so far.

        The branch is held too. Use it before `append`, and `append` for the branch that stays. Errors as of `append`.
        """
        parent, token = self._held(request_id, token)
        self._num_forked += 1
        child = self._child(parent, parent.sample_index, f"{request_id}+{self._num_forked}")
        child.tokens.append(token)
        child.num_computed_tokens = parent.num_computed_tokens
        self._arrived(child)
        self.scheduler.fork(parent, child)
        return child

    def append(self, request_id: str, token: int) -> None:
        """A held request goes on with `token`: its own sampled tokens are reported and not appended.

        ValueError if it is not held, if the token is not in the vocabulary, or if it has all the tokens it may have.
        """
        request, token = self._held(request_id, token)
        if request.num_tokens >= request.max_total_tokens:
            raise ValueError(f"request {request_id!r} has {request.num_tokens} tokens, all it may have")
        request.tokens.append(token)

    def _held(self, request_id: str, token: int) -> tuple[Request, int]:
        if self.pipeline.lost is not None:
            self.pipeline.raise_lost()
        request, vocab = self._unfinished(request_id), self.model.config.vocab_size
        if not request.holds:
            raise ValueError(
                f"request {request_id!r} goes on with what is sampled for it: expected one added with holds=True"
            )
        if not hasattr(token, "__index__") or not 0 <= token < vocab:
            raise ValueError(f"expected a token of the vocabulary [0, {vocab}), got {token!r}")
        return request, operator.index(token)

    def _child(self, parent: Request, sample_index: int, request_id: str) -> Request:
        if request_id in self.requests:
            raise ValueError(f"request id {request_id!r} is in use")
        fresh: dict[str, Any] = {
            "num_computed_tokens": 0, "num_in_flight": 0, "num_cached_tokens": 0, "state": RequestState.WAITING,
        }  # fmt: skip
        return dataclasses.replace(
            parent, id=request_id, parent_id=parent.id, sample_index=sample_index, tokens=list(parent.tokens),
            block_tables=[[] for _ in self.kv_specs], children=[], logprobs=[], prompt_logprobs=[],
            sampling=dataclasses.replace(parent.sampling, n=1, prompt_logprobs=None), **fresh,
        )  # fmt: skip

    def _arrived(self, request: Request) -> None:
        self.requests[request.id] = request
        self.trace.add(events.RequestArrived(request.arrival, request.id, request.num_prompt_tokens))

    def _unfinished(self, request_id: str) -> Request:
        if request_id not in self.requests:
            raise KeyError(f"no unfinished request {request_id!r}; unfinished: {sorted(self.requests)}")
        return self.requests[request_id]

    def pin(self, prefix: Sequence[int], cache_salt: str | None = None) -> Pin:
        """Keeps what is cached of a prefix (its full blocks) from being evicted, until `unpin`.

        ValueError if an unfinished request could then never fit, or if the KV manager has no pins.
        """
        if not isinstance(self.kv, PinsPrefixes):
            raise ValueError(
                f"pin: {type(self.kv).__name__} has no pin and unpin, see PinsPrefixes in interfaces/abilities.py"
            )
        blocks = self.kv.pin(prefix, prefix_key(None, cache_salt))
        self.pins.append(pin := Pin(tuple(blocks), len(blocks) * self.config.block_size))
        longest = max((request.max_total_tokens for request in self.requests.values()), default=0)
        if longest > self.max_request_len:
            left = self.max_request_len
            self.unpin(pin)
            raise ValueError(
                f"pinned, {len(blocks)} blocks would leave room for {left} tokens; a request needs {longest}"
            )
        return pin

    def unpin(self, pin: Pin) -> None:
        """ValueError if it is not pinned (any more)."""
        if pin not in self.pins:
            raise ValueError("this pin was taken off already, or is another engine's")
        self.pins.remove(pin)
        assert isinstance(self.kv, PinsPrefixes)
        self.kv.unpin(pin.blocks)

    def step(self) -> StepResult:
        """Plans and starts one forward pass, and books one: the same or, with several in flight, the oldest, which runs
        while this one is planned. So the first step of an engine that overlaps them has no tokens."""
        if self.pipeline.lost is not None:
            self.pipeline.raise_lost()
        now = self.clock.now()
        if self._pages is not None:
            self._pages.expire(now)
        plan = self.scheduler.schedule(now)
        if not (plan.rows or plan.preempted or self.pipeline) and not self._transfers(plan):
            self._check_patience(now)
            return StepResult({}, ())
        booked = self.pipeline.step(plan, self.requests)
        if booked is None:
            return StepResult({}, ())
        self._record(booked)
        if not self.requests:
            self._drain()
        return StepResult(booked.tokens, booked.finished)

    def _transfers(self, plan: StepPlan) -> bool:
        """Whether a step without rows is needed: some are to begin, or have not ended."""
        return plan.transfers.is_work or (self._pages is not None and self._pages.num_transfers > 0)

    def _drain(self) -> None:
        """When no request remains, collects the steps in flight, so that their blocks are free. Not after a failed
        step: an abort that follows it should not raise one more error."""
        while self.pipeline and not self.requests and self.pipeline.lost is None:
            self._record(self.pipeline.collect(self.requests))

    def _check_patience(self, now: float) -> None:
        """Nothing was planned: right if there is nothing to do, if held requests are in the way until a token is
        appended to them, or if the scheduler waits on purpose (dynamic batching says until when)."""
        waits_until = self.scheduler.next_event(now) if isinstance(self.scheduler, WaitsOnPurpose) else None
        held = any(request.holds for request in self.requests.values())
        if self.has_work() and waits_until is None and not held:
            raise RuntimeError("the scheduler planned nothing although requests wait; they would wait forever")

    def abort(self, request_id: str, reason: str = "abort", num_dropped: int = 0) -> None:
        """Stops a request and frees its blocks, also of samples that were not forked from it yet.

        num_dropped: of its last tokens, so many are taken back: a stop string may end before the last of a step that
        gave several. KeyError if it is not running or waiting.
        """
        request = self._unfinished(request_id)
        if num_dropped:
            request.drop(num_dropped)
        ending = [*request.children, request]
        self.scheduler.abort(request_id)
        for member in ending:
            del self.requests[member.id]
            self.planner.close(member.id)
            member.finish_reason = reason
            self._record_finish(member)
        self._drain()

    def has_work(self) -> bool:
        """Also where nothing is computed, and transfers are to begin; those that have begun end with later steps, or
        in `close`."""
        unsent = self._pages is not None and self._pages.num_unsent > 0
        return bool(self.pipeline) or unsent or self.scheduler.has_work()

    def capture_graphs(self, longest: int | None = None) -> int:
        """On a GPU: captures the CUDA graphs of all decoding steps with contexts of up to `longest` positions, where
        otherwise each is captured when it is needed first, while all requests wait. Returns how many; 0 without graphs.
        """
        return self.executor.capture_all(longest) if isinstance(self.executor, CapturesGraphs) else 0

    def close(self) -> None:
        """With no unfinished requests, waits for pages that are being saved, up to the store's timeout."""
        try:
            pages = None if self.requests or self.pipeline.lost is not None else self._pages
            while pages is not None and pages.num_transfers:
                self.step()
        except Exception as error:  # a worker that is gone saves nothing, and is to be closed all the same
            warnings.warn(f"closed before all pages were saved: {error}", RuntimeWarning, stacklevel=2)
        finally:
            self.executor.close()

    @property
    def max_request_len(self) -> int:
        """Most tokens a request may have now, beside what is pinned: all but the last one need a slot in the cache."""
        windows = [spec.window for spec in self.kv_specs]
        blocks = self.num_blocks - len({block for pin in self.pins for block in pin.blocks})
        budget = self.config.max_num_batched_tokens
        return min(self.max_model_len, longest_sequence(blocks, self.config.block_size, windows, budget) + 1)

    def _new_id(self) -> str:
        """The next number that is no unfinished request's name."""
        while True:
            self._num_added += 1
            if str(self._num_added - 1) not in self.requests:
                return str(self._num_added - 1)

    def _check(self, prompt: Sequence[int], request_id: str) -> list[int]:
        if request_id in self.requests:
            raise ValueError(f"request id {request_id!r} is in use")
        if not prompt:
            raise ValueError("the prompt is empty: expected at least one token")
        vocab = self.model.config.vocab_size
        try:
            prompt = [operator.index(token) for token in prompt]
        except TypeError:
            raise ValueError("the prompt: expected token ids, which are integers") from None
        for token in prompt:
            if not 0 <= token < vocab:
                raise ValueError(f"prompt token {token} is outside the vocabulary [0, {vocab})")
        if len(prompt) >= self.max_request_len:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens; at most {self.max_request_len - 1} and one token of output fit "
                f"(max_model_len {self.max_model_len}, KV cache {self.num_blocks} blocks of {self.config.block_size})"
            )
        return prompt

    def _record(self, booked: Booked) -> None:
        """Into the trace, and what finished out of the engine's books. A step that only asked for transfers leaves no
        trace."""
        plan, output = booked.plan, booked.output
        moved = plan.transfers != Transfers() or output.transfers or output.layers_moved
        if not (plan.rows or plan.preempted or moved):
            return
        self.trace.add(
            events.StepDone(
                plan.step_id, output.started_at, output.finished_at, booked.rows, plan.preempted,
                self.scheduler.num_waiting, self.scheduler.num_running, self.kv.num_available,
                plan.transfers, plan.admitted, output.attention, output.transfers, booked.num_sampled,
                output.layers_moved,
            )
        )  # fmt: skip
        for request in booked.finished:
            self._record_finish(request)
            del self.requests[request.id]
            self.planner.close(request.id)

    def _record_finish(self, request: Request) -> None:
        reason = request.finish_reason or "abort"
        self.trace.add(events.RequestFinished(self.clock.now(), request.id, reason, len(request.output_tokens)))


def _check_pooling(pooling: Pooling, sampling: SamplingParams, holds: bool, grammar: Grammar | None) -> None:
    """ValueError where there would be something to sample."""
    if pooling not in get_args(Pooling):
        raise ValueError(f"pooling: expected one of {', '.join(get_args(Pooling))}, or None, got {pooling!r}")
    asked = {"n": sampling.n != 1, "holds": holds, "grammar": grammar is not None}
    if named := [name for name, is_asked in asked.items() if is_asked]:
        raise ValueError(f"pooling={pooling!r}: nothing is sampled for such a request, leave out {', '.join(named)}")
