"""Memory is sized from bytes, and too much or too little is said with the numbers."""

from __future__ import annotations

import pytest
import torch

from reference_impl.assembly.config import ConfigError, EngineConfig
from reference_impl.features.sizing.budget import check_memory, num_blocks_for, num_host_blocks_for
from reference_impl.features.sizing.memory import check_free, free_bytes
from reference_impl.interfaces import KVSpec

BLOCK = KVSpec(num_layers=2, num_kv_heads=2, head_dim=8, block_size=16, bits_per_value=32).bytes_per_block
CPU = torch.device("cpu")


def test_the_budget_buys_whole_blocks() -> None:
    for spare in (0, 1, BLOCK - 1):
        assert num_blocks_for(EngineConfig(kv_cache_bytes=7 * BLOCK + spare), BLOCK) == 7
    assert num_blocks_for(EngineConfig(num_blocks=3), BLOCK) == 3
    assert num_blocks_for(EngineConfig(), BLOCK) == 256 * 2**20 // BLOCK, "as EngineConfig's docstring says"


def test_less_than_a_block_is_refused_with_its_price() -> None:
    with pytest.raises(
        ConfigError, match=r"kv_cache_bytes 4,095 does not pay for one block: 4,096 bytes for 16 tokens"
    ):
        num_blocks_for(EngineConfig(kv_cache_bytes=BLOCK - 1), BLOCK)
    with pytest.raises(ConfigError, match=r"swap_bytes 100 does not pay for one block of 4,096 bytes"):
        num_host_blocks_for(EngineConfig(preemption="swap", swap_bytes=100), BLOCK)


def test_more_than_the_machine_has_is_refused_before_it_is_allocated() -> None:
    with pytest.raises(
        ConfigError, match=r"KV blocks of 4,096 bytes need 1024\.00 GiB, and cpu has .* GiB free: ask for"
    ):
        check_memory(num_blocks_for(EngineConfig(kv_cache_bytes=2**40), BLOCK), 0, BLOCK, CPU)
    with pytest.raises(ConfigError, match=r"blocks for swapping need 1024\.00 GiB, and host memory has"):
        check_memory(1, 2**40 // BLOCK, BLOCK, CPU)


def test_what_the_system_does_not_say_is_no_reason_to_refuse() -> None:
    check_free(2**60, None, "much", "somewhere", "have less")
    free = free_bytes(CPU)
    assert free is None or 0 < free < 2**50
