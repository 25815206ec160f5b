"""Checkpoints of AutoGPTQ, GPTQModel and AutoAWQ: words worked out by hand, logits of the weights that codes stand for,
and errors that name a wrong or mixed-up form."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from reference_impl.assembly.config import ConfigError
from reference_impl.assembly.model import load_model
from reference_impl.assembly.stored_weights import layouts, paths_of
from reference_impl.models.checkpoints import quantization_of
from reference_impl.models.loader import CheckpointError
from reference_impl.models.quantization.auto_awq import Awq
from reference_impl.models.quantization.auto_gptq import Gptq
from reference_impl.models.quantization.stored import Stored
from tests.models.test_packed_checkpoints import AWQ_ORDER, packed
from tests.models.test_parity import IDS, worst
from tests.quantization.conftest import MakeFolder, as_stored, make_folder  # noqa: F401

FLOAT32 = torch.float32
SIZES = {
    "architecture": "LlamaForCausalLM", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256,
}  # fmt: skip
MATRICES = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}


def words(*numbers: int) -> Tensor:
    return torch.tensor([number - 2**32 * (number >= 2**31) for number in numbers], dtype=torch.int32)


def test_gptq_is_unpacked_as_worked_out_by_hand() -> None:
    """8 inputs, 8 outputs, groups of 4. Output 0 has the codes 0 to 7 for inputs 0 to 7, output 1 the codes 15 to 8,
    others 0. Group 0 has zero points 1, 2, ..., 8 (stored 0 to 7), scale 1/2; group 1 zero points 16 - 15 = 1 for
    output 0 and 0 (stored 15: 16 modulo 16) for output 1, scale 2."""
    tensors = {
        "qweight": words(0x76543210, 0x89ABCDEF, 0, 0, 0, 0, 0, 0)[None],
        "qzeros": words(0x76543210, 0x000000F0)[:, None],
        "scales": torch.tensor([[0.5] * 8, [2.0] * 8]).half(),
        "g_idx": torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]),
    }
    layout = Gptq(4, 4, symmetric=False, act_order=False, version=1)
    found = layout.weight(tensors, 8)
    assert found[0].tolist() == [-0.5, 0.0, 0.5, 1.0, 6.0, 8.0, 10.0, 12.0]
    assert found[1].tolist() == [6.5, 6.0, 5.5, 5.0, 22.0, 20.0, 18.0, 16.0]
    second = Gptq(4, 4, symmetric=False, act_order=False, version=2).weight(tensors, 8)
    assert second[0].tolist() == [0.0, 0.5, 1.0, 1.5, 8.0, 10.0, 12.0, 14.0]
    assert second[1, 4:].tolist() == [-8.0, -10.0, -12.0, -14.0]
    swapped = Gptq(4, 4, symmetric=False, act_order=True, version=1)
    tensors["g_idx"] = torch.tensor([1, 0, 1, 0, 1, 0, 1, 0])
    assert swapped.weight(tensors, 8)[0].tolist() == [-2.0, 0.0, 2.0, 1.0, 6.0, 2.0, 10.0, 3.0]


def test_gptq_of_8_bits_is_unpacked_as_worked_out_by_hand() -> None:
    """Four codes in a word: 0x80 = 128, 0xFF, 0x00, 0x7F; zero point 128, stored as 127."""
    tensors = {
        "qweight": words(0x7F00FF80, 0, 0, 0)[None],
        "qzeros": words(0x7F7F7F7F)[None],
        "scales": torch.ones(1, 4).half(),
        "g_idx": torch.zeros(4, dtype=torch.int32),
    }
    layout = Gptq(8, None, symmetric=True, act_order=False, version=1)
    layout.check("qzeros", tensors["qzeros"])
    assert layout.weight(tensors, 4).tolist() == [[0.0, 127.0, -128.0, -1.0], *([[-128.0] * 4] * 3)]


def test_gptq_of_3_bits_is_unpacked_as_worked_out_by_hand() -> None:
    """32 codes in three words. Bits 0 to 29 of the first are codes 0 to 9; code 10 has its low two bits there and its
    high one at the beginning of the second, and code 21 the low one there and two in the third (AutoGPTQ's
    qlinear_cuda_old.py packs 10 + 1 + 10 + 1 + 10)."""
    codes = [i % 8 for i in range(32)]
    codes[10], codes[21] = 6, 5  # 0b110 and 0b101, both cut
    first = sum(codes[i] << 3 * i for i in range(10)) | (0b10 << 30)
    second = 0b1 | sum(codes[11 + i] << (3 * i + 1) for i in range(10)) | (0b1 << 31)
    third = 0b10 | sum(codes[22 + i] << (3 * i + 2) for i in range(10))
    stream = sum(0b011 << 3 * i for i in range(32))  # zero points 4 of all 32 outputs, stored less one
    zeros = [stream >> 32 * word & 0xFFFFFFFF for word in range(3)]
    tensors = {
        "qweight": torch.cat((words(first, second, third)[:, None], torch.zeros(3, 31, dtype=torch.int32)), 1),
        "qzeros": words(*zeros)[None],
        "scales": torch.full((1, 32), 0.5).half(),
        "g_idx": torch.zeros(32, dtype=torch.int32),
    }
    layout = Gptq(3, None, symmetric=True, act_order=False, version=1)
    assert {name: spec.shape for name, spec in layout.specs(32, 32).items() if name in ("qweight", "qzeros")} == {
        "qweight": (3, 32), "qzeros": (1, 3),
    }  # fmt: skip
    layout.check("qzeros", tensors["qzeros"])
    assert layout.weight(tensors, 32)[0].tolist() == [(code - 4) / 2 for code in codes]
    assert layout.weight(tensors, 32)[1:].unique().tolist() == [-2.0]
    coded = layout.coded(tensors, 32)
    assert coded is not None
    assert coded.scheme.numbers == "int3"
    assert torch.equal(coded.weight(), layout.weight(tensors, 32))


def test_gptq_of_2_bits_is_unpacked_as_worked_out_by_hand() -> None:
    """Sixteen codes in a word: 3, 2, 1, 0 again and again; zero point 2, stored as 1."""
    tensors = {
        "qweight": torch.cat((words(0x1B1B1B1B)[:, None], torch.zeros(1, 15, dtype=torch.int32)), 1),
        "qzeros": words(0x55555555)[None],
        "scales": torch.ones(1, 16).half(),
        "g_idx": torch.zeros(16, dtype=torch.int32),
    }
    layout = Gptq(2, 16, symmetric=True, act_order=False, version=1)
    layout.check("qzeros", tensors["qzeros"])
    assert layout.weight(tensors, 16)[0].tolist() == [1.0, 0.0, -1.0, -2.0] * 4


def test_awq_is_unpacked_as_worked_out_by_hand() -> None:
    """One word a row: its 4 bits from the lowest up are outputs 0 2 4 6 1 3 5 7. Output o has code o at input 0, and
    code 8 at input 1; zero point 15 - o; scale 1/4."""
    tensors = {
        "qweight": words(0x75316420, 0x88888888)[:, None],
        "qzeros": words(0x8ACE9BDF)[None],
        "scales": torch.full((1, 8), 0.25).half(),
    }
    found = Awq(2).weight(tensors, 2)
    assert found[:, 0].tolist() == [(o - (15 - o)) / 4 for o in range(8)]
    assert found[:, 1].tolist() == [(8 - (15 - o)) / 4 for o in range(8)]


def quantized(raw: dict[str, Any], rows: int, columns: int, seed: int, groups: Tensor) -> tuple[dict, Tensor]:
    """(tensors of a part, the weight [rows, columns] that they stand for), packed number by number."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(16, (columns, rows), generator=random)
    zeros = torch.randint(1, 16, (int(groups.max()) + 1, rows), generator=random)
    if raw.get("sym"):
        zeros.fill_(8)
    scales = (torch.rand(zeros.shape, generator=random) * 0.04 + 0.01).half()
    weight = (scales.float()[groups] * (codes - zeros[groups])).T.contiguous()
    if raw["quant_method"] == "awq":
        return {"qweight": packed(codes, AWQ_ORDER), "qzeros": packed(zeros, AWQ_ORDER), "scales": scales}, weight
    less = 0 if raw.get("checkpoint_format") == "gptq_v2" else 1
    return {
        "qweight": packed(codes.T).T.contiguous(), "qzeros": packed(zeros - less), "scales": scales,
        "g_idx": groups.int(), "bias": torch.zeros(rows).half(),
    }, weight  # fmt: skip


