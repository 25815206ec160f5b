"""The texts in a learner's code. A separator that a learner made up can be in no list of a check: it is in the code."""

from __future__ import annotations

import ast
import contextlib
import linecache
from collections.abc import Callable, Iterable, Iterator
from typing import Any

MAX_TEXTS, MAX_LENGTH = 100, 500
MAX_TIMES = 1000


def texts_in(sources: Iterable[str]) -> list[str]:
    """The strings, and the bytes that are UTF-8, in these cells, each once; no docstring, nothing long."""
    found: dict[str, None] = {}
    for source in sources:
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):  # a cell that cannot run
            found |= dict.fromkeys(_texts(ast.parse(source)))
    return list(found)[:MAX_TEXTS]


def _texts(tree: ast.AST) -> Iterator[str]:
    bodies = [body for node in ast.walk(tree) if isinstance(body := getattr(node, "body", None), list) and body]
    docstrings = {id(body[0].value) for body in bodies if isinstance(body[0], ast.Expr)}
    for node in ast.walk(tree):
        text = _value(node)
        if text and len(text) <= MAX_LENGTH and id(node) not in docstrings:
            yield text


def _value(node: ast.AST) -> str:
    """The text of a constant, or of one that is multiplied; empty for anything else."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(node.right, ast.Constant):
        times = node.right.value
        return _value(node.left) * times if isinstance(times, int) and 0 < times <= MAX_TIMES else ""
    value = node.value if isinstance(node, ast.Constant) else None
    if isinstance(value, bytes):
        return value.decode("utf-8", "ignore")
    return value if isinstance(value, str) else ""


def texts_here(name: str, namespace: dict[str, Any], cell_of: Callable[[Any, dict[str, Any]], str | None]) -> list[str]:
    """The texts in the cell that defines `name` and in what it uses, in a notebook."""
    sources: dict[str, None] = {}
    seen: set[str] = set()

    def follow(used: str) -> None:
        if used in seen or used not in namespace:
            return
        seen.add(used)
        value = namespace[used]
        filename = cell_of(value, namespace)
        source = "".join(linecache.getlines(filename)) if filename else ""
        if isinstance(value, (str, bytes)):
            source = f"{used} = {value!r}"
        if source and source not in sources:
            sources[source] = None
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Name):
                    follow(node.id)

    follow(name)
    return texts_in(sources)
