"""Traffic of attention: nothing beats reading once, larger tiles read less, and each form counts by hand."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.theory import attention_traffic as t
from reference_impl.theory.hardware import device

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


class Memory:
    """Attention in NumPy over a memory that counts, so that formulas are held against loads."""

    def __init__(self, n: int, d: int):
        rng = np.random.default_rng(n)
        self.arrays = {name: rng.standard_normal((n, d)) for name in "QKV"}
        self.arrays |= {"O": np.full((n, d), np.nan), "m": np.full((n, 1), np.nan), "l": np.full((n, 1), np.nan)}
        self.read, self.written = Counter[str](), Counter[str]()

    def load(self, name: str, at: slice) -> np.ndarray:
        self.read[name] += self.arrays[name][at].size
        return self.arrays[name][at]

    def store(self, name: str, at: slice, part: np.ndarray) -> None:
        self.written[name] += part.size
        self.arrays[name][at] = part


def cut(n: int, rows: int) -> list[slice]:
    return [slice(first, min(first + rows, n)) for first in range(0, n, rows)]


def keys_outside(memory: Memory, n: int, d: int, query_rows: int, key_rows: int) -> None:
    memory.store("O", slice(0, n), np.zeros((n, d)))
    memory.store("l", slice(0, n), np.zeros((n, 1)))
    memory.store("m", slice(0, n), np.full((n, 1), -np.inf))
    for at_k in cut(n, key_rows):
        k, v = memory.load("K", at_k), memory.load("V", at_k)
        for at_q in cut(n, query_rows):
            s = memory.load("Q", at_q) @ k.T
            m, total, o = (memory.load(name, at_q) for name in "mlO")
            new = np.maximum(m, s.max(1, keepdims=True))
            weights, shrunk = np.exp(s - new), total * np.exp(m - new)
            summed = shrunk + weights.sum(1, keepdims=True)
            for name, part in (("m", new), ("l", summed), ("O", (o * shrunk + weights @ v) / summed)):
                memory.store(name, at_q, part)


def queries_outside(memory: Memory, n: int, d: int, query_rows: int, key_rows: int) -> None:
    for at_q in cut(n, query_rows):
        q, m = memory.load("Q", at_q), -np.inf
        total, acc = np.zeros((len(q), 1)), np.zeros((len(q), d))
        for at_k in cut(n, key_rows):
            s, v = q @ memory.load("K", at_k).T, memory.load("V", at_k)
            new = np.maximum(m, s.max(1, keepdims=True))
            weights, shrink = np.exp(s - new), np.exp(m - new)
            total, acc, m = total * shrink + weights.sum(1, keepdims=True), acc * shrink + weights @ v, new
        memory.store("O", at_q, acc / total)


@pytest.mark.parametrize(("n", "query_rows", "key_rows"), [(64, 16, 8), (50, 16, 8), (7, 16, 3), (33, 1, 33)])
def test_counted_loads_of_both_orders_are_the_formulas_and_the_outputs_are_attention(n, query_rows, key_rows) -> None:  # type: ignore[no-untyped-def]
    d = 4
    expected = {keys_outside: t.flash1_moves(n, d, key_rows), queries_outside: t.flash2_moves(n, d, query_rows)}
    for order, moves in expected.items():
        memory = Memory(n, d)
        s = memory.arrays["Q"] @ memory.arrays["K"].T
        weights = np.exp(s - s.max(1, keepdims=True))
        order(memory, n, d, query_rows, key_rows)
        np.testing.assert_allclose(memory.arrays["O"], weights @ memory.arrays["V"] / weights.sum(1, keepdims=True))
        assert memory.read["Q"] == moves.q_read
        assert memory.read["K"] + memory.read["V"] == moves.kv_read
        assert (memory.read["O"], memory.written["O"]) == (moves.o_read, moves.o_written)
        assert sum(memory.read[x] + memory.written[x] for x in "ml") == moves.statistics
        assert memory.read.total() + memory.written.total() == moves.total


@given(N, D)
def test_counts_by_tensor_add_up_to_the_closed_forms(n: int, d: int) -> None:
    assert t.unfused_moves(n, d).total == t.unfused_values(n, d)
    assert t.flash2_moves(n, d, n).total == t.fused_floor_values(n, d)
    if n % 128 == 0:
        assert t.flash2_moves(n, d, 128).total == t.flash2_values(n, d, 128)


def test_the_closed_form_of_the_first_order_is_its_count_without_what_it_leaves_out() -> None:
    d, sram = 64, 64 * 4 * 128
    rows = t.flash1_key_rows(d, sram)
    assert rows == 128
    for n in (1024, 8192):
        counted = t.flash1_moves(n, d, rows)
        assert counted.total - counted.statistics - counted.kv_read - n * d == t.flash1_values(n, d, sram)
    with pytest.raises(ValueError, match="4 x 128 values, got 511"):
        t.flash1_key_rows(128, 511)


def test_waves_fill_the_chip_as_the_last_one_does() -> None:
    assert t.wave_share(132, 132) == t.wave_share(264, 132) == 1
    assert t.wave_share(133, 132) == pytest.approx(133 / 264)
    assert t.wave_share(8, 132) == pytest.approx(8 / 132)


def test_a_pipeline_takes_as_long_as_its_slower_side_and_the_ends() -> None:
    assert t.pipelined_seconds(4, 3, 2, stages=1) == 20
    assert t.pipelined_seconds(4, 3, 2) == 3 + 3 * 3 + 2
    assert t.pipelined_seconds(4, 2, 3) == 2 + 3 * 3 + 3
    assert t.pipelined_seconds(1, 3, 2) == t.pipelined_seconds(1, 3, 2, stages=1)


def test_exponentials_take_half_of_the_products_time_on_an_h100_and_all_of_it_on_a_b200() -> None:
    for name, expected in (("A100-80GB", 0.25), ("H100", 0.5), ("B200", 1.0)):
        gpu = device(name)
        per_clock = gpu.peak() / gpu.chip.num_sms / gpu.chip.clock
        assert t.exp_share(128, per_clock) == pytest.approx(expected, rel=0.01)
        assert t.exp_share(64, per_clock) == pytest.approx(2 * expected, rel=0.01)


def test_a_cascade_reads_the_prefix_once() -> None:
    assert t.cascade_keys(8, 640, 40, cascade=False) == 8 * 680
    assert t.cascade_keys(8, 640, 40, cascade=True) == 640 + 8 * 40
    assert t.cascade_keys(1, 640, 40, cascade=True) == t.cascade_keys(1, 640, 40, cascade=False)


def test_what_a_split_writes_beside_its_keys_falls_with_its_length() -> None:
    # Four heads, mean and log-sum-exp in fp32, written and read, beside 512 keys and values of 128 in 16 bits.
    assert t.split_overhead(512, 4, 128) == pytest.approx(2 * 4 * 129 * 4 / (512 * 2 * 128 * 2))
    assert t.split_overhead(1024, 4, 128) == t.split_overhead(512, 4, 128) / 2


@given(st.floats(0, 1))
def test_skipping_all_tiles_is_worth_two_times_and_the_share_is_its_inverse(skipped: float) -> None:
    assert t.skip_speedup(0) == 1
    assert t.skip_speedup(1) == 2
    assert t.skip_speedup(skipped) == pytest.approx(1 / (1 - skipped / 2))
    assert t.skip_share(t.skip_speedup(skipped)) == pytest.approx(skipped, abs=1e-12)
