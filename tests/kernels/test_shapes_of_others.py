"""The shapes with which FlashAttention and vLLM test their own attention kernels, as far as ours compute the same.

FlashAttention: tests/test_flash_attn.py (causal, local, soft cap, MQA and GQA, paged cache). vLLM:
tests/kernels/attention (paged, ragged, sliding window, soft cap, 8-bit cache). Left out is what these kernels do not
promise: attention that is not causal, more queries than keys, dropout, ALiBi, backward. Heads, batches and the longest
contexts are cut so that the interpreter gets through; what decides tiles, masks, splits and addresses is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from reference_impl.kernels import reference
from reference_impl.kernels.flash_attention import flash_attention
from reference_impl.kernels.paged_decode import paged_decode
from tests.kernels.paged import DEVICE, Case, check, make

SLOW = pytest.mark.slow
HALF = [torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
HEAD_DIMS = [32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256]
# Tiles are chosen for head sizes up to 64, 128 and 256; `make test` has of each the largest and one that fills none.
SOME_HEAD_DIMS = [59, 64, 128, 160, 256]
SEQLENS = [
    (1, 1), (1, 239), (3, 799), (127, 512), (127, 513), (113, 203), (128, 217), (113, 211), (108, 256), (256, 512),
    (64, 800), (1023, 1024), (1024, 1024),
]  # fmt: skip
MIXED = [(1, 1328), (5, 18), (129, 463)]  # vLLM: decoding, a chunk, a prompt behind a prefix
MIXED_LONG = [(1, 523), (1, 37), (1, 2011)]
DECODED = [[1328, 5, 463], [1, 54, 293, 70]]
# Of lengths: all but the longest are in one batch below, with windows.
SOME_SEQLENS = [(1, 1), (1, 239), (127, 513), (256, 512)]


def of_which(some: Collection[Any], every: Iterable[Any], several: bool = False) -> list[Any]:
    """Every value as a parameter, or as several; what is not among some is slow."""
    marked = [(value, [] if value in some else [pytest.mark.slow]) for value in every]
    return [pytest.param(*(value if several else (value,)), marks=marks) for value, marks in marked]


def both(case: Case, **options: object) -> None:
    check(flash_attention, reference.flash_attention, case.ragged, **options, **case.options)
    if len(case.q) == len(case.seq_lens):  # one query per row
        check(paged_decode, reference.paged_decode, case.decode, **options, **case.options)


def decoding(*contexts: int) -> list[tuple[int, int]]:
    return [(1, context) for context in contexts]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("head_dim", of_which(SOME_HEAD_DIMS, HEAD_DIMS))
def test_head_sizes_of_flash_attention(head_dim, dtype) -> None:
    both(make([(113, 203), (3, 239)], 1, 1, head_dim, dtype))
    both(make(decoding(1, 199), 2, 1, head_dim, dtype))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("seqlens", of_which(SOME_SEQLENS, SEQLENS), ids=str)
def test_lengths_of_flash_attention(seqlens, dtype) -> None:
    both(make([seqlens], 1, 1, 64, dtype))


@pytest.mark.parametrize("window", of_which([59], [1, 59, 300]))
@pytest.mark.parametrize("softcap", of_which([None], [None, 50.0]))
def test_all_lengths_of_flash_attention_in_one_batch_with_a_window(softcap, window) -> None:
    """local=True there draws a window at random for each shape."""
    short = [pair for pair in SEQLENS if pair[0] < 1000]
    both(make(short, 1, 1, 32, torch.float16), window=window, softcap=softcap)


@pytest.mark.parametrize("softcap", of_which([50.0], [10.0, 50.0]))
def test_soft_caps_in_float32(softcap) -> None:
    """Most scores lie near 0, where a careless tanh loses digits that 50 then makes large."""
    both(make([(113, 203)], 1, 1, 64, torch.float32), softcap=softcap)
    both(make(decoding(203, 99), 2, 1, 64, torch.float32), softcap=softcap)


@pytest.mark.parametrize("scores", [1e-3, 30.0])
def test_soft_caps_of_scores_that_are_tiny_or_beyond_the_cap(scores) -> None:
    case = make([(16, 130)], 2, 1, 64, torch.float32)
    case.q *= scores
    both(case, softcap=50.0)


@pytest.mark.parametrize(
    "heads", of_which([(5, 1), (16, 1)], [(5, 1), (6, 1), (6, 2), (6, 6), (14, 2), (16, 1)]), ids=str
)
def test_heads_in_a_group(heads) -> None:
    both(make([(5, 70)], *heads, 32, torch.float16))
    both(make(decoding(1, 200), *heads, 32, torch.float16))


def test_the_many_heads_of_falcon_that_share_one_kv_head() -> None:
    both(make(decoding(70), 71, 1, 64, torch.float16))


@pytest.mark.parametrize("block_size", of_which([64, 512], [16, 32, 64, 256, 512]))
def test_block_sizes(block_size) -> None:
    """FlashAttention pages by 256 and more, vLLM by 16 to 64."""
    both(make([(113, 203), (64, 800), (1, 1)], 1, 1, 64, torch.float16, block_size=block_size))
    both(make(decoding(1, 339, 515), 2, 1, 64, torch.float16, block_size=block_size))


LONG = [(seqlens, head_dim) for head_dim in (59, 128)
        for seqlens in ((3, 1024), (64, 2048), (16, 3000), (128, 128), (1, 5000))]  # fmt: skip


@pytest.mark.parametrize(
    ("seqlens", "head_dim"),
    [pytest.param(*one, marks=[] if one in (((3, 1024), 59), ((128, 128), 128)) else SLOW) for one in LONG],
    ids=str,
)
def test_flash_attention_with_a_cache(seqlens, head_dim) -> None:
    """Its longest are (16, 20000) and (1, 131072)."""
    both(make([seqlens], 1, 1, head_dim, torch.float16))


@pytest.mark.parametrize(
    ("heads", "head_dim"),
    of_which(
        [((4, 4), 128), ((8, 2), 256)],
        [(heads, size) for heads in ((4, 4), (8, 2), (16, 2)) for size in (128, 256)],
        True,
    ),
    ids=str,
)
def test_heads_and_head_sizes_of_vllm(heads, head_dim) -> None:
    both(make([(33, 97)], *heads, head_dim, torch.float16, block_size=16))
    both(make(decoding(150, 5), *heads, head_dim, torch.float16, block_size=32))


# A cap and a window each with every block size; both together for one.
CAPS_AND_WINDOWS = [
    (softcap, window, block_size)
    for softcap in (None, 10.0, 50.0)
    for window, block_size in ((None, 16), (None, 64), (64, 32), (128, 64), (256, 16))
]
TRIED = [(10.0, None, 64), (None, 256, 16), (50.0, 64, 32)]


@pytest.mark.parametrize(
    ("softcap", "window", "block_size"),
    [pytest.param(*one, marks=[] if one in TRIED else SLOW) for one in CAPS_AND_WINDOWS],
)
def test_windows_soft_caps_and_blocks_of_vllm(window, block_size, softcap) -> None:
    options = {"window": window, "softcap": softcap}
    for rows in (MIXED, decoding(*DECODED[0])):
        both(make(rows, 1, 1, 32, torch.float16, block_size=block_size), **options)


@pytest.mark.parametrize("rows", [MIXED_LONG, decoding(*DECODED[1])], ids=str)
def test_other_batches_of_vllm(rows) -> None:
    both(make(rows, 2, 1, 64, torch.float16), window=256)


@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.int8])
def test_a_cache_of_eight_bits_with_one_scale_per_tensor(cache) -> None:
    for rows in (MIXED, decoding(*DECODED[1])):
        case = make(rows, 2, 1, 128, torch.float16, cache=cache)
        for name, scale in (("key_scale", 0.02), ("value_scale", 0.03)):
            case.options[name] = torch.tensor(scale, device=DEVICE).expand(case.options[name].shape)
        both(case, window=256)


def scattered(rows: list[tuple[int, int]], num_blocks: int, head_dim: int) -> Case:
    """vLLM draws block ids at random out of the whole cache, so that rows share some; the others are never written."""
    random, block_size, kv_heads = torch.Generator().manual_seed(0), 16, 2
    case = make(rows, 4, kv_heads, head_dim, torch.float16)
    case.block_table = torch.randint(0, num_blocks, case.block_table.shape, dtype=torch.int32, generator=random)
    case.block_table[0, 0] = num_blocks - 1
    used = case.block_table.unique().long()
    stored: list[Tensor] = []
    for _ in range(2):
        content = torch.randn(len(used), block_size, kv_heads, head_dim, generator=random).half()
        empty = torch.empty(num_blocks, block_size, kv_heads, head_dim, dtype=torch.float16, device=DEVICE)
        stored.append(empty.index_copy_(0, used.to(DEVICE), content.to(DEVICE)))
    case.keys, case.values = stored
    case.block_table = case.block_table.to(DEVICE)
    return case


@pytest.mark.parametrize("num_blocks", of_which([2048], [2048, 32768]))
def test_blocks_all_over_the_cache(num_blocks) -> None:
    head_dim = 64 if num_blocks < 2**15 else 16  # the whole cache is compared in float64, too
    both(scattered(MIXED, num_blocks, head_dim))
    both(scattered(decoding(*DECODED[0]), num_blocks, head_dim), window=256)


def test_a_cache_of_more_than_two_to_the_31st_values() -> None:
    """2100 blocks of 1024 x 8 x 128 int8 values, 2.2 GB of which next to nothing is touched."""
    blocks, block_size, kv_heads, head_dim = 2100, 1024, 8, 128
    assert (blocks - 1) * block_size * kv_heads * head_dim > 2**31
    case = make([(3, 50), (1, 600)], 8, kv_heads, head_dim, torch.float16)
    cache = torch.empty(blocks, block_size, kv_heads, head_dim, dtype=torch.int8, device=DEVICE)
    case.block_table = torch.tensor([[blocks - 1], [blocks - 2]], dtype=torch.int32, device=DEVICE)
    random = torch.Generator().manual_seed(0)
    for block in (blocks - 1, blocks - 2):
        content = torch.randint(-127, 128, (600, kv_heads, head_dim), dtype=torch.int8, generator=random)
        cache[block, :600] = content.to(DEVICE)
    scale = torch.tensor(1 / 64, device=DEVICE).expand(cache.shape[:3])
    case.keys, case.values, case.options = cache, cache, {"key_scale": scale, "value_scale": scale}
    both(case)
    one_each = (case.q[[0, 3]], *case.decode[1:])
    check(paged_decode, reference.paged_decode, one_each, **case.options)
