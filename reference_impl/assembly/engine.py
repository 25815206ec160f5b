"""The engine with all features: what `reference_impl.Engine` is.

Each base class brings one feature, and says in its module what it extends. A step that needs none of them costs what a
step of the core costs: `Engine.step` here is that of the core, with a test for each feature that may be in use.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from reference_impl.assembly.checks import check_appended
from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.defaults import planner_for
from reference_impl.assembly.made import Made
from reference_impl.assembly.outputs import cut_by
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.speculation import tree_of
from reference_impl.core.engine import FinishedStep, StepResult
from reference_impl.core.planner import output_of
from reference_impl.features.beams.engine import BranchingEngine
from reference_impl.features.biases.engine import BiasingEngine
from reference_impl.features.failing.engine import FailingEngine
from reference_impl.features.grammars.engine import announced, check_grammar, masks_of
from reference_impl.features.grammars.guesses import StepMasks, shown_guesses
from reference_impl.features.overlap.engine import Flight, OverlappedEngine
from reference_impl.features.pins.engine import Pin, PinningEngine
from reference_impl.features.pooling.engine import PoolingEngine, check_pooling, check_rows
from reference_impl.features.scoring.engine import ScoringEngine
from reference_impl.features.speculative.engine import DraftingEngine
from reference_impl.features.transfer.engine import TransferringEngine
from reference_impl.features.windows.groups import longest_sequence
from reference_impl.interfaces import (
    CapturesGraphs,
    Grammar,
    KVSpec,
    Pooling,
    Reply,
    Request,
    SamplingParams,
    Step,
    StepPlan,
    TakesMasks,
    Transfers,
    WaitsOnPurpose,
)
from reference_impl.observe.trace import Trace

if TYPE_CHECKING:
    from reference_impl.core.decoder import Decoder

logger = logging.getLogger("inferlab.engine")

__all__ = ["Engine", "Pin", "StepResult"]


class Engine(
    TransferringEngine,
    ScoringEngine,
    PoolingEngine,
    DraftingEngine,
    OverlappedEngine,
    FailingEngine,
    PinningEngine,
    BranchingEngine,
    BiasingEngine,
):
    """parts: what to use in place of the engine's own. ValueError or ConfigError where parts and options contradict
    each other."""

    trace: Trace

    def __init__(self, model: Decoder, config: EngineConfig | None = None, parts: Parts | None = None):
        parts = parts or Parts()
        made = Made(model, config or EngineConfig(), parts)
        self.config, self.kv_specs, self.num_host_blocks = made.config, made.kv_specs, made.num_host_blocks
        self.block_pool, self.attention, self.kv_cache = made.block_pool, made.attention, made.kv_cache
        super().__init__(
            model, made.scheduler, made.kv, made.executor, block_size=made.config.block_size,
            num_blocks=made.num_blocks, max_model_len=made.max_model_len, clock=made.clock, trace=made.trace,
            planner=planner_for(made), depth=made.depth,
        )  # fmt: skip
        self.acceptance = made.config.acceptance
        self.num_draft_levels = 0 if (tree := tree_of(made.config)) is None else tree.num_levels
        # Whether a request so far had a grammar, or asked for hidden states: a step then looks at its rows. Whether the
        # scheduler appends tokens as it should: of one from Parts it is seen when its first request gets one.
        self._has_grammars = self._has_pooling = False
        self._num_seeds = 0  # how many requests got one that follows from EngineConfig.seed
        self._is_checked = parts.scheduler is None

    @property
    def kv_spec(self) -> KVSpec:
        """Of the first KV group, the only one unless the model has layers of several kinds."""
        return self.kv_specs[0]

    @property
    def max_request_len(self) -> int:
        """Most tokens a request may have now, beside what is pinned: all but the last one need a slot in the cache."""
        windows = [spec.window for spec in self.kv_specs]
        fits = longest_sequence(self.num_unpinned, self.block_size, windows, self.config.max_num_batched_tokens)
        return min(self.max_model_len, fits + 1)

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
        check_grammar(grammar, self.executor)
        self.check_not_lost()
        sampling = sampling or SamplingParams()
        if pooling is not None:
            check_pooling(pooling, sampling, holds, grammar)
        request = self.new_request(
            prompt, sampling, request_id, holds=holds, grammar=grammar, pooling=pooling, cache_salt=cache_salt,
            priority=priority, tenant=tenant, deadline=deadline, block_tables=[[] for _ in self.kv_specs],
        )  # fmt: skip
        if pooling is not None:
            request.max_total_tokens = request.num_prompt_tokens
        self._has_grammars = self._has_grammars or grammar is not None
        self._has_pooling = self._has_pooling or pooling is not None
        return self.enqueue(request)

    def new_request(
        self, prompt: Sequence[int], sampling: SamplingParams, request_id: str | None, **others: Any
    ) -> Request:
        request = super().new_request(prompt, sampling, request_id, **others)
        if self.config.seed is not None and sampling.seed is None:
            self._num_seeds += 1
            drawn = hashlib.blake2b(f"{self.config.seed} {self._num_seeds}".encode(), digest_size=8)
            request.seed = int.from_bytes(drawn.digest(), "big")
        return request

    def _finished(self, request: Request) -> None:
        super()._finished(request)
        if cut_by(request, self.max_model_len) == "kv_cache":
            logger.warning(
                "request %r was cut at %d tokens: the KV cache (%d blocks of %d) holds no more of one; %d were allowed",
                request.id, request.num_tokens, self.num_blocks, self.block_size,
                min(request.num_prompt_tokens + request.sampling.max_tokens, self.max_model_len),
            )  # fmt: skip

    def _held(self, request_id: str, token: int) -> tuple[Request, int]:
        self.check_not_lost()
        return super()._held(request_id, token)

    def step(self) -> StepResult:
        """Plans and starts one forward pass, and books one: the same or, with several in flight, the oldest, which runs
        while this one is planned. So the first step of an engine that overlaps them has no tokens."""
        if self.lost is not None:
            self.check_not_lost()
        now = self.clock.now()
        if self.pages is not None:
            self.pages.expire(now)
        plan = self.scheduler.schedule(now)
        if not (plan.rows or plan.preempted or self.in_flight or self.transfers(plan)):
            self.check_idle(now)
            return StepResult({}, ())
        if self.depth > 1:
            return self.step_ahead(plan)
        try:
            asks_more = self._has_grammars or self._has_pooling
            step = self.message(plan) if asks_more else self.planner.step(plan, self.requests)
            ticket = self.executor.submit(step)
            if step.takes_masks:
                self._send_masks(ticket, plan, self.requests)
            reply = self.executor.collect(ticket)
            brings_more = reply.prompt_logprobs or reply.pooled or reply.transfers or reply.layers_moved or reply.errors
            if brings_more or self.planner.has_drafted or not (plan.rows and self._is_checked):
                return self.record(self.update(plan, step, reply, self.requests))
            output = output_of(reply, plan.rows)
            done = FinishedStep(plan, output, self.scheduler.update(plan, output))
        except BaseException:
            self.planner.close_all()
            raise
        return super().record(done)  # it has rows

    def message(self, plan: StepPlan) -> Step:
        if self._has_pooling:
            check_rows(plan.rows, self.requests)
        step = super().message(plan)
        return announced(step, plan, self.requests, self.overlaps) if self._has_grammars else step

    def _send_masks(self, ticket: Any, plan: StepPlan, requests: Mapping[str, Request]) -> None:
        assert isinstance(self.executor, TakesMasks)  # or the request would not have been added
        masks = StepMasks(plan, requests)
        guesses = shown_guesses(self.executor, ticket, plan, requests, masks)
        self.executor.finish(ticket, masks_of(plan, requests, masks, guesses))

    def advance(self, flight: Flight) -> None:
        """The step before was collected, whose tokens decide what grammars allow in this one."""
        if flight.step.takes_masks:
            self._send_masks(flight.ticket, flight.plan, flight.requests)
        super().advance(flight)

    def update(self, plan: StepPlan, step: Step, reply: Reply, requests: Mapping[str, Request]) -> FinishedStep:
        done = super().update(plan, step, reply, requests)
        if not self._is_checked:
            grown = [requests[name] for name in done.output.tokens if not requests[name].holds]
            for request in grown[:1]:
                check_appended(self.scheduler, request)
            self._is_checked = bool(grown)
        return done

    def record(self, done: FinishedStep) -> StepResult:
        """A step that only asked for transfers leaves no trace."""
        plan, output = done.plan, done.output
        moved = plan.transfers != Transfers() or output.transfers or output.layers_moved
        if plan.rows or plan.preempted or moved:
            return super().record(done)
        return StepResult(output.tokens, tuple(done.finished))

    def check_idle(self, now: float) -> None:
        """Right also if held requests are in the way until a token is appended to them, or if the scheduler waits on
        purpose (dynamic batching says until when)."""
        waits_until = self.scheduler.next_event(now) if isinstance(self.scheduler, WaitsOnPurpose) else None
        if waits_until is None and not any(request.holds for request in self.requests.values()):
            super().check_idle(now)

    def capture_graphs(self, longest: int | None = None) -> int:
        """On a GPU: captures the CUDA graphs of all decoding steps with contexts of up to `longest` positions, where
        otherwise each is captured when it is needed first, while all requests wait. Returns how many; 0 without graphs.
        """
        return self.executor.capture_all(longest) if isinstance(self.executor, CapturesGraphs) else 0

    def save_pages(self) -> None:
        if self.lost is None:
            super().save_pages()
