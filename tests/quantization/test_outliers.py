"""Outliers planted into a model without changing what it computes: the methods rank as their theory says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from reference_impl.assembly.config import course_model
from reference_impl.models.quantization.by_layer import Layers, linears_of
from reference_impl.models.quantization.calibration import Rows, Statistics
from reference_impl.models.quantization.outliers import plant, plant_folder
from reference_impl.models.quantization.quantize_folder import Job, quantize_folder
from reference_impl.models.quantization.recipes import METHODS, Recipe
from tests.quantization.conftest import MakeFolder
from tests.quantization.test_quantize_folder import TOKENS, logits

SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4))]


def channels_of(seed: int, size: int, count: int) -> list[int]:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:count].tolist()


def divergence(source: Path, out: Path, recipe: Recipe, expected: Tensor, tokens: Tensor = TOKENS) -> float:
    """KL to the unquantized model, in nats a token."""
    quantize_folder(Job(source, out, recipe, tokens))
    return float((expected.exp() * (expected - logits(out).log_softmax(-1))).sum(-1).mean())


def test_what_is_planted_changes_no_logit_and_is_there(make_folder: MakeFolder, tmp_path: Path) -> None:
    source = make_folder()
    plant_folder(source, tmp_path / "planted", [3, 40])
    assert torch.equal(logits(tmp_path / "planted"), logits(source))
    for folder, stands_out in ((source, False), (tmp_path / "planted", True)):
        layers = Layers(folder)
        rows, layer = Rows.of(*layers.front(TOKENS)), layers.layer(0)
        for linear in linears_of(layer)[::2]:
            mean = rows.watch(layer, linear, Statistics(wants_gram=False)).mean_abs
            assert bool((mean[[3, 40]] > 10 * mean.median()).all()) is stands_out
    with pytest.raises(ValueError, match=r"channels: expected numbers from 0 to 63, got \[64\]"):
        plant(layer, [64])


@pytest.mark.parametrize("seed", SEEDS)
def test_methods_rank_as_their_theory_says(seed: int, make_folder: MakeFolder, tmp_path: Path) -> None:
    """In 4 bits: GPTQ, AWQ and a rotation before plain rounding; a rotation takes planted outliers back, since it folds
    the norms. In 8 bits with rounded activations: SmoothQuant and a rotation before plain rounding."""
    plant_folder(make_folder(), tmp_path / "planted", channels_of(seed, 64, 3))
    expected = logits(tmp_path / "planted").log_softmax(-1)

    def kl(method: str, scheme: str) -> float:
        recipe = replace(METHODS[method], scheme=scheme, group_size=None if scheme == "w8a8" else 16)
        return divergence(tmp_path / "planted", tmp_path / f"{method}-{scheme}", recipe, expected)

    four = {method: kl(method, "int4") for method in ("rtn", "gptq", "awq", "rotate")}
    assert max(four["gptq"], four["awq"], four["rotate"]) < 0.8 * four["rtn"]
    eight = {method: kl(method, "w8a8") for method in ("rtn", "smoothquant", "rotate")}
    assert max(eight["smoothquant"], eight["rotate"]) < 0.5 * eight["rtn"]


def test_awq_s_scales_gain_on_the_course_model_only_where_channels_stand_out(tmp_path: Path) -> None:
    """The draft: its own inputs are all alike, so that there is little to gain; with planted outliers scales undo most
    of the harm."""
    source, tokens = course_model("draft"), torch.arange(256).view(4, 64) * 37 % 4000 + 5
    plant_folder(source, tmp_path / "planted", channels_of(0, 128, 4))
    expected = logits(source).log_softmax(-1)
    recipes = {"rtn": METHODS["rtn"], "scales": replace(METHODS["awq"], clip=False)}
    kl = {
        (folder.name, name): divergence(folder, tmp_path / f"{folder.name}-{name}", recipe, expected, tokens)
        for folder in (source, tmp_path / "planted")
        for name, recipe in recipes.items()
    }
    harm = kl["planted", "rtn"] - kl["draft", "rtn"]
    assert harm > kl["draft", "rtn"]
    assert kl["planted", "scales"] - kl["draft", "rtn"] < 0.3 * harm
    assert 0.7 < kl["draft", "scales"] / kl["draft", "rtn"] < 1.4
