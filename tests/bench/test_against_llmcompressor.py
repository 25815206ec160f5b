"""llmcompressor as a peer, without llmcompressor: what is asked of it, what is kept, what has to be alike, and the
figures; and what is recorded."""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import t as student

from reference_impl.bench import against_llmcompressor as bench
from reference_impl.bench import gates, harness, llmcompressor_worker
from reference_impl.bench.peer_process import PeerFailed, PeerProcess
from reference_impl.models.quantization.quantize_folder import Job, quantize_folder
from reference_impl.models.quantization.recipes import METHODS


class Stand:
    """This engine in llmcompressor's place: whatever the method, it rounds to nearest."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def __enter__(self) -> Stand:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, do: str, **what: Any) -> Any:
        assert do == "quantize"
        self.asked.append((what["method"], what["tokens"][0][0]))
        recipe = replace(METHODS["rtn"], group_size=what["group_size"])
        quantize_folder(Job(Path(what["source"]), Path(what["out"]), recipe))
        return {"n_grid": "20"}


def test_both_are_judged_alike_and_what_is_there_is_not_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    peer = Stand()
    monkeypatch.setattr(PeerProcess, "started", lambda *_: (peer, {"llmcompressor": "0.0.stand"}))
    monkeypatch.setattr(bench, "COMPARED", ("gptq",))
    monkeypatch.setattr(gates, "WINDOWS", 2)
    found = bench.run(["draft"], (3, 4), tmp_path, rows=2, length=32)["draft"]
    first, second = (gates.drawn_rows(gates.Judge("draft").calibration, 2, 32, seed) for seed in (3, 4))
    asked = [("rtn", int(first[0, 0])), ("gptq", int(first[0, 0])), ("gptq", int(second[0, 0]))]
    assert peer.asked == asked
    assert found["rtn"]["ours"] == found["rtn"]["theirs"]
    assert found["rtn"]["codes_that_differ"] == 0
    assert found["bits_per_weight"] == 4 + 16 / 128
    runs = found["methods"]["gptq"]["runs"]
    assert [run["theirs"] for run in runs] == [found["rtn"]["ours"]] * 2
    assert runs[0]["ours"] != runs[1]["ours"]
    assert found["settings"] == {"gptq": {"n_grid": "20"}}
    (tmp_path / "draft" / "gptq-4-theirs.json").unlink()  # killed while llmcompressor wrote it
    assert bench.run(["draft"], (3, 4), tmp_path, rows=2, length=32)["draft"] == found
    assert peer.asked == [*asked, asked[2]]
    shown = bench.markdown({"draft": found})
    ours = statistics.fmean(run["ours"] for run in runs)
    assert f"| draft, gptq | {ours:.5f} | {found['rtn']['theirs']:.5f} |" in shown


@pytest.mark.parametrize("seeds", range(2, 11))
def test_the_interval_is_student_s(seeds: int) -> None:
    theirs = [0.03 + 0.001 * seed for seed in range(seeds)]
    shares = [0.02 * ((seed * 7) % 5) - 0.03 for seed in range(seeds)]
    runs = [{"ours": kl * (1 + share), "theirs": kl} for kl, share in zip(theirs, shares, strict=True)]
    low, high = student.interval(0.95, seeds - 1, statistics.fmean(shares), statistics.stdev(shares) / seeds**0.5)
    expected = {"mean": statistics.fmean(shares), "low": low, "high": high}
    assert bench.difference(runs) == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("seeds", [1, 11])
def test_too_few_or_too_many_seeds_are_refused(seeds: int) -> None:
    with pytest.raises(ValueError, match=f"seeds: expected 2 to 10, got {seeds}"):
        bench.difference([{"ours": 1.0, "theirs": 1.0}] * seeds)


def folder_with(folder: Path, **changes: torch.Tensor) -> Path:
    """A matrix [8, 256] of 4 bits, two groups a row."""
    folder.mkdir(parents=True)
    words = torch.arange(8 * 32, dtype=torch.int32).view(8, 32)
    tensors = {"a.weight_packed": words, "a.weight_scale": torch.ones(8, 2), "a.weight_shape": torch.tensor([8, 256])}
    save_file({"b.weight": torch.ones(3)} | tensors | changes, folder / "model.safetensors")
    return folder


def test_bits_are_counted_and_scales_have_to_be_numbers_of_bfloat16(tmp_path: Path) -> None:
    assert bench.bits_of(folder_with(tmp_path / "a")) == (2048, 4 + 16 * 2 / 256)
    exact = torch.full((8, 2), 1 + 2**-9)
    with pytest.raises(RuntimeError, match="a.weight_scale: expected numbers of bfloat16, got more exact ones"):
        bench.bits_of(folder_with(tmp_path / "b", **{"a.weight_scale": exact}))


def test_other_codes_of_rounding_to_nearest_stop_it(tmp_path: Path) -> None:
    kls = {"ours": 0.1, "theirs": 0.1}
    ours = folder_with(tmp_path / "ours")
    words = load_file(ours / "model.safetensors")["a.weight_packed"]
    words[3, 7] += 1  # the last of 8 codes
    one = folder_with(tmp_path / "one", **{"a.weight_packed": words})
    assert bench.verified(kls, (ours, one))["codes_that_differ"] == 1
    words[0] += 0x11111111
    with pytest.raises(RuntimeError, match="expected the same codes but for ties, got 257 of 2,048 that differ"):
        bench.verified(kls, (ours, folder_with(tmp_path / "many", **{"a.weight_packed": words})))


def test_other_bits_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fine(Stand):
        def ask(self, do: str, **what: Any) -> Any:
            return super().ask(do, **what | {"group_size": 64})

    pair = bench.Pair(Fine(), gates.Judge("draft"), tmp_path / "pair")
    with pytest.raises(RuntimeError, match=r"rtn: expected 294,912 weights of 4.125 bits, as ours, got \(294912, 4.25"):
        pair.run("rtn", torch.zeros(1, 4, dtype=torch.long), "rtn")


def test_the_worker_names_what_it_lacks_and_goes_on() -> None:
    with PeerProcess("llmcompressor", sys.executable, bench.WORKER) as peer:
        with pytest.raises(PeerFailed, match="llmcompressor: dance: KeyError: 'dance'"):
            peer.ask("dance")
        with pytest.raises(PeerFailed, match="versions: ModuleNotFoundError: No module named 'llmcompressor'"):
            peer.ask("versions")


def test_its_recipes_say_what_has_to_be_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names are those of llmcompressor 0.14; what is asked of it is compared with our scheme."""

    class Modifiers:
        def __getattr__(self, name: str) -> Any:
            return lambda **what: (name, what)

    for module in ("gptq", "quantization", "transform.awq"):
        for i in range(len(parts := f"llmcompressor.modifiers.{module}".split("."))):
            monkeypatch.setitem(sys.modules, ".".join(parts[: i + 1]), Modifiers())  # type: ignore[arg-type]
    for method, names in (
        ("rtn", ["QuantizationModifier"]), ("gptq", ["GPTQModifier"]), ("awq", ["AWQModifier", "QuantizationModifier"]),
    ):  # fmt: skip
        made = llmcompressor_worker.recipe(method, 128)
        assert [name for name, _ in made] == names
        what = made[-1][1]
        assert what["ignore"] == ["lm_head"]
        weights = what["config_groups"]["group_0"]["weights"]
        ours = replace(METHODS[method], group_size=128).scheme_of("", 256)
        assert (weights["type"] + str(weights["num_bits"]), weights["strategy"]) == (ours.numbers, ours.per)
        assert (weights["group_size"], weights["symmetric"]) == (ours.group_size, ours.symmetric)
        assert weights["scale_dtype"] == str(ours.scale_dtype)


