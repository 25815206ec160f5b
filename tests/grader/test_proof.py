"""The proof of a lab finds wrong declarations, unkilled checks, and checks that depend on the way of running."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.warm import Warm

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
proofs = []
with Launcher(insecure=True) as launcher:
    for source, folder, sample in json.loads(sys.argv[1]):
        source = Path(source)
        lab = lab_from_notebook(solution_notebook(source), source.parent.name, source.stem)
        outcomes = prove(lab, Path(folder), launcher, sample=sample)
        print(kill_matrix(lab, outcomes))
        found = [[o.case.kind, bool(o.direct), bool(o.proxied), sorted(o.failed)] for o in outcomes]
        proofs.append([problems(lab, outcomes, num_mutants=1, num_variants=1), found])
print(json.dumps(proofs))
"""


class Proof(NamedTuple):
    """found: of every case its kind, whether it went directly and through the examiner, and the checks it failed."""

    problems: list[str]
    found: list[tuple[str, bool, bool, list[str]]]


def prove(warm: Warm, *labs: tuple[Path, Path, str | None]) -> list[Proof]:
    """Proofs of labs (source, folder, sample), in one process that is not this one, because a proof forks."""
    jobs = [(str(source), str(folder), sample) for source, folder, sample in labs]
    done = warm.run(("-c", SCRIPT, json.dumps(jobs)), os.environ)
    assert done.returncode == 0, done.stderr
    return [Proof(*proof) for proof in json.loads(done.stdout.splitlines()[-1])]


@pytest.fixture(scope="module")
def proofs(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> dict[str, Proof]:
    """Of the toy lab, of a sample of it, and of one with much that is wrong."""
    source, folder = TOY / "solutions" / "01_toy" / "toy.py", TOY / "proof" / "01_toy"
    wrong = tmp_path_factory.mktemp("wrong")
    made = prove(warm, (source, folder, None), (source, folder, "seed"), (faulty_lab(wrong), wrong, None))
    return dict(zip(("toy", "sample", "wrong"), made, strict=True))


def faulty_lab(folder: Path) -> Path:
    source = folder / "01_toy" / "toy.py"
    source.parent.mkdir()
    text = (TOY / "solutions" / "01_toy" / "toy.py").read_text()
    # A check that looks at the type of a learner's object passes directly and not through the examiner.
    source.write_text(
        text.replace(
            "assert len(w) == 0,", 'assert "Window" in str(w) and "other" not in str(w), "type"\nassert len(w) == 0,'
        )
    )
    for kind in ("variants", "mutants"):
        (folder / kind).mkdir()
    header = "# fault: nothing at all.\n# trap: unknown\n# fails: check_calls\n\n"
    cell = '# %% nbgrader={"grade_id": "apply_all"}\n'
    body = "    for t in tokens:\n        window.append(model(t[None]))\n    return window.mean()\n"
    right = "def apply_all(model, tokens, window):\n" + body
    (folder / "mutants" / "right.py").write_text(header + cell + right)
    (folder / "mutants" / "again.py").write_text(header + cell + right)
    (folder / "variants" / "wrong.py").write_text(cell + "def apply_all(model, tokens, window):\n    return 5\n")
    return source


def test_the_toy_lab_is_proven(proofs: dict[str, Proof]) -> None:
    assert proofs["toy"].problems == []


def test_what_is_wrong_with_a_lab_is_said(proofs: dict[str, Proof]) -> None:
    found = "\n".join(proofs["wrong"].problems)
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


def test_a_sample_has_mutants_that_fail_every_check_between_them_and_all_that_is_correct(
    proofs: dict[str, Proof],
) -> None:
    problems, outcomes = proofs["sample"]
    assert problems == []
    mutants = [outcome for outcome in outcomes if outcome[0] == "mutant"]
    tried = [failed for _, direct, _, failed in mutants if direct]
    assert 1 <= len(tried) < len(mutants)
    assert set().union(*tried) == {"check_window", "check_len", "check_calls"}
    assert sum(examined for _, _, examined, _ in mutants) == 1
    assert all(direct for kind, direct, _, _ in outcomes if kind != "mutant")
    assert sum(examined for kind, _, examined, _ in outcomes if kind == "variant") == 1
    assert all(examined for kind, _, examined, _ in outcomes if kind in ("stub", "reference"))


def by_chance(warm: Warm, source: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    words = ("-m", "grader.proofs.chance", str(source), str(folder), "--secrets", "autumn,winter")
    return warm.run(words, os.environ)


def test_a_check_that_sees_a_fault_with_some_secrets_only_is_named(tmp_path: Path, warm: Warm) -> None:
    made = TOY / "solutions" / "01_toy" / "toy.py"
    folder = TOY / "proof" / "01_toy"
    done = by_chance(warm, made, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "with autumn, winter: as they must be" in done.stdout
    source = tmp_path / "01_toy" / "toy.py"
    source.parent.mkdir()
    drawn = 'assert float(torch.rand(1, generator=rng("luck"))) < 0.5, "luck"  # 0.61 and 0.39\n'
    source.write_text(made.read_text().replace("assert len(w) == 0,", drawn + "assert len(w) == 0,"))
    done = by_chance(warm, source, folder)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("reference reference: fails")]
    assert len(lines) == 1, done.stdout  # with one of the two secrets
    assert "with the secret" in lines[0]
    assert "unexpectedly" in lines[0]
