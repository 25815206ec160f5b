"""Weights that come quantized, in the form of each fast product: of the same numbers, and taken only where they are."""

from __future__ import annotations

import json
import os
import pathlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is defined

from reference_impl.assembly.stored_weights import decoded_bytes, stored_methods
from reference_impl.cli import app
from reference_impl.core.linear import UnquantizedLinear
from reference_impl.features.fusion.kernels import choose_kernels
from reference_impl.features.fusion.linear import TritonStoredInt4
from reference_impl.kernels import reference
from reference_impl.models.config_json import parse_model_config
from reference_impl.models.quantization.auto_awq import Awq
from reference_impl.models.quantization.auto_gptq import Gptq
from reference_impl.models.quantization.compressed_tensors import config_of
from reference_impl.models.quantization.converted import PER_PRODUCT, Converted, Decoded, Path
from reference_impl.models.quantization.fp8 import Fp8
from reference_impl.models.quantization.gguf_blocks import BLOCKS as BLOCKS_OF_GGUF
from reference_impl.models.quantization.gguf_blocks import GgufBlocks
from reference_impl.models.quantization.layouts import Layout, OfScheme
from reference_impl.models.quantization.paths import (
    CpuEightBits,
    CpuFourBits,
    EightBitIntegers,
    EightBitsBothSides,
    FourBitFloats,
    FourBitIntegers,
    Fp8Blocks,
)
from reference_impl.models.quantization.scheme import Activations, Scheme, decode, encode, fit
from reference_impl.models.quantization.stored import Stored
from reference_impl.models.quantization.tensors import tensors_of
from tests.examples import examples
from tests.kernels.paged import DEVICE

CPU, F16, BF16, F32 = torch.device("cpu"), torch.float16, torch.bfloat16, torch.float32
PER_TOKEN = {name: Activations(name) for name in ("int8", "e4m3")}
BLOCKS = Scheme("e4m3", "block", activations=Activations("e4m3", "group", True, 128), scale_dtype=F32)
CONFIG = parse_model_config({
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128, "dtype": "float32",
})  # fmt: skip
TWINS: dict[str, Callable[[], Path]] = {
    "W4A16": lambda: FourBitIntegers(reference.gemm_w4a16),
    "W8A16": lambda: EightBitIntegers(reference.gemm_w8a16),
    "W8A8 int8": lambda: EightBitsBothSides("int8", reference.quantize_rows_int8, reference.gemm_w8a8),
    "W8A8 fp8": lambda: EightBitsBothSides("e4m3", reference.quantize_rows_fp8, reference.gemm_fp8),
    "W8A8 fp8 by block": lambda: Fp8Blocks(reference.quantize_groups_fp8, reference.gemm_fp8_blocks),
    "FP4 emulated in 16 bits": lambda: FourBitFloats(reference.gemm_fp4),
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def of_parts(scheme: Scheme, num_parts: int = 1) -> dict[str, Layout]:
    """Layouts of so many parts of a layer, which are stored alike."""
    return {f"part_{n}": OfScheme(scheme) for n in range(num_parts)}


def layer(
    method: Stored, parts: Sequence[int], in_features: int, bias: bool = False
) -> tuple[dict[str, Tensor], Tensor]:
    """(its parameters, loaded and finished; the weight that they stand for, float32 [out, in])."""
    params, decoded, start = method.create(in_features, sum(parts), bias), [], 0
    for name, rows in zip(method.layouts, parts, strict=True):
        method.tensors_of(name, in_features, rows, bias=False)
    for layout, rows in zip(method.layouts.values(), parts, strict=True):
        assert isinstance(layout, OfScheme)
        weight = normal(rows, in_features, seed=rows) * 0.1
        fitted = fit(weight, layout.scheme)
        codes = encode(weight, layout.scheme, fitted)
        for name, tensor in tensors_of(codes, layout.scheme, fitted).items():
            method.load(params, name, tensor, start)
        decoded.append(decode(codes, layout.scheme, fitted))
        start += rows
    if bias:
        method.load(params, "bias", normal(start, seed=9), 0)
    method.finish(params)
    return params, torch.cat(decoded)


def product(method: Converted, parts: Sequence[int], in_features: int, tokens: int = 3) -> tuple[str, float]:
    """(the path taken, the largest difference from the same layer decoded for each product, of the largest output)."""
    params, _ = layer(method, parts, in_features, bias=True)
    plain = Stored(method.layouts, method.dtype, CPU)
    plain_params, _ = layer(plain, parts, in_features, bias=True)
    x = normal(tokens, in_features, seed=4).to(method.dtype)
    expected, path = plain.apply(plain_params, x.clone()).float(), method.path(params)
    found = method.apply(params, x.clone())
    assert found.dtype is method.dtype
    off = float((found.float() - expected).abs().max() / expected.abs().max())
    return PER_PRODUCT if path is None else path.name, off


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        (Scheme("int4", "group", 32), "W4A16"),
        (Scheme("int4", "group", 64, symmetric=False), "W4A16"),
        (Scheme("int4", "channel"), "W4A16"),
        (Scheme("int8", "channel"), "W8A16"),
        (Scheme("int8", "group", 64), "W8A16"),
        (Scheme("int8", "channel", activations=PER_TOKEN["int8"]), "W8A8 int8"),
        (Scheme("e4m3", "channel", activations=PER_TOKEN["e4m3"]), "W8A8 fp8"),
        (Scheme("e4m3", "tensor", activations=PER_TOKEN["e4m3"]), "W8A8 fp8"),
        (BLOCKS, "W8A8 fp8 by block"),
        (Scheme("e2m1", "group", 16, scales="e4m3"), "FP4 emulated in 16 bits"),
        (Scheme("e2m1", "group", 32, scales="e8m0"), "FP4 emulated in 16 bits"),
    ],
    ids=str,
)
def test_a_gpu_s_forms_multiply_the_stored_weights(scheme: Scheme, name: str) -> None:
    """By the twins, whose agreement with the kernels tests/kernels shows. What differs is rounding to float16."""
    method = Converted(of_parts(scheme, 2), F16, CPU, paths=[make() for make in TWINS.values()])
    path, off = product(method, [128, 40], 192)
    assert path == name
    assert off < 4e-3


