"""The limits of the GPU bench are the bytes and operations of the shape: counted here from the shape alone."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.model import build_model, dummy_model
from reference_impl.bench import gpu_engines
from reference_impl.bench.gpu_bounds import Limits, Work, work_of
from reference_impl.features.windows.groups import kv_specs
from reference_impl.kernels import reference
from reference_impl.models.loader import destinations
from reference_impl.models.quantization.methods import Int4
from reference_impl.models.shapes import SHAPES, config_of_shape
from reference_impl.theory import kv_cache, latency, model_shapes

TINY, EXPERTS = gpu_engines.TINY["llama-3-8b"], gpu_engines.TINY["qwen3-30b-a3b"]
H200 = Limits(copy=4.3e12, matrix=790e12)  # as the project's goals assume it
DENSE = ("llama-3-8b", "qwen3-0.6b")


def work(name: Any, quantization: str = "none", kv: tuple[int, int] = (16, 0)) -> Work:
    """Of a model without memory: on torch's meta device. kv: bits of a cached value, and of the scale of a head."""
    config = config_of_shape(name)
    model = build_model(config, torch.bfloat16, torch.device("meta"), 64, "torch", quantization)  # type: ignore[arg-type]
    for (shape, _), store in destinations(model).values():
        store(torch.empty(shape, dtype=torch.bfloat16, device="meta"))
    windows, (value, scale) = [None] * config.num_layers, kv
    specs = kv_specs(windows, config.num_kv_heads, config.head_dim, 16, bits_per_value=value, bits_per_scale=scale)
    return work_of(SimpleNamespace(model=model, kv_specs=specs))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", DENSE)
def test_a_step_reads_all_matrices_but_the_embedding_and_the_keys_and_values(name: str) -> None:
    shape, found = model_shapes.model(name), work(name)
    assert found.shared == 2 * shape.linear_params
    assert found.params + found.head == shape.linear_params
    assert found.kv == kv_cache.bytes_per_token(shape)
    assert found.weights(1) == found.weights(256) == found.shared


@pytest.mark.parametrize("name", DENSE)
def test_operations_are_those_of_the_theory(name: str) -> None:
    shape, found = model_shapes.model(name), work(name)
    assert found.prefill_flops(1000) == latency.engine_pass_flops(shape, 1000)
    by_matrix = Limits(copy=1e30, matrix=1.0)
    assert found.decode_seconds([700, 300], by_matrix) == sum(latency.decode_flops(shape, n) for n in (700, 300))


@pytest.mark.parametrize(
    ("name", "quantization", "tokens_per_second"),
    [("llama-3-8b", "none", 284), ("llama-3-8b", "fp8", 527), ("qwen3-0.6b", "none", 3284)],
)
def test_one_stream_has_the_limit_that_the_goals_assume(name: str, quantization: str, tokens_per_second: float) -> None:
    assert 1 / work(name, quantization).decode_seconds([1024], H200) == pytest.approx(tokens_per_second, rel=0.002)


def test_fp8_weights_count_with_a_scale_for_each_output() -> None:
    shape = model_shapes.model("llama-3-8b")
    outputs = shape.layers * sum(out for _, out in shape.layer_matrices.values())
    head = 2 * shape.vocab_size * shape.hidden_size
    assert work("llama-3-8b", "fp8").shared == head + shape.layers * shape.layer_params + 4 * outputs


def test_four_bit_weights_count_with_a_scale_for_each_group() -> None:
    """Their packing looks at numbers, which a meta tensor has not: so a small model, and Llama by arithmetic."""
    device, dtype = torch.device("cpu"), torch.bfloat16
    method = Int4(dtype, device, reference.gemm_w4a16)
    model = build_model(config_of_shape(TINY), dtype, device, 64, "torch", linear_method=method)
    for (shape, _), store in destinations(model).values():
        store(torch.randn(shape, dtype=dtype))
    weights = sum(linear.num_parameters() for linear in model.linears())
    found = work_of(SimpleNamespace(model=model, kv_specs=[]))  # type: ignore[arg-type]
    each = 1 / 2 + 2 / 128  # 4 bits, and 16 bits for 128 of them
    assert found.shared == 2 * TINY["vocab_size"] * TINY["hidden_size"] + each * weights
    llama = work("llama-3-8b")
    four_bits = replace(llama, shared=2 * llama.head + each * llama.params)
    assert 1 / four_bits.decode_seconds([1024], H200) == pytest.approx(894, rel=0.01)  # as the goals assume


