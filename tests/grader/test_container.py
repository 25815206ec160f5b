"""The container's recipe, held against the repository: no engine runs where these tests run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "grader" / "isolation" / "container"


@pytest.fixture(scope="module")
def steps() -> list[tuple[str, str]]:
    text = (RECIPE / "Containerfile").read_text().replace("\\\n", "")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines]


def test_it_uses_only_instructions_that_docker_and_podman_share(steps: list[tuple[str, str]]) -> None:
    assert steps[0][0] == "FROM"
    assert {name for name, _ in steps} <= {"FROM", "ARG", "RUN", "COPY", "WORKDIR", "ENV", "ENTRYPOINT", "CMD"}


def test_it_installs_what_the_sandbox_needs(steps: list[tuple[str, str]]) -> None:
    installed = next(rest for name, rest in steps if name == "RUN" and "apt-get install" in rest)
    assert {"bubblewrap", "python3", "python3-venv"} <= set(shlex.split(installed))


def test_it_installs_the_course_as_the_repository_does(steps: list[tuple[str, str]]) -> None:
    [command] = [rest for name, rest in steps if name == "RUN" and "install.py" in rest]
    script, extra = command.split()[-2:]
    assert (ROOT / script).is_file()
    assert re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    folder = next(rest for name, rest in steps if name == "COPY").split()[1]
    path = next(rest for name, rest in steps if name == "ENV")
    assert path.startswith(f"PATH={folder}/.venv/bin:")


def test_what_it_starts_is_a_command(steps: list[tuple[str, str]]) -> None:
    from typer.testing import CliRunner

    from grader.cli import app

    words = json.loads(dict(steps)["ENTRYPOINT"]) + json.loads(dict(steps)["CMD"])
    assert CliRunner().invoke(app, [*words[1:], "--help"]).exit_code == 0


def test_secrets_and_environments_of_the_checkout_stay_out() -> None:
    ignored = (RECIPE / "Containerfile.dockerignore").read_text().splitlines()
    assert {".git", ".venv"} <= set(ignored)


def test_the_page_says_what_was_tried_and_names_the_rights_the_refusal_names() -> None:
    page = (RECIPE / "README.md").read_text()
    assert "Not tried with a container engine" in page
    from grader.isolation import sandbox

    said = sandbox.diagnosis("bwrap: Creating new namespace failed: Operation not permitted")
    rights = re.search(r"^--cap-add.*$", page, re.MULTILINE)
    assert rights is not None
    if "docker run" in said:  # on machines whose settings explain the refusal, it names those
        assert rights.group() in said
