"""Random small models of each family, saved by `transformers`, for the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

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
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# name -> (family, what differs from SMALL)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2_mha": ("llama", {"num_key_value_heads": 6}),
    "llama_mqa": ("llama", {"num_key_value_heads": 1}),
    "llama3_rope_tied": ("llama", {"rope": {**LLAMA3_ROPE, "rope_theta": 500_000.0}, "tie_word_embeddings": True}),
    "llama_linear_rope": ("llama", {"rope": {"rope_type": "linear", "factor": 4.0}}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_head_dim": ("llama", {"head_dim": 20}),
    "mistral": ("mistral", {"sliding_window": None, "rope": {"rope_type": "default", "rope_theta": 1e6}}),
    "mistral_head_dim": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_bias_tied": ("qwen3", {"head_dim": 12, "attention_bias": True, "tie_word_embeddings": True}),
}


def build(name: str, seed: int = 0) -> Any:
    """A `transformers` model in eval mode with weights large enough that every part matters."""
    import transformers as hf

    family, changes = VARIANTS[name]
    kwargs = {**SMALL, **changes}
    rope = kwargs.pop("rope", {"rope_type": "default"})
    kwargs["rope_parameters"] = {"rope_theta": 10_000.0, **rope}
    prefix = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    config = getattr(hf, f"{prefix}Config")(**kwargs)
    config._attn_implementation = "sdpa"
    torch.manual_seed(seed)
    model = getattr(hf, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * (0.15 if p.ndim == 2 else 0.3) + (1.0 if p.ndim == 1 else 0.0))
    return model


def save(name: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    model = build(name).to(dtype)
    model.save_pretrained(folder, **options)
    return model
