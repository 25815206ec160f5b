"""No check pays a function that zeroes its tensors and empties its lists: what it expects does not come from what a
learner may change."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.labs.turns import SOURCES
from tests.warm import Warm


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.parent.name)
def test_no_check_passes_whose_function_zeroed_the_tensors_it_was_given(source: Path, warm: Warm) -> None:
    done = warm.run(("-m", "tests.labs.zeroed", str(source)), os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert any(found.values()), "no check gave a tensor, a list or a dict to any function"
    passed = {function: [check for check, right in checks.items() if right] for function, checks in found.items()}
    assert {function: checks for function, checks in passed.items() if checks} == {}
