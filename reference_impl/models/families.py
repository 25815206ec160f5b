"""The families that are served: what each assumes where its config.json leaves a field out. No torch here.

A new one is a row here, and, where its layers differ from Llama's, a file with them and a row in `decoders.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers, as configs call them


@dataclass(frozen=True)
class Family:
    """What `transformers` assumes of an architecture where its config leaves a field out. None: it must be there."""

    model_type: str
    max_position: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    window: int | None = None
    attention_bias: bool = False  # whether the config's field is heeded
    gemma: int = 0  # generation


FAMILIES = {
    "LlamaForCausalLM": Family("llama", 2048, attention_bias=True),
    "MistralForCausalLM": Family("mistral", 131_072, num_kv_heads=8, window=4096),
    "MixtralForCausalLM": Family("mixtral", 131_072, num_kv_heads=8, norm_eps=1e-5, rope_theta=1e6),
    "Qwen2ForCausalLM": Family("qwen2", 32_768, num_kv_heads=32, window=4096),
    "Qwen3ForCausalLM": Family("qwen3", 32_768, num_kv_heads=32, head_dim=128, window=4096, attention_bias=True),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", 32_768, num_kv_heads=4, window=4096, attention_bias=True),
    "GemmaForCausalLM": Family("gemma", 8192, 16, 256, attention_bias=True, gemma=1),
    "Gemma2ForCausalLM": Family("gemma2", 8192, 4, 256, window=4096, attention_bias=True, gemma=2),
    "Gemma3ForCausalLM": Family("gemma3_text", 131_072, 4, 256, window=4096, attention_bias=True, gemma=3),
    "Olmo2ForCausalLM": Family("olmo2", 2048, norm_eps=1e-5, attention_bias=True),
    "Phi3ForCausalLM": Family("phi3", 4096, norm_eps=1e-5),
    "StableLmForCausalLM": Family("stablelm", 4096, num_kv_heads=32, norm_eps=1e-5),
}
