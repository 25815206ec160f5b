"""A method for each linear layer: chosen by its name, by quantization or by linear_method."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is defined

from reference_impl.assembly.linear_methods import Quantization, methods_of
from reference_impl.assembly.llm import LLM
from reference_impl.assembly.model import build_model, load_model
from reference_impl.core.linear import Linear, UnquantizedLinear
from reference_impl.features.cpu.default import default_method
from reference_impl.features.cpu.operators import HeadCopy
from reference_impl.features.fusion.kernels import Asked
from reference_impl.features.fusion.linear import TritonFp8, TritonInt4, TritonInt8, TritonLinear
from reference_impl.interfaces import LinearMethod, TensorSpec
from reference_impl.kernels import reference
from reference_impl.kernels.gemm import FEW_TOKENS
from reference_impl.models.config_json import read_model_config
from reference_impl.models.loader import destinations, fill, part_tensors, weight_files
from reference_impl.models.quantization.cpu import CpuInt4, CpuInt8
from reference_impl.models.quantization.methods import Dequantized, Fp8, Int4, Quantized
from tests.engine.conftest import one_shot  # noqa: F401
from tests.kernels.paged import DEVICE
from tests.models.test_parity import IDS, worst

CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 24}  # multiples of 32
LAYER = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


def mixed(name: str) -> Quantization:
    """The first and the last of three layers in their own precision, and between them three ways."""
    if not name.startswith("model.layers.1."):
        return "none"
    kinds: dict[str, Quantization] = {"down_proj": "int8", "qkv_proj": "fp8"}
    return kinds.get(name.rpartition(".")[2], "int4")


@pytest.mark.parametrize("variant", ["llama_biases", "phi3"])  # Phi-3's checkpoint has these names itself
def test_every_layer_is_asked_for_once_by_its_name(variant: str, save) -> None:
    asked: list[str] = []

    def plain(name: str) -> LinearMethod:
        asked.append(name)
        return UnquantizedLinear(torch.float32, CPU)

    names = [f"model.layers.{i}.{name}" for i in range(3) for name in LAYER]
    model = load_model(save(variant)[1], linear_method=plain)
    assert asked == [*names, "lm_head"]
    assert [linear.name for linear in model.linears()] == names


@pytest.mark.parametrize(("variant", "where"), [("mixtral", "block_sparse_moe"), ("qwen3_moe", "mlp")])
def test_experts_are_asked_for_by_their_numbers(variant: str, where: str, save) -> None:
    experts = 5 if variant == "mixtral" else 6
    model = load_model(save(variant)[1])
    names = [linear.name for linear in model.linears() if "experts" in linear.name]
    products = [f"experts.{e}.{name}" for e in range(experts) for name in ("gate_up_proj", "down_proj")]
    assert names == [f"model.layers.{i}.{where}.{name}" for i in range(3) for name in products]


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_each_layer_has_the_method_of_its_name(kernels: Asked, save) -> None:
    _, folder = save("llama_biases", torch.bfloat16, **SIZES)
    device = CPU if kernels == "torch" else DEVICE
    model = load_model(folder, torch.float16, device, kernels=kernels, quantization=mixed)
    triton = {"none": TritonLinear, "int4": TritonInt4, "int8": TritonInt8, "fp8": TritonFp8}
    plain = default_method(torch.float16, CPU).__class__
    expected = {"none": plain, "int4": CpuInt4, "int8": CpuInt8, "fp8": Fp8} if kernels == "torch" else triton
    assert {linear.name: type(linear.method) for linear in model.linears()} == {
        f"model.layers.{i}.{name}": expected[kind if i == 1 else "none"]
        for i in range(3)
        for name, kind in zip(LAYER, ("fp8", "int4", "int4", "int8"), strict=True)
    }
    assert len({linear.method for linear in model.linears()}) == 4, "one method for all layers of a kind"


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_logits_are_those_of_the_weights_that_each_layers_codes_stand_for(
    kernels: Asked,
    save,
    one_shot,  # noqa: F811
) -> None:
    """Packed weights (finish) and products in one launch with their neighbours (fusion) are each layer's own, too."""
    _, folder = save("llama_biases", torch.bfloat16, **SIZES)
    model = load_model(
        folder, torch.float16, CPU if kernels == "torch" else DEVICE, kernels=kernels, quantization=mixed
    )
    methods, plain = {linear.name: linear.method for linear in model.linears()}, default_method(torch.float64, CPU)

    def exact(name: str) -> LinearMethod:
        method = methods.get(name)
        return Dequantized(method, plain) if isinstance(method, Quantized) else plain

    twin = build_model(read_model_config(folder), torch.float64, CPU, linear_method=exact)
    fill(twin, destinations(twin), weight_files(folder))
    for length in (9, FEW_TOKENS + 1):
        found, expected = (one_shot(m, IDS[:length]).cpu() for m in (model, twin))
        assert worst(found, expected) < (0.08 if kernels == "torch" or length > FEW_TOKENS else 0.005)


