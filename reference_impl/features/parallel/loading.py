"""What of each tensor of a checkpoint a rank reads.

Where a tensor is as large for a rank's layer as for the whole one, the rank reads all of it. Where one dimension
differs, that is the one that is cut: in rows for what a layer puts out, in columns for what goes into it, and for
scales, zero points and packed codes by as much as their dimension is shorter.

What is rounded while it is loaded is rounded as it would be in one process: a scale that belongs to a whole row of
weights is computed from that row, of which a rank then keeps its columns.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from reference_impl.core.decoder import Decoder
from reference_impl.core.linear import Linear
from reference_impl.features.parallel.shares import RankShares, Share, expected, shares_of
from reference_impl.interfaces import TensorSpec
from reference_impl.models.loader import CheckpointError, Cut, Destination, part_tensors, weight_files, whole_name
from reference_impl.models.olmo2 import Olmo2Layer
from reference_impl.models.quantization.head import all_linears
from reference_impl.models.quantization.methods import Quantized
from reference_impl.models.quantization.stored import Stored

_ALL_GROUPS = 4096  # all sizes of groups divide it
Pieces = list[Share]  # of what a dimension counts, one after another: heads of q, then of k, then of v


def cut_table(
    model: Decoder, shares: RankShares, rank: int, table: dict[str, Destination]
) -> tuple[dict[str, Destination], dict[str, Cut]]:
    """The destinations of a rank's model and, by tensor, what is read of it. table: see `destinations`. ValueError
    where a group of weights with one scale, or a packed code, would be cut."""
    cuts: dict[str, Cut] = {}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in table:
            spec, _ = table[name]
            cuts[name] = _cut((shares.vocabulary.whole, *spec.shape[1:]), 0, [shares.vocabulary], 1)
    for layer in model.layers:
        if isinstance(layer, Olmo2Layer):
            prefix, each = f"model.layers.{layer.index}.self_attn.", model.config.head_dim
            for name, heads in (("q_norm.weight", shares.queries), ("k_norm.weight", shares.keys)):
                cuts[prefix + name] = _cut((heads.whole * each,), 0, [heads], each)
    for linear in all_linears(model):
        if shares.experts is not None and ".experts." in linear.name:
            continue  # whole, or another rank's
        for name, spec, part, word in _named(linear):
            found = _of_linear(model, linear, shares, rank, name, spec, part, word)
            if isinstance(found, Cut):
                cuts[name] = found
            elif found is not None:
                table = table | {name: found}
    return table, cuts


def _named(linear: Linear) -> Iterator[tuple[str, TensorSpec, str, str]]:
    prefix = linear.name.rpartition(".")[0]
    for part in linear.parts:
        for word, spec in part_tensors(linear, part).items():
            yield f"{prefix}.{part}.{word}".lstrip("."), spec, part, word


def _of_linear(
    model: Decoder, linear: Linear, shares: RankShares, rank: int, name: str, mine: TensorSpec, part: str, word: str
) -> Cut | Destination | None:
    """How a tensor of a linear layer is read where that is not all of it, as it is."""
    inputs, outputs, each = pieces_of(linear, part, shares, model.config.head_dim)
    pieces = inputs or outputs
    features = sum(piece.whole for piece in pieces) * each
    spec = _spec(linear, part, word, bool(inputs), features)
    if inputs and word == "bias":  # all ranks' products are added, so one of them has the bias
        return None if rank == 0 else (mine, lambda tensor: linear.load(part, word, tensor.mul(0)))
    if word == "weight_shape":  # compressed-tensors: the sizes of the whole matrix
        own = (linear.parts[part], linear.in_features)
        return spec, lambda tensor: linear.load(part, word, torch.tensor(own, dtype=tensor.dtype))
    if inputs:
        _check_activations(linear)
        if isinstance(linear.method, Quantized):
            _check_edges(model, linear, part, pieces, each, linear.method.group_of(features) or 1)
            start = inputs[0].start * each
            own_inputs = slice(start, start + inputs[0].length * each)
            load = linear.method.load_inputs
            return spec, partial(load, linear.params, start=linear.row_of(part), inputs=own_inputs)
    differ = [at for at, (a, b) in enumerate(zip(spec.shape, mine.shape, strict=True)) if a != b]
    if not differ:
        return None
    if word == "g_idx":
        [(start, end)] = _edges(pieces, each)
        return spec, lambda tensor: linear.load(part, word, _own_groups(tensor, start, end))
    if len(differ) > 1:
        raise ValueError(f"{name}: expected one dimension to divide among ranks, got {spec.shape} and {mine.shape}")
    group = 1
    if spec.shape[differ[0]] != features:  # a number for several features; asked of a size that all groups divide
        many = features * _ALL_GROUPS
        group = many // _spec(linear, part, word, bool(inputs), many).shape[differ[0]]
    _check_edges(model, linear, part, pieces, each, group)
    return _cut(spec.shape, differ[0], pieces, each, group)


def _spec(linear: Linear, part: str, word: str, of_inputs: bool, features: int) -> TensorSpec:
    """A tensor of a layer with so many inputs, or so many outputs of a part."""
    rows, inputs = (linear.parts[part], features) if of_inputs else (features, linear.in_features)
    other: Any = SimpleNamespace(
        name=linear.name, method=linear.method, parts={part: rows}, in_features=inputs, has_bias=linear.has_bias
    )
    found = part_tensors(other, part)[word]
    part_tensors(linear, part)  # a method that remembers what it was asked remembers the rank's own
    return found


def _own_groups(groups: Tensor, start: int, end: int) -> Tensor:
    """The groups of inputs start to end, counted from the rank's first. ValueError for groups in another order than
    that of inputs (act-order): a rank's inputs would be of all groups."""
    size = len(groups) // (int(groups.max()) + 1)
    if not torch.equal(groups, torch.arange(len(groups), dtype=groups.dtype) // size):
        raise ValueError(
            "groups that are not in the order of inputs (act-order) are not divided among ranks: use "
            "tensor_parallel_size=1"
        )
    return groups[start:end] - groups[start]


def _check_activations(linear: Linear) -> None:
    """Raises ValueError if a product rounds its inputs by the largest of a token's, of which a rank has some."""
    layouts = linear.method.layouts.values() if isinstance(linear.method, Stored) else ()
    if any((a := layout.activations) is not None and a.dynamic and a.per != "group" for layout in layouts):
        raise ValueError(
            f"{linear.name}: its checkpoint rounds activations by the largest of a token's, of which a rank has some: "
            "use tensor_parallel_size=1"
        )


def pieces_of(linear: Linear, part: str, shares: RankShares, head_dim: int) -> tuple[Pieces, Pieces, int]:
    """What a rank has of a linear layer's inputs, or of its part's outputs (the other is empty: it has all of them),
    and how many features one of what is counted has."""
    kind = linear.name.rpartition(".")[2]
    mlp = shares.columns
    if ".experts." in linear.name and shares.expert_columns is not None:
        mlp = shares.expert_columns
    if kind == "qkv_proj":
        q, k = shares.queries, shares.keys
        return [], {"q_proj": [q], "k_proj": [k], "v_proj": [k]}.get(part, [q, k, k]), head_dim
    if kind == "gate_up_proj":
        return [], [mlp] * (2 if len(linear.parts) == 1 else 1), 1
    if kind == "o_proj":
        return [shares.queries], [], head_dim
    if kind == "down_proj":
        return [mlp], [], 1
    raise ValueError(f"{linear.name}: a layer of this name is not divided among ranks: use tensor_parallel_size=1")


def _cut(whole: tuple[int, ...], dim: int, pieces: Pieces, each: int, group: int = 1) -> Cut:
    """each: features of one of what the pieces count. group: features that have one number along the dimension."""
    ranges = [(start // group, -(-end // group) - start // group) for start, end in _edges(pieces, each)]
    return Cut(whole, dim, tuple(ranges))


def _edges(pieces: Pieces, each: int) -> list[tuple[int, int]]:
    """Where each piece begins and ends among the features of all of them."""
    firsts = itertools.accumulate((piece.whole for piece in pieces), initial=0)
    starts = [first + piece.start for first, piece in zip(firsts, pieces, strict=False)]
    return [(start * each, (start + piece.length) * each) for start, piece in zip(starts, pieces, strict=True)]


def _check_edges(model: Decoder, linear: Linear, part: str, pieces: Pieces, each: int, group: int) -> None:
    """Raises ValueError if what a rank has begins or ends within `group` features that have one scale or one code."""
    wrong = next((edges for edges in _edges(pieces, each) if not _between_groups(edges, pieces, each, group)), None)
    if wrong is None:
        return
    fit, whole = [], model.config.whole
    for size in range(1, 65):
        with suppress(ValueError):
            found = [pieces_of(linear, part, shares, whole.head_dim) for shares in shares_of(whole, size)]
            both = [inputs or outputs for inputs, outputs, _ in found]
            if all(_between_groups(edges, own, each, group) for own in both for edges in _edges(own, each)):
                fit.append(size)
    raise ValueError(
        f"{linear.name}: a rank's features {wrong[0]} to {wrong[1]} of {sum(p.whole for p in pieces) * each} begin or "
        f"end within a group of {group} that have one scale or one code. {expected(fit)}"
    )


def _between_groups(edges: tuple[int, int], pieces: Pieces, each: int, group: int) -> bool:
    ends = (*itertools.accumulate(piece.whole * each for piece in pieces),)  # the last group may be shorter
    return edges[0] % group == 0 and (edges[1] % group == 0 or edges[1] == ends[-1])


def bytes_of_layers(folder: Path, num_layers: int) -> tuple[list[int], int]:
    """The bytes in a folder's files of each layer, and of the lm_head, or of an embedding in its place."""
    layers, others = [0] * num_layers, dict.fromkeys(("lm_head", "model.embed_tokens"), 0)
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as handle:
                found = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (not a dict)
                sizes = {name: num_bytes(each.get_shape(), each.get_dtype()) for name, each in found.items()}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: not a complete safetensors file ({error}); download it again") from None
        for name, size in sizes.items():
            words = whole_name(name).split(".")
            if words[:2] == ["model", "layers"] and words[2].isdecimal() and int(words[2]) < num_layers:
                layers[int(words[2])] += size
            elif (kind := ".".join(words[:-1])) in others:
                others[kind] += size
    return layers, others["lm_head"] or others["model.embed_tokens"]


def num_bytes(shape: Sequence[int], dtype: str) -> int:
    """The bytes of a tensor. dtype: its name in safetensors, with its bits, such as "BF16"; BOOL has 8."""
    bits = re.search(r"\d+", dtype)
    return math.prod(shape) * (8 if bits is None else int(bits[0])) // 8
