"""A cell's source: as Python, as a stub, as a learner sees it, and the names that it binds."""

from __future__ import annotations

import ast
import re

from grader.examination.notebook_file import plain_text
from grader.labs.lab import STUB, Cell, split_hidden, without_helps

DEFINITIONS, IMPORTS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef), (ast.Import, ast.ImportFrom)


def plain_python(source: str) -> str:
    """A notebook cell as Python: magics, shell lines and questions become `pass`, a cell magic makes it a comment.

    Cell magics under which the cell runs as it is, such as `%%time`, do not: what such a cell defines counts.
    """
    source = re.sub(r"^\s*%%(time|capture|prun)\b.*", "", source)
    if re.match(r"\s*%%", source):
        return "\n".join("# " + line for line in source.split("\n"))
    if not has_magic(source):
        return source
    return re.sub(r"^([ \t]*)([%!?].*|[\w.]+\?{1,2}[ \t]*)$", r"\1pass  # \2", source, flags=re.MULTILINE)


def has_magic(source: str) -> bool:
    try:
        compile(source, "<cell>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    return False


def stub_source(source: str) -> str:
    """A solution cell with every region between BEGIN SOLUTION and END SOLUTION replaced by the stub."""
    lines, inside = [], False
    for line in source.split("\n"):
        if "### BEGIN SOLUTION" in line:
            inside = True
            indent = line[: len(line) - len(line.lstrip())]
            lines += [indent + stub for stub in STUB.split("\n")]
        elif "### END SOLUTION" in line:
            inside = False
        elif not inside:
            lines.append(line)
    return "\n".join(lines)


def is_stub(source: str | None, cell: Cell) -> bool:
    return source is not None and source.strip() == stub_source(cell.source).strip()


def visible(cell: Cell) -> str:
    # In the solution notebook a check still has its hidden part, which the release has not.
    return plain_text(without_helps(split_hidden(cell.source)[0]) if cell.kind == "check" else cell.source)


def is_as_released(source: str, cell: Cell) -> bool:
    return without_helps(source).strip() == visible(cell).strip()


def bound_names(source: str) -> set[str]:
    """Names that Python code binds at top level: functions, classes, imports, `attend = torch.compile(mine)`."""
    return {name for node in statements(source) for name in bound_by(node)}


def bound_by(node: ast.stmt) -> set[str]:
    if isinstance(node, DEFINITIONS):
        return {node.name}
    if isinstance(node, IMPORTS):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return set()


def statements(source: str) -> list[ast.stmt]:
    """The statements at top level; none where it is not Python."""
    try:
        return ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def first_line(node: ast.stmt) -> int:
    """The first line of a statement, decorators included."""
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
