"""What an installation holds, and what pyproject.toml, constraints.txt and the code have to agree on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from grader import doctor
from grader.study.manifest import load_course
from grader.study.workspace import chapters_root
from reference_impl.assembly.config import COURSE_MODELS

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HIDDEN = (".ipynb_checkpoints", "__pycache__", ".work")


def files(folder: str, *patterns: str) -> set[str]:
    found = (path for pattern in patterns for path in (ROOT / folder).rglob(pattern) if path.is_file())
    return {p.relative_to(ROOT / folder).as_posix() for p in found if not set(HIDDEN) & set(p.parts)}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-P", "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, ROOT]
    built = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(folder.glob("inferlab-*.whl"))


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_has_three_packages_and_one_folder_of_data(names: set[str]) -> None:
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops - {"inferlab_data"} == {"reference_impl", "grader", "chapters"}


def test_solutions_tests_and_sources_stay_out_of_the_wheel(names: set[str]) -> None:
    assert not {name for name in names if {"solutions", "tests", "datasets", *HIDDEN} & set(name.split("/"))}
    assert not {name for name in names if re.match(r"(chapters/\d\d_|inferlab_data/).*\.py$", name)}


def test_chapters_labs_and_the_course_model_travel_in_the_wheel(names: set[str]) -> None:
    wanted = {f"chapters/{name}" for name in files("chapters", "*.ipynb", "*.yaml")}
    wanted |= {f"inferlab_data/labs/{name}" for name in files("labs", "*.ipynb", "*.md")}
    wanted |= {f"inferlab_data/traces/{name}" for name in files("datasets/traces", "*.yaml")}
    for model in COURSE_MODELS:
        folder = f"datasets/course_model/{model}"
        wanted |= {f"inferlab_data/course_model/{model}/{name}" for name in files(folder, "*.json", "*.safetensors")}
    assert wanted <= names
    assert "chapters/course.yaml" in names


def test_both_licences_travel_in_the_wheel(names: set[str]) -> None:
    assert {Path(name).name for name in names if "/licenses/" in name} == {"LICENSE", "LICENSE-prose.md"}


def test_an_unpacked_wheel_finds_its_chapters_labs_and_model(wheel: Path, names: set[str], tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "from grader.study.workspace import chapters_root, data_root; from grader.study.manifest import load_course\n"
        "from reference_impl.assembly.config import course_model\n"
        "print(chapters_root(), data_root(), len(load_course().chapters), sep='\\n')\n"
        "try: print(course_model('target'))\n"
        "except FileNotFoundError as error: print(error)"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    chapters, data, count, model = result.stdout.splitlines()
    assert (chapters, data, count) == (str(tmp_path / "chapters"), str(tmp_path / "inferlab_data"), "20")
    assert str(tmp_path / "inferlab_data" / "course_model" / "target") in model


def test_no_folder_of_the_repository_becomes_a_package() -> None:
    folders = ("datasets", "labs", "solutions", "tests")
    code = (
        "import importlib.util, json\n"
        f"found = [spec for spec in map(importlib.util.find_spec, {folders}) if spec]\n"
        "print(json.dumps([place for spec in found for place in spec.submodule_search_locations or []]))"
    )
    result = subprocess.run([sys.executable, "-P", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert not {Path(place).parent for place in json.loads(result.stdout)} & {ROOT}
    assert not [name for name in folders if (ROOT / name / "__init__.py").exists()]
    assert sys.path[0] != str(ROOT)


def test_every_requirement_is_pinned_in_constraints() -> None:
    extras = PROJECT["project"]["optional-dependencies"].values()
    requirements = [*PROJECT["project"]["dependencies"], *(line for lines in extras for line in lines)]
    asked = {normal(re.split(r"[\[<>=;! ]", line)[0]) for line in requirements} - {"inferlab"}
    assert asked <= set(pins())


def test_constraints_are_exact_and_name_no_place_to_download_from() -> None:
    text = (ROOT / "constraints.txt").read_text()
    assert "://" not in text
    for line in text.splitlines():
        assert re.match(r"#|[\w.-]+==[\w.+!]+(; platform_system == 'Linux')?$", line), line


def test_every_pin_installs_on_the_first_python_we_support() -> None:
    """A pin that asks for 3.11.5 sends pip on Debian 12 (3.11.2) through every version of everything."""
    first = PROJECT["project"]["requires-python"].removeprefix(">=") + ".0"
    installed = {normal(d.name): d.metadata.get("Requires-Python") for d in metadata.distributions()}
    asked = {name: installed[name] for name in pins() if installed.get(name)}
    assert not {name: wanted for name, wanted in asked.items() if not SpecifierSet(wanted).contains(first)}
    assert len(asked) > 100


def test_doctor_and_pyproject_agree_on_the_supported_versions() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert f"torch>={doctor.TORCH[0]}.{doctor.TORCH[1]}" in PROJECT["project"]["dependencies"]
    assert extras["triton"][0].startswith(f"triton>={doctor.TRITON[0]}.{doctor.TRITON[1]};")
    assert f"LOWEST_TORCH = {doctor.TORCH}" in (ROOT / ".ci" / "installing.py").read_text()
    assert doctor.release(pins()["torch"]) >= doctor.TORCH
    assert doctor.release(pins()["triton"]) >= doctor.TRITON


def test_the_manifest_is_the_one_that_is_installed() -> None:
    assert chapters_root() == ROOT / "chapters"
    assert load_course().chapters


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==([^;\s]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return {normal(name): version for name, version in found}
