"""Fills a Decoder from a Hugging Face folder of safetensors, one file or several.

Every tensor of the model must come exactly once, in the right shape; whatever else is in the files must
be known to be harmless. Errors name file, tensor, what was expected and what was found.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from reference_impl.config import ConfigError, ModelConfig, read_model_config
from reference_impl.layers.backend import Asked, choose_kernels
from reference_impl.layers.linear import Linear
from reference_impl.layers.linear_methods import Quantization, choose_method
from reference_impl.layers.mlp import GatedMLP
from reference_impl.memory import check_free, free_bytes
from reference_impl.models.decoder import Decoder, DecoderLayer
from reference_impl.models.moe import MixtureOfExperts, SeparateExperts, StackedExperts


class CheckpointError(ValueError):
    """A checkpoint that does not fit its config."""


Destination = tuple[tuple[int, ...], Callable[[Tensor], object]]  # expected shape, and where it goes


def load_model(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    max_position: int | None = None,
    kernels: Asked = "auto",
    quantization: Quantization = "none",
) -> Decoder:
    """Reads config and weights. dtype None keeps the checkpoint's own; kernels: see `choose_backend`.

    quantization: how the linear layers' weights are stored; the checkpoint's are quantized as they are read.
    """
    folder = Path(folder)
    model = build_model(read_model_config(folder), dtype, device, max_position, kernels, quantization)
    fill(model, destinations(model), weight_files(folder))
    finish(model)
    return model


def build_model(
    config: ModelConfig,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    max_position: int | None = None,
    kernels: Asked = "auto",
    quantization: Quantization = "none",
) -> Decoder:
    """A model with memory for its weights, which `destinations` and then `finish` fill. Options: see `load_model`.

    ConfigError if a CPU's machine has less memory than they take.
    """
    device, dtype = torch.device(device), dtype or getattr(torch, config.dtype)
    if max_position is not None and max_position > config.max_position:  # tables of that length would come first
        raise ConfigError(f"max_model_len {max_position} is above the model's {config.max_position} positions")
    chosen = choose_kernels(kernels, device, dtype)
    if quantization != "none" and config.experts is not None and chosen.grouped_gemm is not None:
        raise ValueError(
            f"quantization={quantization!r} for a mixture of experts with Triton's kernels: expected 'none', since the "
            f"kernel that multiplies experts takes weights in the model's dtype: use quantization='none'"
        )
    model = Decoder(config, dtype, device, max_position, choose_method(quantization, dtype, device, chosen), chosen)
    if device.type == "cpu":  # its memory is there only when it is written to, and then the system ends somebody
        what = f"{model.num_parameters():,} weights"
        remedy = "use a smaller model, dtype='bfloat16', or quantization"
        check_free(model.num_bytes(), free_bytes(device), what, "this machine", remedy)
    return model


def finish(model: Decoder) -> None:
    """All weights are there: each linear layer may bring them into the form that it computes with."""
    for linear in model.linears():
        linear.method.finish(linear.params)


def weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or else the shards that model.safetensors.index.json names."""
    files, index = [folder / "model.safetensors"], folder / "model.safetensors.index.json"
    if index.is_file() and not files[0].is_file():
        try:
            names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
            files = [folder / name for name in sorted(names)]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index}: expected an object with a weight_map of file names; {error!r}") from None
    for file in files:
        if not file.is_file():
            hint = " (this folder has PyTorch .bin files: convert them)" if list(folder.glob("*.bin")) else ""
            raise CheckpointError(f"{file}: no such file; expected weights as safetensors{hint}")
    return files


def destinations(model: Decoder) -> dict[str, Destination]:
    """Checkpoint name -> (shape, store) for every tensor that the model needs."""
    plus_one = model.config.norm_plus_one
    table: dict[str, Destination] = {
        "model.embed_tokens.weight": _whole(model.embedding),
        "model.norm.weight": _norm(model.norm, plus_one),
    }
    if model.lm_head is not None:
        table["lm_head.weight"] = _whole(model.lm_head)
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        prefix = f"model.layers.{layer.index}."
        for name, weight in _norms(layer).items():
            table[f"{prefix}{name}.weight"] = _norm(weight, plus_one)
        for where, linear in _linears(layer):
            for part in linear.parts:
                for name in linear.params:
                    table[f"{prefix}{where}{part}.{name}"] = _rows(linear, part, name)
        if isinstance(layer.mlp, MixtureOfExperts):
            table[f"{prefix}{_experts_prefix(layer)}gate.weight"] = _whole(layer.mlp.router)
            if isinstance(layer.mlp.experts, StackedExperts):
                for name, weight in layer.mlp.experts.parts():
                    table[f"{prefix}{_experts_prefix(layer)}experts.{name}.weight"] = _whole(weight)
    return table


