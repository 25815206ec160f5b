"""Checkpoints with features side by side that no other file's have, made by the library or worked out directly."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # the library imports Triton, whose own functions are defined then

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from safetensors.torch import load_file, save_file

from reference_impl.assembly.config import ConfigError
from reference_impl.assembly.model import load_model
from reference_impl.assembly.stored_weights import layouts, paths_of
from reference_impl.models.loader import CheckpointError
from reference_impl.models.quantization.auto_gptq import Gptq
from reference_impl.models.quantization.packing import pack_words, unpack_words
from reference_impl.models.quantization.quantize_folder import Job, quantize_folder
from tests.models.test_compressed_tensors import their_parameters
from tests.models.test_gptq_awq import AWQ, FLOAT32, GPTQ, SIZES, as_stored, written  # noqa: F401
from tests.models.test_parity import IDS, worst
from tests.quantization.conftest import MakeFolder, make_folder  # noqa: F401
from tests.quantization.test_quantize_folder import TOKENS, small


def group(targets: list[str], form: str, **weights: Any) -> QuantizationScheme:
    return QuantizationScheme(targets=targets, weights=QuantizationArgs(**weights), format=form)


# Of down_proj of layer 1 a name, two expressions and a class match; v_proj of layer 0 is ignored by an expression.
GROUPS = {
    "group_0": group(["Linear"], "pack-quantized", num_bits=4, group_size=16, symmetric=False, strategy="group"),
    "group_1": group(["re:.*down_proj"], "pack-quantized", num_bits=8, strategy="channel"),
    "group_2": group(
        ["re:.*1.*down_proj", "re:.*k_proj$"], "float-quantized", num_bits=8, type="float", strategy="channel"
    ),
    "group_3": group(["model.layers.1.mlp.down_proj"], "pack-quantized", num_bits=4, strategy="channel"),
}
IGNORE = ["re:.*layers\\.0.*v_proj", "lm_head", "model.layers.1.self_attn.o_proj"]


def test_groups_by_name_expression_and_class_are_matched_as_compressed_tensors_matches_them(
    make_folder: MakeFolder,  # noqa: F811
    our_logits,
    tmp_path: Path,
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = make_folder(
        architecture="LlamaForCausalLM", vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    raw = json.loads((folder / "config.json").read_text()) | {"model_type": "llama"}
    config = QuantizationConfig(config_groups=GROUPS, format="mixed-precision", ignore=IGNORE)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw))
    apply_quantization_config(model, config)
    schemes = {n: m.quantization_scheme for n, m in model.named_modules() if hasattr(m, "quantization_scheme")}
    form = load_file(folder / "model.safetensors")
    plain, taken = dict(form), set()
    for name, scheme in schemes.items():
        weight = form.pop(f"{name}.weight").float()
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        tensors = compressor.compress(their_parameters(weight, scheme.weights), scheme)
        plain[f"{name}.weight"] = compressor.decompress({n: t.clone() for n, t in tensors.items()}, scheme)["weight"]
        form |= {f"{name}.{word}": tensor for word, tensor in tensors.items()}
        taken.add((scheme.weights.num_bits, str(scheme.weights.type), str(scheme.weights.strategy)))
    assert len(taken) == 4
    assert len(schemes) == 12
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text((folder / "config.json").read_text())
    save_file(
        {n: t.float().contiguous() for n, t in plain.items()},
        tmp_path / "plain" / "model.safetensors",
        {"format": "pt"},
    )
    save_file(form, folder / "model.safetensors", {"format": "pt"})
    quantization = json.loads(config.model_dump_json()) | {"quant_method": "compressed-tensors"}
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": quantization}))
    expected = our_logits(load_model(tmp_path / "plain", FLOAT32), IDS)[0]
    assert worst(our_logits(load_model(folder, FLOAT32), IDS)[0], expected) <= 1e-5


@pytest.mark.parametrize("symmetric", [True, False])
def test_groups_of_any_inputs_are_read(symmetric: bool) -> None:
    """GPTQ's act-order "group", which compressed-tensors wrote until 0.20: weight_g_idx says the group of each input.
    What the library writes of a matrix whose columns are in the order of groups, put back into the matrix's own."""
    args = {"num_bits": 4, "group_size": 32, "symmetric": symmetric, "strategy": "group"}
    scheme = group(["Linear"], "pack-quantized", **args)
    config = QuantizationConfig(config_groups={"group_0": scheme}, format="pack-quantized", ignore=["lm_head"])
    raw = json.loads(config.model_dump_json())
    raw["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    layout = layouts(raw, "config.json")("model.layers.0.mlp.up_proj")
    assert layout is not None
    random = torch.Generator().manual_seed(0)
    weight, order = torch.randn(64, 128, generator=random), torch.randperm(128, generator=random)
    back, groups = order.argsort(), (torch.arange(128) // 32)[order.argsort()].int()
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    tensors = compressor.compress(their_parameters(weight[:, order], scheme.weights), scheme)
    expected = compressor.decompress({n: t.clone() for n, t in tensors.items()}, scheme)["weight"].float()[:, back]
    in_order = layout.weight(tensors | {"weight_g_idx": torch.full((128,), -1)}, 128)
    assert torch.equal(in_order, expected[:, order])
    tensors["weight_packed"] = pack_words(unpack_words(tensors["weight_packed"], 4, 128)[:, back], 4)
    tensors["weight_g_idx"] = groups
    assert set(tensors) == set(layout.specs(128, 64))
    assert torch.equal(layout.weight(tensors, 128), expected)
    assert (expected - weight).abs().max() < 0.6
    assert layout.coded(tensors, 128) is None
    sorted_ = layout.coded(tensors | {"weight_g_idx": torch.arange(128) // 32}, 128)
    assert sorted_ is not None
    assert torch.equal(sorted_.weight(), layout.weight(tensors | {"weight_g_idx": torch.arange(128) // 32}, 128))
    layout.check("weight_g_idx", groups)
    layout.check("weight_g_idx", torch.full((128,), -1))
    with pytest.raises(ValueError, match="expected each group 32 times, from 0 to 3, or -1 everywhere, found 0 to 4"):
        layout.check("weight_g_idx", groups + (groups == 3))
    raw["config_groups"]["group_0"]["weights"] |= {"strategy": "channel", "group_size": None}
    with pytest.raises(ConfigError, match="actorder: expected 'weight' or none, or integers in groups, found 'group'"):
        layouts(raw, "config.json")


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq_with_act_order_and_a_group_that_does_not_divide_the_inputs(version: str, written, our_logits) -> None:  # noqa: F811
    """32 and 64 inputs in groups of 24: two and three groups, the last of 8 or 16."""
    folder, plain = written(GPTQ | {"desc_act": True, "group_size": 24, "checkpoint_format": version})
    model = load_model(folder, FLOAT32)
    assert set(paths_of(model)) == {"decoded once"}
    assert worst(our_logits(model, IDS)[0], our_logits(load_model(plain, FLOAT32), IDS)[0]) <= 1e-5


@pytest.mark.parametrize("as_they_are", [False, True])
def test_groups_that_are_all_zero_are_in_the_order_of_inputs(as_they_are: bool, written, our_logits) -> None:  # noqa: F811
    """As GPTQ-for-LLaMa wrote g_idx, and as vLLM reads it, which looks at it with desc_act alone."""
    folder, plain = written(GPTQ)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: tensor * 0 for name, tensor in tensors.items() if name.endswith("g_idx")}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model = load_model(folder, FLOAT32, linear_method=as_stored(folder) if as_they_are else None)
    expected = our_logits(load_model(plain, FLOAT32), IDS)[0]
    assert worst(our_logits(model, IDS)[0], expected) <= 1e-5


def test_gptq_of_other_bits_for_some_layers(written, edit, our_logits) -> None:  # noqa: F811
    """GPTQModel's dynamic, with an expression for layers that are left as they are."""
    raw = GPTQ | {"dynamic": {"-:.*down_proj": {}, "+:.*self_attn.*": {"bits": 4, "group_size": 16}}}
    folder, plain = written(raw)
    tensors, dense = load_file(folder / "model.safetensors"), load_file(plain / "model.safetensors")
    down = "model.layers.0.mlp.down_proj."
    tensors = {n: t for n, t in tensors.items() if not n.startswith(down)} | {f"{down}weight": dense[f"{down}weight"]}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    found = our_logits(load_model(folder, FLOAT32), IDS)[0]
    assert worst(found, our_logits(load_model(plain, FLOAT32), IDS)[0]) <= 1e-5


@pytest.mark.parametrize("raw", [AWQ, GPTQ, GPTQ | {"sym": True}], ids=["awq", "gptq", "gptq sym"])
def test_scales_may_have_either_sign(raw: dict[str, Any], written, edit, our_logits) -> None:  # noqa: F811
    """As auto-round writes its auto_awq form, which says zero_point false of zero points that are all there, and its
    auto_gptq form: with scale and numbers negated a weight is the same."""
    folder, plain = written(raw)
    expected = our_logits(load_model(plain, FLOAT32), IDS)[0]
    tensors, dense = load_file(folder / "model.safetensors"), load_file(plain / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".scales")]:
        weight = f"{name.removesuffix('.scales')}.weight"
        turned = torch.where(torch.arange(tensors[name].shape[1]) % 2 == 0, -1.0, 1.0)
        tensors[name] = tensors[name] * turned.half()
        dense[weight] = dense[weight] * turned[:, None]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    save_file(dense, plain / "model.safetensors", {"format": "pt"})
    if raw["quant_method"] == "awq":
        edit(folder, quantization_config=raw | {"zero_point": False})
    found = our_logits(load_model(folder, FLOAT32), IDS)[0]
    assert worst(found, our_logits(load_model(plain, FLOAT32), IDS)[0]) <= 1e-5
    assert worst(found, expected) > 1e-2


def test_dynamic_says_it_of_the_head_too() -> None:
    """GPTQModel asks its rules for each matrix, the lm_head among them."""
    rules = {"-:.*down_proj": {}, "+:lm_head": {"bits": 8, "group_size": 32}}
    layout = layouts(GPTQ | {"lm_head": True, "dynamic": rules}, "config.json")("lm_head")
    assert isinstance(layout, Gptq)
    assert (layout.bits, layout.group_size) == (8, 32)
    assert layouts(GPTQ | {"lm_head": True, "dynamic": {"-:lm_head": {}}}, "config.json")("lm_head") is None
    assert layouts(GPTQ | {"dynamic": {"-:.*down_proj": {}}}, "config.json")("lm_head") is None


def test_act_order_without_g_idx_has_groups_side_by_side(make_folder: MakeFolder, edit, our_logits, tmp_path) -> None:  # noqa: F811
    """What compressed-tensors writes from 0.20 on."""
    source = make_folder(**SIZES)
    quantize_folder(Job(source, tmp_path / "packed", small("rtn"), TOKENS))
    expected = our_logits(load_model(tmp_path / "packed", FLOAT32), IDS)[0]
    raw = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    raw["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    edit(tmp_path / "packed", quantization_config=raw)
    assert torch.equal(our_logits(load_model(tmp_path / "packed", FLOAT32), IDS)[0], expected)


@pytest.mark.parametrize("scheme", [None, {"num_bits": 8, "type": "float", "symmetric": True}, "static"], ids=str)
@pytest.mark.parametrize(
    "names",
    [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("k_proj.output_scale", "v_proj.output_scale"),
     ("kv_scale",), ("k_scale", "v_scale", "q_scale", "prob_scale"), ("qkv_proj.k_scale", "qkv_proj.v_scale"),
     ("q_proj.output_scale", "prob_output_scale"), ("k_scale", "k_zero_point", "v_scale", "v_zero_point")],
    ids=" ".join,
)  # fmt: skip
def test_scales_for_a_cache_are_let_be_and_the_log_says_what_to_do(
    names: tuple[str, ...],
    scheme: Any,
    make_folder: MakeFolder,  # noqa: F811
    edit,
    our_logits,
    tmp_path,
    caplog,
) -> None:
    source = make_folder(**SIZES)
    packed = tmp_path / "packed"
    quantize_folder(Job(source, packed, small("rtn"), TOKENS))
    expected = our_logits(load_model(packed, FLOAT32), IDS)[0]
    raw = json.loads((packed / "config.json").read_text())["quantization_config"]
    edit(packed, quantization_config=raw | {"kv_cache_scheme": scheme})
    file = next(path for path in packed.glob("*.safetensors") if any("layers.0" in name for name in load_file(path)))
    tensors = load_file(file)
    tensors |= {f"model.layers.0.self_attn.{n}": torch.tensor([0.02 if "scale" in n else 0.0]) for n in names}
    save_file(tensors, file, {"format": "pt"})
    assert torch.equal(our_logits(load_model(packed, FLOAT32), IDS)[0], expected)
    said = ", ".join(sorted([*names, *(["kv_cache_scheme"] if scheme else [])]))
    assert f"packed: {said}: scales of attention" in caplog.text
    assert "kv_dtype='fp8' keeps the cache in 8 bits" in caplog.text


def test_the_older_name_of_the_config_is_read_too(make_folder: MakeFolder, edit, our_logits, tmp_path: Path) -> None:  # noqa: F811
    quantize_folder(Job(make_folder(**SIZES), tmp_path / "packed", small("rtn"), TOKENS))
    expected = our_logits(load_model(tmp_path / "packed", FLOAT32), IDS)[0]
    raw = json.loads((tmp_path / "packed" / "config.json").read_text())
    edit(tmp_path / "packed", quantization_config=None, compression_config=raw["quantization_config"])
    assert torch.equal(our_logits(load_model(tmp_path / "packed", FLOAT32), IDS)[0], expected)
    with pytest.raises(ConfigError, match="compression_config: expected none .*are not quantized again"):
        load_model(tmp_path / "packed", FLOAT32, quantization="int8")


OF_CACHE = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
OF_ATTENTION = {"weights": None, "input_activations": OF_CACHE, "output_activations": None, "format": None}


@pytest.mark.parametrize(
    "raw",
    [
        {"format": "dense", "config_groups": {}, "ignore": [], "quantization_status": "frozen"},
        {"format": "naive-quantized", "config_groups": {}},
        {"format": "dense", "config_groups": {"group_0": {"targets": ["LlamaAttention"], **OF_ATTENTION}}},
        {"config_groups": {"group_0": {"targets": ["re:.*self_attn$"], **OF_ATTENTION}}},
    ],
    ids=lambda raw: f"{raw.get('format')} {[*raw['config_groups']]}",
)
def test_a_config_that_rounds_only_the_cache_leaves_plain_weights(
    raw: dict[str, Any],
    make_folder: MakeFolder,  # noqa: F811
    edit,
    our_logits,
    caplog,
) -> None:
    folder = make_folder(**SIZES)
    expected = our_logits(load_model(folder, FLOAT32), IDS)[0]
    edit(folder, quantization_config={"quant_method": "compressed-tensors", "kv_cache_scheme": OF_CACHE, **raw})
    model = load_model(folder, FLOAT32)
    assert not paths_of(model)
    assert torch.equal(our_logits(model, IDS)[0], expected)
    assert "kv_cache_scheme: scales of attention" in caplog.text


@pytest.mark.parametrize(
    "raw",
    [
        {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["re:.*"]},
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "dynamic": {"-:.*": {}}},
        {"quant_method": "awq", "bits": 4, "group_size": 16, "modules_to_not_convert": ["self_attn", "mlp"]},
        {"quant_method": "fp8", "modules_to_not_convert": ["model", "lm_head"]},
    ],
    ids=lambda raw: raw["quant_method"],
)
def test_a_config_that_leaves_out_every_layer_leaves_plain_weights(
    raw: dict[str, Any],
    make_folder: MakeFolder,  # noqa: F811
    edit,
    our_logits,
) -> None:
    folder = make_folder(**SIZES)
    expected = our_logits(load_model(folder, FLOAT32), IDS)[0]
    if raw["quant_method"] == "compressed-tensors":
        group_0 = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
        raw = raw | {"config_groups": {"group_0": group_0}}
    edit(folder, quantization_config=raw)
    model = load_model(folder, FLOAT32)
    assert not paths_of(model)
    assert torch.equal(our_logits(model, IDS)[0], expected)


def test_dense_weights_of_a_group_that_has_weights_are_refused() -> None:
    group_0 = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
    raw = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {"group_0": group_0}}
    with pytest.raises(ConfigError, match="format: expected one of .*; or dense, where no group has weights"):
        layouts(raw, "config.json")


def test_awq_without_zero_points_is_named(written) -> None:  # noqa: F811
    folder, _ = written(AWQ)
    tensors = {n: t for n, t in load_file(folder / "model.safetensors").items() if "q_proj.qzeros" not in n}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="q_proj"):
        load_model(folder)
