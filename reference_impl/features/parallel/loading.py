"""What of each tensor of a checkpoint a rank reads.

Where a tensor is as large for a rank's layer as for the whole one, the rank reads all of it. Where one dimension
differs, that is the one that is cut: in rows for what a layer puts out, in columns for what goes into it, and for
scales, zero points and packed codes by as much as their dimension is shorter.

What is rounded while it is loaded is rounded as it would be in one process: a scale that belongs to a whole row of
weights is computed from that row, of which a rank then keeps its columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

from reference_impl.core.decoder import Decoder
from reference_impl.core.linear import Linear
from reference_impl.features.parallel.shares import RankShares, Share, shares_of
from reference_impl.interfaces import TensorSpec
from reference_impl.models.loader import Cut, Destination, part_tensors
from reference_impl.models.olmo2 import Olmo2Layer
from reference_impl.models.quantization.head import all_linears
from reference_impl.models.quantization.methods import Quantized

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
    whole_in = sum(piece.whole for piece in inputs) * each or linear.in_features
    whole_out = sum(piece.whole for piece in outputs) * each or linear.parts[part]
    whole: Any = SimpleNamespace(
        name=linear.name, method=linear.method, parts={part: whole_out}, in_features=whole_in, has_bias=linear.has_bias
    )
    spec = part_tensors(whole, part)[word]
    if inputs and word == "bias":  # all ranks' products are added, so one of them has the bias
        return None if rank == 0 else (mine, lambda tensor: linear.load(part, word, tensor.mul(0)))
    if inputs and isinstance(linear.method, Quantized):
        group = linear.method.group_of(whole_in) or 1
        _check_edges(model, linear, part, inputs, each, group)
        start = inputs[0].start * each
        stored = slice(start, start + inputs[0].length * each)
        return spec, partial(linear.method.load_inputs, linear.params, start=linear.row_of(part), inputs=stored)
    differ = [at for at, (a, b) in enumerate(zip(spec.shape, mine.shape, strict=True)) if a != b]
    if not differ:
        return None
    if word == "g_idx":
        raise ValueError(f"{name}: the groups of a checkpoint with act-order are not divided among ranks: use one rank")
    if len(differ) > 1:
        raise ValueError(f"{name}: expected one dimension to divide among ranks, got {spec.shape} and {mine.shape}")
    pieces = inputs or outputs
    features = sum(piece.whole for piece in pieces) * each
    _check_edges(model, linear, part, pieces, each, max(1, features // spec.shape[differ[0]]))
    return _cut(spec.shape, differ[0], pieces, each)


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


def _cut(whole: tuple[int, ...], dim: int, pieces: Pieces, each: int) -> Cut:
    """each: features of one of what the pieces count. A dimension that is shorter than these features has one number
    for several of them: a scale for a group, or packed codes."""
    features, ranges, before = sum(piece.whole for piece in pieces) * each, [], 0
    for piece in pieces:
        start, length = (n * each * whole[dim] // features for n in (before + piece.start, piece.length))
        ranges.append((start, length))
        before += piece.whole
    return Cut(whole, dim, tuple(ranges))


def _check_edges(model: Decoder, linear: Linear, part: str, pieces: Pieces, each: int, group: int) -> None:
    """Raises ValueError if what a rank has begins or ends within `group` features that have one scale or one code."""
    piece = next((piece for piece in pieces if not _between_groups(piece, each, group)), None)
    if piece is None:
        return
    fit, whole = [], model.config.whole
    for size in range(1, 65):
        with suppress(ValueError):
            found = [pieces_of(linear, part, shares, whole.head_dim) for shares in shares_of(whole, size)]
            if all(_between_groups(one, each, group) for inputs, outputs, _ in found for one in (*inputs, *outputs)):
                fit.append(str(size))
    first, last = piece.start * each, (piece.start + piece.length) * each
    raise ValueError(
        f"{linear.name}: a rank's features {first} to {last} of {piece.whole * each} begin or end within a group of "
        f"{group} that have one scale or one code. tensor_parallel_size: expected one of {', '.join(fit)}"
    )


def _between_groups(piece: Share, each: int, group: int) -> bool:
    return piece.start * each % group == 0 and piece.length * each % group == 0
