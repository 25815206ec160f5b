"""A checkpoint a layer at a time, so that a model larger than memory can be worked on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from reference_impl.core.decoder import Decoder, DecoderLayer
from reference_impl.core.linear import Linear, UnquantizedLinear
from reference_impl.core.model_config import ModelConfig
from reference_impl.models.config_json import read_model_config
from reference_impl.models.decoders import kind_of
from reference_impl.models.loader import CheckpointError, layer_destinations, store_tensors, weight_files
from reference_impl.models.quantization.calibration import Rows
from reference_impl.models.quantization.recipes import Recipe
from reference_impl.models.quantization.scheme import Scheme
from reference_impl.models.sizes import check_sizes

CPU = torch.device("cpu")


class Layers:
    """The folder of a model that is not quantized. where: {tensor: its file}."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32):
        self.folder, self.dtype = folder, dtype
        self.config: ModelConfig = read_model_config(folder)
        self.files = weight_files(folder)
        check_sizes(self.config, folder, self.files, packed=False)
        self.where = {name: file for file in self.files for name in _names(file)}

    def read(self, name: str) -> Tensor:
        """A tensor as it is in its file."""
        if name not in self.where:
            raise CheckpointError(f"{self.folder}: missing tensor {name}")
        with safe_open(self.where[name], framework="pt") as handle:
            tensor: Tensor = handle.get_tensor(name)
        return tensor

    def layer(self, index: int) -> DecoderLayer:
        """A layer in `dtype`, with matrices that are not quantized."""
        layer = new_layer(self.config, index, self.dtype)
        table = layer_destinations(layer)
        tensors = ((self.where.get(name, self.folder), name, self.read(name)) for name in table)
        what = f"layer {index} of a {self.config.architecture}"
        store_tensors(table, tensors, str(self.folder), self.dtype, what)
        return layer

    def others(self) -> list[str]:
        """Names of the tensors that belong to no layer."""
        return [name for name in self.where if not name.startswith("model.layers.")]

    def front(self, tokens: Tensor) -> tuple[Decoder, Tensor]:
        """(a decoder without layers, whose embedding has the rows of these tokens alone; their numbers in it)."""
        used, ids = tokens.unique(return_inverse=True)
        if int(used[-1]) >= self.config.vocab_size:
            raise ValueError(f"calibration: expected token ids below {self.config.vocab_size:,}, got {int(used[-1]):,}")
        config = replace(self.config, num_layers=0, vocab_size=len(used), tied_embeddings=True)
        kind, layer = kind_of(config)
        decoder = kind(config, self.dtype, CPU, tokens.shape[1], None, layer)
        with safe_open(self.where["model.embed_tokens.weight"], framework="pt") as handle:
            rows = handle.get_slice("model.embed_tokens.weight")
            for place, token in enumerate(used.tolist()):
                decoder.embedding[place].copy_(rows[token : token + 1][0])
        decoder.config = self.config
        return decoder, ids

    def rows_before(self, index: int, tokens: Tensor) -> Rows:
        """Returns the calibration rows of tokens [rows, length] as they arrive at layer `index`."""
        rows = Rows.of(*self.front(tokens))
        for before in range(index):
            rows.advance(self.layer(before))
        return rows


def new_layer(config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device = CPU) -> DecoderLayer:
    """A layer with memory for its weights, not filled."""
    plain = UnquantizedLinear(dtype, device)
    return kind_of(config)[1](config, index, lambda name: plain, dtype, device)


def linears_of(layer: DecoderLayer) -> list[Linear]:
    """The layer's linear layers in the order in which it multiplies by them."""
    return [module for module in layer.modules() if isinstance(module, Linear)]


def part_rows(linear: Linear) -> Iterator[tuple[str, slice]]:
    """(the name of a part's tensors in the checkpoint without their last word, its rows)."""
    prefix = linear.name.rpartition(".")[0]
    for part, rows in linear.parts.items():
        start = linear.row_of(part)
        yield f"{prefix}.{part}", slice(start, start + rows)


def schemes_of(config: ModelConfig, recipe: Recipe) -> dict[str, Scheme]:
    """{the checkpoint's name of each matrix: its scheme}. ValueError where one does not fit; nothing is read for it."""
    found: dict[str, Scheme] = {}
    for index in range(config.num_layers):
        layer = new_layer(config, index, torch.float32, torch.device("meta"))
        for linear in linears_of(layer):
            scheme = recipe.scheme_of(linear.name, linear.in_features)
            found |= {name: scheme for name, _ in part_rows(linear)}
    if (head := recipe.head_scheme(config.hidden_size)) is not None:
        found["lm_head"] = head
    return found


def ignored(config: ModelConfig, head: bool = True) -> list[str]:
    """The checkpoint's names of matrices that are not quantized: embedding, output (but for head=False), routers of
    experts."""
    found = [*(["lm_head"] if head else []), "model.embed_tokens"]
    for index in range(config.num_layers):
        mlp = new_layer(config, index, torch.float32, torch.device("meta")).mlp
        found += [f"{mlp.prefix}{name}" for name in getattr(mlp, "tensors", dict)()]
    return found


def kept_tensors(layer: DecoderLayer) -> dict[str, Tensor]:
    """What a layer has besides its matrices, by the names of the checkpoint: norms as the checkpoint has them, biases,
    routers."""
    plus_one = int(layer.config.norm_plus_one)
    found = {}
    for name, tensor in layer.norms().items():
        one = tensor if tensor.dim() == 1 else tensor[0]
        found[f"model.layers.{layer.index}.{name}"] = one - plus_one
    for linear in linears_of(layer):
        if linear.has_bias:
            found |= {f"{name}.bias": linear.params["bias"][rows] for name, rows in part_rows(linear)}
    tensors = getattr(layer.mlp, "tensors", None)
    if tensors is not None:
        found |= {f"{layer.mlp.prefix}{name}.weight": tensor for name, tensor in tensors().items()}
    return {name: tensor.contiguous() for name, tensor in found.items()}


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as handle:
            return list(handle.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: not a complete safetensors file ({error}); download it again") from None
