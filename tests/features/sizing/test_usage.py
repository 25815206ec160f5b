"""The accounting of KV memory, against sums made by hand and against the engine as it runs."""

from __future__ import annotations

from collections.abc import Callable

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.core.block_pool import BlockPool
from reference_impl.features.sizing.usage import memory_use
from reference_impl.interfaces import NO_BLOCK, Request, SamplingParams


def request(num_tokens: int, computed: int, *tables: list[int]) -> Request:
    return Request(
        str(tables), [1] * num_tokens, num_tokens, SamplingParams(), 0, 0.0, num_computed_tokens=computed,
        block_tables=list(tables),
    )  # fmt: skip


def test_every_slot_of_a_held_block_is_filled_ahead_or_tail() -> None:
    pool = BlockPool(10)
    blocks = pool.allocate(5)
    a = request(9, 6, blocks[:3])  # 6 computed, 3 known, 3 behind them
    b = request(2, 1, blocks[3:])  # worst case reserved: a block more than its tokens need
    use = memory_use(pool, 10, 4, [a, b])
    assert (use.free_blocks, use.cached_blocks, use.held_blocks, use.references) == (5, 0, 5, 5)
    assert use.filled_slots == 6 + 1
    assert use.tail_slots == 3 + 4
    assert use.ahead_slots == 3 + (1 + 2)
    assert use.waste == 1 - 7 / 20


def test_a_shared_block_counts_once_and_a_block_out_of_the_window_not_at_all() -> None:
    pool = BlockPool(10)
    blocks = pool.allocate(4)
    pool.incref(blocks[:1])
    a, b = request(6, 5, blocks[:2]), request(6, 4, [blocks[0], blocks[2]])
    window = request(9, 8, [NO_BLOCK, NO_BLOCK, blocks[3]])
    use = memory_use(pool, 10, 4, [a, b, window])
    assert (use.held_blocks, use.references) == (4, 5)
    assert use.filled_slots == 4 + 1 + 0 + 0
    assert use.filled_slots + use.ahead_slots + use.tail_slots == use.held_slots == 16


def test_a_shared_block_is_as_full_as_for_the_one_who_has_more_in_it() -> None:
    """A sample that was just forked counts one token of its prompt less than its parent has written."""
    pool = BlockPool(10)
    blocks = pool.allocate(1)
    pool.incref(blocks)
    for order in (1, -1):
        use = memory_use(pool, 10, 4, [request(4, 3, blocks), request(3, 2, blocks)][::order])
        assert (use.filled_slots, use.ahead_slots, use.tail_slots) == (3, 1, 0)


def test_the_engine_wastes_less_than_a_block_for_each_request_that_decodes(random_model: Callable) -> None:
    engine = Engine(random_model("float32"), EngineConfig(block_size=4, num_blocks=60))
    for n in (1, 3, 4, 5, 17):
        engine.add([n] * n, SamplingParams(max_tokens=12, temperature=0))
    while engine.has_work():
        engine.step()
        use = memory_use(engine.block_pool, 60, 4, engine.requests.values())
        assert use.free_blocks + use.cached_blocks == engine.kv.num_available
        assert use.ahead_slots <= len(engine.requests)  # the sampled token that is not computed yet
        assert use.tail_slots < 4 * max(1, len(engine.requests))
    assert use.held_blocks == use.references == 0
    assert use.waste == 0.0
    assert use.cached_blocks > 0
