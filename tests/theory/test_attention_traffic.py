"""Traffic of attention: nothing beats reading once, larger tiles read less, and each form counts by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.theory import attention_traffic as t

N, D = st.integers(1, 100_000), st.sampled_from([64, 96, 128, 256])


@given(N, D)
def test_unfused_attention_moves_four_score_matrices_and_the_floor(n: int, d: int) -> None:
    assert t.score_values(n) == 4 * n * n
    assert t.fused_floor_values(n, d) == 4 * n * d
    assert t.unfused_values(n, d) == 4 * n * n + 4 * n * d


@given(N, D, st.integers(1, 512))
def test_more_query_rows_per_tile_read_keys_fewer_times_down_to_the_floor(n: int, d: int, rows: int) -> None:
    moved = t.flash2_values(n, d, rows)
    assert moved == pytest.approx(2 * n * d * (n / rows) + 2 * n * d)
    assert t.flash2_values(n, d, 2 * rows) < moved
    assert t.flash2_values(n, d, n) == t.fused_floor_values(n, d)  # one tile: K and V once


@given(N, D, st.integers(10_000, 200_000))
def test_the_first_order_reads_queries_and_outputs_once_per_tile_of_keys(n: int, d: int, sram: int) -> None:
    tiles = n / (sram / (4 * d))
    assert t.flash1_values(n, d, sram) == pytest.approx(tiles * 3 * n * d)
    assert t.flash1_values(n, d, 2 * sram) == pytest.approx(t.flash1_values(n, d, sram) / 2)


def test_traffic_sweeps_over_arrays() -> None:
    n, d = np.array([[1024], [8192]]), np.array([64, 128])
    for values in (t.unfused_values(n, d), t.flash2_values(n, d, 128), t.flash1_values(n, d, 50_000)):
        assert values.shape == (2, 2)
    assert t.unfused_values(n, d)[1, 0] == t.unfused_values(8192, 64)


@given(N, D)
def test_fusing_changes_the_traffic_and_not_the_operations(n: int, d: int) -> None:
    assert t.prompt_attention_flops(n, d) == 2 * n * n * d + 2 * n * n * d  # scores, weighted sum
    assert t.prompt_attention_flops(n, d) / t.fused_floor_values(n, d) == n
    assert t.prompt_attention_flops(n, d) / t.score_values(n) == d
