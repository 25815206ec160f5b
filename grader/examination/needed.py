"""Which of a learner's cells a check needs: those that define what it calls, by name, and what these call in turn."""

from __future__ import annotations

import ast

from grader.examination.cell_source import plain_python
from grader.examination.submission import Submission, learner_cells
from grader.labs.lab import Cell, Lab


def needed_cells(lab: Lab, submission: Submission, check: Cell) -> set[str]:
    """Names of the learner's cells, as `learner_cells` names them, that `check` calls, through helpers as well."""
    definitions: dict[str, set[str]] = {}  # a name at the top of a cell -> the names that its definition mentions
    owner: dict[str, str] = {}
    for cell in lab.cells:
        if cell.kind in ("check", "code"):
            definitions |= _definitions(cell.source)
    ours = {cell.grade_id for cell in lab.of_kind("code")}
    for source, name in learner_cells(lab, submission):
        if name not in ours:
            found = _definitions(plain_python(source))
            definitions |= found
            owner |= dict.fromkeys(found, name)
    open_names, seen = _names(_parsed(check.source)), set[str]()
    while open_names:
        name = open_names.pop()
        if name not in seen:
            seen.add(name)
            open_names |= definitions.get(name, set())
    return {owner[name] for name in seen if name in owner}


def _definitions(source: str) -> dict[str, set[str]]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name: _names(node) for node in _parsed(source).body if isinstance(node, kinds)}


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])
