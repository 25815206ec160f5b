"""All proofs of a lab, the slow tests of it: every mutant, convention and slip, where `make test` has a sample.

A lab has a file of its own, which takes the tests from here. So a run that is killed goes on with the next lab, and
what a lab's tests needed says nothing of another lab's.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.labs.proving import folder, prove
from tests.labs.shadows import NOTHING, SOLVED, check_shadows
from tests.labs.turns import SOURCES
from tests.warm import Warm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(9000)]
__all__ = [
    "pytestmark", "source", "test_a_wrong_value_of_any_option_fails_its_checks",
    "test_every_mutant_fails_exactly_the_checks_it_must", "test_no_check_passes_whose_function_zeroed_its_arguments",
    "test_no_mutant_is_found_by_luck", "test_of_all_mechanical_mutants_none_passes_that_does_harm",
    "test_results_of_given_helpers_that_were_replaced_count_for_nothing",
    "test_with_drawn_options_every_case_fails_exactly_the_checks_it_must",
    "test_with_each_option_the_reference_passes_and_a_public_solution_loses_its_checks",
]  # fmt: skip

# Checks of a composition, which must be what the learner's own parts say; the parts have checks of their own.
COMPOSED = ("check_metrics",)


@pytest.fixture(scope="module")
def source(request: pytest.FixtureRequest) -> Path:
    """The lab's source: of test_05_flash_attention.py that in the folder 05_flash_attention."""
    [found] = [path for path in SOURCES if request.path.stem == f"test_{path.parent.name}"]
    return found


def test_every_mutant_fails_exactly_the_checks_it_must(source: Path, warm: Warm) -> None:
    prove(warm, "proof", source, str(folder(source)))


def test_no_mutant_is_found_by_luck(source: Path, warm: Warm) -> None:
    """Which checks see it does not depend on a course's secret: all cases with another one."""
    prove(warm, "chance", source, str(folder(source)))


def test_of_all_mechanical_mutants_none_passes_that_does_harm(source: Path, warm: Warm) -> None:
    prove(warm, "mechanical", source.with_suffix(".ipynb"), str(folder(source)))


def test_with_each_option_the_reference_passes_and_a_public_solution_loses_its_checks(source: Path, warm: Warm) -> None:
    prove(warm, "convention_proof", source)


def test_with_drawn_options_every_case_fails_exactly_the_checks_it_must(source: Path, warm: Warm) -> None:
    prove(warm, "convention_proof", source, str(folder(source)))


def test_a_wrong_value_of_any_option_fails_its_checks(source: Path, warm: Warm) -> None:
    prove(warm, "convention_proof", source, str(folder(source)), "--values")


def test_results_of_given_helpers_that_were_replaced_count_for_nothing(source: Path, warm: Warm) -> None:
    done = warm.run(("-m", "tests.labs.shadows", str(source)), os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == {NOTHING, SOLVED}
    check_shadows(found)


def test_no_check_passes_whose_function_zeroed_its_arguments(source: Path, warm: Warm) -> None:
    done = warm.run(("-m", "tests.labs.zeroed", str(source)), os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert any(found.values()), "no check gave a tensor, a list or a dict to any function"
    passed = {
        function: [check for check, right in checks.items() if right and check not in COMPOSED]
        for function, checks in found.items()
    }
    assert not any(passed.values()), {function: checks for function, checks in passed.items() if checks}
