"""A small model made of the core alone, with random weights: no folder, no parsing, no feature."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from reference_impl.core.alone import core_engine
from reference_impl.core.decoder import Decoder
from reference_impl.core.engine import Engine
from reference_impl.core.model_config import ModelConfig, RopeConfig

CPU, DTYPE = torch.device("cpu"), torch.float64


@functools.cache
def small_model() -> Decoder:
    config = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=8, max_position=128, norm_eps=1e-6, rope=RopeConfig(), tied_embeddings=False,
        qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=False, dtype="float64", eos_token_ids=(0,),
        layer_windows=(None, None), attention_scale=8**-0.5,
    )  # fmt: skip
    model = Decoder(config, DTYPE, CPU)
    random = torch.Generator().manual_seed(0)

    def fill(weight: torch.Tensor) -> None:
        norm = weight.ndim == 1  # near 1
        weight.copy_(torch.randn(weight.shape, generator=random, dtype=DTYPE) * (0.3 if norm else 0.25) + norm)

    assert model.lm_head is not None
    for weight in (model.embedding, model.norm, model.lm_head):
        fill(weight)
    for layer in model.layers:
        for norm in (layer.input_norm, layer.mlp_norm):
            fill(norm)
    for linear in model.linears():
        for weight in linear.params.values():
            fill(weight)
    return model


@pytest.fixture(scope="session")
def model() -> Decoder:
    return small_model()


@pytest.fixture(scope="session")
def make_engine(model: Decoder) -> Callable[..., Engine]:
    """make_engine(**sizes of core_engine), of the small model."""

    def make(**sizes: Any) -> Engine:
        return core_engine(model, **{"num_blocks": 64, "block_size": 4, **sizes})

    return make