def words(*shape: int, seed: int = 0) -> Tensor:
    """Any 32 bits."""
    return torch.randint(-(2**31), 2**31, shape, generator=torch.Generator().manual_seed(seed)).to(torch.int32)


def scales(*shape: int, dtype: torch.dtype = F16) -> Tensor:
    return (normal(*shape, seed=5).abs() + 0.5).to(dtype)


FP8_CODES = normal(128, 192).to(torch.float8_e4m3fn)
IN_ORDER = torch.arange(192, dtype=torch.int32) // 64
GPTQ = {"qweight": words(24, 128), "scales": scales(3, 128), "g_idx": IN_ORDER}
# What other tools write of a matrix [128, 192], and the form that holds it.
OTHERS: dict[str, tuple[Layout, dict[str, Tensor], str]] = {
    "fp8, blocks": (
        Fp8(BLOCKS, "weight_scale_inv"), {"weight": FP8_CODES, "weight_scale_inv": scales(1, 2, dtype=F32)},
        "W8A8 fp8 by block",
    ),
    "fp8, smaller blocks": (
        Fp8(replace(BLOCKS, block=(64, 64), activations=Activations("e4m3", "group", True, 64)), "weight_scale_inv"),
        {"weight": FP8_CODES, "weight_scale_inv": scales(2, 3, dtype=F32)}, PER_PRODUCT,
    ),
    "fp8, channels": (
        Fp8(Scheme("e4m3", "channel", activations=PER_TOKEN["e4m3"]), "weight_scale", flat=True),
        {"weight": FP8_CODES, "weight_scale": scales(128, dtype=F32)}, "W8A8 fp8",
    ),
    "awq": (
        Awq(64), {"qweight": words(192, 16), "qzeros": words(3, 16, seed=1), "scales": scales(3, 128)}, "W4A16",
    ),
    "gptq": (Gptq(4, 64, False, False, 1), GPTQ | {"qzeros": words(3, 16, seed=1)}, "W4A16"),
    "gptq, symmetric": (
        Gptq(4, 64, True, False, 2), GPTQ | {"qzeros": torch.full((3, 16), -2004318072, dtype=torch.int32)}, "W4A16",
    ),  # 0x88888888
    "gptq, 8 bits": (
        Gptq(8, 64, True, False, 2),
        GPTQ | {"qweight": words(48, 128), "qzeros": torch.full((3, 32), -2139062144, dtype=torch.int32)}, "W8A16",
    ),  # 0x80808080
    "gptq, act-order": (
        Gptq(4, 64, False, True, 1), GPTQ | {"qzeros": words(3, 16, seed=1), "g_idx": IN_ORDER.flip(0)}, PER_PRODUCT,
    ),
    "gptq, a short last group": (
        Gptq(4, 128, False, False, 1),
        {"qweight": words(24, 128), "qzeros": words(2, 16), "scales": scales(2, 128), "g_idx": IN_ORDER // 2},
        PER_PRODUCT,
    ),
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
def test_what_other_tools_wrote_is_multiplied_by_the_kernel_of_its_numbers(other: str) -> None:
    layout, tensors, name = OTHERS[other]
    known = layout.specs(192, 128)
    assert {word: tuple(tensor.shape) for word, tensor in tensors.items()} == {n: s.shape for n, s in known.items()}
    coded = layout.coded(tensors, 192)
    assert (coded is None) is (other in ("gptq, act-order", "gptq, a short last group"))
    if coded is not None:
        torch.testing.assert_close(coded.weight(), layout.weight(tensors, 192), rtol=1e-6, atol=0)
        assert layout.scheme in (None, coded.scheme)
    for forms in ([make() for make in TWINS.values()], []):
        method = Converted({"a": layout}, F16, CPU, paths=forms)
        method.tensors_of("a", 192, 128, bias=False)
        params = method.create(192, 128, False)
        for word, tensor in tensors.items():
            method.load(params, word, tensor, 0)
        method.finish(params)
        path = method.path(params)
        assert (PER_PRODUCT if path is None else path.name) == (name if forms else PER_PRODUCT)
        y = method.apply(params, normal(3, 192, seed=4).to(F16)).float()
        if forms:
            taken = y
    assert float((taken - y).abs().max() / y.abs().max()) < 4e-3


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "MXFP4"])
def test_blocks_of_gguf_with_a_scheme_are_multiplied_by_the_kernel_of_their_numbers(kind: str) -> None:
    raw = torch.randint(256, (128, 6, BLOCKS_OF_GGUF[kind][1]), generator=torch.Generator().manual_seed(0))
    raw = raw.to(torch.uint8)
    if kind == "MXFP4":
        raw[..., 0] = raw[..., 0] % 8 + 116
    else:
        raw[..., :2] = scales(128, 6, 1).view(torch.uint8)
    layout, tensors = GgufBlocks(kind), {"weight": raw.flatten(1)}
    method = Converted({"a": layout}, F16, CPU, paths=[make() for make in TWINS.values()])
    method.tensors_of("a", 192, 128, bias=False)
    params = {"0.weight": tensors["weight"]}
    method.finish(params)
    path = method.path(params)
    assert path is not None
    assert path.name == {"Q4_0": "W4A16", "Q8_0": "W8A16", "MXFP4": "FP4 emulated in 16 bits"}[kind]
    x = normal(3, 192, seed=4).to(F16)
    expected = x.double() @ layout.weight(tensors, 192).double().T
    assert float((method.apply(params, x).double() - expected).abs().max() / expected.abs().max()) < 4e-3


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme("int4", "group", 16),  # no step of a kernel
        Scheme("int8", "group", 64, symmetric=False),
        Scheme("e4m3", "channel"),
        Scheme("e4m3", "block"),
        Scheme("e4m3", "group", 32, scales="e8m0"),
        Scheme("int8", "channel", activations=Activations("int8", "tensor")),
    ],
    ids=str,
)
def test_what_no_kernel_takes_stays_stored_or_is_decoded_once(scheme: Scheme) -> None:
    forms = [make() for make in TWINS.values()]
    assert product(Converted(of_parts(scheme, 2), F16, CPU, paths=forms), [128, 40], 192)[0] == PER_PRODUCT
    once = Converted(of_parts(scheme, 2), F16, CPU, paths=[*forms, Decoded(UnquantizedLinear(F16, CPU))])
    path, off = product(once, [128, 40], 192)
    assert path == "decoded once"
    assert off < 2e-3


