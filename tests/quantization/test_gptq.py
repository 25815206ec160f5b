"""GPTQ against Optimal Brain Quantization written out: one inverse for each column, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from reference_impl.models.quantization.gptq import gptq, in_own_order, output_error
from reference_impl.models.quantization.scheme import Fitted, Scheme, decode, encode, fit


def correlated(outputs: int, inputs: int, seed: int, rows: int = 64) -> tuple[Tensor, Tensor]:
    """(weight, gram) in float64, of inputs that go together."""
    random = torch.Generator().manual_seed(seed)
    mix = torch.randn(inputs, inputs, generator=random, dtype=torch.float64)
    x = torch.randn(rows, inputs, generator=random, dtype=torch.float64) @ mix
    weight = torch.randn(outputs, inputs, generator=random, dtype=torch.float64)
    return weight, x.T @ x


def naive(weight: Tensor, gram: Tensor, scheme: Scheme, damping: float, order: list[int], moving: bool) -> Tensor:
    """What stands for the weight: each column's error is spread over those left with the inverse of what is left of H,
    inverted anew each time. Scales of group g, of columns in `order` if moving: just before its first column."""
    w, inputs = weight.clone(), weight.shape[1]
    h = gram + damping * gram.diagonal().mean() * torch.eye(inputs, dtype=gram.dtype)
    whole, out = fit(weight, scheme), torch.zeros_like(weight)
    size = scheme.group_size or inputs
    for n, i in enumerate(order):
        if moving and n % size == 0:
            now = fit(w[:, order[n : n + size]], scheme, whole.tensor_scale)
        elif not moving:
            columns = whole.scales.shape[1]
            g = i * columns // inputs
            zeros = None if whole.zeros is None else whole.zeros[:, g : g + 1]
            now = Fitted(whole.scales[:, g : g + 1], zeros, whole.tensor_scale)
        q = decode(encode(w[:, i : i + 1], scheme, now), scheme, now)[:, 0].double()
        left = order[n:]
        inverse = torch.linalg.inv(h[left][:, left])
        w[:, left] -= torch.outer((w[:, i] - q) / inverse[0, 0], inverse[0])
        out[:, i] = q
    return out


SCHEMES = {
    "channel": Scheme("int4", "channel"),
    "groups": Scheme("int4", "group", 8),
    "zero points": Scheme("int4", "group", 8, symmetric=False),
    "nvfp4": Scheme("e2m1", "group", 16, scales="e4m3"),
    "mxfp4": Scheme("e2m1", "group", 16, scales="e8m0"),
    "fp8": Scheme("e4m3", "tensor"),
}


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("kind", SCHEMES)
def test_it_is_optimal_brain_quantization(kind: str, static: bool, act_order: bool) -> None:
    scheme = SCHEMES[kind]
    weight, gram = correlated(6, 32, seed=1)
    found = gptq(weight, gram, scheme, damping=0.02, act_order=act_order, static_groups=static, block=8)
    order = gram.diagonal().argsort(descending=True, stable=True).tolist() if act_order else list(range(32))
    moving = not static and scheme.per == "group"
    expected = naive(weight, gram, scheme, 0.02, order, moving)
    codes = found.codes if found.order is None else found.codes[:, found.order]
    decoded = in_own_order(decode(codes, scheme, found.fitted), found.order)
    assert (found.order is not None) == (moving and act_order)
    torch.testing.assert_close(decoded.double(), expected, rtol=0, atol=1e-6)


@given(
    outputs=st.integers(1, 9), groups=st.integers(1, 4), size=st.sampled_from((4, 8, 16)), seed=st.integers(0, 10**6),
    block=st.sampled_from((3, 16, 128)),
)  # fmt: skip
def test_a_block_is_only_a_way_to_compute(outputs: int, groups: int, size: int, seed: int, block: int) -> None:
    weight, gram = correlated(outputs, groups * size, seed)
    scheme = Scheme("int4", "group", size)
    found = gptq(weight, gram, scheme, block=block)
    expected = naive(weight, gram, scheme, 0.01, list(range(groups * size)), moving=False)
    # Where two values of one weight round to different codes, the rest differs, too: so compare errors, not codes.
    error = output_error(weight, decode(found.codes, scheme, found.fitted), gram)
    assert error == pytest.approx(output_error(weight, expected, gram), rel=1e-3)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", SCHEMES)
def test_the_output_is_nearer_than_by_rounding_to_nearest(kind: str, seed: int) -> None:
    weight, gram = correlated(24, 64, seed, rows=256)
    scheme = SCHEMES[kind]
    fitted = fit(weight, scheme)
    nearest = output_error(weight, decode(encode(weight, scheme, fitted), scheme, fitted), gram)
    found = gptq(weight, gram, scheme)
    assert output_error(weight, decode(found.codes, scheme, found.fitted), gram) < nearest


def test_inputs_that_are_independent_leave_nothing_to_make_up_for() -> None:
    weight, _ = correlated(5, 32, seed=3)
    gram = torch.diag(torch.rand(32, dtype=torch.float64) + 0.5)
    scheme = Scheme("int4", "group", 8)
    fitted = fit(weight, scheme)
    found = gptq(weight, gram, scheme, static_groups=True, act_order=True)
    assert torch.equal(found.codes, encode(weight, scheme, fitted))


def test_an_input_that_was_always_zero_gets_weights_of_zero() -> None:
    weight, gram = correlated(5, 16, seed=4)
    gram[3] = gram[:, 3] = 0
    found = gptq(weight, gram, Scheme("int4", "channel"))
    assert bool((found.codes[:, 3] == 0).all())
    assert bool((found.codes[:, 2] != 0).any())


def test_what_cannot_be_is_said() -> None:
    weight, gram = correlated(4, 24, seed=5)
    with pytest.raises(ValueError, match="groups of 16 inputs: expected a multiple"):
        gptq(weight, gram, Scheme("int4", "group", 16))
    with pytest.raises(ValueError, match=r"gram \[in, in\], got \[4, 24\] and \[23, 23\]"):
        gptq(weight, gram[:23, :23], Scheme("int4", "channel"))
    with pytest.raises(ValueError, match="damping: expected 0 or more"):
        gptq(weight, gram, Scheme("int4", "channel"), damping=-1)
    with pytest.raises(ValueError, match="none at column"):  # one row says nothing of 24 inputs
        gptq(weight, torch.ones(24, 24, dtype=torch.float64), Scheme("int4", "channel"), damping=0)
    gram[0, 0] = torch.inf
    with pytest.raises(ValueError, match="expected a finite gram"):
        gptq(weight, gram, Scheme("int4", "channel"))
