"""The engine's logits equal those of `transformers`, for random models of each family."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reference_impl.assembly.model import load_model
from reference_impl.models.config_json import read_model_config
from reference_impl.models.loader import weight_files

FP32, FP64 = 3e-5, 1e-12  # of the largest logit
IDS = random.Random(0).choices(range(97), k=150)


def worst(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest absolute difference, as a share of the largest logit; both must be finite."""
    assert ours.shape == theirs.shape
    assert ours.isfinite().all()
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())


class ExactNorm(nn.Module):
    def __init__(self, theirs: Any):
        super().__init__()
        gemma = type(theirs).__name__.startswith("Gemma")
        self.weight = theirs.weight.double() + gemma
        self.eps = theirs.eps if gemma else theirs.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt())


class ExactRotary(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.rope, self.dim = config.rope_parameters, getattr(config, "head_dim", None)
        self.dim = self.dim or config.hidden_size // config.num_attention_heads
        self.longest = config.max_position_embeddings

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rope = self.rope if layer_type is None else self.rope[layer_type]
        dim, grown = round(self.dim * rope.get("partial_rotary_factor", 1)), 1.0
        frequency = [stretched(rope["rope_theta"] ** (-i / dim), rope) for i in range(0, dim, 2)]
        if rope["rope_type"] == "longrope":
            trained = rope["original_max_position_embeddings"]
            factors = rope["long_factor" if position_ids.max() >= trained else "short_factor"]
            frequency = [f / by for f, by in zip(frequency, factors, strict=True)]
            grown = math.sqrt(1 + math.log(self.longest / trained) / math.log(trained))
        angle = position_ids[..., None].double() * torch.tensor(frequency, dtype=torch.float64).repeat(2)
        return grown * angle.cos(), grown * angle.sin()


class ExactRouter(nn.Module):
    def __init__(self, theirs: Any):
        super().__init__()
        self.weight, self.top_k = theirs.weight, theirs.top_k
        self.renormalise = getattr(theirs, "norm_topk_prob", True)  # Mixtral's has no such option: it does

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = x.flatten(0, -2) @ self.weight.T
        value, index = logits.softmax(-1).topk(self.top_k)
        return logits, value / value.sum(-1, keepdim=True) if self.renormalise else value, index


def exact_attention(module, query, key, value, attention_mask, scaling, softcap=None, **_):
    """What Gemma 2's eager attention does, without taking the softmax in float32."""
    heads = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(heads, 1), value.repeat_interleave(heads, 1)
    scores = query @ key.transpose(2, 3) * scaling
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    return ((scores + attention_mask).softmax(-1) @ value).transpose(1, 2), None


def stretched(frequency: float, rope: dict[str, Any]) -> float:
    """One frequency after rope scaling, from the description of Llama 3.1 and of position interpolation."""
    if rope["rope_type"] in ("default", "longrope"):  # longrope has a factor for each frequency
        return frequency
    if rope["rope_type"] == "linear":
        return frequency / rope["factor"]
    turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)  # in the original context
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    keep = min(1.0, max(0.0, (turns - low) / (high - low)))
    return keep * frequency + (1 - keep) * frequency / rope["factor"]


