"""Errata of prefill, decode and latency that need a running engine, on small random models and a clock of their own.

A step lasts as long as its cost says, in virtual seconds, so every time below is exact and no machine is fast or slow.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from reference_impl import Engine, EngineConfig, Parts, SamplingParams
from reference_impl.core.block_pool import BlockPool
from reference_impl.core.decoder import Decoder
from reference_impl.interfaces import KVSpec, Request
from reference_impl.observe.metrics import RequestMetrics, WorkloadMetrics
from reference_impl.theory import latency
from reference_impl.theory.model_shapes import ModelShape
from reference_impl.theory.units import KiB

RandomModel = Callable[..., Decoder]
SHAPE = ModelShape("random", 2, 32, 4, 2, 8, 48, 61)  # what random_model builds


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds


@contextmanager
def timed(model: Decoder, cost: Callable[[int], float]) -> Iterator[Clock]:
    """A clock on which a forward pass of n tokens takes cost(n) seconds and nothing else takes any."""
    clock = Clock()

    def passed(module: object, args: tuple[object, ...], output: object) -> None:
        clock.seconds += cost(args[0].num_tokens)  # type: ignore[attr-defined]

    handle = model.register_forward_hook(passed)
    try:
        yield clock
    finally:
        handle.remove()


def params(n: int) -> SamplingParams:
    return SamplingParams(max_tokens=n, temperature=0, ignore_eos=True)


def finish(engine: Engine) -> None:
    while engine.has_work():
        engine.step()


# ---------------------------------------------------------------- what is counted


class AttentionFlops(TorchFunctionMode):
    """Two products per query, key and head; for decode steps, which need no mask."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is F.scaled_dot_product_attention:
            self.flops += 4 * args[0].numel() * args[1].shape[-2]
        return func(*args, **(kwargs or {}))