@pytest.fixture
def written(make_folder: MakeFolder, edit) -> Callable[..., tuple[Path, Path]]:  # noqa: F811
    """written(quantization_config) -> (a folder in that form, one with the weights that its codes stand for)."""

    def write(raw: dict[str, Any], **sizes: Any) -> tuple[Path, Path]:
        folder = make_folder(**(SIZES | sizes))
        tensors = load_file(folder / "model.safetensors")
        plain, form = dict(tensors), dict(tensors)
        for seed, name in enumerate(name for name in tensors if name.endswith(MATRICES)):
            rows, columns = tensors[name].shape
            groups = torch.arange(columns) // (raw["group_size"] if raw["group_size"] > 0 else columns)
            if raw.get("desc_act"):
                groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(seed))]
            parts, plain[name] = quantized(raw, rows, columns, seed, groups)
            del form[name]
            form |= {name.removesuffix("weight") + word: tensor for word, tensor in parts.items()}
        other = folder.parent / f"{folder.name}-plain"
        other.mkdir()
        (other / "config.json").write_text((folder / "config.json").read_text())
        save_file(plain, other / "model.safetensors", {"format": "pt"})
        save_file(form, folder / "model.safetensors", {"format": "pt"})
        edit(folder, quantization_config=raw)
        return folder, other

    return write


