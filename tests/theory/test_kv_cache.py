"""Properties of the cache calculators: right dimension, monotone where they must be, right limits."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.theory import kv_cache
from reference_impl.theory.model_shapes import MODELS, ModelShape, model
from reference_impl.theory.units import GB

GROUPS = st.sampled_from((1, 2, 4, 8))


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    kv_heads, group = draw(st.integers(1, 16)), draw(GROUPS)
    return ModelShape(
        "drawn", draw(st.integers(1, 100)), draw(st.integers(64, 8192)), kv_heads * group, kv_heads,
        draw(st.sampled_from((64, 128, 256))), draw(st.integers(64, 30000)), draw(st.integers(100, 200_000)),
    )  # fmt: skip


@given(shapes(), st.sampled_from((1, 2, 4)))
def test_bytes_per_token_is_two_times_layers_times_kv_heads_times_head_dim(shape: ModelShape, size: int) -> None:
    expected = kv_cache.attention_bytes_per_token(shape.layers, shape.num_kv_heads, shape.head_dim, size)
    assert expected == 2 * shape.layers * shape.num_kv_heads * shape.head_dim * size
    assert kv_cache.bytes_per_token(shape, size) == expected


@given(shapes())
def test_query_heads_do_not_change_the_cache(shape: ModelShape) -> None:
    more = dataclasses.replace(shape, num_heads=shape.num_heads * 2)
    assert kv_cache.bytes_per_token(more) == kv_cache.bytes_per_token(shape)


@given(shapes(), st.integers(0, 10**6), st.integers(1, 500))
def test_cache_grows_by_the_same_bytes_with_every_token_and_every_sequence(shape: ModelShape, n: int, k: int) -> None:
    each = kv_cache.bytes_per_token(shape)
    assert kv_cache.cache_bytes(shape, n + 1) - kv_cache.cache_bytes(shape, n) == each
    assert kv_cache.cache_bytes(shape, n, k) == k * n * each


def test_footprint_is_bytes_per_token_times_length_times_concurrency() -> None:
    shape = model("llama-3-8b")
    assert kv_cache.cache_bytes(shape, 8192, 16) == 131_072 * 8192 * 16


@given(st.integers(1, 128), st.integers(1, 4096))
def test_a_hybrid_keeps_its_state_at_length_zero_and_grows_slower(full: int, tokens: int) -> None:
    dense = dataclasses.replace(model("llama-3-8b"), layers=128)
    hybrid = dataclasses.replace(dense, attention_layers=full, fixed_state_bytes=1000, active_params=1)
    assert kv_cache.cache_bytes(hybrid, 0, 3) == 3000
    assert kv_cache.bytes_per_token(hybrid) * 128 == kv_cache.bytes_per_token(dense) * full
    if full < 128:
        growth = kv_cache.cache_bytes(hybrid, tokens) - kv_cache.cache_bytes(hybrid, 0)
        assert growth < kv_cache.cache_bytes(dense, tokens)


@pytest.mark.parametrize("name", MODELS)
def test_arrays_give_what_scalars_give(name: str) -> None:
    shape, lengths = model(name), np.array([0, 1, 4096, 131072])
    swept = kv_cache.cache_bytes(shape, lengths)
    assert swept.tolist() == [kv_cache.cache_bytes(shape, int(n)) for n in lengths]
    memory = np.array([10, 80, 640]) * GB
    fits = kv_cache.tokens_that_fit(memory, 40 * GB, kv_cache.bytes_per_token(shape))
    assert fits.tolist() == [kv_cache.tokens_that_fit(m, 40 * GB, kv_cache.bytes_per_token(shape)) for m in memory]
    assert fits[0] == 0  # the weights alone do not fit


@given(
    st.floats(1e9, 1e12), st.floats(0, 1e12), st.integers(1, 1000), st.integers(1, 10**7), st.floats(0.1, 1.0),
)  # fmt: skip
def test_budget_shrinks_with_weights_users_and_reserve(
    memory: float, weights: float, users: int, each: int, used: float
) -> None:
    def context(**change: float) -> int:
        args = {"memory": memory, "weights": weights, "users": users, "bytes_each": each, "utilization": used} | change
        return kv_cache.max_context_for_budget(**args)

    base = context()
    assert base >= 0
    assert context(weights=weights * 1.1 + 1) <= base
    assert context(users=users + 1) <= base
    assert context(memory=memory * 1.1) >= base
    # All contexts together fit the budget, and one token more per user would not.
    budget = kv_cache.kv_budget(memory, weights, used)
    assert kv_cache.kv_budget(memory, weights, used, reserve=1e9) <= budget
    assert base * users * each <= budget * (1 + 1e-9)
    assert (base + 1) * users * each >= budget * (1 - 1e-9)


@given(st.integers(1, 200), st.integers(0, 30_000), st.integers(0, 30_000))
def test_prompt_and_new_tokens_together_are_the_context(users: int, prompt: int, shared: int) -> None:
    shared = min(shared, prompt)
    args = (320 * GB, 140 * GB, users, 327_680)
    context = kv_cache.max_context_for_budget(*args)
    alone = kv_cache.max_new_tokens_for_budget(*args, prompt_tokens=prompt)
    assert alone == max(0, context - prompt)
    sharing = kv_cache.max_new_tokens_for_budget(*args, prompt_tokens=prompt, shared_prefix_tokens=shared)
    assert sharing >= alone  # a prefix that counts once can only help
    if users == 1:
        assert sharing == alone


def test_a_shared_prefix_longer_than_the_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="shared_prefix_tokens <= prompt_tokens"):
        kv_cache.max_new_tokens_for_budget(80 * GB, 0, 1, 1, prompt_tokens=10, shared_prefix_tokens=11)


@given(st.integers(1, 100_000), st.integers(1, 64))
def test_concurrency_is_the_largest_number_that_fits(context: int, gigabytes: int) -> None:
    shape = model("qwen3-next-80b-a3b")
    each, fixed = kv_cache.bytes_per_token(shape), shape.fixed_state_bytes
    count = kv_cache.concurrent_requests(gigabytes * GB, 0, context, each, 1.0, fixed_state_each=fixed)
    assert kv_cache.cache_bytes(shape, context, count) <= gigabytes * GB
    assert kv_cache.cache_bytes(shape, context, count + 1) > gigabytes * GB


@given(st.integers(2, 8), st.sampled_from((32, 64, 128, 1024)))
def test_scales_cost_their_bits_divided_by_the_group(bits: int, group: int) -> None:
    assert kv_cache.bits_per_weight(bits) == bits
    assert kv_cache.bits_per_weight(bits, group) == bits + 16 / group
    assert kv_cache.bits_per_weight(bits, group, zero_point_bits=bits) > kv_cache.bits_per_weight(bits, group)


@pytest.mark.parametrize("name", MODELS)
def test_keeping_embeddings_in_sixteen_bits_costs_more_than_quantizing_them(name: str) -> None:
    shape = model(name)
    small = kv_cache.weight_bytes(shape, 4.125)
    assert small < kv_cache.weight_bytes(shape, 4.125, embedding_bits=16) < kv_cache.weight_bytes(shape)
    assert kv_cache.weight_bytes(shape, 16, embedding_bits=16) == pytest.approx(kv_cache.weight_bytes(shape))


def test_the_cache_outgrows_the_weights_at_a_length_that_follows_from_both() -> None:
    shape = model("llama-3-70b")
    crossing = kv_cache.tokens_until_cache_equals_weights(kv_cache.weight_bytes(shape), kv_cache.bytes_per_token(shape))
    assert crossing == pytest.approx(430_625, abs=1)  # 105 requests of 4096 tokens
    assert kv_cache.cache_bytes(shape, crossing) == pytest.approx(kv_cache.weight_bytes(shape))
    small = model("llama-3-8b")
    crossing = kv_cache.tokens_until_cache_equals_weights(kv_cache.weight_bytes(small), kv_cache.bytes_per_token(small))
    assert crossing == pytest.approx(122_532, abs=1)


@given(st.integers(1, 200_000), st.integers(1, 8))
def test_a_memory_plan_adds_up_and_grows_with_the_prompt(prompt: int, sequences: int) -> None:
    shape = model("llama-3-8b")
    plan = kv_cache.plan_memory(shape, 80 * GB, prompt, sequences)
    assert plan.total == pytest.approx(sum(plan.components.values()))
    assert plan.fits == (plan.total <= 72 * GB)
    longer = kv_cache.plan_memory(shape, 80 * GB, prompt + 1, sequences)
    assert longer.total > plan.total
    chunked = kv_cache.plan_memory(shape, 80 * GB, prompt, sequences, chunk_tokens=512)
    assert chunked.activations <= plan.activations
    # One row of fp32 logits per sequence, and one layer's activations: 2 * hidden + 3 * intermediate values per token.
    assert plan.logits == sequences * shape.vocab_size * 4
    assert plan.activations == sequences * prompt * (2 * 4096 + 3 * 14336) * 2
    assert chunked.cache == plan.cache


def test_a_long_prompt_runs_out_of_memory_by_the_component_one_forgot() -> None:
    """8B in bf16 on 80 GB, 131,072 tokens of prompt: chunked it fits with 38 GB to spare; each shortcut breaks it."""
    shape = model("llama-3-8b")
    good = kv_cache.plan_memory(shape, 80 * GB, 131_072, chunk_tokens=2048)
    assert good.fits
    all_logits = kv_cache.plan_memory(shape, 80 * GB, 131_072, logits_for_all_positions=True)
    assert not all_logits.fits
    assert all_logits.logits == pytest.approx(67.2 * GB, rel=0.01)
    unfused = kv_cache.plan_memory(shape, 80 * GB, 131_072, fused_attention=False)
    assert not unfused.fits
    assert unfused.scores == 32 * 131_072**2 * 2
    assert "out of memory by" in unfused.report()
    assert "left" in good.report()


def test_unfused_scores_of_a_chunk_are_chunk_by_prompt_for_each_sequence_in_it() -> None:
    shape = model("llama-3-8b")
    whole = kv_cache.plan_memory(shape, 80 * GB, 1000, 4, fused_attention=False)
    assert whole.scores == 4 * 32 * 1000 * 1000 * 2
    chunk = kv_cache.plan_memory(shape, 80 * GB, 1000, 4, fused_attention=False, chunk_tokens=250)
    assert chunk.scores == 32 * 250 * 1000 * 2


def test_a_prefix_counted_once_gives_back_what_the_other_users_would_have_stored() -> None:
    args = {"memory": 320 * GB, "weights": 140 * GB, "users": 50, "bytes_each": 327_680, "utilization": 1.0}
    apart = kv_cache.max_new_tokens_for_budget(**args, prompt_tokens=4000)
    shared = kv_cache.max_new_tokens_for_budget(**args, prompt_tokens=4000, shared_prefix_tokens=3000)
    assert (apart, shared) == (6986, 9926)
    assert shared - apart == 3000 * 49 // 50


def test_the_cap_on_context_is_the_smaller_of_model_and_memory() -> None:
    """A model may allow 131,072 tokens; the budget of a loaded server allows far fewer."""
    shape = model("qwen2.5-72b")
    assert shape.max_context == 131_072
    budget = kv_cache.max_context_for_budget(
        4 * 80 * GB, kv_cache.weight_bytes(shape), 100, kv_cache.bytes_per_token(shape)
    )
    assert budget == 4351 < shape.max_context


@given(st.integers(0, 10**6), st.integers(1, 256))
def test_blocks_hold_all_tokens_and_one_block_less_would_not(tokens: int, block: int) -> None:
    blocks = kv_cache.blocks_for(tokens, block)
    assert (blocks - 1) * block < tokens <= blocks * block


@given(st.floats(1, 1e6), st.integers(1, 256))
def test_tail_waste_falls_with_length_and_vanishes_for_blocks_of_one(tokens: float, block: int) -> None:
    share = kv_cache.tail_waste_share(tokens, block)
    assert 0 <= share < 1
    assert kv_cache.tail_waste_share(tokens, 1) == 0
    assert kv_cache.tail_waste_share(2 * tokens, block) <= share
    assert kv_cache.tail_waste_share(tokens, block + 1) > share


@given(st.integers(1, 64), st.integers(1, 50))
def test_tail_waste_is_the_mean_over_all_remainders(block: int, blocks: int) -> None:
    """Every length from one token in the last block to a full one, exactly once."""
    lengths = np.arange((blocks - 1) * block + 1, blocks * block + 1)
    empty = (blocks * block - lengths).mean()
    assert empty == (block - 1) / 2
    assert kv_cache.tail_waste_share(lengths.mean(), block) == pytest.approx(empty / (blocks * block))
