"""The engine with all features, `reference_impl.Engine`. It extends the core's with parts that its options choose, and
with samples, branches, pins, pages, grammars and hidden states."""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from reference_impl.assembly.checks import check_drafts, check_scheduler, settled
from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.outputs import cut_by
from reference_impl.assembly.parts import Parts, ReportsFacts
from reference_impl.assembly.planner_half import PlannerHalf
from reference_impl.assembly.worker_half import WorkerHalf
from reference_impl.core.engine import Engine as CoreEngine
from reference_impl.core.engine import StepResult
from reference_impl.core.requests import check_read
from reference_impl.features.biases.engine import check_tokens
from reference_impl.features.failing.engine import Failing
from reference_impl.features.windows.groups import longest_sequence
from reference_impl.interfaces import (
    AttentionBackend,
    CapturesGraphs,
    FetchesPages,
    Grammar,
    KVCache,
    KVSpec,
    Pooling,
    ReadsFields,
    Request,
    SamplingParams,
)
from reference_impl.observe.trace import Trace

if TYPE_CHECKING:
    from reference_impl.core.decoder import Decoder
    from reference_impl.core.engine_feature import EngineFeature
    from reference_impl.features.beams.engine import Branches
    from reference_impl.features.handover.progress import Progress
    from reference_impl.features.pins.engine import Pin, Pins
    from reference_impl.features.process.facts import Facts, ModelFacts
    from reference_impl.features.speculative.engine import BooksDrafts
    from reference_impl.features.transfer.engine import MovesPages

logger = logging.getLogger("inferlab.engine")

__all__ = ["Engine", "StepResult"]


