"""AWQ and SmoothQuant on matrices whose inputs have outliers: the methods rank as their theory says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from reference_impl.models.quantization.awq import (
    candidate,
    candidates,
    mean_share,
    rounded,
    search_clipping,
    search_scales,
)
from reference_impl.models.quantization.by_layer import Layers
from reference_impl.models.quantization.calibration import Rows, Statistics
from reference_impl.models.quantization.folding import matrix
from reference_impl.models.quantization.gptq import gptq, output_error
from reference_impl.models.quantization.one_layer import block_error, quantize_layer
from reference_impl.models.quantization.recipes import Recipe
from reference_impl.models.quantization.scheme import Scheme, decode
from reference_impl.models.quantization.smoothquant import smoothing, weight_reach
from tests.quantization.conftest import MakeFolder
from tests.quantization.test_quantize_folder import TOKENS

INT4 = Scheme("int4", "group", 32)


def planted(seed: int, factor: float = 40.0) -> tuple[Tensor, Tensor]:
    """(x [256, 128], weight [48, 128]): 4 inputs are `factor` times as large as the others."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(256, 128, generator=random, dtype=torch.float64)
    x[:, torch.randperm(128, generator=random)[:4]] *= factor
    return x, torch.randn(48, 128, generator=random, dtype=torch.float64)


def per_token(x: Tensor) -> Tensor:
    """Rounded to 8 bits, a scale for each row: written out, beside `Activations`."""
    scale = x.abs().amax(1, keepdim=True) / 127
    return (x / scale).round() * scale


@pytest.mark.parametrize("seed", range(5))
def test_in_4_bits_awq_and_gptq_are_better_than_nearest(seed: int) -> None:
    x, weight = planted(seed)
    gram = x.T @ x
    nearest = output_error(weight, rounded(weight, INT4), gram)
    s = search_scales([weight], gram, x.abs().mean(0), INT4)
    scaled = output_error(weight, rounded(weight * s, INT4) / s, gram)
    found = gptq(weight, gram, INT4)
    assert scaled < 0.7 * nearest
    assert output_error(weight, decode(found.codes, INT4, found.fitted), gram) < 0.98 * nearest


@pytest.mark.parametrize("seed", range(5))
def test_in_8_bits_for_both_smoothing_takes_most_of_the_error(seed: int) -> None:
    x, weight = planted(seed)
    int8, y = Scheme("int8", "channel"), x @ weight.T

    def error(s: Tensor) -> float:
        return float((per_token(x / s) @ rounded(weight * s, int8).double().T - y).square().sum())

    naive, smooth = error(torch.ones(128).double()), error(smoothing(x.abs().amax(0), weight_reach(weight)))
    assert smooth < 0.15 * naive
    nothing_moved = smoothing(x.abs().amax(0), weight_reach(weight), alpha=0.0)
    assert smooth < 0.5 * error(nothing_moved)


def test_the_paper_s_scales() -> None:
    """max|x|^alpha / max|W|^(1 - alpha), worked out by hand."""
    s = smoothing(torch.tensor([16.0, 1.0]), torch.tensor([4.0, 0.25]), alpha=0.5)
    torch.testing.assert_close(s, torch.tensor([2.0, 2.0]))
    torch.testing.assert_close(smoothing(torch.tensor([16.0]), torch.tensor([4.0]), 1.0), torch.tensor([16.0]))
    assert bool(smoothing(torch.zeros(3), torch.zeros(3)).isfinite().all())  # inputs that are never used
    with pytest.raises(ValueError, match="alpha: expected a number from 0 to 1, got 1.5"):
        smoothing(torch.ones(2), torch.ones(2), 1.5)
    with pytest.raises(ValueError, match=r"two reaches \[in\], got \[2\] and \[3\]"):
        smoothing(torch.ones(2), torch.ones(3))


@given(seed=st.integers(0, 10**6), alpha=st.floats(0, 1), inputs=st.integers(1, 40), outputs=st.integers(1, 20))
def test_smoothing_is_exact_without_rounding(seed: int, alpha: float, inputs: int, outputs: int) -> None:
    random = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(n, inputs, generator=random, dtype=torch.float64) for n in (7, outputs))
    s = smoothing(x.abs().amax(0), weight_reach(w), alpha)
    torch.testing.assert_close((x / s) @ (w * s).T, x @ w.T, rtol=1e-12, atol=1e-12)


@given(seed=st.integers(0, 10**6), groups=st.integers(1, 4), size=st.sampled_from((4, 16)), outputs=st.integers(1, 12))
def test_awq_is_never_worse_than_nearest_and_exact_without_rounding(
    seed: int, groups: int, size: int, outputs: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(n, groups * size, generator=random, dtype=torch.float64) for n in (33, outputs))
    gram, scheme = x.T @ x, Scheme("int4", "group", size)
    s = search_scales([w], gram, x.abs().mean(0), scheme)
    assert output_error(w, rounded(w * s, scheme) / s, gram) <= output_error(w, rounded(w, scheme), gram)
    torch.testing.assert_close((x / s) @ (w * s).T, x @ w.T, rtol=1e-12, atol=1e-12)


