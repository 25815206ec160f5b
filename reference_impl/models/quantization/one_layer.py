"""A recipe applied to one layer in memory: afterwards its matrices are what their codes stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from reference_impl.core.decoder import DecoderLayer, GatedMLP
from reference_impl.core.linear import Linear
from reference_impl.models.quantization.awq import (
    candidates,
    mean_share,
    rounded_pieces,
    scaled_error,
    search_clipping,
)
from reference_impl.models.quantization.by_layer import linears_of, part_rows
from reference_impl.models.quantization.calibration import Outputs, Rows, Statistics
from reference_impl.models.quantization.folding import Fold, folds, matrix
from reference_impl.models.quantization.gptq import gptq, output_error
from reference_impl.models.quantization.numbers import FORMATS
from reference_impl.models.quantization.recipes import Recipe
from reference_impl.models.quantization.rotation import rotate_layer
from reference_impl.models.quantization.scheme import Fitted, Scheme, decode, encode, fit
from reference_impl.models.quantization.smoothquant import smoothing, weight_reach

_HEAD_ROWS = 4096  # that are rounded at once
SMOOTHED = ("qkv_proj", "gate_up_proj")  # what comes after a norm


@dataclass
class Part:
    """One of the checkpoint's matrices [out, in], as it is stored. name: without the last word of its tensors.
    inputs: {last word of its name: tensor}, what a product rounds its inputs with (`input_scales`)."""

    name: str
    codes: Tensor
    scheme: Scheme
    fitted: Fitted
    inputs: dict[str, Tensor] = field(default_factory=dict)

    def bits(self) -> float:
        """Bits of codes and scales, packed by something."""
        return self.scheme.bits_per_weight(tuple(self.codes.shape)) * self.codes.numel()


@dataclass
class Result:
    """What became of a layer. parts: in the order of the layer. errors: for each linear layer |W - Q| / |W|
    (Frobenius), and with calibration that of its output, |x (W - Q)^T| / |x W^T|. unseen: matrices that no calibration
    token reached, rounded to nearest.
    """

    parts: list[Part] = field(default_factory=list)
    weight_errors: dict[str, float] = field(default_factory=dict)
    output_errors: dict[str, float] = field(default_factory=dict)
    unseen: list[str] = field(default_factory=list)


@torch.inference_mode()
def quantize_layer(
    layer: DecoderLayer,
    rows: Rows | None,
    recipe: Recipe,
    rotation: Tensor | None = None,
    stored: torch.dtype | None = None,
) -> Result:
    """Quantizes a layer in place. rows: the residual stream before the layer, for a recipe that is calibrated; they are
    not moved on. rotation: of a recipe that rotates; rows are rotated already. stored: the dtype of what is not
    rounded, when it is written."""
    result = Result()
    if rotation is not None:
        rotate_layer(layer, rotation)
    if recipe.scaling != "none":
        assert rows is not None
        for name, fold in folds(layer, stored).items():
            if recipe.scaling == "awq" or name in SMOOTHED:
                _scale(layer, rows, fold, recipe)
    for linear in linears_of(layer):
        _round(layer, rows, linear, recipe, result)
    return result


def _scale(layer: DecoderLayer, rows: Rows, fold: Fold, recipe: Recipe) -> None:
    linear, weight = fold.linear, matrix(fold.linear)
    if recipe.scaling == "smoothquant":
        seen = rows.watch(layer, linear, Statistics(wants_gram=False))
        assert seen.max_abs is not None
        fold.apply(fold.tied(smoothing(seen.max_abs, weight_reach(weight), recipe.alpha)))
        return
    scheme, end = recipe.scheme_of(linear.name, linear.in_features), _end_of_block(layer, linear)
    seen = rows.watch(layer, linear, Statistics(wants_gram=end is None))
    tried = candidates(fold.tied(seen.mean_abs), fold.tied(mean_share(weight, scheme)))
    if end is None:
        fold.apply(min(tried, key=lambda s: scaled_error(weight, s, seen.known_gram, scheme)))
    else:
        fold.apply(min(tried, key=block_error(layer, rows, linear, end, scheme)))


def _end_of_block(layer: DecoderLayer, linear: Linear) -> Linear | None:
    """The matrix that ends the block (attention, or MLP) that this one begins; None for one that ends it itself."""
    assert isinstance(layer.mlp, GatedMLP)
    return {id(layer.qkv): layer.o, id(layer.mlp.gate_up): layer.mlp.down}.get(id(linear))


def block_error(
    layer: DecoderLayer, rows: Rows, linear: Linear, end: Linear, scheme: Scheme
) -> Callable[[Tensor], float]:
    """error(s): with Q(W s) / s for the matrix of `linear`, how far what `end` gives is from what it gives now, as a
    sum of squares over the rows. The layer is afterwards as before; what `end` gives now is held, as large as the
    rows."""
    weight, original = matrix(linear), matrix(linear).clone()
    before = rows.watch(layer, end, Outputs(matrix(end))).kept

    def error(s: Tensor) -> float:
        for piece, stands in rounded_pieces(original, s, scheme):
            weight[piece] = stands
        apart = rows.watch(layer, end, Outputs(matrix(end), before)).apart
        weight.copy_(original)
        return apart

    return error


def _round(layer: DecoderLayer, rows: Rows | None, linear: Linear, recipe: Recipe, result: Result) -> None:
    scheme, weight = recipe.scheme_of(linear.name, linear.in_features), matrix(linear)
    gram, original, inputs = None, weight.contiguous(), {}
    wants_gram = recipe.rounding == "gptq" or recipe.clip
    wants_scale = scheme.activations is not None and scheme.activations.in_checkpoint
    if rows is not None and (wants_gram or wants_scale):
        seen = rows.watch(layer, linear, Statistics(wants_gram))
        gram = seen.gram
        if seen.max_abs is None:
            result.unseen.append(linear.name)
        if wants_scale:
            inputs = input_scales(scheme, seen.max_abs, linear.name)
    parts = round_into(weight, original, linear, gram, scheme, recipe)
    result.parts += [replace(part, inputs={name: t.clone() for name, t in inputs.items()}) for part in parts]
    result.weight_errors[linear.name] = float((original - weight).norm() / original.norm().clamp(min=1e-30))
    if gram is not None:
        whole = output_error(original, original.new_zeros(()), gram)
        result.output_errors[linear.name] = (output_error(original, weight, gram) / max(whole, 1e-30)) ** 0.5


def input_scales(scheme: Scheme, max_abs: Tensor | None, name: str) -> dict[str, Tensor]:
    """What the checkpoint has for the inputs of a scheme whose activations do not set their scales by themselves alone,
    float32 [1]: for a static scheme input_scale, what they are divided by; for NVFP4 input_global_scale, which divides
    the scale of each group, so that the largest group's is e4m3's largest number. max_abs [in]: over the calibration
    tokens. Raises ValueError where no token reached the layer `name`."""
    if max_abs is None:
        raise ValueError(
            f"calibration: expected tokens that reach {name}, whose inputs are scaled by what was seen of them, got "
            "none: use more rows, or a scheme that scales inputs by themselves (fp8, mxfp4-w4a4)"
        )
    assert scheme.activations is not None
    reach, largest = FORMATS[scheme.activations.numbers].reach, max_abs.amax().float().reshape(1)
    largest = largest.clamp(min=2.0**-100)  # inputs that were all 0 are codes of 0 with any scale
    if scheme.activations.dynamic:
        return {"input_global_scale": 448.0 * reach / largest}
    return {"input_scale": largest / reach}


def round_into(
    target: Tensor, original: Tensor, linear: Linear, gram: Tensor | None, scheme: Scheme, recipe: Recipe
) -> list[Part]:
    """Fills target [out, in] with what stands for `original`, the matrix of the layer `linear`. gram: None: rounded to
    nearest, whatever the recipe says. Returns the checkpoint's matrices as they are stored."""
    parts = []
    for piece in _pieces(linear, scheme):
        codes, fitted = _codes(original[piece], gram, scheme, recipe)
        target[piece] = decode(codes, scheme, fitted)
        parts += _stored(linear, piece, codes, scheme, fitted)
    return parts


