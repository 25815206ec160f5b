"""The instructor's guide in grader/README.md: its commands exist with the options it uses, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from grader.commands.grade_cli import app
from grader.results.result import STATUSES

GUIDE = Path(__file__).parents[2] / "grader" / "README.md"
TEXT = GUIDE.read_text("utf-8")
PART = TEXT[TEXT.index("## For instructors") : TEXT.index("## For developers")]
GROUP: Any = typer.main.get_command(app)


def fenced(text: str) -> list[str]:
    """Lines in code blocks, without the prompt."""
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    return [line.strip().removeprefix("$ ") for block in blocks for line in block.split("\n")]


def commands() -> list[str]:
    """Every `inferlab grade ...` a reader could type: in code blocks at a line's start, and between backticks."""
    inline = re.findall(r"(?<!`)`(inferlab grade [^`\n]*)`", PART)
    found = [line for line in [*fenced(PART), *inline] if line.startswith("inferlab grade ")]
    return sorted(set(found))


@pytest.mark.parametrize("line", commands())
def test_a_command_of_the_guide_exists_with_its_options_and_arguments(line: str) -> None:
    _, _, name, *words = shlex.split(line)
    command = GROUP.commands.get(name)
    assert command is not None, f"{line}: there is no command {name}; there are {', '.join(GROUP.commands)}"
    try:
        command.make_context(name, words)
    except Exception as error:  # typer brings its own copy of click, whose classes have no public name
        pytest.fail(f"{line}: {error}")


def test_the_guide_shows_every_command_of_an_instructor() -> None:
    shown = {line.split()[2] for line in commands()}
    assert shown == set(GROUP.commands)


def test_ten_numbered_commands_lead_from_doctor_to_export() -> None:
    steps = re.findall(r"^\*\*(\d+)\. .*?\$ inferlab grade (\S+)", PART, re.MULTILINE | re.DOTALL)
    assert [int(number) for number, _ in steps] == list(range(1, 11))
    assert (steps[0][1], steps[-1][1]) == ("doctor", "export")


def test_links_and_pictures_of_the_guide_exist() -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", TEXT) + re.findall(r'src="([^"]+)"', TEXT)
    assert targets
    for target in targets:
        path, _, anchor = target.partition("#")
        assert not path or (GUIDE.parent / path).exists(), target
        if anchor and not path:
            titles = re.findall(r"^#+ (.+)$", TEXT, re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, target


def test_pictures_are_small_and_used() -> None:
    pictures = sorted((GUIDE.parent / "images").iterdir())
    assert pictures
    for path in pictures:
        assert f"images/{path.name}" in TEXT
        assert path.stat().st_size < 120_000


def test_every_status_is_explained() -> None:
    table = PART[PART.index("### What a status means") : PART.index("### What the sandbox holds")]
    assert [status for status in STATUSES if f"`{status}" not in table] == []
