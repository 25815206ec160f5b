"""Products of a layer with their neighbours in one launch, in a decoder: when, how many launches, how many bytes."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is defined

from reference_impl.features.fusion.decoder import FusedDecoder
from reference_impl.features.fusion.fusion import PRODUCTS, Fusion
from reference_impl.features.fusion.kernels import TORCH
from reference_impl.features.fusion.linear import TritonLinear
from reference_impl.features.fusion.tuning import tune
from reference_impl.kernels import fused_linear, gates, rms_norm
from reference_impl.kernels.launch import launch
from reference_impl.theory.model_shapes import MODELS
from tests.models.conftest import our_logits  # noqa: F401

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS = [3, 1, 4, 1, 5, 9, 2]
KINDS: dict[str, dict[str, Any]] = {
    "Llama with biases": {"architecture": "LlamaForCausalLM", "attention_bias": True, "mlp_bias": True},
    "Qwen3": {},
    "Gemma 2": {
        "architecture": "Gemma2ForCausalLM", "sliding_window": 6, "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": None, "final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh",
    },
    "experts and dense layers": {
        "architecture": "Qwen3MoeForCausalLM", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "decoder_sparse_step": 2,
    },
}  # fmt: skip
# {what is chosen to be fused: launches of (fused products, norms, gates)} in two layers and the final norm.
COUNTS: dict[str, dict[tuple[str, ...], tuple[int, int, int]]] = {
    "Llama with biases": {
        (): (0, 5, 2),
        ("o",): (2, 5, 2),
        ("gate_up",): (2, 5, 0),
        ("o", "gate_up"): (4, 3, 0),
        ("down",): (2, 5, 2),
        ("qkv",): (1, 4, 2),  # of layer 0; before layer 1's a norm has to add what down gave
        ("down", "qkv"): (4, 3, 2),
        ("qkv", "o", "gate_up", "down"): (8, 1, 0),
    },
    "Gemma 2": {(): (0, 9, 2), ("qkv", "o", "gate_up", "down"): (3, 8, 0)},
    # A dense layer, then one of experts, whose own products are grouped.
    "experts and dense layers": {(): (0, 7, 2), ("qkv", "o", "gate_up", "down"): (6, 4, 1)},
}
COUNTS["Qwen3"] = {way: (f, n + 2, g) for way, (f, n, g) in COUNTS["Llama with biases"].items()}  # QK-norm, by torch


@pytest.fixture
def launched(monkeypatch) -> Counter[str]:
    """How often each kernel was launched by its module, and cuBLAS (or what stands for it here) by its method."""
    counts: Counter[str] = Counter()
    for module in (fused_linear, gates, rms_norm):

        def counted(*arguments: Any, name: str = module.__name__.rpartition(".")[2], **options: Any) -> None:
            counts[name] += 1
            launch(*arguments, **options)

        monkeypatch.setattr(module, "launch", counted)

    def counted_apply(self: TritonLinear, *arguments: Any, apply: Callable[..., Any] = TritonLinear.apply) -> Any:
        counts["apply"] += 1
        return apply(self, *arguments)

    monkeypatch.setattr(TritonLinear, "apply", counted_apply)
    return counts


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_torch_whatever_is_fused(kind, random_model, our_logits, launched) -> None:  # noqa: F811
    model = random_model("float32", device=DEVICE, kernels="triton", **KINDS[kind])
    model.fusion.chosen = {64: frozenset()}
    plain = our_logits(model, TOKENS)[0]
    if "experts" not in kind:  # these get other random numbers where they are stacked
        torch_model = random_model("float32", device=DEVICE, kernels="torch", **KINDS[kind])
        assert (plain - our_logits(torch_model, TOKENS)[0]).abs().max() <= 1e-5 * plain.abs().max()
    for way, (fused, norms, gated) in COUNTS[kind].items():
        model.fusion.chosen = {64: frozenset(way)}
        launched.clear()
        found = our_logits(model, TOKENS)[0]
        assert (launched["fused_linear"], launched["rms_norm"], launched["gates"]) == (fused, norms, gated), way
        assert (found - plain).abs().max() <= 1e-5 * plain.abs().max(), way
    model.fusion.chosen = {}


def test_few_tokens_are_fused_and_many_are_not(random_model, our_logits, launched) -> None:  # noqa: F811
    model = random_model("float32", device=DEVICE, kernels="triton", architecture="LlamaForCausalLM")
    for tokens, fused in ((64, 8), (65, 0)):
        launched.clear()
        our_logits(model, TOKENS * 9 + TOKENS[: tokens - 63])
        assert launched["fused_linear"] == fused


def test_what_was_measured_holds_for_fewer_tokens_too(random_model) -> None:
    fusion = Fusion(TORCH, 1e-6)
    fusion.chosen = {4: frozenset(), 16: frozenset(["o"])}
    assert [fusion.products(n) for n in (1, 4, 5, 16)] == [frozenset()] * 2 + [frozenset(["o"])] * 2
    assert fusion.products(17) == PRODUCTS


def test_a_norm_in_float16_stays_by_itself(random_model, our_logits, launched) -> None:  # noqa: F811
    """x times the norm's weight would leave the range of float16, here from 65504 on; the norm of x is about 1."""
    model = random_model("float16", device=DEVICE, kernels="triton", architecture="LlamaForCausalLM")
    before = model.embedding.clone()
    model.embedding.copy_(before.float() * (60000 / before.abs().max().float()))
    assert our_logits(model, TOKENS)[0].isfinite().all()
    model.embedding.copy_(before)
    assert launched == {"fused_linear": 6, "rms_norm": 5, "apply": 2}


