"""Keys and values in 8 or 4 bits: the torch backend and our kernels against float64, within what rounding allows.

The bound, for e4m3. A head's largest magnitude m becomes the code 448, so scale s = m / 448, and x / s is rounded to
the nearest code: by at most a 16th of it (four significant bits), or half of 2^-9 where codes are finest. So
|stored x - x| is at most e(x) = max(|x| / 16, s / 1024), and a score (scale x q . k) errs by at most
d = scale x sum |q_i| e(k_i). Then each softmax weight changes by a factor within exp(-2 D) ... exp(2 D), D the largest
d in the row, and the output by at most

    (exp(2 D) - 1) x sum p |v|  +  exp(2 D) x sum p e(v)

A soft cap does not enlarge differences (its slope is at most 1). In e5m2 the largest code is 57344, and there
are three significant bits: e(x) = max(|x| / 8, s / 2^17). In int8 the largest code is 127 and all steps are equally
wide: e(x) = s / 2, whatever x. In 4 bits s = (largest - least number) / 15, e(x) = s / 2 and what float16 loses of
s and of the least number, 2^-11 of 15 s and of it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is defined

from reference_impl.assembly.batch import build_batch
from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.features.fusion.attention import TritonAttention
from reference_impl.features.kv_formats.attention import ScaledTorchAttention
from reference_impl.features.kv_formats.eight_bits import EightBitKVCache
from reference_impl.features.kv_formats.four_bits import FourBitKVCache
from reference_impl.interfaces import NO_BLOCK, Batch, KVSpec, Request, Row, SamplingParams, StepPlan
from reference_impl.kernels import reference
from reference_impl.kernels.rotate_and_write import rotate_and_write

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP8, E5M2, FOUR = torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8
HEADS, KV_HEADS, HEAD_DIM, SCALE = 4, 2, 16, 0.25
ROWS = [[(1, 1)], [(1, 40)], [(1, 1), (1, 40), (1, 17)], [(5, 18), (1, 33), (9, 9), (1, 2), (1, 16)], [(12, 46)]]


def rounding(x: Tensor, codes: torch.dtype = FP8) -> Tensor:
    """By how much a stored number may miss x [..., head_dim]; float32 of the scale errs by far less than 1 % of it."""
    if codes is FOUR:
        least, most = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        step = (most - least) / 15
        return 1.001 * (step / 2 + (15 * step + least.abs()) / 2**11 + 2.0**-24).expand(x.shape)
    if codes is torch.int8:
        return 1.001 * (x.abs().amax(-1, keepdim=True) / 127 / 2).expand(x.shape)
    largest, share, finest = (57344, 8, 2**17) if codes is E5M2 else (448, 16, 2**10)
    scale = x.abs().amax(-1, keepdim=True) / largest
    return 1.001 * torch.maximum(x.abs() / share, scale / finest)


def exact(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, cap: float | None, codes: torch.dtype = FP8
) -> tuple[Tensor, Tensor]:
    """Attention by the definition, and the bound of its error."""
    out, bound, past = torch.empty_like(q), torch.empty_like(q), len(k) - len(q)
    for i in range(len(q)):
        seen = slice(0 if window is None else max(0, past + i - window + 1), past + i + 1)
        for h in range(HEADS):
            key, value = k[seen, h * KV_HEADS // HEADS], v[seen, h * KV_HEADS // HEADS]
            scores = key @ q[i, h] * SCALE
            if cap is not None:
                scores = cap * torch.tanh(scores / cap)
            p = scores.softmax(0)
            out[i, h] = p @ value
            factor = torch.exp(2 * (rounding(key, codes) @ q[i, h].abs() * SCALE).max())
            bound[i, h] = (factor - 1) * (p @ value.abs()) + factor * (p @ rounding(value, codes))
    return out, bound


def made(num_blocks: int, codes: torch.dtype, block_size: int = 4, window: int | None = None) -> tuple[KVSpec, Any]:
    kind, widths = (FourBitKVCache, (4, 16, 16)) if codes is FOUR else (EightBitKVCache, (8, 32, 0))
    value, scale, zero = widths
    spec = KVSpec(
        1, KV_HEADS, HEAD_DIM, block_size, bits_per_value=value, bits_per_scale=scale, bits_per_zero_point=zero,
        layers=(0,), window=window,
    )  # fmt: skip
    return spec, kind([spec], num_blocks, codes, DEVICE)


def pages(
    rows: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    window: int | None,
    block_size: int = 4,
    seed: int = 0,
    codes: torch.dtype = FP8,
) -> tuple[Any, Batch, Tensor, list[Tensor]]:
    """A cache of shuffled blocks, full of NaN where no row may look; the rows' earlier tokens are in it, written by the
    cache itself. Gives with it the batch, the queries, and each row's keys and values [2, context, heads, head_dim]."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    needed = [-(-context // block_size) for _, context in rows]
    ids = chance.sample(range(sum(needed) + 5), sum(needed))
    spec, cache = made(sum(needed) + 5, codes, block_size, window)
    cache.data.view(torch.uint8).fill_(0x7F)  # NaN, or the largest code
    cache.scale.fill_(torch.nan)
    requests, plan, contexts = {}, [], []
    for number, ((query_len, context), blocks) in enumerate(zip(rows, needed, strict=True)):
        name, start = str(number), context - query_len
        table, ids = ids[:blocks], ids[blocks:]
        first = 0 if window is None else max(0, start - window + 1) // block_size
        given_up = [NO_BLOCK] * first + table[first:]
        size = 10 ** torch.empty(2, context, KV_HEADS, 1).uniform_(-3, 1, generator=generator)
        kv = (torch.randn(2, context, KV_HEADS, HEAD_DIM, generator=generator) * size).to(dtype)
        kv[0] /= max(1.0, float(size[0].max()))  # scores stay small enough for the bound to say something
        contexts.append(kv.to(DEVICE))
        request = Request(name, [0] * context, context, SamplingParams(), 0, 0.0, block_tables=[given_up])
        requests[name] = request
        if start > (first_slot := first * block_size):
            earlier = build_batch(
                StepPlan(0, (Row(name, first_slot, start - first_slot, False),)), {name: request}, [spec], DEVICE
            )
            cache.write(0, *contexts[-1][:, first_slot:start], earlier)
        plan.append(Row(name, start, query_len, True))
    batch = build_batch(StepPlan(1, tuple(plan)), requests, [spec], DEVICE)
    q = torch.randn(batch.num_tokens, HEADS, HEAD_DIM, generator=generator).to(dtype).to(DEVICE)
    return cache, batch, q, contexts


