"""Checkpoints of each format with something wrong in them, chosen by hypothesis: a tensor left out, under another name,
of another shape or dtype, scales that cannot be, any field of quantization_config. Each is one error that names the
file and, of tensors, the layer; or, where a field may be that as well, a model."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from reference_impl.assembly.model import load_model
from reference_impl.models.config_reader import ConfigError
from reference_impl.models.loader import CheckpointError
from reference_impl.models.quantization.quantize_folder import Job, quantize_folder
from tests.models.test_gptq_awq import AWQ, FP8, GPTQ
from tests.quantization.conftest import make_folder
from tests.quantization.test_quantize_folder import TOKENS, small

WRITTEN = ("rtn", "int4-zeros", "int3-zeros", "int8", "w8a8", "fp8-static", "fp8-block", "nvfp4-w4a4", "mxfp8")
TORCHAO = ("int4", "w8a8", "fp8_tensor", "int8_groups", "mxfp8", "mxfp4", "nvfp4")
PACKED = {"gptq": GPTQ, "gptq_v2": GPTQ | {"desc_act": True, "checkpoint_format": "gptq_v2"}, "awq": AWQ}
FORMS = (*WRITTEN, *(f"torchao {name}" for name in TORCHAO), *PACKED, "fp8")
SIZES = {"architecture": "LlamaForCausalLM", "vocab_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
DTYPES = (torch.float32, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool,
          torch.float8_e4m3fn, torch.float8_e5m2)  # fmt: skip
WORDS = ("weight", "weight_packed", "qweight", "weight_scale", "weight_scale_inv", "scales", "qzeros", "g_idx", "bias",
         "input_scale", "weight_zero_point", "_weight_qdata")  # fmt: skip
VALUES = (None, True, False, 0, 1, -1, 2, 3, 4, 8, 32, 128, 10**9, 1.5, "", "int4", "group", "channel", "tensor",
          "float", "dynamic", "local", "re:(", "torch.uint8", [], [1], ["Linear"], [[]], [None], [32, 32], {}, {"a": 1},
          )  # fmt: skip

Checkpoint = tuple[dict[str, Tensor], dict[str, Any], dict[str, str]]  # tensors, config.json, metadata


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """Whole ones, of one layer, by their form."""
    made: dict[str, Checkpoint] = {}
    base = tmp_path_factory.mktemp("fuzzed")
    source = make_folder._get_wrapped_function()(base)(**SIZES)
    for name in WRITTEN:
        quantize_folder(Job(source, base / name, small(name), TOKENS))
        made[name] = _read(base / name)
    for name in TORCHAO:
        made[f"torchao {name}"] = _read(Path(__file__).resolve().parent / "torchao_files" / name)
    plain, config, _ = _read(source)
    for name, raw in PACKED.items():
        made[name] = _replaced(plain, _awq if name == "awq" else _gptq), config | {"quantization_config": raw}, {}
    raw = FP8 | {"weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    made["fp8"] = _replaced(plain, _fp8), config | {"quantization_config": raw}, {}
    return made


def _read(folder: Path) -> Checkpoint:
    tensors, metadata = {}, {}
    for file in (file for file in folder.glob("*.safetensors") if file.name != "logits.safetensors"):
        tensors |= load_file(file)
        with safe_open(file, framework="pt") as handle:
            metadata |= handle.metadata() or {}
    return tensors, json.loads((folder / "config.json").read_text()), metadata


def _replaced(plain: dict[str, Tensor], form: Callable[[Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
    found = {name: tensor for name, tensor in plain.items() if "_proj" not in name}
    for name in plain.keys() - found.keys():
        found |= {name.removesuffix("weight") + word: tensor for word, tensor in form(plain[name]).items()}
    return found


def _gptq(weight: Tensor) -> dict[str, Tensor]:
    rows, columns = weight.shape
    return {
        "qweight": torch.arange(columns // 8 * rows).view(-1, rows).int() * 7919,
        "qzeros": torch.full((columns // 16, rows // 8), 0x77777777).int(),
        "scales": torch.full((columns // 16, rows), 0.02),
        "g_idx": torch.arange(columns).int() // 16,
    }


def _awq(weight: Tensor) -> dict[str, Tensor]:
    rows, columns = weight.shape
    return {
        "qweight": torch.arange(columns * rows // 8).view(columns, -1).int() * 7919,
        "qzeros": torch.full((columns // 16, rows // 8), 0x77777777).int(),
        "scales": torch.full((columns // 16, rows), 0.02),
    }


def _fp8(weight: Tensor) -> dict[str, Tensor]:
    scales = torch.full((math.ceil(len(weight) / 32), math.ceil(weight.shape[1] / 32)), 0.1)
    return {"weight": (weight * 10).to(torch.float8_e4m3fn), "weight_scale_inv": scales}


@pytest.fixture
def outcome(tmp_path: Path) -> Callable[..., str | None]:
    """outcome(checkpoint) -> the error that loading it ends with, or None."""

    def load(tensors: dict[str, Tensor], config: dict[str, Any], metadata: dict[str, str]) -> str | None:
        folder = tmp_path / "model"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors", metadata)
        (folder / "config.json").write_text(json.dumps(config))
        try:
            load_model(folder, torch.float32)
        except (ConfigError, CheckpointError) as error:  # any other fails the test
            found = str(error)
        else:
            return None
        assert str(folder) in found, "the file is not named"
        return found

    return load


def fuzzed(examples: int) -> Callable[..., Any]:
    """A fixture per example is not needed: each writes its folder anew."""
    return settings(
        max_examples=examples, deadline=None, derandomize=True, database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
    )  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_what_is_whole_is_loaded(form: str, checkpoints, outcome) -> None:
    assert outcome(*checkpoints[form]) is None


def _reshaped(tensor: Tensor, how: str) -> Tensor:
    bits = tensor.view(torch.uint8) if tensor.dtype is torch.float8_e4m3fn else tensor
    found = {
        "transposed": lambda: bits.T, "half": lambda: bits[: len(bits) // 2] if bits.dim() else bits[None],
        "a column": lambda: bits[..., :1], "flat": lambda: bits.flatten(), "a number": lambda: bits.flatten()[0],
        "nothing": lambda: bits.flatten()[:0], "deeper": lambda: bits[None, None],
    }[how]()  # fmt: skip
    return found.contiguous().view(tensor.dtype)


@pytest.mark.parametrize("form", FORMS)
def test_a_tensor_of_another_shape_or_name_or_none_is_named(form: str, checkpoints, outcome) -> None:
    tensors, config, metadata = checkpoints[form]
    names = sorted(name for name in tensors if "_proj" in name)
    shapes = ("transposed", "half", "a column", "flat", "a number", "nothing", "deeper")

    @fuzzed(8)
    @given(name=st.sampled_from(names), change=st.sampled_from(("left out", *shapes, *WORDS)))
    def check(name: str, change: str) -> None:
        assume(change != "left out" or not name.endswith("g_idx"))  # input i is of group i // group_size then
        changed, layer = dict(tensors), name.rpartition(".")[0]
        tensor = changed.pop(name)
        if change in shapes:
            assume(tensor.dim() > 0 or change != "a column")
            changed[name] = _reshaped(tensor, change)
            assume(changed[name].shape != tensor.shape)
        elif change != "left out":
            assume(f"{layer}.{change}" != name)
            changed[f"{layer}.{change}"] = tensor
        error = outcome(changed, config, metadata)
        assert error is not None, "it was loaded"
        assert layer in error

    check()


@pytest.mark.parametrize("form", FORMS)
def test_a_dtype_that_cannot_be_is_named(form: str, checkpoints, outcome) -> None:
    """A float of scales may be a wider or narrower one, and any integer of the same value be one of its own kind."""
    tensors, config, metadata = checkpoints[form]
    names = sorted(name for name in tensors if "_proj" in name)

    @fuzzed(8)
    @given(name=st.sampled_from(names), dtype=st.sampled_from(DTYPES))
    def check(name: str, dtype: torch.dtype) -> None:
        floats = {torch.float16, torch.bfloat16, torch.float32}
        before = tensors[name].dtype
        assume(not name.endswith("_zero_point") or dtype not in floats)  # torchao's may be floats
        assume(before != dtype and not {before, dtype} <= floats and not {before, dtype} <= {torch.int32, torch.int64})
        error = outcome(tensors | {name: tensors[name].float().to(dtype)}, config, metadata)
        assert error is not None, "it was loaded"
        assert name.rpartition(".")[0] in error

    check()


@pytest.mark.parametrize("form", [form for form in FORMS if "mxfp" not in form and form != "torchao nvfp4"])
def test_scales_that_cannot_be_are_named(form: str, checkpoints, outcome) -> None:
    """Those of MX are bytes, of which all but 255 stand for numbers; zeros fill torchao's tiles of NVFP4 up. Of weights
    in integers any finite number is one."""
    tensors, config, metadata = checkpoints[form]
    names = sorted(name for name, t in tensors.items() if "_proj" in name and "scale" in name and t.is_floating_point())
    values = st.sampled_from([0.0, -1.0, math.nan, math.inf])

    @fuzzed(4)
    @given(name=st.sampled_from(names), value=values, place=st.integers(0, 10_000))
    def check(name: str, value: float, place: int) -> None:
        scale = tensors[name].float().flatten().clone()
        scale[place % len(scale)] = value
        changed = scale.view(tensors[name].shape).to(tensors[name].dtype)
        error = outcome(tensors | {name: changed}, config, metadata)
        of_integers = "fp" not in form and "input" not in name and "act" not in name
        if of_integers and math.isfinite(value):
            assert error is None
            return
        assert error is not None, "it was loaded"
        assert name in error

    check()


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of all fields of an object, however deep."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, one in inside for place in ((*path, key), *_places(one, (*path, key)))]


@pytest.mark.parametrize("form", FORMS)
def test_any_field_of_the_config_may_be_anything(form: str, checkpoints, outcome) -> None:
    """Of torchao: any field of what a tensor's header says."""
    tensors, config, metadata = checkpoints[form]
    header = sorted(name for name in metadata if "q_proj" in name)
    raw = json.loads(metadata[header[0]]) if header else config["quantization_config"]

    @fuzzed(14)
    @given(place=st.sampled_from(_places(raw)), value=st.sampled_from((..., *VALUES)))
    def check(place: tuple[Any, ...], value: Any) -> None:
        changed = json.loads(json.dumps(raw))
        inside = changed
        for key in place[:-1]:
            inside = inside[key]
        if value is ...:
            del inside[place[-1]]
        else:
            inside[place[-1]] = value
        if header:
            outcome(tensors, config, metadata | {header[0]: json.dumps(changed)})
        else:
            outcome(tensors, config | {"quantization_config": changed}, metadata)

    check()