@pytest.mark.parametrize(
    "raw",
    [
        GPTQ,
        GPTQ | {"desc_act": True, "checkpoint_format": "gptq"},
        GPTQ | {"sym": True, "checkpoint_format": "gptq_v2", "lm_head": False, "damp_percent": 0.01},
        GPTQ | {"group_size": -1, "pack_dtype": "int32"},
        AWQ,
        AWQ | {"group_size": -1, "version": "GEMM", "modules_to_not_convert": None},
    ],
    ids=["gptq", "act-order", "v2-sym", "one-group", "awq", "awq-one-group"],
)
def test_logits_are_those_of_the_weights_that_codes_stand_for(raw: dict[str, Any], written, our_logits) -> None:
    folder, plain = written(raw)
    model, expected = load_model(folder, FLOAT32), load_model(plain, FLOAT32)
    assert set(paths_of(model)) == {"decoded once"}
    assert worst(our_logits(model, IDS)[0], our_logits(expected, IDS)[0]) <= 1e-5
    model = load_model(folder, FLOAT32, linear_method=as_stored(folder))
    assert worst(our_logits(model, IDS)[0], our_logits(expected, IDS)[0]) <= 1e-5
    weights = sum(linear.in_features * linear.out_features for linear in model.linears())
    stored = sum(linear.weight_bytes() for linear in model.linears())
    groups = sum(
        linear.out_features * (linear.in_features // raw["group_size"] if raw["group_size"] > 0 else 1)
        for linear in model.linears()
    )
    g_idx = sum(4 * linear.in_features * len(linear.parts) for linear in model.linears())
    assert stored == weights / 2 + groups * 2.5 + (g_idx if raw["quant_method"] == "gptq" else 0)


def without_g_idx(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(".g_idx")}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    "raw",
    [GPTQ, GPTQ | {"group_size": -1}, GPTQ | {"group_size": 24}, GPTQ | {"group_size": -1, "desc_act": True}],
    ids=["groups", "one-group", "last-one-shorter", "one-group-in-act-order"],
)
def test_without_g_idx_the_group_of_input_i_is_i_by_group_size(raw: dict, written, our_logits, edit) -> None:
    """With a single group act-order changes nothing that g_idx could say."""
    folder, plain = written(raw)
    without_g_idx(folder)
    expected = our_logits(load_model(plain, FLOAT32), IDS)[0]
    assert worst(our_logits(load_model(folder, FLOAT32), IDS)[0], expected) <= 1e-5
    stored = load_model(folder, FLOAT32, linear_method=as_stored(folder))
    assert worst(our_logits(stored, IDS)[0], expected) <= 1e-5


def test_without_g_idx_act_order_is_refused_by_name(written) -> None:
    folder, _ = written(GPTQ | {"desc_act": True})
    without_g_idx(folder)
    with pytest.raises(CheckpointError, match=rf"{Q}: .*no g_idx.*with act-order \(desc_act true\) nothing else says"):
        load_model(folder)


