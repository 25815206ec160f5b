"""What is folded into a norm or a matrix before changes no layer's function: in float64, to its rounding."""

from __future__ import annotations

import pytest
import torch

from reference_impl.core.decoder import DecoderLayer
from reference_impl.models.quantization.by_layer import Layers
from reference_impl.models.quantization.calibration import Rows, Statistics
from reference_impl.models.quantization.folding import folds, matrix
from reference_impl.models.quantization.hadamard import hadamard, incoherence, random_rotation
from reference_impl.models.quantization.rotation import rotate_layer, rotated_embedding, rotated_head
from tests.quantization.conftest import MakeFolder

TOKENS = torch.arange(40).view(2, 20) * 7 % 61
SHAPES = {
    "qwen3, grouped queries": {},
    "as many heads": {"num_key_value_heads": 4},
    "llama, biases": {"architecture": "LlamaForCausalLM", "attention_bias": True, "mlp_bias": True},
    "phi3": {"architecture": "Phi3ForCausalLM", "pad_token_id": 0, "num_key_value_heads": 2},
}


def after(layers: Layers, index: int, layer: DecoderLayer) -> torch.Tensor:
    """The stream behind a layer, from rows that the embedding gives."""
    rows = Rows.of(*layers.front(TOKENS))
    rows.advance(layer)
    return rows.x


@pytest.mark.parametrize("name", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_fold_leaves_the_function(shape: str, name: str, make_folder: MakeFolder) -> None:
    layers = Layers(make_folder(**SHAPES[shape]), torch.float64)
    layer = layers.layer(1)
    expected = after(layers, 1, layer)
    fold = folds(layer)[name]
    s = fold.tied(torch.rand(fold.linear.in_features, dtype=torch.float64, generator=torch.manual_seed(0)) * 9 + 0.1)
    before = matrix(fold.linear).clone()
    fold.apply(s)
    assert not torch.equal(matrix(fold.linear), before)
    torch.testing.assert_close(after(layers, 1, layer), expected, rtol=0, atol=1e-12)


def test_the_inputs_of_a_matrix_are_those_whose_statistics_are_kept(make_folder: MakeFolder) -> None:
    layers = Layers(make_folder(), torch.float64)
    rows, layer = layers.rows_before(1, TOKENS), layers.layer(1)
    torch.testing.assert_close(rows.x, after(layers, 0, layers.layer(0)))
    linear = folds(layer)["down_proj"].linear
    x = rows.inputs(layer, linear)
    assert x.shape == (TOKENS.numel(), linear.in_features)
    torch.testing.assert_close(x.T @ x, rows.watch(layer, linear, Statistics()).known_gram)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_rotated_model_is_the_same_function(shape: str, make_folder: MakeFolder) -> None:
    """Embedding to logits, both layers: x Q instead of x between them."""
    layers = Layers(make_folder(**SHAPES[shape]), torch.float64)
    plain, rotated = Rows.of(*layers.front(TOKENS)), Rows.of(*layers.front(TOKENS))
    rotation = random_rotation(64, seed=3)
    rotated.x = rotated_embedding(rotated.x, rotation)
    for index in range(2):
        plain.advance(layers.layer(index))
        layer = layers.layer(index)
        rotate_layer(layer, rotation)
        rotated.advance(layer)
    torch.testing.assert_close(rotated.x, plain.x @ rotation, rtol=0, atol=1e-11)
    norm, head = layers.read("model.norm.weight").double(), layers.read("model.embed_tokens.weight").double()

    def normalized(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    expected = normalized(plain.x) * norm @ head.T
    found = normalized(rotated.x) @ rotated_head(head, norm, rotation).T
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("size", [1, 2, 6, 20, 64, 96])
def test_a_random_rotation_is_orthogonal(size: int) -> None:
    q = random_rotation(size, seed=5)
    torch.testing.assert_close(q @ q.T, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-12)
    assert not torch.equal(q, random_rotation(size, seed=6)) or size == 1


def test_a_hadamard_matrix_spreads_one_outlier_over_all() -> None:
    matrix = torch.zeros(64, 64, dtype=torch.float64)
    matrix[5, 9] = 8.0
    assert incoherence(matrix) == pytest.approx(64)
    assert incoherence(matrix @ hadamard(64)) == pytest.approx(8)  # a row of 64 entries of 1
    assert incoherence(hadamard(64) @ matrix @ hadamard(64)) == pytest.approx(1)
    with pytest.raises(ValueError, match="power of 2, got 12"):
        hadamard(12)


@pytest.mark.parametrize("architecture", ["GemmaForCausalLM", "Olmo2ForCausalLM", "StableLmForCausalLM"])
def test_other_orders_of_norms_are_refused(architecture: str, make_folder: MakeFolder) -> None:
    more = {} if architecture == "GemmaForCausalLM" else {"head_dim": None}
    layers = Layers(make_folder(architecture=architecture, **more), torch.float64)
    with pytest.raises(ValueError, match="expected a layer like Llama's"):
        folds(layers.layer(0))
