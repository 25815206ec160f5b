"""Errata of attention kernels (E05.x): counted, measured where torch can say it, or run on our kernels."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from reference_impl import Engine, EngineConfig, SamplingParams
from reference_impl.assembly.parts import Parts
from reference_impl.core.attention import TorchAttention
from reference_impl.features.baselines.contiguous_manager import ContiguousKVManager
from reference_impl.kernels import reference
from reference_impl.observe.trace import StepDone
from reference_impl.theory import attention_traffic, kv_cache, roofline
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import ModelShape, model
from reference_impl.theory.units import GB, GiB, KiB, format_bytes
from tests.theory.test_attention_traffic import Memory, keys_outside, queries_outside

H100, L70, L8 = device("H100"), model("llama-3-70b"), model("llama-3-8b")
ROOT = Path(__file__).parents[2]


def cell(name: str, part: str = "a_attention") -> str:
    """The text of one cell of the chapter, in one line."""
    cells = json.loads((ROOT / f"chapters/05_flash_attention/{part}.ipynb").read_text("utf-8"))["cells"]
    [found] = [c for c in cells if c["id"] == name]
    return " ".join("".join(found["source"]).split())


class Operations(TorchDispatchMode):
    """What torch carried out, and the most bytes that its results took at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.results = Counter[str](), Counter[str]()
        self.alive = self.peak = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            operation is torch.ops.aten.scaled_dot_product_attention.default
        ):  # whole only in inference mode: look inside
            with self:
                return operation.decompose(*args, **(kwargs or {}))
        out, name = operation(*args, **(kwargs or {})), operation.name().removeprefix("aten::").partition(".")[0]
        self.count[name] += 1
        places = {t.data_ptr() for t in args if isinstance(t, Tensor) and t.layout is torch.strided}
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided and tensor.data_ptr() not in places:
                self.results[name] += tensor.numel()
                self.alive += tensor.nbytes
                self.peak = max(self.peak, self.alive)
                weakref.finalize(tensor, self._free, tensor.nbytes)
        return out

    def _free(self, size: int) -> None:
        self.alive -= size


def three_kernels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v


