"""A model divided among ranks gives the logits of the whole one: every family, weights as they come and quantized."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from reference_impl.assembly.model import load_model
from reference_impl.core.decoder import Decoder
from reference_impl.features.parallel.model import RankModel
from reference_impl.features.parallel.shares import head_shares, shares_of
from reference_impl.features.parallel.threads import ThreadGroup
from reference_impl.models.quantization.scheme import Activations, Scheme
from tests.models import test_stored_weights
from tests.models.conftest import VARIANTS, edit, our_logits, save  # noqa: F401
from tests.models.test_gptq_awq import AWQ, GPTQ
from tests.models.test_gptq_awq import written as written_in_words  # noqa: F401
from tests.models.test_stored_weights import written  # noqa: F401
from tests.quantization.conftest import make_folder  # noqa: F401

TOKENS = torch.tensor([0, 96, 40, 41, 7])
IDS = [[5, 17, 40, 9, 33, 2, 61], [8, 3]]
# Query heads and KV heads of the variants: 6 and 2, 6 and 6, 6 and 1. Ranks: unequal shares, and KV heads that repeat.
SIZES = {2: (2, 4), 6: (4, 5), 1: (2, 5)}


def ranks(folder: Path, size: int, **options: Any) -> list[Decoder]:
    """The models of all ranks, which are threads."""
    group = ThreadGroup(size)

    def load(rank: int) -> Decoder:
        return load_model(folder, torch.float64, rank=RankModel(group.rank(rank)), **options)

    return [load(rank) for rank in range(size)]  # loading, no rank waits for another


def together(models: list[Decoder], of: Callable[[Decoder], list[Tensor]]) -> list[list[Tensor]]:
    with ThreadPoolExecutor(len(models)) as pool:
        return list(pool.map(of, models))


def check(whole: Decoder, models: list[Decoder], our_logits: Any, bound: float = 1e-12) -> None:  # noqa: F811
    expected = our_logits(whole, *IDS)
    found = together(models, lambda model: our_logits(model, *IDS))
    for rank in found:
        for mine, its, first in zip(expected, rank, found[0], strict=True):
            assert torch.equal(its, first), "the same bits on all ranks"
            assert float((mine - its).abs().max()) <= bound * float(mine.abs().max())


FAMILIES = (
    "llama_biases", "llama3_rope_tied", "qwen3_bias_tied", "gemma_untied_bias", "gemma2", "gemma3", "mixtral",
    "qwen3_moe_mixed", "olmo2", "olmo2_llama3_rope", "phi3_all", "stablelm_biases_tied",
)  # fmt: skip


@pytest.mark.parametrize("variant", [n if n in FAMILIES else pytest.param(n, marks=pytest.mark.slow) for n in VARIANTS])
def test_logits_are_those_of_one_process(variant: str, save: Any, our_logits: Any) -> None:  # noqa: F811
    _, folder = save(variant, torch.float64)
    whole = load_model(folder, torch.float64)
    for size in SIZES[whole.config.num_kv_heads]:
        models = ranks(folder, size)
        heads = [(model.config.num_heads, model.config.num_kv_heads) for model in models]
        assert heads == [(q.length, kv.length) for q, kv in head_shares(6, whole.config.num_kv_heads, size)]
        assert sum(model.embedding.shape[0] for model in models) == whole.config.vocab_size
        assert all(model.config.whole == whole.config for model in models)
        check(whole, models, our_logits)
        matrix = whole.embedding if whole.lm_head is None else whole.lm_head
        for rows in together(models, lambda model: [model.head.rows(TOKENS)]):
            assert torch.equal(rows[0], matrix[TOKENS])


@pytest.mark.parametrize("heads", [(9, 3), (5, 5), (4, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_each_query_head_is_on_one_rank_with_its_kv_head_or_the_size_is_refused(heads: Any, size: int) -> None:
    num_heads, num_kv_heads = heads
    fits = size <= num_kv_heads or (size % num_kv_heads == 0 and size <= num_heads)
    if not fits:
        with pytest.raises(ValueError, match=rf"{num_heads} query heads and {num_kv_heads} KV heads .*got {size}"):
            head_shares(num_heads, num_kv_heads, size)
        return
    shares = head_shares(num_heads, num_kv_heads, size)
    queries = [head for q, _ in shares for head in range(q.start, q.start + q.length)]
    assert queries == list(range(num_heads))
    group = num_heads // num_kv_heads
    for q, kv in shares:
        own = {head // group for head in range(q.start, q.start + q.length)}
        assert own == set(range(kv.start, kv.start + kv.length))
        assert q.length % kv.length == 0


WIDE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}  # o_proj has 256 inputs


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_what_is_rounded_while_loading_keeps_the_numbers_of_one_process(
    quantization: str,
    save: Any,  # noqa: F811
    our_logits: Any,  # noqa: F811
) -> None:
    """Scales belong to whole rows of weights, or to groups of 128 inputs."""
    _, folder = save("llama_biases", torch.float64, **WIDE)
    whole, models = (
        load_model(folder, torch.float64, quantization=quantization),
        ranks(folder, 2, quantization=quantization),
    )
    for layer, *parts in zip(whole.layers, *(model.layers for model in models), strict=True):
        if quantization == "int4":  # its codes are opaque on a CPU
            one = torch.eye(128, dtype=torch.float64)
            stored = [part.o.method.apply(part.o.params, one) for part in parts]
            whole_weight = layer.o.method.apply(layer.o.params, torch.eye(256, dtype=torch.float64))
            expected = whole_weight - layer.o.params["bias"]
            mine = torch.cat([stored[0] - layer.o.params["bias"], stored[1]])
            assert torch.equal(mine, expected)
        else:
            assert torch.equal(torch.cat([part.o.params["weight"] for part in parts], 1), layer.o.params["weight"])
            assert all(torch.equal(part.o.params["scales"], layer.o.params["scales"]) for part in parts)
        assert not parts[1].o.params["bias"].any(), "one rank adds the bias"
    if quantization != "int4":  # which multiplies bfloat16
        check(whole, models, our_logits, 1e-12 if quantization == "int8" else 1e-6)


def test_a_cut_through_a_group_is_refused_with_the_sizes_that_fit(save: Any) -> None:  # noqa: F811
    _, folder = save("llama2_mha", torch.float64, **{**WIDE, "num_key_value_heads": 4, "head_dim": 32})
    # 4 heads of 32 are one group of 128 inputs.
    with pytest.raises(ValueError, match=r"o_proj: .* 0 to 64 of 128 .* group of 128 .*expected 1$"):
        ranks(folder, 2, quantization="int4")


def test_a_rank_reads_its_own_slice_and_checks_the_shape_of_the_whole(save: Any) -> None:  # noqa: F811
    _, folder = save("qwen3", torch.float64)
    config = load_model(folder).config
    model = ranks(folder, 2)[1]
    table, cuts = RankModel(ThreadGroup(2).rank(1)), {}
    table.config_of(config)
    from reference_impl.models.loader import destinations

    _, cuts = table.cut(model, destinations(model))
    shares = shares_of(config, 2)[1]
    assert cuts["model.layers.0.self_attn.o_proj.weight"].ranges == ((3 * 16, 3 * 16),)
    assert cuts["model.layers.2.mlp.up_proj.weight"].ranges == ((shares.columns.start, shares.columns.length),)
    assert cuts["lm_head.weight"].ranges == ((49, 48),)
    assert "model.norm.weight" not in cuts


@pytest.mark.parametrize("tensor", ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"])
def test_a_shape_that_is_wrong_beside_the_slice_is_named(tensor: str, save: Any) -> None:  # noqa: F811
    from safetensors.torch import load_file, save_file

    from reference_impl.models.loader import CheckpointError

    _, folder = save("qwen3", torch.float64)
    stored = load_file(folder / "model.safetensors")
    stored[tensor] = torch.cat([stored[tensor], stored[tensor][:, :1]], dim=1)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{tensor}: expected shape"):
        ranks(folder, 2)


QUANTIZED = [
    Scheme("int4", "group", 32), Scheme("int4", "group", 16, symmetric=False), Scheme("int8", "channel"),
    Scheme("e4m3", "tensor"), Scheme("e2m1", "group", 16, scales="e4m3"), Scheme("e4m3", "group", 32, scales="e8m0"),
]  # fmt: skip


@pytest.mark.parametrize("scheme", QUANTIZED, ids=str)
def test_a_checkpoint_that_comes_quantized_is_divided(
    scheme: Scheme,
    written: Any,  # noqa: F811
    our_logits: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wide = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setattr(test_stored_weights, "SIZES", test_stored_weights.SIZES | wide)
    folder, _ = written(scheme)
    check(load_model(folder, torch.float64), ranks(folder, 2), our_logits, 1e-9)


def test_blocks_with_one_scale_are_not_cut(written: Any) -> None:  # noqa: F811
    """160 columns are a block of 128, and one of 32: two ranks would have 96 and 64."""
    folder, _ = written(Scheme("e4m3", "block"))
    with pytest.raises(ValueError, match=r"a rank's features 0 to 96 of 160 .* group of 128 .*expected 1$"):
        ranks(folder, 2)


def test_a_part_too_small_for_its_layout_is_refused_with_the_numbers_that_fit(
    written: Any,  # noqa: F811
    save: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Said of 16 inputs, of which the model knows nothing: it has 128 of them."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_hidden_layers": 1}
    monkeypatch.setattr(test_stored_weights, "SIZES", test_stored_weights.SIZES | sizes | {"num_key_value_heads": 8})
    folder, _ = written(Scheme("int4", "group", 32))
    with pytest.raises(ValueError, match=r"128 x 16: groups of 32 .*rank's part; .*_size: expected one of 1, 2, 4$"):
        ranks(folder, 8)
    _, folder = save("llama_biases", **sizes, num_key_value_heads=8)
    with pytest.raises(ValueError, match=r"multiple of 32, got one with 16: .*rank's part; .*_size: expected 1$"):
        ranks(folder, 8, quantization="int4")


def test_activations_that_are_rounded_by_token_are_refused(written: Any) -> None:  # noqa: F811
    folder, _ = written(Scheme("int8", "channel", activations=Activations("int8")))
    with pytest.raises(ValueError, match="o_proj: its checkpoint rounds activations by the largest of a token's"):
        ranks(folder, 2)


@pytest.mark.parametrize("raw", [GPTQ, AWQ, GPTQ | {"desc_act": True}], ids=["gptq", "awq", "act-order"])
def test_gptq_and_awq_are_divided_unless_their_groups_are_in_another_order(
    raw: dict[str, Any],
    written_in_words: Any,  # noqa: F811
    our_logits: Any,  # noqa: F811
) -> None:
    folder, _ = written_in_words(raw, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    if raw.get("desc_act"):
        with pytest.raises(ValueError, match="_proj.g_idx: groups that are not in the order of inputs"):
            ranks(folder, 2)
    else:
        check(load_model(folder, torch.float64), ranks(folder, 2), our_logits, 1e-9)