def check_rows(backend: str, rows: Sequence[tuple[int, int]], dtype: torch.dtype, window: int | None,
               cap: float | None, seed: int = 0, codes: torch.dtype = FP8) -> None:  # fmt: skip
    cache, batch, q, contexts = pages(rows, dtype, window, seed=seed, codes=codes)
    attention = ScaledTorchAttention(SCALE, dtype, cap) if backend == "torch" else TritonAttention(SCALE, cap)
    attention.plan(batch)
    new = [contexts[int(r)][:, -n:] for r, n in zip(batch.request_ids, batch.query_lens, strict=True)]
    found = attention.forward(q, *torch.cat(new, dim=1), 0, cache, batch)
    assert found.dtype is dtype
    eps = torch.finfo(dtype).eps
    shares = zip(batch.request_ids, q.split(batch.query_lens), found.split(batch.query_lens), strict=True)
    for name, query, out in shares:
        k, v = contexts[int(name)].double()
        wanted, bound = exact(query.double(), k, v, window, cap, codes)
        # Beside it, the arithmetic in the model's own dtype: probabilities and products are rounded to it.
        bound = bound + 16 * eps * v.abs().max()
        error = (out.double() - wanted).abs()
        assert error.isfinite().all()
        assert (error <= bound).all(), f"{float((error / bound).max()):.2f} of the bound"


@pytest.mark.parametrize("window", [None, 7, 16])
@pytest.mark.parametrize("cap", [None, 0.8])
@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("codes", [FP8, E5M2, torch.int8, FOUR], ids=str)
def test_torch_errs_by_no_more_than_the_rounding_of_the_cache(codes, rows, cap, window) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        check_rows("torch", rows, dtype, window, cap, codes=codes)


