"""What a scan says of each layer, against the model with that one layer rounded; and the command that decides by it."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from reference_impl.assembly.model import load_model
from reference_impl.cli import app
from reference_impl.models.quantization.quantize_folder import Job, quantize_folder
from reference_impl.models.quantization.recipes import METHODS
from reference_impl.models.quantization.scan import scan
from tests.quantization.conftest import MakeFolder, as_stored
from tests.quantization.test_quantize_folder import TOKENS, logits, num_bytes, tensors


def test_the_harm_is_that_of_the_model_with_one_layer_rounded(make_folder: MakeFolder, tmp_path: Path) -> None:
    """Written as checkpoints of their own, from a run that rounds all; bits by the formula of what is stored."""
    source, recipe = make_folder(), replace(METHODS["rtn"], group_size=16)
    model = load_model(source, torch.float32)
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


def test_the_command_keeps_to_the_bits_that_it_is_given(tmp_path: Path) -> None:
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
    said = run("--bits", "3", "-o", str(tmp_path / "less"))
    assert said.startswith("1")
    assert "--bits: budget: expected at least 1,218,304 bits" in said
    assert not (tmp_path / "less").exists()
