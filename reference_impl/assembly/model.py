"""A whole model of its family, with kernels for its device, and linear layers stored and multiplied as asked."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from reference_impl.assembly.linear_methods import (
    Quantizations,
    choose_head,
    choose_methods,
    is_stored,
    methods_of,
    what_is_made,
)
from reference_impl.core.decoder import Decoder
from reference_impl.core.linear import Methods
from reference_impl.core.model_config import ModelConfig
from reference_impl.features.cpu.operators import use_norm_of_few
from reference_impl.features.fusion.kernels import Asked, Kernels, choose_kernels
from reference_impl.features.sizing.memory import check_free, free_bytes
from reference_impl.interfaces import LinearMethod
from reference_impl.models.checkpoints import Checkpoint, is_gguf, is_quantized
from reference_impl.models.config_json import read_model_config
from reference_impl.models.config_reader import ConfigError
from reference_impl.models.config_rope import reason_for_limit
from reference_impl.models.decoders import kind_of
from reference_impl.models.loader import (
    Destination,
    NoHead,
    cache_scales,
    destinations,
    fill,
    finish,
    lacks_head,
    store_tensors,
    weight_files,
)
from reference_impl.models.quantization.head import all_linears, decoded_embedding, use_stored_head
from reference_impl.models.sizes import check_sizes

if TYPE_CHECKING:
    from reference_impl.features.parallel.model import ModelPart
    from reference_impl.models.quantization.layouts import Layout

CPU = torch.device("cpu")
logger = logging.getLogger("inferlab.engine")
ROTARY_BYTES = 44  # for each value of a head and position while a RotaryTable is made, most of them in float64


def load_model(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    max_position: int | None = None,
    kernels: Asked = "auto",
    quantization: Quantizations = "none",
    linear_method: LinearMethod | Methods | None = None,
    rank: ModelPart | None = None,
) -> Decoder:
    """Loads a model from a Hugging Face folder or a GGUF file: reads its config and weights. dtype None keeps the
    checkpoint's own; kernels: see `choose_backend`.

    quantization: how the linear layers' weights are stored; the checkpoint's are quantized as they are read. One for
    all layers, or a function from a layer's name (see `Linear`), also asked for "lm_head" (see `choose_head`).
    linear_method, instead: a method of your own, or a function from a layer's name to one. It may read a checkpoint
    that is quantized already, if it names its tensors (`NamesTensors`): config.json then may say quantization_config.
    With neither, a checkpoint that config.json says is quantized (compressed-tensors, FP8, GPTQ, AWQ, ...) keeps its
    weights' values; `stored_weights.py` says how it is multiplied, and a line of the log (INFO) which way was taken.
    rank: which part of the model is loaded, and how it meets the parts of the other ranks.
    """
    again = partial(
        _loaded, dtype=dtype, device=device, max_position=max_position, kernels=kernels, quantization=quantization,
        linear_method=linear_method, rank=rank,
    )  # fmt: skip
    model = again(Path(folder))
    model.load_again = partial(again, dtype=model.dtype)
    if rank is not None:
        rank.join(model)
    return model


def _loaded(
    folder: Path,
    dtype: torch.dtype | None,
    device: torch.device | str,
    max_position: int | None,
    kernels: Asked,
    quantization: Quantizations,
    linear_method: LinearMethod | Methods | None,
    rank: ModelPart | None,
) -> Decoder:
    """`load_model`, of a rank its part alone, which has not joined the others."""
    own_method = linear_method is not None
    if is_gguf(folder):
        if rank is not None:
            raise ConfigError(f"{folder}: a GGUF file is not divided among ranks: use one")
        return _load_gguf(folder, dtype, device, max_position, kernels, quantization, linear_method)
    own = linear_method is None and quantization == "none"
    config = read_model_config(folder, quantized=own or linear_method is not None)
    if rank is not None:
        config = rank.config_of(config)
    if own:
        device, dtype = torch.device(device), dtype or getattr(torch, config.dtype)
        chosen = choose_kernels(kernels, device, dtype)
        if is_quantized(folder):
            from reference_impl.assembly.stored_weights import stored_methods

            linear_method = stored_methods(folder, config, dtype, device, chosen, free_bytes(device))
    files = weight_files(folder)
    check_sizes(config.whole, folder, files, packed=linear_method is not None)

    def built(config: ModelConfig, device: torch.device | str) -> tuple[Decoder, dict[str, Destination]]:
        model = build_model(config, dtype, device, max_position, kernels, quantization, linear_method)
        if rank is not None:
            rank.shrink(model)
        if lacks_head(folder, config.tied_embeddings):
            NoHead(model)
        return model, _table(model, folder)

    try:
        model, table = built(config, device)
    except ValueError as wrong:
        if rank is None:
            raise
        raise rank.refusal(wrong, lambda part: built(part, "meta")) from None
    others = cache_scales(model)
    if linear_method is not None:
        from reference_impl.assembly.stored_weights import spare_tensors

        table, others = _checked(model, table, folder, own, rank is None), others | spare_tensors(model)
    if rank is not None:
        table, cuts = rank.cut(model, table)
        fill(model, table, files, others, cuts, rank.leaves)
    else:
        fill(model, table, files, others)
    if not own_method:  # else nothing says what it makes of the weights
        model.checkpoint = Checkpoint(folder, what_is_made(quantization, config))
    return _finished(model, folder, kernels)


def _checked(
    model: Decoder, table: dict[str, Destination], folder: Path, own: bool, is_whole: bool
) -> dict[str, Destination]:
    """The table of a checkpoint whose linear layers may be stored otherwise. CheckpointError or ConfigError where its
    files and its config contradict each other. is_whole: not a rank's part, whose layers have other shapes than the
    files."""
    from reference_impl.assembly.stored_weights import embedding_layout
    from reference_impl.models.quantization.mixed_up import check_forms, check_tied

    files = weight_files(folder)
    if own and (layout := embedding_layout(folder)) is not None:
        if not is_whole:
            raise ConfigError(f"{folder}: an embedding that comes quantized is not divided: use tensor_parallel_size=1")
        table = table | _embedding(model, layout, table, folder)
    if own and model.config.tied_embeddings:
        check_tied(files, folder / "config.json")
    if is_whole:
        check_forms(all_linears(model), files)
    return table


def _load_gguf(
    path: Path,
    dtype: torch.dtype | None,
    device: torch.device | str,
    max_position: int | None,
    kernels: Asked,
    quantization: Quantizations,
    linear_method: LinearMethod | Methods | None,
) -> Decoder:
    """`load_model` for a GGUF file, whose linear layers are kept as they are stored."""
    from reference_impl.assembly.stored_weights import methods_of_layouts
    from reference_impl.models.gguf_file import GgufFile
    from reference_impl.models.gguf_model import gguf_config, gguf_layouts, gguf_tensors

    if quantization != "none" or linear_method is not None:
        raise ConfigError(
            f"{path}: expected neither quantization nor linear_method for a GGUF file, whose tensors say how they are "
            "stored: leave them out, or start from the model that the file was made of"
        )
    file = GgufFile(path)
    config, device = gguf_config(file), torch.device(device)
    check_sizes(config, path, [path], packed=True)
    dtype = dtype or getattr(torch, config.dtype)
    chosen, free = choose_kernels(kernels, device, dtype), free_bytes(device)
    methods = methods_of_layouts(gguf_layouts(file), config, dtype, device, chosen, free)
    model = build_model(config, dtype, device, max_position, kernels, linear_method=methods)
    what = f"a {config.architecture} with this metadata"
    store_tensors(_table(model, path), gguf_tensors(file, config), str(path), model.dtype, what)
    model.checkpoint = Checkpoint(path)
    return _finished(model, path, kernels)


def _finished(model: Decoder, path: Path, kernels: Asked) -> Decoder:
    finish(model)
    if kernels == "compiled":
        from reference_impl.assembly.compiled import compile_one_row

        compile_one_row(model)
    if any(is_stored(linear.method) for linear in all_linears(model)):
        from reference_impl.assembly.stored_weights import paths_of

        found = paths_of(model)
        logger.info("%s: quantized linear layers: %s", path, ", ".join(f"{n} {way}" for way, n in found.items()))
    return model


def _table(model: Decoder, folder: Path) -> dict[str, Destination]:
    try:
        return destinations(model)
    except ValueError as wrong:  # a layout that has no room for one of the matrices
        where = folder if is_gguf(folder) else f"{folder / 'config.json'}: quantization_config"
        where = f"{where}, a rank's part" if model.config.shard_of is not None else where
        raise ConfigError(f"{where}: {wrong}") from None


def _embedding(model: Decoder, layout: Layout, table: dict[str, Destination], folder: Path) -> dict[str, Destination]:
    """The tensors of an embedding that comes quantized; the plain one is removed from the table."""
    name = "model.embed_tokens"
    del table[f"{name}.weight"]
    try:
        found = decoded_embedding(layout, model.embedding)
    except ValueError as wrong:
        raise ConfigError(f"{folder}: {name}, {list(model.embedding.shape)}: {wrong}") from None
    return {f"{name}.{word}": destination for word, destination in found.items()}


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

    ConfigError if the machine has too little memory for the rotary table or, on a CPU, for the weights.
    """
    device, dtype = torch.device(device), dtype or getattr(torch, config.dtype)
    if max_position is not None and max_position > config.max_position:  # tables of that length would come first
        where = f"the model's {config.max_position} positions{reason_for_limit(config)}"
        raise ConfigError(f"max_model_len {max_position} is above {where}")
    positions = max_position or config.max_position
    what = f"max_position_embeddings: cosines and sines of {positions:,} positions"
    check_free(ROTARY_BYTES * positions * config.head_dim, free_bytes(CPU), what, "this machine", "set max_model_len")
    chosen = choose_kernels(kernels, device, dtype)
    _check_experts(config, chosen, quantization, linear_method)
    if linear_method is None and kernels == "compiled":
        from reference_impl.assembly.compiled import methods_to_compile

        linear_method = methods_to_compile(quantization, dtype)
    elif linear_method is None:
        linear_method = choose_methods(quantization, dtype, device, chosen)
    elif quantization != "none":
        raise ValueError(f"expected quantization or linear_method, got both ({quantization!r}): leave one out")
    methods = methods_of(linear_method)
    model = new_model(config, dtype, device, max_position, methods, chosen)
    head = methods("lm_head")
    if model.lm_head is not None and is_stored(head):
        use_stored_head(model, head)
    else:
        model.head = choose_head(head, config, dtype, device)
    if device.type == "cpu":  # pages are committed when written, and then the system kills a process
        what = f"{model.num_parameters():,} weights"
        remedy = "use a smaller model, dtype='bfloat16', or quantization"
        check_free(num_bytes(model), free_bytes(device), what, "this machine", remedy)
    return model


