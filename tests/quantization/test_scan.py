"""What a scan says of each layer, against the model with that one layer rounded; and the command that decides by it."""

from __future__ import annotations

import json
import os
import signal
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from reference_impl.assembly.model import load_model
from reference_impl.cli import app
from reference_impl.core.linear import Linear
from reference_impl.models.quantization import scan as scan_module
from reference_impl.models.quantization.quantize_folder import Job, quantize_folder
from reference_impl.models.quantization.recipes import METHODS, Recipe
from reference_impl.models.quantization.scan import scan, scan_folder
from tests.quantization.conftest import PLAIN, MakeFolder, as_stored
from tests.quantization.test_quantize_folder import TOKENS, logits, num_bytes, tensors
from tests.warm import Warm


def test_the_harm_is_that_of_the_model_with_one_layer_rounded(make_folder: MakeFolder, tmp_path: Path) -> None:
    """Written as checkpoints of their own, from a run that rounds all; bits by the formula of what is stored."""
    source, recipe = make_folder(), replace(METHODS["rtn"], group_size=16)
    model = load_model(source, torch.float32, linear_method=PLAIN)
    costs = scan(model, TOKENS[:1], recipe, ["int4", "w8a8"])
    again = scan(model, TOKENS[:1], recipe, ["int4", "w8a8"])
    assert costs == again  # the model is as it was
    plain, before = logits(source).log_softmax(-1), load_file(source / "model.safetensors")
    assert [*costs] == [linear.name for linear in model.linears()]
    quantize_folder(Job(source, tmp_path / "all", replace(recipe, scheme="int4")))
    rounded = load_model(tmp_path / "all", torch.float32, linear_method=as_stored(tmp_path / "all"))
    for linear, packed in zip(model.linears(), rounded.linears(), strict=True):
        changed = dict(before)
        for part in linear.parts:
            name = f"{linear.name.rpartition('.')[0]}.{part}"
            changed[f"{name}.weight"] = packed.method.weight(packed.params, packed.row_of(part), linear.in_features)  # type: ignore[attr-defined]
        folder = tmp_path / linear.name
        folder.mkdir()
        (folder / "config.json").write_text((source / "config.json").read_text())
        save_file(changed, folder / "model.safetensors")
        expected = float((plain.exp() * (plain - logits(folder).log_softmax(-1))).sum(-1).mean())
        found = costs[linear.name]["int4"]
        assert found.harm == pytest.approx(expected, rel=0.02, abs=1e-7)
        assert found.bits == 8 * sum(
            num_bytes(recipe.scheme_of("", linear.in_features), rows, linear.in_features)
            for rows in linear.parts.values()
        )
        assert costs[linear.name]["w8a8"].harm < found.harm
    with pytest.raises(ValueError, match="choices: expected names of schemes, got none"):
        scan(model, TOKENS, recipe, [])


def test_a_killed_scan_goes_on_behind_the_last_layer_that_it_had_written_down(
    make_folder: MakeFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: Warm
) -> None:
    """Killed while it writes the fifth of eight: four are taken as they are, four are scanned, and all are those of a
    scan that nobody killed."""
    source, out = make_folder(hidden_size=128, intermediate_size=256), tmp_path / "out"
    done = warm.run(("-m", "tests.quantization.killed", str(source), str(out), "scan", "5"), os.environ)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list((tmp_path / "out.quantizing").glob("scan.json.tmp"))
    recipe, names, load = (
        METHODS["rtn"],
        ["int4", "int8"],
        partial(load_model, source, torch.float32, linear_method=PLAIN),
    )
    scanned, seen, round_one = [], [], scan_module._rounded

    def counted(linear: Linear, recipe: Recipe) -> Any:
        scanned.append(linear.name)
        return round_one(linear, recipe)

    monkeypatch.setattr(scan_module, "_rounded", counted)
    costs, weights = scan_folder(source, out, load, TOKENS[:2], recipe, names, lambda *at: seen.append(at))
    assert seen == [(4, 8), (5, 8), (6, 8), (7, 8), (8, 8)]
    assert len(scanned) == 2 * 4
    whole = scan(load(), TOKENS[:2], recipe, names)
    assert costs == whole
    assert [*costs] == [*whole]
    assert weights == sum(linear.in_features * linear.out_features for linear in load().linears())
    assert scan_folder(source, out, lambda: pytest.fail("loaded"), TOKENS[:2], recipe, names) == (costs, weights)


