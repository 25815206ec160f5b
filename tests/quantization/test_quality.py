"""What `inferlab eval` measures, against formulas; and the commands. Each method's band: tests/bench/test_gates.py."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from reference_impl import LLM, SamplingParams
from reference_impl.bench.quality import Estimate, bootstrap, compare, lines, windows_of
from reference_impl.cli import app
from reference_impl.core.decoder import Decoder
from reference_impl.models.quantization.recipes import METHODS
from tests.engine.conftest import one_shot  # noqa: F401


def test_a_bootstrap_has_the_width_that_the_central_limit_gives() -> None:
    values = np.random.default_rng(5).normal(3.0, 2.0, 400)
    found = bootstrap(values.tolist(), seed=1)
    half = 1.96 * values.std() / math.sqrt(400)
    assert found.value == pytest.approx(values.mean())
    assert found.high - found.value == pytest.approx(half, rel=0.15)
    assert found.value - found.low == pytest.approx(half, rel=0.15)
    assert bootstrap([2.0, 2.0]) == Estimate(2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="at least 2 windows, got 1"):
        bootstrap([1.0])


def test_windows_follow_each_other_and_share_one_token() -> None:
    assert windows_of(range(10), 3, 9) == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert windows_of(range(10), 3, 2) == [[0, 1, 2, 3], [3, 4, 5, 6]]
    with pytest.raises(ValueError, match=r"at least 7 tokens \(2 windows of 3\), got 6"):
        windows_of(range(6), 3, 2)


def test_the_measures_are_their_formulas(
    random_model: Callable[..., Decoder],
    one_shot: Any,  # noqa: F811
) -> None:
    one, other = random_model("float64"), random_model("float64", num_hidden_layers=1)
    windows = [[1, 5, 9, 30, 2, 7], [7, 7, 60, 4, 11, 3]]
    found = compare(one, other, windows)
    wanted: dict[str, list[float]] = {name: [] for name in ("nats", "kl", "agreement", "nats_more")}
    for window in windows:
        p, q = (one_shot(model, window[:-1]).softmax(-1).double().numpy() for model in (other, one))
        behind = np.arange(5), np.array(window[1:])
        wanted["nats"].append(-np.log(q[behind]).mean())
        wanted["kl"].append((p * np.log(p / q)).sum(-1).mean())
        wanted["agreement"].append((p.argmax(-1) == q.argmax(-1)).mean())
        wanted["nats_more"].append((np.log(p[behind]) - np.log(q[behind])).mean())
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert found[name].value == pytest.approx(np.mean(values), abs=1e-5), name
    same = compare(one, one, windows)
    assert same["kl"].value == pytest.approx(0, abs=1e-9)
    assert (same["agreement"], same["nats_more"]) == (Estimate(1, 1, 1), Estimate(0, 0, 0))
    with pytest.raises(ValueError, match="got vocabularies of 50 and 61"):
        compare(one, random_model("float64", vocab_size=50), windows)


def test_a_difference_is_said_to_be_beyond_chance_only_when_its_interval_says_so() -> None:
    rest = {name: Estimate(1, 1, 1) for name in ("nats", "kl", "agreement")}
    assert "beyond chance" not in "\n".join(lines(rest | {"nats_more": Estimate(0.1, -0.01, 0.2)}))
    assert "beyond chance" in "\n".join(lines(rest | {"nats_more": Estimate(0.1, 0.01, 0.2)}))


def top_tokens(folder: Path) -> dict[int, float]:
    """{token: its log probability} of the 20 most likely ones behind a prompt, from an engine of that folder."""
    llm = LLM(folder, dtype="float32")
    [logprobs] = llm.generate(["def mean("], SamplingParams(max_tokens=1, temperature=0, logprobs=20))[0].logprobs
    return dict(logprobs.top)


def test_the_commands(tmp_path: Path) -> None:
    text, out = tmp_path / "text", tmp_path / "out"
    text.write_text(Path(statistics.__file__).read_text("utf-8")[:30_000])
    run = CliRunner().invoke
    options = ["--method", "gptq", "--calibration", str(text), "--rows", "4", "--length", "64"]
    done = run(app, ["quantize", "draft", *options, "-o", str(out)])
    assert done.exit_code == 0, done.output
    report = json.loads((out / "quantization_report.json").read_text())
    matrices = sum(len(layer["bits"]) for layer in report["layers"])
    bits = 4 + 16 / 128 + 128 * matrices / report["quantized_weights"]  # of each, its shape is written
    assert f"weights of {bits:.3f} bits" in done.output
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    assert f"compressed-tensors; all files {size / 1e6:.2f} MB" in done.output
    done = run(app, ["quantize", "draft", *options, "--dense", "-o", str(tmp_path / "dense")])
    assert "these files are dense, float32 (as asked)" in done.output, done.output
    found, expected = (top_tokens(folder) for folder in (out, tmp_path / "dense"))
    assert found.keys() == expected.keys()
    assert all(found[token] == pytest.approx(expected[token], abs=1e-4) for token in found)
    done = run(app, ["quantize", "draft", "--method", "nf4", "-o", str(tmp_path / "nf4")])
    assert "dense, float32 (compressed-tensors has no nf4)" in done.output, done.output
    done = run(app, ["eval", str(out), "--against", "draft", "--text", str(text), "--length", "64", "--windows", "4"])
    assert done.exit_code == 0, done.output
    assert "4 windows of 64 tokens" in done.output
    assert "KL, nats" in done.output
    for options, said in (
        (["--method", "best"], "--method: expected one of rtn, gptq"),
        (["--method", "awq"], "expected a file of text, got none"),
        ([], "found one with something in it"),
    ):
        done = run(app, ["quantize", "draft", *options, "-o", str(out)])
        assert done.exit_code != 0
        assert said in done.output.replace("\n", " "), done.output
    done = run(app, ["quantize", "draft", "--scheme", "int5", "-o", str(tmp_path / "new")])
    assert "expected one of int4" in done.output, done.output
    assert not (tmp_path / "new").exists()
    assert replace(METHODS["rtn"], scheme="int8") == METHODS["int8"]
