"""Models with a few inputs that stand out, as large language models have them (LLM.int8(), Dettmers et al. 2022), to
try methods on a model that has none of its own. The function stays the same.

A norm's weight is multiplied by a power of 2 in some channels, and what reads it is divided by it there. So every
product has the same terms as before, but the matrix has columns that are too small for the scales that they share, and
the activations have channels too large for theirs: plain rounding loses the former in 4 bits, and all other channels of
the latter in 8.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from reference_impl.core.decoder import DecoderLayer
from reference_impl.models.quantization.by_layer import Layers, kept_tensors, linears_of, part_rows
from reference_impl.models.quantization.folding import folds, matrix

BEHIND_NORMS = ("qkv_proj", "gate_up_proj")


@torch.inference_mode()
def plant(layer: DecoderLayer, channels: Sequence[int], exponent: int = 6) -> None:
    """Makes what both norms give 2^exponent times as large in `channels`, in place; the matrices after them make up for
    it. Raises ValueError for channels that are not there, and see `folds`."""
    size = layer.config.hidden_size
    if not channels or min(channels) < 0 or max(channels) >= size:
        raise ValueError(f"channels: expected numbers from 0 to {size - 1}, got {list(channels)}")
    found = folds(layer)
    for name in BEHIND_NORMS:
        s = torch.ones(size, dtype=matrix(found[name].linear).dtype)
        s[list(channels)] = 2.0**-exponent
        found[name].apply(s)


def plant_folder(source: Path, out: Path, channels: Sequence[int], exponent: int = 6) -> None:
    """Writes the model of folder `source` with the same outliers in all layers into the folder `out`, which is made. It
    keeps the checkpoint's dtype: multiplying by a power of 2 rounds nothing, short of its smallest numbers."""
    layers = Layers(source)
    dtype = getattr(torch, layers.config.dtype)
    out.mkdir()
    for file in source.iterdir():
        if file.is_file() and file.suffix in (".json", ".jinja", ".model") and "safetensors" not in file.name:
            shutil.copyfile(file, out / file.name)
    tensors = {name: layers.read(name) for name in layers.others()}
    for index in range(layers.config.num_layers):
        layer = layers.layer(index)
        plant(layer, channels, exponent)
        tensors |= {name: tensor.to(dtype) for name, tensor in kept_tensors(layer).items()}
        for linear in linears_of(layer):
            weight = matrix(linear)
            tensors |= {f"{name}.weight": weight[rows].to(dtype).contiguous() for name, rows in part_rows(linear)}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
