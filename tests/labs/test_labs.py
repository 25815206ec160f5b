"""Every lab proves itself: stub, reference, variants and mutants, run directly and through the examiner."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import pytest

from grader.labs.lab import load_lab
from tests.labs.test_shadows import assert_nothing_gained_and_nothing_lost
from tests.labs.turns import SOURCES, draw_of, due
from tests.warm import Warm

EACH_LAB = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.parent.name)


def folder(source: Path) -> Path:
    return Path(__file__).parent / source.parent.name


def prove(warm: Warm, source: Path) -> None:
    # A process of its own: the proof forks, which a test worker with threads must not.
    done = warm.run(("-m", "grader.proofs.proof", str(source), str(folder(source))), os.environ)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


@EACH_LAB
def test_no_check_needs_a_name_that_another_check_made(source: Path) -> None:
    """After a crash a check runs in a namespace without them, and a mutant is tried by some of the checks alone."""
    made: dict[str, str] = {}
    for cell in load_lab(source.with_suffix(".ipynb")).of_kind("check"):
        tree = ast.parse(cell.source)
        nodes = list(ast.walk(tree))
        stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        stored |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        stored |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        used = {node.id for node in nodes if isinstance(node, ast.Name)} - stored
        known = _given(source)
        assert {name: made[name] for name in sorted(used & set(made) - known)} == {}, cell.grade_id
        made |= dict.fromkeys(stored, cell.grade_id)


def _given(source: Path) -> set[str]:
    """Names that cells before the checks make or import."""
    cells = [c for c in load_lab(source.with_suffix(".ipynb")).of_kind("code") if c.where in ("both", "examiner")]
    nodes = [node for cell in cells for statement in ast.parse(cell.source).body for node in ast.walk(statement)]
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return names | {alias.asname or alias.name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)
                    for alias in node.names}  # fmt: skip


@pytest.mark.timeout(9000)
@EACH_LAB
def test_a_sample_of_cases_fails_exactly_the_checks_it_must(source: Path, warm: Warm) -> None:
    """Both ways. The same examiner tries what `shadows.py` submits: what earns nothing, and by turns with a variant
    what is all solved. Of a lab that is not due, these two alone."""
    sample = (str(folder(source)), draw_of(source)) if source in due() else ()
    done = warm.run(("-m", "tests.labs.shadows", str(source), *sample), os.environ)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_nothing_gained_and_nothing_lost(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.timeout(9000)
@EACH_LAB
def test_every_mutant_fails_exactly_the_checks_it_must(source: Path, warm: Warm) -> None:
    prove(warm, source)