def partial_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(mean, base-2 log-sum-exp) of queries over some keys, as `merge_splits` wants them."""
    scores = q @ k.T * q.shape[1] ** -0.5
    return scores.softmax(1) @ v, scores.logsumexp(1) / np.log(2)


def test_e05_01_a_score_matrix_at_8192_has_64_mi_values_for_each_head() -> None:
    """Claim: 512 MB in fp16, or 268 MB, or 256 MB for one 8192 x 8192 matrix.

    67,108,864 values: 134 MB (128 MiB) in fp16 and 268 MB (256 MiB) in fp32, per head. 512 MiB in fp16 is 16,384.
    """
    one = [kv_cache.score_bytes(1, 8192, 8192, size) for size in (1, 2, 4)]
    assert one[0] == 67_108_864
    assert [format_bytes(size) for size in one[1:]] == ["134 MB", "268 MB"]
    assert [format_bytes(size, binary=True) for size in one[1:]] == ["128 MiB", "256 MiB"]
    assert format_bytes(kv_cache.score_bytes(1, 16_384, 16_384), binary=True) == "512 MiB"
    assert [kv_cache.score_bytes(64, 8192, 8192, size) / GiB for size in (2, 4)] == [8, 16]  # a layer of a 70B


@pytest.mark.parametrize("n", [256, 512, 1024])
def test_the_peak_of_unfused_attention_holds_its_score_matrices_and_grows_with_the_square(n: int) -> None:
    """Measured: what torch had alive at once, unfused and fused, for one head and twice the tokens."""
    peaks: dict[tuple[str, int], int] = {}
    for name, attention in (("unfused", three_kernels), ("fused", F.scaled_dot_product_attention)):
        for tokens in (n, 2 * n):
            q, k, v = torch.randn(3, 1, 1, tokens, 64)
            with Operations() as operations:
                attention(q, k, v)
            peaks[name, tokens] = operations.peak
    assert peaks["unfused", n] >= 2 * kv_cache.score_bytes(1, n, n, 4)
    assert peaks["fused", n] < 3 * 4 * n * 64
    assert peaks["unfused", 2 * n] / peaks["unfused", n] == pytest.approx(4, rel=0.05)
    assert peaks["fused", 2 * n] / peaks["fused", n] == pytest.approx(2, rel=0.05)


def test_e05_02_how_much_traffic_tiling_saves_depends_on_head_dim_and_tile() -> None:
    """Claim: FlashAttention reads 5 to 20 times, or about 10 times, fewer bytes in typical configurations.

    At 8192 tokens, against unfused attention: the order of 2022 with 100 KiB of fp16 values 4.2 times for d = 64 and
    1.1 for d = 128, with 192 KiB 8.1 and 2.0; the order of 2023 with tiles of 128 rows 4 and 2 without the L2 cache.
    The floor, K and V once, is 129 and 65 times less.
    """
    n, d = 8192, np.array([64, 128])
    unfused = attention_traffic.unfused_values(n, d)
    for kib, saved in ((100, [4.2, 1.1]), (192, [8.1, 2.0])):
        tiled = attention_traffic.flash1_values(n, d, kib * KiB / 2)
        assert unfused / tiled == pytest.approx(saved, abs=0.05)
    assert unfused / attention_traffic.flash2_values(n, d, 128) == pytest.approx([4, 2], rel=0.01)
    assert unfused / attention_traffic.fused_floor_values(n, d) == pytest.approx([129, 65], abs=0.5)


def test_e05_03_the_order_of_2022_revisits_the_output_and_the_order_shown_as_such_is_that_of_2023() -> None:
    """Claim: FlashAttention (2022) has the outer loop over queries.

    Both orders, counted: with keys outside O is read once and written once for each tile of keys (and written once as
    zeros). With queries outside it is written once. Both are attention.
    """
    n, d, key_rows = 96, 4, 8
    old, new = Memory(n, d), Memory(n, d)
    keys_outside(old, n, d, 32, key_rows)
    queries_outside(new, n, d, 32, key_rows)
    tiles = n // key_rows
    assert (old.read["O"], old.written["O"]) == (tiles * n * d, (tiles + 1) * n * d)
    assert (new.read["O"], new.written["O"]) == (0, n * d)
    assert (old.read["K"], new.read["K"]) == (n * d, n // 32 * n * d)
    q, k, v = (torch.tensor(new.arrays[name]) for name in "QKV")
    for memory in (old, new):
        torch.testing.assert_close(torch.tensor(memory.arrays["O"]), (q @ k.T).softmax(1) @ v)


def test_e05_04_three_changes_remove_three_bottlenecks() -> None:
    """Claim: fewer operations by fewer synchronizations, or better partitioning across SMs, as one change.

    (1) Dividing once: one division for each output value and not one for each tile of keys. (2) Programs over query
    tiles: 97 % of the SMs instead of 24 % at batch 1, 32 heads and 8192 tokens. (3) Warps that split the queries have
    nothing to exchange; splitting the keys, every warp has a partial output for every query.
    """
    n, d, key_rows = 64, 16, 8
    q, k, v = torch.randn(3, n, d, dtype=torch.float64)
    divisions, outputs = {}, {}
    for name, divided in (("each tile", True), ("once", False)):
        m, total, acc = torch.full((n, 1), -torch.inf), torch.zeros(n, 1), torch.zeros(n, d)
        with Operations() as operations:
            for at in range(0, n, key_rows):
                scores = q @ k[at : at + key_rows].T
                new = torch.maximum(m, scores.amax(1, keepdim=True))
                weights, shrink = (scores - new).exp(), (m - new).exp()
                summed = total * shrink + weights.sum(1, keepdim=True)
                if divided:
                    acc = (acc * total * shrink + weights @ v[at : at + key_rows]) / summed
                else:
                    acc = acc * shrink + weights @ v[at : at + key_rows]
                m, total = new, summed
            outputs[name] = acc if divided else acc / total
        divisions[name] = operations.results["div"]
        torch.testing.assert_close(outputs[name], (q @ k.T).softmax(1) @ v)
    assert divisions == {"each tile": n // key_rows * n * d, "once": n * d}

    before, after = (attention_traffic.wave_share(32 * tiles, H100.chip.num_sms) for tiles in (1, 8192 // 128))
    assert (round(before, 2), round(after, 2)) == (0.24, 0.97)

    warps = 4
    by_keys = [partial_attention(q, *kv) for kv in zip(k.chunk(warps), v.chunk(warps), strict=True)]
    by_queries = [partial_attention(part, k, v)[0] for part in q.chunk(warps)]
    means, lses = (torch.stack(pieces) for pieces in zip(*by_keys, strict=True))
    torch.testing.assert_close(reference.merge_splits(means, lses), torch.cat(by_queries))
    assert means.numel() == warps * n * d, "what passes through shared memory; split by queries nothing does"


def test_e05_05_attention_is_memory_bound_unfused_and_in_decode_and_compute_bound_when_a_prompt_is_fused() -> None:
    """Claim: attention is bound by bandwidth, so half the traffic is half the time.

    Per byte 64 operations unfused (d = 128), 4096 fused over 8192 tokens, 8 in decode with groups of eight; the ridge
    is 295. Fused, the time no longer follows the bytes; in decode there is no score matrix to save.
    """
    n, d = 8192, 128
    flops = attention_traffic.prompt_attention_flops(n, d)
    unfused = flops / (2 * attention_traffic.unfused_values(n, d))
    fused = flops / (2 * attention_traffic.fused_floor_values(n, d))
    decode = roofline.decode_attention_intensity(L70)
    assert flops / (2 * attention_traffic.score_values(n)) == 64
    assert unfused == pytest.approx(63, abs=0.1)  # with Q, K, V and O counted too
    assert (fused, decode) == (4096, 8)
    assert max(unfused, decode) < H100.ridge() < fused
    assert roofline.attainable_flops(fused, H100) == roofline.attainable_flops(2 * fused, H100) == H100.peak()
    assert roofline.attainable_flops(2 * decode, H100) == 2 * roofline.attainable_flops(decode, H100)
    # One query: the score row is n values beside 2 n d of keys and values.
    assert kv_cache.score_bytes(64, 1, n) * 2 < 0.15 * kv_cache.cache_bytes(L70, n) / L70.layers


def test_e05_06_gains_of_a_generation_are_a_range_with_precision_direction_and_device() -> None:
    """Claim: FlashAttention-3 is 1.5 times, or 1.5 to 2 times, faster.

    The chapter's dated table gives the range with its conditions, and the rates fit the devices: 740 TFLOP/s is 75 % of
    an H100's fp16 peak, 1.2 PFLOP/s 61 % of fp8; FlashAttention-4's 1613 TFLOP/s 72 % of a B200's bf16 peak.
    """
    table = cell("production")
    rows = {
        name: table[table.index(f"**{name}**") :].partition("| **")[0]
        for name in ("FlashAttention-3", "FlashAttention-4")
    }
    for word in ("2024", "Hopper", "1.5-2.0x over 2", "FP16 forward", "740 TFLOP/s", "1.2 PFLOP/s", "H100"):
        assert word in rows["FlashAttention-3"]
    for word in ("2026", "Blackwell", "CuTe DSL", "BF16", "1613 TFLOP/s", "B200"):
        assert word in rows["FlashAttention-4"]
    assert table.startswith("## 8. In production As of November 2026")
    b200 = device("B200")
    shares = (740e12 / H100.peak("fp16"), 1200e12 / H100.peak("fp8"), 1613e12 / b200.peak("bf16"))
    assert shares == pytest.approx((0.75, 0.61, 0.72), abs=0.005)


SKIPPED = """
import json, torch
from reference_impl.kernels.flash_attention import flash_attention
from reference_impl.kernels import reference
place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
def run(shift, threshold, poison=None, tempting=False):
    # 64 keys with score 10, then 192 with score -10, one query behind them; the last dimension shifts all scores.
    keys = torch.zeros(16, 16, 1, 32); values = torch.ones(16, 16, 1, 32)
    keys.view(256, 32)[:64, 0], keys.view(256, 32)[64:, 0] = 10, -10
    keys[..., 31] = shift
    values.view(256, 32)[64:] = 3
    if poison is not None: values.view(256, 32)[64:] = poison
    if tempting: keys.view(256, 32)[200, 0] = 10
    q = torch.zeros(1, 1, 32); q[..., 0] = q[..., 31] = 1
    table = torch.arange(16).int()[None]
    arguments = [q, keys, values, table, torch.tensor([0, 1]).int(), torch.tensor([256]).int()]
    arguments = [t.to(place) for t in arguments]
    return flash_attention(*arguments, 1.0, skip_threshold=threshold)[0, 0, 0].item()
