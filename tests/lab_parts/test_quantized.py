"""A model with other matrices, and a layer that another function multiplies: parts of lab 07."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from reference_impl.assembly.lab_parts import LabEngine, course_llm
from reference_impl.assembly.lab_parts.quantized import (
    Product,
    inputs_of,
    matrices_of,
    multiplied_by,
    with_matrices,
    with_model,
)
from reference_impl.bench.quality import compare
from reference_impl.core.decoder import Decoder
from reference_impl.features.baselines.no_cache import RecomputeAttention
from reference_impl.features.baselines.ragged import ragged_batch

DOWN = "model.layers.1.mlp.down_proj"
TOKENS = [300, 17, 942, 5, 61, 300, 17]


def own() -> Decoder:
    model = course_llm("draft").engine.model
    assert isinstance(model, Decoder)
    return model


@torch.inference_mode()
def logits(model: Decoder) -> Tensor:
    batch = ragged_batch([(TOKENS, 0)], len(TOKENS), model.device, model.config.layer_windows)
    return model(batch, None, RecomputeAttention(model.config.attention_scale, model.config.attention_softcap))


def test_matrices_are_copies_with_a_row_for_each_output() -> None:
    found = matrices_of(own())
    c = own().config
    assert len(found) == 4 * c.num_layers
    assert found[DOWN].shape == (c.hidden_size, c.intermediate_size)
    before = logits(own())
    found[DOWN].zero_()
    assert torch.equal(logits(own()), before)


def test_a_model_with_other_matrices_computes_with_them_and_the_original_does_not() -> None:
    before = logits(own())
    torch.testing.assert_close(logits(with_matrices(own(), matrices_of(own()))), before)  # packed or plain: to rounding
    changed = with_matrices(own(), {DOWN: torch.zeros_like(matrices_of(own())[DOWN])})
    expected = with_matrices(own(), {})  # the same by hand: what the layer adds to the residual stream is nothing
    expected.layers[1].mlp.down.params["weight"].zero_()
    assert torch.equal(logits(changed), logits(expected))
    assert not torch.equal(logits(changed), before)
    assert torch.equal(logits(own()), before)
    assert compare(own(), own(), [TOKENS, TOKENS])["kl"].value == 0
    assert compare(changed, own(), [TOKENS, TOKENS])["kl"].value > 0


def test_another_function_multiplies_one_layer_and_is_told_what_the_layer_would_say() -> None:
    asked: list[Product] = []

    def product(one: Product) -> Tensor:
        asked.append(one)
        assert torch.allclose(one.x @ matrices_of(own())[DOWN].T, one.expected, atol=1e-4)
        return torch.zeros_like(one.expected)

    without = with_matrices(own(), {DOWN: torch.zeros_like(matrices_of(own())[DOWN])})
    assert torch.equal(logits(multiplied_by(own(), DOWN, product)), logits(without))
    assert [one.name for one in asked] == [DOWN]
    assert asked[0].x.shape == (len(TOKENS), own().config.intermediate_size)


def test_the_engine_writes_with_the_other_model() -> None:
    def write(model: Decoder) -> list[int]:
        engine = LabEngine(with_model(course_llm("draft"), model), {"num_blocks": 8, "block_size": 4})
        engine.add(TOKENS, 4)
        return engine.run()["0"]

    silent = with_matrices(own(), {name: torch.zeros_like(matrix) for name, matrix in matrices_of(own()).items()})
    tokens = list(TOKENS)
    for _ in range(4):  # without layers, a token's embedding alone says what is next
        tokens.append(_next(silent, tokens[-1:]))
    assert write(silent) == tokens[len(TOKENS) :]
    assert write(own()) != write(silent)
    assert course_llm("draft").engine.model is own()


@torch.inference_mode()
def _next(model: Decoder, tokens: list[int]) -> int:
    batch = ragged_batch([(tokens, 0)], len(tokens), model.device, model.config.layer_windows)
    attention = RecomputeAttention(model.config.attention_scale, model.config.attention_softcap)
    return int(model(batch, None, attention)[-1].argmax())


def test_inputs_of_layers_are_those_of_all_windows_in_order() -> None:
    before = logits(own())
    windows = [TOKENS, TOKENS[:3]]
    found = inputs_of(own(), windows)
    assert {name: list(x.shape) for name, x in found.items()} == {
        name: [10, matrix.shape[1]] for name, matrix in matrices_of(own()).items()
    }
    asked: list[Tensor] = []
    logits(multiplied_by(own(), DOWN, lambda one: asked.append(one.x) or one.expected))  # type: ignore[func-returns-value]
    assert torch.equal(found[DOWN][: len(TOKENS)], asked[0])
    first = found["model.layers.0.self_attn.qkv_proj"]  # the norm of embeddings: the same token, the same row
    assert torch.allclose(first[0], first[5])
    assert torch.allclose(first[:3], first[7:])
    assert torch.equal(logits(own()), before)  # nothing watches the model itself


def test_wrong_names_and_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="expected the name of a linear layer"):
        with_matrices(own(), {"model.layers.9.mlp.down_proj": torch.zeros(1, 1)})
    with pytest.raises(ValueError, match="expected the name of a linear layer"):
        multiplied_by(own(), "down_proj", lambda one: one.expected)
    with pytest.raises(ValueError, match=r"expected a matrix of \[128, 256\], got \[256, 128\]"):
        with_matrices(own(), {DOWN: torch.zeros(256, 128)})
