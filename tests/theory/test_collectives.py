"""Communication costs nothing alone, grows with bytes and latency, and each algorithm wins where it should."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.theory import collectives as c

BYTES, ALPHA, RATE = st.floats(0, 1e10), st.floats(0, 1e-3), st.floats(1e9, 1e12)
SEVERAL = st.integers(2, 512)
ALL = (c.ring_all_reduce, c.one_shot_all_reduce, c.all_gather, c.reduce_scatter, c.all_to_all)


@pytest.mark.parametrize("collective", ALL)
@given(size=BYTES, alpha=ALPHA, rate=RATE)
def test_one_device_pays_nothing(collective, size: float, alpha: float, rate: float) -> None:  # type: ignore[no-untyped-def]
    assert collective(size, 1, alpha, rate) == 0


@pytest.mark.parametrize("collective", ALL)
@given(size=BYTES, n=SEVERAL, alpha=ALPHA, rate=RATE)
def test_time_is_linear_in_bytes_and_latency(collective, size: float, n: int, alpha: float, rate: float) -> None:  # type: ignore[no-untyped-def]
    whole = collective(size, n, alpha, rate)
    assert whole == pytest.approx(collective(size, n, 0, rate) + collective(0, n, alpha, rate))
    assert collective(2 * size, n, 2 * alpha, rate) == pytest.approx(2 * whole)
    assert collective(size, n, 0, 2 * rate) == pytest.approx(collective(size, n, 0, rate) / 2)


@given(BYTES, SEVERAL, ALPHA, RATE)
def test_a_ring_all_reduce_is_a_reduce_scatter_and_an_all_gather(
    size: float, n: int, alpha: float, rate: float
) -> None:
    halves = c.reduce_scatter(size, n, alpha, rate) + c.all_gather(size, n, alpha, rate)
    assert c.ring_all_reduce(size, n, alpha, rate) == pytest.approx(halves)


@given(SEVERAL)
def test_what_each_device_sends_in_each_algorithm(n: int) -> None:
    """Bytes per byte of message with no latency, steps with no bytes."""
    shares = [collective(1.0, n, 0, 1.0) for collective in ALL]
    assert shares == pytest.approx([2 * (n - 1) / n, n - 1, (n - 1) / n, (n - 1) / n, (n - 1) / n])
    steps = [collective(0.0, n, 1.0, 1.0) for collective in ALL]
    assert steps == [2 * (n - 1), 1, n - 1, n - 1, n - 1]


@given(st.integers(3, 512), st.floats(1e-7, 1e-3), RATE)
def test_at_the_break_even_message_both_all_reduces_take_as_long(n: int, alpha: float, rate: float) -> None:
    meeting = c.all_reduce_break_even(n, alpha, rate)
    both = [collective(meeting, n, alpha, rate) for collective in (c.ring_all_reduce, c.one_shot_all_reduce)]
    assert both[0] == pytest.approx(both[1])
    assert c.one_shot_all_reduce(meeting / 2, n, alpha, rate) < c.ring_all_reduce(meeting / 2, n, alpha, rate)
    assert c.one_shot_all_reduce(meeting * 2, n, alpha, rate) > c.ring_all_reduce(meeting * 2, n, alpha, rate)


def test_two_devices_never_break_even_and_one_has_nothing_to_reduce() -> None:
    assert c.all_reduce_break_even(2, 2e-6, 450e9) == np.inf
    assert c.all_reduce_break_even(8, 0, 450e9) == 0  # without latency the ring always moves fewer bytes
    with pytest.raises(ValueError, match="expected at least 2 devices, got 1"):
        c.all_reduce_break_even(1, 2e-6, 450e9)


@pytest.mark.parametrize("collective", ALL)
def test_arrays_of_mixed_shapes_give_what_scalars_give(collective) -> None:  # type: ignore[no-untyped-def]
    size, n, alpha = np.array([[1e3], [1e6], [1e9]]), np.array([1, 2, 8, 64]), 2e-6
    swept = collective(size, n, alpha, 450e9)
    assert swept.shape == (3, 4)
    for i in range(3):
        for j in range(4):
            assert swept[i, j] == pytest.approx(collective(float(size[i, 0]), int(n[j]), alpha, 450e9))


# ---------------------------------------------------------------- tensor parallelism


@given(st.floats(1e9, 1e12), RATE, st.integers(2, 64), st.integers(1, 128), st.floats(0, 1e-3))
def test_a_step_is_its_share_of_the_read_and_two_all_reduces_per_layer(
    size: float, rate: float, n: int, layers: int, each: float
) -> None:
    step = c.tensor_parallel_seconds(size, rate, n, layers, each)
    assert step == pytest.approx(size / rate / n + 2 * layers * each)
    alone = c.tensor_parallel_seconds(size, rate, 1, layers, each)
    assert alone == pytest.approx(size / rate)  # nobody to talk to
    assert isinstance(alone, float)
    assert c.tensor_parallel_seconds(size, rate, n, layers, 0) == pytest.approx(alone / n)


def test_a_parallel_block_shares_one_all_reduce() -> None:
    assert c.all_reduces_per_token(np.array([1, 80])).tolist() == [2, 160]
    assert c.all_reduces_per_token(80, parallel_block=True) == 80
    assert c.all_reduce_message(3, 8192) == 3 * 8192 * 2
    assert c.all_reduce_message(3, 8192, 1) == 3 * 8192


@given(st.floats(1e8, 1e12), st.integers(1, 128), st.floats(1e-7, 1e-4))
def test_the_best_degree_beats_every_other_and_falls_as_latency_rises(size: float, layers: int, alpha: float) -> None:
    degrees = (1, 2, 4, 8, 16)

    def best(latency: float) -> int:
        return c.best_tensor_parallel_degree(
            size, 3.35e12, layers, lambda n: c.ring_all_reduce(16_384, n, latency, 450e9), degrees
        )

    found = best(alpha)
    times = {
        n: c.tensor_parallel_seconds(size, 3.35e12, n, layers, c.ring_all_reduce(16_384, n, alpha, 450e9))
        for n in degrees
    }
    assert times[found] == min(times.values())
    assert best(10 * alpha) <= found
    assert best(1.0) == 1


@given(st.floats(0, 1), st.floats(1, 1000))
def test_amdahl_leaves_what_was_not_sped_up(share: float, factor: float) -> None:
    left = c.amdahl(share, factor)
    assert 1 - share <= left <= 1 + 1e-12
    assert c.amdahl(share, 1) == pytest.approx(1)
    assert c.amdahl(1, factor) == pytest.approx(1 / factor)
    assert c.amdahl(share, np.inf) == pytest.approx(1 - share)
