"""Fills a Decoder from a Hugging Face folder of safetensors, one file or several.

Every tensor of the model must come exactly once, in the right shape; whatever else is in the files must
be known to be harmless. Errors name file, tensor, what was expected and what was found.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from reference_impl.config import ConfigError, ModelConfig, read_model_config
from reference_impl.interfaces import LinearMethod, TensorSpec
from reference_impl.layers.backend import Asked, Kernels, choose_kernels
from reference_impl.layers.linear import FLOATS, Linear, Methods
from reference_impl.layers.linear_methods import Quantizations, choose_methods
from reference_impl.memory import check_free, free_bytes
from reference_impl.models.decoder import Decoder, DecoderLayer
from reference_impl.models.fused_decoder import decoder_class
from reference_impl.models.moe import MixtureOfExperts, StackedExperts, expert_layers


class CheckpointError(ValueError):
    """A checkpoint that does not fit its config."""


Destination = tuple[TensorSpec, Callable[[Tensor], object]]  # what it must be, and where it goes


def load_model(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    max_position: int | None = None,
    kernels: Asked = "auto",
    quantization: Quantizations = "none",
    linear_method: LinearMethod | Methods | None = None,
) -> Decoder:
    """Reads config and weights. dtype None keeps the checkpoint's own; kernels: see `choose_backend`.

    quantization: how the linear layers' weights are stored; the checkpoint's are quantized as they are read. One for
    all layers, or a function from a layer's name (see `Linear`), also asked for "lm_head" (see `choose_head`).
    linear_method, instead: a method of your own, or a function from a layer's name to one. It may read a checkpoint
    that is quantized already, if it names its tensors (`NamesTensors`): config.json then may say quantization_config.
    """
    folder = Path(folder)
    config = read_model_config(folder, quantized=linear_method is not None)
    model = build_model(config, dtype, device, max_position, kernels, quantization, linear_method)
    fill(model, destinations(model), weight_files(folder))
    finish(model)
    return model


def build_model(
    config: ModelConfig,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    max_position: int | None = None,
    kernels: Asked = "auto",
    quantization: Quantizations = "none",
    linear_method: LinearMethod | Methods | None = None,
) -> Decoder:
    """A model with memory for its weights, which `destinations` and then `finish` fill. Options: see `load_model`.

    ConfigError if a CPU's machine has less memory than they take.
    """
    device, dtype = torch.device(device), dtype or getattr(torch, config.dtype)
    if max_position is not None and max_position > config.max_position:  # tables of that length would come first
        where = f"the model's {config.max_position} positions{config.reason_for_limit}"
        raise ConfigError(f"max_model_len {max_position} is above {where}")
    chosen = choose_kernels(kernels, device, dtype)
    _check_experts(config, chosen, quantization, linear_method)
    if linear_method is None:
        linear_method = choose_methods(quantization, dtype, device, chosen)
    elif quantization != "none":
        raise ValueError(f"expected quantization or linear_method, got both ({quantization!r}): leave one out")
    model = decoder_class(chosen)(config, dtype, device, max_position, linear_method, chosen)
    if device.type == "cpu":  # pages are committed when written, and then the system kills a process
        what = f"{model.num_parameters():,} weights"
        remedy = "use a smaller model, dtype='bfloat16', or quantization"
        check_free(model.num_bytes(), free_bytes(device), what, "this machine", remedy)
    return model


def _check_experts(
    config: ModelConfig, kernels: Kernels, quantization: Quantizations, linear_method: LinearMethod | Methods | None
) -> None:
    """ValueError where experts would have to be stored in a way that the kernel which multiplies them cannot read."""
    if config.experts is None or kernels.grouped_gemm is None:
        return
    what = "a mixture of experts with Triton's kernels"
    why = "since the kernel that multiplies experts takes weights in the model's dtype"
    if linear_method is not None:
        raise ValueError(f"linear_method for {what}: expected none, {why}: use kernels='torch'")
    if not callable(quantization):
        if quantization != "none":
            raise ValueError(
                f"quantization={quantization!r} for {what}: expected 'none', {why}: use quantization='none'"
            )
        return
    for name in expert_layers(config):
        if (kind := quantization(name)) != "none":
            raise ValueError(f"quantization({name!r}) is {kind!r}, for {what}: expected 'none', {why}")


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
    """Checkpoint name -> (what it must be, store) for every tensor that the model needs."""
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
        for linear in layer.modules():
            if isinstance(linear, Linear):
                table |= _parts(linear)
        if isinstance(layer.mlp, MixtureOfExperts):
            prefix = layer.mlp.prefix
            table[f"{prefix}gate.weight"] = _whole(layer.mlp.router)
            if isinstance(layer.mlp.experts, StackedExperts):
                for name, weight in layer.mlp.experts.parts():
                    table[f"{prefix}{name}.weight"] = _whole(weight)
    return table


def _norms(layer: DecoderLayer) -> dict[str, Tensor]:
    """Checkpoint name -> norm. Where outputs are normalised, post_attention_layernorm is another one than elsewhere."""
    outputs, q_norm, k_norm = layer.config.output_norms, layer.wide_q_norm, layer.wide_k_norm
    if layer.qk_norm is not None:  # one weight for all query heads, one for all key heads
        q_norm, k_norm = layer.qk_norm.split((layer.config.num_heads, layer.config.num_kv_heads))
    names = {
        "input_layernorm": layer.input_norm,
        "post_attention_layernorm": layer.attention_output_norm if outputs else layer.mlp_norm,
        "pre_feedforward_layernorm": layer.mlp_norm if outputs else None,
        "post_feedforward_layernorm": layer.mlp_output_norm,
        "self_attn.q_norm": q_norm,
        "self_attn.k_norm": k_norm,
    }
    return {name: weight for name, weight in names.items() if weight is not None}


def _parts(linear: Linear) -> dict[str, Destination]:
    prefix = linear.name.rpartition(".")[0]
    return {
        f"{prefix}.{part}.{name}": (spec, partial(linear.load, part, name))
        for part in linear.parts
        for name, spec in linear.tensors(part).items()
    }


def _whole(target: Tensor) -> Destination:
    return TensorSpec(tuple(target.shape), FLOATS), target.copy_


def _norm(target: Tensor, plus_one: bool) -> Destination:
    """One weight, for all heads if the target has a row for each. plus_one: what is kept is 1 + w."""

    def store(tensor: Tensor) -> None:
        target.copy_((tensor.to(target.dtype) + plus_one).expand_as(target))

    return TensorSpec((target.shape[-1],), FLOATS), store


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
        spec, store = table[name]
        _check(tensor, spec, f"{file}: tensor {name}")
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


def _check(tensor: Tensor, spec: TensorSpec, where: str) -> None:
    if tuple(tensor.shape) != tuple(spec.shape):
        raise CheckpointError(f"{where}: expected shape {list(spec.shape)}, found {list(tensor.shape)}")
    if tensor.dtype not in spec.dtypes:
        floats = tuple(spec.dtypes) == FLOATS
        expected = "a float of 16, 32 or 64 bits" if floats else " or ".join(map(str, spec.dtypes))
        raise CheckpointError(f"{where}: expected {expected}, found {tensor.dtype}")


def _tensors(files: list[Path]) -> Iterator[tuple[Path, str, Tensor]]:
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 (not a dict)
                    yield file, name, handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: not a complete safetensors file ({error}); download it again") from None