def test_a_matrix_s_shape_is_compared_with_what_the_file_says_of_it(checkpoints, outcome) -> None:
    tensors, config, metadata = checkpoints["rtn"]
    name = "model.layers.0.mlp.up_proj.weight_shape"
    error = outcome(tensors | {name: torch.tensor([96, 128])}, config, metadata)
    assert error is not None
    assert f"{name}: expected [96, 64], the matrix's [outputs, inputs], found [96, 128]" in error


def test_codes_that_are_no_numbers_are_named(checkpoints, outcome) -> None:
    for form, word in (("fp8", "weight"), ("fp8-static", "weight"), ("torchao fp8_tensor", "_weight_qdata")):
        tensors, config, metadata = checkpoints[form]
        name = f"model.layers.0.self_attn.q_proj.{word}"
        codes = tensors[name].view(torch.uint8).clone()
        codes[3, 5] = 0xFF
        error = outcome(tensors | {name: codes.view(torch.float8_e4m3fn)}, config, metadata)
        assert error is not None
        assert f"tensor {name}: expected finite floats of 8 bits, found 1 of {codes.numel()}" in error


def test_a_version_and_a_strategy_that_are_no_names_are_not_taken_for_none(checkpoints, outcome) -> None:
    tensors, config, metadata = checkpoints["gptq_v2"]
    for value in (0, False, "", []):
        changed = config | {"quantization_config": config["quantization_config"] | {"checkpoint_format": value}}
        assert "checkpoint_format: expected gptq or gptq_v2" in (outcome(tensors, changed, metadata) or "")
    tensors, config, metadata = checkpoints["fp8-block"]
    raw = json.loads(json.dumps(config["quantization_config"]))
    raw["config_groups"]["group_0"]["input_activations"]["strategy"] = []
    assert "input_activations: expected dynamic of a token, group or tensor" in (
        outcome(tensors, config | {"quantization_config": raw}, metadata) or ""
    )