def _norms(layer: DecoderLayer) -> dict[str, Tensor]:
    """Checkpoint name -> norm. In families with four, post_attention_layernorm is another one than with two."""
    names = {"input_layernorm": layer.input_norm}
    if layer.attention_output_norm is None or layer.mlp_output_norm is None:
        names["post_attention_layernorm"] = layer.mlp_norm
    else:
        names["post_attention_layernorm"] = layer.attention_output_norm
        names["pre_feedforward_layernorm"] = layer.mlp_norm
        names["post_feedforward_layernorm"] = layer.mlp_output_norm
    if layer.qk_norm is not None:  # one weight for all query heads, one for all key heads
        heads = layer.config.num_heads
        names["self_attn.q_norm"], names["self_attn.k_norm"] = layer.qk_norm[:heads], layer.qk_norm[heads:]
    return names


def _linears(layer: DecoderLayer) -> Iterator[tuple[str, Linear]]:
    """(prefix in the checkpoint, linear layer)."""
    yield from (("self_attn.", layer.qkv), ("self_attn.", layer.o))
    mlps = {"mlp.": layer.mlp}
    if isinstance(layer.mlp, MixtureOfExperts):
        separate = layer.mlp.experts if isinstance(layer.mlp.experts, SeparateExperts) else ()
        mlps = {f"{_experts_prefix(layer)}experts.{e}.": mlp for e, mlp in enumerate(separate)}
    for where, mlp in mlps.items():
        assert isinstance(mlp, GatedMLP)
        yield from ((where, mlp.gate_up), (where, mlp.down))


def _experts_prefix(layer: DecoderLayer) -> str:
    return "block_sparse_moe." if layer.config.architecture == "MixtralForCausalLM" else "mlp."


def _whole(target: Tensor) -> Destination:
    return tuple(target.shape), target.copy_


def _norm(target: Tensor, plus_one: bool) -> Destination:
    """One weight, for all heads if the target has a row for each. plus_one: what is kept is 1 + w."""

    def store(tensor: Tensor) -> None:
        target.copy_((tensor.to(target.dtype) + plus_one).expand_as(target))

    return (target.shape[-1],), store


def _rows(linear: Linear, part: str, name: str) -> Destination:
    rows, start = linear.parts[part], linear.row_of(part)
    shape = (rows, linear.in_features) if name == "weight" else (rows,)
    return shape, lambda tensor: linear.method.load(linear.params, name, tensor, start)


def fill(model: Decoder, table: dict[str, Destination], files: list[Path]) -> None:
    missing = dict.fromkeys(table)
    head = None
    for file, name, tensor in _tensors(files):
        if name == "lm_head.weight" and model.lm_head is None:
            head = tensor  # tied, and stored once more
            continue
        if name not in table:
            if name.endswith("rotary_emb.inv_freq"):  # older checkpoints stored it; it is computed
                continue
            raise CheckpointError(
                f"{file}: tensor {name} is not part of a {model.config.architecture} with this config"
            )
        if name not in missing:
            raise CheckpointError(f"{file}: tensor {name} came a second time")
        shape, store = table[name]
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{file}: tensor {name}: expected shape {list(shape)}, found {list(tensor.shape)}")
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise CheckpointError(f"{file}: tensor {name}: expected a float of 16, 32 or 64 bits, found {tensor.dtype}")
        store(tensor)
        del missing[name]
    if missing:
        names = ", ".join(list(missing)[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise CheckpointError(f"{', '.join(map(str, files))}: missing tensors: {names}")
    if head is not None and not torch.equal(head.to(model.embedding), model.embedding):
        raise CheckpointError(
            f"{', '.join(map(str, files))}: tensor lm_head.weight: expected a copy of model.embed_tokens.weight, since "
            "config.json says tie_word_embeddings; found other values"
        )


def _tensors(files: list[Path]) -> Iterator[tuple[Path, str, Tensor]]:
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 (not a dict)
                    yield file, name, handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: not a complete safetensors file ({error}); download it again") from None