@settings(max_examples=examples(40), deadline=None)
@given(
    st.sampled_from([32, 64, 96, 128, 160, 256]), st.integers(1, 3), st.booleans(), st.sampled_from([BF16, F16, F32]),
    st.lists(st.integers(1, 37), min_size=1, max_size=3), st.integers(1, 20),
)  # fmt: skip
def test_int4_of_a_cpu_is_the_stored_weight_of_any_shape(size, groups, symmetric, dtype, parts, tokens) -> None:
    """x is rounded to bfloat16, and y."""
    scheme = Scheme("int4", "group", size, symmetric=symmetric)
    path, off = product(
        Converted(of_parts(scheme, len(parts)), dtype, CPU, paths=[CpuFourBits(dtype)]), parts, size * groups, tokens
    )
    assert path == "int4 of the CPU"
    assert off < 3e-2


@pytest.mark.parametrize("symmetric", [True, False])
def test_weights_in_int4_of_a_cpu_are_exactly_those_stored(symmetric: bool) -> None:
    """x picks one input: y is a weight, rounded once to bfloat16 where the layer is symmetric."""
    scheme = Scheme("int4", "group", 32, symmetric=symmetric)
    method = Converted(of_parts(scheme), F32, CPU, paths=[CpuFourBits(F32)])
    params, weight = layer(method, [33], 64)
    found = method.apply(params, torch.eye(64)).T
    if symmetric:
        assert torch.equal(found, weight.to(BF16).float())
    else:  # (code - 8) x scale is rounded, then (8 - zero) x scale added
        assert float((found - weight).abs().max()) <= 2.0**-8 * 8 * 0.1
    assert params["scales"].dtype is BF16