nan = float("nan")
print(json.dumps({
    "exact": run(0, 0.0), "skipped": run(0, 1e-3), "values of skipped tiles poisoned": run(0, 1e-3, nan),
    "shifted up": run(100, 1e-3, nan), "shifted down": run(-100, 1e-3, nan), "low threshold": run(0, 1e-12),
    "one key tempting": run(0, 1e-3, None, True),
}))
"""


def test_e05_07_skipping_softmax_needs_the_scores_compares_with_the_running_maximum_and_is_lossy() -> None:
    """Claim: a quick check finds blocks of scores under a threshold and skips them entirely, 1.4 times faster.

    Our kernel: scores are computed first (one good key in a block keeps it), the comparison is with the running maximum
    (shifting all scores changes nothing), values of skipped blocks are not read, and the result differs from exact.
    At best attention takes half of its time; 1.4 times needs 57 % of the tiles.
    """
    interpret = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    ran = subprocess.run(
        [sys.executable, "-P", "-c", SKIPPED], env=os.environ | interpret, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    weight = 192 * np.exp(-20.0)  # of the keys that score 20 less, over that of the others, 64
    assert found["exact"] == pytest.approx((64 + 3 * weight) / (64 + weight), abs=1e-6)
    assert found["low threshold"] == pytest.approx(found["exact"], abs=1e-7)
    assert (
        found["skipped"]
        == 1
        == found["values of skipped tiles poisoned"]
        == found["shifted up"]
        == found["shifted down"]
    )
    assert found["one key tempting"] > 1.02, "a check that had not seen its score would have skipped it"

    q, k, v = torch.randn(64, 32), torch.randn(256, 32), torch.randn(256, 32)
    scores = (q @ k.T * 32**-0.5).double()
    errors = []
    for threshold in (0.0, 0.05, 0.3):
        m, kept = torch.full((64,), -torch.inf).double(), torch.zeros(64, 256, dtype=torch.bool)
        for at in range(0, 256, 4):
            tile = scores[:, at : at + 4].amax(1)
            kept[:, at : at + 4] = (tile - m >= np.log(max(threshold, 1e-300)))[:, None]
            m = torch.maximum(m, tile)
        skipped = scores.masked_fill(~kept, -torch.inf).softmax(1) @ v.double()
        errors.append((float((~kept).double().mean()), float((skipped - scores.softmax(1) @ v.double()).abs().max())))
    assert errors[0] == (0, 0)
    assert errors[0] < errors[1] < errors[2], "more skipped, more error"
    assert attention_traffic.skip_speedup(1.0) == 2
    assert attention_traffic.skip_share(1.4) == pytest.approx(0.57, abs=0.005)
    assert "off by default" in cell("errata-skip")


def test_e05_08_the_chapter_says_where_flashinfer_comes_from() -> None:
    """Claim: FlashInfer is NVIDIA's library. It began at universities and OctoAI; NVIDIA contributes."""
    text = cell("errata-skip-reading")
    for word in (
        "FlashInfer",
        "University of Washington",
        "Carnegie Mellon",
        "OctoAI",
        "community project",
        "MLSys 2025",
    ):
        assert word in text