def _codes(weight: Tensor, gram: Tensor | None, scheme: Scheme, recipe: Recipe) -> tuple[Tensor, Fitted]:
    if gram is not None and recipe.clip and scheme.per == "group":
        weight = search_clipping(weight, gram, scheme)
    if gram is not None and recipe.rounding == "gptq":
        found = gptq(weight, gram, scheme, recipe.damping, recipe.act_order)
        return found.codes, found.fitted
    fitted = fit(weight, scheme)
    return encode(weight, scheme, fitted), fitted


def round_head(weight: Tensor, scheme: Scheme, gram: Tensor | None, recipe: Recipe) -> Part:
    """Rounds lm_head [vocab_size, hidden_size], some rows at a time where these share no scale. gram [hidden_size,
    hidden_size], of what the last norm gives: rounded as the recipe says; None: to nearest."""
    alone = scheme.per in ("channel", "group") and scheme.scales != "e4m3"
    pieces = [_codes(rows.float(), gram, scheme, recipe) for rows in weight.split(_HEAD_ROWS if alone else len(weight))]
    if len(pieces) == 1:
        codes, fitted = pieces[0]
        return Part("lm_head", codes, scheme, fitted)
    codes = torch.cat([codes.view(torch.uint8) for codes, _ in pieces]).view(pieces[0][0].dtype)
    zeros = None if scheme.symmetric else torch.cat([f.zeros for _, f in pieces if f.zeros is not None])
    return Part("lm_head", codes, scheme, Fitted(torch.cat([fitted.scales for _, fitted in pieces]), zeros))


def _pieces(linear: Linear, scheme: Scheme) -> list[slice]:
    """Slices of rows that are rounded together: a part by itself where rows share scales, else all parts (so that parts
    of one product have one tensor scale)."""
    if scheme.per in ("tensor", "block"):
        return [rows for _, rows in part_rows(linear)]
    return [slice(0, linear.out_features)]


def _stored(linear: Linear, piece: slice, codes: Tensor, scheme: Scheme, fitted: Fitted) -> list[Part]:
    """The checkpoint's matrices among the rows of a piece."""
    found = []
    for name, rows in part_rows(linear):
        if rows == piece:
            found.append(Part(name, codes, scheme, fitted))
        elif piece.start <= rows.start and rows.stop <= piece.stop:
            zeros = None if fitted.zeros is None else fitted.zeros[rows]
            found.append(Part(name, codes[rows], scheme, Fitted(fitted.scales[rows], zeros, fitted.tensor_scale)))
    return found
