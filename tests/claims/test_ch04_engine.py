"""Errata of paged attention that need the pool or a running engine; formulas alone are in test_chapter_04.py.

Every test states the claim in its docstring. The course model serves: nothing here depends on what it says.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chapters.widgets.block_table import snapshot
from reference_impl import Engine, EngineConfig, SamplingParams, course_model, load_model
from reference_impl.assembly.parts import Parts
from reference_impl.core.attention import TorchAttention
from reference_impl.core.block_pool import BlockPool
from reference_impl.core.decoder import Decoder
from reference_impl.core.kv_manager import KVManager
from reference_impl.features.baselines.contiguous_manager import ContiguousKVManager
from reference_impl.features.beams.search import beam_search
from reference_impl.interfaces import Request
from reference_impl.theory import kv_cache
from reference_impl.theory.deployment import Deployment
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model as shape_of
from reference_impl.theory.units import GiB

PROMPT = [(7 * i) % 997 + 10 for i in range(200)]  # any tokens do


@pytest.fixture(scope="module")
def model() -> Decoder:
    return load_model(course_model("target"), torch.float32, torch.device("cpu"))


def greedy(n: int, **more: int) -> SamplingParams:
    return SamplingParams(max_tokens=n, temperature=0, ignore_eos=True, **more)


def finish(engine: Engine) -> Engine:
    while engine.has_work():
        engine.step()
    return engine


def copies_of(engine: Engine) -> int:
    return sum(len(step.transfers.copies) for step in engine.trace.steps())


def leaked(references: list[int], tables: list[list[int]]) -> list[int]:
    """Blocks in use that no table names, or whose count is not the number of tables that do (no prefix index)."""
    return [b for b, count in enumerate(references) if count != sum(b in table for table in tables)]


# ---------------------------------------------------------------- what is wasted


def test_reserving_32768_tokens_takes_10_gib_of_a_70b_and_300_of_them_are_one_percent() -> None:
    """04-01. 19 blocks instead of 2,048, so 108 times more such requests."""
    each = kv_cache.bytes_per_token(shape_of("llama-3-70b"))
    assert 32_768 * each == 10 * GiB
    used = 300 / 32_768
    assert used == pytest.approx(0.0092, abs=5e-5)
    assert 32_768 / (16 * kv_cache.blocks_for(300, 16)) == pytest.approx(107.8, abs=0.05)


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 40), lengths=st.lists(st.integers(1, 300), min_size=1, max_size=12), order=st.randoms())
def test_e04_01_the_last_block_is_part_empty_and_every_free_block_can_be_had(
    size: int, lengths: list[int], order: random.Random
) -> None:
    """Claim: paging has no internal fragmentation. It has less than a block per sequence, and no other."""
    needed = sum(-(-n // size) for n in lengths)
    kv = KVManager(BlockPool(needed), size)
    requests = []
    for i, n in enumerate(lengths):
        request = Request(str(i), [1] * n, n, greedy(1), 0, 0.0)
        assert kv.admit(request, n, n)
        requests.append(request)
        assert 0 <= len(request.block_table) * size - n < size
    assert kv.num_available == 0
    gone = order.sample(requests, len(requests) // 2)
    for request in gone:
        kv.free(request)
    left = kv.num_available
    if left:  # whatever holes there are: one request can have all of it
        whole = Request("whole", [1] * (left * size), left * size, greedy(1), 0, 0.0)
        assert kv.admit(whole, left * size, left * size)


@pytest.mark.parametrize("size", [1, 8, 16, 128])
def test_e04_01_the_mean_waste_over_all_lengths_is_half_a_block_less_half_a_slot(size: int) -> None:
    lengths = np.arange(1, 10 * size + 1)
    empty = kv_cache.blocks_for(lengths, size) * size - lengths
    assert empty.max() == size - 1
    assert empty.mean() == (size - 1) / 2


# ---------------------------------------------------------------- sharing and copying


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_e04_02_sharing_full_prefix_blocks_copies_nothing(model: Decoder, index: str) -> None:
    """Claim: sharing a prefix is copy-on-write. Whoever goes on appends; nobody writes into a full block."""
    engine = Engine(model, EngineConfig(num_blocks=60, prefix_cache=index))  # type: ignore[arg-type]
    for i, (shared, own) in enumerate(((32, 5), (32, 7), (40, 1), (64, 3), (33, 20))):
        request = engine.add(PROMPT[:shared] + PROMPT[100 + 20 * i :][:own], greedy(20), f"r{i}")
        engine.step()
        assert i == 0 or request.num_cached_tokens >= 32
    assert max(engine.block_pool.ref_count(block) for block in range(60)) > 2, "blocks are shared"
    assert copies_of(finish(engine)) == 0


@pytest.mark.parametrize("prompt_len", [18, 31, 32, 33, 48, 49])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_e04_02_forks_copy_only_where_they_part_inside_a_block(model: Decoder, prompt_len: int, n: int) -> None:
    """n samples part at the prompt's last token: one copy for each fork, unless that token begins a block."""
    engine = Engine(model, EngineConfig(num_blocks=60, prefix_cache="off"))
    sampling = SamplingParams(max_tokens=6, temperature=1, seed=1, n=n, ignore_eos=True)
    engine.add(PROMPT[:prompt_len], sampling)
    engine.step()
    held = 60 - engine.block_pool.num_free
    assert held <= -(-(prompt_len + 1) // 16), "the prompt is there once"
    assert copies_of(finish(engine)) == ((n - 1) if (prompt_len - 1) % 16 else 0)
    assert engine.block_pool.num_free == 60


def test_beams_share_blocks_copy_some_and_give_all_back(model: Decoder) -> None:
    engine = Engine(model, EngineConfig(num_blocks=60, prefix_cache="off"))
    beam_search(engine, PROMPT[:100], width=4, max_tokens=20)
    assert copies_of(engine) > 0
    assert min(step.num_free_blocks for step in engine.trace.steps()) > 60 - 4 * 7, "not four texts of 100 tokens"
    assert engine.block_pool.num_free == 60


# ---------------------------------------------------------------- where blocks lie, and how large they are


def test_where_the_blocks_lie_changes_no_token(model: Decoder) -> None:
    outputs = []
    for size, seed in ((16, None), (16, 1), (16, 2), (1, 3), (5, None)):
        num_blocks = -(-640 // size)
        pool = BlockPool(num_blocks)
        if seed is not None:
            pool.allocate(num_blocks)
            pool.decref(random.Random(seed).sample(range(num_blocks), num_blocks))
        engine = Engine(
            model, EngineConfig(num_blocks=num_blocks, block_size=size, prefix_cache="off"), Parts(block_pool=pool)
        )
        requests = [engine.add(PROMPT[40 * i : 40 * i + n], greedy(10)) for i, n in enumerate((3, 16, 37))]
        finish(engine)
        outputs.append([request.output_tokens for request in requests])
    assert all(found == outputs[0] for found in outputs)


@pytest.mark.parametrize("size", [1, 8, 16, 128])
def test_e04_03_attention_is_called_once_per_layer_and_step_whatever_the_block_size(model: Decoder, size: int) -> None:
    """Claim: small blocks need more launches. They need longer tables: that is counted too."""

    class Counting(TorchAttention):
        calls, entries = 0, 0

        def forward(self, *arguments):  # type: ignore[no-untyped-def]
            Counting.calls += 1
            Counting.entries = max(Counting.entries, arguments[-1].block_table.shape[1])
            return super().forward(*arguments)

    Counting.calls = Counting.entries = 0
    attention = Counting(model.config.attention_scale, model.dtype)
    config = EngineConfig(num_blocks=-(-256 // size), block_size=size, prefix_cache="off")
    engine = Engine(model, config, Parts(attention=attention))
    engine.add(PROMPT[:100], greedy(5))
    finish(engine)
    assert Counting.calls == len(engine.trace.steps()) * model.config.num_layers
    assert Counting.entries == -(-104 // size)


# ---------------------------------------------------------------- what paging does not do


def test_e04_06_and_e03_07_both_allocators_fill_the_same_bytes_under_continuous_batching(model: Decoder) -> None:
    """Claims: paging shrinks the cache; paging enables continuous batching.

    The same scheduler runs over contiguous pieces, with the same texts and the same filled bytes in every step. Held
    bytes differ, and with little memory so does the number of steps.
    """

    def serve(contiguous: bool, num_blocks: int) -> tuple[list[list[int]], list[int], list[int]]:
        kv = ContiguousKVManager(num_blocks, 16) if contiguous else None
        engine = Engine(model, EngineConfig(num_blocks=num_blocks, prefix_cache="off"), Parts(kv_manager=kv))
        users = [engine.add(PROMPT[10 * i : 20 * i + 10], greedy(150)) for i in range(4)]
        filled, held = [], []
        while engine.has_work():
            engine.step()
            running = engine.requests.values()
            filled.append(sum(request.num_computed_tokens for request in running))
            held.append(16 * sum(len(request.block_table) for request in running))
            for user, enough in zip(users, (20, 5, 30, 12), strict=True):  # it hangs up; nobody knew when
                if user.id in engine.requests and len(user.output_tokens) >= enough:
                    engine.abort(user.id)
        return [user.output_tokens for user in users], filled, held

    paged, contiguous = serve(False, 64), serve(True, 64)
    assert paged[0] == contiguous[0]
    assert paged[1] == contiguous[1]
    assert max(contiguous[2]) > 3 * max(paged[2])
    assert serve(False, 24)[0] == serve(True, 24)[0] == paged[0]
    assert len(serve(True, 24)[1]) > len(serve(False, 24)[1])


def test_e04_07_a_used_block_that_no_table_contains_is_a_leak_and_the_engine_has_none(model: Decoder) -> None:
    """Claim (a drawing): eight of ten blocks are in use, and the tables name seven of them."""
    assert leaked([1] * 8 + [0, 0], [[0, 3, 5], [1, 4], [2, 6]]) == [7]
    assert leaked([2, 1, 0], [[0, 1], [0]]) == []
    assert leaked([1, 1, 0], [[0, 1], [0]]) == [0], "counted too low is as bad: it would be freed under a reader"
    engine = Engine(model, EngineConfig(num_blocks=9, block_size=4, prefix_cache="off"))
    engine.add(PROMPT[:10], SamplingParams(max_tokens=9, temperature=1, seed=1, n=3, ignore_eos=True))
    for i in range(3):
        engine.add(PROMPT[50 * i :][:7], greedy(9))
    while engine.has_work():
        engine.step()
        now = snapshot(engine)
        assert leaked(list(now.references), [list(table) for table in now.tables.values()]) == []
    assert any(step.preempted for step in engine.trace.steps()), "it was tight"
    assert engine.block_pool.num_free == 9


def test_a_batch_four_times_larger_gives_less_than_four_times_the_tokens() -> None:
    """04-04: weights are read once for all, each cache for one. Llama-2-13B, A100, 500 tokens each, at the limits."""
    machine = Deployment(shape_of("llama-2-13b"), device("A100-80GB"))
    gain = (100 / machine.tpot(500, 100)) / (25 / machine.tpot(500, 25))
    assert 2 < gain < 2.5
    assert machine.cache_tokens() // 2048 == 27