Run = Callable[..., tuple[list[list[int]], list[StepDone], Counter[str]]]


@pytest.fixture
def run(random_model) -> Run:  # type: ignore[no-untyped-def]
    """(outputs, steps, operations of torch) of three prompts, by an engine with these parts and settings."""

    def run(parts: Parts | None = None, **settings: Any) -> tuple[list[list[int]], list[StepDone], Counter[str]]:
        decoder = random_model("float32")
        engine = Engine(decoder, EngineConfig(prefix_cache="off", **settings), parts)
        greedy = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
        with Operations() as operations:
            requests = [engine.add(list(range(3, 3 + n)), greedy) for n in (7, 20, 33)]
            while engine.has_work():
                engine.step()
        return [r.output_tokens for r in requests], engine.trace.steps(), operations.count

    return run


class Strided(TorchAttention):
    """Values that lie otherwise in memory: torch then has no fused kernel, and says nothing."""

    def forward(self, q, k, v, layer, kv_cache, batch):  # type: ignore[no-untyped-def]
        kv_cache.write(layer, k, v, batch)
        keys, values = (t.flatten(0, 1) for t in kv_cache.layer(layer))
        out, first = torch.empty_like(q), 0
        table = batch.groups[batch.group_of_layer[layer]].block_table
        for row, (count, length) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
            slots = reference.context_slots(table[row], length, batch.block_size)
            strided = torch.stack([values[slots]] * 2, -1)[..., 0]
            out[first : first + count] = reference.attention_one_row(
                q[first : first + count], keys[slots], strided, self.scale
            )
            first += count
        return out


