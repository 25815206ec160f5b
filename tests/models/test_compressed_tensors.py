"""With the library compressed-tensors itself: what its compressors write is read as its decompressors read it, of every
preset that this engine has a form for; and `transformers` has the same logits of what is written here."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # the library imports Triton, whose own functions are defined then

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from reference_impl.assembly.config import ConfigError
from reference_impl.assembly.model import load_model
from reference_impl.assembly.stored_weights import layouts
from reference_impl.models.loader import CheckpointError
from reference_impl.models.quantization.forms import Dense
from reference_impl.models.quantization.quantize_folder import Job, quantize_folder
from reference_impl.models.quantization.recipes import METHODS
from reference_impl.models.quantization.scheme import Activations, Scheme
from reference_impl.models.quantization.stored import round_activations
from tests.models.test_parity import IDS, worst
from tests.models.test_stored_weights import written  # noqa: F401
from tests.quantization.conftest import make_folder  # noqa: F401

FORMS = {
    "W4A16": "pack-quantized", "W4A16_ASYM": "pack-quantized", "W8A16": "pack-quantized", "W4A8": "pack-quantized",
    "W4AFP8": "pack-quantized", "INT8": "int-quantized", "W8A8": "int-quantized", "FP8": "float-quantized",
    "FP8_DYNAMIC": "float-quantized", "FP8_BLOCK": "float-quantized", "NVFP4A16": "nvfp4-pack-quantized",
    "MXFP4A16": "mxfp4-pack-quantized", "MXFP8A16": "mxfp8-quantized", "W8A16 naive": "naive-quantized",
    "NVFP4": "nvfp4-pack-quantized", "MXFP4": "mxfp4-pack-quantized", "MXFP8": "mxfp8-quantized",
    "MXFP4XFP8": "mxfp4-pack-quantized", **{f"W{bits}A16": "pack-quantized" for bits in (2, 3, 5, 6, 7)},
    "W3A8": "pack-quantized", "W6A8": "pack-quantized",
}  # fmt: skip


def their_parameters(weight: Tensor, args: Any) -> dict[str, Tensor]:
    """Weight, scale and zero point as the library computes them from the extremes of what shares a scale."""
    rows, columns = weight.shape
    each = {"channel": (1, columns), "tensor": (rows, columns)}.get(args.strategy)
    if each is None:
        each = tuple(args.block_structure) if args.block_structure else (1, args.group_size)
    pieces = weight.reshape(rows // each[0], each[0], columns // each[1], each[1])
    found, bounds = {"weight": weight}, (pieces.amin((1, 3)), pieces.amax((1, 3)))
    if args.strategy == "tensor":
        bounds = bounds[0].flatten(), bounds[1].flatten()
    if args.strategy == "tensor_group":
        found["weight_global_scale"] = generate_gparam(weight.amin().reshape(1), weight.amax().reshape(1))
    scale, zero = calculate_qparams(*bounds, args, found.get("weight_global_scale"))
    return found | {"weight_scale": scale, "weight_zero_point": zero.to(args.zp_dtype or torch.int8)}


@pytest.mark.parametrize("name", FORMS)
def test_what_it_compresses_is_read_as_it_decompresses_it(name: str) -> None:
    scheme = preset_name_to_scheme(name.split()[0], ["Linear"])
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=FORMS[name], ignore=["lm_head"])
    raw = json.loads(config.model_dump_json())
    layout = layouts(raw, "config.json")("model.layers.0.mlp.up_proj")
    assert layout is not None
    assert layouts(raw, "config.json")("lm_head") is None
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    compressor = BaseCompressor.get_value_from_registry(FORMS[name])
    tensors = compressor.compress(their_parameters(weight, scheme.weights), scheme)
    specs = {n: spec for n, spec in layout.specs(384, 256).items() if n not in ("input_scale", "input_global_scale")}
    assert {n: tuple(t.shape) for n, t in tensors.items()} == {n: spec.shape for n, spec in specs.items()}
    assert all(tensors[n].dtype in spec.dtypes for n, spec in specs.items())
    expected = compressor.decompress({n: t.clone() for n, t in tensors.items()}, scheme)["weight"].float()
    found = layout.weight(tensors, 384)
    assert (found - weight).abs().max() < {"W2": 2, "W3": 1}.get(name[:2], 0.6)
    rtol = 2**-7 if name.startswith("NVFP4") else 0  # of that, it multiplies in bfloat16
    torch.testing.assert_close(found, expected, rtol=rtol, atol=0)


def their_rounding(x: Tensor, args: Any, global_scale: Tensor | None) -> Tensor:
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Identity(), global_scale)
    return fake_quantize(x, scale, zero, args, global_scale)


@pytest.mark.parametrize("name", ["NVFP4", "MXFP4", "MXFP8", "MXFP4XFP8", "FP8_BLOCK"])
def test_inputs_are_rounded_as_it_rounds_them(name: str) -> None:
    """Also an input of zeros, ones so small that NVFP4's scale for them is 0, and ones beyond what its scale for the
    tensor was made for."""
    scheme = preset_name_to_scheme(name, ["Linear"])
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=FORMS[name], ignore=["lm_head"])
    layout = layouts(json.loads(config.model_dump_json()), "config.json")("model.layers.0.mlp.up_proj")
    assert layout is not None
    assert layout.activations is not None
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 2, 64)[:, None]
    x[3], x[4], x[5] = 0, 1e-12 * x[4], 1.3e-5 * x[5].sign()
    whole = generate_gparam(x[:48].amin().reshape(1), x[:48].amax().reshape(1)) if name == "NVFP4" else None
    expected = their_rounding(x, scheme.input_activations, whole)
    found = round_activations(x, layout.activations, whole)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert float((found - x).abs().max()) > 0


def test_a_layer_s_parts_round_their_input_each_by_its_own_scale(written, edit) -> None:  # noqa: F811
    """NVFP4 on both sides, emulated: what each part gives is its decoded weight times its own rounded input."""
    inputs = Activations("e2m1", "group", True, 16, scales="e4m3")
    scheme = Scheme("e2m1", "group", 16, scales="e4m3", activations=inputs)
    args = preset_name_to_scheme("NVFP4", ["Linear"]).input_activations
    folder, plain = written(scheme)
    tensors, dense = load_file(folder / "model.safetensors"), load_file(plain / "model.safetensors")
    names = [name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")]
    scales = {name: torch.tensor([200.0 * (1 + place)]) for place, name in enumerate(names)}
    save_file(
        tensors | {f"{name}.input_global_scale": scale for name, scale in scales.items()},
        folder / "model.safetensors", {"format": "pt"},
    )  # fmt: skip
    model, random = load_model(folder, torch.float32), torch.Generator().manual_seed(0)
    for linear in model.linears():
        x = torch.randn(5, linear.in_features, generator=random)
        parts = [f"{linear.name.rpartition('.')[0]}.{part}" for part in linear.parts]
        expected = [
            F.linear(their_rounding(x, args, scales[part]), dense[f"{part}.weight"], dense.get(f"{part}.bias"))
            for part in parts
        ]
        torch.testing.assert_close(linear.method.apply(linear.params, x), torch.cat(expected, 1))
    del tensors[f"{names[0]}.weight_scale"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="no .*input_global_scale"):
        load_model(folder, torch.float32)


@pytest.mark.parametrize("name", ["W2A4", "W4A4", "MXFP6A16", "MXFP6A8"])
def test_a_preset_without_a_form_here_is_refused_by_name(name: str) -> None:
    config = QuantizationConfig(config_groups={"group_0": preset_name_to_scheme(name, ["Linear"])}, format="dense")
    raw = json.loads(config.model_dump_json()) | {"format": "pack-quantized"}
    with pytest.raises(ConfigError, match=r"quantization_config\.config_groups\.group_0\.\w+: expected .*found"):
        layouts(raw, "config.json")


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme("int4", "group", 32),
        Scheme("int4", "group", 16, symmetric=False),
        Scheme("int3", "group", 32),
        Scheme("int2", "group", 16, symmetric=False),
        Scheme("int8", "channel", activations=Activations("int8")),
        Scheme("e4m3", "channel"),
        Scheme("e4m3", "block", block=(32, 32)),
        Scheme("e2m1", "group", 16, scales="e4m3"),
        Scheme("e2m1", "group", 32, scales="e8m0"),
    ],
    ids=str,
)
def test_transformers_has_the_same_logits_of_what_is_written_here(
    scheme: Scheme,
    written,  # noqa: F811
    edit,
    our_logits,
) -> None:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    folder, _ = written(scheme)
    edit(folder, model_type="llama")
    # Loaded packed, transformers 5.23 expects zero points that are not, and multiplies 4-bit floats in bfloat16.
    # Decoded while they are loaded, weights have the dtype of their scales.
    decoded = scheme.numbers == "e2m1" or not scheme.symmetric
    dense = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if decoded else {}
    other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **dense).eval()
    with torch.no_grad():
        expected = other(torch.tensor([IDS])).logits[0]
    found = our_logits(load_model(folder, torch.float32), IDS)[0]
    rounds = scheme.activations is not None or scheme.scales == "e4m3" or not scheme.symmetric
    assert worst(found, expected) <= (0.02 if rounds else 1e-5)


@pytest.mark.parametrize("method", ["nvfp4-w4a4", "mxfp4-w4a4", "fp8-static"])
def test_inputs_are_rounded_by_transformers_as_here_of_what_quantize_writes(
    method: str,
    make_folder,  # noqa: F811
    edit,
    our_logits,
    tmp_path: Path,
) -> None:
    """With the scales in the file, and multiplied in float32. It decodes weights of 4 bits to bfloat16, exactly so of
    MXFP4; of NVFP4 it is given what the codes stand for, since a last bit more or less moves inputs to other codes."""
    from transformers import AutoModelForCausalLM

    source, ids = make_folder(architecture="LlamaForCausalLM", vocab_size=97, intermediate_size=128), IDS[:100]
    tokens = torch.arange(120).view(4, 30) * 7 % 97
    quantize_folder(Job(source, tmp_path / "out", METHODS[method], tokens))
    edit(tmp_path / "out", model_type="llama")
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with (
        torch.no_grad(),
        contextlib.suppress(RuntimeError),
    ):  # the first pass decodes weights: 4 bits to bfloat16, which
        other(torch.tensor([ids]))  # it cannot multiply with float32
    torch.nn.Module.float(other)
    if method == "nvfp4-w4a4":
        quantize_folder(Job(source, tmp_path / "dense", METHODS[method], tokens, Dense()))
        dense = {n: t for file in (tmp_path / "dense").glob("*.safetensors") for n, t in load_file(file).items()}
        assert all(worst(other.get_parameter(name), dense[name]) < 2**-8 for name in dense if "_proj" in name)
        other.load_state_dict({name: tensor for name, tensor in dense.items() if "_proj" in name}, strict=False)
    with torch.no_grad():
        expected = other(torch.tensor([ids])).logits[0]
    found = our_logits(load_model(tmp_path / "out", torch.float32), ids)[0]
    plain = our_logits(load_model(source, torch.float32), ids)[0]
    assert worst(found, expected) <= 1e-5
    assert worst(found, plain) > 0.1, "nothing was rounded"


def test_a_model_that_it_has_compressed_and_saved_is_loaded(tmp_path: Path, our_logits) -> None:
    """Built by transformers, quantized and saved by the library: logits are those of its own decompressed weights."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import apply_quantization_config
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, num_key_value_heads=2, max_position_embeddings=256, **sizes))
    scheme = preset_name_to_scheme("W4A16_ASYM", ["Linear"])
    scheme.weights.group_size = 32
    config = QuantizationConfig(config_groups={"group_0": scheme}, format="pack-quantized", ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            for name, tensor in their_parameters(module.weight.data, scheme.weights).items():
                getattr(module, name).data.copy_(tensor)
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    tensors = {name: t.contiguous() for name, t in model.state_dict().items() if t.device.type != "meta"}
    model.config.save_pretrained(tmp_path)
    compressor.update_config(str(tmp_path))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    found = our_logits(load_model(tmp_path, torch.float32), IDS)[0]
    compressor.decompress_model(model)
    with torch.no_grad():
        expected = model.eval()(torch.tensor([IDS])).logits[0]
    assert worst(found, expected) <= 1e-5
