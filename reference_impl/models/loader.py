"""Fills a Decoder from a Hugging Face folder of safetensors, one file or several.

Every tensor of the model must come exactly once, in the right shape; whatever else is in the files must
be known to be harmless. Errors name file, tensor, what was expected and what was found.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from reference_impl.core.decoder import Decoder, DecoderLayer
from reference_impl.core.linear import Linear
from reference_impl.interfaces import NamesTensors, NamesTensorsOfParts, TensorSpec
from reference_impl.models.config_json import is_decoder_class
from reference_impl.models.json_file import read_object, shown
from reference_impl.models.quantization.head import StoredHead, all_linears

_INDEX_BYTES = 64 << 20  # of an index; one of a trillion parameters has 20 MB
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of weights that are not quantized


_OF_QUANTIZED = {
    "qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_scale_inv", "weight_shape",
    "weight_zero_point", "input_scale", "absmax", "quant_map", "bias",
}  # fmt: skip


class CheckpointError(ValueError):
    """A checkpoint that does not fit its config."""


# Below self_attn.: of attention in 8 bits, as vLLM reads them. kv_scale: of keys and of values, in old files.
CACHE_SCALES = frozenset(
    {f"{where}{one}_scale" for where in ("", "attn.") for one in ("q", "k", "v", "prob")}
    | {f"{where}{one}_zero_point" for where in ("", "attn.") for one in "qkv"}
    | {f"{where}_proj.{one}_scale" for one in "kv" for where in (one, "qkv", "qkqkv")}
    | {"kv_scale", "prob_output_scale", "q_proj.output_scale", "k_proj.output_scale", "v_proj.output_scale"}
)
Destination = tuple[TensorSpec, Callable[[Tensor], object]]  # what it must be, and where it goes


class Cut(NamedTuple):
    """What is read of a tensor that a model has a part of: ranges (start, length) of one dimension, side by side.
    whole: the shape that the file must have."""

    whole: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]


Cuts = Mapping[str, Cut]


def cache_scales(model: Decoder) -> dict[str, Callable[[Tensor], object]]:
    """Tensors that a checkpoint may have beside those that the model needs: scales, and zero points, of queries, keys,
    values and attention's probabilities in 8 bits. Our cache has scales of what it holds; the rest is not rounded."""
    return {
        f"model.layers.{layer}.self_attn.{name}": _check_scales if name.endswith("scale") else _not_used
        for layer in model.config.layers
        for name in CACHE_SCALES
    }


def _check_scales(scales: Tensor) -> None:
    from reference_impl.models.quantization.layouts import check_scales

    check_scales(scales)


def _not_used(_: Tensor) -> None:
    pass


def finish(model: Decoder) -> None:
    """Finishes a model whose weights are all there: each linear layer may bring them into the form that it computes
    with."""
    for linear in all_linears(model):
        linear.method.finish(linear.params)


def weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or else the shards that model.safetensors.index.json names."""
    files, index = [folder / "model.safetensors"], folder / "model.safetensors.index.json"
    if index.is_file() and not files[0].is_file():
        files = [folder / name for name in _shards(index)]
    for file in files:
        if file.is_dir():
            raise CheckpointError(f"{file}: expected a file of weights as safetensors, found a folder")
        if not file.is_file():
            hint = " (this folder has PyTorch .bin files: convert them)" if list(folder.glob("*.bin")) else ""
            raise CheckpointError(f"{file}: no such file; expected weights as safetensors{hint}")
    return files


def _shards(index: Path) -> list[str]:
    """The files that an index names. They are in its folder: a name that leads out of it is refused, since the index
    may come from a stranger. A link in the folder may lead anywhere, as it does in Hugging Face's cache."""
    table = read_object(index, CheckpointError, _INDEX_BYTES).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise CheckpointError(f"{index}: weight_map: expected an object {{tensor: file name}}, found {shown(table)}")
    for tensor, name in table.items():
        parts = name.replace("\\", "/").split("/") if isinstance(name, str) else ("..",)
        inside = not {"", ".", ".."} & set(parts) and len(name) < 256 and "\0" not in name
        if not inside or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: weight_map, {shown(tensor)}: expected the name of a .safetensors file in this folder, found "
                f"{shown(name)}"
            )
    return sorted(set(table.values()))


