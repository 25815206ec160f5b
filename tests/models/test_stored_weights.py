"""Checkpoints of compressed-tensors and in FP8: logits are those of the decoded weights; errors name what is wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from reference_impl.assembly.config import ConfigError
from reference_impl.assembly.model import load_model
from reference_impl.assembly.stored_weights import layouts, paths_of, with_parts
from reference_impl.models.loader import CheckpointError
from reference_impl.models.quantization.compressed_tensors import config_of, config_of_layers
from reference_impl.models.quantization.fp8 import Fp8
from reference_impl.models.quantization.layouts import Dense, OfScheme
from reference_impl.models.quantization.scheme import Activations, Scheme, decode, encode, fit
from reference_impl.models.quantization.stored import Stored, round_activations
from reference_impl.models.quantization.tensors import fitted_of, tensors_of
from tests.examples import examples
from tests.models.test_parity import IDS, worst
from tests.quantization.conftest import MakeFolder, as_stored, make_folder  # noqa: F401

FLOAT32 = torch.float32
SCHEMES = [
    Scheme("int4", "group", 32),
    Scheme("int4", "group", 16, symmetric=False),
    Scheme("int8", "group", 32, symmetric=False),
    Scheme("int4", "channel"),
    Scheme("int8", "channel", activations=Activations("int8")),
    Scheme("e4m3", "tensor"),
    Scheme("e4m3", "channel", activations=Activations("e4m3")),
    Scheme("e4m3", "block"),
    Scheme("e2m1", "group", 16, scales="e4m3"),
    Scheme("e2m1", "group", 32, scales="e8m0"),
    Scheme("e4m3", "group", 32, scales="e8m0"),
    Scheme("e2m1", "group", 32, scales="e8m0", activations=Activations("e2m1", "group", True, 32, scales="e8m0")),
]
SIZES = {
    "architecture": "LlamaForCausalLM", "attention_bias": True, "mlp_bias": True, "vocab_size": 97, "hidden_size": 96,
    "intermediate_size": 160, "num_attention_heads": 6, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture
def written(make_folder: MakeFolder, edit) -> Callable[..., tuple[Path, Path]]:  # noqa: F811
    """written(scheme) -> (a folder in that form, a folder with the weights that its codes stand for)."""

    def write(scheme: Scheme) -> tuple[Path, Path]:
        folder = make_folder(**SIZES)
        tensors = load_file(folder / "model.safetensors")
        plain, packed = dict(tensors), dict(tensors)
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            weight = packed.pop(name)
            fitted = fit(weight, scheme)
            codes = encode(weight, scheme, fitted)
            plain[name] = decode(codes, scheme, fitted)
            prefix = name.removesuffix("weight")
            packed |= {prefix + word: tensor for word, tensor in tensors_of(codes, scheme, fitted).items()}
        other = folder.parent / f"{folder.name}-plain"
        other.mkdir()
        (other / "config.json").write_text((folder / "config.json").read_text())
        save_file(plain, other / "model.safetensors", {"format": "pt"})
        save_file(packed, folder / "model.safetensors", {"format": "pt"})
        edit(folder, quantization_config=config_of(scheme))
        return folder, other

    return write


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_logits_are_those_of_the_decoded_weights(scheme: Scheme, written, our_logits, caplog) -> None:
    folder, plain = written(scheme)
    caplog.set_level("INFO", "inferlab.engine")
    model, expected = load_model(folder, FLOAT32), load_model(plain, FLOAT32)
    if scheme.activations is None:
        assert worst(our_logits(model, IDS)[0], our_logits(expected, IDS)[0]) <= 1e-5
    else:  # what rounded activations do to a product is tested below
        bound = 0.6 if scheme.activations.numbers == "e2m1" else 0.2
        assert worst(our_logits(model, IDS)[0], our_logits(expected, IDS)[0]) <= bound
    assert paths_of(model) == {"decoded once": len(model.linears())}
    assert f"quantized linear layers: {len(model.linears())} decoded once" in caplog.text
    stored = load_model(folder, FLOAT32, linear_method=as_stored(folder))
    assert worst(our_logits(stored, IDS)[0], our_logits(model, IDS)[0]) <= 1e-5, "which is only faster"
    for linear in stored.linears():
        assert "Stored(OfScheme(scheme=Scheme" in repr(linear.method)
        shapes = [(rows, linear.in_features) for rows in linear.parts.values()]
        bits = sum(scheme.bits_per_weight(shape) * shape[0] * shape[1] for shape in shapes)
        bits += 32 * linear.out_features * linear.has_bias
        bits += len(shapes) * 128 * any("weight_shape" in name for name in linear.params)
        found = 8 * linear.weight_bytes()
        padding = 32 * sum(rows + 32 * linear.in_features // 16 for rows in linear.parts.values())
        bits = round(bits)
        assert bits <= found <= bits + (padding if not scheme.symmetric else 0)


def test_int4_is_packed_as_the_format_says() -> None:
    """Worked out by hand: code + 8 of input i in bits 4i to 4i + 3 of a word; zero points too, down the outputs."""
    scheme = Scheme("int4", "group", 8, symmetric=False)
    codes = torch.tensor([[-8, -7, -6, -5, -4, -3, -2, 7], [0, 0, 0, 0, 0, 0, 0, 0]], dtype=torch.int8)
    fitted = fit(torch.ones(2, 8), scheme)
    fitted.zeros = torch.tensor([[1], [-8]], dtype=torch.int8)
    found = tensors_of(codes, scheme, fitted)
    assert found["weight_packed"].tolist() == [[0xF6543210 - 2**32], [0x88888888 - 2**32]]
    assert found["weight_zero_point"].tolist() == [[0x09]]
    assert found["weight_shape"].tolist() == [2, 8]
    back, again = fitted_of(found, scheme, 8)
    assert torch.equal(back, codes)
    assert again.zeros is not None
    assert torch.equal(again.zeros, fitted.zeros)


def test_nvfp4_is_packed_as_the_format_says() -> None:
    """The first code of two in the low bits; the scale of the tensor divides."""
    scheme = Scheme("e2m1", "group", 16, scales="e4m3")
    weight = torch.tensor([[0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0, 0.0]])
    fitted = fit(weight, scheme)
    found = tensors_of(encode(weight, scheme, fitted), scheme, fitted)
    assert found["weight_packed"].tolist() == [[0x10, 0x32, 0x54, 0x76, 0xA9, 0xCB, 0xED, 0x0F]]
    assert found["weight_scale"].float().tolist() == [[448.0]]
    assert found["weight_global_scale"].tolist() == pytest.approx([448.0], rel=1e-6)


@pytest.mark.parametrize("numbers", ["int8", "e4m3"])
def test_activations_are_rounded_by_token_by_tensor_and_statically(numbers: Any) -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0], [10], [100]])
    reach = {"int8": 127.5, "e4m3": 448.0}[numbers]

    def nearest(values: Tensor, scale: float) -> Tensor:
        scaled = values / scale
        if numbers == "int8":
            return scaled.round().clamp(-128, 127) * scale
        return scaled.clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    by_token = torch.stack([nearest(row, float(row.abs().max()) / reach) for row in x])
    assert torch.allclose(round_activations(x, Activations(numbers)), by_token, rtol=1e-6)
    whole = nearest(x, float(x.abs().max()) / reach)
    assert torch.allclose(round_activations(x, Activations(numbers, "tensor")), whole, rtol=1e-6)
    static = Activations(numbers, "tensor", dynamic=False)
    assert torch.allclose(round_activations(x, static, torch.tensor([0.5])), nearest(x, 0.5), rtol=1e-6)


def test_fp8_as_deepseek_writes_it(written, edit, our_logits) -> None:
    folder, plain = written(Scheme("e4m3", "block", scale_dtype=FLOAT32))
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("weight_scale", "weight_scale_inv"): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    raw = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}
    layout_of = layouts({**raw, "modules_to_not_convert": ["lm_head", "model.layers.1"]}, "config.json")
    assert layout_of("model.layers.1.mlp.up_proj") is None
    layout = layout_of("model.layers.10.mlp.up_proj")
    assert isinstance(layout, Fp8)
    assert layout.scale == "weight_scale_inv"
    assert layout.activations == Activations("e4m3", "group", True, 128)
    edit(folder, quantization_config=raw)
    found, expected = (our_logits(load_model(path, FLOAT32), IDS)[0] for path in (folder, plain))
    assert worst(found, expected) <= 0.2  # activations are rounded, too


def test_names_classes_and_expressions_say_which_layers_have_a_scheme() -> None:
    raw = config_of(Scheme("int4", "group", 32), ["lm_head", "re:.*layers\\.1\\."])
    raw["config_groups"]["other"] = copy.deepcopy(config_of(Scheme("int8", "channel"))["config_groups"]["group_0"])
    raw["config_groups"]["other"]["targets"] = ["re:.*down_proj"]
    layout_of = layouts(raw, "config.json")
    assert [layout_of(f"model.layers.{i}.mlp.up_proj") for i in (0, 1)] == [
        OfScheme(Scheme("int4", "group", 32), packed=True), None,
    ]  # fmt: skip
    assert layout_of("model.layers.0.mlp.down_proj") == OfScheme(Scheme("int8", "channel"), packed=True)
    assert layout_of("lm_head") is None


def test_parts_of_one_layer_may_have_different_schemes(written, edit, our_logits) -> None:
    """One of q, k and v in 8 bits, and one not quantized: each is decoded as its own scheme says."""
    folder, plain = written(SCHEMES[0])
    tensors, dense = load_file(folder / "model.safetensors"), load_file(plain / "model.safetensors")
    q, k = (f"model.layers.0.self_attn.{part}_proj" for part in "qk")
    for word in ("weight_packed", "weight_scale", "weight_shape"):
        del tensors[f"{k}.{word}"], tensors[f"{q}.{word}"]
    tensors[f"{k}.weight"], other = dense[f"{k}.weight"], Scheme("int8", "channel", activations=Activations("int8"))
    fitted = fit(dense[f"{q}.weight"], other)
    codes = encode(dense[f"{q}.weight"], other, fitted)
    tensors |= {f"{q}.{word}": tensor for word, tensor in tensors_of(codes, other, fitted).items()}
    dense[f"{q}.weight"] = decode(codes, other, fitted)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    save_file(dense, plain / "model.safetensors", {"format": "pt"})
    edit(folder, quantization_config=config_of_layers({"up_proj": SCHEMES[0], "": SCHEMES[0], q: other}, [k]))
    model = load_model(folder, FLOAT32)
    method = model.linears()[0].method
    assert isinstance(method, Stored)
    assert method.layouts == {
        "q_proj": OfScheme(other, packed=False), "k_proj": Dense(), "v_proj": OfScheme(SCHEMES[0], packed=True),
    }  # fmt: skip
    found, expected = our_logits(model, IDS)[0], our_logits(load_model(plain, FLOAT32), IDS)[0]
    assert worst(found, expected) <= 0.05  # q rounds its input
    method.layouts["q_proj"] = OfScheme(replace(other, activations=None))
    assert worst(our_logits(model, IDS)[0], expected) <= 1e-5


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scales_that_cannot_be_are_named(bad: float, written) -> None:
    folder, _ = written(SCHEMES[0])
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight_scale"
    tensors[name][2, 1] = bad
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"tensor {name}: expected .*finite"):
        load_model(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quant_method: expected compressed-tensors, fp8, gptq, awq or torchao.*'bitsandbytes'",
        ),
        ({"quant_method": "auto-round"}, "auto-round writes them with format='auto_gptq'"),
        ({"quant_method": "intel/auto-round"}, "auto-round writes them with format='auto_gptq'"),
        ({"format": "marlin-24"}, "format: expected one of pack-quantized.*found 'marlin-24'"),
        ({"config_groups": []}, "config_groups: expected an object"),
        ({"ignore": ["re:("]}, r"ignore: expected a regular expression behind re:"),
    ],
)
def test_a_form_that_is_not_read_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layouts({**config_of(SCHEMES[0]), **change}, "config.json")


@pytest.mark.parametrize("kind", ["tensor", "channel", "block"])
@pytest.mark.parametrize("names", [("weight_scale", "input_scale"), ("weight_scale_inv", "activation_scale")])
def test_other_forms_of_fp8(kind: Any, names: tuple[str, str], written, edit) -> None:
    """Scales of the tensor, with and without a dimension; of channels; of blocks of 32 x 64; inputs with static scales,
    but for blocks, each product against its definition."""
    scheme, (scale, given) = Scheme("e4m3", kind, block=(32, 64)), names
    folder, plain = written(scheme)
    tensors = {n.replace("weight_scale", scale): t for n, t in load_file(folder / "model.safetensors").items()}
    raw: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [32, 64] if kind == "block" else None}
    if scale == "weight_scale" and kind != "block":
        tensors = {n: t.flatten()[0] if n.endswith(scale) and len(t) == 1 else t for n, t in tensors.items()}
        tensors = {n: t.squeeze(1) if n.endswith(scale) and t.dim() == 2 else t for n, t in tensors.items()}
    if kind != "block":
        raw["activation_scheme"] = "static"
        layers = [n.removesuffix("weight") for n in tensors if n.endswith("_proj.weight")]
        tensors |= {n + given: torch.tensor(0.0625) if "inv" in scale else torch.tensor([0.0625]) for n in layers}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit(folder, quantization_config=raw)
    model, expected = load_model(folder, FLOAT32, linear_method=as_stored(folder)), load_model(plain, FLOAT32)
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    linear, other = model.linears()[0], expected.linears()[0]
    found = linear(x)
    assert isinstance(linear.method, Stored)
    if kind == "block":
        q = "model.layers.0.self_attn.q_proj."
        factors = torch.kron(tensors[q + scale].float(), torch.ones(32, 64))[:, :96]
        assert torch.equal(linear.method.weight(linear.params, 0, 96), tensors[q + "weight"].float() * factors)
        wide = torch.nn.functional.pad(x, (0, 32)).unflatten(1, (2, 64))
        steps = wide.abs().amax(-1, keepdim=True) / 448
        rounded = ((wide / steps).to(torch.float8_e4m3fn).float() * steps).flatten(1)[:, :96]
    else:
        rounded = (x / 0.0625).to(torch.float8_e4m3fn).float() * 0.0625
    torch.testing.assert_close(found, other(rounded), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_block_size": [128]}, r"weight_block_size: expected \[outputs, inputs\] of a block, or null"),
        ({"activation_scheme": "static"}, "activation_scheme: expected dynamic, since the weights have blocks"),
        ({"activation_scheme": "none"}, "activation_scheme: expected dynamic or static, found 'none'"),
        ({"fmt": "e5m2"}, "fmt: expected e4m3, found 'e5m2'"),
    ],
)
def test_a_form_of_fp8_that_is_not_read_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layouts({"quant_method": "fp8", "weight_block_size": [128, 128], **change}, "config.json")


@pytest.mark.parametrize("form", ["int-quantized", "naive-quantized"])
@pytest.mark.parametrize("numbers", ["int8", "int4"])
def test_integers_in_bytes_of_their_own(form: str, numbers: Any, written, edit, our_logits) -> None:
    """Weight-only, with zero points: the format says that codes are not packed."""
    scheme = Scheme(numbers, "group", 32, symmetric=False)
    folder, plain = written(scheme)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("weight_packed")]:
        prefix = name.removesuffix("weight_packed")
        shape = tensors.pop(f"{prefix}weight_shape")
        parts = {word: tensors.pop(prefix + word) for word in ("weight_packed", "weight_scale", "weight_zero_point")}
        codes, fitted = fitted_of(parts, scheme, int(shape[1]))
        assert fitted.zeros is not None
        tensors |= {f"{prefix}weight": codes, f"{prefix}weight_scale": parts["weight_scale"]}
        tensors[f"{prefix}weight_zero_point"] = fitted.zeros.contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    raw = config_of(scheme)
    raw["format"] = raw["config_groups"]["group_0"]["format"] = form
    edit(folder, quantization_config=raw)
    found, expected = (our_logits(load_model(path, FLOAT32), IDS)[0] for path in (folder, plain))
    assert worst(found, expected) <= 1e-5


def test_joined_names_stand_for_their_parts() -> None:
    """As vLLM calls them, in names and in regular expressions."""
    raw = config_of(SCHEMES[0], ["model.layers.0.self_attn.qkv_proj", "re:.*layers.1.*gate_up_proj"])
    layout_of = layouts(with_parts(raw), "config.json")
    names = ("0.self_attn.k_proj", "0.self_attn.o_proj", "1.mlp.up_proj", "1.mlp.down_proj", "0.mlp.up_proj")
    assert [layout_of(f"model.layers.{name}") is None for name in names] == [True, False, True, False, False]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 200) | st.floats() | st.text(max_size=4) | st.just("group"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


@given(data=st.data(), value=JSON)
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow])
def test_a_corrupted_config_is_read_or_refused_by_name(data: st.DataObject, value: Any) -> None:
    raw = config_of(data.draw(st.sampled_from(SCHEMES)))
    group = raw["config_groups"]["group_0"]
    places = [raw, raw["config_groups"], group, group["weights"], group["input_activations"] or raw]
    place = data.draw(st.sampled_from(places))
    place[data.draw(st.sampled_from(sorted(place)))] = value
    try:
        layout_of = layouts(raw, "config.json")
    except ConfigError:
        return
    layout_of("model.layers.0.mlp.up_proj")