def make_exact(model: Any) -> Any:
    """A float64 model that computes in float64 throughout.

    `transformers` takes norms, rotary angles, the router's softmax, Gemma 2's attention and Gemma's embedding scale
    in float32 even for a float64 model, which leaves errors of 1e-7: too coarse a ruler for a bound of 1e-12.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    AttentionInterface.register("exact", exact_attention)
    AttentionMaskInterface.register("exact", eager_mask)
    if model.config._attn_implementation == "eager":
        model.config._attn_implementation = "exact"
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(parent, name, ExactNorm(child))
            elif type(child).__name__.endswith("RotaryEmbedding"):
                setattr(parent, name, ExactRotary(model.config))
            elif type(child).__name__.endswith("TopKRouter"):
                setattr(parent, name, ExactRouter(child))
            elif type(child).__name__.endswith("ScaledWordEmbedding"):
                child.double().embed_scale = torch.tensor(model.config.hidden_size, dtype=torch.float64).sqrt()
    return model.double()


def test_logits_of_every_position_equal_transformers_in_float32(variant, save, their_logits, our_logits):
    theirs, folder = save(variant)
    ours = load_model(folder)
    assert ours.dtype is torch.float32
    assert worst(our_logits(ours, IDS)[0], their_logits(theirs, IDS)) <= FP32


def test_logits_of_every_position_equal_transformers_in_float64(variant, save, their_logits, our_logits):
    theirs, folder = save(variant, torch.float64)
    ours = load_model(folder)
    assert ours.dtype is torch.float64
    assert worst(our_logits(ours, IDS)[0], their_logits(make_exact(theirs), IDS)) <= FP64


def test_the_model_counts_the_parameters_that_transformers_counts(variant, save):
    theirs, folder = save(variant)
    assert load_model(folder).num_parameters() == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize(
    "name", "llama3_rope_tied llama_biases qwen2 qwen3_bias_tied gemma3 mixtral olmo2 phi3 stablelm".split()
)
def test_several_shards_hold_the_same_model(name, save, their_logits, our_logits):
    theirs, folder = save(name, shard_size="40KB")
    assert len(weight_files(folder)) >= 3
    assert worst(our_logits(load_model(folder), IDS)[0], their_logits(theirs, IDS)) <= FP32


OLD_ROPE = {
    "default": {"rope_theta": 1e6, "rope_scaling": None},
    "linear, type": {"rope_theta": 5e3, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "linear, rope_type": {"rope_theta": 5e3, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3, rope_type": {
        "rope_theta": 1e4,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}
OLD_ROPE["llama3, both"] = {**OLD_ROPE["llama3, rope_type"]}
OLD_ROPE["llama3, both"]["rope_scaling"] = {**OLD_ROPE["llama3, both"]["rope_scaling"], "type": "llama3"}


@pytest.mark.parametrize("rope", OLD_ROPE)
@pytest.mark.parametrize(
    "name", ["llama2_mha", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "olmo2"]
)
def test_both_spellings_of_rope_and_dtype_read_the_same(name, rope, save, edit, their_logits, our_logits):
    _, folder = save(name)
    edit(folder, rope_parameters=..., **OLD_ROPE[rope], torch_dtype="float32", dtype=...)
    old = read_model_config(folder)
    theirs = reload(folder, torch.float32)
    assert worst(our_logits(load_model(folder), IDS)[0], their_logits(theirs, IDS)) <= FP32
    edit(folder, torch_dtype=..., dtype="float32")
    assert read_model_config(folder) == old

    new = {"rope_theta": OLD_ROPE[rope]["rope_theta"], **(OLD_ROPE[rope]["rope_scaling"] or {"rope_type": "default"})}
    edit(folder, rope_theta=..., rope_scaling=..., rope_parameters=new)
    assert read_model_config(folder) == old


OPTIONAL = (
    "num_key_value_heads head_dim max_position_embeddings rms_norm_eps rope_parameters sliding_window dtype "
    "tie_word_embeddings attention_bias mlp_bias hidden_act hidden_activation layer_types use_sliding_window "
    "max_window_layers query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping norm_topk_prob "
    "decoder_sparse_step mlp_only_layers num_experts num_local_experts num_experts_per_tok moe_intermediate_size "
    "layer_norm_eps use_qkv_bias"
)
FIRST_OF_FAMILY = (
    "llama2_mha mistral mixtral qwen2 qwen3 qwen3_moe gemma_untied_bias gemma2_uncapped gemma3_capped olmo2 phi3 "
    "stablelm"
).split()


@pytest.mark.parametrize("name", FIRST_OF_FAMILY)
def test_fields_left_out_of_a_config_take_the_defaults_of_transformers(name, save, edit):
    import transformers

    _, folder = save(name)
    left_out = dict.fromkeys(OPTIONAL.split(), ...)
    edit(folder, num_attention_heads=32, hidden_size=256, num_hidden_layers=40, **left_out)
    theirs, ours = transformers.AutoConfig.from_pretrained(folder), read_model_config(folder)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 256 // 32)
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.norm_eps == (theirs.layer_norm_eps if name == "stablelm" else theirs.rms_norm_eps)
    assert ours.rope.partial == theirs.rope_parameters.get("partial_rotary_factor", 1.0)
    if name == "gemma3_capped":
        assert ours.rope.theta == theirs.rope_parameters["full_attention"]["rope_theta"]
        assert ours.window_rope.theta == theirs.rope_parameters["sliding_attention"]["rope_theta"]
    else:
        assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.layer_windows == windows_of(theirs)
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    assert (ours.activation == "gelu_tanh") == name.startswith("gemma")
    assert ours.attention_scale == (getattr(theirs, "query_pre_attn_scalar", None) or ours.head_dim) ** -0.5
    assert ours.attention_softcap == getattr(theirs, "attn_logit_softcapping", None)
    assert ours.final_softcap == getattr(theirs, "final_logit_softcapping", None)
    if name in ("mixtral", "qwen3_moe"):
        assert ours.experts.num_experts == theirs.num_experts
        assert ours.experts.experts_per_token == theirs.num_experts_per_tok
        assert ours.experts.intermediate_size == getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
        assert ours.experts.renormalise == getattr(theirs, "norm_topk_prob", True)
        assert ours.experts.layers == frozenset(range(40))


def windows_of(theirs: Any) -> tuple[int | None, ...]:
    """Per layer, as the modelling code of `transformers` reads its config."""
    window = getattr(theirs, "sliding_window", None)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * theirs.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


@pytest.mark.parametrize("name", ["llama2_mha", "mistral", "qwen2", "olmo2", "phi3"])
def test_null_key_value_heads_mean_as_many_as_query_heads(name, save, edit):
    _, folder = save(name)
    edit(folder, num_key_value_heads=None)
    assert read_model_config(folder).num_kv_heads == 6


def reload(folder: Path, dtype: torch.dtype) -> Any:
    """As `transformers` reads it. (model.to(dtype) would also round its table of rotary frequencies.)"""
    import transformers

    gemma2 = json.loads((folder / "config.json").read_text("utf-8"))["model_type"] == "gemma2"
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager" if gemma2 else "sdpa", experts_implementation="eager"
    ).eval()


@pytest.mark.parametrize("name", ["llama3_rope_tied", "qwen2", "qwen3", "olmo2", "phi3_longrope"])
def test_a_bfloat16_checkpoint_is_read_into_float32_without_loss(name, save, their_logits, our_logits):
    _, folder = save(name, torch.bfloat16)
    assert read_model_config(folder).dtype == "bfloat16"
    ours = load_model(folder, torch.float32)
    assert worst(our_logits(ours, IDS)[0], their_logits(reload(folder, torch.float32), IDS)) <= FP32


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_half_precision_errs_no_more_than_transformers_does(variant, dtype, save, their_logits, our_logits):
    # Where rounding sends a token to another expert is luck, so every token gets all experts here.
    all_experts = {"mixtral": {"num_local_experts": 4}, "qwen3_moe": {"num_experts": 4}}
    changes = next((c | {"num_experts_per_tok": 4} for name, c in all_experts.items() if variant.startswith(name)), {})
    _, folder = save(variant, dtype, **changes)
    ours = load_model(folder)
    assert ours.dtype is dtype
    exact = their_logits(reload(folder, torch.float32), IDS)
    our_error = (our_logits(ours, IDS)[0].float() - exact).square().mean().sqrt()
    their_error = (their_logits(reload(folder, dtype), IDS).float() - exact).square().mean().sqrt()
    assert our_error <= 1.25 * their_error


def test_a_tied_model_may_store_its_head_once_more(save, their_logits, our_logits):
    from safetensors.torch import load_file, save_file

    theirs, folder = save("qwen2_tied")
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    ours = load_model(folder)
    assert ours.lm_head is None
    assert worst(our_logits(ours, IDS)[0], their_logits(theirs, IDS)) <= FP32


def test_each_sequence_of_a_ragged_batch_has_its_own_logits(variant, save, their_logits, our_logits):
    theirs, folder = save(variant)
    sequences = [IDS[:1], IDS[3:4], IDS[10:73], IDS[5:7]]
    for ids, found in zip(sequences, our_logits(load_model(folder), *sequences), strict=True):
        assert worst(found, their_logits(theirs, ids)) <= FP32


WINDOWED = (
    "mistral_window qwen2_window qwen3_window gemma2 gemma3 mixtral_window_tied qwen3_moe_mixed phi3_window"
).split()


@pytest.mark.parametrize("name", WINDOWED)
def test_layers_have_the_windows_that_transformers_gives_them(name, save, build):
    theirs, folder = save(name)
    ours = read_model_config(folder)
    assert ours.layer_windows == windows_of(theirs.config)
    assert any(ours.layer_windows)


@pytest.mark.parametrize("name", WINDOWED)
def test_one_position_more_or_less_in_the_window_is_another_model(name, save, edit, their_logits, our_logits):
    """The parity tests above could not tell an off-by-one if the window did not matter."""
    theirs, folder = save(name)
    window = max(filter(None, read_model_config(folder).layer_windows))
    expected = their_logits(theirs, IDS)
    for other in (window - 1, window + 1):
        edit(folder, sliding_window=other)
        found = our_logits(load_model(folder), IDS)[0]
        edge = min(window, other)
        assert worst(found[:edge], expected[:edge]) <= FP32, "no context is longer than the window yet"
        assert worst(found[edge : edge + 1], expected[edge : edge + 1]) > 1e-4


@pytest.mark.parametrize("use", [True, False])
@pytest.mark.parametrize("first", [0, 1, 2, 3, 28])
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_max_window_layers_counts_the_layers_without_a_window(name, first, use, save, edit):
    import transformers

    _, folder = save(name)
    edit(folder, layer_types=..., sliding_window=24, use_sliding_window=use, max_window_layers=first)
    ours, theirs = read_model_config(folder), transformers.AutoConfig.from_pretrained(folder)
    assert ours.layer_windows == windows_of(theirs)
    assert ours.layer_windows.count(24) == (max(0, 3 - first) if use else 0)


def test_gemma_3_reads_the_same_in_both_spellings(save, edit, their_logits, our_logits):
    _, folder = save("gemma3")
    new = read_model_config(folder)
    edit(
        folder, layer_types=..., rope_parameters=..., rope_theta=1e6, rope_local_base_freq=1e4, torch_dtype="float32",
        rope_scaling={"rope_type": "linear", "factor": 8.0}, sliding_window_pattern=6, dtype=...,
    )  # fmt: skip
    assert read_model_config(folder) == new
    assert new.layer_windows == (24, 24, 24, 24, 24, None)
    assert worst(our_logits(load_model(folder), IDS)[0], their_logits(reload(folder, torch.float32), IDS)) <= FP32