class NoHead:
    """The head of a decoder that was saved without its lm_head, where this is no copy of the embedding: it has hidden
    states only. Its logits are NaN, so only a request that asks for tokens all the same ends with an error."""

    def __init__(self, model: Decoder):
        self.vocab_size = model.config.vocab_size
        model.head, model.lm_head = self, model.embedding[:0]

    def __call__(self, x: Tensor, lm_head: Tensor) -> Tensor:
        return x.new_full((len(x), self.vocab_size), torch.nan)


def whole_name(name: str) -> str:
    """The name of a tensor or layer in a whole model: a decoder saved without its lm_head has no `model.` in names."""
    return f"model.{name}" if name.partition(".")[0] in ("layers", "embed_tokens", "norm") else name


def is_decoder_alone(folder: Path) -> bool:
    """Whether a folder of safetensors is of a decoder saved without its lm_head: there is none, and tensors are named
    like such a decoder's, or config.json names its class."""
    names: list[str] = []
    for file in weight_files(folder):
        with contextlib.suppress(SafetensorError, OSError), safe_open(file, framework="pt") as handle:
            names += handle.keys()
    short = any(whole_name(name) != name for name in names) and not any(n.startswith("model.") for n in names)
    return not any(n.startswith("lm_head.") for n in names) and (short or is_decoder_class(folder))


def lacks_head(folder: Path, tied_embeddings: bool) -> bool:
    """Whether a folder of safetensors is of a decoder saved alone, and its head is no copy of the embedding."""
    return not tied_embeddings and is_decoder_alone(folder)


def destinations(model: Decoder) -> dict[str, Destination]:
    """Checkpoint name -> (what it must be, store) for every tensor that the model needs."""
    plus_one = model.config.norm_plus_one
    table: dict[str, Destination] = {"model.embed_tokens.weight": _whole(model.embedding)}
    table |= {name: _norm(tensor, plus_one) for name, tensor in model.norms().items()}
    if isinstance(model.head, StoredHead):
        table |= _parts(model.head.linear)
    elif model.lm_head is not None and not isinstance(model.head, NoHead):
        table["lm_head.weight"] = _whole(model.lm_head)
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        table |= layer_destinations(layer)
    return table


def layer_destinations(layer: DecoderLayer) -> dict[str, Destination]:
    """The part of `destinations` that is one layer's."""
    plus_one = layer.config.norm_plus_one
    table = {f"model.layers.{layer.index}.{name}": _norm(tensor, plus_one) for name, tensor in layer.norms().items()}
    for linear in layer.modules():
        if isinstance(linear, Linear):
            table |= _parts(linear)
    if layer.config.experts is not None:
        from reference_impl.models.moe import MixtureOfExperts

        if isinstance(layer.mlp, MixtureOfExperts):  # some layers of some models have none
            prefix = layer.mlp.prefix
            table |= {f"{prefix}{name}.weight": _whole(weight) for name, weight in layer.mlp.tensors().items()}
    return table


def _parts(linear: Linear) -> dict[str, Destination]:
    prefix = linear.name.rpartition(".")[0]
    return {
        f"{prefix}.{part}.{name}".lstrip("."): (spec, partial(linear.load, part, name))
        for part in linear.parts
        for name, spec in part_tensors(linear, part).items()
    }


def part_tensors(linear: Linear, part: str) -> Mapping[str, TensorSpec]:
    """The tensors that a checkpoint has for a part of a linear layer, by the last word of the tensor's name."""
    rows, method = linear.parts[part], linear.method
    if isinstance(method, NamesTensorsOfParts):
        found = method.tensors_of(part, linear.in_features, rows, linear.has_bias)
        _check_named(found, f"{linear.name}, {part}: {type(method).__name__}.tensors_of")
        return found
    if isinstance(method, NamesTensors):
        found = method.tensors(linear.in_features, rows, linear.has_bias)
        _check_named(found, f"{linear.name}, {part}: {type(method).__name__}.tensors")
        return found
    weight = {"weight": TensorSpec((rows, linear.in_features), FLOATS)}
    return weight | {"bias": TensorSpec((rows,), FLOATS)} if linear.has_bias else weight


