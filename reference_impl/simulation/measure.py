"""How long steps of the real engine take on this machine: random batches of decodes and chunks of prompts.

The whole of `Engine.step` is timed: scheduling, building the batch, the model, sampling, updating the requests. For 32
requests with 1,000 cached tokens each, nothing is computed first: a stand-in answers the steps of their prefill, and
only the measured steps reach the model. What the cache then holds is meaningless, and no slower or faster to read.

Seconds are processor seconds of the thread that runs the engine, so the machine need not be idle; torch may then have
one thread only. They equal seconds on the clock when no other process uses the core.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.worker import LocalExecutor
from reference_impl.core.batch import lay_out
from reference_impl.core.decoder import Decoder
from reference_impl.core.engine import WallClock
from reference_impl.interfaces import Reply, Request, SamplingParams, Step
from reference_impl.simulation.executor import WORD

now = time.thread_time  # seconds of this thread on a core: the time of other processes on it does not count
NUM_STEPS = 3  # of each batch and round; a decode grows by a token from step to step


@dataclass(frozen=True)
class Shape:
    """The shape of a step: per row, tokens computed and tokens already in the cache."""

    new_tokens: tuple[int, ...]
    past_tokens: tuple[int, ...]


@dataclass(frozen=True)
class Measured:
    """A step's shape and the seconds it took, the least of several."""

    shape: Shape
    seconds: float


class _Skipping:
    """The engine's own worker, which computes only when told to; otherwise every row gets a token at no cost."""

    def __init__(self) -> None:
        self.real: LocalExecutor | None = None
        self.computes = False
        self.clock = WallClock()

    max_in_flight = 1
    follows_options = True  # the real one is made with them

    def submit(self, step: Step) -> Reply:
        assert self.real is not None
        if self.computes:
            return self.real.collect(self.real.submit(step))
        now, slots = self.clock.now(), self.real.slots
        slots.apply(step)
        if step.rows:
            batch = lay_out(step.rows, slots)
            tensors = batch.on(slots.device)
            tensors |= slots.look_up(tensors, max(batch.context_lens))
            slots.put(tensors, torch.full((len(batch.sampling),), WORD, device=slots.device))
            slots.advance(tensors)
        return Reply(step.step_id, tuple((WORD,) if row.samples else () for row in step.rows), {}, now, now)

    def collect(self, ticket: Reply) -> Reply:
        return ticket

    def close(self) -> None:
        pass


def random_shapes(
    count: int, seed: int, longest: int, max_rows: int, max_tokens: int, cache_tokens: int
) -> list[Shape]:
    """Decode batches, single chunks, chunks beside decodes, and several prompts together, a quarter each; sizes spread
    evenly over their logarithms.

    longest: tokens of a request. max_tokens: computed in a step. cache_tokens: of all requests of a step together.
    """
    rng = random.Random(seed)

    def log_uniform(low: int, high: int) -> int:
        return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))

    shapes = []
    for i in range(count):
        kind = ("decode", "chunk", "mixed", "prompts")[i % 4]
        if kind == "prompts":
            number = log_uniform(2, min(max_rows, max_tokens // 2))
            most = min(max_tokens // number, longest - 2, cache_tokens // number - 64)
            shapes.append(Shape(tuple(log_uniform(2, most) for _ in range(number)), (0,) * number))
            continue
        rows = 0 if kind == "chunk" else log_uniform(1, max_rows if kind == "decode" else max_rows - 1)
        typical = log_uniform(4, longest - NUM_STEPS - 1)  # some batches are of like lengths, some of any
        past = [typical if rng.random() < 0.5 else log_uniform(4, longest - NUM_STEPS - 1) for _ in range(rows)]
        new = [1] * rows
        if kind != "decode":
            new.append(log_uniform(2, min(max_tokens - rows, longest - 2)))
            past.append(rng.choice((0, rng.randrange(longest - 1 - new[-1]))))
        while rows and sum(past) + sum(new) + 64 * len(new) > cache_tokens:
            past = [max(4, p // 2) for p in past[:rows]] + past[rows:]
        shapes.append(Shape(tuple(new), tuple(past)))
    return shapes


def measure(
    model: Decoder, shapes: Sequence[Shape], config: EngineConfig | None = None, rounds: int = 3
) -> list[Measured]:
    """Times every shape in every round, so that disturbances hit all alike, and keeps the least time of each shape,
    which was disturbed least. Raises RuntimeError where torch has several threads."""
    one_thread()
    config = config or EngineConfig()
    most = max(config.max_num_seqs, *(len(shape.new_tokens) for shape in shapes))
    config = replace(config, prefix_cache="off", max_num_seqs=most)
    bench = _Bench(model, config)
    bench.seconds(shapes[0])  # warms up
    seconds: list[list[float]] = [[] for _ in shapes]
    order = list(range(len(shapes)))
    for turn in range(rounds):
        random.Random(turn).shuffle(order)
        for i in order:
            seconds[i] += bench.seconds(shapes[i])
    return [Measured(shape, min(found)) for shape, found in zip(shapes, seconds, strict=True)]


def one_thread() -> None:
    if torch.get_num_threads() != 1:
        raise RuntimeError(
            f"the seconds of one thread are measured, and torch has {torch.get_num_threads()}: set OMP_NUM_THREADS=1, "
            "or call torch.set_num_threads(1)"
        )


class _Bench:
    def __init__(self, model: Decoder, config: EngineConfig):
        self.skipping = _Skipping()
        self.engine = Engine(model, config, Parts(executor=self.skipping))
        computing = Engine(model, config, Parts(kv_cache=self.engine.kv_cache, attention=self.engine.attention))
        assert isinstance(computing.executor, LocalExecutor)
        self.skipping.real = computing.executor
        self.scheduler: Any = self.engine.scheduler

    def seconds(self, shape: Shape) -> list[float]:
        """Brings the engine to just before a step of this shape, and times it; decodes are timed a few times."""
        engine, scheduler = self.engine, self.scheduler
        rng = random.Random(0)

        def add(length: int) -> Request:
            prompt = [rng.randrange(10, engine.model.config.vocab_size) for _ in range(length)]
            return engine.add(prompt, SamplingParams(max_tokens=NUM_STEPS + 2, temperature=0, ignore_eos=True, seed=0))

        decodes = [past for new, past in zip(shape.new_tokens, shape.past_tokens, strict=True) if new == 1]
        chunks = [(n, past) for n, past in zip(shape.new_tokens, shape.past_tokens, strict=True) if n > 1]
        assert len(chunks) <= 1 or not (decodes or any(past for _, past in chunks)), "one chunk beside the decodes"
        try:
            if decodes:
                scheduler.max_num_batched_tokens = sum(decodes)
                reads_first = any(past for _, past in chunks)  # that step samples a token for each decoding request
                for past in decodes:
                    add(past - reads_first)
                engine.step()
            for new, past in chunks:
                add(past + new)
                if past:
                    scheduler.max_num_batched_tokens = len(decodes) + past
                    engine.step()
                scheduler.max_num_batched_tokens = sum(shape.new_tokens)
            self.skipping.computes = True
            found = []
            for _ in range(1 if chunks else NUM_STEPS):
                began = now()
                engine.step()
                found.append(now() - began)
            rows = engine.trace.steps()[-1].rows
            assert sorted(row.num_tokens for row in rows) == sorted(shape.new_tokens), (rows, shape)
            return found
        finally:
            self.skipping.computes = False
            for request_id in list(engine.requests):
                engine.abort(request_id)
            engine.trace = type(engine.trace)()