def test_a_scan_of_something_else_is_not_gone_on_with(make_folder: MakeFolder, tmp_path: Path) -> None:
    source, out = make_folder(), tmp_path / "out"
    recipe, load = (
        replace(METHODS["rtn"], group_size=16),
        partial(load_model, source, torch.float32, linear_method=PLAIN),
    )
    with pytest.raises(ValueError, match="scheme: expected one of .*, got 'int9'"):
        scan_folder(source, out, load, TOKENS[:1], recipe, ["int9"])
    assert not (tmp_path / "out.quantizing").exists()
    scan_folder(source, out, load, TOKENS[:1], recipe, ["int8"])
    for tokens, other, names, what in (
        (TOKENS[1:2], recipe, ["int8"], "calibration"),
        (TOKENS[:1], replace(recipe, group_size=8), ["int8"], "group size"),
        (TOKENS[:1], recipe, ["int4", "int8"], "choices"),
    ):
        with pytest.raises(ValueError, match=f"found another {what}: name another folder"):
            scan_folder(source, out, load, tokens, other, names)
    quantize_folder(Job(source, out, recipe))
    assert not list(out.glob("scan*"))


def test_the_command_keeps_to_the_bits_that_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "text"
    text.write_text(Path(statistics.__file__).read_text("utf-8")[:12_000])
    calibration = ["--calibration", str(text), "--rows", "2", "--length", "32"]

    def run(*options: str) -> str:
        done = CliRunner().invoke(app, ["quantize", "draft", *calibration, *options])
        return f"{done.exit_code} " + done.output.replace("\n", " ")

    assert run("--bits", "5.5", "-o", str(tmp_path / "out")).startswith("0 linear layers: int4 in ")
    report = json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    chosen = report["recipe"]["by_layer"]
    assert {"int4", "int8"} == set(chosen.values())
    assert report["bits_per_weight"] <= 5.5
    after = tensors(tmp_path / "out")
    stored = sum(t.nbytes for name, t in after.items() if "proj" in name)
    assert 8 * stored == report["bits_per_weight"] * report["quantized_weights"]
    costs = report["mixed"]["costs"]
    assert sum(costs[layer][name]["bits"] for layer, name in chosen.items()) == 8 * stored
    harms = {layer: found["int4"]["harm"] - found["int8"]["harm"] for layer, found in costs.items()}
    worst = max(harms, key=lambda layer: harms[layer] / costs[layer]["int4"]["bits"])
    assert chosen[worst] == "int8"  # what harms most for its size is kept more exactly
    assert bool(logits(tmp_path / "out").isfinite().all())
    for options, what in (
        (
            ["--method", "rtn", "--clip", "--scheme", "int8"],
            "--clip: expected a scheme with scales per group, got int8",
        ),
        (["--method", "rtn", "--clip"], "0 wrote"),
    ):
        assert what in run(*options, "-o", str(tmp_path / "clipped"))
    assert json.loads((tmp_path / "clipped" / "quantization_report.json").read_text())["layers"][0]["output_errors"]
    said = run("--bits", "3", "-o", str(tmp_path / "less"))
    assert said.startswith("1")
    assert "--bits: budget: expected at least 1,218,304 bits" in said
    assert not (tmp_path / "less").exists()
    monkeypatch.setattr(scan_module, "scan", lambda *_: pytest.fail("scanned again"))
    assert run("--bits", "8.5", "-o", str(tmp_path / "less")).startswith("0 linear layers: int4 in 0, int8 in 8 of 8")
    assert not (tmp_path / "less.quantizing").exists()
