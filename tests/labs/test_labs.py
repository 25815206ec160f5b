"""Every lab proves itself: stub, reference, variants and mutants, run directly and through the examiner."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.labs.proof_record import SOURCES, plan, record, this_commit
from tests.warm import Warm

EACH_LAB = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.parent.name)


def prove(warm: Warm, source: Path, *arguments: str) -> str:
    # A process of its own: the proof forks, which a test worker with threads must not.
    folder = Path(__file__).parent / source.parent.name
    done = warm.run(("-m", "grader.proofs.proof", str(source), str(folder), *arguments), os.environ)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(3000)
@EACH_LAB
def test_every_case_fails_exactly_the_checks_it_must(source: Path, warm: Warm, say: Callable[[str], None]) -> None:
    """Both ways: all cases, or a sample where all were tried before (`proof_record.py`)."""
    planned = plan(source, "proof", this_commit())
    say(planned.why)
    prove(warm, source, *(["--sample", planned.sample] if planned.sample else []))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@EACH_LAB
def test_every_mutant_fails_exactly_the_checks_it_must(source: Path, warm: Warm) -> None:
    prove(warm, source)
    if os.environ.get("INFERLAB_RECORD"):
        record(source, "proof")
