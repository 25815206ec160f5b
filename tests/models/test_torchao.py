"""Checkpoints that torchao wrote (torchao_files/README.md): logits are torchao's. What is not read is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from reference_impl.assembly.config import ConfigError
from reference_impl.assembly.model import load_model
from reference_impl.models.loader import CheckpointError
from reference_impl.models.quantization.scheme import Activations
from reference_impl.models.quantization.stored import round_activations
from reference_impl.models.quantization.torchao import TorchAo
from reference_impl.models.quantization.torchao_mx import TorchAoGroups, unswizzled
from tests.models.test_parity import worst

HERE = Path(__file__).resolve().parent / "torchao_files"
IDS = [3, 17, 5, 29, 11, 2, 8, 23, 14, 1]
Q = "model.layers.0.self_attn.q_proj"
# The largest negative number of a symmetric token is 127.5 scales, between two codes: which one, the last bit decides.
TIES = {"w8a8": 0.02}
NAMES = sorted(folder.name for folder in HERE.iterdir() if folder.is_dir() and (folder / "config.json").is_file())


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_torchao(name: str, our_logits) -> None:
    expected = load_file(HERE / name / "logits.safetensors")["logits"]
    found = our_logits(load_model(HERE / name, torch.float32), IDS)[0]
    assert worst(found, expected) <= TIES.get(name, 1e-5)


def test_all_of_torchao_s_configs_that_a_cpu_writes_are_here() -> None:
    assert len(NAMES) == 15


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """changed(name, change) -> a copy of a checkpoint after change(tensors, metadata)."""

    def make(name: str, change: Callable[[dict[str, Tensor], dict[str, str]], object]) -> Path:
        folder = tmp_path / name
        shutil.copytree(HERE / name, folder)
        tensors = load_file(folder / "model.safetensors")
        with safe_open(folder / "model.safetensors", framework="pt") as handle:
            metadata = dict(handle.metadata())
        change(tensors, metadata)
        save_file(tensors, folder / "model.safetensors", metadata)
        return folder

    return make


def test_it_is_read_from_several_files_with_headers_of_their_own(changed, our_logits) -> None:
    folder = changed("int4", lambda tensors, metadata: None)
    tensors = load_file(folder / "model.safetensors")
    with safe_open(folder / "model.safetensors", framework="pt") as handle:
        metadata = dict(handle.metadata())
    where = {}
    for number, words in enumerate((("self_attn",), ("mlp", "embed", "norm", "head"))):
        file = f"model-{number + 1}-of-2.safetensors"
        own = {name: t for name, t in tensors.items() if any(word in name for word in words)}
        headers = {name: text for name, text in metadata.items() if any(word in name for word in words)}
        save_file(own, folder / file, headers | {"tensor_names": json.dumps(list(headers))})
        where |= dict.fromkeys(own, file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    expected = our_logits(load_model(HERE / "int4"), IDS)[0]
    assert torch.equal(our_logits(load_model(folder), IDS)[0], expected)


def test_int4_tensor_has_two_codes_in_a_byte_and_adds_its_zero_point() -> None:
    """Its writer, mslk, needs a GPU: so worked out by hand. 0x2f: codes -1 (low) and 2; 0x98: -8 and -7."""
    layout = TorchAo("Int4Tensor", (1, 2), "int4", ("qdata", "scale", "zero_point"))
    tensors = {
        "_weight_qdata": torch.tensor([[0x2F, 0x98 - 256]], dtype=torch.int8),
        "_weight_scale": torch.tensor([[0.5], [2.0]]),
        "_weight_zero_point": torch.tensor([[0.25], [1.0]]),
    }
    assert {name: spec.shape for name, spec in layout.specs(4, 1).items()} == {
        "_weight_qdata": (1, 2), "_weight_scale": (2, 1), "_weight_zero_point": (2, 1),
    }  # fmt: skip
    assert layout.weight(tensors, 4).tolist() == [[-0.25, 1.25, -15.0, -13.0]]
    assert layout.coded(tensors, 4) is None
    symmetric = tensors | {"_weight_zero_point": torch.zeros(2, 1)}
    coded = layout.coded(symmetric, 4)
    assert coded is not None
    assert coded.scheme.symmetric
    assert torch.equal(coded.weight(), layout.weight(symmetric, 4))
    assert layout.weight(symmetric, 4).tolist() == [[-0.5, 1.0, -16.0, -14.0]]


def test_swizzled_scales_lie_as_cublas_takes_them() -> None:
    """Of 200 rows and 10 columns: two tiles down and three across. Each place as cuBLAS' documents count it."""
    scales = torch.arange(200 * 10, dtype=torch.int64).view(200, 10) % 251
    swizzled = torch.zeros(2 * 3 * 512, dtype=torch.uint8)
    for row in range(200):
        for column in range(10):
            tile = row // 128 * 3 + column // 4
            swizzled[512 * tile + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] = scales[row, column]
    layout = TorchAoGroups("MXTensor", "e4m3", True, ("qdata", "scale"))
    shape = layout.specs(320, 200)["_weight_scale"].shape
    assert torch.equal(unswizzled(swizzled.view(shape), 200, 10), scales.to(torch.uint8))


