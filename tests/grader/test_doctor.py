from __future__ import annotations

import io
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from grader import doctor
from grader.findings import Row
from reference_impl import LLM, course_model
from reference_impl.features.cpu.products import how, products


def printed(monkeypatch: pytest.MonkeyPatch, *rows: Row, engine: Row) -> tuple[int, str]:
    monkeypatch.setattr(doctor, "machine_rows", lambda: iter(rows))
    monkeypatch.setattr(doctor, "engine_row", lambda: engine)
    text = io.StringIO()
    return doctor.run(Console(file=text, width=120)), text.getvalue()


def test_warnings_are_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = printed(monkeypatch, Row("disk", "0.5 GiB", "warn", "Free some space"), engine=Row("engine", "text"))
    assert code == 0
    assert "disk: Free some space" in text


def test_a_failing_row_makes_the_exit_code_1_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = printed(monkeypatch, Row("torch", "2.1", "fail", "pip install torch"), engine=Row("engine", "text"))
    assert code == 1
    assert "torch: pip install torch" in text


def test_text_with_square_brackets_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    _, text = printed(monkeypatch, Row("CPU", "[bold]8 cores[/]"), engine=Row("engine", "x = [/red] y[0]"))
    assert "[bold]8 cores[/]" in text
    assert "x = [/red] y[0]" in text


def test_a_missing_course_model_is_a_failing_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Path:
        raise FileNotFoundError(f"course model {name!r} not found")

    monkeypatch.setattr("reference_impl.assembly.config.course_model", missing)
    row = doctor.engine_row()
    assert row.verdict == "fail"
    assert "course model 'target' not found" in row.found
    assert "git checkout datasets" in row.advice


def test_an_engine_that_breaks_is_a_finding_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Path:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr("reference_impl.assembly.config.course_model", broken)
    row = doctor.engine_row()
    assert row.verdict == "fail"
    assert "RuntimeError: no such instruction" in row.found


def test_every_row_of_this_machine_is_found_out_without_an_error() -> None:
    names = [row.name for row in doctor.machine_rows()]
    assert {"Python", "system", "CPU", "memory", "torch", "GPU", "triton", "jupyterlab", "sandbox", "disk"} <= set(
        names
    )


@pytest.mark.parametrize(("version", "expected"), [("2.13.0+cpu", (2, 13)), ("3.7.1", (3, 7)), ("4", (4, 0))])
def test_a_version_is_read_as_major_and_minor(version: str, expected: tuple[int, int]) -> None:
    assert doctor.release(version) == expected


def test_a_version_below_the_range_is_named_with_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.7.1")
    rows = {row.name: row for row in doctor.machine_rows()}
    assert rows["torch"].verdict == "fail"
    assert "2.7.1, needed: 2.8 or later" in rows["torch"].found


def test_the_sandbox_is_judged_by_trying_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")

    def answer(code: int, stderr: str) -> Row:
        return doctor.sandbox_row(lambda command, **_: subprocess.CompletedProcess(command, code, "", stderr))

    assert answer(0, "").verdict == "ok"
    refused = answer(1, "bwrap: setting up uid map: Permission denied")
    assert refused.verdict == "warn"
    assert "Permission denied" in refused.found
    assert "AppArmor" in refused.advice


def test_the_products_that_it_names_are_those_of_a_loaded_model() -> None:
    """For every kind of weights, the class that a model's layers have."""
    found = products()
    model = course_model("draft")
    for dtype in ("float32", "bfloat16", "float16"):
        llm = LLM(model, dtype=dtype, device="cpu", num_blocks=8)
        method = llm.engine.model.layers[0].qkv.method
        assert found[dtype] == how(type(method))
    for bits in ("int8", "int4"):
        llm = LLM(model, dtype="float32", device="cpu", num_blocks=8, quantization=bits)
        assert found[bits] == how(type(llm.engine.model.layers[0].qkv.method))
    assert all(f"{name}: {words}" in doctor._products().found for name, words in found.items())
