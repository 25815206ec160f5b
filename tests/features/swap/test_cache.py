"""Blocks that move to host memory and back: whole, in the right order, in every layer of a group."""

from __future__ import annotations

import pytest
import torch

from reference_impl.core.kv_cache import PagedKVCache
from reference_impl.features.swap import cache as swap_module
from reference_impl.features.swap.cache import HostBlocks
from reference_impl.interfaces import BlockPair, KVSpec, Transfers


def cache(num_blocks: int = 4, num_host_blocks: int = 2) -> PagedKVCache:
    """Block b holds b everywhere, host block h holds 100 + h."""
    spec, cpu = KVSpec(3, 2, 4, 5, bits_per_value=32), torch.device("cpu")
    made = PagedKVCache([spec], num_blocks, torch.float32, cpu)
    made.host = HostBlocks(made.blocks, num_host_blocks)
    made.data[:] = torch.arange(num_blocks)[:, None, None, None]
    made.host.host[0].movedim(0, 2)[:] = 100 + torch.arange(num_host_blocks)[:, None, None, None]
    return made


def values(tensor: torch.Tensor) -> list[int]:
    """What each block holds; it must be the same in all layers, keys and values, tokens and heads."""
    assert (tensor == tensor[:1, :1, :, :1, :1, :1]).all()
    return tensor[0, 0, :, 0, 0, 0].int().tolist()


def test_out_to_the_host_comes_before_copies_and_copies_before_in() -> None:
    c = cache()
    c.transfer(Transfers((BlockPair(2, 0),), (BlockPair(1, 2),), (BlockPair(0, 1),)))
    assert values(c.host.host[0].movedim(0, 2)) == [2, 101]
    assert values(c.data) == [0, 2, 1, 3], "block 1 was read before block 2's old content came into it"


def test_what_moves_to_the_host_and_back_moves_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it at once would need as much memory again on the device."""
    out, back = tuple(BlockPair(b, b) for b in range(5)), tuple(BlockPair(h, 5 + h) for h in range(5))
    for blocks_at_once in (1, 2, 100):
        c = cache(num_blocks=10, num_host_blocks=5)
        monkeypatch.setattr(swap_module, "TRANSFERRED", blocks_at_once * c.host.host[0][:1].nbytes + 1)
        c.transfer(Transfers(swap_out=out, swap_in=back))
        assert values(c.host.host[0].movedim(0, 2)) == [0, 1, 2, 3, 4]
        assert values(c.data) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]


def test_nothing_to_move_moves_nothing() -> None:
    c = cache()
    c.transfer(Transfers())
    assert (values(c.data), values(c.host.host[0].movedim(0, 2))) == ([0, 1, 2, 3], [100, 101])
