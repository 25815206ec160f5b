"""A cache of KIVI's form by itself: random ragged steps, in which wrong tokens are taken back, against loops over what
was written."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from reference_impl.annexes.kv_formats.by_channel import ByChannelKVCache
from reference_impl.annexes.kv_formats.open_attention import OpenBlockAttention
from reference_impl.annexes.kv_formats.spec import ByChannelSpec, kept_window, open_bytes_per_request
from reference_impl.assembly.kv_cache import kv_cache, widths
from reference_impl.interfaces import Batch, GroupTables, KVSpec, Opened, SamplingParams, Step

Array = NDArray[np.float64]
CPU = torch.device("cpu")
LAYERS, SEATS = 2, 4


def half(x: Array) -> Array:
    """As torch rounds to float16: by way of float32."""
    return x.astype(np.float32).astype(np.float16).astype(np.float64)


def sixteenths(x: Array, axis: int) -> Array:
    """In 16 equal steps from the least number along the axis to the largest, both as float16 has them."""
    least = half(x.min(axis, keepdims=True))
    step = np.maximum(half((x.max(axis, keepdims=True) - least) / 15), 2.0**-24)
    return np.asarray(np.clip(np.round((x - least) / step), 0, 15) * step + least)


class Text:
    """One request: of each layer what it asks and writes at each position, as far as `computed`."""

    def __init__(self, slot: int, length: int, shape: tuple[int, int, int], blocks: list[int], seed: int):
        self.slot, self.length, self.blocks, self.computed = slot, length, blocks, 0
        self.numbers, (heads, kv_heads, dim) = np.random.default_rng(seed), shape
        self.q, self.k, self.v = (
            self.numbers.normal(size=(LAYERS, length, n, dim)) for n in (heads, kv_heads, kv_heads)
        )

    def take_back(self, num: int) -> None:
        """The last tokens were wrong ones: others come in their place."""
        for x in (self.q, self.k, self.v):
            wrong = x[:, self.computed - num : self.computed]
            wrong[...] = self.numbers.normal(size=wrong.shape)
        self.computed -= num

    def seen(self, layer: int, position: int, size: int, window: int | None, scale: float) -> Array:
        """What the query there reads, key by key."""
        own, found = position // size * size, np.zeros(self.q.shape[2:])
        values = sixteenths(self.v[layer], -1)
        keys = np.concatenate(
            [sixteenths(self.k[layer, i : i + size], 0) for i in range(0, own, size)] or [self.k[layer, :0]]
        )
        first = 0 if window is None else max(0, position - window + 1)
        group = len(found) // self.k.shape[2]
        for head in range(len(found)):
            places = range(first, position + 1)
            key = [(keys if j < own else self.k[layer])[j, head // group] for j in places]
            value = [(values if j < own else self.v[layer])[j, head // group] for j in places]
            scores = np.array([self.q[layer, position, head] @ k for k in key]) * scale
            weight = np.exp(scores - scores.max())
            found[head] = weight @ np.array(value) / weight.sum()
        return found


def batch_of(rows: list[tuple[Text, int]], size: int, window: int | None) -> Batch:
    lens = [n for _, n in rows]
    ends = [text.computed + n for text, n in rows]
    positions = torch.cat([torch.arange(e - n, e) for e, n in zip(ends, lens, strict=True)])
    table = torch.zeros(len(rows), max(len(text.blocks) for text, _ in rows), dtype=torch.int32)
    slots = []
    for row, (text, n) in enumerate(rows):
        table[row, : len(text.blocks)] = torch.tensor(text.blocks)
        slots += [text.blocks[p // size] * size + p % size for p in range(ends[row] - n, ends[row])]
    starts = torch.tensor([0, *np.cumsum(lens).tolist()], dtype=torch.int32)
    return Batch(
        input_ids=positions, positions=positions, query_start_loc=starts, seq_lens=torch.tensor(ends).int(),
        logits_indices=positions, request_ids=tuple(f"r{text.slot}" for text, _ in rows), query_lens=tuple(lens),
        context_lens=tuple(ends), num_decode_rows=lens.count(1), block_size=size, group_of_layer=(0,) * LAYERS,
        groups=(GroupTables(window, torch.tensor(slots), table),),
    )  # fmt: skip


def opened(slot: int) -> Opened:
    return Opened(slot, f"r{slot}", [], 0, 0, SamplingParams(), 0, 0, False, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(6))
def test_each_query_reads_its_own_block_as_it_is_and_earlier_ones_rounded(seed: int) -> None:
    draw = random.Random(seed)
    size, guesses, length = draw.choice([1, 2, 3, 4, 5]), draw.choice([0, 1, 2, 5]), 17
    kv_heads, dim, window = draw.choice([1, 2]), draw.choice([2, 6]), draw.choice([None, None, 7])
    shape = (kv_heads * draw.choice([1, 2]), kv_heads, dim)
    each = -(-length // size)
    spec = ByChannelSpec(LAYERS, kv_heads, dim, size, **widths("kivi", torch.float64, size, guesses))
    cache: Any = kv_cache([spec], SEATS * each + 1, torch.float64, CPU, 0, "kivi", SEATS)
    for tensor in (cache.key_scale, cache.value_scale, cache.open):
        tensor.fill_(torch.nan)  # block 0 stays so
    blocks = list(range(1, SEATS * each + 1))
    draw.shuffle(blocks)
    texts = [Text(i, length, shape, blocks[i * each :][:each], 10 * seed + i) for i in range(SEATS)]
    order = draw.sample(range(SEATS), SEATS)
    cache.follow(Step(0, (), (), (), (), (), (), ()), [opened(slot) for slot in order])  # type: ignore[arg-type]
    attention = OpenBlockAttention(0.4, torch.float64)
    while any(text.computed < length for text in texts):
        rows = []
        for text in draw.sample(texts, draw.randint(1, SEATS)):
            if num := min(length - text.computed, draw.choice([1, 1, 1, 2, guesses + 1, 9])):
                rows.append((text, num))
        if not rows:
            continue
        rows.sort(key=lambda row: (row[1], -row[0].computed))
        batch = batch_of(rows, size, window)
        attention.plan(batch)
        for layer in range(LAYERS):
            q, k, v = (
                torch.cat([x[layer, t.computed : t.computed + n] for t, n, x in new])
                for new in ([(t, n, torch.from_numpy(getattr(t, what))) for t, n in rows] for what in "qkv")
            )
            out = attention.forward(q, k, v, layer, cache, batch).numpy()
            wanted = [t.seen(layer, t.computed + i, size, window, 0.4) for t, n in rows for i in range(n)]
            assert np.abs(out - np.array(wanted)).max() < 1e-12
        for text, num in rows:
            text.computed += num
            if num > 1 and num <= guesses + 1:
                text.take_back(draw.randint(0, num - 1))
        check_rounded(cache, texts, size)


def check_rounded(cache: ByChannelKVCache, texts: list[Text], size: int) -> None:
    """Of all full blocks the stored numbers are those of the formula."""
    for text in texts:
        for number in range(text.computed // size):
            slots = torch.arange(size) + text.blocks[number] * size
            for layer in range(LAYERS):
                key, value = cache.read_rounded(layer, slots, torch.float64)
                part = slice(number * size, number * size + size)
                assert np.abs(key.numpy() - sixteenths(text.k[layer, part], 0)).max() < 1e-12
                assert np.abs(value.numpy() - sixteenths(text.v[layer, part], -1)).max() < 1e-12


@pytest.mark.parametrize(
    ("size", "dim", "drafts", "open_blocks"), [(16, 8, 0, 1), (5, 6, 4, 2), (1, 2, 3, 4), (3, 4, 6, 3)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_spec_counts_the_bytes_that_are_held(
    size: int, dim: int, drafts: int, open_blocks: int, dtype: torch.dtype
) -> None:
    specs = [
        ByChannelSpec(3, 2, dim, size, layers=layers, **widths("kivi", dtype, size, drafts))
        for layers in ((0, 2, 4), (1, 3, 5))
    ]
    cache: Any = kv_cache(specs, 7, dtype, CPU, 2, "kivi", 9)
    spec = specs[0]
    assert spec.open_blocks == open_blocks
    assert sum(blocks.nbytes for blocks in cache.blocks) == 7 * spec.bytes_per_block
    assert cache.data.nbytes + cache.key_scale.nbytes + cache.value_scale.nbytes == 7 * spec.bytes_per_block
    assert sum(host.nbytes for host in cache.host) == 2 * spec.bytes_per_block
    assert cache.open.nbytes == 9 * sum(spec.open_bytes_per_request for spec in specs)
    # By hand: codes of 4 bits, 2 numbers of 16 bits for each channel of a block and for each token.
    bits = 3 * 2 * (2 * size * dim * 4 + dim * 32 + size * 32)
    assert spec.bytes_per_block == bits // 8
    assert spec.open_bytes_per_request == 3 * 2 * 2 * open_blocks * size * dim * dtype.itemsize
    if bits % size:
        with pytest.raises(ValueError, match="no whole number for each, ask for bytes_per_block"):
            _ = spec.bits_per_token
    else:
        assert spec.bits_per_token == bits // size


def test_a_spec_and_a_cache_say_what_they_cannot_be_of() -> None:
    right: dict[str, Any] = widths("kivi", torch.float32, 4)
    for name in ("open_blocks", "open_bits_per_value", "bits_per_scale"):
        with pytest.raises(ValueError, match=f"{name}: expected at least 1 for keys by channel, got 0"):
            ByChannelSpec(1, 2, 8, 4, **(right | {name: 0}))
    with pytest.raises(ValueError, match="kind: expected 'kv' for keys by channel, got 'latent'"):
        ByChannelSpec(1, 1, 8, 4, kind="latent", **right)
    with pytest.raises(ValueError, match="kivi: expected an even head_dim, two numbers in a byte, got 7"):
        kv_cache([ByChannelSpec(1, 2, 7, 4, **right)], 2, torch.float32, CPU, kv_dtype="kivi")
    with pytest.raises(ValueError, match="with open_bits_per_value=16, got open_bits_per_value=32"):
        kv_cache([ByChannelSpec(1, 2, 8, 4, **right)], 2, torch.bfloat16, CPU, kv_dtype="kivi")
    with pytest.raises(ValueError, match="ByChannelSpec with open_bits_per_value=32, got open_bits_per_value=None"):
        kv_cache([KVSpec(1, 2, 8, 4, **widths("int4", torch.float32))], 2, torch.float32, CPU, kv_dtype="kivi")
    windowed = ByChannelSpec(1, 2, 8, 4, window=6, **right)
    assert kept_window(windowed) == 6 + 3
    assert windowed.bytes_per_request(18) == (5 - 2) * windowed.bytes_per_block, "positions 9 to 17"
    assert kept_window(KVSpec(1, 2, 8, 4, window=6, bits_per_value=16)) == 6
    assert kept_window(ByChannelSpec(1, 2, 8, 4, **right)) is None
    assert open_bytes_per_request(KVSpec(1, 2, 8, 4, bits_per_value=16)) == 0