def is_fused(count: Counter[str]) -> bool:
    """A fused kernel ran, and nothing else. Unfused it is softmax between products, or (in inference mode) "math"."""
    attention = [name for name in count if "softmax" in name or name.startswith("_scaled_dot_product")]
    return bool(attention) and not [name for name in attention if "softmax" in name or name.endswith("_math")]


def test_e05_13_every_step_says_which_attention_ran_and_a_fallback_is_noticed(run, random_model) -> None:  # type: ignore[no-untyped-def]
    """Claim: FlashAttention is switched on for long contexts; attention fusion includes dropout.

    The shortest prompt of the engine goes through the fused kernel, each step of the trace names what computed it, and
    no operation draws a random number for dropout. A backend that makes torch fall back gives the same tokens, and the
    same check fails.
    """
    outputs, steps, count = run(num_blocks=40)
    assert {step.attention for step in steps} == {("sdpa",)}
    assert is_fused(count)
    assert not [name for name in count if "dropout" in name or "bernoulli" in name]
    config = random_model("float32").config
    unfused, _, fallen = run(Parts(attention=Strided(config.attention_scale, torch.float32)), num_blocks=40)
    assert unfused == outputs
    assert not is_fused(fallen)


def test_paging_changes_no_byte_that_decode_reads(run) -> None:  # type: ignore[no-untyped-def]
    """E05.14, counted in the engine: the steps read as much of the cache paged, with other blocks, and contiguous."""
    read = {}
    for name, parts, settings in (
        ("blocks of 16", None, {"num_blocks": 40}),
        ("blocks of 1", None, {"num_blocks": 640, "block_size": 1}),
        ("contiguous", Parts(kv_manager=ContiguousKVManager(40, 16)), {"num_blocks": 40}),
    ):
        outputs, steps, _ = run(parts, **settings)
        read[name] = (outputs, [sum(row.start + row.num_tokens for row in step.rows) for step in steps])
    assert read["blocks of 16"] == read["blocks of 1"] == read["contiguous"]
    growth = [b - a for a, b in itertools.pairwise(read["blocks of 16"][1])]
    assert growth == [3, 3, 3, 3], "three requests, one token each"


def test_e05_14_the_bytes_of_a_decoded_token_fall_with_bits_heads_and_batch_not_with_fusing_or_paging() -> None:
    """Claim: FlashAttention and PagedAttention answer the bandwidth that decode needs.

    An 8B at 8192 tokens reads 15.0 GB of weights and 1.07 GB of its own cache per token. Quantization and batching cut
    the first, fewer KV heads or bits the second. Neither paging nor fusing changes either.
    """
    base = roofline.bytes_per_generated_token(L8, 1, 8192)
    assert base.weights / GB == pytest.approx(15.0, abs=0.05)
    assert base.cache_read / GB == pytest.approx(1.07, abs=0.005)
    assert base.cache_write / base.total < 1e-4
    four_bit = kv_cache.read_bytes(L8, kv_cache.bits_per_weight(4, 128))
    assert roofline.bytes_per_generated_token(L8, 1, 8192, weights=four_bit).total < 0.31 * base.total
    batched = roofline.bytes_per_generated_token(L8, 32, 8192)
    assert batched.weights == base.weights / 32
    assert batched.cache_read == base.cache_read
    as_mha = dataclasses.replace(L8, num_kv_heads=32)
    assert roofline.bytes_per_generated_token(as_mha, 1, 8192).cache_read == 4 * base.cache_read
    assert roofline.bytes_per_generated_token(L8, 1, 8192, kv_bytes=1).cache_read == base.cache_read / 2


def rows_of_scores(shape: ModelShape, batch: int, context: int) -> float:
    """What unfused decode moves for its rows of scores and probabilities, as a share of weights and cache."""
    moved = 4 * kv_cache.score_bytes(shape.num_heads, 1, context) * shape.layers  # written and read, twice
    return moved / roofline.bytes_per_generated_token(shape, batch, context).total


