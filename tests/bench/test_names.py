"""One table of names is behind `inferlab bench NAME` and `python -m reference_impl.bench NAME`."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import reference_impl
from reference_impl.bench import names
from reference_impl.cli import app, bench_app

HERE = Path(reference_impl.__file__).parent / "bench"


@pytest.mark.parametrize("name", names.BENCHES)
def test_a_bench_says_what_it_wants_under_its_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        names.run(name, ["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "usage" in out.lower()
    assert f"Example: inferlab bench {name}" in out


def test_what_has_a_command_line_is_in_the_table_and_in_inferlab() -> None:
    mains = {file.stem for file in HERE.glob("*.py") if re.search(r"^def main\(arguments", file.read_text(), re.M)}
    assert mains == set(names.BENCHES)
    group: Any = typer.main.get_command(bench_app)
    assert set(names.BENCHES) <= set(group.commands)


def test_inferlab_gives_a_bench_its_arguments_and_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(
        importlib.import_module("reference_impl.bench.gates"), "main", lambda words: seen.append(words) or 3
    )
    words = ["--only", "int8", "--speed", "a b"]
    assert CliRunner().invoke(app, ["bench", "gates", *words]).exit_code == 3
    assert seen == [words]


def test_python_m_names_the_benches(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "speed"])
    assert names.main() == 2
    said = capsys.readouterr().err
    assert all(name in said for name in names.BENCHES)
    monkeypatch.setattr("sys.argv", ["bench", "--help"])
    assert names.main() == 0
    assert "NAME is one of" in capsys.readouterr().out


def test_rounds_are_a_number_of_1_or_more(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        names.run("host", ["--rounds", "0"])
    assert "expected a whole number of 1 or more, got '0'" in capsys.readouterr().err