def _check_named(found: object, where: str) -> None:
    """Raises TypeError unless a method has named tensors as `NamesTensors` says."""
    if not isinstance(found, Mapping):
        raise TypeError(f"{where}: expected {{name: TensorSpec(shape, dtypes)}}, got {found!r}")
    for name, spec in found.items():
        right = isinstance(spec, tuple) and len(spec) == 2 and all(isinstance(part, tuple) for part in spec)
        shape, dtypes = spec if right else ((), ())
        right = right and all(type(size) is int for size in shape) and all(isinstance(d, torch.dtype) for d in dtypes)
        if not right or not dtypes or not isinstance(name, str) or not name:
            raise TypeError(
                f"{where}: expected {{name: TensorSpec(shape, dtypes)}}, with tuples of numbers and of torch dtypes, "
                f"got {name!r}: {spec!r}"
            )


def _whole(target: Tensor) -> Destination:
    return TensorSpec(tuple(target.shape), FLOATS), target.copy_


def _norm(target: Tensor, plus_one: bool) -> Destination:
    """A norm's weight or bias, one for all heads if the target has a row for each. plus_one: what is kept is 1 + w."""

    def store(tensor: Tensor) -> None:
        target.copy_((tensor.to(target.dtype) + plus_one).expand_as(target))

    return TensorSpec((target.shape[-1],), FLOATS), store


def fill(
    model: Decoder,
    table: dict[str, Destination],
    files: list[Path],
    others: Mapping[str, Callable[[Tensor], object]] | None = None,
    cuts: Cuts | None = None,
    leaves: Callable[[str], bool] = lambda name: False,
) -> None:
    """Fills the model from files by the table. others, cuts, leaves: see `store`."""
    head: list[Tensor] = []
    ignored: dict[str, Callable[[Tensor], object]] = dict(others or {})
    if model.lm_head is None:  # tied, and stored once more
        ignored["lm_head.weight"] = head.append
    store(table, files, model.dtype, f"a {model.config.architecture} with this config", ignored, cuts, leaves)
    if head and not torch.equal(head[0].to(model.embedding), model.embedding):
        raise CheckpointError(
            f"{', '.join(map(str, files))}: tensor lm_head.weight: expected a copy of model.embed_tokens.weight, since "
            "config.json says tie_word_embeddings; found other values"
        )


def store(
    table: Mapping[str, Destination],
    files: list[Path],
    dtype: torch.dtype,
    what: str,
    others: Mapping[str, Callable[[Tensor], object]] | None = None,
    cuts: Cuts | None = None,
    leaves: Callable[[str], bool] = lambda name: False,
) -> None:
    """Puts each tensor of the files where the table says. dtype: in which they are loaded. what: has these tensors.
    others: tensors that there may be. cuts: tensors of which a part is read, and goes where the table says. leaves: by
    its name, whether a tensor is not read at all. Raises CheckpointError if one is missing, unknown, there twice, or
    does not fit."""
    store_tensors(table, _tensors(files, cuts or {}, leaves), ", ".join(map(str, files)), dtype, what, others)


def _advice(name: str) -> str:
    """What to do about a tensor that has no place in a model. AutoGPTQ gives quantized layers a bias, too."""
    advice = "take config.json and weights of one and the same model"
    if name.rpartition(".")[2] in _OF_QUANTIZED:
        advice += (
            "; if it is quantized, config.json's quantization_config must say how, and not leave this layer out: where "
            "there is a quantize_config.json (AutoGPTQ) or quant_config.json (AutoAWQ), put what it has there, with "
            '"quant_method": "gptq" or "awq"'
        )
    return advice


