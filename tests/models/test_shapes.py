"""Models of a known shape with random weights: the parameters that were published, and numbers that stay finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from reference_impl.assembly import model as assembly
from reference_impl.assembly.config import ConfigError
from reference_impl.assembly.llm import LLM
from reference_impl.assembly.model import build_model, dummy_model, num_bytes
from reference_impl.core.attention import TorchAttention
from reference_impl.core.decoder import Decoder
from reference_impl.features.baselines.contiguous_cache import ContiguousKVCache
from reference_impl.features.baselines.ragged import ragged_batch
from reference_impl.interfaces import SamplingParams
from reference_impl.models.config_json import parse_model_config
from reference_impl.models.moe import SeparateExperts
from reference_impl.models.shapes import SHAPES, config_of_shape
from reference_impl.theory.model_shapes import MODELS

# Of the model cards. A tied embedding counts once: 0.6B; with an output projection of its own it would be 0.75B.
PARAMETERS = {
    "llama-3-8b": 8_030_261_248,
    "qwen3-0.6b": 596_049_920,
    "qwen3-30b-a3b": 30_532_122_624,
    "smollm-135m": 134_515_008,
}
TINY: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "dtype": "bfloat16",
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": TINY | {"architectures": ["LlamaForCausalLM"]},
    "qwen3": TINY | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "tie_word_embeddings": True},
    "qwen3_moe": TINY | {
        "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 8, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "norm_topk_prob": True,
    },
    "mixtral": TINY | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4},
    "gemma2": TINY | {"architectures": ["Gemma2ForCausalLM"], "head_dim": 8},
    "qwen2, biases": TINY | {"architectures": ["Qwen2ForCausalLM"]},
    "olmo2": TINY | {"architectures": ["Olmo2ForCausalLM"]},
    "phi3": TINY | {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.5},
    "stablelm": TINY | {"architectures": ["StableLmForCausalLM"]},
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=6, temperature=0)


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_the_parameters_that_were_published(name: str) -> None:
    model = build_model(config_of_shape(name), device="meta", max_position=1)
    assert model.num_parameters() == PARAMETERS[name]
    if name in MODELS:
        theory, c = MODELS[name], model.config
        assert theory.num_params == PARAMETERS[name]
        assert (theory.layers, theory.num_heads, theory.num_kv_heads) == (c.num_layers, c.num_heads, c.num_kv_heads)
        assert (theory.head_dim, theory.tied_embeddings, theory.max_context) == (
            c.head_dim, c.tied_embeddings, c.max_position,
        )  # fmt: skip


def test_qwen3_small_is_three_quarters_of_a_billion_where_a_tied_embedding_counts_twice() -> None:
    c = config_of_shape("qwen3-0.6b")
    assert PARAMETERS["qwen3-0.6b"] + c.vocab_size * c.hidden_size == 751_632_384


@pytest.mark.parametrize("name", FAMILIES)
def test_a_shape_of_ones_own_generates_the_same_every_time(name: str) -> None:
    outputs = [
        LLM(shape=shape, dummy_weights=True, num_blocks=8).generate([[5, 6, 7], [8]], GREEDY)
        for shape in (FAMILIES[name], parse_model_config(FAMILIES[name]))
    ]
    tokens = [[output.token_ids for output in both] for both in outputs]
    assert tokens[0] == tokens[1]
    assert [len(t) for t in tokens[0]] == [6, 6], "no end token ends them before"


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe"])
def test_a_shape_can_be_quantized(name: str, quantization: Any) -> None:
    shape = FAMILIES[name] | {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64}
    config = config_of_shape(shape)
    plain = logits_of(dummy_model(config, device="cpu"), list(range(2, 32))).float()
    found = logits_of(dummy_model(config, device="cpu", quantization=quantization), list(range(2, 32))).float()
    error = (found - plain).std() / plain.std()
    # Another model's logits are off by sqrt(2). How small an error must be is tests/quantization's business.
    assert 0 < error < {"fp8": 0.15, "int8": 0.05, "int4": 0.4}[quantization]
    llm = LLM(shape=shape, dummy_weights=True, device="cpu", num_blocks=8, quantization=quantization)
    assert len(llm.generate([[5, 6, 7]], GREEDY)[0].token_ids) == 6


def logits_of(model: Decoder, ids: list[int]) -> torch.Tensor:
    c = model.config
    batch = ragged_batch([(ids, 0)], len(ids), model.device, c.layer_windows)
    batch.logits_indices = torch.arange(len(ids))
    attention = TorchAttention(c.attention_scale, model.dtype, c.attention_softcap)
    with torch.inference_mode():
        return model(batch, ContiguousKVCache(model, 1, len(ids)), attention)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FAMILIES)
def test_numbers_stay_finite_and_tell_tokens_apart_through_many_layers(name: str, dtype: torch.dtype) -> None:
    model = dummy_model(config_of_shape(FAMILIES[name] | {"num_hidden_layers": 64}), dtype)
    logits = logits_of(model, list(range(2, 32))).float()
    assert logits.isfinite().all()
    assert 0.3 < logits.std(dim=1).mean() < 6
    assert logits.std(dim=0).mean() > 0.5, "of a logit over the tokens"


def test_experts_are_used_alike_in_all_layers() -> None:
    """Else a step would read fewer of them than a trained model's."""
    many = {"num_hidden_layers": 24, "num_experts": 16, "hidden_size": 64}
    model, rows = dummy_model(config_of_shape(FAMILIES["qwen3_moe"] | many), torch.float32), []
    for module in model.modules():
        if isinstance(module, SeparateExperts):
            for expert in module:
                expert.register_forward_hook(lambda _, args, __: rows.append(len(args[0])))
    logits_of(model, list(range(2, 52)))
    assert sum(rows) == 24 * 50 * 2
    assert len(rows) >= 24 * 15, "almost every expert has tokens"
    assert max(rows) <= 4 * 50 * 2 / 16


