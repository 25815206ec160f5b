"""Each quantization method keeps to its recorded band on the course models; and what a band is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from reference_impl.bench import gates, harness
from reference_impl.bench.gates import Band, Judge, band_of, drawn_rows, markdown
from reference_impl.models.quantization.recipes import METHODS

RECORD = harness.recorded("gates")
QUICK = [("draft", method) for method in ("rtn", "gptq", "awq", "smoothquant", "w4a8")]


@pytest.fixture(scope="module")
def judges() -> dict[str, Judge]:
    return {}


@pytest.mark.parametrize(
    ("model", "method"),
    [
        pytest.param(model, method, marks=() if (model, method) in QUICK else pytest.mark.slow)
        for model in gates.MODELS
        for method in METHODS
    ],
)
def test_a_method_stays_in_its_band(model: str, method: str, judges: dict[str, Judge], tmp_path: Path) -> None:
    band = band_of(RECORD["models"][model][method], METHODS[method])
    judge = judges.get(model) or judges.setdefault(model, Judge(model))
    run = judge.run(METHODS[method], 0, tmp_path / "out")
    assert band.broken(run["kl"], run["agreement"]) == []
    first = RECORD["models"][model][method][0]
    assert run["bits_per_weight"] == first["bits_per_weight"]
    assert run["quantized_bytes"] == first["quantized_bytes"]


def test_each_method_was_recorded_with_each_width_of_vectors() -> None:
    for methods in RECORD["models"].values():
        for name, runs in methods.items():
            assert {run["instructions"].split(",")[0] for run in runs} == {"AVX512", "AVX2", "DEFAULT"}, name


def test_what_instructions_change_is_within_the_margin() -> None:
    """Where the same draw was recorded with several: that a band of one CPU holds on another rests on it."""
    compared = 0
    for methods in RECORD["models"].values():
        for name, runs in methods.items():
            first = [run for run in runs if run["seed"] == 0]
            for run in first[1:] if METHODS[name].rounding != "gptq" else ():
                compared += 1
                assert abs(run["kl"] / first[0]["kl"] - 1) < gates.KL_MARGIN / 2
                assert abs(run["agreement"] - first[0]["agreement"]) < gates.AGREEMENT_MARGIN
    assert compared > 20


def test_what_instructions_change_of_gptq_lies_in_the_band_of_the_others() -> None:
    """Of each instruction set: the band that all others make, without it."""
    compared = 0
    for methods in RECORD["models"].values():
        for runs, recipe in ((methods[name], METHODS[name]) for name in methods if METHODS[name].rounding == "gptq"):
            for one in sorted({run["instructions"] for run in runs}):
                band = band_of([run for run in runs if run["instructions"] != one], recipe)
                for run in (run for run in runs if run["instructions"] == one):
                    compared += 1
                    assert band.broken(run["kl"], run["agreement"]) == []
    assert compared > 20


def test_methods_are_recorded_in_the_order_that_is_known_of_them() -> None:
    """Not by luck of a draw: every draw of the better is better than every draw of the worse."""
    for methods in RECORD["models"].values():
        assert methods.keys() == METHODS.keys()
        for better, worse in (
            ("gptq", "rtn"), ("rotate-gptq", "rotate"), ("int8", "fp8-weights"), ("fp8-weights", "rtn"),
            ("int4-zeros", "rtn"), ("nvfp4", "mxfp4"), ("rtn", "ternary"), ("int8", "w8a8"), ("rtn", "w4a8"),
            ("nvfp4", "nvfp4-w4a4"), ("mxfp4", "mxfp4-w4a4"), ("nvfp4-w4a4", "mxfp4-w4a4"), ("gptq-int3", "int3-zeros"),
            ("gptq-int2", "int2-zeros"), ("int3-zeros", "int3"), ("int2-zeros", "int2"), ("int4-zeros", "gptq-int3"),
            ("int3-zeros", "gptq-int2"),
        ):  # fmt: skip
            assert max(run["kl"] for run in methods[better]) < min(run["kl"] for run in methods[worse]), (better, worse)


def test_a_band_reaches_a_tenth_and_a_hundredth_beyond_what_was_seen() -> None:
    runs = [{"kl": 0.02, "agreement": 0.9}, {"kl": 0.03, "agreement": 0.995}]
    band = band_of(runs, METHODS["rtn"])
    assert band == Band((0.02 * 0.9, 0.03 * 1.1), (0.89, 1.0))
    assert band_of(runs, METHODS["gptq"]).agreement == (0.88, 1.0)
    assert band.broken(0.0181, 1.0) == []
    assert band.broken(0.034, 0.88) == [
        "KL: expected 0.01800 to 0.03300, got 0.03400",
        "agreement: expected 0.89000 to 1.00000, got 0.88000",
    ]
    with pytest.raises(ValueError, match="at least one run, got none"):
        band_of([], METHODS["rtn"])


def test_drawn_rows_are_windows_of_the_text() -> None:
    rows = drawn_rows(range(100, 160), 5, 7, seed=3)
    assert rows.shape == (5, 7)
    assert torch.equal(rows, rows[:, :1] + torch.arange(7))
    assert not torch.equal(rows, drawn_rows(range(100, 160), 5, 7, seed=4))


def test_a_run_replaces_what_the_same_instructions_gave(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Fake:
        def __init__(self, model: str):
            pass

        def run(self, recipe: object, seed: int, out: Path) -> dict[str, object]:
            return {"kl": 0.5, "agreement": 0.25, "bits_per_weight": 4.5, "quantized_bytes": 1000000, "form": "dense"}

    monkeypatch.setattr(gates, "Judge", Fake)
    monkeypatch.setattr(gates.harness, "RESULTS", tmp_path)
    old = {"seed": 0, "kl": 9.0, "agreement": 0.0, "bits_per_weight": 4.5}
    mine = gates.harness.stamp()["instructions"]
    runs = [old | {"instructions": mine}, old | {"instructions": "others"}]
    (tmp_path / "gates.json").write_text(json.dumps({"models": {"draft": {"gptq": runs, "rtn": [old]}}}))
    assert gates.main(["--models", "draft", "--only", "gptq", "--seeds", "3"]) == 0
    found = harness.recorded("gates")["models"]["draft"]
    assert [(run["instructions"], run["seed"], run["kl"]) for run in found["gptq"]] == [
        ("others", 0, 9.0), (mine, 0, 0.5), (mine, 1, 0.5), (mine, 2, 0.5),
    ]  # fmt: skip
    assert found["rtn"] == [old]
    assert "| gptq | 4.500 | 1.00 \\* | 0.50000 | - | 25.0 % | - |" in markdown(
        {"models": {"target": {"gptq": found["gptq"][1:]}}}
    )
    assert gates.main(["--only", "best"]) == 2
    assert "expected some of rtn, gptq" in capsys.readouterr().err
