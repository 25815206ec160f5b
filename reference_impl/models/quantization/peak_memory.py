"""How many bytes of tensors a run of `quantize_folder` holds at most. Tests count them, at two sizes."""

from __future__ import annotations

import torch

from reference_impl.core.decoder import DecoderLayer
from reference_impl.core.model_config import ModelConfig
from reference_impl.models.quantization.by_layer import linears_of, new_layer
from reference_impl.models.quantization.recipes import Recipe

FLOAT32 = torch.float32.itemsize
_HESSIANS = 3  # the Gram, its copy that is factored, and a matrix [in, in] on the way


def peak_bytes(config: ModelConfig, recipe: Recipe, largest: int, rows: int = 0, length: int = 0) -> int:
    """The most bytes of tensors at once. largest: bytes of the checkpoint's largest tensor. rows, length: of
    calibration tokens, for a recipe that is calibrated. For methods that rotate nothing:

    rounded to nearest, whatever is folded before: two layers in float32, and the largest tensor;
    GPTQ: a layer in float32, and three Hessians of its widest matrix, if that is more;
    with calibration also the rows' residual stream, and four times the widest activation of one row, all in float32;
    AWQ holds the outputs of one block, too, which are as large as the stream.

    An lm_head that is quantized, too, is not counted: its codes are held beside it.
    """
    if recipe.rotate:
        raise ValueError("peak_bytes: expected a recipe that does not rotate, got one that does")
    layer = bytes_of_layer(config)
    widest = max(linear.in_features for linear in linears_of(_layer(config)))
    peak = 2 * layer + largest
    if recipe.rounding == "gptq":
        peak = max(layer + _HESSIANS * widest**2 * FLOAT32, largest)
    if recipe.calibrated:
        streams = 2 if recipe.scaling == "awq" else 1
        peak += streams * rows * length * config.hidden_size * FLOAT32 + 4 * length * widest * FLOAT32
    return peak


def bytes_of_layer(config: ModelConfig) -> int:
    """Bytes of a layer in float32."""
    layer = _layer(config)
    return sum(linear.in_features * linear.out_features for linear in linears_of(layer)) * FLOAT32 + sum(
        norm.nbytes for norm in layer.norms().values()
    )


def _layer(config: ModelConfig) -> DecoderLayer:
    return new_layer(config, 0, torch.float32, torch.device("meta"))
