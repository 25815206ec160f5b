"""What a KVSpec says of bytes: the theory's formulas, sums by hand, real tensors, and what an engine holds."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.worker import LocalExecutor
from reference_impl.core.kv_cache import PagedKVCache
from reference_impl.features.kv_formats.eight_bits import EightBitKVCache
from reference_impl.interfaces import NO_BLOCK, KVSpec, SamplingParams
from reference_impl.theory import kv_cache
from reference_impl.theory.model_shapes import MODELS, ModelShape

CPU = torch.device("cpu")
WITH_HEADS = [s for s in MODELS.values() if s.attention_kind != "MLA" and s.value_dim == s.head_dim]
FOUR_BITS: dict[str, Any] = {"bits_per_value": 4, "bits_per_scale": 16, "bits_per_zero_point": 4, "group_size": 32}


@pytest.mark.parametrize("shape", WITH_HEADS, ids=lambda shape: shape.name)
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_keys_and_values_are_those_of_the_theory(shape: ModelShape, bits: int) -> None:
    spec = KVSpec(shape.kv_layers, shape.num_kv_heads, shape.head_dim, 16, bits_per_value=bits)
    assert spec.bytes_per_token == kv_cache.bytes_per_token(shape, bits / 8)
    assert spec.bytes_per_block == 16 * spec.bytes_per_token
    tokens = 5 * 16
    assert spec.bytes_per_request(tokens) == tokens * kv_cache.bytes_per_token(shape, bits / 8)


def test_a_latent_is_kept_once() -> None:
    shape = MODELS["deepseek-v3"]
    assert shape.kv_lora_rank is not None
    assert shape.rope_dim is not None
    spec = KVSpec(shape.layers, 1, shape.kv_lora_rank + shape.rope_dim, 64, bits_per_value=16, kind="latent")
    assert spec.bytes_per_token == 61 * (512 + 64) * 2 == 70_272
    assert spec.bytes_per_token == kv_cache.latent_bytes_per_token(61, 512, 64) == kv_cache.bytes_per_token(shape)
    assert spec.bytes_per_request(65) == 2 * spec.bytes_per_block == 128 * 70_272


@pytest.mark.parametrize("tokens", [0, 1, 4096, 262_144])
def test_a_hybrids_request_is_its_keys_and_values_and_a_state_of_one_size(tokens: int) -> None:
    """Qwen3-Next: per layer a matrix for each of 32 heads in float32, and 3 inputs of a convolution in 16 bits."""
    shape = MODELS["qwen3-next-80b-a3b"]
    heads = KVSpec(12, shape.num_kv_heads, shape.head_dim, 1, bits_per_value=16)
    matrices = KVSpec(36, 32, 128 * 128, 1, bits_per_value=32, kind="state")
    inputs = KVSpec(36, 1, 3 * (2 * 16 * 128 + 32 * 128), 1, bits_per_value=16, kind="state")
    specs = (heads, matrices, inputs)
    assert sum(spec.bytes_per_token for spec in specs) == kv_cache.bytes_per_token(shape)
    assert sum(spec.bytes_per_request(tokens) for spec in specs) == kv_cache.cache_bytes(shape, tokens)
    assert matrices.bytes_per_request(tokens) == matrices.bytes_per_block == 36 * 32 * 128 * 128 * 4


def test_four_bits_with_scales_and_zero_points_by_hand() -> None:
    """A head of 128: 64 bytes of values; 4 groups of 32, each with 2 bytes and a half: 74 bytes."""
    spec = KVSpec(32, 8, 128, 16, **FOUR_BITS)
    assert spec.bits_per_head == 74 * 8
    assert spec.bytes_per_token == 2 * 32 * 8 * 74 == 37_888
    assert spec.bytes_per_block == 606_208
    each = kv_cache.bits_per_weight(4, 32, scale_bits=16, zero_point_bits=4) / 8
    assert spec.bytes_per_token == kv_cache.attention_bytes_per_token(32, 8, 128, each)
    whole_head = dataclasses.replace(spec, group_size=None)
    assert whole_head.bits_per_head == 128 * 4 + 20


def test_four_bits_are_the_bytes_of_tensors_that_hold_them() -> None:
    spec = KVSpec(3, 2, 64, 8, **FOUR_BITS)
    block = (spec.num_layers, 2, spec.block_size, spec.num_kv_heads)
    codes, zeros = torch.empty(*block, 64 // 2, dtype=torch.uint8), torch.empty(*block, 2 // 2, dtype=torch.uint8)
    scales = torch.empty(*block, 2, dtype=torch.float16)
    assert codes.nbytes + zeros.nbytes + scales.nbytes == spec.bytes_per_block


@given(
    layers=st.integers(1, 4),
    heads=st.integers(1, 3),
    head_dim=st.integers(1, 12),
    block_size=st.integers(1, 16),
    bits=st.integers(1, 33),
    scale=st.sampled_from([0, 5, 16]),
    kind=st.sampled_from(["kv", "latent", "state"]),
)
def test_bytes_are_exact_or_refused(
    layers: int, heads: int, head_dim: int, block_size: int, bits: int, scale: int, kind: Any
) -> None:
    heads = 1 if kind == "latent" else heads
    per_token = Fraction((2 if kind == "kv" else 1) * layers * heads * (head_dim * bits + scale), 8)
    block = per_token if kind == "state" else per_token * block_size
    options: dict[str, Any] = {"bits_per_value": bits, "bits_per_scale": scale, "kind": kind}
    if block.denominator != 1:
        with pytest.raises(ValueError, match=f"expected a block of whole bytes, got {block * 8} bits"):
            KVSpec(layers, heads, head_dim, block_size, **options)
        return
    spec = KVSpec(layers, heads, head_dim, block_size, **options)
    assert spec.bytes_per_block == block
    assert Fraction(spec.bits_per_token, 8) == (0 if kind == "state" else per_token)
    if kind != "state" and per_token.denominator != 1:
        with pytest.raises(ValueError, match=f"a token has {spec.bits_per_token} bits"):
            _ = spec.bytes_per_token
    else:
        assert spec.bytes_per_token * 8 == spec.bits_per_token


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits_per_value": 0.5}, "bits_per_value: expected a whole number of at least 1, got 0.5"),
        ({"bits_per_value": 0}, "bits_per_value: expected a whole number of at least 1, got 0"),
        ({"bits_per_scale": 2.5}, "bits_per_scale: expected a whole number of at least 0, got 2.5"),
        ({"group_size": 5}, "group_size: expected a divisor of head_dim 8, got 5"),
        ({"kind": "mamba"}, "kind: expected one of kv, latent, state, got 'mamba'"),
        ({"kind": "latent"}, "num_kv_heads: expected 1, since heads share a latent, got 2"),
        ({"kind": "state", "window": 4}, "window: expected None, since a state has no positions, got 4"),
    ],
)
def test_what_is_no_cache_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        KVSpec(1, 2, 8, 4, **{"bits_per_value": 16, **change})


def test_bits_are_never_taken_for_bytes() -> None:
    """A call of before, which gave bytes by position or by name, is an error."""
    with pytest.raises(TypeError):
        KVSpec(1, 2, 8, 4, 2)  # type: ignore[misc]
    with pytest.raises(TypeError, match="bytes_per_value"):
        KVSpec(1, 2, 8, 4, bytes_per_value=2)  # type: ignore[call-arg]


@pytest.mark.parametrize("window", [None, 6])
def test_an_engine_holds_as_many_blocks_as_its_request_needs(window: int | None, random_model) -> None:
    family = {"architecture": "MistralForCausalLM", "sliding_window": window}
    engine = Engine(random_model("float32", **family), EngineConfig(block_size=4, num_blocks=20, overlap="off"))
    request = engine.add([1, 2, 3], SamplingParams(max_tokens=25, temperature=0, ignore_eos=True))
    spec, seen = engine.kv_spec, 0
    assert spec.window == window
    while engine.has_work():
        engine.step()
        if request.block_table:
            held = sum(block != NO_BLOCK for block in request.block_table)
            assert held * spec.bytes_per_block == spec.bytes_per_request(request.num_computed_tokens)
            seen += 1
    assert seen > 20


@pytest.mark.parametrize(
    ("spec", "dtype", "message"),
    [
        (KVSpec(2, 1, 8, 4, bits_per_value=16, kind="latent"), torch.float16, "kind='kv', got kind='latent'"),
        (KVSpec(2, 2, 8, 4, bits_per_value=32, kind="state"), torch.float32, "kind='kv', got kind='state'"),
        (KVSpec(2, 2, 32, 4, **FOUR_BITS), torch.uint8, "bits_per_value=8, got bits_per_value=4"),
        (KVSpec(2, 2, 8, 4, bits_per_value=16), torch.float32, "bits_per_value=32, got bits_per_value=16"),
        (KVSpec(2, 2, 8, 4, bits_per_value=8), torch.float8_e4m3fn, "bits_per_scale=32, got bits_per_scale=0"),
        (
            KVSpec(2, 2, 8, 4, bits_per_value=8, bits_per_scale=32, bits_per_zero_point=16),
            torch.float8_e4m3fn,
            "bits_per_zero_point=0, got bits_per_zero_point=16",
        ),
        (
            KVSpec(2, 2, 8, 4, bits_per_value=8, bits_per_scale=32, group_size=4),
            torch.float8_e4m3fn,
            "group_size=None, got group_size=4",
        ),
    ],
)
def test_the_paged_cache_refuses_what_it_cannot_hold(spec: KVSpec, dtype: torch.dtype, message: str) -> None:
    make = EightBitKVCache if dtype is torch.float8_e4m3fn else PagedKVCache
    with pytest.raises(ValueError, match=rf"^{make.__name__} in {dtype}: expected a KVSpec with {message}: "):
        make([spec], 2, dtype, CPU)


@pytest.mark.parametrize("kind", ["latent", "state"])
def test_the_executor_refuses_what_it_cannot_compute(kind: Any, random_model) -> None:
    engine = Engine(random_model("float32"), EngineConfig(num_blocks=4))
    spec = KVSpec(2, 1, 8, 4, bits_per_value=32, kind=kind)
    with pytest.raises(ValueError, match=f"^LocalExecutor: expected KV groups of kind 'kv'.*got '{kind}'"):
        LocalExecutor(engine.model, engine.kv_cache, engine.attention, [spec], engine.clock, max_num_seqs=1, max_len=8)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"bits_per_value": True}, "bits_per_value: expected a whole number of at least 1, got True"),
        ({"group_size": 32.0, "bits_per_scale": 16}, "group_size: expected a whole number of at least 1, got 32.0"),
        ({"num_layers": -2}, "num_layers: expected a whole number of at least 1, got -2"),
        ({"head_dim": 0}, "head_dim: expected a whole number"),
        ({"block_size": 16.5}, "block_size: expected a whole number"),
        ({"window": 0}, "window: expected a whole number of at least 1, got 0"),
        ({"layers": (0, 1, 2)}, r"layers: expected at most 2 \(num_layers\), or none, got \(0, 1, 2\)"),
        ({"bits_per_zero_point": 8}, "bits_per_zero_point: expected 0 without scales"),
        ({"kind": ["kv"]}, r"kind: expected one of kv, latent, state, got \['kv'\]"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(change: dict, fault: str) -> None:
    fields = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 64, "block_size": 16, "bits_per_value": 16}
    with pytest.raises(ValueError, match=fault):
        KVSpec(**(fields | change))