@pytest.mark.parametrize("name", ["GPTQ", "Gptq"])
def test_quant_method_may_be_in_capitals(name: str, written, our_logits, edit) -> None:
    folder, plain = written(GPTQ)
    edit(folder, quantization_config=GPTQ | {"quant_method": name})
    found, expected = (our_logits(load_model(path, FLOAT32), IDS)[0] for path in (folder, plain))
    assert worst(found, expected) <= 1e-5


@pytest.mark.parametrize(
    ("name", "read"),
    [("AWQ", "awq"), ("Compressed_Tensors", "compressed-tensors"), ("FP8", "fp8"), ("Fbgemm_Fp8", "fbgemm_fp8")],
)
def test_quant_method_is_read_as_vllm_reads_it(name: str, read: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": name, "bits": 4}}))
    assert quantization_of(tmp_path) == {"quant_method": read, "bits": 4}


def test_awq_may_have_the_names_of_autoawqs_own_file(written, our_logits, edit) -> None:
    folder, plain = written(AWQ)
    own = {"quant_method": "awq", "w_bit": 4, "q_group_size": 16, "zero_point": True, "version": "GEMM"}
    edit(folder, quantization_config=own)
    model, expected = load_model(folder, FLOAT32), load_model(plain, FLOAT32)
    assert worst(our_logits(model, IDS)[0], our_logits(expected, IDS)[0]) <= 1e-5


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ({"architecture": "Phi3ForCausalLM"}, {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}),
        (
            {"architecture": "MixtralForCausalLM", "num_local_experts": 2, "sliding_window": None},
            {"q_proj", "k_proj", "v_proj", "o_proj", "w1", "w2", "w3"},
        ),
    ],
    ids=["phi3", "mixtral"],
)
def test_matrices_have_their_family_s_names(sizes: dict, parts: set[str], written, our_logits) -> None:
    """Phi-3's are joined in the checkpoint; Mixtral's experts have w1, w2 and w3."""
    folder, plain = written(GPTQ, **sizes)
    model, expected = load_model(folder, FLOAT32), load_model(plain, FLOAT32)
    methods = [linear.method for linear in model.linears()]
    assert {part for method in methods if isinstance(method, Stored) for part in method.layouts} == parts
    assert worst(our_logits(model, IDS)[0], our_logits(expected, IDS)[0]) <= 1e-5


def test_configs_say_which_layers_are_quantized_and_how() -> None:
    layer = "model.layers.{}.mlp.down_proj"
    layout = layouts(GPTQ | {"dynamic": {"-:.*\\.0\\.": {}, "+:.*\\.1\\.": {"bits": 8, "group_size": 32}}}, "c")
    assert [layout(layer.format(i)) for i in (0, 1, 2)] == [
        None, Gptq(8, 32, False, False, 1), Gptq(4, 16, False, False, 1),
    ]  # fmt: skip
    assert layout("lm_head") is None
    assert layouts(GPTQ | {"lm_head": True}, "c")("lm_head") is not None
    some = layouts(GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]}, "c")
    assert (some("model.layers.0.mlp.up_proj") is None, some(layer.format(0)) is None) == (False, True)
    awq = layouts(AWQ | {"modules_to_not_convert": ["layers.1"]}, "c")
    assert [awq(layer.format(i)) for i in (0, 1)] == [Awq(16), None]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (GPTQ | {"bits": 5}, r"quantization_config.bits: expected 2 or 3 or 4 or 8, found 5"),
        (GPTQ | {"group_size": 0}, "group_size: expected a number of inputs, or -1 for all, found 0"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format: expected gptq or gptq_v2.*found 'marlin'"),
        (GPTQ | {"desc_act": "no"}, "desc_act: expected true or false, found 'no'"),
        (GPTQ | {"dynamic": {"+:(": {}}}, "dynamic: expected a regular expression"),
        (GPTQ | {"dynamic": {"a": 4}}, "dynamic.a: expected an object, found 4"),
        (GPTQ | {"pack_dtype": "int8"}, "pack_dtype: expected int32, found 'int8'"),
        (AWQ | {"version": "gemv"}, "version: expected gemm.*found 'gemv'"),
        (AWQ | {"bits": 8}, "bits: expected 4, found 8"),
        (AWQ | {"zero_point": "no"}, "zero_point: expected true or false, found 'no'"),
        (AWQ | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert: expected a list of names"),
    ],
)
def test_a_form_that_is_not_read_is_named(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layouts(raw, "config.json")


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("stored", "said", "message"),
    [
        (AWQ, GPTQ, rf"{Q}: .*says Gptq.*expected qweight of shape.*of awq with 4 bits.*awq has no g_idx.*config.json"),
        (GPTQ, AWQ, rf"{Q}: .*says Awq.*expected qweight of shape \[32, 4\], found \[4, 32\].*of gptq with 4 bits"),
        (GPTQ, GPTQ | {"bits": 8}, r"expected qweight of shape \[8, 32\], found \[4, 32\].*of gptq with 4 bits"),
        (GPTQ, GPTQ | {"group_size": 32}, r"expected qzeros of shape \[1, 4\], found \[2, 4\]"),
        (AWQ, AWQ | {"group_size": 32}, r"expected qzeros of shape \[1, 4\], found \[2, 4\]"),
        (GPTQ, FP8, rf"{Q}: .*expected weight, weight_scale_inv, found .*these are of gptq with 4 bits"),
    ],
    ids=["awq as gptq", "gptq as awq", "bits", "group_size", "awq group_size", "gptq as fp8"],
)
def test_a_mixed_up_form_is_named(stored: dict, said: dict, message: str, written, edit) -> None:
    folder, _ = written(stored)
    edit(folder, quantization_config=said)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)


