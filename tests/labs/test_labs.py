"""Every lab proves itself: stub, reference, variants and mutants, run directly and through the examiner."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import pytest

from grader.labs.lab import load_lab
from tests.labs.proving import folder
from tests.labs.shadows import check_shadows
from tests.labs.turns import SOURCES, draw_of, due
from tests.warm import Warm

EACH_LAB = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.parent.name)


MAY_CHANGE_OR_GET_NUMBERS = {  # by function, why no check calls it through `unchanging`
    "keep_top_k": "check_kept calls it, and keep_top_p, under another name",
    "keep_top_p": "see keep_top_k",
    "append_slots": "the lab lets it change the table that it is given",
    "paged_attention": "`attended` compares what is given, and check_unused asks for it",
    "more_blocks": "numbers", "expected_tokens": "numbers", "root_key": "texts",
    "online_softmax": "an iterator", "tiled_attention": "memory of the examiner, and numbers",
    **dict.fromkeys(("all_reduce", "one_shot", "row_parallel", "mlp", "embed", "argmax", "dispatch", "combine",
                     "ring_attention"), "on each rank, `on_ranks` calls it through `unchanging`, by its name"),
}  # fmt: skip


def test_each_function_of_a_lab_is_called_by_a_check_that_sees_changed_arguments() -> None:
    """Lists and dicts cross as copies, so that a check which compares its own sees nothing when graded."""
    unseen = set()
    for source in SOURCES:
        cells = load_lab(source.with_suffix(".ipynb")).cells
        text = "\n".join(cell.source for cell in cells if cell.kind != "solution")
        for cell in cells:
            made = ast.parse(cell.source).body if cell.kind == "solution" else []
            functions = [node for node in made if isinstance(node, ast.FunctionDef) and not node.decorator_list]
            unseen |= {node.name for node in functions if f"unchanging({node.name}" not in text}
    assert unseen == set(MAY_CHANGE_OR_GET_NUMBERS)


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
    check_shadows(json.loads(done.stdout.splitlines()[-1]))
