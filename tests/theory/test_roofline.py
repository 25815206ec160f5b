"""Intensities have the right limits, and a step lands under the roof of its device, alone or in a sweep."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.theory import latency, roofline
from reference_impl.theory.hardware import DEVICES, device
from reference_impl.theory.kv_cache import bytes_per_token, read_bytes
from reference_impl.theory.model_shapes import MODELS, ModelShape, model

NAMES = st.sampled_from(sorted(MODELS))
DENSE = sorted(name for name, shape in MODELS.items() if shape.active_params is None)
PARTS = st.sampled_from(sorted(set(DEVICES) - {"T4"}))  # the T4 has no bf16
TOKENS = st.integers(1, 200_000)
BATCH = st.integers(1, 4096)
H100 = device("H100")


# ---------------------------------------------------------------- intensity of parts


@given(st.floats(1e-3, 1e6), PARTS)
def test_the_roof_is_the_bandwidth_up_to_the_ridge_and_the_peak_beyond(intensity: float, name: str) -> None:
    part = device(name)
    reached = roofline.attainable_flops(intensity, part)
    assert reached == pytest.approx(part.peak() if intensity >= part.ridge() else intensity * part.bandwidth)
    assert roofline.attainable_flops(2 * intensity, part) >= reached


@given(st.integers(1, 10**6), st.sampled_from([2, 4, 4.125, 8, 16, 32]))
def test_weight_intensity_is_proportional_to_tokens_and_inversely_to_bits(tokens: int, bits: float) -> None:
    assert roofline.weight_intensity(tokens, bits) == pytest.approx(
        tokens * roofline.weight_intensity(1, 16) * 16 / bits
    )


@given(st.integers(1, 10**6), st.integers(1, 20_000), st.integers(1, 20_000), st.sampled_from([1, 2, 4]))
def test_a_product_has_fewer_operations_per_byte_than_each_of_its_sides_alone(
    rows: int, d_in: int, d_out: int, size: int
) -> None:
    reached = roofline.gemm_intensity(rows, d_in, d_out, size)
    assert reached <= roofline.gemm_intensity(rows + 1, d_in, d_out, size)
    sides = sorted((rows, d_in, d_out))
    assert reached < 2 * sides[0] / size  # the smallest side bounds it
    assert roofline.gemm_intensity(d_out, d_in, rows, size) == pytest.approx(reached)  # the transpose is as dense
    limit = 2 / size * d_in * d_out / (d_in + d_out)
    assert reached < limit
    assert roofline.gemm_intensity(1e15, d_in, d_out, size) == pytest.approx(limit)


@given(NAMES, st.sampled_from([1, 2]))
def test_decode_attention_intensity_is_what_a_long_context_tends_to(name: str, size: int) -> None:
    shape = model(name)
    limit = roofline.decode_attention_intensity(shape, size)
    assert roofline.max_decode_intensity(shape, 10**12, size) == pytest.approx(limit, rel=1e-4)
    assert roofline.max_decode_intensity(shape, 10**4, size) > 0.5 * limit


@pytest.mark.parametrize(
    ("name", "expected"),
    [("llama-2-7b", 1), ("llama-3-8b", 4), ("llama-3-70b", 8), ("falcon-7b", 71), ("qwen3-next-80b-a3b", 8)],
)
def test_decode_attention_intensity_is_the_group_size_in_two_bytes(name: str, expected: float) -> None:
    assert roofline.decode_attention_intensity(model(name)) == expected
    assert roofline.decode_attention_intensity(model(name), 1) == 2 * expected


# ---------------------------------------------------------------- steps


@given(NAMES, BATCH, st.integers(0, 200_000), st.integers(1, 5000))
def test_step_bytes_are_weights_once_and_each_sequences_cache(name: str, batch: int, past: int, new: int) -> None:
    shape = model(name)
    moved = roofline.step_bytes(shape, batch, past, new)
    each = (past + new) * bytes_per_token(shape) + 2 * shape.fixed_state_bytes
    assert moved == read_bytes(shape) + batch * each
    assert roofline.step_bytes(shape, batch, past, new, weights=0) == batch * each
    assert roofline.step_bytes(shape, 0, past, new) == read_bytes(shape)


@given(st.sampled_from(DENSE), BATCH, TOKENS, PARTS)
def test_a_decode_step_is_the_same_in_latency_and_on_the_roofline(
    name: str, batch: int, context: int, part: str
) -> None:
    shape, one = model(name), device(part)
    placed = roofline.place(shape, one, batch, context - 1)
    assert placed.seconds == pytest.approx(latency.decode_seconds(shape, context, one, batch))
    assert placed.intensity == pytest.approx(roofline.step_intensity(shape, batch, context - 1))
    prompt = roofline.place(shape, one, 1, 0, context)
    assert prompt.seconds == pytest.approx(latency.prefill_seconds(shape, context, one))


@given(NAMES, BATCH, st.integers(0, 200_000), st.integers(1, 5000), PARTS)
def test_placement_is_consistent_with_its_own_roof(name: str, batch: int, past: int, new: int, part: str) -> None:
    one = device(part)
    p = roofline.place(model(name), one, batch, past, new)
    assert p.seconds == pytest.approx(p.flops / p.attainable)
    assert p.attainable == pytest.approx(p.utilization * one.peak())
    assert p.compute_bound == (p.flops / one.peak() >= p.num_bytes / one.bandwidth)
    assert p.ridge == one.ridge()
    assert 0 < p.utilization <= 1


@given(NAMES, st.integers(1, 4095), TOKENS)
def test_intensity_grows_with_the_batch_and_never_passes_its_ceiling(name: str, batch: int, context: int) -> None:
    shape = model(name)
    one, more = (roofline.step_intensity(shape, b, context - 1) for b in (batch, batch + 1))
    ceiling = roofline.max_decode_intensity(shape, context)
    assert one < more < ceiling
    assert roofline.step_intensity(shape, 10**13, context - 1) == pytest.approx(ceiling, rel=1e-3)


@given(st.sampled_from(DENSE), st.integers(1, 2000), st.floats(10, 600))
def test_the_batch_for_the_ridge_is_where_the_step_reaches_it(name: str, context: int, ridge: float) -> None:
    shape = model(name)
    batch = roofline.batch_for_ridge(shape, context, ridge)
    if np.isfinite(batch):
        assert roofline.step_intensity(shape, batch, context - 1) == pytest.approx(ridge)
    else:
        assert roofline.max_decode_intensity(shape, context) <= ridge
    half = roofline.batch_for_ridge(shape, context, ridge, weights=read_bytes(shape) / 2)
    assert half == pytest.approx(batch / 2)


def test_the_batch_for_the_ridge_is_infinite_where_the_ceiling_lies_on_the_ridge() -> None:
    shape = model("llama-3-70b")
    assert roofline.batch_for_ridge(shape, 8192, roofline.max_decode_intensity(shape, 8192)) > 1e12


@given(st.floats(1e8, 1e12), st.floats(1e3, 1e6), st.floats(1, 2000), st.floats(0, 2500))
def test_compute_bound_context_shrinks_with_the_ridge_and_has_no_end_when_attention_is_past_it(
    params: float, per_token: float, ridge: float, attention: float
) -> None:
    context = roofline.compute_bound_context(params, per_token, ridge, attention)
    assert isinstance(context, float)
    if attention >= ridge:
        assert context == np.inf
    else:
        # 2 N + attention * KV * context operations over KV * context bytes
        moved = per_token * context
        assert (2 * params + attention * moved) / moved == pytest.approx(ridge)
        assert roofline.compute_bound_context(params, per_token, 1.01 * ridge, attention) < context


@pytest.mark.parametrize("context", [1, 2, 100])
def test_the_ceiling_of_a_short_context_is_one_sequences_operations_over_its_own_bytes(context: int) -> None:
    """8B: 2 * 7.50e9 for the matrices, 524,288 per token of context; 131,072 bytes per token."""
    expected = (2 * 7_504_658_432 + 524_288 * context) / (131_072 * context)
    assert roofline.max_decode_intensity(model("llama-3-8b"), context) == pytest.approx(expected, rel=1e-12)
    assert roofline.max_decode_intensity(model("llama-3-8b"), context, 1) == pytest.approx(2 * expected, rel=1e-12)


def test_a_step_is_one_token_of_one_sequence_with_an_empty_cache_in_bf16_unless_said_otherwise() -> None:
    shape = model("llama-3-8b")
    by_default = roofline.place(shape, H100)
    assert by_default == roofline.place(shape, H100, 1, 0, 1, precision="bf16", weights=read_bytes(shape), kv_bytes=2)
    assert by_default.flops == latency.decode_flops(shape, 1)
    assert by_default.num_bytes == read_bytes(shape) + bytes_per_token(shape)
    assert roofline.step_bytes(shape, 3, 10) == roofline.step_bytes(shape, 3, 10, 1, weights=read_bytes(shape))
    assert roofline.step_intensity(shape, 3, 10) == roofline.step_intensity(shape, 3, 10, 1, kv_bytes=2)
    narrow = roofline.place(shape, H100, 8, 1000, precision="fp8", weights=8e9, kv_bytes=1)
    assert narrow.num_bytes == 8e9 + 8 * 1001 * 65_536
    assert narrow.ridge == H100.ridge("fp8")


# ---------------------------------------------------------------- sweeps


@pytest.mark.parametrize("name", MODELS)
def test_arrays_of_mixed_shapes_give_what_scalars_give(name: str) -> None:
    shape = model(name)
    batch, context = np.array([[1], [64], [4096]]), np.array([1, 500, 100_000])
    assert roofline.step_intensity(shape, batch, context - 1).shape == (3, 3)
    swept = {
        "step": roofline.step_intensity(shape, batch, context - 1),
        "ceiling": np.broadcast_to(roofline.max_decode_intensity(shape, context), (3, 3)),
        "ridge": np.broadcast_to(roofline.batch_for_ridge(shape, context, 100.0), (3, 3)),
        "seconds": roofline.place(shape, H100, batch, context - 1).seconds,
        "utilization": roofline.place(shape, H100, batch, context - 1).utilization,
        "bound": roofline.place(shape, H100, batch, context - 1).compute_bound,
    }
    for i, b in enumerate(batch[:, 0].tolist()):
        for j, c in enumerate(context.tolist()):
            placed = roofline.place(shape, H100, b, c - 1)
            one = {
                "step": roofline.step_intensity(shape, b, c - 1),
                "ceiling": roofline.max_decode_intensity(shape, c),
                "ridge": roofline.batch_for_ridge(shape, c, 100.0),
                "seconds": placed.seconds, "utilization": placed.utilization, "bound": placed.compute_bound,
            }  # fmt: skip
            for key, value in one.items():
                assert swept[key][i, j] == pytest.approx(value), key


def test_large_sweeps_of_integers_do_not_wrap() -> None:
    """4096 prompts of 32,768 tokens over a million cached ones on 405B: 5e21 operations, past 64 bits."""
    shape = model("llama-3.1-405b")
    swept = roofline.place(shape, H100, np.array([1, 4096]), 10**6, 32_768)
    assert (swept.flops > 0).all()
    assert swept.flops[1] == pytest.approx(4096 * swept.flops[0])
    tokens = latency.pass_flops(shape, np.array([3_000_000]))
    assert tokens[0] == pytest.approx(latency.pass_flops(shape, 3_000_000))


# ---------------------------------------------------------------- the ledger


@given(st.sampled_from(DENSE), BATCH, TOKENS)
def test_the_ledger_adds_up_to_the_step_and_the_activations(name: str, batch: int, context: int) -> None:
    shape = model(name)
    ledger = roofline.bytes_per_generated_token(shape, batch, context)
    per_step = batch * (ledger.total - ledger.activations)
    assert per_step == pytest.approx(roofline.step_bytes(shape, batch, context))
    assert ledger.total == pytest.approx(
        ledger.weights + ledger.cache_read + ledger.cache_write + ledger.activations, rel=1e-12
    )
    assert ledger.cache_read == context * ledger.cache_write
    assert roofline.bytes_per_generated_token(shape, 2 * batch, context).weights == ledger.weights / 2


def test_activations_of_a_layer_by_hand() -> None:
    """8B: Q, K, V read 4096, write 4096 + 1024 + 1024; O 4096 and 4096; gate and up 4096 and 28,672; down the rest."""
    shape = model("llama-3-8b")
    layer = (4096 + 6144) + (4096 + 4096) + (4096 + 2 * 14_336) + (14_336 + 4096)
    assert roofline.activation_traffic(shape) == 32 * layer * 2
    plain = dataclasses.replace(shape, gated_mlp=False)
    assert roofline.activation_traffic(shape) - roofline.activation_traffic(plain) == 32 * 14_336 * 2


@pytest.mark.parametrize("name", sorted(set(MODELS) - set(DENSE)))
def test_activations_of_experts_latents_and_hybrids_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="expected uniform dense layers"):
        roofline.activation_traffic(model(name))


def test_a_hybrid_reads_and_writes_its_state_each_step() -> None:
    shape = dataclasses.replace(model("llama-3-8b"), fixed_state_bytes=1000)
    ledger = roofline.bytes_per_generated_token(shape, 1, 5)
    per_token = bytes_per_token(shape)
    assert (ledger.cache_read, ledger.cache_write) == (5 * per_token + 1000, per_token + 1000)
    assert roofline.step_bytes(shape, 1, 5) - roofline.step_bytes(model("llama-3-8b"), 1, 5) == 2000


def test_a_precision_that_the_device_lacks_is_named() -> None:
    with pytest.raises(KeyError, match="expected one of"):
        roofline.place(model("llama-3-8b"), device("T4"))
    assert roofline.place(model("llama-3-8b"), device("T4"), precision="fp16").ridge == device("T4").ridge("fp16")


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 64))
def test_latent_attention_by_hand(heads: int, rope: int, rank: int) -> None:
    shape = ModelShape("mla", 3, 64, heads, heads, 24, 64, 100, v_head_dim=16, kv_lora_rank=rank, rope_dim=rope,
                       stated_params=1000, active_params=1000)  # fmt: skip
    flops = 2 * heads * (rank + rope) + 2 * heads * rank  # scores over latent and rotary key, output over the latent
    assert roofline.decode_attention_intensity(shape) == pytest.approx(flops / (2 * (rank + rope)))
    assert latency.flops_per_pair(shape) == (3 * 2 * heads * (24 + 16), 3 * flops)
