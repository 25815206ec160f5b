"""What the predictions count: launches of a layer, recorded at the real shapes with tensors that have no memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import reference_impl
from reference_impl.bench.gpu_bounds import Work
from reference_impl.theory.model_shapes import model
from tests.bench import gpu_predictions

NOTES = Path(reference_impl.__file__).parent / "bench" / "NOTES.md"

RECORDED = """
import json
import torch
from collections import Counter
from torch.utils._python_dispatch import TorchDispatchMode
from reference_impl.interfaces import Batch, GroupTables
from reference_impl.kernels import gemm_fp8, gemm_w4a16, launch
from reference_impl.kernels.quantize_rows import quantize_rows_fp8
from reference_impl.kernels.architectures import ARCHITECTURES
from reference_impl.features.windows.groups import kv_specs
from reference_impl.core.kv_cache import PagedKVCache
from reference_impl.features.fusion.kernels import triton_kernels
from reference_impl.features.fusion.attention import TritonAttention
from reference_impl.features.fusion.linear import TritonFp8, TritonInt4, TritonLinear
from reference_impl.features.fusion.decoder import FusedDecoder
from reference_impl.models.shapes import config_of_shape

meta, bf16, described = torch.device("meta"), torch.bfloat16, launch.described
count = Counter()
METHODS = {
    "none": lambda: TritonLinear(bf16, meta),
    "fp8": lambda: TritonFp8(bf16, meta, quantize_rows_fp8, gemm_fp8.gemm_fp8),
    "int4": lambda: TritonInt4(bf16, meta, gemm_w4a16.gemm_w4a16),
}
SCALES = {"fp8": lambda linear: empty(linear.out_features, dtype=torch.float32),
          "int4": lambda linear: empty(linear.in_features // 128, linear.out_features, dtype=bf16)}

def seen(kernel, *others):
    count[kernel.__name__.strip("_")] += 1
    return described(kernel, *others)

class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and "empty" not in str(function):
            count[str(function)] += 1
        return function(*args, **(kwargs or {}))

def empty(*size, dtype=torch.int32):
    return torch.empty(size, dtype=dtype, device=meta)

def launches(shape, rows, weights):
    config = config_of_shape(shape)
    model = FusedDecoder(config, bf16, meta, 2048, lambda name: METHODS[weights](), kernels=triton_kernels())
    for linear in model.linears() if weights in SCALES else ():
        linear.params["scales"] = SCALES[weights](linear)
    tokens, lens = empty(rows, dtype=torch.int64), empty(rows)
    batch = Batch(
        tokens, tokens, empty(rows + 1), lens, tokens, ("r",) * rows, (1,) * rows, (1024,) * rows, rows, 16,
        (GroupTables(None, tokens, empty(rows, 64)),), (0,) * config.num_layers,
    )
    specs = kv_specs(config.layer_windows, config.num_kv_heads, config.head_dim, 16, bits_per_value=16)
    cache, attention = PagedKVCache(specs, 64 * rows, bf16, meta), TritonAttention(config.attention_scale)
    x, added = empty(rows, config.hidden_size, dtype=bf16), None
    count.clear()
    with launch.recording(ARCHITECTURES["sm_90"]):
        attention.plan(batch)
        with Operations():
            for layer in model.layers:
                x, added = layer.compute(model.fusion, x, added, *model.rotary.cos_sin, attention, cache, batch)
    return sum(count.values()) / config.num_layers

launch.prepare(meta)
launch.described = seen
print(json.dumps([launches(*case) for case in (
    ("llama-3-8b", 1, "none"), ("llama-3-8b", 1, "fp8"), ("llama-3-8b", 1, "int4"),
    ("qwen3-0.6b", 1, "none"), ("qwen3-0.6b", 64, "none"), ("qwen3-0.6b", 65, "none"), ("qwen3-0.6b", 256, "none"),
)]))
"""


def test_launches_of_a_layer_are_those_of_the_predictions() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", RECORDED], capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr
    few, many = gpu_predictions.PER_LAYER, gpu_predictions.PER_LAYER_MANY
    assert gpu_predictions.FEW_TOKENS == 64
    assert json.loads(done.stdout) == [few["none"], few["fp8"], few["int4"], few["none"], few["none"], many, many]


def test_the_notes_have_the_predictions_of_today() -> None:
    assert "\n".join(gpu_predictions.lines()) in NOTES.read_text("utf-8")


def test_predictions_count_bytes_as_the_bench_does() -> None:
    """The bench counts what an engine holds: tests/bench/test_gpu_bounds.py proves those against the same shapes."""
    llama = model("llama-3-8b")
    assert gpu_predictions.work(llama) == Work(2 * llama.linear_params, 131_072, 6_979_321_856, 525_336_576, 524_288)
    eight = gpu_predictions.work(model("qwen3-0.6b"), kv_bytes=1, kv_scale=4)
    assert eight.kv == 114_688 / 2 + 2 * 28 * 8 * 4
    assert replace(eight, kv=114_688.0) == gpu_predictions.work(model("qwen3-0.6b"))


def test_a_gap_between_any_two_kernels_is_what_a_step_loses() -> None:
    num_bytes, least, lost = gpu_predictions.stream("llama-3-8b", "none")
    assert num_bytes == 2 * model("llama-3-8b").linear_params + 1024 * 131_072
    assert least == pytest.approx(num_bytes / 4.3e12)
    assert lost == pytest.approx((32 * 6 + 10) * 1.3e-6)
