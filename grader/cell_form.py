"""The form of a notebook's cells, given by the builders to chapters and labs alike: what is folded, what is left out.

A folded cell shows its output and, on a click, its source. JupyterLab reads `jupyter.source_hidden`, Colab `cellView`.
"""

from __future__ import annotations

import io
import re
import tokenize
from typing import Any

LONGEST = 25  # lines of a code cell that is not folded
FOLDED: dict[str, Any] = {"jupyter": {"source_hidden": True}, "cellView": "form"}

# Comments to tools that hold a source, not to a reader: to formatter, linter, type checker, coverage.
_TO_TOOLS = re.compile(
    r"\s*#\s*(?:fmt:\s*\w+|ruff:[^#]*|noqa\b[^#]*|type:\s*ignore[^#]*|isort:[^#]*|pragma:[^#]*)", re.I
)


def num_lines(source: str) -> int:
    """Lines of a cell as a reader counts them."""
    return len(source.strip("\n").splitlines())


def without_tool_comments(source: str) -> str:
    """`source` without `# fmt: skip` and the like. Strings that contain such words stay as they are.

    Raises SyntaxError where `source` is not Python.
    """
    lines = source.split("\n")
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except tokenize.TokenError as error:
        raise SyntaxError(*error.args) from None
    dropped = set()
    for token in tokens:
        if token.type != tokenize.COMMENT:
            continue
        kept = _TO_TOOLS.sub("", token.string)
        if kept == token.string:
            continue
        row, column = token.start
        lines[row - 1] = (lines[row - 1][:column] + kept.strip()).rstrip()
        if not lines[row - 1]:
            dropped.add(row - 1)
    return "\n".join(line for i, line in enumerate(lines) if i not in dropped)
