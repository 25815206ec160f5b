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


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "heads", "kv_heads", "head_dim"),
    [
        ("llama-2-7b", 32, 4096, 32, 32, 128), ("llama-2-13b", 40, 5120, 40, 40, 128),
        ("llama-2-70b", 80, 8192, 64, 8, 128), ("llama-3-8b", 32, 4096, 32, 8, 128),
        ("llama-3-70b", 80, 8192, 64, 8, 128), ("llama-3.1-405b", 126, 16384, 128, 8, 128),
        ("llama-3.2-1b", 16, 2048, 32, 8, 64), ("mixtral-8x7b", 32, 4096, 32, 8, 128),
        ("deepseek-v2", 60, 5120, 128, 128, 192), ("deepseek-v3", 61, 7168, 128, 128, 192),
    ],
)  # fmt: skip
def test_rows_have_the_dimensions_of_their_configs(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    s = model(name)
    assert (s.layers, s.hidden_size, s.num_heads, s.num_kv_heads, s.head_dim) == (
        layers, hidden, heads, kv_heads, head_dim,
    )  # fmt: skip


def test_mixtral_adds_up_from_eight_experts_and_its_active_count_from_two() -> None:
    """Attention, router and norms of 32 layers, 8 (or 2) experts of three matrices, both embeddings, the last norm."""
    s, d = model("mixtral-8x7b"), 4096
    attention = 2 * d * (s.num_heads + s.num_kv_heads) * s.head_dim

    def count(experts: int) -> int:
        per_layer = attention + experts * 3 * d * s.intermediate_size + 8 * d + 2 * d
        return s.layers * per_layer + s.embedding_params + d

    assert count(8) == s.stated_params == s.num_params
    assert count(2) == s.active_params == s.linear_params
    # The publisher's active count has the input embedding in it, which no product reads: 1 %.
    assert s.vocab_size * d / s.active_params == pytest.approx(0.010, abs=5e-4)


def test_deepseek_v3_activates_5_percent_of_its_parameters_and_caches_a_latent() -> None:
    s = model("deepseek-v3")
    assert s.active_params / s.num_params == pytest.approx(0.055, abs=5e-4)
    assert s.kv_values_per_layer == 512 + 64
    assert (s.head_dim, s.value_dim) == (128 + 64, 128)
    # The latent projections of a layer, written out: the shapes of the table are those of the attention that exists.
    q_rank, d, heads = 1536, s.hidden_size, s.num_heads
    down = d * (q_rank + 512 + 64)
    up = q_rank * heads * s.head_dim + 512 * heads * (128 + s.value_dim)
    attention = down + up + heads * s.value_dim * d
    assert attention / 1e6 == pytest.approx(187.1, abs=0.05)
    dense = 3 * d * s.intermediate_size  # the MLP of the first three layers
    experts = 3 * d * 2048  # one expert of the 58 others: 256 routed, one shared
    total = 61 * attention + 3 * dense + 58 * (257 * experts + 256 * d) + s.embedding_params
    assert total == pytest.approx(s.num_params, rel=1e-3)
    active = 61 * attention + 3 * dense + 58 * (9 * experts + 256 * d) + s.embedding_params
    assert active == pytest.approx(s.active_params, rel=0.02)
    assert model("deepseek-r1") == dataclasses.replace(s, name="deepseek-r1", source=model("deepseek-r1").source)


def test_deepseek_v2_has_the_latent_of_v3_in_a_smaller_model() -> None:
    v2, v3 = model("deepseek-v2"), model("deepseek-v3")
    assert v2.kv_values_per_layer == v3.kv_values_per_layer
    assert (v2.num_params, v2.active_params) == (236e9, 21e9)
    q_rank, d = 1536, v2.hidden_size
    up = q_rank * 128 * 192 + 512 * 128 * (128 + 128)
    attention = d * (q_rank + 576) + up + 128 * 128 * d
    total = 60 * attention + 3 * d * v2.intermediate_size + 59 * (162 * 3 * d * 1536 + 160 * d) + v2.embedding_params
    assert total == pytest.approx(v2.num_params, rel=2e-3)


@pytest.mark.parametrize("name", [name for name, shape in MODELS.items() if shape.active_params is None])
def test_layer_matrices_chain_from_hidden_to_hidden(name: str) -> None:
    s = model(name)
    m = s.layer_matrices
    assert [m[n][0] for n in ("q", "k", "v", "up")] == [s.hidden_size] * 4
    assert [m[n][1] for n in ("o", "down")] == [s.hidden_size] * 2
    assert m["q"][1] == s.num_heads * s.head_dim == m["o"][0]
    assert m["k"][1] == s.num_kv_heads * s.head_dim == m["v"][1]
    assert m["up"][1] == m["down"][0] == s.intermediate_size
    assert ("gate" in m) == s.gated_mlp
    assert s.layer_params == sum(i * o for i, o in m.values())
    assert s.linear_params == s.layers * s.layer_params + s.vocab_size * s.hidden_size


@pytest.mark.parametrize("name", [name for name, shape in MODELS.items() if shape.active_params is not None])
def test_layers_that_are_not_uniform_have_no_matrices_to_list(name: str) -> None:
    with pytest.raises(ValueError, match=r"expected uniform dense layers, got .*use stated_params"):
        _ = model(name).layer_matrices


def test_the_longest_context_of_each_model() -> None:
    expected = {
        "llama-2-7b": 4096, "llama-2-13b": 4096, "llama-2-70b": 4096, "llama-3-8b": 8192, "llama-3-70b": 8192,
        "llama-3.1-405b": 131_072, "llama-3.2-1b": 131_072, "qwen2.5-72b": 131_072, "qwen3-0.6b": 40_960,
        "mistral-7b": 32_768, "gemma-7b": 8192, "falcon-7b": 2048, "palm-540b": 2048, "mixtral-8x7b": 32_768,
        "deepseek-v2": 163_840, "deepseek-v3": 163_840, "deepseek-r1": 163_840, "qwen3-next-80b-a3b": 262_144,
    }  # fmt: skip
    assert {name: shape.max_context for name, shape in MODELS.items()} == expected


def test_every_fourth_layer_of_a_hybrid_attends_unless_its_config_says_otherwise() -> None:
    silent = {name: value for name, value in QWEN3_NEXT.items() if name != "full_attention_interval"}
    assert from_config(silent).attention_layers == 12
    assert from_config(silent | {"full_attention_interval": 6}).attention_layers == 8
    # 36 layers keep 32 matrices of 128 x 128 in fp32, and three inputs of a convolution over q, k and v in 2 bytes.
    each = 32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 3 * 2
    assert from_config(silent).fixed_state_bytes == 36 * each == model("qwen3-next-80b-a3b").fixed_state_bytes