def brute_force(mean: Tensor, weight: Tensor, size: int) -> list[Tensor]:
    """All scales that are tried, written out."""
    largest = weight.abs().view(len(weight), -1, size).amax(-1).repeat_interleave(size, 1)
    shares = (weight.abs() / largest).mean(0)
    found = [mean ** (step / 10) for step in range(10)]
    found += [mean ** (step / 10) / shares ** (1 - step / 10) for step in range(1, 11)]
    return [s / (s.max() * s.min()).sqrt() for s in found]


def test_awq_takes_the_best_of_its_ratios() -> None:
    x, weight = planted(7)
    gram, mean = x.T @ x, x.abs().mean(0)
    found = search_scales([weight[:20], weight[20:]], gram, mean, INT4)
    errors = {}
    for step in range(20):
        s = mean ** (step / 20)
        s = s / (s.max() * s.min()).sqrt()
        d = (weight - rounded(weight * s, INT4).double() / s) @ x.T
        errors[step] = float(d.square().sum())
    best = min(errors, key=lambda step: errors[step])
    assert best > 0
    torch.testing.assert_close(found, candidate(mean, best / 20))


def test_half_of_the_scales_that_are_tried_come_from_both_sides() -> None:
    x, weight = planted(7)
    mean = x.abs().mean(0)
    tried = candidates(mean, mean_share(weight, INT4))
    for found, expected in zip(tried, brute_force(mean, weight, 32), strict=True):
        torch.testing.assert_close(found, expected)
    assert bool((tried[0] == 1).all())


@pytest.mark.parametrize("name", ["qkv_proj", "gate_up_proj"])
def test_what_begins_a_block_is_judged_by_what_ends_it(name: str, make_folder: MakeFolder) -> None:
    """The block's output, from the layer with other weights in place: that of attention is what the residual stream
    gains before the MLP's norm. So the scales are not always those of least error of the matrix's own output."""
    layers = Layers(make_folder(outliers=(3, 17)))
    layer, rows = layers.layer(0), Rows.of(*layers.front(TOKENS))
    linear, end = (layer.qkv, layer.o) if name == "qkv_proj" else (layer.mlp.gate_up, layer.mlp.down)
    scheme, seen = Scheme("int4", "group", 16), rows.watch(layer, linear, Statistics())
    original = matrix(linear).clone()

    def gained() -> Tensor:
        found: list[Tensor] = []
        hook = end.register_forward_hook(lambda _, x, y: found.append(y))
        moved = Rows(rows.x.clone(), rows.ropes, rows.attention, rows.batch)
        moved.advance(layer)
        hook.remove()
        return torch.cat(found)

    before, tried = gained(), brute_force(seen.mean_abs, original, 16)
    own, block, error = [], [], block_error(layer, rows, linear, end, scheme)
    for s in tried:
        own.append(float(output_error(original, rounded(original * s, scheme) / s, seen.known_gram)))
        matrix(linear).copy_(rounded(original * s, scheme) / s)
        block.append(float((gained() - before).square().sum()))
        matrix(linear).copy_(original)
        assert error(s) == pytest.approx(block[-1], rel=1e-3)
    assert torch.equal(matrix(linear), original)
    assert block.index(min(block)) != own.index(min(own))
    recipe = Recipe(scaling="awq", group_size=16)
    quantize_layer(layer, rows, recipe)
    best = tried[block.index(min(block))]
    if name == "qkv_proj":  # the first to be scaled: the norm before it was divided by the best
        torch.testing.assert_close(layers.layer(0).input_norm / layer.input_norm, best, rtol=1e-4, atol=0)


@pytest.mark.parametrize("scheme", [INT4, Scheme("int4", "group", 32, symmetric=False)])
def test_clipping_is_never_worse_in_a_group_and_helps_where_a_weight_stands_out(scheme: Scheme) -> None:
    x, weight = planted(2, factor=1.0)
    weight[:, 5] *= 4  # one weight of the first group sets its scale
    gram = x.T @ x
    clipped = search_clipping(weight, gram, scheme)
    before, after = (output_error(weight, rounded(w, scheme), gram) for w in (weight, clipped))
    assert after < 0.97 * before
    for start in range(0, 128, 32):
        part, block = slice(start, start + 32), gram[start : start + 32, start : start + 32]
        old, new = (output_error(weight[:, part], rounded(w, scheme)[:, part], block) for w in (weight, clipped))
        assert new <= old * (1 + 1e-6)
    assert float(clipped.abs().max()) <= float(weight.abs().max())
    with pytest.raises(ValueError, match="per 'channel'"):
        search_clipping(weight, gram, Scheme("int4", "channel"))
