"""Bytes of chains, counted by hand, and the rule that the intermediates give."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.theory import fusion


@given(st.integers(1, 12), st.integers(1, 10**9))
def test_a_row_of_n_kernels_saves_twice_its_n_minus_1_intermediates(n: int, size: int) -> None:
    chain = fusion.in_a_row(n, size)
    assert len(chain.intermediates) == n - 1
    assert chain.bytes == 2 * n * size
    assert chain.fused_bytes == 2 * size
    assert chain.saved == 2 * (n - 1) * size


def test_a_kept_intermediate_saves_its_read_only() -> None:
    tokens, hidden = 64, 4096
    chain, values = fusion.add_norm_quantize(tokens, hidden), tokens * hidden
    assert chain.intermediates == ("sum", "normed")
    assert chain.saved == 2 * values + 2 * 2 * values  # sum: read; normed: written and read
    assert chain.bytes == 13 * values + 2 * hidden + 4 * tokens
    assert chain.fused_bytes == 7 * values + 2 * hidden + 4 * tokens
    assert fusion.add_norm(tokens, hidden).saved == 2 * values


def test_the_other_chains_save_what_their_intermediates_say() -> None:
    gate = fusion.gate_quantize(10, 100)
    assert gate.saved == 2 * (2 * 1000 + 2 * 1000)
    assert gate.fused.reads == ("gate", "up")
    rotary = fusion.rotate_and_write(10, 32, 8, 128)
    assert rotary.intermediates == ("rotated k",)
    assert rotary.saved == 2 * 10 * 8 * 128 * 2
    reduced = fusion.all_reduce_add_norm(10, 100)
    assert reduced.intermediates == ("reduced", "sum")
    assert reduced.saved == 3 * 2000


def test_an_input_that_two_kernels_read_is_read_once_when_fused() -> None:
    chain = fusion.Chain(
        (fusion.Kernel("a", ("x",), ("y",)), fusion.Kernel("b", ("x", "y"), ("z",))), {"x": 5, "y": 7, "z": 11}, ("z",)
    )
    assert chain.saved == 5 + 2 * 7


def test_short_kernels_wait_for_the_host_and_long_ones_do_not() -> None:
    assert fusion.finish([10.0] * 5, 1.0) == 51, "only the first launch is seen"
    assert fusion.finish([1.0] * 5, 10.0) == 51, "only the last kernel is"
    assert fusion.finish([1.0] * 5, 0.0, 0.5) == 7
    assert fusion.finish([], 1.0, 0.0) == 0
    assert fusion.finish([2.0], 0.0, 0.5) == 2


def test_the_share_of_work_falls_with_the_number_of_kernels() -> None:
    assert fusion.working_share(3.52e-3, 320, 1.3e-6) == pytest.approx(0.894, abs=1e-3)
    assert fusion.working_share(1.0, 0, 1.0) == 1