class Engine(CoreEngine):
    """A planner half, and the executor of a worker half. The worker half is made here, or was made elsewhere if
    Parts.executor `ReportsFacts`; then `model` is what that reports of its model.

    parts: what to use in place of the engine's own. ValueError or ConfigError where parts and options contradict each
    other.
    """

    trace: Trace
    attention: AttentionBackend  # this and the cache: where the worker is here
    kv_cache: KVCache
    _pins: Pins | None
    _drafts: BooksDrafts | None
    _pages: MovesPages | None

    def __init__(self, model: Decoder | ModelFacts, config: EngineConfig | None = None, parts: Parts | None = None):
        parts = parts or Parts()
        self.config = config = settled(config or EngineConfig(), parts)
        check_scheduler(config, parts.scheduler)
        check_drafts(config, parts)
        worker: Any = parts.executor
        executor = worker
        if not isinstance(parts.executor, ReportsFacts):
            worker = WorkerHalf(cast("Decoder", model), config, parts)
            executor, self.attention, self.kv_cache = worker.executor, worker.attention, worker.kv_cache
        facts: Facts = worker.facts
        half = PlannerHalf(config, parts, facts, executor)
        self.kv_specs, self.num_host_blocks, self.block_pool = facts.kv_specs, facts.num_host_blocks, half.block_pool
        super().__init__(
            cast("Decoder", model), half.scheduler, half.kv, executor, block_size=config.block_size,
            num_blocks=facts.num_blocks, max_model_len=facts.max_model_len, clock=half.clock, trace=half.trace,
            planner=half.planner, depth=half.depth,
        )  # fmt: skip
        this: Any = weakref.proxy(self)  # in a cycle, weights and cache would live until the garbage collector runs
        self._pins, self._drafts, self._pages = None, None, None
        self.hooks.add(Failing(this))
        if config.num_drafts or parts.scheduler is not None:
            self.hooks.add(self._book_drafts())
        if isinstance(half.kv, FetchesPages):
            from reference_impl.features.transfer.engine import MovesPages

            self._pages = MovesPages(this, half.kv)
            self.hooks.add(self._pages)
        if parts.scheduler is not None or parts.executor is not None:
            from reference_impl.assembly.own_parts import CheckedParts

            self.hooks.add(CheckedParts(this))
        self._num_seeds = 0  # how many requests got one that follows from EngineConfig.seed

    @property
    def kv_spec(self) -> KVSpec:
        """The spec of the first KV group, the only one unless the model has layers of several kinds."""
        return self.kv_specs[0]

    @property
    def num_unpinned(self) -> int:
        """The number of blocks that are in no pin."""
        return self.num_blocks - (0 if self._pins is None else self._pins.num_blocks)

    @property
    def num_broken_drafts(self) -> int:
        """How many drafts came from a draft model's logits that are not numbers."""
        return 0 if self._drafts is None else self._drafts.num_broken_drafts

    @property
    def overlaps(self) -> bool:
        """Whether a step may be submitted before the one before it is collected."""
        return self.depth > 1

    @property
    def moves_pages(self) -> bool:
        """Whether it has a page store."""
        return self._pages is not None

    @property
    def max_request_len(self) -> int:
        """The most tokens a request may have now, beside what is pinned: all but the last need a slot in the cache."""
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
        resume: Progress | None = None,
    ) -> Request:
        """Queues a prompt of token ids. ValueError if it is empty, holds unknown ids, or can never fit; RuntimeError if
        an overlapped step failed.

        priority (smaller goes first), tenant and deadline (seconds on the engine's clock) are for the policy.
        Requests with different cache_salt share no prefixes. holds: see `append`. grammar: what may be written; the
        executor must take masks. With sampling.n > 1 the request returned is sample 0, and its `children` are the
        others. pooling: nothing is sampled; when the prompt is computed, the request is finished and has an `embedding`
        (which a simulated GPU does not compute). For the mean no prefix is taken from the cache. resume: how far the
        answer has come in another engine, for a request that goes on here: see `features/handover`.
        """
        if deadline is not None and not math.isfinite(deadline):
            raise ValueError(f"deadline: expected finite seconds on the engine's clock, or None, got {deadline}")
        this: Any = weakref.proxy(self)
        needed: list[EngineFeature] = []  # what only some requests ask for is imported when the first of them does
        if grammar is not None:
            from reference_impl.features.grammars.engine import Masking, check_grammar

            check_grammar(grammar, self.executor)
            needed.append(Masking(this))
        self.check_not_lost()
        sampling = sampling or SamplingParams()
        if pooling is not None:
            from reference_impl.features.pooling.engine import PoolsRequests, check_pooling

            check_pooling(pooling, sampling, holds, grammar)
            needed.append(PoolsRequests())
        if sampling.prompt_logprobs is not None:
            from reference_impl.features.scoring.engine import Scoring

            needed.append(Scoring())
        request = self.new_request(
            prompt, sampling, request_id, holds=holds, grammar=grammar, pooling=pooling, cache_salt=cache_salt,
            priority=priority, tenant=tenant, deadline=deadline, block_tables=[[] for _ in self.kv_specs],
        )  # fmt: skip
        check_tokens(request, self.model.config)
        if isinstance(self.executor, ReadsFields):
            check_read(sampling, self.executor.reads, f"the sampler of {type(self.executor).__name__}")
        if resume is not None:
            from reference_impl.features.handover.progress import take_up

            take_up(request, resume, self.model.config.vocab_size, verifies_drafts=self._drafts is not None)
        elif self.config.seed is not None and sampling.seed is None:
            self._num_seeds += 1
            drawn = hashlib.blake2b(f"{self.config.seed} {self._num_seeds}".encode(), digest_size=8)
            request.seed = int.from_bytes(drawn.digest(), "big")
        if pooling is not None:
            request.max_total_tokens = request.num_prompt_tokens
        if sampling.n > 1:
            self._branches.add_samples(request)
        for feature in needed:  # and no step before passes through it
            if type(feature) not in map(type, self.hooks.features):
                self.hooks.add(feature)
        return self.enqueue(request)

    def finish(self, request: Request) -> None:
        super().finish(request)
        if cut_by(request, self.max_model_len) == "kv_cache":
            logger.warning(
                "request %r was cut at %d tokens: the KV cache (%d blocks of %d) holds no more of one; %d were allowed",
                request.id, request.num_tokens, self.num_blocks, self.block_size,
                min(request.num_prompt_tokens + request.sampling.max_tokens, self.max_model_len),
            )  # fmt: skip

    @functools.cached_property
    def _branches(self) -> Branches:
        from reference_impl.features.beams.engine import Branches

        return Branches(cast("Any", weakref.proxy(self)))

    def _book_drafts(self) -> BooksDrafts:
        from reference_impl.assembly.speculation import tree_of
        from reference_impl.features.speculative.engine import BooksDrafts

        tree = tree_of(self.config)
        self._drafts = BooksDrafts(self.planner, self.config.acceptance, 0 if tree is None else tree.num_levels)
        return self._drafts

    def fork(self, request_id: str, token: int) -> Request:
        """Starts a branch of a held request: see `Branches.fork`."""
        return self._branches.fork(request_id, token)

    def append(self, request_id: str, token: int) -> None:
        """Appends a token to a held request: see `Branches.append`."""
        self._branches.append(request_id, token)

    def pin(self, prefix: Sequence[int], cache_salt: str | None = None) -> Pin:
        """Keeps the cached blocks of a prefix from being evicted: see `Pins.pin`."""
        return self._all_pins().pin(prefix, cache_salt)

    def unpin(self, pin: Pin) -> None:
        """Lets the blocks of a pin be evicted again: see `Pins.unpin`."""
        self._all_pins().unpin(pin)

    def _all_pins(self) -> Pins:
        from reference_impl.features.pins.engine import Pins

        self._pins = self._pins or Pins(cast("Any", weakref.proxy(self)))
        return self._pins

    def capture_graphs(self, longest: int | None = None) -> int:
        """Captures the CUDA graphs of all decoding steps with contexts of up to `longest` positions, and returns how
        many; 0 without graphs. Otherwise each is captured when it is first needed, while all requests wait."""
        return self.executor.capture_all(longest) if isinstance(self.executor, CapturesGraphs) else 0

    def save_pages(self) -> None:
        """Runs steps until all pages are saved, up to the store's timeout."""
        if self._pages is not None:
            self._pages.save()