@pytest.mark.parametrize(("window", "cap"), [(None, None), (7, None), (None, 0.8)])
@pytest.mark.parametrize("codes", [FP8, E5M2, torch.int8, FOUR], ids=str)
def test_our_kernels_err_by_no_more_than_the_rounding_of_the_cache(codes, window, cap) -> None:
    for dtype in (torch.float32, torch.float16):
        check_rows("triton", ROWS[3], dtype, window, cap, codes=codes)
        check_rows("triton", ROWS[2], dtype, window, cap, codes=codes)


@pytest.mark.parametrize("codes", [FP8, E5M2, torch.int8, FOUR], ids=str)
def test_the_bound_says_something(codes) -> None:
    """Were scales left out, or keys' and values' mistaken for each other, it would not hold."""
    _, _, q, contexts = pages(ROWS[3], torch.float64, None)
    k, v = contexts[0].double()
    wanted, bound = exact(q[: ROWS[3][0][0]].double(), k, v, None, None, codes)
    assert (bound < 0.5 * v.abs().amax()).all()
    wrong, _ = exact(q[: ROWS[3][0][0]].double(), k, v * {E5M2: 3, FOUR: 4}.get(codes, 1.5), None, None)
    assert ((wrong - wanted).abs() > bound).any()


@pytest.mark.parametrize("codes", [FP8, E5M2, torch.int8, FOUR], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_is_read_back_is_within_half_a_code_of_what_was_written(dtype, codes) -> None:
    cache, batch, _, contexts = pages([(9, 30)], dtype, None, codes=codes)
    cache.write(0, *contexts[0][:, -9:], batch)
    slots = reference.context_slots(batch.block_table[0], 30, 4)
    for which, (pages_of, scale) in enumerate(zip(cache.layer(0), cache.scales(0), strict=True)):
        out = torch.empty(30, KV_HEADS, HEAD_DIM, dtype=torch.float64, device=DEVICE)
        found, x = reference.stored(pages_of, slots, scale, out), contexts[0][which].double()
        assert ((found - x).abs() <= rounding(x, codes)).all()
        if codes is FOUR:
            continue
        largest = x.abs().argmax(-1, keepdim=True)
        assert torch.allclose(found.gather(-1, largest), x.gather(-1, largest), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("kind", "largest", "smallest", "bits"), [(FP8, 448, 2.0**-6, 3), (E5M2, 57344, 2.0**-14, 2)])
def test_the_kernel_and_torch_choose_the_same_codes_and_scales(kind, largest, smallest, bits) -> None:
    """Values are not touched before they are stored: bit for bit. Keys are rotated, in another order of operations: the
    same but where float64 says that rounding is close."""
    tokens, blocks = 12, 5
    generator = torch.Generator().manual_seed(1)
    for dtype in (torch.float32, torch.float16):
        k, v = torch.randn(2, tokens, KV_HEADS, HEAD_DIM, generator=generator)
        # A head's largest value, and one in the middle between two codes, of which x / scale and x * (1 / scale) find
        # different ones: 39 of 52 is 336 of 448.
        tiny = (largest, 1.5 * smallest / 2**bits)  # between the two smallest codes above 0
        for token, pair in enumerate([(52, 39), (76, 57), (124, 93), (196, 175), (204, 153), (276, 207), tiny]):
            v[token] = 0
            v[token, :, :2] = torch.tensor(pair)
        q, k, v = (x.to(dtype).to(DEVICE) for x in (torch.randn(tokens, HEADS, HEAD_DIM, generator=generator), k, v))
        angle = torch.rand(tokens, 1, HEAD_DIM // 2, generator=generator) * 6
        cos, sin = torch.cat((angle.cos(),) * 2, -1).to(DEVICE), torch.cat((-angle.sin(), angle.sin()), -1).to(DEVICE)
        slots = torch.randperm(blocks * 4, generator=generator)[:tokens].to(DEVICE)
        positions = torch.arange(tokens, device=DEVICE)
        written = []
        for function in (rotate_and_write, reference.rotate_and_write):
            _, cache = made(blocks, kind)
            key_scale, value_scale = cache.scales(0)
            function(q, k, v, positions, cos, sin, *cache.layer(0), slots, key_scale=key_scale, value_scale=value_scale)
            written.append(cache)
        ours, theirs = written
        assert torch.equal(ours.data[:, 1].view(torch.uint8), theirs.data[:, 1].view(torch.uint8))
        assert torch.equal(ours.scale[:, 1], theirs.scale[:, 1])
        if dtype is torch.float32:  # in half precision torch rounds the rotated key before it is stored
            differ = ours.data[0, 0].flatten(0, 1)[slots].float() != theirs.data[0, 0].flatten(0, 1)[slots].float()
            rotated = reference.rotate(k.double(), cos.double(), sin.double())
            scale = rotated.abs().amax(-1, keepdim=True) / largest
            codes = (rotated / scale).abs()
            step = torch.exp2(codes.clamp(min=smallest).log2().floor() - bits)
            from_tie = ((codes / step) % 1 - 0.5).abs()  # in steps
            assert (from_tie[differ] < 1e-5).all()
            assert differ.float().mean() < 0.01
            assert torch.allclose(ours.scale[:, 0], theirs.scale[:, 0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("codes", [FP8, E5M2, torch.int8, FOUR], ids=str)
def test_the_cache_itself_writes_what_the_kernel_writes(codes) -> None:
    """Who attends with torch and who attends with Triton has the same cache."""
    cache, batch, _, contexts = pages([(7, 7), (1, 1)], torch.float32, None, codes=codes)
    other, _, q, _ = pages([(7, 7), (1, 1)], torch.float32, None, codes=codes)
    kv = torch.cat([contexts[int(r)] for r in batch.request_ids], 1)
    cache.write(0, *kv, batch)
    one, zero = torch.ones(8, 1, HEAD_DIM, device=DEVICE), torch.zeros(8, 1, HEAD_DIM, device=DEVICE)
    key_scale, value_scale = other.scales(0)
    rotate_and_write(
        q, *kv, torch.arange(8, device=DEVICE), one, zero, *other.layer(0), batch.slot_mapping,
        key_scale=key_scale, value_scale=value_scale,
    )  # fmt: skip
    assert torch.equal(cache.data.view(torch.uint8), other.data.view(torch.uint8))
    assert torch.equal(cache.scale.nan_to_num(), other.scale.nan_to_num())


@pytest.mark.parametrize("kv_dtype", ["fp8", "fp8_e5m2", "int8", "int4"])
def test_the_engine_writes_and_reads_with_our_kernels_what_it_does_with_torch(kv_dtype, random_model) -> None:
    """The decoder's one kernel writes the codes, prompts and decoding read them; the same texts, the same cache."""
    caches, texts = [], []
    for backend in ("torch", "triton"):
        model = random_model("float32", device=DEVICE.type, kernels=backend)
        config = EngineConfig(
            kv_dtype=kv_dtype, block_size=4, num_blocks=12, attention=backend, overlap="off", prefix_cache="off"
        )
        engine = Engine(model, config)
        requests = [
            engine.add(
                [(7 * i + n) % 61 for i in range(n)], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
            )
            for n in (5, 9)
        ]
        while engine.has_work():
            engine.step()
        texts.append([request.output_tokens for request in requests])
        caches.append(engine.kv_cache)
    assert texts[0] == texts[1]
    torchs, ours = caches
    rtol = 1e-4 if kv_dtype != "int4" else 2.0**-10  # float16's next number
    assert torch.allclose(ours.scale, torchs.scale, rtol=rtol, atol=0)
    assert (ours.scale > 0).any(-1).sum() > 2 * 2 * 4 * 2, "blocks with tokens"
    mine, its = (numbers(cache.data) for cache in (ours, torchs))
    step = {"fp8": its.abs() / 8 + 2.0**-9, "fp8_e5m2": its.abs() / 4 + 2.0**-16}.get(kv_dtype, 1)
    near = (mine - its).abs() <= step
    assert near.all(), "at most the neighbouring code"


def numbers(codes: Tensor) -> Tensor:
    return (torch.cat((codes % 16, codes // 16), -1) if codes.dtype is FOUR else codes).float()
