"""The closed forms count exactly what a loop counts, and the time bounds have the right limits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.theory import latency
from reference_impl.theory.hardware import DEVICES, device
from reference_impl.theory.kv_cache import bytes_per_token, weight_bytes
from reference_impl.theory.model_shapes import model

SMALL = st.integers(1, 60)


@given(SMALL, SMALL)
def test_closed_forms_equal_a_loop_over_the_passes(prompt: int, new: int) -> None:
    lengths = range(prompt, prompt + new)  # the context of each pass
    assert latency.uncached_linear_tokens(prompt, new) == sum(lengths)
    assert latency.uncached_attention_pairs(prompt, new) == sum(i + 1 for n in lengths for i in range(n))
    fed = [prompt] + [1] * (new - 1)
    assert latency.cached_linear_tokens(prompt, new) == sum(fed)
    pairs = sum(latency.causal_pairs(q, n - q) for q, n in zip(fed, lengths, strict=True))
    assert latency.cached_attention_pairs(prompt, new) == pairs


@given(st.integers(0, 500), st.integers(1, 500), st.data())
def test_splitting_a_prompt_into_chunks_changes_no_pair(past: int, tokens: int, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, tokens))
    whole = latency.causal_pairs(tokens, past)
    assert whole == latency.causal_pairs(cut, past) + latency.causal_pairs(tokens - cut, past + cut)


@given(st.integers(1, 10**5), st.integers(1, 10**5))
def test_a_cache_never_costs_operations_and_is_free_for_one_token(prompt: int, new: int) -> None:
    assert latency.cached_linear_tokens(prompt, new) <= latency.uncached_linear_tokens(prompt, new)
    assert latency.cached_attention_pairs(prompt, new) <= latency.uncached_attention_pairs(prompt, new)
    assert latency.cached_linear_tokens(prompt, 1) == latency.uncached_linear_tokens(prompt, 1)
    assert latency.cached_attention_pairs(prompt, 1) == latency.uncached_attention_pairs(prompt, 1)


def test_counts_sweep_over_arrays() -> None:
    new = np.array([1, 64, 256])
    assert latency.uncached_linear_tokens(16, new).tolist() == [16, 3040, 36_736]
    assert latency.cached_attention_pairs(16, new).tolist() == [136, 3160, 36_856]


@given(st.integers(1, 10**5), st.integers(0, 10**5))
def test_flops_of_a_pass_split_into_matrices_and_attention(tokens: int, past: int) -> None:
    shape = model("llama-3-8b")
    linear = latency.linear_flops(shape.linear_params, tokens)
    attention = latency.attention_flops(latency.causal_pairs(tokens, past), 32, 32, 128)
    assert latency.pass_flops(shape, tokens, past) == linear + attention


def test_prefill_and_decode_are_the_same_pass_with_other_numbers() -> None:
    shape = model("llama-3-8b")
    assert latency.prefill_flops(shape, 100) == latency.pass_flops(shape, 100, 0)
    assert latency.decode_flops(shape, 100) == latency.pass_flops(shape, 1, 99)
    token_by_token = sum(latency.decode_flops(shape, n) for n in range(1, 101))
    assert latency.prefill_flops(shape, 100) == token_by_token


def test_gpt_layers_have_twelve_squares_each() -> None:
    assert latency.gpt_layer_params(6, 384) == 10_616_832


@given(st.floats(1e6, 1e18), st.floats(1e3, 1e14), st.sampled_from(sorted(DEVICES)))
def test_a_step_is_bound_by_whichever_takes_longer(flops: float, num_bytes: float, name: str) -> None:
    row = device(name)
    bound = latency.step_bound(flops, num_bytes, row, "fp16")
    assert bound == pytest.approx(max(flops / row.peak("fp16"), num_bytes / row.bandwidth))
    compute_bound = flops / num_bytes > row.ridge("fp16")
    slower = latency.step_bound(flops, num_bytes, row, "fp16", mfu=0.5)
    assert slower == pytest.approx(2 * bound) if compute_bound else slower >= bound
    assert latency.step_bound(flops, num_bytes, row, "fp16", mbu=0.8) >= bound


def test_a_decode_step_at_batch_one_is_the_time_to_read_weights_and_cache() -> None:
    shape, h100 = model("llama-3-8b"), device("H100")
    expected = (weight_bytes(shape) + 1024 * bytes_per_token(shape)) / 3350e9
    assert latency.decode_seconds(shape, 1024, h100) == pytest.approx(expected)
    assert latency.decode_seconds(shape, 1, h100) == pytest.approx(4.79e-3, rel=2e-3)


def test_a_prefill_is_flat_while_short_and_then_follows_its_operations() -> None:
    shape, h100 = model("llama-3-8b"), device("H100")
    seconds = latency.prefill_seconds(shape, np.array([1, 100, 8192, 16384]), h100)
    assert seconds[1] == pytest.approx(seconds[0], rel=0.001)
    assert seconds[3] > 2 * seconds[2]  # attention makes it worse than linear
    assert latency.prefill_seconds(shape, 8192, h100, mfu=0.5) == pytest.approx(2 * seconds[2])


def test_a_batch_shares_the_weights_and_not_the_caches() -> None:
    shape, h100 = model("llama-3-8b"), device("H100")
    one, eight = latency.decode_seconds(shape, 8192, h100), latency.decode_seconds(shape, 8192, h100, batch=8)
    cache = 8192 * bytes_per_token(shape) / 3350e9
    assert eight - one == pytest.approx(7 * cache)


@given(st.integers(1, 300), st.integers(1, 100), st.booleans())
def test_generation_cost_counts_what_the_closed_forms_count(prompt: int, new: int, cached: bool) -> None:
    shape, h100 = model("qwen3-0.6b"), device("H100")
    cost = latency.generation_cost(shape, prompt, new, h100, cached)
    assert cost.forward_passes == new  # with a cache and without
    linear = latency.linear_flops(shape.linear_params, cost.linear_tokens)
    attention = latency.attention_flops(cost.attention_pairs, 28, 16, 128)
    assert cost.flops == pytest.approx(linear + attention)
    assert cost.seconds >= new * weight_bytes(shape) / 3350e9 * (1 - 1e-9)
    assert cost.seconds >= cost.flops / h100.peak() * (1 - 1e-9)


def test_a_hundred_thousand_tokens_without_a_cache_take_two_days_and_with_one_eleven_minutes() -> None:
    """8B in bf16 on an H100, at peak rates, starting from one token."""
    shape, h100 = model("llama-3-8b"), device("H100")
    without = latency.generation_cost(shape, 1, 100_000, h100, cached=False)
    with_cache = latency.generation_cost(shape, 1, 100_000, h100, cached=True)
    assert without.forward_passes == with_cache.forward_passes == 100_000
    assert without.attention_pairs == 166_671_666_700_000
    assert with_cache.attention_pairs == 5_000_050_000
    assert without.linear_tokens == 5_000_050_000
    assert without.seconds / 3600 == pytest.approx(45.6, abs=0.1)
    assert with_cache.seconds / 60 == pytest.approx(11.25, abs=0.05)


def test_one_more_token_at_a_context_of_a_hundred_thousand_costs_a_whole_prefill_without_a_cache() -> None:
    shape, h100 = model("llama-3-8b"), device("H100")
    without = latency.prefill_seconds(shape, 100_000, h100)
    with_cache = latency.decode_seconds(shape, 100_000, h100)
    assert without == pytest.approx(4.17, abs=0.01)
    assert with_cache == pytest.approx(8.71e-3, rel=0.01)


def test_generating_from_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one prompt token"):
        latency.generation_cost(model("qwen3-0.6b"), 0, 1, device("H100"), cached=True)


def test_weights_that_do_not_fit_are_refused_before_any_latency_is_given() -> None:
    weights = weight_bytes(model("llama-3-70b"))
    with pytest.raises(ValueError, match="at least 2 devices"):
        latency.require_fit(weights, device("H100"))
    latency.require_fit(weights, device("H100"), 2)
    latency.require_fit(weights, device("MI300X"))
