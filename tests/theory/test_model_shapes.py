"""The model table adds up to the published parameter counts, and configs are read with their traps."""

import dataclasses

import pytest

from reference_impl.theory.model_shapes import MODELS, ModelShape, from_config, model

LLAMA_3_8B = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_2_7B = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip
QWEN25_72B = {
    "model_type": "qwen2", "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64,
    "num_key_value_heads": 8, "intermediate_size": 29568, "vocab_size": 152064, "max_position_embeddings": 131072,
    "sliding_window": 131072, "use_sliding_window": False,
}  # fmt: skip
QWEN3_06B = {
    "model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16, "head_dim": 128,
    "num_key_value_heads": 8, "intermediate_size": 3072, "vocab_size": 151936, "max_position_embeddings": 40960,
    "tie_word_embeddings": True, "sliding_window": None, "use_sliding_window": False,
}  # fmt: skip
GEMMA_7B = {
    "model_type": "gemma", "num_hidden_layers": 28, "hidden_size": 3072, "num_attention_heads": 16, "head_dim": 256,
    "num_key_value_heads": 16, "intermediate_size": 24576, "vocab_size": 256000, "max_position_embeddings": 8192,
}  # fmt: skip
MISTRAL_7B = {
    "model_type": "mistral", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "max_position_embeddings": 32768,
    "sliding_window": None,
}  # fmt: skip
FALCON_7B = {
    "model_type": "falcon", "num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71,
    "num_kv_heads": 71, "multi_query": True, "new_decoder_architecture": False, "vocab_size": 65024,
    "max_position_embeddings": 2048,
}  # fmt: skip
FALCON_40B = {
    "model_type": "falcon", "num_hidden_layers": 60, "hidden_size": 8192, "num_attention_heads": 128,
    "num_kv_heads": 8, "multi_query": True, "new_decoder_architecture": True, "vocab_size": 65024,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
    "num_key_value_heads": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "kv_lora_rank": 512, "intermediate_size": 18432, "vocab_size": 129280, "max_position_embeddings": 163840,
}  # fmt: skip
QWEN3_NEXT = {
    "model_type": "qwen3_next", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": 5120, "vocab_size": 151936,
    "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
}  # fmt: skip

CONFIGS = {
    "llama-3-8b": LLAMA_3_8B,
    "llama-2-7b": LLAMA_2_7B,
    "qwen2.5-72b": QWEN25_72B,
    "qwen3-0.6b": QWEN3_06B,
    "gemma-7b": GEMMA_7B,
    "mistral-7b": MISTRAL_7B,
    "falcon-7b": FALCON_7B,
    "deepseek-v3": DEEPSEEK_V3,
    "qwen3-next-80b-a3b": QWEN3_NEXT,
}


@pytest.mark.parametrize("name", [name for name, shape in MODELS.items() if shape.active_params is None])
def test_matrices_add_up_to_the_published_parameter_count(name: str) -> None:
    """Only norm and bias vectors are left out, at most 0.02 % of any row."""
    shape = model(name)
    assert shape.stated_params is not None
    assert shape.matrix_params == pytest.approx(shape.stated_params, rel=2e-4)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_names_its_source(name: str) -> None:
    assert model(name).source
    assert model(name).name == name


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_gives_the_same_shape_as_the_table(name: str) -> None:
    read = from_config(CONFIGS[name], name)
    row = dataclasses.replace(model(name), stated_params=None, active_params=None, source="config")
    assert read == row


def test_falcon_7b_has_one_kv_head_whatever_its_config_says() -> None:
    """`num_kv_heads` is 71 in the file; the old layer with multi_query ignores it."""
    assert from_config(FALCON_7B).num_kv_heads == 1
    assert from_config(FALCON_40B).num_kv_heads == 8
    assert from_config(FALCON_7B | {"multi_query": False}).num_kv_heads == 71


def test_old_falcon_field_names_are_read_too() -> None:
    old = {k: v for k, v in FALCON_7B.items() if k not in ("num_hidden_layers", "num_attention_heads", "num_kv_heads")}
    assert from_config(old | {"n_layer": 32, "n_head": 71}) == from_config(FALCON_7B)


def test_head_dim_comes_from_the_config_where_it_is_given() -> None:
    """Qwen3-0.6B: 1024 / 16 = 64, but the heads are 128 wide."""
    shape = from_config(QWEN3_06B)
    assert shape.head_dim == 128
    assert shape.num_heads * shape.head_dim == 2 * shape.hidden_size
    assert from_config(LLAMA_3_8B).head_dim == 128  # absent: hidden_size / num_attention_heads


def test_missing_kv_heads_means_as_many_as_query_heads() -> None:
    assert from_config(LLAMA_2_7B).attention_kind == "MHA"


def test_layer_types_override_the_interval_of_a_hybrid() -> None:
    kinds = ["full_attention" if i % 2 else "linear_attention" for i in range(48)]
    assert from_config(QWEN3_NEXT | {"layer_types": kinds}).attention_layers == 24
    with pytest.raises(ValueError, match="layer_types"):
        from_config(QWEN3_NEXT | {"layer_types": kinds[:-1]})


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({}, "model_type"),
        (LLAMA_3_8B | {"model_type": "mystery"}, "model_type"),
        ({k: v for k, v in LLAMA_3_8B.items() if k != "vocab_size"}, "vocab_size"),
        (LLAMA_3_8B | {"num_hidden_layers": 0}, "num_hidden_layers"),
        (LLAMA_3_8B | {"num_hidden_layers": "32"}, "num_hidden_layers"),
        (LLAMA_3_8B | {"hidden_size": True}, "hidden_size"),
        (LLAMA_3_8B | {"hidden_size": 4100, "num_attention_heads": 32}, "head_dim"),
        (LLAMA_3_8B | {"num_key_value_heads": 5}, "num_kv_heads"),
        (MISTRAL_7B | {"sliding_window": 4096}, "sliding_window"),
        (QWEN25_72B | {"use_sliding_window": True}, "sliding_window"),
        (QWEN3_06B | {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        (DEEPSEEK_V3 | {"kv_lora_rank": None}, "kv_lora_rank"),
    ],
)
def test_what_the_reader_does_not_understand_is_refused_by_field(config: dict[str, object], field: str) -> None:
    with pytest.raises(ValueError, match=rf"{field}.*expected|expected {field}") as error:
        from_config(config)
    assert "got" in str(error.value)


def test_a_shape_that_cannot_exist_is_refused() -> None:
    row = model("llama-3-8b")
    with pytest.raises(ValueError, match="attention_layers"):
        dataclasses.replace(row, attention_layers=33)
    with pytest.raises(ValueError, match="kv_lora_rank"):
        dataclasses.replace(row, kv_lora_rank=512)
    with pytest.raises(ValueError, match="layer_params"):
        _ = model("deepseek-v3").matrix_params
    assert dataclasses.replace(model("deepseek-v3"), stated_params=1).num_params == 1


def test_an_unknown_model_is_answered_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match="llama-3-8b"):
        model("llama-9")


def test_tying_the_embeddings_halves_them() -> None:
    tied = ModelShape("t", 1, 8, 2, 1, 4, 16, 100, tied_embeddings=True)
    untied = dataclasses.replace(tied, tied_embeddings=False)
    assert untied.embedding_params == 2 * tied.embedding_params == 1600
    assert untied.linear_params == tied.linear_params  # the look-up is no multiplication