@pytest.mark.parametrize("raw", [GPTQ, AWQ], ids=["gptq", "awq"])
def test_a_quantized_checkpoint_without_quantization_config_says_what_to_put_there(raw: dict, written, edit) -> None:
    """As AutoGPTQ and AutoAWQ wrote them first: the config is in a file of its own."""
    folder, _ = written(raw)
    edit(folder, quantization_config=None)
    with pytest.raises(CheckpointError, match=r"quantize_config.json \(AutoGPTQ\) or quant_config.json \(Auto"):
        load_model(folder)


def test_tensors_that_cannot_be_are_named(written, edit) -> None:
    folder, _ = written(GPTQ | {"sym": True, "desc_act": True})
    file = folder / "model.safetensors"
    right = load_file(file)

    def error(raw: dict[str, Any], **changes: Tensor | None) -> str:
        tensors = right | {f"{Q}.{word}": tensor for word, tensor in changes.items() if tensor is not None}
        for word in (word for word, tensor in changes.items() if tensor is None):
            del tensors[f"{Q}.{word}"]
        save_file(tensors, file, {"format": "pt"})
        edit(folder, quantization_config=raw)
        with pytest.raises(ValueError, match=r"\S") as caught:
            load_model(folder)
        return str(caught.value)

    acts = GPTQ | {"sym": True, "desc_act": True}
    assert "g_idx: expected input // 16, since config.json says desc_act false" in error(acts | {"desc_act": False})
    said = error(acts | {"checkpoint_format": "gptq_v2"})
    assert "expected zero points 8, since config.json says sym, found 7" in said
    beyond = right[f"{Q}.g_idx"] + 1
    assert "g_idx: expected groups 0 to 1" in error(acts, g_idx=beyond)
    assert "q_proj.g_idx" not in (said := error(acts, g_idx=None))
    assert "(no g_idx)" in said
    assert "bias: expected zeros, since this layer has no bias" in error(acts, bias=torch.ones(32).half())
    scales = right[f"{Q}.scales"].clone()
    scales[1, 2] = math.inf
    assert "scales: expected finite numbers, found inf at [1, 2]" in error(acts, scales=scales)


def test_groups_that_do_not_divide_are_refused_or_shorter(written, our_logits) -> None:
    """awq has whole groups only; gptq's last one may be shorter."""
    with pytest.raises(ValueError, match="awq: expected inputs in multiples of group_size 24, and outputs of 8"):
        Awq(24).specs(64, 64)
    with pytest.raises(ValueError, match="gptq of 4 bits: expected inputs and outputs in multiples of 8"):
        Gptq(4, 16, True, False, 1).specs(100, 64)
    folder, plain = written(GPTQ | {"group_size": 24})
    found, expected = (our_logits(load_model(path, FLOAT32), IDS)[0] for path in (folder, plain))
    assert worst(found, expected) <= 1e-5


def test_a_matrix_that_a_form_cannot_hold_is_named(written, edit) -> None:
    folder, _ = written(AWQ)
    edit(folder, quantization_config=AWQ | {"group_size": 24})
    with pytest.raises(ConfigError, match=r"config.json: quantization_config: q_proj, 32 x 32: awq: expected inputs"):
        load_model(folder)
