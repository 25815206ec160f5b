"""Mixture of experts: who computes which token, and that no neighbour has a say in it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from reference_impl.assembly.model import load_model
from reference_impl.core.decoder import Decoder
from reference_impl.models.config_json import read_model_config
from reference_impl.models.loader import CheckpointError
from reference_impl.models.moe import MixtureOfExperts, group_by_expert, route

MOE = ["mixtral", "qwen3_moe", "qwen3_moe_mixed"]
IDS = random.Random(0).choices(range(97), k=60)


def moe_of(model: Decoder, layer: int) -> MixtureOfExperts:
    mlp = model.layers[layer].mlp
    assert isinstance(mlp, MixtureOfExperts)
    return mlp


def test_the_likeliest_experts_are_chosen_and_weighted_by_their_probability() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, 0.0, 5.0]], dtype=torch.float64)
    weights, experts = route(logits, 2, renormalise=False)
    assert experts.tolist()[0] == [1, 2]
    assert experts.tolist()[1][0] == 2
    assert torch.allclose(weights, logits.softmax(-1).gather(1, experts), rtol=1e-15)
    renormalised, _ = route(logits, 2, renormalise=True)
    assert renormalised.sum(-1).tolist() == pytest.approx([1, 1], rel=1e-15)
    assert torch.allclose(renormalised[:, 0] / renormalised[:, 1], weights[:, 0] / weights[:, 1], rtol=1e-12)


def test_probabilities_of_a_bfloat16_model_are_taken_in_float32() -> None:
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights, _ = route(logits, 3, renormalise=True)
    assert weights.dtype is torch.float32
    assert torch.equal(weights, route(logits.float(), 3, renormalise=True)[0])


@given(
    num_experts=st.integers(1, 6),
    tokens=st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=2), max_size=20),
)
def test_every_choice_of_every_token_stands_once_in_its_experts_group(num_experts, tokens) -> None:
    choices = [[e % num_experts for e in token] for token in tokens]
    experts, numbers = torch.tensor(choices, dtype=torch.int64).view(-1, 2), torch.arange(num_experts + 1)
    order, offsets = group_by_expert(experts, numbers)
    assert sorted(order.tolist()) == list(range(2 * len(tokens)))
    grouped = [choices[i // 2][i % 2] for i in order.tolist()]
    assert grouped == sorted(grouped)
    assert offsets.dtype is torch.int32
    assert offsets.diff().tolist() == [grouped.count(e) for e in range(num_experts)]
    assert offsets[0] == 0


@pytest.mark.parametrize("name", MOE)
def test_each_token_gets_the_weighted_sum_of_its_experts(name: str, save) -> None:
    model = load_model(save(name, torch.float64)[1])
    moe = moe_of(model, 1)
    x = torch.randn(17, 48, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = moe(x)
    for token, y in zip(x, found, strict=True):
        p = (moe.router @ token).softmax(0)
        chosen = sorted(range(len(p)), key=lambda e: -float(p[e]))[: moe.config.experts_per_token]
        total = sum(p[e] for e in chosen) if moe.config.renormalise else 1
        expected = sum(p[e] / total * moe.experts[e](token[None])[0] for e in chosen)
        assert torch.allclose(y, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MOE)
def test_a_tokens_experts_do_not_depend_on_its_neighbours(name: str, dtype: torch.dtype, save) -> None:
    """No expert has a capacity: alone, among others, or with the same neighbour 200 times, a token gets the same."""
    model = load_model(save(name, dtype)[1])
    moe, bound = moe_of(model, 1), 3e-5 if dtype is torch.float32 else 1e-12
    x = torch.randn(40, 48, generator=torch.Generator().manual_seed(3), dtype=dtype)
    together = moe(x)
    alone = torch.cat([moe(row[None]) for row in x])
    shuffled = torch.randperm(40, generator=torch.Generator().manual_seed(4))
    crowd = moe(torch.cat((x[:1], x[5:6].expand(200, -1))))
    limit = bound * float(together.abs().max())
    assert float((alone - together).abs().max()) <= limit
    assert float((moe(x[shuffled]) - together[shuffled]).abs().max()) <= limit
    assert float((crowd[0] - together[0]).abs().max()) <= limit
    assert float((crowd[1:] - together[5]).abs().max()) <= limit


def test_an_expert_that_no_token_chose_computes_nothing(save) -> None:
    model = load_model(save("mixtral")[1])
    moe = moe_of(model, 0)
    seen: dict[int, int] = {}
    for number, expert in enumerate(moe.experts):
        expert.register_forward_hook(lambda _, args, __, n=number: seen.__setitem__(n, args[0].shape[0]))
    x = torch.randn(1, 48).expand(9, -1)
    moe(x)
    assert sorted(seen.values()) == [9, 9], "nine equal tokens, two experts each"
    assert moe(x[:0]).shape == (0, 48)


@pytest.mark.parametrize("name", MOE)
def test_layers_have_experts_where_transformers_has_them(name: str, save) -> None:
    theirs, folder = save(name)
    ours = load_model(folder)
    for layer, their in zip(ours.layers, theirs.model.layers, strict=True):
        assert isinstance(layer.mlp, MixtureOfExperts) == hasattr(their.mlp, "experts")


def test_dense_layers_of_a_mixed_model_are_those_named(save) -> None:
    experts = read_model_config(save("qwen3_moe_mixed")[1]).experts
    assert experts is not None
    assert experts.layers == {1}


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w2.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.gate.weight"),
        ("qwen3_moe", "model.layers.2.mlp.experts.5.up_proj.weight"),
        ("qwen3_moe", "model.layers.0.mlp.gate.weight"),
    ],
)
def test_a_missing_or_misshapen_tensor_of_an_expert_is_named(name: str, key: str, save) -> None:
    folder: Path = save(name)[1]
    tensors = load_file(folder / "model.safetensors")
    weight = tensors.pop(key)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"missing tensors: {key}"):
        load_model(folder)
    save_file({**tensors, key: weight.T.contiguous()}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"tensor {key}: expected shape"):
        load_model(folder)
