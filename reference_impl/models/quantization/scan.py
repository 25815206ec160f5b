"""How much harm each scheme does in each layer: what mixed precision is decided by (`sensitivity.py`).

One matrix at a time is rounded to nearest in one scheme while all others stay as they are; harm is the KL of the
model's predictions to its own without that, over calibration rows. The rows' stream before each layer is kept, so that
a change in layer i is computed from there on.

`scan_folder` writes down what it knows after each matrix, in the folder where `quantize_folder` works afterwards: a
killed run loses the matrix that it was at, and no more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reference_impl.core.decoder import Decoder, DecoderLayer
from reference_impl.core.linear import Linear
from reference_impl.models.quantization.by_layer import Layers, linears_of, new_layer
from reference_impl.models.quantization.calibration import Rows
from reference_impl.models.quantization.folding import matrix
from reference_impl.models.quantization.one_layer import Part, round_into
from reference_impl.models.quantization.recipes import Recipe
from reference_impl.models.quantization.sensitivity import Cost
from reference_impl.models.quantization.tensors import has_form, tensors_of
from reference_impl.models.quantization.work_folder import (
    SCAN,
    alone,
    as_json,
    check_places,
    digest,
    made_of,
    same,
    work_of,
    write_json,
)

Costs = dict[str, dict[str, Cost]]


@torch.inference_mode()
def scan(
    model: Decoder,
    tokens: Tensor,
    recipe: Recipe,
    choices: Sequence[str],
    known: Mapping[str, dict[str, Cost]] | None = None,
    keep: Callable[[Costs], object] = lambda costs: None,
) -> Costs:
    """{linear layer: {name of a scheme: its cost}}. model: whole and not quantized; it is as before when this returns.
    tokens [rows, length]: predictions for all of them are held, twice, rows x length x vocab_size float32. choices:
    names of schemes; bits are those of the tensors that a packed checkpoint has. known: costs of layers that were
    scanned before, which are not scanned again. keep: gets all costs so far, after each layer. Raises ValueError for no
    choice, and see `Recipe.scheme_of`."""
    if not choices:
        raise ValueError("choices: expected names of schemes, got none")
    rows = Rows.of(model, tokens)
    layers = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
    streams = [rows.x.clone()]
    for layer in layers:
        rows.advance(layer)
        streams.append(rows.x.clone())
    plain = _predictions(model, streams[-1])
    costs = dict(known or {})
    for index, layer in enumerate(layers):
        for linear in linears_of(layer):
            if linear.name in costs:
                continue
            found: dict[str, Cost] = {}
            for name in choices:
                parts, original = _rounded(linear, replace(recipe, scheme=name, by_layer={}))
                rows.x = streams[index].clone()
                for later in layers[index:]:
                    rows.advance(later)
                matrix(linear).copy_(original)
                harm = (plain.exp() * (plain - _predictions(model, rows.x))).sum(-1).mean()
                found[name] = Cost(sum(map(stored_bits, parts)), max(float(harm), 0.0))
            costs[linear.name] = found
            keep(costs)
    return costs


def scan_folder(
    source: Path,
    out: Path,
    load: Callable[[], Decoder],
    tokens: Tensor,
    recipe: Recipe,
    choices: Sequence[str],
    progress: Callable[[int, int], object] = lambda done, of: None,
) -> tuple[Costs, int]:
    """(`scan` of a folder's model, how many weights its linear layers have). load: gives the model; not called where
    nothing is left to scan. out: where `quantize_folder` will write; what an earlier run has found for it is taken from
    there. progress(done, of): linear layers. Raises ValueError, see `scan` and `quantize_folder`, also where an earlier
    scan for `out` was of something else."""
    check_places(out)
    layers, work = Layers(source), work_of(out)
    shapes = _shapes(layers, recipe, choices)
    now = as_json({
        "group size": recipe.group_size, "choices": choices, "calibration": digest(tokens.numpy().tobytes()),
        **made_of(source, layers.files),
    })  # fmt: skip
    work.mkdir(exist_ok=True)
    with alone(work):
        costs = _known(work / SCAN, now)

        def keep(found: Costs) -> None:
            write_json({"of": now, "costs": plain(found)}, work / SCAN)
            progress(len(found), len(shapes))

        progress(len(costs), len(shapes))
        if costs.keys() != shapes.keys():
            costs = scan(load(), tokens, recipe, choices, costs, keep)
    return costs, sum(out_features * in_features for out_features, in_features in shapes.values())


def _known(file: Path, now: dict[str, Any]) -> Costs:
    """The costs of an earlier scan that are written down. Raises ValueError where that was of something else."""
    if not file.exists():
        return {}
    before = json.loads(file.read_text("utf-8"))
    same(now, before["of"], file.parent)
    return {layer: {name: Cost(**cost) for name, cost in found.items()} for layer, found in before["costs"].items()}


def plain(costs: Costs) -> dict[str, Any]:
    """The costs as plain values for JSON."""
    return {layer: {name: asdict(cost) for name, cost in found.items()} for layer, found in costs.items()}


def _shapes(layers: Layers, recipe: Recipe, choices: Sequence[str]) -> dict[str, tuple[int, int]]:
    """{linear layer: (out, in)} of a model; nothing is read. Raises ValueError for a choice that does not fit one."""
    found = {}
    for index in range(layers.config.num_layers):
        for linear in linears_of(new_layer(layers.config, index, torch.float32, torch.device("meta"))):
            found[linear.name] = (linear.out_features, linear.in_features)
            for name in choices:
                replace(recipe, scheme=name, by_layer={}).scheme_of(linear.name, linear.in_features)
    return found


def stored_bits(part: Part) -> int:
    """Bits of all tensors of a matrix in a packed checkpoint; where none has its numbers, of codes and scales."""
    if not has_form(part.scheme):
        return round(part.bits())
    inputs = part.scheme.activations
    scale = 32 if inputs is not None and inputs.in_checkpoint else 0  # of inputs, which a scan does not look at
    return scale + 8 * sum(tensor.nbytes for tensor in tensors_of(part.codes, part.scheme, part.fitted).values())


def _rounded(linear: Linear, recipe: Recipe) -> tuple[list[Part], Tensor]:
    """Rounds the matrix in place; returns its parts, and the matrix as it was."""
    scheme, weight = recipe.scheme_of(linear.name, linear.in_features), matrix(linear)
    original = weight.clone()
    return round_into(weight, original, linear, None, scheme, recipe), original


def _predictions(model: Decoder, stream: Tensor) -> Tensor:
    """Log-probabilities, [rows x length, vocab_size] float32."""
    hidden = model.normalize(stream.flatten(0, 1), model.norm, model.config.norm_eps)
    return model.logits(hidden).float().log_softmax(-1)
