"""A config.json that cannot be served is refused by name: which file, which field, what was expected, what came."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reference_impl.assembly.config import ConfigError, EngineConfig
from reference_impl.models.config_json import parse_model_config, read_model_config

GOOD = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
QWEN = {"architectures": ["Qwen2ForCausalLM"]}
QWEN_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2}
GEMMA = {"architectures": ["GemmaForCausalLM"], "head_dim": 8}
GEMMA2 = {"architectures": ["Gemma2ForCausalLM"], "head_dim": 8}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "head_dim": 8}
MISTRAL = {"architectures": ["MistralForCausalLM"]}
OLMO2 = {"architectures": ["Olmo2ForCausalLM"]}
PHI3 = {"architectures": ["Phi3ForCausalLM"]}
STABLELM = {"architectures": ["StableLmForCausalLM"]}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
SLIDES, FULL = "sliding_attention", "full_attention"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

# changes -> the field and what was found, both of which the message must name
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"architectures": ["GPT2LMHeadModel"]}, "architectures", "GPT2LMHeadModel"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "architectures", "LlamaForSequenceClassification"),
    ({"architectures": None, "model_type": "mamba"}, "architectures", "mamba"),
    ({"architectures": None}, "architectures", "None"),
    ({"architectures": [{}]}, "architectures", "{}"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type", "yarn"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope type", "dynamic"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "rope type", "longrope"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor", "None"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor", "0"),
    ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, "factor", "'4'"),
    ({"rope_scaling": LLAMA3}, "original_max_position_embeddings", "None"),
    ({"rope_scaling": "linear"}, "rope_scaling", "'linear'"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters", "full_attention"),
    ({"rope_theta": -1.0}, "rope_theta", "-1.0"),
    ({"rope_theta": True}, "rope_theta", "True"),
    ({"rope_parameters": {"rope_theta": "1e4"}}, "rope_theta", "'1e4'"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "0.5"),
    ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor", "0.25"),
    ({"rope_parameters": {"partial_rotary_factor": "half"}}, "partial_rotary_factor", "half"),
    ({"hidden_act": "gelu"}, "hidden_act", "gelu"),
    ({"hidden_act": ["silu"]}, "hidden_act", "['silu']"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config", "gptq"),
    ({"quantization_config": "fp8"}, "quantization_config", "fp8"),
    ({"dtype": "float8_e4m3fn"}, "dtype", "float8_e4m3fn"),
    ({"torch_dtype": "int8"}, "dtype", "int8"),
    ({"head_dim": 7}, "head_dim", "7"),
    ({"hidden_size": 50}, "hidden_size", "50"),
    ({"num_key_value_heads": 4}, "num_key_value_heads", "4"),
    ({"num_key_value_heads": 12}, "num_key_value_heads", "12"),
    ({"rms_norm_eps": 0}, "rms_norm_eps", "0"),
    ({"rms_norm_eps": "1e-6"}, "rms_norm_eps", "1e-6"),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps", "inf"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps", "nan"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings", "'false'"),
    ({"attention_bias": 1}, "attention_bias", "1"),
    ({"mlp_bias": "no"}, "mlp_bias", "'no'"),
    ({"eos_token_id": "2"}, "eos_token_id", "'2'"),
    ({"eos_token_id": [2, True]}, "eos_token_id", "True"),
    ({"eos_token_id": -1}, "eos_token_id", "-1"),
    ({"eos_token_id": 2.0}, "eos_token_id", "2.0"),
    ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window", "0"),
    ({"architectures": ["MistralForCausalLM"], "sliding_window": "4096"}, "sliding_window", "'4096'"),
    ({**QWEN, "use_sliding_window": "yes"}, "use_sliding_window", "'yes'"),
    ({**QWEN, "layer_types": ["full_attention", "linear_attention"]}, "layer_types", "linear_attention"),
    ({**QWEN, "layer_types": "full_attention"}, "layer_types", "full_attention"),
    ({**QWEN, "layer_types": [FULL]}, "layer_types", "['full_attention']"),
    ({**QWEN, "layer_types": [SLIDES, FULL], "sliding_window": 64}, "use_sliding_window", "None"),
    ({**QWEN, "layer_types": [SLIDES, FULL], "sliding_window": None}, "sliding_window", "None"),
    ({**QWEN, "use_sliding_window": True, "max_window_layers": -1}, "max_window_layers", "-1"),
    ({**QWEN, "use_sliding_window": True, "max_window_layers": "0"}, "max_window_layers", "'0'"),
    ({**MISTRAL, "layer_types": [SLIDES, FULL]}, "layer_types", "full_attention"),
    ({**MISTRAL, "layer_types": [SLIDES, SLIDES], "sliding_window": None}, "layer_types", "sliding_attention"),
    ({**QWEN_MOE, "layer_types": [SLIDES, FULL], "use_sliding_window": True}, "layer_types", "full_attention"),
    ({**GEMMA2, "sliding_window": None}, "sliding_window", "None"),
    ({**GEMMA3, "sliding_window_pattern": 0}, "sliding_window_pattern", "0"),
    ({**GEMMA, "hidden_act": "gelu_new"}, "hidden_act", "gelu_new"),
    ({**GEMMA, "hidden_activation": "gelu"}, "hidden_activation", "gelu"),
    ({**GEMMA2, "hidden_activation": "gelu"}, "hidden_activation", "gelu"),
    ({**GEMMA2, "use_bidirectional_attention": True}, "use_bidirectional_attention", "True"),
    ({**GEMMA2, "attn_logit_softcapping": 0}, "attn_logit_softcapping", "0"),
    ({**GEMMA2, "final_logit_softcapping": "30"}, "final_logit_softcapping", "'30'"),
    ({**GEMMA2, "query_pre_attn_scalar": None}, "query_pre_attn_scalar", "None"),
    ({**GEMMA2, "rope_parameters": {FULL: {"rope_theta": 1e4}}}, "rope_parameters", "full_attention"),
    ({**GEMMA3, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping", "50.0"),
    ({**GEMMA3, "rope_parameters": {"rope_theta": 1e6}}, "rope_parameters", "1000000.0"),
    ({**GEMMA3, "rope_parameters": {SLIDES: {"rope_type": "yarn"}}}, "rope type", "yarn"),
    ({**GEMMA3, "rope_local_base_freq": -1}, "rope_theta", "-1"),
    ({"architectures": ["Gemma3ForConditionalGeneration"]}, "architectures", "Gemma3ForConditionalGeneration"),
    ({**QWEN_MOE, "num_experts": 0}, "num_experts", "0"),
    ({**QWEN_MOE, "num_experts_per_tok": 5}, "num_experts_per_tok", "5"),
    ({**QWEN_MOE, "norm_topk_prob": 1}, "norm_topk_prob", "1"),
    ({**QWEN_MOE, "decoder_sparse_step": 0}, "decoder_sparse_step", "0"),
    ({**QWEN_MOE, "mlp_only_layers": 1}, "mlp_only_layers", "1"),
    ({**QWEN_MOE, "mlp_only_layers": [2]}, "mlp_only_layers", "[2]"),
    ({**QWEN_MOE, "mlp_only_layers": [True]}, "mlp_only_layers", "[True]"),
    ({**QWEN_MOE, "moe_intermediate_size": 0}, "moe_intermediate_size", "0"),
    ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 1}, "num_experts_per_tok", "2"),
    ({**OLMO2, "hidden_act": "gelu"}, "hidden_act", "gelu"),
    ({**OLMO2, "attention_bias": "yes"}, "attention_bias", "'yes'"),
    ({**OLMO2, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type", "yarn"),
    ({**OLMO2, "rope_scaling": LONGROPE}, "rope type", "longrope"),
    ({**OLMO2, "partial_rotary_factor": 0.5}, "partial_rotary_factor", "0.5"),
    ({"architectures": ["OlmoForCausalLM"]}, "architectures", "OlmoForCausalLM"),
    ({"architectures": ["Olmo3ForCausalLM"]}, "architectures", "Olmo3ForCausalLM"),
    ({**PHI3, "hidden_act": "gelu_new"}, "hidden_act", "gelu_new"),
    ({**PHI3, "attention_bias": True}, "attention_bias", "True"),
    ({**PHI3, "sliding_window": 0}, "sliding_window", "0"),
    ({**PHI3, "sliding_window": 64, "layer_types": [SLIDES, FULL]}, "layer_types", "full_attention"),
    ({**PHI3, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type", "yarn"),
    ({**PHI3, "rope_scaling": {"type": "linear", "factor": 4.0}}, "rope type", "linear"),
    ({**PHI3, "rope_scaling": {**LONGROPE, "short_factor": None}}, "short_factor", "None"),
    ({**PHI3, "rope_scaling": {**LONGROPE, "short_factor": [1.0] * 3}}, "short_factor", "[1.0, 1.0, 1.0]"),
    ({**PHI3, "rope_scaling": {**LONGROPE, "short_factor": [1.0, "2", 1, 1]}}, "short_factor", "'2'"),
    ({**PHI3, "rope_scaling": {**LONGROPE, "attention_factor": 0}}, "attention_factor", "0"),
    (
        {**PHI3, "rope_scaling": LONGROPE, "original_max_position_embeddings": 0},
        "original_max_position_embeddings",
        "0",
    ),
    ({**PHI3, "partial_rotary_factor": 0.4}, "partial_rotary_factor", "0.4"),
    ({**PHI3, "partial_rotary_factor": 1.5}, "partial_rotary_factor", "1.5"),
    ({**PHI3, "rope_parameters": {"partial_rotary_factor": "half"}}, "partial_rotary_factor", "half"),
    ({**STABLELM, "use_parallel_residual": True}, "use_parallel_residual", "True"),
    ({**STABLELM, "qk_layernorm": True}, "qk_layernorm", "True"),
    ({**STABLELM, "head_dim": 16}, "head_dim", "16"),
    ({**STABLELM, "layer_norm_eps": 0}, "layer_norm_eps", "0"),
    ({**STABLELM, "partial_rotary_factor": 0.4}, "partial_rotary_factor", "0.4"),
    ({**STABLELM, "rope_scaling": {"type": "linear", "factor": 4.0}}, "rope type", "linear"),
    ({"architectures": ["PhimoeForCausalLM"]}, "architectures", "PhimoeForCausalLM"),
    ({"architectures": ["Phi3SmallForCausalLM"]}, "architectures", "Phi3SmallForCausalLM"),
]


@pytest.mark.parametrize(("changes", "field", "found"), REFUSED, ids=[json.dumps(c)[:60] for c, _, _ in REFUSED])
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], field: str, found: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_model_config({**GOOD, **changes}, where="folder/config.json")
    message = str(error.value)
    assert message.startswith("folder/config.json: ")
    assert field in message
    assert "expected" in message
    assert found in message


@pytest.mark.parametrize("bad", [True, "48", -48, 0, 48.0, [48], {}])
@pytest.mark.parametrize("field", [k for k, v in GOOD.items() if isinstance(v, int)])
def test_a_size_that_is_not_a_positive_integer_is_named(field: str, bad: object) -> None:
    with pytest.raises(ConfigError, match=rf"config: {field}: expected a positive integer, found "):
        parse_model_config({**GOOD, field: bad})


@pytest.mark.parametrize(
    "field", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
def test_a_size_that_is_missing_is_named(field: str) -> None:
    with pytest.raises(ConfigError, match=f"config: {field}: expected a positive integer, found None"):
        parse_model_config({k: v for k, v in GOOD.items() if k != field})


def test_the_model_type_stands_in_for_missing_architectures() -> None:
    raw = {k: v for k, v in GOOD.items() if k != "architectures"}
    assert parse_model_config({**raw, "model_type": "qwen2"}).architecture == "Qwen2ForCausalLM"


def test_end_tokens_of_generation_config_have_the_last_word() -> None:
    assert parse_model_config({**GOOD, "eos_token_id": 2}).eos_token_ids == (2,)
    assert parse_model_config({**GOOD, "eos_token_id": [2, 3]}).eos_token_ids == (2, 3)
    assert parse_model_config({**GOOD, "eos_token_id": 2}, {"eos_token_id": [5, 0]}).eos_token_ids == (5, 0)
    assert parse_model_config(GOOD).eos_token_ids == ()
    with pytest.raises(ConfigError, match="eos_token_id"):
        parse_model_config(GOOD, {"eos_token_id": "end"})


def test_rope_scaling_wins_over_rope_parameters_as_in_transformers() -> None:
    both = {
        "rope_theta": 5e5,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_theta": 1.0},
    }
    rope = parse_model_config({**GOOD, **both}).rope
    assert (rope.theta, rope.kind, rope.factor) == (5e5, "linear", 2.0)


def test_mistral_has_no_attention_bias_and_qwen2_always_has_one() -> None:
    mistral = parse_model_config({**GOOD, "architectures": ["MistralForCausalLM"], "attention_bias": True})
    assert not mistral.qkv_bias
    assert not mistral.o_bias
    qwen2 = parse_model_config({**GOOD, "architectures": ["Qwen2ForCausalLM"], "attention_bias": False})
    assert qwen2.qkv_bias
    assert not qwen2.o_bias


def windows(**changes: Any) -> tuple[int | None, ...]:
    return parse_model_config({**GOOD, **changes}).layer_windows


def test_a_window_that_no_layer_uses_is_none() -> None:
    assert windows(sliding_window=64) == (None, None), "Llama has none, whatever its config says"
    assert windows(**QWEN, sliding_window=64) == (None, None)
    assert windows(**QWEN, sliding_window=64, use_sliding_window=True) == (None, None), "28 layers come before"
    assert windows(**QWEN, sliding_window=64, use_sliding_window=True, max_window_layers=1) == (None, 64)
    assert windows(**QWEN, use_sliding_window=True, max_window_layers=0) == (4096, 4096)
    full = {"layer_types": ["full_attention"] * 2, "use_sliding_window": True, "max_window_layers": 0}
    assert windows(**QWEN, **full) == (None, None), "layer_types has the last word"


def test_every_layer_of_mistral_has_the_window() -> None:
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert windows(**mistral, sliding_window=64) == (64, 64)
    assert windows(**mistral, sliding_window=None) == (None, None)
    assert windows(**mistral, sliding_window=64, layer_types=["sliding_attention"] * 2) == (64, 64)


def test_gemma_alternates_its_windows_and_gemma_3_has_a_full_layer_in_six() -> None:
    assert windows(**GEMMA2, num_hidden_layers=4, sliding_window=64) == (64, None, 64, None)
    assert windows(**GEMMA3, num_hidden_layers=8, sliding_window=64) == (64,) * 5 + (None,) + (64,) * 2
    assert windows(**GEMMA3, num_hidden_layers=3, sliding_window_pattern=2) == (4096, None, 4096)
    assert windows(architectures=["GemmaForCausalLM"], head_dim=8, sliding_window=64) == (None, None)


def test_decoder_sparse_step_and_mlp_only_layers_say_which_layers_have_experts() -> None:
    def layers(**changes: Any) -> list[int]:
        config = parse_model_config({**GOOD, **QWEN_MOE, "num_hidden_layers": 6, **changes})
        assert config.experts is not None
        return sorted(config.experts.layers)

    assert layers() == [0, 1, 2, 3, 4, 5]
    assert layers(decoder_sparse_step=2) == [1, 3, 5]
    assert layers(decoder_sparse_step=2, mlp_only_layers=[3]) == [1, 5]
    assert layers(mlp_only_layers=[0, 5]) == [1, 2, 3, 4]
    assert layers(mlp_only_layers=None) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("content", ["{", "[]", "null", '"llama"', ""])
def test_a_file_that_is_no_json_object_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content, "utf-8")
    with pytest.raises(ConfigError, match=r"config\.json: (not valid JSON|expected a JSON object)"):
        read_model_config(tmp_path)


def test_a_config_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"config\.json: not valid JSON"):
        read_model_config(tmp_path)


def test_a_broken_generation_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GOOD), "utf-8")
    (tmp_path / "generation_config.json").write_text("{,}", "utf-8")
    with pytest.raises(ConfigError, match=r"generation_config\.json: not valid JSON"):
        read_model_config(tmp_path)


def test_a_folder_without_config_or_no_folder_at_all_is_named(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match=r"config\.json: no such file"):
            read_model_config(folder)


def test_a_cache_has_its_size_in_blocks_or_in_bytes() -> None:
    with pytest.raises(ValueError, match=r"expected num_blocks or kv_cache_bytes, got both \(64 and 1048576\)"):
        EngineConfig(num_blocks=64, kv_cache_bytes=1 << 20)


@pytest.mark.parametrize("bad", [0, -1, 1.5, "16", True])
@pytest.mark.parametrize(
    "field", ["block_size", "num_blocks", "kv_cache_bytes", "max_num_seqs", "max_num_batched_tokens", "max_model_len"]
)
def test_engine_config_says_which_option_is_wrong(field: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=rf"EngineConfig\.{field}: expected a positive integer, got "):
        EngineConfig(**{field: bad})
