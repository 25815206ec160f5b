"""No small slip in a lab's solution passes its checks: a sample of mechanical mutants here, all with the slow tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from grader.labs.lab import load_lab
from grader.proofs.mechanical import SURVIVORS, harmless
from grader.proofs.mutator import mutants
from tests.labs.proving import folder, prove
from tests.labs.turns import SOURCES, draw_of, due
from tests.warm import Warm

EACH_LAB = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.parent.name)
SAMPLE = 10


@EACH_LAB
def test_every_lab_lists_the_mutants_that_do_no_harm(source: Path) -> None:
    assert (folder(source) / SURVIVORS).is_file()
    lab = load_lab(source.with_suffix(".ipynb"))
    made = {mutant.key for cell in lab.of_kind("solution") for mutant in mutants(cell)}
    assert sorted(set(harmless(folder(source))) - made) == [], "the solution has no such mutant any more"


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("source", due(), ids=lambda path: path.parent.name)
def test_of_a_sample_of_mutants_none_passes_that_does_harm(
    source: Path, warm: Warm, say: Callable[[str], None]
) -> None:
    seed = draw_of(source)
    say(f"{source.parent.name}: {SAMPLE} mechanical mutants, drawn by {seed[:12]}")
    notebook, cases = source.with_suffix(".ipynb"), str(folder(source))
    prove(warm, "mechanical", notebook, cases, "--sample", str(SAMPLE), "--seed", seed)
