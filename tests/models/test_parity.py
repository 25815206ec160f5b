"""The engine's logits equal those of `transformers`, for random models of each family."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reference_impl.config import read_model_config
from reference_impl.models.loader import load_model, weight_files

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
        self.weight, self.eps = theirs.weight, theirs.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt())


class ExactRotary(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        rope, dim = config.rope_parameters, getattr(config, "head_dim", None)
        dim = dim or config.hidden_size // config.num_attention_heads
        self.frequency = torch.tensor(
            [stretched(rope["rope_theta"] ** (-i / dim), rope) for i in range(0, dim, 2)], dtype=torch.float64
        )

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angle = position_ids[..., None].double() * self.frequency.repeat(2)
        return angle.cos(), angle.sin()


def stretched(frequency: float, rope: dict[str, Any]) -> float:
    """One frequency after rope scaling, from the description of Llama 3.1 and of position interpolation."""
    if rope["rope_type"] == "default":
        return frequency
    if rope["rope_type"] == "linear":
        return frequency / rope["factor"]
    turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)  # in the original context
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    keep = min(1.0, max(0.0, (turns - low) / (high - low)))
    return keep * frequency + (1 - keep) * frequency / rope["factor"]


def make_exact(model: Any) -> Any:
    """A float64 model that computes in float64 throughout.

    `transformers` takes the mean square of RMSNorm and the angles of the rotary embedding in float32 even
    for a float64 model, which leaves errors of 1e-7: too coarse a ruler for a bound of 1e-12.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(parent, name, ExactNorm(child))
            elif type(child).__name__.endswith("RotaryEmbedding"):
                setattr(parent, name, ExactRotary(model.config))
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


@pytest.mark.parametrize("name", ["llama3_rope_tied", "llama_biases", "qwen2", "qwen3_bias_tied"])
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


@pytest.mark.parametrize("dtype_field", ["torch_dtype", "dtype"])
@pytest.mark.parametrize("rope", OLD_ROPE)
@pytest.mark.parametrize("name", ["llama2_mha", "mistral", "qwen2", "qwen3"])
def test_both_spellings_of_rope_and_dtype_read_the_same(name, rope, dtype_field, save, edit, their_logits, our_logits):
    _, folder = save(name)
    dtype = {"torch_dtype": ..., "dtype": ..., dtype_field: "float32"}
    edit(folder, rope_parameters=..., **OLD_ROPE[rope], **dtype)
    old = read_model_config(folder)
    theirs = reload(folder, torch.float32)
    assert worst(our_logits(load_model(folder), IDS)[0], their_logits(theirs, IDS)) <= FP32

    new = {"rope_theta": OLD_ROPE[rope]["rope_theta"], **(OLD_ROPE[rope]["rope_scaling"] or {"rope_type": "default"})}
    edit(folder, rope_theta=..., rope_scaling=..., rope_parameters=new)
    assert read_model_config(folder) == old


def test_fields_left_out_of_a_config_take_the_defaults_of_transformers(save, edit):
    import transformers

    for architecture in ("Llama", "Mistral", "Qwen2", "Qwen3"):
        _, folder = save(f"{architecture.lower()}{'2_mha' if architecture == 'Llama' else ''}")
        optional = "num_key_value_heads head_dim max_position_embeddings rms_norm_eps rope_parameters sliding_window \
            tie_word_embeddings attention_bias mlp_bias hidden_act layer_types use_sliding_window dtype"
        edit(folder, num_attention_heads=32, hidden_size=256, **dict.fromkeys(optional.split(), ...))
        theirs, ours = transformers.AutoConfig.from_pretrained(folder), read_model_config(folder)
        assert ours.num_kv_heads == theirs.num_key_value_heads
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or 256 // 32)
        assert ours.max_position == theirs.max_position_embeddings
        assert ours.norm_eps == theirs.rms_norm_eps
        assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
        assert ours.sliding_window == getattr(theirs, "sliding_window", None)
        assert ours.tied_embeddings == theirs.tie_word_embeddings


@pytest.mark.parametrize("name", ["llama2_mha", "mistral", "qwen2"])
def test_null_key_value_heads_mean_as_many_as_query_heads(name, save, edit):
    _, folder = save(name)
    edit(folder, num_key_value_heads=None)
    assert read_model_config(folder).num_kv_heads == 6


def reload(folder: Path, dtype: torch.dtype) -> Any:
    """As `transformers` reads it. (model.to(dtype) would also round its table of rotary frequencies.)"""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()


@pytest.mark.parametrize("name", ["llama3_rope_tied", "qwen2", "qwen3"])
def test_a_bfloat16_checkpoint_is_read_into_float32_without_loss(name, save, their_logits, our_logits):
    _, folder = save(name, torch.bfloat16)
    assert read_model_config(folder).dtype == "bfloat16"
    ours = load_model(folder, torch.float32)
    assert worst(our_logits(ours, IDS)[0], their_logits(reload(folder, torch.float32), IDS)) <= FP32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_no_more_than_transformers_does(variant, dtype, save, their_logits, our_logits):
    _, folder = save(variant, dtype)
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


@pytest.mark.parametrize("name", ["mistral", "qwen2"])
def test_within_its_sliding_window_a_model_equals_transformers(name, save, their_logits, our_logits):
    window = 24
    theirs, folder = save(name, sliding_window=window, use_sliding_window=True, max_window_layers=1)
    assert read_model_config(folder).sliding_window == window
    ours = our_logits(load_model(folder), IDS[: window + 1])[0]
    expected = their_logits(theirs, IDS[: window + 1])
    assert worst(ours[:window], expected[:window]) <= FP32
    assert worst(ours[window:], expected[window:]) > 1e-3, "the window does not matter in this model"
