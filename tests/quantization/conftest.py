"""Small model folders with random weights, of any family that the engine knows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from reference_impl.assembly.stored_weights import stored_methods
from reference_impl.core.decoder import Decoder
from reference_impl.core.linear import UnquantizedLinear
from reference_impl.features.fusion.kernels import choose_kernels
from reference_impl.interfaces import LinearMethod
from reference_impl.models.config_json import parse_model_config, read_model_config
from reference_impl.models.decoders import kind_of
from reference_impl.models.loader import destinations
from reference_impl.models.quantization.stored import Stored

PLAIN = UnquantizedLinear(torch.float32, torch.device("cpu"))  # matrices that can be written to: no CPU packs them
MakeFolder = Callable[..., Path]


def as_stored(folder: Path) -> Callable[[str], LinearMethod]:
    """Methods that leave each layer as it lies in the folder: its codes and scales, decoded for each product."""
    device, dtype = torch.device("cpu"), torch.float32
    config = read_model_config(folder, quantized=True)
    methods = stored_methods(folder, config, dtype, device, choose_kernels("torch", device, dtype))
    assert callable(methods)

    def method(name: str) -> LinearMethod:
        found = methods(name)
        return Stored(found.layouts, dtype, device) if isinstance(found, Stored) else found

    return method


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """make_folder(name, **config fields): a Qwen3 with two layers, unless they say otherwise."""

    def make(name: str = "model", outliers: tuple[int, ...] = (), **changes: Any) -> Path:
        raw = {
            "architectures": [changes.pop("architecture", "Qwen3ForCausalLM")], "vocab_size": 61, "hidden_size": 64,
            "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "max_position_embeddings": 128, "dtype": "float32", "tie_word_embeddings": True,
            "rms_norm_eps": 1e-6, **changes,
        }  # fmt: skip
        raw = {name: value for name, value in raw.items() if value is not None}
        config = parse_model_config(raw)
        decoder, layer = kind_of(config)
        model: Decoder = decoder(config, torch.float32, torch.device("cpu"), 8, None, layer)
        random, tensors = torch.Generator().manual_seed(0), {}
        for tensor, (spec, _) in destinations(model).items():
            norm = len(spec.shape) == 1
            tensors[tensor] = torch.randn(spec.shape, generator=random) * (0.3 if norm else 0.15) + norm
            if norm and len(outliers) and "layernorm" in tensor:
                tensors[tensor][list(outliers)] *= 60
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(raw))
        save_file(tensors, folder / "model.safetensors")
        return folder

    return make
