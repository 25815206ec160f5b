"""Published configs, as their folders have them: what is read, and how many parameters the model would have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from reference_impl.assembly.model import build_model
from reference_impl.core.linear import UnquantizedLinear
from reference_impl.models.config_json import parse_model_config

GEMMA2_2B: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304,
    "intermediate_size": 9216, "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 26,
    "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "sliding_window": 4096, "torch_dtype": "float32", "vocab_size": 256000,
}  # fmt: skip
GEMMA3_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": None,
    "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
    "intermediate_size": 6912, "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26,
    "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16", "vocab_size": 262144,
}  # fmt: skip
MIXTRAL_8X7B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_local_experts": 8, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
    "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 32000,
}  # fmt: skip
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
    "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000.0,
    "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
OLMO2_7B: dict[str, Any] = {
    "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "olmo2",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-6,
    "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False, "torch_dtype": "float32",
    "vocab_size": 100352,
}  # fmt: skip
PHI3_MINI_4K: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 3072,
    "intermediate_size": 8192, "max_position_embeddings": 4096, "model_type": "phi3", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "vocab_size": 32064,
}  # fmt: skip
# Its 48 factors each are left out: what they are does not matter here.
PHI4_MINI: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 3072,
    "intermediate_size": 8192, "max_position_embeddings": 131072, "model_type": "phi3", "num_attention_heads": 24,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 262144,
    "rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 200064,
}  # fmt: skip
STABLELM_2_1_6B: dict[str, Any] = {
    "architectures": ["StableLmForCausalLM"], "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5632,
    "layer_norm_eps": 1e-5, "max_position_embeddings": 4096, "model_type": "stablelm", "num_attention_heads": 32,
    "num_hidden_layers": 24, "num_key_value_heads": 32, "partial_rotary_factor": 0.25, "rope_theta": 10000,
    "tie_word_embeddings": False, "torch_dtype": "float16", "use_qkv_bias": True, "vocab_size": 100352,
}  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "parameters"),
    [
        (GEMMA2_2B, 2_614_341_888),
        (GEMMA3_1B, 999_885_952),
        (MIXTRAL_8X7B, 46_702_792_704),
        (QWEN3_30B_A3B, 30_532_122_624),
        (OLMO2_7B, 7_298_617_344),
        (PHI3_MINI_4K, 3_821_079_552),
        (PHI4_MINI, 3_836_021_760),
        (STABLELM_2_1_6B, 1_644_515_328),
    ],
    ids=lambda value: value["architectures"][0] if isinstance(value, dict) else "",
)
def test_a_published_model_has_the_parameters_of_its_model_card(raw: dict[str, Any], parameters: int) -> None:
    nowhere, dtype = torch.device("meta"), torch.bfloat16
    config = parse_model_config(raw)
    model = build_model(config, dtype, nowhere, 1, linear_method=UnquantizedLinear(dtype, nowhere))
    assert model.num_parameters() == parameters


def test_gemma_windows_and_ropes_are_read_from_published_configs() -> None:
    gemma2, gemma3 = parse_model_config(GEMMA2_2B), parse_model_config(GEMMA3_1B)
    assert gemma2.layer_windows == (4096, None) * 13
    assert gemma3.layer_windows == ((512,) * 5 + (None,)) * 4 + (512, 512)
    assert gemma2.window_rope is None
    assert gemma3.window_rope is not None
    assert (gemma3.rope.theta, gemma3.window_rope.theta) == (1e6, 1e4)
    assert gemma2.tied_embeddings
    assert gemma3.tied_embeddings
    assert parse_model_config(MIXTRAL_8X7B).layer_windows == (None,) * 32
    assert parse_model_config(QWEN3_30B_A3B).layer_windows == (None,) * 48


def test_phi_windows_and_ropes_are_read_from_published_configs() -> None:
    phi3, phi4 = parse_model_config(PHI3_MINI_4K), parse_model_config(PHI4_MINI)
    assert phi3.layer_windows == (2047,) * 32
    assert (phi3.rope.kind, phi3.rope.partial, phi3.max_position) == ("default", 1.0, 4096)
    assert (phi4.rope.kind, phi4.rope.partial, phi4.head_dim) == ("longrope", 0.75, 128)
    assert phi4.max_position == 4096, "beyond it, the long factors would begin"
    assert phi4.rope.attention_factor == pytest.approx(1.190238, abs=1e-6)  # sqrt(1 + 5 / 12): 32 times as long as 2^12