def test_a_tensors_numbers_depend_on_its_name_and_the_seed() -> None:
    config = config_of_shape(FAMILIES["llama"])
    first, again, other = (dummy_model(config, torch.float32, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.embedding, again.embedding)
    assert not torch.equal(first.embedding, other.embedding)
    assert first.lm_head is not None
    assert not torch.allclose(first.embedding * 32**-0.5, first.lm_head)
    assert float(first.embedding.std()) == pytest.approx(1, rel=0.1)
    assert float(first.lm_head.std()) == pytest.approx(32**-0.5, rel=0.1)
    assert (first.norm == 1).all()
    assert torch.equal(logits_of(first, [1, 2]), logits_of(again, [1, 2]))


def test_norms_of_gemma_are_one_and_biases_nothing() -> None:
    gemma = dummy_model(config_of_shape(FAMILIES["gemma2"]), torch.float32)
    assert (gemma.norm == 1).all(), "1 + a weight of 0"
    qwen2 = dummy_model(config_of_shape(FAMILIES["qwen2, biases"]), torch.float32)
    assert not any(linear.params["bias"].any() for linear in qwen2.linears() if "bias" in linear.params)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": "llama-3-8b"}, "a shape has no weights. Pass dummy_weights=True"),
        (
            {"shape": "llama-4", "dummy_weights": True},
            "expected one of llama-3-8b, .*, or the fields .*, got 'llama-4'",
        ),
        ({"shape": ["llama-3-8b"], "dummy_weights": True}, r"expected one of .*, got \['llama-3-8b'\]"),
        ({"shape": {"architectures": ["X"]}, "dummy_weights": True}, "shape: architectures: expected one of Llama"),
        ({}, "expected the folder of a model, or shape=... and dummy_weights=True, got model=None, shape=None"),
        ({"dummy_weights": True}, "expected the folder of a model, or shape=... and dummy_weights=True"),
        ({"model": "here", "shape": "llama-3-8b"}, "got model='here', shape='llama-3-8b'"),
        ({"model": "here", "dummy_weights": True}, "got model='here', shape=None, dummy_weights=True"),
    ],
)
def test_what_is_no_model_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(**options)


def test_a_shape_has_no_tokenizer() -> None:
    llm = LLM(shape=FAMILIES["llama"], dummy_weights=True, num_blocks=8)
    with pytest.raises(ValueError, match="a shape with dummy weights has no tokenizer.json: pass token ids"):
        llm.generate("text")
    with pytest.raises(ValueError, match="a shape with dummy weights has no chat template"):
        llm.chat([{"role": "user", "content": "text"}])


def test_a_length_beyond_the_models_is_refused_before_anything_is_allocated() -> None:
    """Its tables of positions alone would take 512 GB."""
    for make in (
        lambda: LLM(shape="smollm-135m", dummy_weights=True, max_model_len=10**9),
        lambda: build_model(config_of_shape("llama-3-8b"), device="meta", max_position=10**9),
    ):
        with pytest.raises(ConfigError, match="max_model_len 1000000000 is above the model's"):
            make()


def test_a_model_for_which_there_is_no_memory_is_refused_before_its_weights_are_made(monkeypatch) -> None:
    """On a CPU memory is promised to anybody; who writes to what is not there is ended without a word."""
    needed = num_bytes(build_model(config_of_shape(FAMILIES["gemma2"]), torch.float32))
    monkeypatch.setattr(assembly, "free_bytes", lambda device: needed)
    build_model(config_of_shape(FAMILIES["gemma2"]), torch.float32)
    monkeypatch.setattr(assembly, "free_bytes", lambda device: needed - 1)
    with pytest.raises(ConfigError, match=r"[\d,]+ weights need .* GiB, and this machine has .*: use a smaller"):
        LLM(shape=FAMILIES["gemma2"], dummy_weights=True, dtype="float32")
    LLM(shape=FAMILIES["gemma2"], dummy_weights=True, dtype="bfloat16", num_blocks=2)


@pytest.mark.parametrize(("quantization", "bits"), [("none", 32), ("int8", 8), ("int4", 4)])
def test_the_bytes_of_a_model_are_those_of_its_tensors(quantization: Any, bits: int) -> None:
    shape = FAMILIES["llama"] | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    model = build_model(config_of_shape(shape), torch.float32, kernels="torch", quantization=quantization)
    linears = 3 * (128 * 32 * (4 + 2 + 2 + 4) + 3 * 128 * 256)
    others = model.num_parameters() - linears
    assert num_bytes(model) == pytest.approx(linears * bits / 8 + others * 4, rel=0 if bits == 32 else 0.05)