def test_logits_are_those_of_a_checkpoint_rounded_by_hand(save, our_logits, tmp_path: Path) -> None:
    """Exactly: o_proj of layer 1 and all of layer 2 in 4 bits, from a file in which just these were rounded."""
    _, folder = save("llama_biases", **SIZES)
    int4, plain = Int4(torch.float32, CPU, reference.gemm_w4a16), UnquantizedLinear(torch.float32, CPU)

    def rounds(name: str) -> bool:
        return name.startswith(("model.layers.1.self_attn.o_proj", "model.layers.2."))

    model = load_model(folder, linear_method=lambda name: Dequantized(int4, plain) if rounds(name) else plain)
    tensors, untouched = load_file(folder / "model.safetensors"), load_model(folder, linear_method=plain)
    for name, weight in tensors.items():
        if rounds(name) and name.endswith("_proj.weight"):
            tensors[name] = int4.dequantize(*int4.quantize(weight))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    found, expected = (our_logits(m, IDS)[0] for m in (model, load_model(folder, linear_method=plain)))
    assert torch.equal(found, expected)
    assert not torch.equal(found, our_logits(untouched, IDS)[0])


def test_one_expert_may_differ_from_the_others(save, our_logits) -> None:
    _, folder = save("mixtral")
    int8, plain = CpuInt8(torch.float32), UnquantizedLinear(torch.float32, CPU)
    model = load_model(folder, linear_method=lambda name: int8 if ".1.block_sparse_moe.experts.3." in name else plain)
    differ = {linear.name for linear in model.linears() if linear.method is int8}
    prefix = "model.layers.1.block_sparse_moe.experts.3."
    assert differ == {f"{prefix}gate_up_proj", f"{prefix}down_proj"}
    assert {linear.params["weight"].dtype for linear in model.linears() if linear.name in differ} == {torch.int8}
    found, exact = our_logits(model, IDS)[0], our_logits(load_model(folder, linear_method=plain), IDS)[0]
    assert 0 < worst(found, exact) < 0.05


def test_the_head_has_the_method_of_lm_head(save) -> None:
    """A tied one in int4 is multiplied from a copy (see choose_head), whatever the layers have."""
    _, folder = save("qwen2_tied", **SIZES)

    def is_copied(quantization: Callable[[str], Quantization]) -> bool:
        head = load_model(folder, quantization=quantization).head
        return isinstance(head, HeadCopy) and isinstance(head.method, CpuInt4)

    assert is_copied(lambda name: "int4" if name == "lm_head" else "none")
    assert not is_copied(lambda name: "none" if name == "lm_head" else "int4")