# Which way is the fastest


@pytest.mark.parametrize(("sign", "chosen"), [(1, PRODUCTS), (-1, frozenset())])
def test_the_way_that_takes_least_is_chosen(sign, chosen, random_model, launched) -> None:
    """Counted in launches: a machine without a GPU has no other measure of it."""
    model = random_model("float32", device=DEVICE, kernels="triton", architecture="LlamaForCausalLM")

    def launches(ways: Mapping[Any, Callable[[], object]]) -> dict[Any, float]:
        seconds = {}
        for way, compute in ways.items():
            launched.clear()
            compute()
            seconds[way] = sign * sum(launched.values()) / 1e6
        return seconds

    found = tune(model.fusion, model.fused_layers(), torch.randn(5, 32, device=DEVICE), launches)
    assert model.fusion.chosen == {5: chosen}
    expected = {
        "gate_up + o": {"none": 4, "o": 4, "gate_up": 3, "gate_up + o": 2},
        "down + qkv": {"none": 3, "down": 3, "qkv": 3, "down + qkv": 2},
    }
    assert found == {pair: {way: pytest.approx(sign * n) for way, n in ways.items()} for pair, ways in expected.items()}
    model.fusion.chosen = {}


def test_without_a_gpu_nothing_is_measured(random_model) -> None:
    config = random_model("float32", kernels="torch").config
    model = FusedDecoder(config, torch.float32, torch.device("cpu"), kernels=TORCH)
    model.tune(1)
    assert model.choices() == {}


@pytest.mark.gpu
def test_a_gpu_measures_every_way_once(random_model, our_logits) -> None:  # noqa: F811
    plain = our_logits(random_model("float32", device=DEVICE, kernels="torch"), TOKENS)[0]
    model = random_model("float32", device=DEVICE, kernels="triton")
    model.tune(7)
    first = model.choices()
    model.tune(7)
    model.tune(65)
    assert model.choices() == first
    assert list(first) == [7]
    assert [len(times) for times in first[7]["microseconds"].values()] == [4, 4]
    assert all(0 < t < 1e6 for times in first[7]["microseconds"].values() for t in times.values())
    assert (our_logits(model, TOKENS)[0] - plain).abs().max() <= 1e-5 * plain.abs().max()
    model.fusion.chosen = {}


# At the real shapes: what the layers of a decoding step launch on an H100, recorded with tensors that have no memory.

