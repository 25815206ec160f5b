"""Checkpoints as embedding models are published: of the decoder alone, without lm_head, named without `model.`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from reference_impl.assembly.model import load_model
from reference_impl.models.config_json import parse_model_config
from reference_impl.models.config_reader import ConfigError
from reference_impl.models.loader import CheckpointError
from tests.models.test_parity import IDS
from tests.quantization.conftest import MakeFolder, make_folder  # noqa: F401

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"])
@pytest.mark.parametrize("kind", ["ForCausalLM", "Model"])
def test_names_without_model_are_those_of_the_decoder(
    architecture: str,
    kind: str,
    make_folder: MakeFolder,  # noqa: F811
    our_logits,
    edit,
) -> None:
    """Qwen3-Embedding says Qwen3ForCausalLM; others the class whose weights these are."""
    folder: Path = make_folder(architecture=architecture, **SIZES)
    expected = our_logits(load_model(folder, torch.float32), IDS)[0]
    tensors = load_file(folder / "model.safetensors")
    short = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if not name.startswith("lm_head")}
    save_file(short, folder / "model.safetensors", {"format": "pt"})
    edit(folder, architectures=[architecture.replace("ForCausalLM", kind)])
    assert torch.equal(our_logits(load_model(folder, torch.float32), IDS)[0], expected)
    short = {name: tensor.clone() for name, tensor in short.items()}
    save_file(short | tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"tensor model\.\S+ came a second time"):
        load_model(folder, torch.float32)


def test_a_model_that_looks_both_ways_is_refused(make_folder: MakeFolder) -> None:  # noqa: F811
    raw = json.loads((make_folder(architecture="Qwen2ForCausalLM", **SIZES) / "config.json").read_text())
    for field, value in (("is_causal", False), ("use_bidirectional_attention", True)):
        with pytest.raises(ConfigError, match=f"{field}: expected .*found {value}"):
            parse_model_config(raw | {"architectures": ["Qwen2Model"], field: value})
