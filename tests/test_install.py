"""`.ci/install.py`: a line for each step, pip's own words in a file, and their end where pip failed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program with a .venv elsewhere, whose Python says what pip would say, and does not touch this one's."""
    spec = importlib.util.spec_from_file_location("installing", ROOT / ".ci" / "installing.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    monkeypatch.setattr(module, "VENV", venv)
    monkeypatch.setattr(module, "PYTHON", venv / "bin" / "python")
    monkeypatch.setattr(module, "LOG", venv / "install.log")
    return module


def python(install: ModuleType, status: int, lines: int = 400) -> None:
    """A Python that has no torch, and whose `-m pip install` says `lines` lines."""
    script = (
        "#!/bin/sh\n"
        'case "$*" in\n'
        '*importlib.metadata*) echo \'{"torch": "2.99.0"}\';;\n'
        f'*"pip install"*) for i in $(seq {lines}); do echo "Collecting package-$i"; done; exit {status};;\n'
        "esac\n"
    )
    install.PYTHON.write_text(script)
    install.PYTHON.chmod(0o755)


def test_an_installation_says_a_few_lines_and_pip_writes_to_a_file(
    install: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    python(install, status=0)
    install.main("learn")
    said = capfd.readouterr()
    assert len(said.out.splitlines()) <= 5
    assert said.err == ""
    assert "Installing the course" in said.out
    assert str(install.LOG) in said.out
    assert "Collecting package-400" in install.LOG.read_text()
    install.main("learn")
    assert capfd.readouterr().out == "", "nothing is left to do"


def test_where_pip_fails_the_end_of_what_it_said_and_the_file_are_shown(
    install: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    python(install, status=1)
    with pytest.raises(SystemExit) as stopped:
        install.main("learn")
    message = str(stopped.value)
    assert "Collecting package-400\n" in message
    assert "Collecting package-380\n" not in message
    assert str(install.LOG) in message
    assert "pip install" in message
    assert not (install.VENV / ".installed-learn").exists()
