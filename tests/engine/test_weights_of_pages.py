"""Weights are part of a page's identity: engines share pages if their checkpoints are the same, and only then."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from reference_impl.assembly.config import EngineConfig, course_model
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.model import load_model
from reference_impl.assembly.parts import Parts
from reference_impl.core.decoder import Decoder
from reference_impl.core.linear import UnquantizedLinear
from reference_impl.features.cpu.operators import PackedLinear, available
from reference_impl.features.transfer.folder import FolderStore
from reference_impl.interfaces import SamplingParams
from reference_impl.models import identity
from reference_impl.models.identity import Checkpoint, stored_hash, stored_tensors, weights_of
from reference_impl.models.loader import CheckpointError

PROMPT = list(range(1, 30))
CONFIG = EngineConfig(block_size=4, num_blocks=24)


def answer(engine: Engine) -> tuple[list[int], int]:
    request = engine.add(PROMPT, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    while engine.has_work():
        engine.step()
    engine.close()
    return request.output_tokens, request.num_cached_tokens


def changed_copy(folder: Path, at: Path) -> Path:
    """Of the same shape, one matrix of the first layer the other way up."""
    shutil.copytree(folder, at)
    tensors = load_file(at / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.weight"] = -tensors["model.layers.0.self_attn.k_proj.weight"]
    save_file(tensors, at / "model.safetensors")
    return at


def test_engines_with_other_weights_of_one_shape_share_no_pages(tmp_path: Path) -> None:
    folder = course_model("draft")
    other = changed_copy(folder, tmp_path / "other")

    def run(model: Path, store: str | None, **options: Any) -> tuple[list[int], int]:
        parts = Parts(page_store=FolderStore(tmp_path / store, timeout=600.0)) if store else Parts()
        return answer(Engine(load_model(model, torch.float32, **options), CONFIG, parts))

    right = run(other, None)[0]
    assert run(folder, "pages")[1] == 0
    assert run(other, "pages") == (right, 0)
    assert run(other, "pages") == (right, 28)
    assert run(folder, "pages")[1] == 28
    assert run(folder, "pages", quantization="int8")[1] == 0
    assert run(folder, "pages", quantization=lambda name: "int4" if "mlp" in name else "none")[1] == 0


def test_a_checkpoint_is_the_same_in_one_file_and_in_shards_and_read_in_any_order(tmp_path: Path, monkeypatch) -> None:
    tensors = {
        "b": torch.arange(300.0),
        "a": torch.arange(1000.0).view(10, 100),
        "c": torch.zeros(0),
        "d": torch.ones(1),
    }
    names = {"whole": ["a", "b", "c", "d"], "turned": ["d", "c", "b", "a"]}
    for kind, order in names.items():
        (tmp_path / kind).mkdir()
        save_file({name: tensors[name] for name in order}, tmp_path / kind / "model.safetensors", {"format": kind})
    (tmp_path / "shards").mkdir()
    save_file({"a": tensors["a"], "d": tensors["d"]}, tmp_path / "shards" / "2.safetensors")
    save_file({"b": tensors["b"], "c": tensors["c"]}, tmp_path / "shards" / "1.safetensors")
    index = '{"weight_map": {"a": "2.safetensors", "b": "1.safetensors"}}'
    (tmp_path / "shards" / "model.safetensors.index.json").write_text(index)
    monkeypatch.setattr(identity, "CHUNK", 256)
    reads = list[tuple[str, int]]()
    read = identity._chunk
    monkeypatch.setattr(identity, "_chunk", lambda one, at: reads.append((one.name, at)) or read(one, at))
    assert len({Checkpoint(tmp_path / kind).weights for kind in ("whole", "turned", "shards")}) == 1
    assert len(reads) == 3 * (16 + 5 + 1 + 1)  # 4000, 1200, 0 and 4 bytes in chunks of 256
    assert {reads.count(one) for one in reads} == {3}


@pytest.mark.parametrize("change", ["name", "dtype", "shape", "order", "last byte", "swapped"])
def test_whatever_differs_in_a_checkpoint_gives_another_hash(change: str, tmp_path: Path) -> None:
    tensors = {"a": torch.arange(8).view(torch.uint8).view(8, 8), "b": torch.ones(8, 8, dtype=torch.uint8)}
    other = dict(tensors)
    if change == "name":
        other["c"] = other.pop("b")
    if change == "dtype":
        other["a"] = other["a"].view(torch.int8)
    if change == "shape":
        other["a"] = other["a"].view(4, 16)
    if change == "order":
        other["a"] = other["a"].flip(0).contiguous()
    if change == "last byte":
        other["a"] = other["a"].clone()
        other["a"][-1, -1] = 1
    if change == "swapped":
        other = {"a": tensors["b"], "b": tensors["a"]}
    found = set[str]()
    for number, one in enumerate((tensors, other)):
        (tmp_path / str(number)).mkdir()
        save_file(one, tmp_path / str(number) / "model.safetensors")
        found.add(stored_hash(stored_tensors(tmp_path / str(number))))
    assert len(found) == 2


@pytest.mark.parametrize("change", ["quantization_config", "compression_config", "headers"])
def test_the_same_codes_said_to_be_stored_otherwise_give_another_hash(change: str, tmp_path: Path) -> None:
    """Zero points of GPTQ's version 1 are one less than those of version 2: the files say the same."""
    found = set[str]()
    for number, version in enumerate(("gptq", "gptq_v2")):
        folder = tmp_path / str(number)
        folder.mkdir()
        field, form = ("quantization_config", "gptq") if change == "headers" else (change, version)
        (folder / "config.json").write_text(json.dumps({field: {"bits": 4, "checkpoint_format": form}}))
        said = {"a": version} if change == "headers" else None
        save_file({"a": torch.ones(4)}, folder / "model.safetensors", said)
        found.add(Checkpoint(folder).weights)
        (folder / "config.json").write_text(json.dumps({field: {"checkpoint_format": form, "bits": 4}}))
        found.add(Checkpoint(folder).weights)
    assert len(found) == 2


def test_packed_weights_have_the_hash_of_their_numbers() -> None:
    """A CPU with AVX-512 packs float32, one with AVX2 large weights of it."""
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    params = {"weight": weight.clone()}
    if available(torch.float32):
        PackedLinear(torch.float32).finish(params)
    assert bytes(identity._bytes(params["weight"])) == bytes(identity._bytes(weight))


def test_a_model_without_a_checkpoint_hashes_its_tensors(random_model) -> None:
    model: Decoder = random_model("float64", num_hidden_layers=1)
    assert model.checkpoint is None
    before = weights_of(model)
    for tensor in (model.norm, model.layers[0].qkv.params["weight"], model.layers[0].qk_norm, model.embedding):
        tensor.view(-1)[-1] += 1
        changed = weights_of(model)
        tensor.view(-1)[-1] -= 1
        assert changed != before
    own = load_model(course_model("draft"), torch.float32, linear_method=UnquantizedLinear(torch.float32, "cpu"))
    assert own.checkpoint is None  # what a method of one's own makes of weights, no name says


def test_a_checkpoint_that_is_cut_off_is_an_error_and_no_identity(tmp_path: Path) -> None:
    save_file({"a": torch.ones(100)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    for length, says in ((len(whole) - 1, "has become shorter"), (20, "not a complete"), (3, "not a complete")):
        (tmp_path / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=says):
            _ = Checkpoint(tmp_path).weights