def test_e01_04_the_operations_of_a_decode_step_grow_with_its_context_as_the_formula_says(
    random_model: RandomModel,
) -> None:
    """Claim: 2 N per token. The engine's products are 2 N and 4 d per layer and token of context."""
    model, counted = random_model(), 0

    def matrix(module: object, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        nonlocal counted
        counted += 2 * inputs[0].numel() * output.shape[-1]

    def logits(module: object, inputs: object, output: torch.Tensor) -> None:
        nonlocal counted
        counted += 2 * output.numel() * SHAPE.hidden_size

    hooks = [linear.register_forward_hook(matrix) for linear in model.linears()] + [model.register_forward_hook(logits)]
    engine = Engine(model, EngineConfig(num_blocks=8))
    request = engine.add([3, 1, 4, 1, 5] * 8, params(6))
    engine.step()
    while engine.has_work():
        counted, context = 0, request.num_tokens
        with AttentionFlops() as attention:
            engine.step()
        assert counted == latency.linear_flops(SHAPE.linear_params, 1)
        assert counted + attention.flops == latency.decode_flops(SHAPE, context)
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(("prompt", "outputs"), [(1, 5), (30, 1), (30, 7)])
def test_e01_10_n_outputs_take_n_passes_and_the_whole_prompt_takes_the_first(
    random_model: RandomModel, prompt: int, outputs: int
) -> None:
    """Claim: 'one token at a time' is a misconception, because prefill is parallel.

    Prefill processes many tokens in one pass and generates one. Generation is one pass per token; verified drafts are
    the exception (chapter 08).
    """
    model, passes = random_model(), []
    hook = model.register_forward_hook(lambda module, args, out: passes.append((args[0].num_tokens, out.shape[0])))
    engine = Engine(model, EngineConfig(num_blocks=8))
    request = engine.add([7] * prompt, params(outputs))
    finish(engine)
    hook.remove()
    assert len(request.output_tokens) == len(passes) == outputs
    assert passes == [(prompt, 1)] + [(1, 1)] * (outputs - 1)


# ---------------------------------------------------------------- what TTFT contains


def serve_together(model: Decoder, requests: int) -> WorkloadMetrics:
    with timed(model, lambda n: 1.0) as clock:
        engine = Engine(model, EngineConfig(num_blocks=64, max_num_seqs=2), Parts(clock=clock))
        for _ in range(requests):
            engine.add([5] * 10, params(4))
        finish(engine)
        return engine.trace.workload()


def test_e01_08_under_load_ttft_grows_by_the_queue_while_the_prefill_stays(random_model: RandomModel) -> None:
    """Claim: TTFT is the latency of the prefill. It runs from arrival to first token, so the queue is in it."""
    model = random_model()
    idle, busy = serve_together(model, 2), serve_together(model, 20)
    for one in (*idle.requests, *busy.requests):
        assert one.prefill == 1.0
        assert one.queue is not None
        assert one.ttft == one.queue + one.prefill
    assert max(idle.ttft) == 1.0
    # Two at a time, four steps each: the last pair waits for nine others.
    assert max(busy.ttft) == 9 * 4 + 1
    assert max(one.queue or 0 for one in busy.requests) == 36


def test_e01_09_the_engine_reports_n_minus_one_gaps_whose_mean_is_tpot(random_model: RandomModel) -> None:
    """Claim: latency = TTFT + output tokens * TPOT."""
    model = random_model()
    with timed(model, lambda n: 0.5 + 0.125 * n) as clock:
        engine = Engine(model, EngineConfig(num_blocks=64, max_num_batched_tokens=8), Parts(clock=clock))
        ids = [engine.add([5] * prompt, params(n)).id for prompt, n in ((3, 6), (30, 5), (1, 1))]
        finish(engine)
        for request_id, outputs in zip(ids, (6, 5, 1), strict=True):
            one = engine.trace.metrics(request_id)
            assert one.num_output_tokens == outputs
            assert len(one.itl) == outputs - 1
            assert one.latency == pytest.approx((one.ttft or 0) + sum(one.itl))
            assert one.tpot == (pytest.approx(sum(one.itl) / (outputs - 1)) if outputs > 1 else None)


# ---------------------------------------------------------------- budgets and time


def long_prompt_beside_a_decode(model: Decoder, budget: int, per_token: float) -> tuple[float, float]:
    """(TTFT of a 60-token prompt, worst ITL of the request that decodes when it comes)."""
    with timed(model, lambda n: max(1.0, per_token * n)) as clock:
        config = EngineConfig(num_blocks=64, max_num_batched_tokens=budget)
        engine = Engine(model, config, Parts(clock=clock))
        reader = engine.add([5], params(70))
        engine.step()
        writer = engine.add([6] * 60, params(1))
        finish(engine)
        ttft = engine.trace.metrics(writer.id).ttft
        assert ttft is not None
        return ttft, max(engine.trace.metrics(reader.id).itl)


def test_e01_11_ttft_and_itl_trade_off_along_the_token_budget_and_faster_steps_improve_both(
    random_model: RandomModel,
) -> None:
    """Claim: TTFT and token rate are independent and in tension. What trades off is not independent.

    The budget of a step moves both in opposite directions. Fewer seconds per token move both in the same one.
    """
    model = random_model()
    curve = [long_prompt_beside_a_decode(model, budget, 0.25) for budget in (2, 8, 16, 61)]
    ttft, itl = zip(*curve, strict=True)
    assert sorted(ttft, reverse=True) == list(ttft)
    assert sorted(itl) == list(itl)
    assert ttft[0] > 3 * ttft[-1]
    assert itl[-1] > 15 * itl[0]
    faster = long_prompt_beside_a_decode(model, 16, 0.125)
    assert faster[0] < ttft[2]
    assert faster[1] < itl[2]


def timeline(model: Decoder, budget: int) -> tuple[RequestMetrics, RequestMetrics]:
    """A's prompt takes 2 s alone and starts at 0; B, as long, arrives at 1 s. A tenth of a second per token."""
    with timed(model, lambda n: n / 10) as clock:
        engine = Engine(model, EngineConfig(num_blocks=64, max_num_batched_tokens=budget), Parts(clock=clock))
        a, b = engine.add([5] * 20, params(40)), None
        while engine.has_work():
            engine.step()
            if b is None and clock.seconds >= 1:
                now, clock.seconds = clock.seconds, 1.0
                b = engine.add([6] * 20, params(2))
                clock.seconds = now
        assert b is not None
        return engine.trace.metrics(a.id), engine.trace.metrics(b.id)


def test_e01_14_b_waits_until_a_is_read_and_then_one_of_them_slows_down(random_model: RandomModel) -> None:
    """Claim: B waits 1 s, though A is read until 2 s; B is then read beside A's tokens without slowing them.

    B arrives at 1 and starts at 2. Its prompt in one step makes A wait 2.1 s for a token instead of 0.1; in chunks A
    waits less and B's own first token comes later.
    """
    model = random_model()
    whole, chunked = timeline(model, 64), timeline(model, 4)
    for a, b in (whole, chunked):
        assert a.ttft == pytest.approx(2.0)
        assert b.queue == pytest.approx(1.0), "from its arrival at 1 s to the end of A's prompt at 2 s"
    assert max(whole[0].itl) == pytest.approx(2.1)
    assert min(whole[0].itl) == pytest.approx(0.1)
    assert whole[1].prefill == pytest.approx(2.1)
    assert max(chunked[0].itl) == pytest.approx(0.4)
    assert chunked[1].prefill is not None
    assert chunked[1].prefill > 2.1


# ---------------------------------------------------------------- how the cache is read


class GatheredSlots(TorchFunctionMode):
    """The slots of every read of scattered keys or values, read by read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[list[int]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        by = {torch.index_select: 2, torch.Tensor.index_select: 2, torch.Tensor.__getitem__: 1}.get(func)
        if by and isinstance(args[by], torch.Tensor) and args[0].shape[1:] == (SHAPE.num_kv_heads, SHAPE.head_dim):
            self.reads.append(args[by].tolist())
        return func(*args, **(kwargs or {}))


def scattered_pool(num_blocks: int) -> BlockPool:
    """A pool that hands out its blocks in an order in which no two neighbours follow one another."""
    pool = BlockPool(num_blocks)
    pool.allocate(num_blocks)
    pool.decref([*range(num_blocks - 1, 0, -2), *range(0, num_blocks, 2)])
    return pool


def test_e01_13_a_decode_step_reads_every_cached_token_once_and_in_order_within_each_block(
    random_model: RandomModel,
) -> None:
    """Claim: decode accesses the cache at random. What is scattered is only where the blocks lie.

    Each layer reads all keys once and all values once, block by block; a block is one run of memory. Where the blocks
    lie changes no token.
    """
    model, block_size = random_model(), 4

    def run(pool: BlockPool) -> tuple[Request, list[list[int]], list[int], Engine]:
        engine = Engine(model, EngineConfig(num_blocks=16, block_size=block_size), Parts(block_pool=pool))
        request = engine.add([9, 8, 7] * 7, params(6))
        engine.step()
        with GatheredSlots() as gathered:
            table = list(request.block_table)
            engine.step()
        finish(engine)
        return request, gathered.reads, table, engine

    request, reads, table, engine = run(scattered_pool(16))
    expected = [block * block_size + i for block in table for i in range(block_size)][:22]
    assert reads == [expected] * (2 * model.config.num_layers), "keys and values of each layer, once"
    assert table != sorted(table)
    keys = engine.kv_cache.layer(0)[0]
    assert keys[table[0]].is_contiguous()
    assert run(BlockPool(16))[0].output_tokens == request.output_tokens
    # The size of such a run in a 70B with blocks of 16: kilobytes, not values.
    spec = KVSpec(80, 8, 128, 16, bits_per_value=16)
    assert spec.bytes_per_block / spec.num_layers / 2 == 32 * KiB
