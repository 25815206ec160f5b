"""A learner who takes the names of what a lab gives earns nothing by it, and loses nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.labs.proof_record import SOURCES
from tests.warm import Warm


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.parent.name)
def test_results_of_given_helpers_that_were_replaced_count_for_nothing(source: Path, warm: Warm) -> None:
    done = warm.run(("-m", "tests.labs.shadows", str(source)), os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [check for check, status in found["nothing written"].items() if status == "passed"] == []
    assert {check: status for check, status in found["all solved"].items() if status != "passed"} == {}