class Bare:
    """create, load, finish and apply, and nothing else: a method as they were before any could name tensors."""

    def create(self, in_features: int, out_features: int, bias: bool) -> dict[str, Tensor]:
        params = {"weight": torch.zeros(out_features, in_features), "seen": torch.zeros(out_features)}
        return params | {"bias": torch.zeros(out_features)} if bias else params

    def load(self, params: dict[str, Tensor], name: str, tensor: Tensor, start: int) -> None:
        params[name][start : start + len(tensor)] = tensor
        params["seen"][start : start + len(tensor)] += 1

    def finish(self, params: dict[str, Tensor]) -> None:
        assert bool((params.pop("seen") == 1 + ("bias" in params)).all())

    def apply(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        return F.linear(x, params["weight"], params.get("bias"))


def test_a_method_that_names_nothing_gets_weight_and_bias(save, our_logits) -> None:
    _, folder = save("llama_biases")
    found, expected = (our_logits(load_model(folder, linear_method=m), IDS)[0] for m in (Bare(), None))
    assert worst(found, expected) <= 3e-5


def test_the_front_door_takes_a_function(save) -> None:
    shape: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 61, "num_hidden_layers": 3, "num_key_value_heads": 2,
        "max_position_embeddings": 128, **SIZES,
    }  # fmt: skip
    llm = LLM(shape=shape, dummy_weights=True, dtype="bfloat16", device="cpu", quantization=mixed, num_blocks=8)
    assert [type(linear.method) for linear in llm.engine.model.linears()][4:8] == [Fp8, CpuInt4, CpuInt4, CpuInt8]
    llm.generate([[1, 2, 3]])


def test_what_cannot_be_is_refused_by_name(save) -> None:
    _, folder = save("mixtral")
    method = UnquantizedLinear(torch.float32, CPU)
    with pytest.raises(TypeError, match=r"linear_method\('model\.layers\.0\.self_attn\.qkv_proj'\): expected a Linear"):
        load_model(folder, linear_method=lambda name: "int4")  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match=r"linear_method: expected a Linear.*, got the class CpuInt8: make one of it$"):
        load_model(folder, linear_method=CpuInt8)
    with pytest.raises(TypeError, match="linear_method: expected a Linear.*, or a function .*, got 'int8'$"):
        load_model(folder, linear_method="int8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected quantization or linear_method, got both"):
        load_model(folder, quantization="int8", linear_method=method)
    with pytest.raises(ValueError, match="quantization: expected one of none, fp8, int8, int4, got 'int2'"):
        load_model(folder, quantization=lambda name: "int2")  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match=r"linear_method for a mixture of experts with Triton.*use kernels='torch'"):
        load_model(folder, device=DEVICE, kernels="triton", linear_method=method)
    name = r"model\.layers\.2\.block_sparse_moe\.experts\.4\.down_proj"
    with pytest.raises(ValueError, match=rf"quantization\('{name}'\) is 'fp8', for a mixture of experts with Triton"):
        load_model(
            folder, device=DEVICE, kernels="triton",
            quantization=lambda asked: "fp8" if asked.endswith("2.block_sparse_moe.experts.4.down_proj") else "none",
        )  # fmt: skip


def test_with_stacked_experts_the_other_layers_may_be_quantized(save) -> None:
    _, folder = save("qwen3_moe", torch.float16, hidden_size=64)
    model = load_model(
        folder, device=DEVICE, kernels="triton", quantization=lambda name: "int8" if "o_proj" in name else "none"
    )
    assert [type(linear.method) for linear in model.linears()] == [TritonLinear, TritonInt8] * 3


@pytest.mark.parametrize(
    "named",
    [
        None, {"g_idx": None}, {"g_idx": TensorSpec((64,), torch.int32)}, {"g_idx": TensorSpec(64, (torch.int32,))},
        {"g_idx": TensorSpec((64,), ())}, {"g_idx": ((64.0,), (torch.int32,))}, {"": TensorSpec((64,), (torch.int32,))},
    ],
    ids=str,
)  # fmt: skip
def test_what_a_method_names_wrongly_is_refused_with_layer_and_part(named: object) -> None:
    class Names(UnquantizedLinear):
        def tensors(self, in_features: int, out_features: int, bias: bool) -> object:
            return named

    linear = Linear(Names(torch.float32, torch.device("cpu")), 64, {"q_proj": 64}, name="model.layers.0.qkv_proj")
    with pytest.raises(TypeError, match=r"layers\.0\.qkv_proj, q_proj: Names\.tensors: expected \{name: TensorSpec"):
        part_tensors(linear, "q_proj")
    with pytest.raises(TypeError, match=r"linear_method\('lm_head'\): .*got the class Names: make one of it"):
        methods_of(lambda name: Names)("lm_head")  # type: ignore[arg-type,return-value]
