"""Random small models of each family, built and saved by `transformers`, and the engine's logits for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from reference_impl.baselines.ragged import ragged_batch
from reference_impl.config import EngineConfig
from reference_impl.engine import Engine
from reference_impl.models.decoder import Decoder

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
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_bias_tied": ("Qwen3", {"head_dim": 12, "attention_bias": True, "tie_word_embeddings": True}),
}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return request.param


def _build(name: str, **changes: Any) -> Any:
    import transformers

    family, differs = VARIANTS[name]
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    config = getattr(transformers, f"{family}Config")(**{**SMALL, "rope_parameters": rope, **differs, **changes})
    # sdpa: the eager attention takes its softmax in float32, whatever the model's dtype.
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():  # large enough that every part shows in the logits: norms around 1, biases not 0
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * (0.15 if p.ndim == 2 else 0.3) + (1.0 if p.ndim == 1 else 0.0))
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
    """(Decoder, *sequences) -> logits of every position of each, from one ragged pass over the paged cache."""

    def logits(model: Decoder, *sequences: Sequence[int]) -> list[torch.Tensor]:
        longest = max(map(len, sequences))
        options = EngineConfig(block_size=longest, num_blocks=len(sequences), max_model_len=model.config.sliding_window)
        engine = Engine(model, options)
        batch = ragged_batch([(ids, 0) for ids in sequences], longest, model.device)
        batch.logits_indices = torch.arange(batch.num_tokens)
        with torch.inference_mode():
            return list(model(batch, engine.kv_cache, engine.attention).split(batch.query_lens))

    return logits
