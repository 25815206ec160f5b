"""Medusa heads (features/speculative/medusa.py) from a folder: config.json says architectures ["MedusaHeads"], the
target's hidden_size and vocab_size, num_heads, and torch_dtype. Tensors: heads.0.weight [hidden_size, hidden_size],
heads.0.bias [hidden_size], and so on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from reference_impl.assembly.linear_methods import choose_method
from reference_impl.core.linear import Linear
from reference_impl.features.fusion.kernels import choose_kernels
from reference_impl.features.speculative.medusa import MedusaConfig, MedusaHeads
from reference_impl.models.config_reader import ConfigError, Reader
from reference_impl.models.json_file import read_object, shown
from reference_impl.models.loader import part_tensors, store, weight_files

if TYPE_CHECKING:
    from reference_impl.features.fusion.kernels import Asked

ARCHITECTURE = "MedusaHeads"
_MOST_BYTES = 1 << 20
_MOST_HEADS = 64


def load_medusa_heads(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    max_position: int | None = None,
    kernels: Asked = "auto",
) -> MedusaHeads:
    """Arguments as of `load_model`; max_position is not used. ConfigError, CheckpointError where the folder does not
    fit."""
    folder, device = Path(folder), torch.device(device)
    path = folder / "config.json"
    raw = read_object(path, ConfigError, _MOST_BYTES)
    if raw.get("architectures") != [ARCHITECTURE]:
        raise ConfigError(
            f'{path}: expected the config of Medusa heads, architectures ["{ARCHITECTURE}"], found '
            f"{shown(raw.get('architectures'))}"
        )
    get = Reader(raw, str(path))
    config = MedusaConfig(get.integer("hidden_size"), get.integer("vocab_size"), get.integer("num_heads"))
    if config.num_heads > _MOST_HEADS:
        raise get.error("num_heads", f"at most {_MOST_HEADS}", config.num_heads)
    if dtype is None:
        names = ("float32", "float16", "bfloat16", "float64")
        dtype = getattr(torch, get.choice("torch_dtype", {name: name for name in names}, "float32"))
    method = choose_method("none", dtype, device, choose_kernels(kernels, device, dtype))
    size = config.hidden_size
    heads = Linear(method, size, {str(j): size for j in range(config.num_heads)}, True, "heads")
    table = {
        f"heads.{part}.{name}": (spec, lambda tensor, part=part, name=name: heads.load(part, name, tensor))
        for part in heads.parts
        for name, spec in part_tensors(heads, part).items()
    }
    store(table, weight_files(folder), dtype, f"{config.num_heads} Medusa heads with this config")
    method.finish(heads.params)
    return MedusaHeads(config, heads, dtype, device)