def test_a_static_scale_of_nvfp4_inputs_is_taken_as_the_largest_would_give_it() -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    inputs = Activations("e2m1", "group", group_size=16, scales="e4m3", rule="torchao")
    whole = x.abs().max() / (448 * 6)
    assert torch.equal(round_activations(x, replace(inputs, dynamic=False), whole), round_activations(x, inputs))
    assert not torch.equal(
        round_activations(x, replace(inputs, dynamic=False), 3 * whole), round_activations(x, inputs)
    )


def test_a_static_scale_of_nvfp4_inputs_is_read(changed, our_logits) -> None:
    def change(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        for name in [name for name in metadata if "_proj" in name]:
            found = json.loads(metadata[name])
            found["_data"]["act_quant_kwargs"]["_data"]["use_dynamic_per_tensor_scale"] = False
            found["_tensor_data_names"].append("act_per_tensor_scale")
            metadata[name] = json.dumps(found)
            tensors[name.replace(".weight", "._weight_act_per_tensor_scale")] = torch.tensor(0.002)

    expected = load_file(HERE / "nvfp4" / "logits.safetensors")["logits"]
    found = our_logits(load_model(changed("nvfp4", change), torch.float32), IDS)[0]
    assert 1e-5 < worst(found, expected) < 0.5


def test_scales_of_a_byte_that_are_no_numbers_are_named(changed) -> None:
    name = f"{Q}._weight_scale"
    for form, code, message in (
        ("mxfp4", 255, "positive, finite scales, found 1"),
        ("nvfp4", 0x81, "not negative, fou"),
    ):

        def change(tensors: dict[str, Tensor], _: object, code: int = code) -> None:
            bits = tensors[name].view(torch.uint8).clone()
            bits[0, 0] = code
            tensors[name] = bits.view(tensors[name].dtype)

        with pytest.raises(CheckpointError, match=rf"tensor {name}: expected .*{message}"):
            load_model(changed(form, change))


def test_an_embedding_that_comes_quantized_is_decoded_once(changed) -> None:
    tensors = load_file(HERE / "embedding" / "model.safetensors")
    codes, scales = (tensors[f"model.embed_tokens._weight_{name}"] for name in ("qdata", "scale"))
    model = load_model(HERE / "embedding", torch.float32)
    assert torch.equal(model.embedding, codes.float() * scales.float())
    with pytest.raises(CheckpointError, match=r"missing tensors: model\.embed_tokens\._weight_scale"):
        load_model(changed("embedding", lambda tensors, _: tensors.pop("model.embed_tokens._weight_scale")))


def header(**changes: Any) -> Callable[[dict[str, Tensor], dict[str, str]], object]:
    """Changes fields of q_proj's header, or of its _data."""

    def change(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        found = json.loads(metadata[f"{Q}.weight"])
        for name, value in changes.items():
            (found if name.startswith("_") else found["_data"])[name] = value
        metadata[f"{Q}.weight"] = json.dumps(found)

    return change


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("int8", {"_type": "Int4TilePackedTo4dTensor"}, "_type: expected Int8Tensor.*one kernel: quantize the model"),
        ("int8", {"_data": [1]}, r"_data: expected an object, found \[1\]"),
        ("int8", {"_tensor_data_names": ["qdata"]}, "_tensor_data_names: expected a list of names, with qdata and sc"),
        ("int8", {"_tensor_data_names": ["qdata", "scale", "act_pre_scale"]}, r"some of .*found \['act_pre_scale'\]"),
        ("int8", {"_tensor_data_names": ["qdata", "scale", ["a"]]}, "_tensor_data_names: expected some of"),
        ("int4", {"_tensor_data_names": ["qdata", "scale"]}, "expected zero_point among them"),
        ("int8", {"block_size": [1, 0]}, r"block_size: expected \[outputs, inputs\] of a block, found \[1, 0\]"),
        ("int8", {"block_size": None}, "block_size: expected"),
        ("int8", {"block_size": [1, 24]}, "q_proj, 32 x 32: torchao's Int8Tensor: expected whole blocks of 1 x 24"),
        ("int4", {"target_dtype": "int4"}, "target_dtype: expected torch's int1 to int8"),
        ("int4", {"activation_quantization": "int4"}, "activation_quantization: expected int8_asym_per_token or null"),
        ("w8a8", {"act_quant_kwargs": {"_type": "Other"}}, "act_quant_kwargs: expected how activations are quantized"),
        ("mxfp4", {"block_size": 16}, "block_size: expected 32 "),
        (
            "mxfp4",
            {"elem_dtype": {"_type": "torch.dtype", "_data": "float6_e3m2"}},
            "elem_dtype: expected float8_e4m3fn",
        ),
        ("mxfp8", {"is_swizzled_scales": 1}, "is_swizzled_scales: expected true or false"),
        ("nvfp4", {"act_quant_kwargs": 3}, "act_quant_kwargs: expected how inputs are quantized, in blocks of 16"),
        (
            "nvfp4",
            {"act_quant_kwargs": None, "_tensor_data_names": ["qdata", "scale", "act_per_tensor_scale"]},
            "act_quant_kwargs: expected an object, beside act_per_tensor_scale",
        ),
        ("fp8_dynamic", {"act_quant_kwargs": 3}, "act_quant_kwargs: expected how activations are quantized"),
    ],
)
def test_a_header_that_is_not_read_is_named(name: str, changes: dict[str, Any], message: str, changed) -> None:
    with pytest.raises(ConfigError, match=rf"(q_proj|quantization_config).*{message}"):
        load_model(changed(name, header(**changes)))


