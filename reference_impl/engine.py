"""The engine: requests in, one ragged step at a time, tokens out.

    schedule -> submit -> collect -> update -> trace

It owns no policy and no tensor: each is a part, and each part can be replaced by passing `Parts`.
"""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from reference_impl import trace as events
from reference_impl.config import ConfigError, EngineConfig
from reference_impl.executor.local import LocalExecutor
from reference_impl.interfaces import (
    AttentionBackend,
    BlockPool,
    Clock,
    Executor,
    KVCache,
    KVManager,
    KVSpec,
    Request,
    RequestState,
    Sampler,
    SamplingParams,
    Scheduler,
    StepOutput,
    StepPlan,
)
from reference_impl.kv.block_pool import BlockPool as DefaultBlockPool
from reference_impl.kv.manager import KVManager as DefaultKVManager
from reference_impl.kv_store.cache import PagedKVCache
from reference_impl.layers.attention import TorchAttention
from reference_impl.models.decoder import Decoder
from reference_impl.sampling.sampler import sample
from reference_impl.scheduler.scheduler import Scheduler as DefaultScheduler


class WallClock:
    """Seconds since an arbitrary moment; never goes back."""

    def now(self) -> float:
        return time.perf_counter()


@dataclass
class Parts:
    """What to use instead of the engine's own; None keeps the default."""

    block_pool: BlockPool | None = None
    kv_manager: KVManager | None = None
    scheduler: Scheduler | None = None
    kv_cache: KVCache | None = None
    attention: AttentionBackend | None = None
    sampler: Sampler | None = None
    executor: Executor | None = None
    clock: Clock | None = None


@dataclass(frozen=True)
class StepResult:
    """One step as the engine's user sees it."""

    tokens: dict[str, int]
    finished: tuple[Request, ...]


class Engine:
    def __init__(
        self,
        model: Decoder,
        config: EngineConfig | None = None,
        parts: Parts | None = None,
    ):
        config, parts = config or EngineConfig(), parts or Parts()
        self.model, self.config = model, config
        self.max_model_len = _max_model_len(model, config)
        c = model.config
        self.kv_spec = KVSpec(
            c.num_layers,
            c.num_kv_heads,
            c.head_dim,
            config.block_size,
            model.dtype.itemsize,
        )
        self.num_blocks = config.num_blocks or max(1, config.kv_cache_bytes // self.kv_spec.bytes_per_block)
        self.clock = parts.clock or WallClock()
        self.block_pool = parts.block_pool or DefaultBlockPool(self.num_blocks)
        if self.block_pool.num_free != self.num_blocks:
            raise ValueError(
                f"Parts.block_pool has {self.block_pool.num_free} free blocks; the KV cache has {self.num_blocks}: "
                f"pass num_blocks={self.block_pool.num_free}, or a pool of that size"
            )
        self.kv = parts.kv_manager or DefaultKVManager(self.block_pool, config.block_size)
        self.scheduler = parts.scheduler or DefaultScheduler(
            self.kv, config.max_num_seqs, config.max_num_batched_tokens
        )
        self.kv_cache = parts.kv_cache or PagedKVCache(self.kv_spec, self.num_blocks, model.dtype, model.device)
        self.attention = parts.attention or TorchAttention(c.head_dim**-0.5, model.dtype)
        self.executor = parts.executor or LocalExecutor(
            model, self.kv_cache, self.attention, config.block_size, self.clock, parts.sampler or sample
        )
        self.requests: dict[str, Request] = {}  # those not finished
        self.trace = events.Trace()
        self._num_added = 0

    def add(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> Request:
        """Queues a prompt of token ids. ValueError if it is empty, holds unknown ids, or can never fit."""
        sampling = sampling or SamplingParams()
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
            max_total_tokens=min(len(prompt) + sampling.max_tokens, self._longest()),
        )
        self.requests[request_id] = request
        self.scheduler.add(request)
        self.trace.add(events.RequestArrived(request.arrival, request_id, len(prompt)))
        return request

    def step(self) -> StepResult:
        """Plans, runs and books one forward pass."""
        plan = self.scheduler.schedule(self.clock.now())
        if not plan.rows:
            if self.has_work():
                raise RuntimeError("the scheduler planned nothing although requests wait; they would wait forever")
            return StepResult({}, ())
        output = self.executor.collect(self.executor.submit(plan, self.requests))
        finished = self.scheduler.update(plan, output)
        self._record(plan, output, finished)
        for request in finished:
            del self.requests[request.id]
        return StepResult(output.tokens, tuple(finished))

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """Stops a request and frees its blocks. KeyError if it is not running or waiting."""
        if request_id not in self.requests:
            raise KeyError(f"no unfinished request {request_id!r}; unfinished: {sorted(self.requests)}")
        self.scheduler.abort(request_id)
        request = self.requests.pop(request_id)
        request.finish_reason = reason
        self._record_finish(request)

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def close(self) -> None:
        self.executor.close()

    def _longest(self) -> int:
        """Most tokens a request may ever have: all but the last one need a slot in the cache."""
        return min(self.max_model_len, self.num_blocks * self.config.block_size + 1)

    def _new_id(self) -> str:
        """The next number that nobody took as a name."""
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
        if len(prompt) >= self._longest():
            raise ValueError(
                f"the prompt has {len(prompt)} tokens; with one token of output at most {self._longest()} fit "
                f"(max_model_len {self.max_model_len}, KV cache {self.num_blocks} blocks of {self.config.block_size})"
            )
        return prompt

    def _record(self, plan: StepPlan, output: StepOutput, finished: list[Request]) -> None:
        running = sum(r.state is RequestState.RUNNING for r in self.requests.values())
        waiting = sum(r.state is RequestState.WAITING for r in self.requests.values())
        self.trace.add(
            events.StepDone(
                plan.step_id, output.started_at, output.finished_at, plan.rows, plan.preempted,
                waiting, running, self.kv.num_available,
            )
        )  # fmt: skip
        for request in finished:
            self._record_finish(request)

    def _record_finish(self, request: Request) -> None:
        reason, num_output = (
            request.finish_reason or "abort",
            len(request.output_tokens),
        )
        self.trace.add(events.RequestFinished(self.clock.now(), request.id, reason, num_output))


def _max_model_len(model: Decoder, config: EngineConfig) -> int:
    """The longest sequence; a model with a sliding window is served only while the window hides nothing."""
    limit = min(model.config.max_position, model.rotary.cos.shape[0])
    length = config.max_model_len or limit
    if length > limit:
        raise ConfigError(f"max_model_len {length} is above the model's {limit} positions")
    window = model.config.sliding_window
    if window is not None and length > window:
        raise ConfigError(
            f"sliding_window {window} is not supported beyond the window: pass max_model_len={window} or less"
        )
    return length