def test_scales_that_are_no_bfloat16_are_not_rounded_for_speed() -> None:
    for scheme, form in (
        (Scheme("int4", "group", 32, scale_dtype=F16), CpuFourBits(BF16)),
        (Scheme("int8", "channel", scale_dtype=F32), CpuEightBits(BF16)),
    ):
        assert product(Converted(of_parts(scheme, 2), BF16, CPU, paths=[form]), [16, 5], 64)[0] == PER_PRODUCT
    assert (
        product(Converted(of_parts(Scheme("int8", "channel"), 2), BF16, CPU, paths=[CpuEightBits(BF16)]), [16, 5], 64)[
            1
        ]
        < 2e-2
    )


def test_four_bit_floats_beyond_float16_are_not_emulated_in_it() -> None:
    scheme = Scheme("e2m1", "group", 32, scales="e8m0")
    for power, dtype, known in (
        (2.0**14, F16, False),
        (2.0**13, F16, True),
        (2.0**-24, F16, False),
        (1e30, BF16, True),
    ):
        method = Converted(of_parts(scheme), dtype, CPU, paths=[FourBitFloats(reference.gemm_fp4)])
        method.tensors_of("part_0", 64, 2, bias=False)
        params = method.create(64, 2, False)
        fitted = fit(torch.ones(2, 64), scheme)
        fitted.scales = torch.exp2(torch.full((2, 2), power).log2().round())
        for name, tensor in tensors_of(torch.ones(2, 64, dtype=torch.uint8), scheme, fitted).items():
            method.load(params, name, tensor, 0)
        method.finish(params)
        assert (method.path(params) is not None) is known


def test_ragged_blocks_of_several_parts_are_not_joined() -> None:
    """Behind 40 outputs of a first part a block would begin where the kernel's tile does not."""
    form = TWINS["W8A8 fp8 by block"]()
    assert product(Converted(of_parts(BLOCKS, 2), F16, CPU, paths=[form]), [40, 128], 192)[0] == PER_PRODUCT
    assert product(Converted(of_parts(BLOCKS, 2), F16, CPU, paths=[form]), [256, 40], 192)[1] < 4e-3


@pytest.mark.parametrize(("scales", "path"), [((0.5, 0.5), "decoded once"), ((0.5, 0.25), None)])
def test_parts_that_scale_their_input_differently_leave_a_layer_stored(
    scales: tuple[float, float], path: str | None
) -> None:
    """0.7 is 1 step of 0.5 and 3 of 0.25."""
    scheme = Scheme("int8", "channel", activations=Activations("int8", "tensor", dynamic=False))
    method = Converted(of_parts(scheme, 2), F32, CPU, paths=[Decoded(UnquantizedLinear(F32, CPU))])
    weights = []
    for part in range(2):
        method.tensors_of(f"part_{part}", 32, 4, bias=False)
    params = method.create(32, 8, False)
    for part, scale in enumerate(scales):
        weight = normal(4, 32, seed=part) if part else normal(4, 32)
        fitted = fit(weight, scheme)
        codes = encode(weight, scheme, fitted)
        weights.append(decode(codes, scheme, fitted))
        for name, tensor in tensors_of(codes, scheme, fitted).items():
            method.load(params, name, tensor, 4 * part)
        method.load(params, "input_scale", torch.tensor([scale]), 4 * part)
    method.finish(params)
    assert (method.path(params).name if method.path(params) else None) == path
    inputs = [torch.full((1, 32), round(0.7 / scale) * scale) for scale in scales]
    expected = torch.cat([x @ weight.T for x, weight in zip(inputs, weights, strict=True)], 1)
    torch.testing.assert_close(method.apply(params, torch.full((1, 32), 0.7)), expected)


