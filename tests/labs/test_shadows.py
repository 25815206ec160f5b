"""A learner who takes the names of what a lab gives earns nothing by it, and loses nothing.

Each lab's examiner that proves a sample of it (`test_labs.py`) tries both; here they are graded as a course would.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.labs.shadows import NOTHING, SOLVED
from tests.labs.turns import SOURCES
from tests.warm import Warm


def assert_nothing_gained_and_nothing_lost(found: dict[str, dict[str, str]]) -> None:
    """found: what `shadows.py` prints."""
    assert [check for check, status in found[NOTHING].items() if status == "passed"] == []
    assert found[NOTHING]
    if SOLVED in found:  # a sample may have drawn another correct solution
        assert {check: status for check, status in found[SOLVED].items() if status != "passed"} == {}
        assert found[NOTHING].keys() == found[SOLVED].keys()


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.parent.name)
def test_results_of_given_helpers_that_were_replaced_count_for_nothing(source: Path, warm: Warm) -> None:
    done = warm.run(("-m", "tests.labs.shadows", str(source)), os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == {NOTHING, SOLVED}
    assert_nothing_gained_and_nothing_lost(found)