def test_experts_count_as_often_as_somebody_chooses_them() -> None:
    raw = SHAPES["qwen3-30b-a3b"]
    found = work({**raw, "num_hidden_layers": 2})
    matrices = 3 * raw["hidden_size"] * raw["moe_intermediate_size"]
    assert (found.expert, found.experts, found.chosen, found.expert_layers) == (2 * matrices, 128, 8, 2)
    assert found.weights(1) == pytest.approx(found.shared + 2 * 8 * found.expert)
    distinct = sum(len(met(i)) for i in range(20)) / 20  # drawn, instead of the formula
    assert found.weights(64) == pytest.approx(found.shared + 2 * distinct * found.expert, rel=0.02)
    # All 48 layers: what the model takes in memory, and "A3B" (without the embedding).
    head = 2 * found.head
    layer = (found.shared - head) / 2 + 128 * found.expert
    assert 2 * head + 48 * layer == pytest.approx(61.06e9, rel=0.001)
    assert found.head + 48 * found.params / 2 == pytest.approx(3.04e9, rel=0.01)


def met(seed: int) -> set[int]:
    draw = random.Random(1000 + seed)
    return {expert for _ in range(64) for expert in draw.sample(range(128), 8)}


def test_stacked_and_separate_experts_count_alike() -> None:
    model = dummy_model(config_of_shape(EXPERTS), torch.float32, "cpu")
    engine = Engine(model, EngineConfig(num_blocks=4))
    found = work_of(engine)
    assert found.expert == 4 * 3 * 128 * 64
    stacked = SimpleNamespace(kv_specs=engine.kv_specs, model=model)
    for layer in model.layers:
        experts = layer.mlp.experts
        layer.mlp.experts = torch.nn.Module()
        stack = {"gate_up": torch.empty(len(experts), 2 * 64, 128), "down": torch.empty(len(experts), 128, 64)}
        layer.mlp.experts.parts = lambda stack=stack: stack
    assert work_of(stacked) == found  # type: ignore[arg-type]


def test_the_workload_is_nano_vllms_to_the_token() -> None:
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    outputs = [random.randint(100, 1024) for _ in range(256)]
    assert gpu_engines.requests() == (prompts, outputs)
    assert sum(outputs) == 133_966  # as its README says
    assert sum(map(len, prompts)) == 142_827


@pytest.mark.parametrize(("kv", "limit"), [((16, 0), 36_400), ((8, 0), 64_800), ((8, 32), 63_200)])
def test_the_workload_has_the_limit_that_the_goals_assume(kv: tuple[int, int], limit: float) -> None:
    """The goals say 36.2k and 64k: the latter without scales, 3 % of what is read."""
    prompts, outputs = gpu_engines.requests()
    seconds = work("qwen3-0.6b", kv=kv).workload_seconds([len(p) for p in prompts], outputs, H200)
    assert sum(outputs) / seconds == pytest.approx(limit, rel=0.005)


def test_a_small_workload_added_up_by_hand() -> None:
    found = Work(shared=100.0, kv=1.0, params=3.0, head=2.0, pair=0.5)
    limits = Limits(copy=1.0, matrix=1.0)
    # Prompts of 4 and 2 tokens, outputs of 3 and 1: two more steps, of the first alone.
    prefill = (2 * 3 * 4 + 2 * 2 + 0.5 * 10) + (2 * 3 * 2 + 2 * 2 + 0.5 * 3)
    assert found.workload_seconds([4, 2], [3, 1], limits) == prefill + (100 + 5) + (100 + 6)
