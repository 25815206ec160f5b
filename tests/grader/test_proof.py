"""The proof of a lab finds wrong declarations, unkilled checks, and checks that depend on the way of running."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TOY = Path(__file__).parent / "toy_lab"

SCRIPT = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from grader.labs.lab import lab_from_notebook
from grader.labs.lab_source import solution_notebook
from grader.isolation.launcher import Launcher
from grader.proofs.proof import kill_matrix, problems, prove
source, folder = Path(sys.argv[1]), Path(sys.argv[2])
lab = lab_from_notebook(solution_notebook(source), source.parent.name, source.stem)
with Launcher(insecure=True) as launcher:
    outcomes = prove(lab, folder, launcher)
print(kill_matrix(lab, outcomes))
print(json.dumps(problems(lab, outcomes, num_mutants=1, num_variants=1)))
"""


def prove(source: Path, folder: Path) -> list[str]:
    """Problems of a lab, found in a process of its own, because the proof forks."""
    command = [sys.executable, "-P", "-c", SCRIPT, str(source), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    problems: list[str] = json.loads(done.stdout.splitlines()[-1])
    return problems


def test_the_toy_lab_is_proven() -> None:
    assert prove(TOY / "solutions" / "01_toy" / "toy.py", TOY / "proof" / "01_toy") == []


def test_what_is_wrong_with_a_lab_is_said(tmp_path: Path) -> None:
    source = tmp_path / "01_toy" / "toy.py"
    source.parent.mkdir()
    text = (TOY / "solutions" / "01_toy" / "toy.py").read_text()
    # A check that looks at the type of a learner's object passes directly and not through the examiner.
    source.write_text(
        text.replace(
            "assert len(w) == 0,", 'assert "Window" in str(w) and "other" not in str(w), "type"\nassert len(w) == 0,'
        )
    )
    for kind in ("variants", "mutants"):
        (tmp_path / kind).mkdir()
    header = "# fault: nothing at all.\n# trap: unknown\n# fails: check_calls\n\n"
    cell = '# %% nbgrader={"grade_id": "apply_all"}\n'
    body = "    for t in tokens:\n        window.append(model(t[None]))\n    return window.mean()\n"
    right = "def apply_all(model, tokens, window):\n" + body
    (tmp_path / "mutants" / "right.py").write_text(header + cell + right)
    (tmp_path / "mutants" / "again.py").write_text(header + cell + right)
    (tmp_path / "variants" / "wrong.py").write_text(cell + "def apply_all(model, tokens, window):\n    return 5\n")
    found = "\n".join(prove(source, tmp_path))
    for expected in (
        "reference reference: check_len is passed directly, failed through the examiner",
        "mutant right: passes check_calls, which it should fail",
        "variant wrong: fails check_calls unexpectedly",
        "no mutant fails check_window",
        "the trap 'window' in the text has no mutant",
        "the text has no trap 'unknown'",
        "mutants again and right have the same fault",
        "mutants again and right have the same submission",
    ):
        assert expected in found


FEW = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from grader.labs.lab import lab_from_notebook
from grader.labs.lab_source import solution_notebook
from grader.isolation.launcher import Launcher
from grader.proofs.proof import problems, prove
source, folder = Path(sys.argv[1]), Path(sys.argv[2])
lab = lab_from_notebook(solution_notebook(source), source.parent.name, source.stem)
with Launcher(insecure=True) as launcher:
    outcomes = prove(lab, folder, launcher, few=True)
found = [[o.case.kind, bool(o.direct), bool(o.proxied), sorted(o.failed)] for o in outcomes]
print(json.dumps([found, problems(lab, outcomes, num_mutants=1, num_variants=1)]))
"""


def test_a_few_mutants_fail_every_check_between_them_and_all_else_is_tried() -> None:
    folder = TOY / "proof" / "01_toy"
    command = [sys.executable, "-P", "-c", FEW, str(TOY / "solutions" / "01_toy" / "toy.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    outcomes, problems = json.loads(done.stdout.splitlines()[-1])
    assert problems == []
    mutants = [outcome for outcome in outcomes if outcome[0] == "mutant"]
    tried = [failed for _, direct, _, failed in mutants if direct]
    assert 1 <= len(tried) < len(mutants)
    assert set().union(*tried) == {"check_window", "check_len", "check_calls"}
    assert sum(examined for _, _, examined, _ in mutants) == 1
    assert all(direct and examined for kind, direct, examined, _ in outcomes if kind != "mutant")
