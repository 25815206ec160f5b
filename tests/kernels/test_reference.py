"""The torch twin of every kernel against plain formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch

from reference_impl.assembly.config import RopeConfig
from reference_impl.core.rotary import RotaryTable
from reference_impl.kernels import reference


def randn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def plain_attention(q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """One query and one head at a time: softmax(q k / sqrt(d)) v over the positions up to the query's own."""
    (num_q, heads, _), (seq_len, kv_heads, _) = q.shape, key.shape
    out = torch.empty_like(q)
    for i in range(num_q):
        last = seq_len - num_q + i + 1
        for h in range(heads):
            kv = h // (heads // kv_heads)
            scores = (key[:last, kv] * q[i, h]).sum(-1) * scale
            weights = (scores - scores.max()).exp()
            out[i, h] = (weights[:, None] * value[:last, kv]).sum(0) / weights.sum()
    return out


RAGGED = [(1, 1), (1, 2), (1, 133), (2, 2), (5, 18), (9, 9), (12, 46), (7, 8)]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 8), (6, 2, 10), (5, 1, 6)])
@pytest.mark.parametrize(("num_q", "seq_len"), RAGGED)
def test_attention_of_one_row_is_causal_and_aligned_with_the_end(num_q, seq_len, heads, kv_heads, dim) -> None:
    q, k, v = randn(num_q, heads, dim), randn(seq_len, kv_heads, dim, seed=1), randn(seq_len, kv_heads, dim, seed=2)
    expected = plain_attention(q, k, v, dim**-0.5)
    assert (reference.attention_one_row(q, k, v, dim**-0.5) - expected).abs().max() < 1e-13


@pytest.mark.parametrize(("num_q", "seq_len"), [(1, 133), (5, 18), (64, 64), (12, 46)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_errs_no_more_than_twice_plain_torch_in_the_same_precision(num_q, seq_len, dtype) -> None:
    q, k, v = randn(num_q, 4, 16), randn(seq_len, 2, 16, seed=1), randn(seq_len, 2, 16, seed=2)
    q, k, v = (t.to(dtype) for t in (q, k, v))
    exact = plain_attention(q.double(), k.double(), v.double(), 0.25)
    plain = plain_attention(q, k, v, 0.25)
    found = reference.attention_one_row(q, k, v, 0.25)
    bound = 2 * (plain.double() - exact).abs().max() + 2 * torch.finfo(dtype).eps * exact.abs().max()
    assert (found.double() - exact).abs().max() <= bound


def test_the_causal_mask_lets_the_last_query_see_everything() -> None:
    assert reference.causal_mask(2, 4, torch.device("cpu")).tolist() == [[True] * 3 + [False], [True] * 4]
    assert reference.causal_mask(3, 3, torch.device("cpu")).tolist() == torch.ones(3, 3).tril().bool().tolist()


def test_is_causal_of_torch_is_aligned_with_the_start_and_ours_is_not() -> None:
    """scaled_dot_product_attention(is_causal=True) with 2 queries over 6 keys lets the first see key 0 only."""
    q, k, v = randn(2, 1, 4), randn(6, 1, 4, seed=1), randn(6, 1, 4, seed=2)
    top_left = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True, scale=0.5
    ).transpose(0, 1)
    assert torch.allclose(top_left[0], v[0])
    ours = reference.attention_one_row(q, k, v, 0.5)
    assert (ours - plain_attention(q, k, v, 0.5)).abs().max() < 1e-14
    assert (ours - top_left).abs().max() > 0.1


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_context_slots_walk_the_block_table_in_order(block_size: int) -> None:
    table = torch.tensor([7, 2, 9, 4, 0, 0], dtype=torch.int32)
    for seq_len in (1, block_size, block_size + 1, 4 * block_size):
        expected = [int(table[p // block_size]) * block_size + p % block_size for p in range(seq_len)]
        found = reference.context_slots(table, seq_len, block_size)
        assert found.dtype is torch.int64
        assert found.tolist() == expected


def test_rms_norm_is_its_formula() -> None:
    x, weight = randn(3, 5, 12), randn(12, seed=1)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    assert torch.allclose(reference.rms_norm(x, weight, 1e-3), expected * weight, rtol=1e-14)
    assert torch.allclose(reference.rms_norm(x, None, 1e-3), expected, rtol=1e-14)


def test_silu_and_mul_gates_with_the_first_half() -> None:
    x = randn(4, 10)
    gate, up = x[:, :5], x[:, 5:]
    assert torch.allclose(reference.silu_and_mul(x), gate / (1 + (-gate).exp()) * up, rtol=1e-14)


def test_rotate_turns_each_pair_by_its_angle() -> None:
    x, positions = randn(3, 2, 8), torch.tensor([0, 5, 11])
    table = RotaryTable(RopeConfig(theta=100.0), 8, 16, torch.float64, torch.device("cpu"))
    found = reference.rotate(x, *table.cos_sin[:, positions])
    for t, position in enumerate(positions.tolist()):
        for pair in range(4):
            angle = position * 100.0 ** (-2 * pair / 8)
            turned = torch.complex(x[t, :, pair], x[t, :, pair + 4]) * complex(math.cos(angle), math.sin(angle))
            assert torch.allclose(found[t, :, pair], turned.real, rtol=1e-13, atol=1e-14)
            assert torch.allclose(found[t, :, pair + 4], turned.imag, rtol=1e-13, atol=1e-14)


def test_rotate_keeps_the_dtype_and_does_not_write_its_input() -> None:
    table = RotaryTable(RopeConfig(), 8, 300, torch.bfloat16, torch.device("cpu"))
    x = randn(2, 2, 8, dtype=torch.bfloat16)
    before = x.clone()
    assert reference.rotate(x, *table.cos_sin[:, [3, 299]]).dtype is torch.bfloat16
    assert torch.equal(x, before)
