"""The kernels for a cache by channel (KIVI) against their twins and float64, in the interpreter or on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from reference_impl.kernels import decode_by_channel as decode_module
from reference_impl.kernels import reference
from reference_impl.kernels.decode_by_channel import decode_by_channel
from reference_impl.kernels.flash_by_channel import flash_by_channel
from reference_impl.kernels.launch import tickets_of
from reference_impl.kernels.reference import ByChannel
from reference_impl.kernels.write_by_channel import write_by_channel
from tests.kernels.paged import DEVICE

SLOW = pytest.mark.slow
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


def laid_out(shape: Sequence[int], order: Sequence[int], dtype: torch.dtype = torch.float16) -> Tensor:
    """NaN, of this shape, whose dimensions lie in memory in this order."""
    empty = torch.full([shape[i] for i in order], torch.nan, dtype=dtype, device=DEVICE)
    return empty.permute([order.index(i) for i in range(len(order))])


@dataclass
class Case:
    """Rows whose tokens before this step are written: full blocks rounded, the last open_blocks blocks open, too. All
    other memory is NaN, or the largest codes."""

    q: Tensor
    k: Tensor
    v: Tensor
    cache: ByChannel
    seats: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    scale: float

    @property
    def writes(self) -> tuple[Any, ...]:
        return (self.k, self.v, self.cache, self.seats, self.slot_mapping, self.query_start_loc, self.seq_lens)

    @property
    def ragged(self) -> tuple[Any, ...]:
        rows = (self.seats, self.block_table, self.query_start_loc, self.seq_lens, self.scale)
        return (self.q, self.k, self.v, self.cache, *rows)

    @property
    def decode(self) -> tuple[Any, ...]:
        rows = (self.seats, self.block_table, self.seq_lens, int(self.seq_lens.max()), self.scale)
        return (self.q, self.k, self.v, self.cache, *rows)


def make(
    rows: Sequence[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, *,
    block_size: int = 16, open_blocks: int = 1, seed: int = 0, writes: bool = True,
) -> Case:  # fmt: skip
    """rows: (queries, context). writes: the step's own blocks are rounded, too."""
    random, half = torch.Generator().manual_seed(seed), head_dim // 2
    needed = [-(-context // block_size) for _, context in rows]
    ids = torch.randperm(sum(needed) + 2, generator=random)
    table = torch.full((len(rows), max(needed) + 1), int(ids[-1]), dtype=torch.int32)
    for row, blocks in enumerate(ids[: sum(needed)].split(needed)):
        table[row, : len(blocks)] = blocks
    n, ring = len(ids), open_blocks * block_size
    codes = [torch.full((n, block_size, kv_heads, half), 255, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    scales = (
        laid_out((n, kv_heads, head_dim, 2), (0, 1, 3, 2)), laid_out((n, block_size, kv_heads, 2), (0, 3, 2, 1)),
    )  # fmt: skip
    seats = torch.randperm(len(rows) + 1, generator=random)[: len(rows)]
    opens = [
        torch.full(((len(rows) + 1) * ring, kv_heads, head_dim), torch.nan, dtype=dtype, device=DEVICE)
        for _ in range(2)
    ]
    cache = ByChannel(codes[0], codes[1], *scales, opens[0], opens[1], open_blocks)

    # A channel of keys has its own place and width: that is what scales by channel are for.
    channel = 2 * torch.rand(2, kv_heads, head_dim, generator=random) - 1
    texts = [torch.randn(2, context, kv_heads, head_dim, generator=random) for _, context in rows]
    keys, values = zip(*((key * channel[0].exp() + channel[1], value) for key, value in texts), strict=True)

    def batch(ranges: Sequence[tuple[int, int]]) -> Case:
        starts = torch.tensor([0, *(end - first for first, end in ranges)]).cumsum(0).int()
        places = [(row, p) for row, (first, end) in enumerate(ranges) for p in range(first, end)]
        slots = torch.tensor([int(table[r, p // block_size]) * block_size + p % block_size for r, p in places])
        k, v = (torch.cat([x[a:b] for x, (a, b) in zip(what, ranges, strict=True)]) for what in (keys, values))
        q = torch.randn(len(k), heads, head_dim, generator=random)
        together = torch.cat((q, k, v), 1).to(DEVICE, dtype)  # as a projection's output: strided
        lens = torch.tensor([end for _, end in ranges], dtype=torch.int32)
        tensors = [x.to(DEVICE) for x in (seats, slots, table, starts, lens)]
        return Case(*together.split((heads, kv_heads, kv_heads), 1), cache, *tensors, head_dim**-0.5)

    before = batch([(0, context - queries) for queries, context in rows])
    reference.write_by_channel(*before.writes)
    step = batch([(context - queries, context) for queries, context in rows])
    if writes:
        reference.write_by_channel(*step.writes, keeps=False)
    return step


def double(case: Case) -> Case:
    opens = {name: getattr(case.cache, name).double() for name in ("open_keys", "open_values")}
    q, k, v = (x.double() for x in (case.q, case.k, case.v))
    return Case(q, k, v, case.cache._replace(**opens), *list(vars(case).values())[4:])


def check(found: Tensor, plain: Tensor, exact: Tensor) -> None:
    """As in paged.py: at most twice the error of plain torch in this precision."""
    assert exact.isfinite().all()
    error, allowed = (found.double() - exact).abs().max(), 2 * (plain.double() - exact).abs().max()
    allowed += 2 * torch.finfo(found.dtype).eps * exact.abs().max()
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


def check_decode(case: Case, **options: Any) -> None:
    check(
        decode_by_channel(*case.decode, **options), reference.decode_by_channel(*case.decode, **options),
        reference.decode_by_channel(*double(case).decode, **options),
    )  # fmt: skip


def check_flash(case: Case, **options: Any) -> None:
    check(
        flash_by_channel(*case.ragged, **options), reference.flash_by_channel(*case.ragged, **options),
        reference.flash_by_channel(*double(case).ragged, **options),
    )  # fmt: skip


# Contexts at and around the ends of blocks of 16, of tiles and of splits.
LENGTHS = [1, 15, 16, 17, 33, 64, 65, 80, 81, 512, 513, 1056]
RAGGED = [(1, 1056), (5, 18), (16, 32), (129, 463), (1, 1), (40, 40), (17, 65), (2, 129), (3, 17)]
HEADS = [(4, 4, 64), (8, 2, 40), (5, 1, 16), (6, 2, 80)]  # heads, KV heads, head_dim: MHA, GQA, MQA; no powers of two


@pytest.mark.parametrize("dtype", [pytest.param(DTYPES[0], marks=SLOW), *DTYPES[1:]])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_decoding_rows(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    check_decode(make([(1, n) for n in LENGTHS], heads, kv_heads, head_dim, dtype))


@pytest.mark.parametrize("dtype", [pytest.param(DTYPES[0], marks=SLOW), *DTYPES[1:]])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_ragged_rows(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    check_flash(make(RAGGED, heads, kv_heads, head_dim, dtype))


@pytest.mark.parametrize("block_size", [1, 3, 24, 100, *(pytest.param(n, marks=SLOW) for n in (2, 5, 64, 128))])
def test_blocks_of_any_size(block_size: int) -> None:
    """Of no power of two, and of more tokens than a tile."""
    ends = [max(1, n + d) for n in (block_size, 3 * block_size) for d in (-1, 0, 1)]
    check_decode(make([(1, n) for n in ends], 4, 2, 16, torch.float16, block_size=block_size))
    rows = [(min(n, q), n) for n, q in zip(ends, itertools.cycle((1, 2, block_size + 1, 300)), strict=False)]
    check_flash(make(rows, 4, 2, 16, torch.float16, block_size=block_size, open_blocks=2))


@pytest.mark.parametrize(
    ("window", "softcap"),
    [
        (7, 5.0),
        (64, None),
        *(pytest.param(*some, marks=SLOW) for some in ((1, None), (16, 5.0), (100, 5.0), (513, None))),
    ],
)
def test_windows_and_soft_caps(window: int, softcap: float | None) -> None:
    check_decode(make([(1, n) for n in LENGTHS], 4, 2, 16, torch.float16), window=window, softcap=softcap)
    check_flash(make(RAGGED, 4, 2, 16, torch.float16), window=window, softcap=softcap)


def trees(rows: Sequence[tuple[int, int]], plain: Sequence[int] = (), seed: int = 0) -> Tensor:
    """What each token sees of its row: in a random tree behind its first token; 0 in rows that are none."""
    random, found = torch.Generator().manual_seed(seed), list[int]()
    for number, (queries, _) in enumerate(rows):
        seen = [1]
        for token in range(1, queries):
            parent = int(torch.randint(max(0, token - 6), token, (), generator=random))
            seen.append(seen[parent] | 1 << token)
        found += [0] * queries if number in plain else seen
    return torch.from_numpy(np.array(found, np.uint64).view(np.int64)).to(DEVICE)


def by_paths(case: Case, ancestors: Tensor, **options: Any) -> Tensor:
    """Each token of a tree is the last one of a row that has its path alone, and writes the blocks that this fills."""
    out, size = reference.flash_by_channel(*case.ragged, **options), case.cache.keys.shape[1]
    for row, end in enumerate(case.seq_lens.tolist()):
        first, last = case.query_start_loc[row : row + 2].tolist()
        for token in range(first, last) if ancestors[first] else ():
            path = [first + i for i in range(64) if int(ancestors[token]) >> i & 1]
            start, only = end - (last - first), slice(row, row + 1)
            places = torch.arange(start, start + len(path), device=DEVICE)
            lens = torch.tensor([start + len(path)], dtype=torch.int32, device=DEVICE)
            starts = torch.tensor([0, len(path)], dtype=torch.int32, device=DEVICE)
            slots = case.block_table[row, places // size].long() * size + places % size
            cache = ByChannel(*(t.clone() for t in case.cache[:6]), case.cache.open_blocks)
            q, k, v = (x[path] for x in (case.q, case.k, case.v))
            reference.write_by_channel(k, v, cache, case.seats[only], slots, starts, lens, keeps=False)
            rows = (case.seats[only], case.block_table[only], starts, lens, case.scale)
            out[token] = reference.flash_by_channel(q, k, v, cache, *rows, **options)[-1]
    return out


@pytest.mark.parametrize(
    ("block_size", "window", "softcap"),
    [(1, None, None), (4, 9, None), (16, None, 5.0), (40, None, None),
     *(pytest.param(*some, marks=SLOW) for some in ((2, 3, None), (3, None, 5.0), (24, 30, None), (128, None, None)))],
)  # fmt: skip
def test_a_guess_in_a_tree_reads_what_its_path_alone_would_have_written(
    block_size: int, window: int | None, softcap: float | None
) -> None:
    """Beside rows without a tree, and with the step's own blocks rounded by place, as the engine does it."""
    longest = 64 if block_size > 8 else 16  # in smaller blocks many more tokens fill one
    rows = [(1, 33), (5, 40), (6, 3 * block_size + 4), (9, 9), (longest, longest + 19)]
    ancestors = trees(rows, plain=[0, 1])
    open_blocks = 1 + -(-64 // block_size)
    case = make(rows, 2, 1, 8, torch.float32, block_size=block_size, open_blocks=open_blocks)
    options: dict[str, Any] = {"window": window, "softcap": softcap}
    exact = double(case)
    found = reference.flash_by_channel(*exact.ragged, ancestors=ancestors, **options)
    assert (found - by_paths(exact, ancestors, **options)).abs().max() < 1e-12
    check_flash(case, ancestors=ancestors, **options)


def test_what_a_window_shows_no_more_is_not_read() -> None:
    """Its blocks may be another request's: their codes, scales and block numbers may be anything."""
    window, context = 20, 77
    for rows in ([(1, context)], [(6, context)]):
        case = make(rows, 4, 2, 16, torch.float32)
        wanted = reference.flash_by_channel(*case.ragged, window=window)
        shown = (context - rows[0][0] - window + 1) // 16
        case.block_table[:, :shown] = 10**9
        found = flash_by_channel(*case.ragged, window=window)
        assert (found - wanted).abs().max() < 1e-5
        if rows[0][0] == 1:
            assert (decode_by_channel(*case.decode, window=window) - wanted).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("block_size", "dtype"),
    [
        pytest.param(size, dtype, marks=[] if dtype is not torch.float32 or size in (3, 16) else SLOW)
        for dtype in DTYPES
        for size in (1, 3, 4, 16, 40)
    ],
)
def test_what_is_written_is_what_the_twin_writes(block_size: int, dtype: torch.dtype) -> None:
    """Bit by bit: rounding before attention, keeping after it; and in one launch where rows are short."""
    ends = [block_size * n + d for n in (1, 2, 4) for d in (-1, 0, 1)]
    rows = [(min(n, q), n) for n, q in zip(filter(None, ends), itertools.cycle((1, 2, 5, 200)), strict=False)]
    for kv_heads, head_dim, case_rows, one_launch in ((2, 6, rows, False), (1, 40, [(1, n) for n in ends if n], True)):
        ours, theirs = (
            make(case_rows, kv_heads, kv_heads, head_dim, dtype, block_size=block_size, writes=False) for _ in range(2)
        )
        if one_launch:
            write_by_channel(*ours.writes)
            reference.write_by_channel(*theirs.writes)
        for rounds in () if one_launch else (True, False):
            write_by_channel(*ours.writes, rounds=rounds, keeps=not rounds)
            reference.write_by_channel(*theirs.writes, rounds=rounds, keeps=not rounds)
        for name, found, wanted in zip(ByChannel._fields, ours.cache[:6], theirs.cache[:6], strict=False):
            assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0)), name
        assert ours.cache.open_keys.isfinite().any()


def test_rows_that_pad_write_nothing_and_give_zeros() -> None:
    """Their seats, blocks and slots lie outside; what is beside them is right, and stays so."""
    case = make([(1, 33), (1, 16), (1, 80), (1, 20)], 4, 2, 16, torch.float32, writes=False)
    alone = make([(1, 33), (1, 16), (1, 80), (1, 20)], 4, 2, 16, torch.float32, writes=False)
    for row in (1, 3):
        case.seq_lens[row], case.slot_mapping[row], case.block_table[row], case.seats[row] = 0, -1, 10**9, 10**9
        case.q[row] = case.k[row] = case.v[row] = torch.nan
        alone.seq_lens[row] = 0
    before = [t.clone() for t in case.cache[:6]]
    for _ in range(2):  # the same again: as a graph is captured
        write_by_channel(*case.writes)
        reference.write_by_channel(*alone.writes)
        for wanted, found, old in zip(alone.cache[:6], case.cache[:6], before, strict=False):
            assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))
            assert old.shape == found.shape
        out, flat = decode_by_channel(*case.decode), flash_by_channel(*case.ragged)
        assert out[1].abs().max() == out[3].abs().max() == flat[1].abs().max() == 0
        assert (out - reference.decode_by_channel(*alone.decode)).abs().max() < 1e-5
        assert (flat - out).abs().max() < 1e-5
    assert tickets_of(out.device).count_nonzero() == 0


@pytest.mark.parametrize("splits", [(1, 1), (4, 4), (2, 6)])
def test_few_splits_and_many_give_the_same_up_to_rounding(
    splits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_module, "SPLIT", 64)
    monkeypatch.setattr(decode_module, "splits_of", lambda *_: splits)
    case = make([(1, 400), (1, 20), (1, 145), (1, 16)], 3, 1, 16, torch.float32)
    check_decode(case)
    monkeypatch.setattr(decode_module, "grid_of", lambda rows, heads, *_: (heads, rows, 2))
    check_decode(case)
    check_decode(case, window=100)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    case = make([(1, 700), (1, 33), (1, 250)], 4, 2, 16, torch.float32)
    together = decode_by_channel(*case.decode)
    for row in range(3):
        one = slice(row, row + 1)
        found = decode_by_channel(
            case.q[one], case.k[one], case.v[one], case.cache, case.seats[one], case.block_table[one],
            case.seq_lens[one], int(case.seq_lens[row]), case.scale,
        )  # fmt: skip
        assert torch.equal(found[0], together[row])


def test_memory_that_lies_otherwise_is_refused() -> None:
    case = make([(1, 20)], 4, 2, 16, torch.float32)
    other = case.cache._replace(key_scale=case.cache.key_scale.contiguous())
    for call in (
        lambda: decode_by_channel(*case.decode[:3], other, *case.decode[4:]),
        lambda: flash_by_channel(*case.ragged[:3], other, *case.ragged[4:]),
        lambda: write_by_channel(*case.writes[:2], other, *case.writes[3:]),
    ):
        with pytest.raises(ValueError, match=r"scales that lie as \[num_blocks, num_kv_heads, 2, head_dim\]"):
            call()
