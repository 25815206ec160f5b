"""OLMo-2, Phi-3 and StableLM: what no other family does, also with Triton's kernels (interpreted without a GPU)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is defined

from safetensors.torch import load_file

from reference_impl.assembly.config import ConfigError, EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.model import load_model
from reference_impl.features.fusion.attention import TritonAttention
from reference_impl.features.fusion.decoder import FusedDecoder
from reference_impl.interfaces import SamplingParams
from reference_impl.models.config_json import parse_model_config
from reference_impl.models.loader import CheckpointError
from tests.engine.conftest import tapped_engine  # noqa: F401
from tests.models.test_config import GOOD, LONGROPE, PHI3
from tests.models.test_parity import FP32, IDS, reload, worst

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OURS = (
    "olmo2 olmo2_mha_bias_tied phi3 phi3_window phi3_partial phi3_longrope phi3_all stablelm stablelm_biases_tied"
).split()


def greedy(model: Any, prompts: Sequence[Sequence[int]], new: int, **options: Any) -> list[list[int]]:
    engine = Engine(model, EngineConfig(block_size=8, num_blocks=60, **options))
    sampling = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    requests = [engine.add(prompt, sampling) for prompt in prompts]
    while engine.has_work():
        engine.step()
    return [request.output_tokens for request in requests]


def greedy_by_transformers(theirs: Any, prompt: Sequence[int], new: int) -> list[int]:
    ids = torch.tensor([list(prompt)])
    out = theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", OURS)
def test_greedy_tokens_are_those_of_generate(name, save) -> None:
    """Prompts in chunks beside rows that decode, over more tokens than a window."""
    theirs, folder = save(name)
    theirs.generation_config.eos_token_id = None
    prompts = [IDS[:37], IDS[50:53], IDS[60:81]]
    found = greedy(load_model(folder), prompts, 24, max_num_batched_tokens=16)
    assert found == [greedy_by_transformers(theirs, prompt, 24) for prompt in prompts]


# With Triton's kernels


# In the interpreter a layer's step takes half a second. So here is one layer; that layers are joined is shown by the
# cache's keys below, and where products stand alone by test_watching. Of each family the model that has most is tried
# with fused products, and one of two without; with torch all are (test_parity, test_serving).
TRIED = [(name, True) for name in ("olmo2", "phi3_longrope", "phi3_all", "stablelm_biases_tied")]
TRIED += [("olmo2_mha_bias_tied", False), ("stablelm_biases_tied", False)]


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        pytest.param(name, fused, marks=[] if (name, fused) in TRIED else pytest.mark.slow)
        for fused in (True, False)
        for name in OURS
    ],
)
def test_logits_with_triton_are_those_of_transformers(name, fused, save, their_logits, tapped_engine) -> None:  # noqa: F811
    """Prompts in chunks beside rows that decode, longer than a window; products fused with their neighbours, or not."""
    theirs, folder = save(name, num_hidden_layers=1)
    model = load_model(folder, device=DEVICE, kernels="triton")
    assert isinstance(model, FusedDecoder)
    if not fused:
        model.fusion.chosen = {64: frozenset()}
    engine, logits = tapped_engine(
        model, block_size=8, num_blocks=30, max_num_seqs=3, max_num_batched_tokens=20, attention="triton"
    )
    assert isinstance(engine.attention, TritonAttention)
    sampling = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    requests = [engine.add(IDS[start : start + n], sampling) for start, n in ((0, 2), (9, 29), (50, 5))]
    while engine.has_work():
        engine.step()
    steps = [("flash_attention",), ("flash_attention", "paged_decode"), ("paged_decode",)]
    assert [step.attention for step in engine.trace.steps()] == steps
    for request in requests:
        found = [logits[request.id][position][0].cpu() for position in range(request.num_tokens - 1)]
        assert worst(torch.stack(found), their_logits(theirs, request.tokens[:-1])) <= FP32


@pytest.mark.parametrize("name", ["olmo2", "phi3_partial", "stablelm"])
def test_keys_lie_in_the_cache_alike_whichever_kernels_wrote_them(name, save) -> None:
    """So that one engine could take pages from another."""
    folder, caches = save(name, num_hidden_layers=2)[1], []
    for kernels, attention in (("torch", "torch"), ("triton", "triton"), ("triton", "torch")):
        model = load_model(folder, device=DEVICE, kernels=kernels)
        engine = Engine(model, EngineConfig(block_size=4, num_blocks=8, attention=attention))
        engine.kv_cache.data.zero_()
        engine.add(IDS[:9], SamplingParams(max_tokens=1))
        engine.step()
        caches.append(torch.stack([keys for keys, _ in map(engine.kv_cache.layer, range(2))]).cpu())
    assert caches[0].abs().max() > 1
    for found in caches[1:]:
        torch.testing.assert_close(found, caches[0], rtol=1e-4, atol=1e-4)


# OLMo-2


def test_olmo2_has_no_norms_before_attention_and_mlp_and_wide_ones_for_queries_and_keys(save) -> None:
    folder = save("olmo2")[1]
    model = load_model(folder)
    for layer in model.layers:
        assert (layer.input_norm, layer.mlp_norm, layer.qk_norm) == (None, None, None)
        assert (len(layer.wide_q_norm), len(layer.wide_k_norm)) == (6 * 8, 2 * 8)
    first = {name for name in load_file(folder / "model.safetensors") if "layers.0." in name and "norm" in name}
    names = "post_attention_layernorm post_feedforward_layernorm self_attn.q_norm self_attn.k_norm".split()
    assert first == {f"model.layers.0.{name}.weight" for name in names}


# Phi-3


def test_phi3_is_stored_as_our_linear_layers_are(save) -> None:
    folder = save("phi3")[1]
    tensors, layer = load_file(folder / "model.safetensors"), load_model(folder).layers[1]
    for linear, name in ((layer.qkv, "self_attn.qkv_proj"), (layer.mlp.gate_up, "mlp.gate_up_proj")):
        assert linear.name == f"model.layers.1.{name}"
        x = torch.eye(48)
        assert torch.allclose(linear(x), x @ tensors[f"{linear.name}.weight"].T, atol=1e-6)


def test_a_checkpoint_of_phi3_with_separate_matrices_is_refused_by_their_names(save, edit) -> None:
    folder = save("phi3")[1]
    edit(save("llama_mqa", num_key_value_heads=2)[1], architectures=["Phi3ForCausalLM"], model_type="phi3")
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.gate_proj\.weight is not part of a Phi3ForCausalLM"):
        load_model(folder)


def test_longrope_is_served_up_to_where_other_frequencies_begin(save, their_logits) -> None:
    """The last position before the switch is right, and there is none after it."""
    theirs, folder = save("phi3_longrope")
    theirs.generation_config.eos_token_id = None
    model = load_model(folder)
    assert model.config.max_position == 160
    assert greedy(model, [IDS[:130]], 30) == [greedy_by_transformers(theirs, IDS[:130], 30)]
    text = (IDS + IDS)[:161]
    before, after = their_logits(theirs, text[:160])[:130], their_logits(theirs, text)[:130]
    assert worst(before, after) > 1e-2, "what transformers computes for the first tokens changes with the 161st"


def test_longrope_beyond_that_is_refused_and_the_error_says_why(save) -> None:
    folder = save("phi3_longrope")[1]
    why = (
        r"max_model_len 161 is above the model's 160 positions: beyond original_max_position_embeddings = 160 its "
        r"LongRoPE has other frequencies, .* not supported\. Use max_model_len=160 or less"
    )
    with pytest.raises(ConfigError, match=why):
        load_model(folder, max_position=161)
    assert load_model(folder, max_position=160).rotary.max_position == 160
    with pytest.raises(ConfigError, match="max_model_len 161"):
        Engine(load_model(folder), EngineConfig(num_blocks=60, max_model_len=161))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 1.0453),  # sqrt(1 + ln(256 / 160) / ln(160))
        ({"factor": 4.0}, 1.1284),  # sqrt(1 + ln(4) / ln(160))
        ({"factor": 0.5}, 1.0),
        ({"factor": 4.0, "attention_factor": 1.3}, 1.3),
    ],
)
def test_longrope_scales_attention_in_short_texts_too(changes, expected, save, edit, their_logits, our_logits) -> None:
    folder = save("phi3_longrope")[1]
    rope = {"rope_theta": 1e4, **{k: v for k, v in LONGROPE.items() if k != "type"}, "rope_type": "longrope", **changes}
    edit(folder, rope_parameters=rope)
    theirs, model = reload(folder, torch.float32), load_model(folder)
    assert theirs.model.rotary_emb.attention_scaling == pytest.approx(expected, abs=1e-4)
    assert model.config.rope.attention_factor == pytest.approx(theirs.model.rotary_emb.attention_scaling, rel=1e-12)
    assert worst(our_logits(model, IDS)[0], their_logits(theirs, IDS)) <= FP32


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_phi3_reads_longrope_as_it_was_spelt_earlier(kind, save, edit, their_logits, our_logits) -> None:
    folder = save("phi3_all")[1]
    new = parse_model_config(_raw(folder))
    rope = _raw(folder)["rope_parameters"]
    scaling = {"type": kind, **{name: rope[name] for name in ("short_factor", "long_factor")}}
    edit(folder, rope_parameters=..., rope_theta=1e4, partial_rotary_factor=0.75, rope_scaling=scaling)
    assert parse_model_config(_raw(folder)) == new
    ours = load_model(folder)
    if kind == "su":  # transformers 5 names it longrope too late to read it
        edit(folder, rope_scaling={**scaling, "type": "longrope"})
    assert worst(our_logits(ours, IDS)[0], their_logits(reload(folder, torch.float32), IDS)) <= FP32


def test_a_longrope_model_that_is_not_longer_than_it_was_trained_on_keeps_its_positions() -> None:
    config = parse_model_config({**GOOD, **PHI3, "rope_scaling": LONGROPE})  # trained on 4096, has 256
    assert (config.max_position, config.rope.attention_factor) == (256, 1.0)


def _raw(folder: Path) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    return raw
