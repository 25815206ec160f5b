"""No small slip in a lab's solution passes its checks: a sample of mechanical mutants here, all with the slow tests."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from grader.labs.lab import load_lab
from grader.proofs.mechanical import SURVIVORS, harmless
from grader.proofs.mutator import mutants
from tests.labs.proof_record import ROOT, SOURCES, path_of, record, this_commit
from tests.warm import Warm

GREEN = "refs/inferlab/green"  # tests/selection
EACH_LAB = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.parent.name)
SAMPLE, FEW = 20, 4  # mutants of the lab whose turn it is or whose own files changed; of another


def folder(source: Path) -> Path:
    return Path(__file__).parent / source.parent.name


def prove(warm: Warm, source: Path, *arguments: str) -> None:
    # A process of its own: the proof forks, which a test worker with threads must not.
    words = ("-m", "grader.proofs.mechanical", str(source.with_suffix(".ipynb")), str(folder(source)), *arguments)
    done = warm.run(words, os.environ)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_DIR")}
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    except OSError:
        return subprocess.CompletedProcess(command, 128, "")


def its_turn() -> Path:
    """The lab whose turn it is at this commit; outside of git, the first."""
    counted = git("rev-list", "--count", "--first-parent", "HEAD")
    return SOURCES[int(counted.stdout or "0") % len(SOURCES)] if counted.returncode == 0 else SOURCES[0]


def has_changed(source: Path) -> bool:
    """Whether the lab's own files did since the last commit that passed `make test` here, or else the one before."""
    own = [f"{top}/{source.parent.name}" for top in ("solutions", "labs", "tests/labs")]
    if git("rev-parse", "--git-dir").returncode:
        return False
    green = git("rev-parse", "--verify", "--quiet", GREEN)
    since = green.stdout.strip() if green.returncode == 0 else "HEAD~1"
    new = git("ls-files", "--others", "--exclude-standard", "--", *own).stdout
    return bool(new) or git("diff", "--quiet", since, "--", *own).returncode != 0


@EACH_LAB
def test_every_lab_was_tried_with_all_mutants_and_lists_those_that_do_no_harm(source: Path) -> None:
    assert path_of(source, "mechanical").is_file(), "make test-all records it"
    assert (folder(source) / SURVIVORS).is_file()
    lab = load_lab(source.with_suffix(".ipynb"))
    made = {mutant.key for cell in lab.of_kind("solution") for mutant in mutants(cell)}
    assert sorted(set(harmless(folder(source))) - made) == [], "the solution has no such mutant any more"


@pytest.mark.timeout(3000)
@EACH_LAB
def test_of_a_sample_of_mutants_none_passes_that_does_harm(
    source: Path, warm: Warm, say: Callable[[str], None]
) -> None:
    """Drawn by the commit: many of the lab whose turn it is or whose own files changed, a few of another, so that a
    change of the grader or of the engine is tried with each lab."""
    due, seed = source == its_turn() or has_changed(source), this_commit()
    sample = SAMPLE if due else FEW
    say(f"{source.parent.name}: {sample} mechanical mutants, drawn by {seed[:12]}")
    prove(warm, source, "--sample", str(sample), "--seed", seed)


@pytest.mark.slow
@pytest.mark.timeout(9000)
@EACH_LAB
def test_of_all_mutants_none_passes_that_does_harm(source: Path, warm: Warm) -> None:
    prove(warm, source)
    if os.environ.get("INFERLAB_RECORD"):
        record(source, "mechanical")
