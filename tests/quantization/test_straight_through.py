"""Rounded going forward, the identity going backward; and learning moves codes to where rounding alone would not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

from reference_impl.models.quantization.awq import rounded
from reference_impl.models.quantization.scheme import Scheme
from reference_impl.models.quantization.straight_through import Rounded, straight_through

SCHEMES = {
    "int4": Scheme("int4", "group", 8),
    "ternary": Scheme("ternary", "channel"),
    "int3-like": Scheme("nf4", "group", 8),
}


@pytest.mark.parametrize("kind", SCHEMES)
def test_forward_rounds_and_backward_does_not(kind: str) -> None:
    weight = torch.randn(6, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    out = straight_through(weight, SCHEMES[kind])
    assert torch.equal(out, rounded(weight.detach(), SCHEMES[kind]))
    assert not torch.equal(out, weight)
    slope = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))
    (out * slope).sum().backward()
    assert torch.equal(weight.grad, slope)


def test_what_was_learned_rounded_is_better_than_what_is_rounded_afterwards() -> None:
    """Ternary: one layer whose inputs go together, so that errors can make up for each other; over two seeds."""
    for seed in range(2):
        random = torch.Generator().manual_seed(seed)
        x = torch.randn(64, 16, generator=random) @ torch.randn(16, 16, generator=random)
        layer = nn.Linear(16, 8, bias=False)
        with torch.no_grad():
            layer.weight.copy_(torch.randn(8, 16, generator=random))
        wanted = (x @ layer.weight.T).detach()
        before = float((x @ rounded(layer.weight.detach(), SCHEMES["ternary"]).T - wanted).square().mean())
        register_parametrization(layer, "weight", Rounded(SCHEMES["ternary"]))
        optimizer, best = torch.optim.Adam(layer.parameters(), lr=0.01), before
        for _ in range(60):
            loss = (layer(x) - wanted).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            best = min(best, float(loss.detach()))
        assert best < 0.7 * before, seed
        learned = layer.parametrizations.weight.original.detach()
        assert torch.equal(layer.weight.detach(), rounded(learned, SCHEMES["ternary"]))