RECORDED = """
import json
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from reference_impl.interfaces import Batch, GroupTables
from reference_impl.kernels import launch
from reference_impl.kernels.architectures import ARCHITECTURES
from reference_impl.features.windows.groups import kv_specs
from reference_impl.core.kv_cache import PagedKVCache
from reference_impl.features.fusion.kernels import triton_kernels
from reference_impl.features.fusion.attention import TritonAttention
from reference_impl.features.fusion.decoder import FusedDecoder
from reference_impl.features.fusion.linear import TritonLinear
from reference_impl.models.shapes import config_of_shape

calls, operations, described = [], [], launch.described
meta, bf16 = torch.device("meta"), torch.bfloat16

def seen(kernel, arguments, *others):
    sizes = {n: a.nbytes for n, a in zip(kernel.arg_names, arguments) if isinstance(a, torch.Tensor)}
    calls.append((kernel.__name__.strip("_"), sizes))
    return described(kernel, arguments, *others)

class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and "empty" not in str(function):
            operations.append(str(function))
        return function(*args, **(kwargs or {}))

def empty(*size, dtype=torch.int32):
    return torch.empty(size, dtype=dtype, device=meta)

def step(shape, rows):
    config = config_of_shape(shape)
    model = FusedDecoder(config, bf16, meta, 2048, lambda name: TritonLinear(bf16, meta), kernels=triton_kernels())
    tokens, lens = empty(rows, dtype=torch.int64), empty(rows)
    batch = Batch(
        tokens, tokens, empty(rows + 1), lens, tokens, ("r",) * rows, (1,) * rows, (1024,) * rows, rows, 16,
        (GroupTables(None, tokens, empty(rows, 64)),), (0,) * config.num_layers,
    )
    specs = kv_specs(config.layer_windows, config.num_kv_heads, config.head_dim, 16, bits_per_value=16)
    cache, attention = PagedKVCache(specs, 64 * rows, bf16, meta), TritonAttention(config.attention_scale)
    x, added = empty(rows, config.hidden_size, dtype=bf16), None
    with launch.recording(ARCHITECTURES["sm_90"]):
        attention.plan(batch)
        with Operations():
            for layer in model.layers:
                x, added = layer.compute(model.fusion, x, added, *model.rotary.cos_sin, attention, cache, batch)
    return shape, rows, calls, operations

launch.prepare(meta)
launch.described = seen
for shape, rows in (("llama-3-8b", 1), ("llama-3-8b", 16), ("llama-3-8b", 64), ("qwen3-0.6b", 8)):
    calls, operations = [], []
    print(json.dumps(step(shape, rows)))
"""
LAYER = ["fused_linear", "rotate_and_write", "paged_decode", "fused_linear", "fused_linear", "fused_linear"]


def test_a_layer_is_six_launches_that_read_its_weights_and_little_else(warm) -> None:
    """Nothing else runs between them. Of bytes: splits' sums count twice, written and read; they stay in the L2."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = warm.run(("-c", RECORDED), environment)
    assert done.returncode == 0, done.stderr
    shares = {}
    for line in done.stdout.splitlines():
        name, rows, calls, operations = json.loads(line)
        shape = MODELS[name]
        assert [kernel for kernel, _ in calls] == LAYER * shape.layers
        assert operations == []
        weights = other = 0
        for sizes in (sizes for kernel, sizes in calls if kernel == "fused_linear"):
            weights += sizes.pop("weight")
            splits = sizes.pop("partial") + sizes.pop("squares")
            other += sum(sizes.values()) - sizes["tickets"] + 2 * splits
        assert weights == 2 * shape.layers * shape.layer_params
        shares[name, rows] = other / weights
    assert 0.001 < shares["llama-3-8b", 1] < 0.003
    assert 0.01 < shares["llama-3-8b", 16] < 0.03
    assert 0.05 < shares["llama-3-8b", 64] < 0.12
    assert 0.01 < shares["qwen3-0.6b", 8] < 0.1