def store_tensors(
    table: Mapping[str, Destination],
    tensors: Iterable[tuple[Path, str, Tensor]],
    where: str,
    dtype: torch.dtype,
    what: str,
    others: Mapping[str, Callable[[Tensor], object]] | None = None,
) -> None:
    """Like `store`, for tensors that are read already: (file, name, tensor). where: all files, for the error that one
    is missing."""
    missing = dict.fromkeys(table)
    spare: Mapping[str, Callable[[Tensor], object]] = others or {}
    for file, name, tensor in tensors:
        if name not in table and (whole_name(name) in table or whole_name(name) in spare):
            name = whole_name(name)
        if name in spare:
            _put(spare[name], tensor, f"{file}: tensor {name}")
            continue
        if name not in table:
            if name.endswith("rotary_emb.inv_freq"):  # older checkpoints stored it; it is computed
                continue
            raise CheckpointError(f"{file}: tensor {name} is not part of {what}: {_advice(name)}")
        if name not in missing:
            raise CheckpointError(f"{file}: tensor {name} came a second time")
        spec, put = table[name]
        _check(tensor, spec, f"{file}: tensor {name}")
        _check_finite(tensor, dtype, f"{file}: tensor {name}")
        _put(put, tensor, f"{file}: tensor {name}")
        del missing[name]
    if missing:
        names = ", ".join(list(missing)[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise CheckpointError(f"{where}: missing tensors: {names}")


def _put(put: Callable[[Tensor], object], tensor: Tensor, where: str) -> None:
    try:
        put(tensor)
    except ValueError as wrong:  # a method that reads scales, say, and finds none that can be
        raise CheckpointError(f"{where}: {wrong}") from None


def _check(tensor: Tensor, spec: TensorSpec, where: str) -> None:
    if tuple(tensor.shape) != tuple(spec.shape):
        raise CheckpointError(f"{where}: expected shape {list(spec.shape)}, found {list(tensor.shape)}")
    if tensor.dtype not in spec.dtypes:
        floats = tuple(spec.dtypes) == FLOATS
        expected = "a float of 16, 32 or 64 bits" if floats else " or ".join(map(str, spec.dtypes))
        raise CheckpointError(f"{where}: expected {expected}, found {tensor.dtype}")


def _check_finite(tensor: Tensor, dtype: torch.dtype, where: str) -> None:
    """Raises CheckpointError for numbers that are not finite, also in the dtype that the model is loaded in. A sum is
    finite if its terms are."""
    if tensor.dtype not in FLOATS:
        return
    narrow = dtype if torch.finfo(dtype).max < torch.finfo(tensor.dtype).max else tensor.dtype
    if bool(tensor.to(narrow).sum(dtype=torch.promote_types(narrow, torch.float32)).isfinite()):
        return
    wrong = (~tensor.to(narrow).isfinite()).nonzero()
    if not len(wrong):
        return  # only the sum is too large
    first = tuple(wrong[0].tolist())
    what = "finite numbers" if narrow is tensor.dtype else f"numbers within the range of {dtype}, in which it is loaded"
    raise CheckpointError(
        f"{where}: expected {what}, found {tensor[first].item()} at {list(first)}, and {len(wrong) - 1} more"
    )


def _tensors(files: list[Path], cuts: Cuts, leaves: Callable[[str], bool]) -> Iterator[tuple[Path, str, Tensor]]:
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 (not a dict)
                    if leaves(whole_name(name)):
                        continue
                    cut = cuts.get(name) or cuts.get(whole_name(name))
                    yield file, name, handle.get_tensor(name) if cut is None else _part(handle, file, name, cut)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: not a complete safetensors file ({error}); download it again") from None


def _part(handle: Any, file: Path, name: str, cut: Cut) -> Tensor:
    """Reads what a cut leaves of a tensor."""
    stored = handle.get_slice(name)
    if tuple(stored.get_shape()) != cut.whole:
        raise CheckpointError(f"{file}: tensor {name}: expected shape {list(cut.whole)}, found {stored.get_shape()}")
    before = (slice(None),) * cut.dim
    return torch.cat([stored[(*before, slice(start, start + length))] for start, length in cut.ranges], cut.dim)
