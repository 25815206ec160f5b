"""A course in which a small class has really been graded: what reports, exports and regrades are tested on."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

TOY = Path(__file__).parents[1] / "toy_lab"
SOURCES, SLUG = TOY / "solutions", "01_toy"

RIGHT = """
class Window:
    def __init__(self, size):
        self.size, self.rows = size, []

    def append(self, x):
        self.rows = [*self.rows, x][-self.size :]

    def mean(self):
        total = self.rows[0].clone()
        for row in self.rows[1:]:
            total = total + row
        return total / len(self.rows)

    def __len__(self):
        return len(self.rows)
"""
APPLY = """
def apply_all(model, tokens, window):
    for i in range(len(tokens)):
        window.append(model(tokens[i : i + 1]))
    return window.mean()
"""
# The same with other names, comments, layout, and the methods in another order.
COPIED = '''
class Window:
    """A window that I wrote myself."""

    def __len__(self):  # how many
        return len(self.kept_vectors)

    def mean(self):
        accumulator = self.kept_vectors[0].clone()

        for vector in self.kept_vectors[1:]:
            accumulator = (accumulator
                           + vector)
        return accumulator / len(self.kept_vectors)

    def append(self, new: torch.Tensor) -> None:
        self.kept_vectors = [*self.kept_vectors, new][-self.capacity :]

    def __init__(self, capacity):
        self.capacity, self.kept_vectors = capacity, []
'''
DEQUE = """
from collections import deque


class Window:
    def __init__(self, size):
        self.kept = deque(maxlen=size)

    def append(self, x):
        self.kept.append(x)

    def mean(self):
        return torch.stack(tuple(self.kept)).mean(dim=0)

    def __len__(self):
        return len(self.kept)
"""
HOSTILE = "</pre><script>alert(1)</script>{{ 7*7 }}\u202e=cmd|'/c calc'!A1\x00\x1b[2J"
DUE = "2026-03-01 23:59 Europe/Berlin"
IN_TIME = datetime(2026, 3, 1, 12, tzinfo=UTC)

# student -> (solution cells, when it came in)
CLASS: dict[str, tuple[dict[str, str], datetime | None]] = {
    "ada": ({"Window": RIGHT, "apply_all": APPLY}, IN_TIME),
    "bob": ({"Window": COPIED, "apply_all": APPLY.replace("i in", "k in").replace("[i : i", "[k : k")}, IN_TIME),
    "cyd": ({"Window": RIGHT.replace("[-self.size :]", ""), "apply_all": APPLY}, IN_TIME),
    "dan": ({"Window": DEQUE, "apply_all": "def apply_all(model, tokens, window):\n    for y in model(tokens):\n"
                                           "        window.append(y[None])\n    return window.mean()"}, IN_TIME),
    "eve": ({"Window": DEQUE.replace("maxlen=size", ""), "apply_all": APPLY}, datetime(2026, 3, 3, 1, tzinfo=UTC)),
    "fay": ({}, IN_TIME),
    "gus": ({"Window": DEQUE.replace("return len(self.kept)", "import os; os._exit(0)"), "apply_all": APPLY}, None),
    "mal": ({"Window": f"print({HOSTILE!r})\nclass Window:\n    def __init__(self, size):\n"
                       f"        raise ValueError({HOSTILE!r})", "apply_all": APPLY}, IN_TIME),
}  # fmt: skip

ROSTER = """\
student id,first name,last name,email,canvas id,sis user id,login,section,participant
ada,Ada,"O""Neil, Jr",ada@example.org,4711,S-9,oneil,A1,77
bob,"=HYPERLINK(""x"")",Bob,+bob@example.org,,,,,
zoe,Zoë,Zander,,,,,,
"""


def inferlab(*arguments: str, ok: bool = True) -> str:
    """What `inferlab grade ...` says, with blanks collapsed."""
    from grader.commands.grade_cli import app

    done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    assert (done.exit_code == 0) == ok, done.output + str(done.exception)
    return " ".join(done.output.split())


@pytest.fixture(scope="session")
def grade() -> Callable[..., str]:
    return inferlab


def hand_in(folder: Path, release: Path, student: str, answers: dict[str, str], when: datetime | None) -> None:
    notebook: dict[str, Any] = json.loads(release.read_text())
    for cell in notebook["cells"]:
        cell["source"] = answers.get(cell["id"], cell["source"])
    path = folder / student / "toy.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(notebook))
    if when is not None:
        os.utime(path, (when.timestamp(), when.timestamp()))


@pytest.fixture(scope="session")
def graded_course(
    bwrap: None, made_once: Callable[[str, Callable[[Path], None]], Path], released_course: Callable[[Path], Path]
) -> Path:
    """Ten students: eight graded, one refused, one who handed nothing in. gus's time is unknown. Do not change it."""
    from grader.courses.misconceptions import write_misconceptions

    def make(folder: Path) -> None:
        root, handed = released_course(folder / "course"), folder / "handed"
        assert write_misconceptions(SOURCES / SLUG / "toy.py", TOY / "proof", root / "misconceptions") == 3
        for student, (answers, when) in CLASS.items():
            hand_in(handed, root / "labs" / SLUG / "toy.ipynb", student, answers, when)
        (handed / "hal.ipynb").write_bytes(b"hello")
        inferlab("collect", "01", str(handed), "--course", str(root))
        for student, (_, when) in CLASS.items():
            if student == "eve":  # a time that costs points has to be more than a file's own
                inferlab("late", "01", "--time", student, f"{when:%Y-%m-%d %H:%M} UTC", "--course", str(root))
            if when is None:
                (root / "submitted" / student / SLUG / "timestamp.txt").unlink()
        inferlab("run", "01", "--workers", "1", "--course", str(root))
        (folder / "roster.csv").write_text(ROSTER, "utf-8")
        inferlab("roster", str(folder / "roster.csv"), "--course", str(root))

    return made_once("graded", make) / "course"


@pytest.fixture
def course(graded_course: Path, tmp_path: Path) -> Path:
    """A copy of that course, for a test that changes something."""
    return Path(shutil.copytree(graded_course, tmp_path / "course"))
