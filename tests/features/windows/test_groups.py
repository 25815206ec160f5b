"""Layers with and without windows, in groups of equal size over one pool."""

from __future__ import annotations

import pytest

from reference_impl.features.windows.groups import kv_specs, longest_sequence


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


def test_layers_of_one_kind_are_one_group() -> None:
    specs = kv_specs([None, 8, None, 8], num_kv_heads=2, head_dim=4, block_size=5, bits_per_value=32)
    assert [(s.num_layers, s.layers, s.window) for s in specs] == [(2, (0, 2), None), (2, (1, 3), 8)]