def test_rows_of_scores_are_a_small_share_of_decode_that_grows_with_the_batch() -> None:
    """Claim: in decode FlashAttention saves well under one percent. At batch 1 and 8k it does: 0.4 % for an 8B.

    At batch 64, 5 and 6 % (8k and 32k) for an 8B, 7 and 10 % for a 70B; the limits are 6.25 % for groups of four and
    12.5 % for groups of eight, since four rows of two bytes stand beside 4 x head_dim bytes of keys and values.
    """
    assert rows_of_scores(L8, 1, 8192) == pytest.approx(0.004, abs=0.0005)
    for shape, expected in ((L8, (0.050, 0.058)), (L70, (0.068, 0.104))):
        found = [rows_of_scores(shape, 64, context) for context in (8192, 32_768)]
        assert found == pytest.approx(expected, abs=0.004)
        limit = 4 * 2 * shape.num_heads / (4 * shape.num_kv_heads * shape.head_dim)
        assert limit == {4: 0.0625, 8: 0.125}[shape.num_heads // shape.num_kv_heads]
        assert max(found) < limit


def test_worked_problems_of_part_a() -> None:
    """Llama-3-70B in BF16, tensor parallelism over four H100: a prompt of 8,192 tokens, and 32 requests that decode."""
    n, heads, kv_heads = 8192, L70.num_heads // 4, L70.num_kv_heads // 4
    assert (heads, kv_heads, L70.layers, H100.capacity / GB) == (16, 2, 80, 80)
    products = attention_traffic.prompt_attention_flops(n, L70.head_dim) / 2 * heads * L70.layers  # causal: half
    embeddings = 2 * L70.vocab_size * L70.hidden_size
    linear = 2 * n * (kv_cache.weight_bytes(L70) / 2 - embeddings) / 4
    assert (round(products / 1e12), round(1e3 * products / H100.peak())) == (22, 22)
    assert (round(linear / 1e12), round(1e3 * linear / H100.peak())) == (280, 283)
    assert products / (products + linear) == pytest.approx(0.07, abs=0.005)
    sheet = 2 * attention_traffic.score_values(n) * heads * L70.layers
    assert (round(sheet / GB), round(1e3 * sheet / H100.bandwidth)) == (687, 205)
    fused, added = products / H100.peak(), sheet / H100.bandwidth
    assert (fused + added) / fused == pytest.approx(10, abs=0.5)
    assert added / (fused + linear / H100.peak()) == pytest.approx(2 / 3, abs=0.02)

    per_token = kv_cache.bytes_per_token(L70) / 4
    cache, weights = 32 * n * per_token, kv_cache.weight_bytes(L70) / 4
    assert per_token == 81_920
    assert (round(cache / GB, 1), round(weights / GB, 1)) == (21.5, 35.3)
    assert round(1e3 * (cache + weights) / H100.bandwidth) == 17
    for programs, share in ((32 * kv_heads, 0.48), (32 * kv_heads * n // 512, 0.97)):
        assert attention_traffic.wave_share(programs, H100.chip.num_sms) == pytest.approx(share, abs=0.005)
    rows = 32 * 4 * kv_cache.score_bytes(heads, 1, n) * L70.layers
    assert (round(rows / GB, 1), round(100 * rows / (cache + weights), 1)) == (2.7, 4.7)


def test_what_exponentials_cost_depends_on_gpu_and_head_dim() -> None:
    """Claim: on Blackwell the exponentials are the bottleneck. Twice the products' time at head_dim 64, half at 256."""
    for name, expected in (("A100-80GB", 0.25), ("H100", 0.5), ("B200", 1.0)):
        gpu = device(name)
        per_clock = gpu.peak() / gpu.chip.num_sms / gpu.chip.clock
        shares = [attention_traffic.exp_share(d, per_clock) for d in (64, 128, 256)]
        assert shares == pytest.approx([2 * expected, expected, expected / 2], rel=0.01)


def test_the_gain_of_2022_is_quoted_with_its_condition() -> None:
    """Claim: FlashAttention moves 4.4 GB where three kernels move 40.3. GPT-2 medium, 1,024 tokens, both directions."""
    assert (
        "40.3 GB to 4.4 GB) is one configuration: GPT-2 medium, d = 64, 1,024 tokens, forward *and backward*"
        in cell("errata-savings-reading")
    )
    assert "GPT-2 medium, 1,024 tokens, forward and backward" in cell("production")


def test_no_part_says_that_the_l2_cannot_be_steered() -> None:
    """Claim: the L2 cache is managed by the hardware alone. Order, hints and persisting windows steer it."""
    for text in (cell("hierarchy-text"), cell("errata", "c_more")):
        for way in ("order of", "hints", "persist"):
            assert way in text.lower()