def test_other_rules_for_scales_of_inputs_are_refused(changed) -> None:
    def change(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        metadata[f"{Q}.weight"] = metadata[f"{Q}.weight"].replace('"RCEIL"', '"FLOOR"')

    with pytest.raises(ConfigError, match=r"act_quant_kwargs.scaling_mode: expected RCEIL .*found .*FLOOR"):
        load_model(changed("mxfp8", change))


def test_activations_of_fewer_codes_are_refused(changed) -> None:
    def change(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        metadata[f"{Q}.weight"] = metadata[f"{Q}.weight"].replace('"reduce_range": false', '"reduce_range": true')

    with pytest.raises(ConfigError, match=r"reduce_range: expected false .*found True"):
        load_model(changed("w8a8", change))


def test_tensors_of_another_shape_dtype_or_none_are_named(changed) -> None:
    name = f"{Q}._weight_scale"
    with pytest.raises(CheckpointError, match=rf"{Q}: .*expected _weight_scale of shape \[32, 1\], found \[16, 1\]"):
        load_model(changed("int8", lambda tensors, _: tensors.update({name: tensors[name][:16].contiguous()})))
    with pytest.raises(CheckpointError, match=rf"{Q}: .*no _weight_zero_point"):
        load_model(changed("int4", lambda tensors, _: tensors.pop(f"{Q}._weight_zero_point")))
    with pytest.raises(CheckpointError, match=rf"tensor {Q}._weight_qdata: expected torch.float8_e4m3fn, found"):
        load_model(
            changed("fp8", lambda ts, _: ts.update({f"{Q}._weight_qdata": ts[f"{Q}._weight_qdata"].view(torch.int8)}))
        )
    with pytest.raises(CheckpointError, match=rf"tensor {name}: expected positive, finite scales"):
        load_model(changed("fp8_dynamic", lambda tensors, _: tensors[name].zero_()))


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    shutil.copy(HERE / "int8" / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin: .*found a pickle, which is not read.*safetensors"):
        load_model(tmp_path)


def test_files_without_torchao_s_headers_are_named(changed) -> None:
    with pytest.raises(ConfigError, match=r"config\.json says torchao; expected .*headers of model\.safetensors, foun"):
        load_model(changed("int8", lambda tensors, metadata: metadata.clear()))


def test_other_formats_say_when_the_tensors_are_torchao_s(changed) -> None:
    folder = changed("int8", lambda tensors, metadata: None)
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 8}
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"q_proj: .*these are torchao's; set quant_method"):
        load_model(folder)
