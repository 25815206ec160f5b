"""Random small models of each family, built and saved by `transformers`, and the engine's logits for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from reference_impl.core.attention import TorchAttention
from reference_impl.core.decoder import Decoder
from reference_impl.features.baselines.contiguous_cache import ContiguousKVCache
from reference_impl.features.baselines.ragged import ragged_batch

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

# Other frequencies beyond 160 positions, which are more than the tests use.
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.5, 4.0],
    "long_factor": [1.0, 2.0, 5.0, 40.0],
    "original_max_position_embeddings": 160,
}
LONGROPE_PARTIAL = {
    **LONGROPE,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.3, 3.0],
    "long_factor": [2.0, 9.0, 40.0],
}

# name -> (family, what differs from SMALL)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2_mha": ("Llama", {"num_key_value_heads": 6}),
    "llama_mqa": ("Llama", {"num_key_value_heads": 1}),
    "llama3_rope_tied": ("Llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama_linear_rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e3}}),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_head_dim": ("Llama", {"head_dim": 20}),
    "mistral": ("Mistral", {"sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "mistral_head_dim": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}),
    "mistral_window": ("Mistral", {"sliding_window": 24}),
    "qwen2_window": ("Qwen2", {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 2}),
    "qwen3_window": (
        "Qwen3",
        {
            "head_dim": 16,
            "sliding_window": 7,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_bias_tied": ("Qwen3", {"head_dim": 12, "attention_bias": True, "tie_word_embeddings": True}),
    "gemma": ("Gemma", {"head_dim": 16, "hidden_act": "gelu_pytorch_tanh"}),
    "gemma_untied_bias": (
        "Gemma",
        {"head_dim": 8, "hidden_act": "gelu", "tie_word_embeddings": False, "attention_bias": True},
    ),
    # A scale other than 1 / sqrt(head_dim), and caps low enough to bend scores and logits.
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "sliding_window": 24,
            "query_pre_attn_scalar": 7,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma2_uncapped": (
        "Gemma2",
        {"head_dim": 16, "sliding_window": 7, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": (
        "Gemma3",
        {"head_dim": 16, "sliding_window": 24, "num_hidden_layers": 6, "rope_parameters": GEMMA3_ROPE},
    ),
    "gemma3_capped": (
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 5,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 40,
            "final_logit_softcapping": 5.0,
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}},
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral_window_tied": ("Mixtral", {"num_local_experts": 4, "sliding_window": 24, "tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    ),
    "qwen3_moe_mixed": (
        "Qwen3Moe",
        {
            "num_hidden_layers": 5,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "use_sliding_window": True,
            "sliding_window": 24,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "olmo2_mha_bias_tied": (
        "Olmo2",
        {"num_key_value_heads": 6, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "olmo2_llama3_rope": ("Olmo2", {"rope_parameters": LLAMA3_ROPE, "num_key_value_heads": 1}),
    "phi3": ("Phi3", {}),
    "phi3_mha_tied": ("Phi3", {"num_key_value_heads": 6, "tie_word_embeddings": True}),
    "phi3_window": ("Phi3", {"sliding_window": 24}),
    "phi3_partial": ("Phi3", {"rope_parameters": PARTIAL_ROPE}),
    "phi3_longrope": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 160}),
    "phi3_all": (
        "Phi3",
        {
            "rope_parameters": LONGROPE_PARTIAL,
            "original_max_position_embeddings": 160,
            "sliding_window": 24,
            "tie_word_embeddings": True,
        },
    ),
    "stablelm": ("StableLm", {"rope_parameters": PARTIAL_ROPE}),
    "stablelm_biases_tied": (
        "StableLm",
        {
            "num_key_value_heads": 6,
            "rope_parameters": {**PARTIAL_ROPE, "partial_rotary_factor": 0.25},
            "use_qkv_bias": True,
            "layer_norm_eps": 1e-3,
            "tie_word_embeddings": True,
        },
    ),
}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return request.param


def implementation(family: str) -> str:
    """sdpa, since the eager attention takes its softmax in float32, whatever the model's dtype; it has no soft cap."""
    return "eager" if family == "Gemma2" else "sdpa"


def _build(name: str, **changes: Any) -> Any:
    import transformers

    family, differs = VARIANTS[name]
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    kind = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, "rope_parameters": rope, **differs, **changes})
    config._attn_implementation = implementation(family)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():  # large enough that every part shows in the logits: norms around 1, biases not 0
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * (0.15 if p.ndim >= 2 else 0.3) + (1.0 if p.ndim == 1 else 0.0))
    return model


@pytest.fixture
def build() -> Callable[..., Any]:
    """build(name, **config changes) -> a `transformers` model in eval mode with random float32 weights."""
    return _build


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., tuple[Any, Path]]:
    """save(name, dtype, shard_size, **config changes) -> (the `transformers` model, the folder it was saved in)."""

    def save_model(
        name: str, dtype: torch.dtype = torch.float32, shard_size: str | None = None, **changes: Any
    ) -> tuple[Any, Path]:
        model = _build(name, **changes).to(dtype)
        model.save_pretrained(tmp_path, **({"max_shard_size": shard_size} if shard_size else {}))
        return model, tmp_path

    return save_model


@pytest.fixture
def edit() -> Callable[..., None]:
    """edit(folder, field=value, ...) rewrites config.json; a value of `...` removes the field."""

    def edit_config(folder: Path, **changes: Any) -> None:
        path = folder / "config.json"
        raw = {**json.loads(path.read_text("utf-8")), **changes}
        path.write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}), "utf-8")

    return edit_config


@pytest.fixture
def their_logits() -> Callable[[Any, Sequence[int]], torch.Tensor]:
    """(transformers model, ids) -> [len(ids), vocab_size]."""

    def logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([list(ids)])).logits[0]

    return logits


@pytest.fixture
def our_logits() -> Callable[..., list[torch.Tensor]]:
    """(Decoder, *sequences) -> logits of every position of each, from one ragged pass over a cache."""

    def logits(model: Decoder, *sequences: Sequence[int]) -> list[torch.Tensor]:
        longest, c = max(map(len, sequences)), model.config
        cache = ContiguousKVCache(model, len(sequences), longest)
        batch = ragged_batch([(ids, 0) for ids in sequences], longest, model.device, c.layer_windows)
        batch.logits_indices = torch.arange(batch.num_tokens)
        attention = TorchAttention(c.attention_scale, model.dtype, c.attention_softcap)
        with torch.inference_mode():
            return list(model(batch, cache, attention).split(batch.query_lens))

    return logits
