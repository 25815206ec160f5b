"""The exercise with a 7B, in its form for a CPU, on the smallest model: forecast, measurement, KL, named errors."""

import io
import json
import math
from pathlib import Path

import pytest

from reference_impl.assembly.config import course_model
from reference_impl.bench.awq_throughput import CPU_FORM, Limits, forecast, main
from reference_impl.theory import kv_cache, latency
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model

SHORT = ["--batches", "1", "3", "--rows", "2", "--length", "24", "--windows", "2", "--prompt", "6", "--new", "4"]


@pytest.fixture(autouse=True)
def nobody_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())


def test_it_foretells_then_measures_and_writes_every_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "found.json", tmp_path / "awq"
    arguments = ["--model", str(course_model("draft")), "--out", str(out), "--json", str(file), *SHORT]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert CPU_FORM in said
    assert said.index("FORECAST") < said.index("AWQ took") < said.index("MEASURED") < said.index("KL ")
    found = json.loads(file.read_text("utf-8"))
    assert set(found) == {
        "model", "form", "device", "dtype", "num_params", "limits", "context", "bits_per_weight", "file_bytes",
        "file_bytes_before", "quantize_seconds", "batches", "kl", "agreement", "windows", "stamp",
    }  # fmt: skip
    assert [row["batch"] for row in found["batches"]] == [1, 3]
    for row in found["batches"]:
        for when in ("forecast", "measured"):
            assert set(row[when]) == {"bf16", "int4", "gain"}
            assert all(value > 0 for value in row[when].values())
            assert math.isclose(row[when]["gain"], row[when]["bf16"] / row[when]["int4"])
    assert found["file_bytes"] < found["file_bytes_before"]
    assert 4.125 <= found["bits_per_weight"] < 4.2
    assert 0 < found["kl"] < 1  # nats: rounded, and the same model still
    assert 0.5 < found["agreement"] <= 1
    assert found["limits"]["bandwidth"] > 0
    assert main([*arguments[:4], *SHORT]) == 0  # the folder is there now
    assert "is quantized already" in (said := capsys.readouterr().out)
    assert f"KL {found['kl']:.4f} nats" in said


def test_the_forecast_is_the_larger_of_reading_and_arithmetic() -> None:
    shape, gpu = model("llama-2-7b"), device("H100")
    limits, bits = Limits(gpu.bandwidth, gpu.peak("bf16"), ""), kv_cache.bits_per_weight(4, 128)
    gains = {}
    for batch in (1, 8, 32, 128, 4096):
        found = forecast(shape, limits, batch, 72, bits)
        gains[batch] = found["gain"]
        for name, each in (("bf16", 16), ("int4", bits)):
            read = kv_cache.read_bytes(shape, each, embedding_bits=16)
            assert math.isclose(found[name], latency.decode_seconds(shape, 72, gpu, batch, weights=read))
    assert 3.5 < gains[1] < 16 / bits  # scales, the output projection and the cache: less than 3.88
    assert gains[1] > gains[32] > gains[4096] == 1  # arithmetic, which stays in 16 bits


def test_a_folder_without_a_model_and_one_that_is_taken_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", str(tmp_path)]) == 2
    assert "--model: expected the folder of a model" in capsys.readouterr().err
    (tmp_path / "mine.txt").write_text("of somebody", "utf-8")
    assert main(["--model", str(course_model("draft")), "--out", str(tmp_path), *SHORT]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    assert main(["--model", str(course_model("draft")), "--text", "nowhere.txt", *SHORT]) == 2
    assert "expected a file of text, got 'nowhere.txt'" in capsys.readouterr().err
