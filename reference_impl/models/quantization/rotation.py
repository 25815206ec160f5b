"""A model whose residual stream is rotated, so that no channel stands out (QuaRot, Ashkboos et al. 2024; its offline
half: nothing is computed while the model runs that was not before).

RMSNorm without a weight commutes with an orthogonal Q: norm(x Q) = norm(x) Q. So the norms' weights go into what is
after them first; then all that writes to the stream (embedding, o, down) is multiplied by Q, and all that reads it
(qkv, gate and up, the head) by Q^T. Values and the matrix that reads their mean are rotated within each head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference_impl.core.decoder import DecoderLayer
from reference_impl.models.quantization.folding import folds, matrix
from reference_impl.models.quantization.hadamard import random_rotation


@torch.inference_mode()
def fold_norms(layer: DecoderLayer) -> None:
    """Makes both norms' weights 1, and multiplies what reads them by what they were."""
    found = folds(layer)
    for name, norm in (("qkv_proj", layer.input_norm), ("gate_up_proj", layer.mlp_norm)):
        matrix(found[name].linear).mul_(norm)
        norm.fill_(1)


@torch.inference_mode()
def rotate_layer(layer: DecoderLayer, rotation: Tensor) -> None:
    """Changes the layer for a residual stream x Q instead of x, which it gives back rotated, too. rotation: Q [hidden,
    hidden], orthogonal, float64. The layer's norms are folded first."""
    c = layer.config
    _check(rotation, c.hidden_size)
    fold_norms(layer)
    found = folds(layer)
    for name in ("qkv_proj", "gate_up_proj"):
        _put(matrix(found[name].linear), lambda w: w @ rotation)
    for name in ("o_proj", "down_proj"):
        linear = found[name].linear
        _put(matrix(linear), lambda w: rotation.T @ w)
        if "bias" in linear.params:
            _put(linear.params["bias"], lambda b: b @ rotation)
    heads = random_rotation(c.head_dim, seed=layer.index + 1)
    first = (c.num_heads + c.num_kv_heads) * c.head_dim
    _put(matrix(layer.qkv)[first:], lambda w: (heads.T @ w.unflatten(0, (-1, c.head_dim))).flatten(0, 1))
    if "bias" in layer.qkv.params:
        _put(layer.qkv.params["bias"][first:], lambda b: (b.unflatten(0, (-1, c.head_dim)) @ heads).flatten())
    _put(matrix(layer.o), lambda w: (w.unflatten(1, (-1, c.head_dim)) @ heads).flatten(1))


def rotated_embedding(embedding: Tensor, rotation: Tensor) -> Tensor:
    """The embedding that writes a rotated stream: [vocab_size, hidden_size] in the dtype of the embedding."""
    return (embedding.double() @ rotation).to(embedding.dtype)


def rotated_head(head: Tensor, norm: Tensor, rotation: Tensor) -> Tensor:
    """The head [vocab_size, hidden_size] that reads the rotated stream after a norm whose weight, `norm`, it has taken
    over. That unties tied embeddings: the head is another matrix than the embedding then."""
    return (head.double() * norm.double() @ rotation).to(head.dtype)


def _put(target: Tensor, change: object) -> None:
    assert callable(change)
    target.copy_(change(target.double()))


def _check(rotation: Tensor, size: int) -> None:
    if rotation.shape != (size, size):
        raise ValueError(f"rotation: expected [{size}, {size}], the model's hidden size, got {list(rotation.shape)}")
    wrong = float((rotation.double() @ rotation.double().T - torch.eye(size, dtype=torch.float64)).abs().max())
    if wrong > 1e-9:
        raise ValueError(f"rotation: expected an orthogonal matrix, got one whose Q Q^T is off by {wrong:.1e}")