def test_without_an_environment_it_says_how_to_have_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(bench.VARIABLE, raising=False)
    assert bench.main(["--seeds", "2"]) == 1
    said = capsys.readouterr().err
    assert "not measured: INFERLAB_LLMCOMPRESSOR names no environment with llmcompressor; to have it" in said
    assert "pip install llmcompressor" in said
    monkeypatch.setenv(bench.VARIABLE, str(tmp_path))
    assert f"with bin/python, got {tmp_path}" in bench.run(["draft"], (0, 1), tmp_path)["not_measured"]


def test_what_is_recorded_is_what_its_runs_say() -> None:
    record = harness.recorded(bench.NAME)
    assert record, "python -m reference_impl.bench against_llmcompressor --save"
    for model, result in record.items():
        assert model in gates.MODELS
        assert result["bits_per_weight"] == 4 + 16 / 128
        assert result["rtn"]["codes_that_differ"] <= bench.TIES * result["rtn"]["codes"]
        for method in bench.COMPARED:
            found = result["methods"][method]
            assert [run["seed"] for run in found["runs"]] == [*range(bench.FIRST, bench.FIRST + 5)]
            assert found["difference"] == pytest.approx(bench.difference(found["runs"]))
    readme = (Path(bench.__file__).parent / "README.md").read_text("utf-8")
    assert bench.markdown(record) in readme
