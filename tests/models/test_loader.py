"""A checkpoint that does not fit is refused: the error names file, tensor, what was expected and what was found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from reference_impl.assembly.config import ConfigError, EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.llm import LLM
from reference_impl.assembly.model import load_model
from reference_impl.interfaces import SamplingParams
from reference_impl.models.loader import CheckpointError

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(save) -> Path:
    return save("qwen2")[1]


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


KEY = "model.layers.1.self_attn.k_proj.weight"


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda t: t.pop(KEY))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: missing tensors: {KEY}"):
        load_model(folder)


def test_of_many_missing_tensors_some_are_named_and_all_are_counted(folder: Path) -> None:
    rewrite(folder, lambda t: [t.pop(name) for name in list(t) if name.endswith("bias")])
    with pytest.raises(CheckpointError, match=r"missing tensors: .*q_proj\.bias.* and 4 more"):
        load_model(folder)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (KEY, [16, 48]),
        ("model.embed_tokens.weight", [97, 48]),
        ("model.norm.weight", [48]),
        ("model.layers.0.self_attn.q_proj.bias", [48]),
        ("model.layers.2.mlp.down_proj.weight", [48, 80]),
    ],
)
def test_a_misshapen_tensor_is_named_with_both_shapes(folder: Path, name: str, expected: list[int]) -> None:
    found = [expected[0] + 1, *expected[1:]]
    rewrite(folder, lambda t: t.update({name: torch.zeros(found)}))
    with pytest.raises(CheckpointError) as error:
        load_model(folder)
    for part in ("model.safetensors", name, f"expected shape {expected}", f"found {found}"):
        assert part in str(error.value)


def test_a_transposed_tensor_is_not_taken_for_the_right_one(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({KEY: t[KEY].T.contiguous()}))
    with pytest.raises(CheckpointError, match=KEY):
        load_model(folder)


@pytest.mark.parametrize("extra", ["model.layers.3.mlp.up_proj.weight", "model.layers.0.self_attn.o_proj.bias", "x"])
def test_a_tensor_that_the_model_has_no_place_for_is_named(folder: Path, extra: str) -> None:
    rewrite(folder, lambda t: t.update({extra: torch.zeros(48)}))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor {extra} is not part of"):
        load_model(folder)


def test_a_stored_rotary_table_is_harmless(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    load_model(folder)


def test_a_tied_head_with_other_values_is_refused(save) -> None:
    folder = save("qwen2_tied")[1]
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: expected a copy of model\.embed_tokens\.weight"):
        load_model(folder)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float8_e4m3fn])
def test_weights_that_are_not_plain_floats_are_named(folder: Path, dtype: torch.dtype) -> None:
    rewrite(folder, lambda t: t.update({KEY: t[KEY].to(dtype)}))
    with pytest.raises(CheckpointError, match=rf"{KEY}: expected a float of 16, 32 or 64 bits, found {dtype}"):
        load_model(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_a_truncated_file_is_named(folder: Path, keep: float) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep) if 0 < keep < 1 else int(keep)])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a complete safetensors file"):
        load_model(folder)


def test_a_pointer_of_git_lfs_is_not_taken_for_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a complete safetensors file"):
        load_model(folder)


def test_a_folder_without_weights_says_so(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: no such file; expected weights as safetensors$"):
        load_model(folder)


def test_weights_in_bin_files_are_recognised_and_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"no such file; .*\.bin files: convert them"):
        load_model(folder)


def test_a_missing_shard_is_named(save) -> None:
    folder = save("qwen2", shard_size="40KB")[1]
    (folder / "model-00002-of-00007.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00007\.safetensors: no such file"):
        load_model(folder)


def test_a_truncated_shard_is_named(save) -> None:
    folder = save("qwen2", shard_size="40KB")[1]
    file = folder / "model-00003-of-00007.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model-00003-of-00007\.safetensors: not a complete"):
        load_model(folder)


def test_a_tensor_in_two_shards_is_named(save) -> None:
    folder = save("qwen2", shard_size="40KB")[1]
    files = sorted(folder.glob("*.safetensors"))
    last, first = load_file(files[-1]), load_file(files[0])
    name = next(iter(first))
    save_file({**last, name: first[name]}, files[-1], {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"model-00007-of-00007\.safetensors: tensor {name} came a second time"):
        load_model(folder)


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": ["b"]}}', "\xff"],
)
def test_a_broken_index_is_named(save, content: str) -> None:
    folder = save("qwen2", shard_size="40KB")[1]
    (folder / "model.safetensors.index.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json: (weight_map.* expected|not|expected)"):
        load_model(folder)


def test_a_single_file_wins_over_an_index_that_was_left_behind(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    load_model(folder)


@pytest.mark.parametrize("name", ["mistral", "qwen3"])
def test_a_sliding_window_model_is_served_beyond_its_window(save, name: str) -> None:
    llm = LLM(save(name, sliding_window=24, use_sliding_window=True, max_window_layers=0)[1])
    assert llm.engine.max_model_len == 256
    output = llm.generate([[5] * 20], SamplingParams(max_tokens=50, ignore_eos=True))[0]
    assert len(output.token_ids) == 50


def test_more_positions_than_the_model_has_are_refused(folder: Path) -> None:
    for make in (
        lambda: LLM(folder, max_model_len=257),
        lambda: Engine(load_model(folder), EngineConfig(max_model_len=257)),
    ):
        with pytest.raises(ConfigError, match="max_model_len 257 is above the model's 256 positions"):
            make()
    assert LLM(folder, max_model_len=256).engine.max_model_len == 256
    assert LLM(folder).engine.max_model_len == 256


@pytest.mark.parametrize("dtype", ["int8", "tensor", "fp32", "float8"])
def test_a_dtype_that_no_model_computes_in_is_refused(folder: Path, dtype: str) -> None:
    with pytest.raises(ValueError, match="dtype: expected one of float32, bfloat16, float16, float64, got"):
        LLM(folder, dtype)
