"""The tensors of the cache: whole blocks are copied, in every layer of a group."""

from __future__ import annotations

from dataclasses import replace

import torch

from reference_impl.core.kv_cache import PagedKVCache
from reference_impl.interfaces import BlockPair, KVSpec, Transfers


def cache(num_blocks: int = 4) -> PagedKVCache:
    """Block b holds b everywhere."""
    made = PagedKVCache([KVSpec(3, 2, 4, 5, bits_per_value=32)], num_blocks, torch.float32, torch.device("cpu"))
    made.data[:] = torch.arange(num_blocks)[:, None, None, None]
    return made


def values(tensor: torch.Tensor) -> list[int]:
    """What each block holds; it must be the same in all layers, keys and values, tokens and heads."""
    assert (tensor == tensor[:1, :1, :, :1, :1, :1]).all()
    return tensor[0, 0, :, 0, 0, 0].int().tolist()


def test_a_block_moves_with_all_its_layers_keys_and_values() -> None:
    c = cache()
    c.transfer(Transfers(copies=(BlockPair(1, 3),)))
    assert values(c.data) == [0, 1, 2, 1]


def test_a_block_may_be_read_and_written_by_copies_of_one_step() -> None:
    c = cache()
    c.transfer(Transfers(copies=(BlockPair(0, 1), BlockPair(1, 2), BlockPair(2, 0))))
    assert values(c.data) == [2, 0, 1, 3]


def test_nothing_to_move_moves_nothing() -> None:
    c = cache()
    c.transfer(Transfers())
    assert values(c.data) == [0, 1, 2, 3]


def test_layers_of_two_groups_share_the_pool_and_not_the_blocks() -> None:
    full = KVSpec(2, 2, 4, 5, bits_per_value=32, layers=(0, 2))
    specs = (full, replace(full, layers=(1, 3), window=8))
    c = PagedKVCache(specs, 4, torch.float32, torch.device("cpu"))
    assert c.data.nbytes == 4 * specs[0].bytes_per_block
    assert c.layer(0)[0].data_ptr() == c.layer(1)[0].data_ptr(), "the first of each group"
    assert c.layer(2)[0].data_ptr() == c.layer(3)[0].data_ptr() != c.layer(0)[0].data_ptr()
