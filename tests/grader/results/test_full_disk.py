"""A disk that is really full, a small one: `run` says so in one line, records no zero, and loses nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

# argv: the course, the folder that is a small disk, KiB that are left on it ...
PROGRAM = """
import json, os, shutil, sys
from pathlib import Path
from typer.testing import CliRunner
from grader.commands.grade_cli import app
from grader.courses.scores import scores

course, disk, said = Path(sys.argv[1]), Path(sys.argv[2]), []
for left in map(int, sys.argv[3:]):
    root = Path(shutil.copytree(course, disk / "course"))
    with open(disk / "full", "wb") as file:
        state = os.statvfs(disk)
        file.write(bytes(state.f_bavail * state.f_frsize - 1024 * left))
    outcomes = []
    for _ in range(2):
        done = CliRunner().invoke(app, ["run", "01", "--course", str(root)])
        outcomes.append((done.exit_code, done.output))
        (disk / "full").unlink(missing_ok=True)
    points = {score.student: score.score for score in scores(root, "01_toy") if score.score is not None}
    said.append((left, outcomes, points))
    shutil.rmtree(root)
print(json.dumps(said))
"""


def test_a_full_disk_is_said_in_one_line_gives_nobody_zero_and_the_next_run_records_all(
    bwrap: None, course: Path, released_course: Callable[[Path], Path], tmp_path: Path
) -> None:
    from grader.courses.scores import scores

    expected = {score.student: score.score for score in scores(course, "01_toy") if score.score is not None}
    shutil.copy(released_course(tmp_path / "new") / "gradebook.db", course)  # before any grade
    (course / "results" / "01_toy" / "recorded.log").unlink()
    shutil.rmtree(course / "autograded")
    disk = tmp_path / "disk"
    disk.mkdir()
    words = ["bwrap", "--dev-bind", "/", "/", "--size", str(4 << 20), "--tmpfs", str(disk)]
    left = [str(left) for left in (0, 4, 8, 16, 24, 40, 60, 100)]
    done = subprocess.run([*words, sys.executable, "-c", PROGRAM, str(course), str(disk), *left],
                          capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])  # fmt: skip
    assert done.stderr == ""
    full = 0
    for left_kib, [(status, output), again], points in json.loads(done.stdout):
        if status:
            lines = output.splitlines()
            assert len(lines) == 1, f"{left_kib} KiB left: {output}"
            assert lines[0].startswith("inferlab: error: ")
            assert "full" in lines[0]
            full += 1
        assert " of 6" not in output, f"{left_kib} KiB left: {output}"
        assert again[0] == 0, again[1]
        assert points == expected, f"{left_kib} KiB left"
    assert full >= 4
