"""Paged decode: one launch, whose programs and grid change nothing in the result."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is defined

import triton
import triton.language as tl

from reference_impl.kernels import paged_decode as module
from reference_impl.kernels import reference
from reference_impl.kernels.architectures import ARCHITECTURES
from reference_impl.kernels.launch import tickets_of
from reference_impl.kernels.paged_decode import grid_of, most_splits, paged_decode, splits_of, tiles_of_split
from tests.kernels.paged import DEVICE, Case, check, make

LENGTHS = [1, 70, 140, 33]  # of tiles of 32 keys


@pytest.fixture
def case() -> Case:
    return make([(1, n) for n in LENGTHS], 4, 2, 16, torch.float32)


def programs(monkeypatch, number: int) -> None:
    """Of each row and KV head, whatever the splits."""
    monkeypatch.setattr(module, "grid_of", lambda rows, kv_heads, *_: (kv_heads, rows, number))


@pytest.mark.parametrize("number", [1, 2, 3, 7])
def test_how_many_programs_share_the_splits_changes_no_bit(number, case, monkeypatch) -> None:
    expected = paged_decode(*case.decode)
    check(paged_decode, reference.paged_decode, case.decode)
    programs(monkeypatch, number)
    for _ in range(2):  # the second time with the tickets that the first left
        assert torch.equal(paged_decode(*case.decode), expected)
    assert tickets_of(expected.device).count_nonzero() == 0


@pytest.mark.parametrize("window", [None, 70])
def test_a_bound_of_the_contexts_gives_what_the_longest_context_gives(window, case) -> None:
    """Under a CUDA graph max_seq_len is a power of two above all contexts of all replays."""
    q, keys, values, table, lens, longest, scale = case.decode
    expected = paged_decode(*case.decode, window=window)
    for bound in (256, 4096):
        assert torch.equal(paged_decode(q, keys, values, table, lens, bound, scale, window=window), expected)
    assert longest < 256


@pytest.mark.parametrize("splits", [(1, 1), (2, 3), (5, 5)])
def test_few_splits_and_many_give_the_same_up_to_rounding(splits, monkeypatch) -> None:
    """With 64 keys of SPLIT: short contexts, middle ones, long ones."""
    case = make([(1, 400), (1, 20), (1, 150)], 3, 1, 16, torch.float32)
    monkeypatch.setattr(module, "SPLIT", 64)
    monkeypatch.setattr(module, "splits_of", lambda *_: splits)
    check(paged_decode, reference.paged_decode, case.decode)
    programs(monkeypatch, 2)  # of which one has several splits
    check(paged_decode, reference.paged_decode, case.decode)


def test_padding_rows_give_zeros_and_touch_nothing(case) -> None:
    """Their blocks and the memory of partial results hold NaN; the rows beside them are right, and stay so."""
    case.seq_lens[1] = case.seq_lens[3] = 0
    case.block_table[1] = case.block_table[3] = 10**9
    case.q[1] = case.q[3] = torch.nan
    for _ in range(2):
        out = paged_decode(*case.decode)
        assert out[1].abs().max() == out[3].abs().max() == 0
        alone = case.decode
        rows = torch.tensor([0, 2], device=DEVICE)
        found = paged_decode(alone[0][rows], *alone[1:3], case.block_table[rows], case.seq_lens[rows], *alone[5:])
        assert torch.equal(out[rows], found)
    assert tickets_of(out.device).count_nonzero() == 0


def test_nothing_but_padding_and_nothing_at_all(case) -> None:
    q, keys, values, table, lens, longest, scale = case.decode
    assert paged_decode(q, keys, values, table, lens * 0, longest, scale).count_nonzero() == 0
    assert paged_decode(q[:0], keys, values, table[:0], lens[:0], 0, scale).shape == (0, 4, 16)


def test_memory_of_partial_results_may_hold_anything(case, monkeypatch) -> None:
    expected = paged_decode(*case.decode)
    fresh = torch.Tensor.new_empty

    def poisoned(self: torch.Tensor, *shape: object, **options: object) -> torch.Tensor:
        made = fresh(self, *shape, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    assert torch.equal(paged_decode(*case.decode), expected)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_bad_value_spoils_its_own_head_and_row_only(bad, case) -> None:
    expected = paged_decode(*case.decode)
    block = case.block_table[2, 0].long()
    case.values[block, 3, 1] = bad
    found = paged_decode(*case.decode)
    spoilt = torch.zeros(4, 4, dtype=torch.bool, device=DEVICE)
    spoilt[2, 2:] = True  # heads 2 and 3 read KV head 1
    assert not found[spoilt].isfinite().any()
    assert torch.equal(found[~spoilt], expected[~spoilt])


def test_scores_so_large_that_only_their_differences_can_be_raised_to_a_power(case) -> None:
    case.q *= 1e4
    found, expected = paged_decode(*case.decode), reference.paged_decode(*map(_double, case.decode))
    assert (found - expected).abs().max() < 1e-3


def _double(value: object) -> object:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@triton.jit
def _splits(out, N: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, SHORT: tl.constexpr, LONG: tl.constexpr):
    keys = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + keys, tl.cdiv(keys, BLOCK_N * tiles_of_split(keys, BLOCK_N, SPLIT, SHORT, LONG)))


@pytest.mark.parametrize("kv_heads", [1, 4, 8, 32])
@pytest.mark.parametrize("block_n", [32, 64])
def test_there_is_room_for_all_splits_of_every_context(kv_heads, block_n) -> None:
    """What the host makes room for is at least what the kernel cuts, and no more than twice as much."""
    short, long = splits_of(kv_heads, ARCHITECTURES["sm_90"])
    cut = torch.empty(40 * 1024, dtype=torch.int32, device=DEVICE)
    _splits[40,](cut, N=1024, BLOCK_N=block_n, SPLIT=module.SPLIT, SHORT=short, LONG=long)
    counts = cut.tolist()
    longest = list(itertools.accumulate(counts, max))  # of all contexts up to here
    room = [most_splits(keys, block_n, short, long) for keys in range(len(counts))]
    assert counts[0] == 0
    assert all(have >= need for have, need in zip(room, longest, strict=True))
    assert all(have <= 2 * need for have, need in zip(room[1:], longest[1:], strict=True))


def test_grids_fill_a_gpu_and_do_not_grow_with_empty_splits() -> None:
    gpu = ARCHITECTURES["sm_90"]
    assert splits_of(8, gpu) == (16, 33)
    assert grid_of(1, 8, 33, gpu) == (8, 1, 33), "a lone long row: two programs for each multiprocessor"
    assert grid_of(64, 8, 33, gpu) == (8, 64, 7)
    assert grid_of(256, 8, 33, gpu) == (8, 256, 2)
    for rows in (1, 7, 64, 65, 500, 4000):
        _, _, programs = grid_of(rows, 8, 1000, gpu)
        assert programs == 1 or rows * 8 * (programs - 1) < 24 * gpu.multiprocessors


@pytest.mark.parametrize("rows", [1, 5])
def test_decoding_is_one_launch(rows, monkeypatch) -> None:
    launched = []
    monkeypatch.setattr(module, "launch", lambda kernel, *_, **__: launched.append(kernel.__name__))
    paged_decode(*make([(1, 3000)] * rows, 4, 2, 16, torch.float32).decode)
    assert launched == ["_paged_decode"]