def new_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_position: int | None,
    methods: Methods | None,
    kernels: Kernels,
) -> Decoder:
    """A decoder of the config's family, fused where the kernels are Triton's."""
    kind = kind_of(config)
    if kernels.backend == "triton":
        from reference_impl.features.fusion.decoder import fused

        decoder, layer = fused(kind)
        return decoder(config, dtype, device, max_position, methods, layer, kernels)
    plain, layer_class = kind
    model = plain(config, dtype, device, max_position, methods, layer_class)
    if device.type == "cpu":
        use_norm_of_few(model)
    return model


def dummy_model(
    config: ModelConfig,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    max_position: int | None = None,
    kernels: Asked = "auto",
    quantization: Quantizations = "none",
    seed: int = 0,
) -> Decoder:
    """A model with random weights: see `fill_with_random_numbers`. Other options: see `load_model`."""
    from reference_impl.assembly.compiled import compile_one_row
    from reference_impl.models.shapes import fill_with_random_numbers

    model = build_model(config, dtype, device, max_position, kernels, quantization)
    fill_with_random_numbers(model, seed)
    return compile_one_row(model) if kernels == "compiled" else model


def num_bytes(model: Decoder) -> int:
    """The bytes of all weights as they are stored."""
    linears = all_linears(model)
    others = model.num_parameters() - sum(linear.num_parameters() for linear in linears)
    return others * model.dtype.itemsize + sum(linear.weight_bytes() for linear in linears)


def _check_experts(
    config: ModelConfig, kernels: Kernels, quantization: Quantizations, linear_method: LinearMethod | Methods | None
) -> None:
    """Raises ValueError if experts would be stored in a way that the kernel for experts cannot read."""
    if config.experts is None or kernels.backend != "triton":
        return
    from reference_impl.models.moe import expert_layers

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
