"""Which checks see a mutant does not depend on a course's secret: all cases of a lab with another one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from grader.labs.percent_file import percent_lab
from grader.proofs.proof import cases
from tests.labs.proving import folder, prove
from tests.labs.turns import draw_of, due, was_tried
from tests.warm import Warm


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("source", due(), ids=lambda path: path.parent.name)
def test_the_reference_and_a_drawn_mutant_do_the_same_with_other_secrets(
    source: Path, warm: Warm, say: Callable[[str], None]
) -> None:
    """One drawn mutant of a lab that was tried in full before; of another one is not known to hold."""
    if not was_tried(source):
        say(f"{source.parent.name}: never tried in full with other secrets; make test-all does")
        return
    found = sorted(case.name for case in cases(percent_lab(source), folder(source)))
    drawn = found[int(draw_of(source)[:8], 16) % len(found)]
    prove(warm, "chance", source, str(folder(source)), "--only", ",".join({"reference", drawn} - {"stub"}))
