"""Models without weights: the shape of a known one, with random numbers in it. For speed and memory, not for text.

LLM(shape="llama-3-8b", dummy_weights=True).generate([[1, 2, 3]])

What a step reads and computes depends on the shape alone, and where there are experts on how tokens spread over them:
so a benchmark needs no download.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from reference_impl.core.decoder import Decoder
from reference_impl.core.model_config import ModelConfig
from reference_impl.models.config_json import parse_model_config
from reference_impl.models.loader import destinations, finish

Shape = str | ModelConfig | Mapping[str, Any]

# Fields of each model's config.json on the Hugging Face hub. No end tokens: lengths are what was asked for.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
    "smollm-135m": {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    },
}  # fmt: skip


def config_of_shape(shape: Shape) -> ModelConfig:
    """The config of a name of SHAPES, of fields as in a config.json, or of a ModelConfig, which it returns as it is."""
    if isinstance(shape, ModelConfig):
        return shape
    if isinstance(shape, Mapping):
        return parse_model_config(dict(shape), where="shape")
    if not isinstance(shape, str) or shape not in SHAPES:
        raise ValueError(f"shape: expected one of {', '.join(SHAPES)}, or the fields of a config.json, got {shape!r}")
    return parse_model_config(SHAPES[shape], where=shape)


def fill_with_random_numbers(model: Decoder, seed: int = 0) -> None:
    """Fills weights where they will lie, one matrix of the checkpoint at a time: see `_deviation`; norms are 1, biases
    0. A tensor's numbers depend on its name, the seed, the dtype and the kind of device, not on how weights are stored
    or multiplied."""
    config, random = model.config, torch.Generator(model.device)
    for name, ((shape, _), store) in destinations(model).items():
        if len(shape) == 1:
            is_norm = name.endswith("norm.weight")
            store(torch.full(shape, is_norm and not config.norm_plus_one, dtype=model.dtype, device=model.device))
            continue
        random.manual_seed(zlib.crc32(name.encode(), seed))
        values = torch.randn(shape, generator=random, dtype=model.dtype, device=model.device)
        store(values.mul_(_deviation(name, shape[1], config)))
    finish(model)


def _deviation(name: str, in_features: int, config: ModelConfig) -> float:
    """The standard deviation of a matrix's numbers. 1 / sqrt(in) makes outputs of size 1. What is added to the residual
    stream is smaller by sqrt(2 layers), as GPT-2 begins (Radford et al. 2019), and an input embedding that is not the
    output's too is 1: so tokens stay different through all layers, and with them their experts, which are used alike as
    in a model that was trained to that end.
    """
    if name == "model.embed_tokens.weight" and not config.tied_embeddings:
        return 1.0
    is_added = name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight"))
    return 1 / math.sqrt(in_features * (2 * config.num_layers if is_added else 1))
