"""A step of a deployment: the single-device bounds it contains, what devices and chunks change, what a budget buys."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.theory import latency
from reference_impl.theory.deployment import Deployment, RequestTime, request_time
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model

LLAMA, H100 = model("llama-3-8b"), device("H100")
ONE = Deployment(LLAMA, H100, mfu=0.5, mbu=0.8)


@given(st.integers(1, 4000), st.integers(1, 64))
def test_one_device_gives_the_bounds_of_prefill_and_decode(tokens: int, batch: int) -> None:
    floor = Deployment(LLAMA, H100)
    assert floor.prefill_seconds(tokens) == pytest.approx(float(latency.prefill_seconds(LLAMA, tokens, H100)))
    assert floor.tpot(tokens, batch) == pytest.approx(float(latency.decode_seconds(LLAMA, tokens, H100, batch)))


@given(st.integers(300, 8000), st.data())
def test_chunks_of_a_prompt_take_at_least_as_long_as_the_whole(tokens: int, data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, tokens - 1))
    pieces = ONE.step_seconds(cut, 0) + ONE.step_seconds(tokens - cut, cut)
    assert pieces >= ONE.prefill_seconds(tokens) * (1 - 1e-9)


@given(st.integers(1, 4000), st.integers(0, 4000))
def test_a_prefix_hit_never_costs(new: int, cached: int) -> None:
    assert ONE.prefill_seconds(new + cached, cached) <= ONE.prefill_seconds(new + cached) * (1 + 1e-9)


def test_devices_divide_the_work_and_add_communication() -> None:
    two, free = (Deployment(LLAMA, H100, 2, mfu=0.5, mbu=0.8, alpha=a) for a in (2e-6, 0.0))
    assert ONE.tpot(1000) / 2 < free.tpot(1000) < two.tpot(1000) < ONE.tpot(1000)
    assert two.tpot(1000) - free.tpot(1000) == pytest.approx(2 * 32 * 2 * 2e-6)  # 64 all-reduces, 2 alpha each
    assert ONE.communication_seconds(1000) == 0


def test_more_devices_than_kv_heads_divide_the_cache_no_further() -> None:
    """8 KV heads: 16 devices keep each twice, so a device reads as much cache as one of eight."""

    def cache_seconds(devices: int) -> float:
        free = Deployment(LLAMA, H100, devices, alpha=0.0)
        return free.tpot(8000, 16) - free.tpot(1, 16)

    assert cache_seconds(4) == pytest.approx(2 * cache_seconds(8), rel=1e-3)
    assert cache_seconds(16) == pytest.approx(cache_seconds(8), rel=1e-3)
    eight, sixteen = Deployment(LLAMA, H100, 8), Deployment(LLAMA, H100, 16)
    room = 2 * 0.9 * 8 * H100.capacity - sixteen.weights
    assert sixteen.cache_tokens() == int(room / (2 * sixteen.bytes_per_token))
    assert eight.cache_copies == 1


@given(st.floats(1e-4, 2.0))
def test_the_longest_prompt_is_the_last_that_fits(seconds: float) -> None:
    longest = ONE.longest_prompt(seconds)
    assert longest == 0 or ONE.prefill_seconds(longest) <= seconds
    assert ONE.prefill_seconds(longest + 1) > seconds


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 devices"):
        Deployment(model("llama-3-70b"), H100)
    with pytest.raises(ValueError, match="mixture of experts"):
        Deployment(model("mixtral-8x7b"), H100, 2)
    with pytest.raises(ValueError, match="mfu"):
        Deployment(LLAMA, H100, mfu=0)
    with pytest.raises(KeyError, match="fp8"):
        Deployment(LLAMA, device("A100-80GB"), weight_bits=8, precision="fp8")
    with pytest.raises(ValueError, match="cached tokens"):
        request_time(ONE, 8000, 100, batch=64)
    with pytest.raises(ValueError, match="queue"):
        request_time(ONE, 1, 1, queue=-1)


def test_fewer_bits_leave_more_room_and_read_less() -> None:
    small = Deployment(LLAMA, H100, weight_bits=4.25, mfu=0.5, mbu=0.8, kv_bytes=1)
    assert small.cache_tokens() > 2 * ONE.cache_tokens()
    assert small.tpot(1000, 16) < ONE.tpot(1000, 16) / 2


@given(st.integers(1, 4000), st.integers(1, 400), st.floats(0, 3), st.integers(1, 16))
def test_a_request_is_the_sum_of_its_passes(prompt: int, output: int, queue: float, batch: int) -> None:
    found = request_time(ONE, prompt, output, queue, batch)
    steps = [ONE.tpot(prompt + i, batch) for i in range(1, output)]
    assert found.latency == pytest.approx(queue + ONE.prefill_seconds(prompt) + float(np.sum(steps)), rel=1e-6)
    assert found.ttft + found.decode == pytest.approx(found.latency)


@given(st.integers(1, 500), st.floats(0, 1))
def test_the_tokens_within_the_latency_are_the_tokens_asked_for(output: int, queue: float) -> None:
    time = RequestTime(queue, 0.03, 0.006, output)
    assert time.tokens_within(time.latency) == output
    assert time.tokens_within(0.9 * time.ttft) == 0
