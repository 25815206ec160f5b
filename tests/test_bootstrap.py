"""The bootstrap cell, run as Colab's kernel runs it: a Python that has torch and Jupyter, but not this course.

That Python is a venv without pip's network. It sees every package of the one that runs the tests except inferlab, and
the cell installs the wheel, built once.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from grader.bootstrap import FIRST_LINE, bootstrap_source
from grader.chapter_source import chapter_notebook
from grader.labs.lab_source import replaced

ROOT = Path(__file__).resolve().parent.parent
LAB = ROOT / "labs/02_kv_cache/kv_cache.ipynb"
VERSIONS = """
import importlib.metadata, json
print(json.dumps({d.name: d.version for d in importlib.metadata.distributions() if d.name != "inferlab"}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-P", "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, ROOT]
    built = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(folder.glob("inferlab-*.whl"))


class Elsewhere:
    """A Python without the course, and an empty folder to work in."""

    def __init__(self, folder: Path):
        venv, packages = folder / "venv", folder / "packages"
        self.python, self.folder = venv / "bin" / "python", folder / "work"
        self.folder.mkdir()
        packages.mkdir()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=600)
        for place in map(Path, sys.path):
            if place.name in ("site-packages", "dist-packages") and place.is_dir():
                for entry in place.iterdir():
                    ours = "inferlab" in entry.name or entry.suffix == ".pth"
                    if not ours and not (packages / entry.name).exists():
                        (packages / entry.name).symlink_to(entry)
        site = next(venv.glob("lib/python*/site-packages"))
        (site / "packages.pth").write_text(str(packages))
        spec = folder / "jupyter" / "kernels" / "elsewhere" / "kernel.json"
        spec.parent.mkdir(parents=True)
        argv = [str(self.python), "-P", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        spec.write_text(json.dumps({"argv": argv, "display_name": "elsewhere", "language": "python"}))
        self.jupyter = str(folder / "jupyter")

    def run(self, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.python, "-P", "-c", code],
            cwd=self.folder,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=600,
        )

    def execute(self, notebook: nbformat.NotebookNode) -> None:
        resources = {"metadata": {"path": str(self.folder)}}
        NotebookClient(notebook, timeout=600, kernel_name="elsewhere", resources=resources).execute()

    def versions(self) -> dict[str, str]:
        return json.loads(self.run(VERSIONS).stdout)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    made = Elsewhere(tmp_path)
    monkeypatch.setenv("JUPYTER_PATH", made.jupyter)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    # Neither a constraint nor an index of this machine's pip decides what is found. There is no network.
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("INFERLAB_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return made


def printed(cell: nbformat.NotebookNode) -> str:
    texts = (output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in cell.outputs)
    return re.sub(r"\x1b\[[\d;]*m", "", "".join(texts))


@pytest.mark.timeout(900)
def test_a_chapter_and_a_lab_run_where_only_torch_and_jupyter_were(elsewhere: Elsewhere, wheel: Path) -> None:
    before = elsewhere.versions()
    assert before["torch"]
    assert elsewhere.run("import reference_impl").returncode != 0

    chapter = nbformat.from_dict(chapter_notebook(ROOT / "chapters/02_kv_cache/c_requests.py", str(wheel)))
    elsewhere.execute(chapter)
    assert printed(chapter.cells[1]).endswith("Installed.\n")
    assert elsewhere.versions() == before
    home = elsewhere.run("import reference_impl; print(reference_impl.__file__)").stdout
    assert str(elsewhere.python.parent.parent) in home

    # As handed out, with the solutions filled in: the bootstrap cell is the released one, and it has nothing to do.
    solution = json.loads((ROOT / "solutions/02_kv_cache/kv_cache.ipynb").read_text("utf-8"))
    answers = {
        cell["id"]: "".join(cell["source"])
        for cell in solution["cells"]
        if cell["metadata"]["nbgrader"].get("solution")
    }
    lab = nbformat.from_dict(replaced(json.loads(LAB.read_text("utf-8")), answers))
    lab.cells.append(nbformat.v4.new_code_cell("import grader\ngrader.check()"))
    for cell in lab.cells:
        cell.source = "".join(cell.source)
    elsewhere.execute(lab)
    said = printed(lab.cells[-1])
    assert "20 of 20 points" in said
    assert "All checks passed" in said
    assert "stopped with an error" not in said
    assert list(elsewhere.folder.iterdir()) == []


def test_without_a_network_the_learner_is_told_what_to_do(elsewhere: Elsewhere) -> None:
    done = elsewhere.run(bootstrap_source("inferlab"))
    assert done.returncode != 0
    assert "No matching distribution found for inferlab" in done.stdout
    assert "is there a network? Connect, then run this cell again" in done.stderr


def test_a_course_that_is_not_published_says_how_to_install_it_and_the_environment_may_name_a_place(
    elsewhere: Elsewhere,
) -> None:
    done = elsewhere.run(bootstrap_source(""))
    assert "INFERLAB_INSTALL_URL" in done.stderr
    assert "Installing" not in done.stdout
    done = elsewhere.run(bootstrap_source(""), INFERLAB_INSTALL_URL="no-such-wheel")
    assert "pip install no-such-wheel" in done.stdout


def test_a_course_that_needs_a_newer_torch_is_refused_and_torch_stays(elsewhere: Elsewhere, tmp_path: Path) -> None:
    future = tmp_path / "inferlab-9.0-py3-none-any.whl"
    with zipfile.ZipFile(future, "w") as archive:
        meta = "Metadata-Version: 2.1\nName: inferlab\nVersion: 9.0\nRequires-Dist: torch>=999\n"
        archive.writestr("inferlab-9.0.dist-info/METADATA", meta)
        archive.writestr(
            "inferlab-9.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("inferlab-9.0.dist-info/RECORD", "")
    before = elsewhere.versions()
    done = elsewhere.run(bootstrap_source(str(future)))
    assert done.returncode != 0
    assert f"torch=={before['torch']}" in done.stdout
    assert "choose a newer runtime" in done.stderr
    assert elsewhere.versions() == before


def test_an_older_python_is_refused_before_pip_is_asked(elsewhere: Elsewhere) -> None:
    done = elsewhere.run("import sys; sys.version_info = (3, 10, 12, 'final', 0)\n" + bootstrap_source("inferlab"))
    assert "Python 3.11 or later" in done.stderr
    assert "Installing" not in done.stdout


def test_the_python_that_the_cell_asks_for_is_the_one_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    asked = re.search(r"version_info < \((\d+), (\d+)\)", bootstrap_source("inferlab"))
    assert asked
    assert project["requires-python"] == f">={asked[1]}.{asked[2]}"


def test_where_the_course_is_installed_the_cell_does_nothing() -> None:
    names = {"print": None, "__builtins__": __builtins__}
    exec(bootstrap_source("/no/such/file"), names)
    assert set(names) == {"print", "__builtins__", "importlib"}


def test_the_cell_is_python_that_an_old_kernel_can_read_and_says_what_it_is() -> None:
    source = bootstrap_source('a "quoted" url')
    ast.parse(source, feature_version=(3, 7))
    assert source.startswith(FIRST_LINE)
    assert json.dumps('a "quoted" url') in source
