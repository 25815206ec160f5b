"""Every lab proves itself: stub, reference, variants and mutants, run directly and through the examiner."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "solutions").glob("[0-9]*_*/*.py"))


EACH_LAB = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.parent.name)


def _prove(source: Path, *arguments: str) -> str:
    # A process of its own: the proof forks, which a test worker with threads must not.
    folder = Path(__file__).parent / source.parent.name
    command = [sys.executable, "-P", "-m", "grader.proofs.proof", str(source), str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(3000)
@EACH_LAB
def test_every_case_fails_exactly_the_checks_it_must(source: Path) -> None:
    """Both ways; of the mutants as few as fail every check between them."""
    assert "through the examiner" in _prove(source, "--few")


@pytest.mark.slow
@pytest.mark.timeout(3000)
@EACH_LAB
def test_every_mutant_fails_exactly_the_checks_it_must(source: Path) -> None:
    _prove(source)