def test_int4_with_zero_points_is_one_launch_with_its_neighbours() -> None:
    from reference_impl.kernels.gemm_w4a16 import gemm_w4a16

    scheme = Scheme("int4", "group", 32, symmetric=False)
    method = TritonStoredInt4(of_parts(scheme, 2), F16, DEVICE, paths=[FourBitIntegers(gemm_w4a16)])
    params, weight = layer(method, [20, 20], 96, bias=True)
    x, norm = normal(2, 96).to(DEVICE, F16), (1 + 0.1 * normal(96)).to(DEVICE, F16)
    found = method.fused(params, x, norm=norm, eps=1e-5, gate="silu")
    expected = reference.fused_linear(
        x.double(), weight.to(DEVICE).double(), params["bias"].double(), norm=norm.double(), eps=1e-5, gate="silu"
    )
    assert torch.allclose(found.double(), expected, rtol=5e-3, atol=5e-3)
    alone = x.double() @ weight.to(DEVICE).double().T + params["bias"].double()
    assert torch.allclose(method.apply(params, x).double(), alone, rtol=5e-3, atol=5e-3)


def write_checkpoint(folder: pathlib.Path, scheme: Scheme) -> None:
    """A config that names the scheme, and of the weights what says how tensors are named."""
    (folder / "config.json").write_text(json.dumps({"quantization_config": config_of(scheme)}))
    save_file({"model.norm.weight": torch.ones(64)}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("scheme", "dtype", "free", "first"),
    [
        (Scheme("int4", "group", 32), F32, None, "decoded once"),
        (Scheme("int4", "group", 32), F32, 1000, "int4 of the CPU"),  # less than the decoded weights take
        (Scheme("int4", "group", 32), BF16, None, "int4 of the CPU"),
        (Scheme("e2m1", "group", 16, scales="e4m3"), BF16, None, "decoded once"),
        (Scheme("e2m1", "group", 16, scales="e4m3"), BF16, 1000, PER_PRODUCT),
        (Scheme("int4", "group", 32), torch.float64, 1000, PER_PRODUCT),
    ],
    ids=str,
)
def test_a_cpu_takes_the_form_that_dtype_and_memory_allow(scheme, dtype, free, first, tmp_path) -> None:
    write_checkpoint(tmp_path, scheme)
    assert decoded_bytes(CONFIG, BF16) == 2 * (64 * 16 * (4 + 2 + 2 + 4) + 3 * 64 * 96)
    methods = stored_methods(tmp_path, CONFIG, dtype, CPU, choose_kernels("torch", CPU, dtype), free)
    assert callable(methods)
    method = methods("model.layers.0.mlp.down_proj")
    assert isinstance(method, Converted)
    params, _ = layer(method, [16], 64)
    path = method.path(params)
    assert (PER_PRODUCT if path is None else path.name) == first
    assert first in repr(method)


def test_with_triton_each_format_has_its_kernel(tmp_path) -> None:
    kernels = choose_kernels("triton", DEVICE, F16)
    for scheme, name in (
        (Scheme("int4", "group", 32, symmetric=False), "W4A16"),
        (Scheme("int8", "channel", activations=PER_TOKEN["int8"]), "W8A8 int8"),
        (Scheme("e2m1", "group", 16, scales="e4m3"), "FP4 emulated in 16 bits"),
        (Scheme("e4m3", "channel", activations=PER_TOKEN["e4m3"]), "W8A8 fp8"),
        (Scheme("e4m3", "channel"), "decoded once"),
    ):
        write_checkpoint(tmp_path, scheme)
        methods = stored_methods(tmp_path, CONFIG, F16, DEVICE, kernels)
        assert callable(methods)
        method = methods("model.layers.0.mlp.gate_up_proj")
        assert isinstance(method, Converted)
        params, weight = layer(method, [16, 8], 64)
        path = method.path(params)
        assert path is not None
        assert path.name == name
        x = normal(2, 64).to(DEVICE, F16)
        expected = x.double() @ weight.to(DEVICE).double().T
        assert float((method.apply(params, x).double() - expected).abs().max()) < 0.05 * float(expected.abs().max())
        assert isinstance(method, TritonStoredInt4) is (name == "W4A16")


def test_generate_says_what_the_weights_are_multiplied_with(monkeypatch) -> None:
    monkeypatch.setattr("reference_impl.assembly.stored_weights.paths_of", lambda model: Counter({"decoded once": 28}))
    said = CliRunner().invoke(app, ["generate", "x", "--max-tokens", "1"])
    assert "weights that came quantized: decoded once (28 layers)" in said.stderr
