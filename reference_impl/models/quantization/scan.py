"""How much harm each scheme does in each layer: what mixed precision is decided by (`sensitivity.py`).

One matrix at a time is rounded to nearest in one scheme while all others stay as they are; harm is the KL of the
model's predictions to its own without that, over calibration rows. The rows' stream before each layer is kept, so that
a change in layer i is computed from there on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from reference_impl.core.decoder import Decoder, DecoderLayer
from reference_impl.core.linear import Linear
from reference_impl.models.quantization.by_layer import linears_of
from reference_impl.models.quantization.calibration import Rows
from reference_impl.models.quantization.folding import matrix
from reference_impl.models.quantization.one_layer import Part, round_into
from reference_impl.models.quantization.recipes import Recipe
from reference_impl.models.quantization.sensitivity import Cost
from reference_impl.models.quantization.tensors import has_form, tensors_of


@torch.inference_mode()
def scan(model: Decoder, tokens: Tensor, recipe: Recipe, choices: Sequence[str]) -> dict[str, dict[str, Cost]]:
    """{linear layer: {name of a scheme: its cost}}. model: whole and not quantized; it is as before when this returns.
    tokens [rows, length]: predictions for all of them are held, twice, rows x length x vocab_size float32.
    choices: names of schemes; bits are those of the tensors that a packed checkpoint has. ValueError as of
    `Recipe.scheme_of`, and for no choice."""
    if not choices:
        raise ValueError("choices: expected names of schemes, got none")
    rows = Rows.of(model, tokens)
    layers = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
    streams = [rows.x.clone()]
    for layer in layers:
        rows.advance(layer)
        streams.append(rows.x.clone())
    plain = _predictions(model, streams[-1])
    costs: dict[str, dict[str, Cost]] = {}
    for index, layer in enumerate(layers):
        for linear in linears_of(layer):
            costs[linear.name] = {}
            for name in choices:
                parts, original = _rounded(linear, replace(recipe, scheme=name, by_layer={}))
                rows.x = streams[index].clone()
                for later in layers[index:]:
                    rows.advance(later)
                matrix(linear).copy_(original)
                harm = (plain.exp() * (plain - _predictions(model, rows.x))).sum(-1).mean()
                costs[linear.name][name] = Cost(sum(map(stored_bits, parts)), max(float(harm), 0.0))
    return costs


def stored_bits(part: Part) -> int:
    """Of all tensors of a matrix in a packed checkpoint; where none has its numbers, of codes and scales."""
    if not has_form(part.scheme):
        return round(part.bits())
    return 8 * sum(tensor.nbytes for tensor in tensors_of(part.codes, part.scheme, part.fitted).values())


def _rounded(linear: Linear, recipe: Recipe) -> tuple[list[Part], Tensor]:
    """Changes the matrix; returns it as it was, too."""
    scheme, weight = recipe.scheme_of(linear.name, linear.in_features), matrix(linear)
    original = weight.clone()
    return round_into(weight, original, linear, None, scheme, recipe), original


def _predictions(model: Decoder, stream: Tensor) -> Tensor:
    """[rows x length, vocab_size] float32: log-probabilities."""
    hidden = model.normalize(stream.flatten(0, 1), model.norm, model.config.norm_eps)
    return model.logits(hidden).float().log_softmax(-1)
