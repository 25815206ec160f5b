"""What `inferlab eval-kv` measures, against loops in NumPy and the engine's own caches, on the course model too."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from typer.testing import CliRunner

from reference_impl.assembly.config import EngineConfig, course_model
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.llm import LLM
from reference_impl.bench.kv_quality import (
    Band,
    RoundingAttention,
    bands,
    bits_per_value,
    by_distance,
    logprobs_with,
    needle,
)
from reference_impl.bench.quality import windows_of
from reference_impl.cli import app
from reference_impl.interfaces import KVSpec
from tests.engine.test_kv_fp8 import log_likelihoods

Array = NDArray[np.float64]
TEXT = (
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n\n\n"
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
    "        self.items.append(item)\n\n    def pop(self):\n        return self.items.pop()\n\n"
)


def sixteenths(x: Array) -> Array:
    """The last axis in 16 equal steps from its least number to its largest, both as float16 has them."""
    least = x.min(-1, keepdims=True).astype(np.float16).astype(np.float64)
    step = ((x.max(-1, keepdims=True) - least) / 15).astype(np.float16).astype(np.float64)
    return np.asarray(np.clip(np.round((x - least) / step), 0, 15) * step + least)


@pytest.mark.parametrize(
    ("name", "band"), [("int4", Band(0)), ("int4", Band(2, 6)), ("kivi", Band(0)), ("kivi", Band(5))]
)
def test_only_what_is_in_the_band_is_read_rounded(name: str, band: Band) -> None:
    """Query by query, key by key. Of kivi keys are rounded along a block's tokens, and the query's own block is not."""
    tokens, heads, kv_heads, head_dim, block_size = 19, 4, 2, 6, 4
    q, k, v = (np.random.default_rng(3).normal(size=(tokens, n, head_dim)) for n in (heads, kv_heads, kv_heads))
    key, value = sixteenths(k), sixteenths(v)
    if name == "kivi":
        key = k.copy()
        for first in range(0, tokens - block_size + 1, block_size):
            of_block = k[first : first + block_size]
            key[first : first + block_size] = sixteenths(of_block.transpose(1, 2, 0)).transpose(2, 0, 1)
    wanted = np.zeros(q.shape)
    for i in range(tokens):
        for h in range(heads):
            scores, seen = np.zeros(i + 1), np.zeros((i + 1, head_dim))
            for j in range(i + 1):
                inside = band.first <= i - j and (band.end is None or i - j < band.end)
                inside &= name == "int4" or j // block_size < i // block_size
                scores[j] = q[i, h] @ (key if inside else k)[j, h // 2] / 3
                seen[j] = (value if inside else v)[j, h // 2]
            weight = np.exp(scores - scores.max())
            wanted[i, h] = weight / weight.sum() @ seen
    group = type("Group", (), {"window": None})()
    batch: Any = type("B", (), {"groups": (group,), "group_of_layer": (0,)})()
    attention = RoundingAttention(name, band, block_size, 1 / 3)
    found = attention.forward(*(torch.from_numpy(t) for t in (q, k, v)), 0, None, batch)
    assert np.abs(found.numpy() - wanted).max() < 1e-12


@pytest.mark.parametrize("name", ["int4", "int8", "fp8"])
def test_with_all_distances_it_is_the_engines_own_cache(name: str, random_model: Callable[..., Any]) -> None:
    """Log-probabilities of the engine, which writes codes into blocks and reads them back."""
    model, text = random_model("float64"), [(7 * i + 3) % 61 for i in range(23)]
    said = logprobs_with(model, text, name, Band(0))[:-1].gather(1, torch.tensor(text[1:])[:, None])[:, 0]
    served = log_likelihoods(model, text, name)
    assert (said - served).abs().max() < 1e-6
    assert (said - log_likelihoods(model, text, "auto")).abs().max() > 1e-5, "nothing was rounded"


def test_fewer_bits_cost_more_and_keys_by_channel_less(random_model: Callable[..., Any]) -> None:
    """On the course model, of the same text; and what is far away costs less than what is near."""
    llm = LLM(course_model("target"), dtype="float32", num_blocks=8)
    windows = windows_of(llm.encode(TEXT), 40, 2)
    found = by_distance(llm.engine.model, windows, ["fp8", "int8", "int4", "kivi"], (0, 16))
    kl = {name: {band: row["kl"].value for band, row in rows.items()} for name, rows in found.items()}
    assert list(kl["int4"]) == ["0-15", "16+", "all"]
    for band in ("16+", "all"):
        assert kl["int8"][band] < kl["fp8"][band] < kl["int4"][band]
        assert kl["kivi"][band] < kl["int4"][band]
        assert kl["int8"][band] < kl["kivi"][band]
    for name, row in kl.items():
        assert row["16+"] < row["all"], name
    assert found["int8"]["all"]["agreement"].value >= found["int4"]["all"]["agreement"].value
    prompt, answer = needle(llm, llm.encode(TEXT), 30, random.Random(1))
    text = llm.tokenizer.decode(prompt)
    assert text.count(llm.tokenizer.decode(answer)) == 1
    assert text.index(llm.tokenizer.decode(answer)) < text.index("What is the code for")
    assert 30 <= len(prompt) <= 90


def test_bits_of_a_value_are_those_of_the_cache_that_is_allocated(random_model: Callable[..., Any]) -> None:
    for name, wide in (("int4", 4 + 32 / 8), ("int8", 8 + 32 / 8), ("fp8", 8 + 32 / 8)):
        engine = Engine(random_model("float32"), EngineConfig(kv_dtype=name, num_blocks=6, block_size=4))
        spec: KVSpec = engine.kv_spec
        values = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 6 * 4
        held = engine.kv_cache.data.nbytes + engine.kv_cache.scale.nbytes
        assert bits_per_value(name, spec.head_dim) == wide == 8 * held / values
    assert bits_per_value("kivi", 64, 16) == ((4 + 32 / 16) + (4 + 32 / 64)) / 2


def test_bands_cover_every_distance_once_and_then_all() -> None:
    found = bands((0, 3, 9))
    assert [str(band) for band in found] == ["0-2", "3-8", "9+", "all"]
    for distance in range(20):
        assert sum(band.first <= distance < (band.end or 99) for band in found) == 2
    for edges in ((1, 4), (0, 4, 4), ()):
        with pytest.raises(ValueError, match="rising distances that begin with 0"):
            bands(edges)


def test_the_command_says_what_it_cannot_do(tmp_path: Any) -> None:
    text = tmp_path / "text"
    text.write_text(TEXT)
    for options, said in (
        (["--kv-dtype", "int2"], "--kv-dtype: expected one of fp8, fp8_e5m2, int8, int4, got 'int2'"),
        (["--kv-dtype", "kivi"], "--kv-dtype: expected one of fp8, fp8_e5m2, int8, int4, got 'kivi'"),
        (["--fake", "int4"], "--fake: expected one of kivi, got 'int4'"),
        (["--kv-dtype", ""], "expected a format, --kv-dtype or --fake, got none"),
        (["--edges", "0,x"], "--edges: expected whole numbers with commas between them, got '0,x'"),
        (["--edges", "0,90", "--length", "40"], "more tokens than the last edge, 90, got 40"),
    ):
        result = CliRunner().invoke(app, ["eval-kv", "draft", "--text", str(text), *options])
        assert result.exit_code != 0
        assert said in " ".join((result.output + str(result.stderr)).split())
    options = ["--length", "40", "--windows", "2", "--edges", "0,16", "--kv-dtype", "int4", "--fake", "kivi"]
    result = CliRunner().invoke(app, ["eval-kv", "draft", "--text", str(text), *options])
    assert result.exit_code == 0, result.output
    assert [line.split()[:3] for line in result.output.splitlines()[1:]] == [
        [name, bits, band] for name, bits in (("int4", "4.50"), ("kivi", "5.25")) for band in ("0-15", "16+", "all")
    ]
