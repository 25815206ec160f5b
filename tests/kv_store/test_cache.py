"""The tensors of the cache: whole blocks move, in the right order, in every layer of a group."""

from __future__ import annotations

import pytest
import torch

from reference_impl.annexes.swap import cache as swap_module
from reference_impl.annexes.swap.cache import SwappedKVCache
from reference_impl.annexes.windows.groups import kv_specs, longest_sequence
from reference_impl.interfaces import BlockPair, KVSpec, Transfers
from reference_impl.kv_store.cache import PagedKVCache


def cache(num_blocks: int = 4, num_host_blocks: int = 2) -> SwappedKVCache:
    """Block b holds b everywhere, host block h holds 100 + h."""
    spec, cpu = KVSpec(3, 2, 4, 5, bits_per_value=32), torch.device("cpu")
    made = SwappedKVCache([spec], num_blocks, torch.float32, cpu, num_host_blocks=num_host_blocks)
    made.data[:] = torch.arange(num_blocks)[:, None, None, None]
    made.host[0].movedim(0, 2)[:] = 100 + torch.arange(num_host_blocks)[:, None, None, None]
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


def test_out_to_the_host_comes_before_copies_and_copies_before_in() -> None:
    c = cache()
    c.transfer(Transfers((BlockPair(2, 0),), (BlockPair(1, 2),), (BlockPair(0, 1),)))
    assert values(c.host[0].movedim(0, 2)) == [2, 101]
    assert values(c.data) == [0, 2, 1, 3], "block 1 was read before block 2's old content came into it"


def test_what_moves_to_the_host_and_back_moves_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it at once would need as much memory again on the device."""
    out, back = tuple(BlockPair(b, b) for b in range(5)), tuple(BlockPair(h, 5 + h) for h in range(5))
    for blocks_at_once in (1, 2, 100):
        c = cache(num_blocks=10, num_host_blocks=5)
        monkeypatch.setattr(swap_module, "TRANSFERRED", blocks_at_once * c.host[0][:1].nbytes + 1)
        c.transfer(Transfers(swap_out=out, swap_in=back))
        assert values(c.host[0].movedim(0, 2)) == [0, 1, 2, 3, 4]
        assert values(c.data) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]


def test_nothing_to_move_moves_nothing() -> None:
    c = cache()
    c.transfer(Transfers())
    assert (values(c.data), values(c.host[0].movedim(0, 2))) == ([0, 1, 2, 3], [100, 101])


def test_layers_of_two_groups_share_the_pool_and_not_the_blocks() -> None:
    specs = kv_specs([None, 8, None, 8], num_kv_heads=2, head_dim=4, block_size=5, bits_per_value=32)
    assert [(s.num_layers, s.layers, s.window) for s in specs] == [(2, (0, 2), None), (2, (1, 3), 8)]
    c = PagedKVCache(specs, 4, torch.float32, torch.device("cpu"))
    assert c.data.nbytes == 4 * specs[0].bytes_per_block
    assert c.layer(0)[0].data_ptr() == c.layer(1)[0].data_ptr(), "the first of each group"
    assert c.layer(2)[0].data_ptr() == c.layer(3)[0].data_ptr() != c.layer(0)[0].data_ptr()


@pytest.mark.parametrize(
    ("windows", "sizes"),
    [
        ([None] * 6, [6]),
        ([4] * 6, [6]),
        ([None, 4] * 3, [3, 3]),
        ([4, 4, 4, 4, 4, None] * 2, [2] * 6),
        ([4, 4, None, 9], [1, 1, 1, 1]),
    ],
)
def test_groups_are_of_equal_size_and_hold_every_layer_once(windows: list[int | None], sizes: list[int]) -> None:
    specs = kv_specs(windows, 1, 2, 16, bits_per_value=16)
    assert sorted(s.num_layers for s in specs) == sorted(sizes)
    assert sorted(layer for s in specs for layer in s.layers) == list(range(len(windows)))
    assert all(windows[layer] == s.window for s in specs for layer in s.layers)


def test_the_longest_sequence_is_bounded_by_full_groups_and_hardly_by_windows() -> None:
    assert longest_sequence(10, 16, [None], 100) == 160
    assert longest_sequence(10, 16, [None, None], 100) == 80
    assert longest_sequence(10, 16, [32], 16) > 10**6, "3 blocks and one begun are enough for ever"
    assert longest_sequence(3, 16, [32], 16) == 48, "too few for ever: then as many as there are"
    assert longest_sequence(10, 16, [None, 32], 16) == 6 * 16
