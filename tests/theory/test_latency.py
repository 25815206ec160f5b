"""The closed forms count exactly what a loop counts, and the time bounds have the right limits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.theory import latency
from reference_impl.theory.hardware import DEVICES, device
from reference_impl.theory.kv_cache import bytes_per_token, read_bytes, weight_bytes
from reference_impl.theory.model_shapes import MODELS, model

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
    expected = (read_bytes(shape) + 1024 * bytes_per_token(shape)) / 3350e9
    assert latency.decode_seconds(shape, 1024, h100) == pytest.approx(expected)
    assert latency.decode_seconds(shape, 1, h100) == pytest.approx(4.48e-3, rel=2e-3)


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
    assert cost.seconds >= new * read_bytes(shape) / 3350e9 * (1 - 1e-9)
    head = latency.linear_flops(shape.vocab_size * shape.hidden_size, cost.linear_tokens - new)  # logits nobody needs
    assert cost.seconds >= (cost.flops - head) / h100.peak() * (1 - 1e-9)


def test_a_hundred_thousand_tokens_without_a_cache_take_two_days_and_with_one_eleven_minutes() -> None:
    """8B in bf16 on an H100, at peak rates, starting from one token."""
    shape, h100 = model("llama-3-8b"), device("H100")
    without = latency.generation_cost(shape, 1, 100_000, h100, cached=False)
    with_cache = latency.generation_cost(shape, 1, 100_000, h100, cached=True)
    assert without.forward_passes == with_cache.forward_passes == 100_000
    assert without.attention_pairs == 166_671_666_700_000
    assert with_cache.attention_pairs == 5_000_050_000
    assert without.linear_tokens == 5_000_050_000
    assert without.seconds / 3600 == pytest.approx(44.1, abs=0.1)
    assert with_cache.seconds / 60 == pytest.approx(10.73, abs=0.05)


def test_one_more_token_at_a_context_of_a_hundred_thousand_costs_a_whole_prefill_without_a_cache() -> None:
    shape, h100 = model("llama-3-8b"), device("H100")
    without = latency.prefill_seconds(shape, 100_000, h100)
    with_cache = latency.decode_seconds(shape, 100_000, h100)
    assert without == pytest.approx(4.06, abs=0.01)
    assert with_cache == pytest.approx(8.39e-3, rel=0.01)


def test_generating_from_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one prompt token"):
        latency.generation_cost(model("qwen3-0.6b"), 0, 1, device("H100"), cached=True)


def test_weights_that_do_not_fit_are_refused_before_any_latency_is_given() -> None:
    weights = weight_bytes(model("llama-3-70b"))
    with pytest.raises(ValueError, match="at least 2 devices"):
        latency.require_fit(weights, device("H100"))
    latency.require_fit(weights, device("H100"), 2)
    latency.require_fit(weights, device("MI300X"))


# ---------------------------------------------------------------- any shape


NAMES = st.sampled_from(sorted(MODELS))


@given(NAMES, st.integers(1, 5000), st.integers(0, 5000))
def test_a_pass_counts_matrices_and_pairs_of_any_shape(name: str, new: int, past: int) -> None:
    shape = model(name)
    among_new, with_cached = latency.flops_per_pair(shape)
    pairs = among_new * latency.causal_pairs(new) + with_cached * new * past
    assert latency.pass_flops(shape, new, past) == 2 * shape.linear_params * new + pairs
    assert with_cached >= among_new  # absorbed latent attention computes more and reads less


def test_a_pass_without_a_past_is_a_prefill() -> None:
    shape = model("llama-3-8b")
    assert latency.pass_flops(shape, 7) == latency.pass_flops(shape, 7, 0) == latency.prefill_flops(shape, 7)
    assert latency.causal_pairs(7) == latency.causal_pairs(7, 0) == 28


def test_hybrids_attend_in_a_quarter_of_their_layers_and_latent_attention_in_two_forms() -> None:
    hybrid, latent = model("qwen3-next-80b-a3b"), model("deepseek-v3")
    assert latency.flops_per_pair(hybrid) == (4 * 12 * 16 * 256,) * 2
    assert latency.flops_per_pair(latent) == (2 * 61 * 128 * (192 + 128), 2 * 61 * 128 * (576 + 512))
    prompt = latency.prefill_flops(latent, 1000) - latency.linear_flops(latent.linear_params, 1000)
    assert prompt == 2 * 61 * 128 * 320 * 500_500


@given(NAMES, st.integers(1, 10**5), st.integers(0, 10**5), st.sampled_from([1, 2]))
def test_cache_traffic_reads_the_past_writes_the_new_and_moves_the_state_twice(
    name: str, new: int, past: int, size: int
) -> None:
    shape = model(name)
    moved = latency.cache_traffic(shape, new, past, size)
    assert moved == (new + past) * bytes_per_token(shape, size) + 2 * shape.fixed_state_bytes


@pytest.mark.parametrize("name", MODELS)
def test_time_bounds_of_arrays_are_those_of_scalars(name: str) -> None:
    shape, h100 = model(name), device("H100")
    tokens, batch = np.array([1, 300, 100_000]), np.array([[1], [64]])
    prefill = latency.prefill_seconds(shape, tokens, h100, mfu=0.5)
    decode = latency.decode_seconds(shape, tokens, h100, batch)
    assert decode.shape == (2, 3)
    for j, n in enumerate(tokens.tolist()):
        assert prefill[j] == pytest.approx(latency.prefill_seconds(shape, n, h100, mfu=0.5))
        for i, b in enumerate((1, 64)):
            assert decode[i, j] == pytest.approx(latency.decode_seconds(shape, n, h100, b))
    assert (np.diff(prefill) >= 0).all()
    assert (np.diff(decode, axis=0) > 0).all()


def test_prefill_writes_its_cache_and_a_quantized_weight_is_read_in_its_bytes() -> None:
    shape, h100 = model("llama-3-8b"), device("H100")
    one = latency.prefill_seconds(shape, 1, h100)
    assert one * h100.bandwidth == pytest.approx(read_bytes(shape) + bytes_per_token(shape))
    assert latency.prefill_seconds(shape, 1, h100, weights=1e9) * h100.bandwidth == pytest.approx(1e9 + 131_072)
    assert latency.decode_seconds(shape, 1, h100, weights=1e9) * h100.bandwidth == pytest.approx(1e9 + 131_072)
    halved = latency.decode_seconds(shape, 1000, h100, weights=0, bytes_per_value=1)
    assert halved == pytest.approx(latency.decode_seconds(shape, 1000, h100, weights=0) / 2)
    compute = latency.decode_seconds(shape, 1, h100, batch=4096, precision="fp8", mfu=0.5)
    assert compute == pytest.approx(4096 * latency.decode_flops(shape, 1) / (0.5 * h100.peak("fp8")))


# ---------------------------------------------------------------- shares, regimes, one request


@given(st.floats(1e8, 1e12), st.floats(1e3, 1e7))
def test_attention_equals_the_matrices_at_the_equal_prompt_length(params: float, per_pair: float) -> None:
    length = latency.equal_prompt_length(params, per_pair)
    assert latency.attention_over_linear(params, length**2 / 2, length, per_pair) == pytest.approx(1)
    assert latency.attention_over_linear(params, 2 * length**2, 2 * length, per_pair) == pytest.approx(2)


@given(st.sampled_from(sorted(DEVICES)), st.sampled_from([4, 4.5, 8, 16]), st.floats(0.1, 1))
def test_flat_prefill_ends_where_computing_takes_as_long_as_reading_the_weights(
    name: str, bits: float, mfu: float
) -> None:
    part, params = device(name), 1e9
    tokens = latency.flat_prefill_tokens(part, "fp16", bits, mfu)
    read = params * bits / 8 / part.bandwidth
    assert latency.step_bound(latency.linear_flops(params, tokens), 0, part, "fp16", mfu) == pytest.approx(read)


@given(st.floats(1e6, 1e18), st.floats(1e3, 1e14), st.floats(0.1, 1), st.floats(0.1, 1))
def test_utilizations_give_back_the_shares_that_made_the_time(
    flops: float, num_bytes: float, mfu: float, mbu: float
) -> None:
    h100 = device("H100")
    seconds = latency.step_bound(flops, num_bytes, h100, "fp8", mfu, mbu)
    reached = (
        latency.model_flops_utilization(flops, seconds, h100, "fp8"),
        latency.model_bandwidth_utilization(num_bytes, seconds, h100),
    )
    assert reached[0] <= mfu * (1 + 1e-9)
    assert reached[1] <= mbu * (1 + 1e-9)
    assert reached[0] == pytest.approx(mfu) or reached[1] == pytest.approx(mbu)


@given(st.floats(0, 100), st.floats(0.001, 100), st.floats(1e-4, 1), st.integers(1, 10**5))
def test_a_budget_pays_for_the_tokens_of_the_request_that_takes_it(
    queue: float, prefill: float, tpot: float, tokens: int
) -> None:
    total = latency.request_seconds(queue, prefill, tpot, tokens)
    assert total == pytest.approx(queue + prefill + (tokens - 1) * tpot)
    paid = latency.max_output_tokens(total, queue + prefill, tpot)
    assert abs(paid - tokens) <= 1  # rounding of the sum
    assert latency.max_output_tokens(queue + prefill + (tokens - 0.5) * tpot, queue + prefill, tpot) == tokens


def test_a_budget_below_ttft_pays_for_nothing_and_exactly_ttft_for_one_token() -> None:
    budgets = np.array([0.0, 0.99, 1.0, 1.05, 1.1, 2.0])
    assert latency.max_output_tokens(budgets, 1.0, 0.1).tolist() == [0, 0, 1, 1, 2, 11]


@given(st.lists(st.tuples(st.floats(0, 1e12), st.floats(1e9, 1e13)), min_size=1, max_size=4))
def test_reads_from_several_memories_take_the_longest_or_the_sum(parts: list[tuple[float, float]]) -> None:
    times = [size / rate for size, rate in parts]
    assert latency.tiered_read_seconds(parts, overlapped=True) == max(times)
    assert latency.tiered_read_seconds(parts, overlapped=False) == pytest.approx(sum(times))


def test_a_swept_memory_may_stand_beside_a_fixed_one() -> None:
    spilled = np.array([0, 10e9, 50e9])
    parts = [(140e9 - spilled, 4e12), (spilled, 360e9), (1e9, 1e12)]
    assert latency.tiered_read_seconds(parts, True) == pytest.approx([35e-3, 32.5e-3, 138.9e-3], rel=1e-3)
    assert latency.tiered_read_seconds(parts, False) == pytest.approx([36e-3, 61.3e-3, 162.4e-3], rel=1e-3)


def test_a_deployment_that_exactly_fits_is_accepted() -> None:
    latency.require_fit(80e9, device("H100"))
    with pytest.raises(ValueError, match=r"expected at most 160 GB on 2 x H100, got 161 GB; use at least 3 devices"):
        latency.require_fit(161e9, device("H100"), 2)
