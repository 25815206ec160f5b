"""Mechanical mutants of a lab's solution: every small slip of the hand that still compiles, made by rules.

    for mutant in mutants(cell): ...     # a solution cell, of which what stands between BEGIN and END SOLUTION changes

A rule looks at one node of the syntax tree and says what may stand there instead. Rules are named in `RULES`; what they
have in common with mutation testing elsewhere (DeMillo, Lipton and Sayward 1978; Offutt et al. 1996) is comparisons,
bounds, operands, constants, conditions and statements, and what a course about tensors adds is names: dtypes,
reductions, ways to allocate. Two sources that compile to the same bytecode are the same, so that a mutant is never only
spelling.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType

from grader.labs.lab import Cell

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"

COMPARISONS: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">="), ast.LtE: ("<", ">"), ast.Gt: (">=", "<="), ast.GtE: (">", "<"), ast.Eq: ("!=",),
    ast.NotEq: ("==",), ast.Is: ("is not",), ast.IsNot: ("is",), ast.In: ("not in",), ast.NotIn: ("in",),
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], tuple[str, ...]] = {
    ast.Add: ("-",), ast.Sub: ("+",), ast.Mult: ("/", "+"), ast.Div: ("*",), ast.FloorDiv: ("*", "/"), ast.Mod: ("//",),
    ast.Pow: ("*",), ast.MatMult: ("*",), ast.BitAnd: ("|",), ast.BitOr: ("&",), ast.LShift: (">>",),
    ast.RShift: ("<<",),
}  # fmt: skip
# A name that is easily taken for another, both ways where both make sense.
NAMES = {
    "min": "max", "max": "min", "amin": "amax", "amax": "amin", "argmin": "argmax", "argmax": "argmin",
    "minimum": "maximum", "maximum": "minimum", "any": "all", "all": "any", "sum": "mean", "mean": "sum",
    "sorted": "list", "reversed": "list", "append": "extend", "popleft": "pop", "empty": "ones", "zeros": "ones",
    "ones": "zeros", "zeros_like": "ones_like", "ones_like": "zeros_like", "inf": "e", "float": "half",
    "double": "float", "float64": "float32", "float32": "float16", "int64": "int32", "int32": "int16",
    "floor": "ceil", "ceil": "floor", "exp": "exp2", "log": "log2", "cumsum": "cumprod", "triu": "tril", "tril": "triu",
    "setdefault": "get", "update": "setdefault",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change of one solution cell. line: of the cell, from 1. before, after: the lines that changed, stripped.

    number: which of the mutants of this cell that read the same, from 1.
    """

    cell: str
    function: str
    line: int
    rule: str
    before: str
    after: str
    source: str
    number: int = 1

    @property
    def key(self) -> str:
        """The name of the mutant in a list of survivors: it stays the same when other lines move."""
        which = "" if self.number == 1 else f" (number {self.number})"
        return f"{self.cell}, {self.function}: {self.before} -> {self.after}{which}"


@dataclass(frozen=True)
class Change:
    """A change of the text. new: what stands in place of `node`."""

    node: ast.AST
    new: str


class _Source:
    """A cell's text and tree. Columns of the tree count bytes."""

    def __init__(self, text: str):
        self.text, self.tree, self.raw = text, ast.parse(text), text.encode()
        self.starts = [0]
        for line in text.split("\n"):
            self.starts.append(self.starts[-1] + len(line.encode()) + 1)

    def of(self, node: ast.AST) -> str:
        return ast.get_source_segment(self.text, node) or ast.unparse(node)

    def changed(self, change: Change) -> str:
        node: ast.expr = change.node  # type: ignore[assignment]
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        first, last = self.starts[node.lineno - 1], self.starts[node.end_lineno - 1]
        return (
            self.raw[: first + node.col_offset] + change.new.encode() + self.raw[last + node.end_col_offset :]
        ).decode()


Rule = Callable[[ast.AST, _Source], Iterator[Change]]


def _by_one(node: ast.AST, of: _Source) -> Iterator[Change]:
    """Yields one more and one less; for a constant `_constant` does it."""
    if not isinstance(node, ast.Constant | ast.Slice | ast.Tuple | ast.JoinedStr):
        yield Change(node, f"({of.of(node)} + 1)")
        yield Change(node, f"({of.of(node)} - 1)")


def _comparison(node: ast.AST, of: _Source) -> Iterator[Change]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        for other in COMPARISONS[type(node.ops[0])]:
            yield Change(node, f"({of.of(node.left)} {other} {of.of(node.comparators[0])})")


def _bound(node: ast.AST, of: _Source) -> Iterator[Change]:
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE):
        yield from _by_one(node.comparators[-1], of)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        for argument in node.args:
            yield from _by_one(argument, of)
    if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Tuple | ast.Slice):
        yield from _by_one(node.slice, of)
    if isinstance(node, ast.Slice):
        for bound in filter(None, (node.lower, node.upper)):
            yield from _by_one(bound, of)
            yield Change(bound, "")
        if node.upper is None and node.lower is not None:
            yield Change(node, f"{of.of(node)}-1")
        if node.lower is None:
            yield Change(node, f"1{of.of(node)}")


def _constant(node: ast.AST, of: _Source) -> Iterator[Change]:
    if not isinstance(node, ast.Constant):
        return
    value = node.value
    if isinstance(value, bool):
        yield Change(node, str(not value))
    elif isinstance(value, int):
        yield Change(node, str(value + 1))
        yield Change(node, str(value - 1) if value else "(-1)")
    elif isinstance(value, float):
        yield Change(node, repr(2 * value + (not value)))
        yield Change(node, repr(value / 2) if value else "(-1.0)")


def _arithmetic(node: ast.AST, of: _Source) -> Iterator[Change]:
    if isinstance(node, ast.BinOp):
        left, right = of.of(node.left), of.of(node.right)
        for other in ARITHMETIC.get(type(node.op), ()):
            yield Change(node, f"({left} {other} {right})")
        if isinstance(node.op, ast.FloorDiv):
            yield Change(node, f"(-(-({left}) // {right}))")
    elif isinstance(node, ast.AugAssign):
        for other in (*ARITHMETIC.get(type(node.op), ()), ""):
            yield Change(node, f"{of.of(node.target)} {other}= {of.of(node.value)}")
    elif isinstance(node, ast.UnaryOp):
        yield Change(node, f"({of.of(node.operand)})")


def _operand(node: ast.AST, of: _Source) -> Iterator[Change]:
    """Yields changes that leave out one side of a sum or product, or swap both."""
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        left, right = of.of(node.left), of.of(node.right)
        yield Change(node, f"({left})")
        yield Change(node, f"({right})")
        if not isinstance(node.op, ast.Add | ast.Mult | ast.BitAnd | ast.BitOr):
            sign = next(symbol for symbol in _SYMBOLS if isinstance(node.op, symbol))
            yield Change(node, f"({right} {_SYMBOLS[sign]} {left})")


_SYMBOLS: dict[type[ast.operator], str] = {
    ast.Sub: "-", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**", ast.MatMult: "@", ast.LShift: "<<",
    ast.RShift: ">>",
}  # fmt: skip


def _condition(node: ast.AST, of: _Source) -> Iterator[Change]:
    if isinstance(node, ast.BoolOp):
        word, other = (" and ", " or ") if isinstance(node.op, ast.And) else (" or ", " and ")
        parts = [f"({of.of(value)})" for value in node.values]
        yield Change(node, f"({other.join(parts)})")
        for at, value in enumerate(node.values):
            yield Change(value, f"(not {parts[at]})")
            yield Change(node, f"({word.join(parts[:at] + parts[at + 1 :])})")
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield Change(node.test, f"(not ({of.of(node.test)}))")
    if isinstance(node, ast.If | ast.IfExp):
        yield Change(node.test, "True")
        yield Change(node.test, "False")
    if isinstance(node, ast.comprehension):
        for test in node.ifs:
            yield Change(test, f"(not ({of.of(test)}))")
            yield Change(test, "True")


def _name(node: ast.AST, of: _Source) -> Iterator[Change]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in NAMES:
        yield Change(node, NAMES[node.id])
    if isinstance(node, ast.Attribute) and node.attr in NAMES:
        yield Change(node, f"{of.of(node.value)}.{NAMES[node.attr]}")


def _call(node: ast.AST, of: _Source) -> Iterator[Change]:
    """Yields changes of a call: two arguments swapped, a keyword dropped, x.clone() or list(x) to x."""
    if not isinstance(node, ast.Call):
        return
    given, named = node.args, node.keywords
    for at in range(len(given) - 1):
        swapped = [*given[:at], given[at + 1], given[at], *given[at + 2 :]]
        yield Change(node, ast.unparse(ast.Call(node.func, swapped, named)))
    for at in range(len(named)):
        yield Change(node, ast.unparse(ast.Call(node.func, given, named[:at] + named[at + 1 :])))
    if isinstance(node.func, ast.Attribute):
        yield Change(node, f"({of.of(node.func.value)})")
    elif len(given) == 1 and not named:
        yield Change(node, f"({of.of(given[0])})")


def _loop(node: ast.AST, of: _Source) -> Iterator[Change]:
    if isinstance(node, ast.Break):
        yield Change(node, "continue")
    if isinstance(node, ast.Continue):
        yield Change(node, "break")
    if isinstance(node, ast.For | ast.While):
        last = node.body[-1]
        yield Change(last, f"{of.of(last)}\n{' ' * last.col_offset}break")
    if isinstance(node, ast.For):
        yield Change(node.iter, f"list({of.of(node.iter)})[::-1]")
        yield Change(node.iter, f"list({of.of(node.iter)})[1:]")


def _value(node: ast.AST, of: _Source) -> Iterator[Change]:
    """Yields changes by which an assigned or returned value is off by one."""
    if isinstance(node, ast.Assign | ast.Return) and isinstance(node.value, ast.Name | ast.BinOp | ast.Call):
        yield from _by_one(node.value, of)


def _statement(node: ast.AST, of: _Source) -> Iterator[Change]:
    if not isinstance(node, ast.stmt) or isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Raise):
        return
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if not is_text:
        yield Change(node, "pass")


RULES: dict[str, Rule] = {
    "comparison": _comparison, "bound": _bound, "constant": _constant, "arithmetic": _arithmetic, "operand": _operand,
    "condition": _condition, "name": _name, "call": _call, "loop": _loop, "value": _value, "statement": _statement,
}  # fmt: skip


def mutants(cell: Cell) -> list[Mutant]:
    """All mutants of a solution cell, in the order of its nodes. Raises SyntaxError for a cell that is no Python.

    Left out are those that do not compile, or to the bytecode of the cell or of an earlier mutant, and those of an
    error's words, which are no part of a contract.
    """
    source, found = _Source(cell.source), list[Mutant]()
    inside, seen = _solution_lines(cell.source), {_bytecode(cell.source)}
    owners = [n for n in ast.walk(source.tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    words = {id(part) for n in ast.walk(source.tree) if isinstance(n, ast.Raise) for part in ast.walk(n)}
    for node in ast.walk(source.tree):
        if id(node) in words:
            continue
        for rule, changes in RULES.items():
            for change in changes(node, source):
                first, last = change.node.lineno, change.node.end_lineno  # type: ignore[attr-defined]
                if not {first, last} <= inside:
                    continue
                text = source.changed(change)
                code = _bytecode(text)
                if code is None or code in seen:
                    continue
                seen.add(code)
                name = ".".join(n.name for n in owners if n.lineno <= first <= (n.end_lineno or 0))
                more = text.count("\n") - cell.source.count("\n")
                before, after = (_joined(part, first, end) for part, end in ((cell.source, last), (text, last + more)))
                alike = sum((m.function, m.before, m.after) == (name, before, after) for m in found)
                found.append(Mutant(cell.grade_id, name, first, rule, before, after, text, alike + 1))
    return found


def _solution_lines(text: str) -> set[int]:
    """Numbers of the lines between the marks."""
    found, within = set(), False
    for number, line in enumerate(text.split("\n"), 1):
        within = (within or BEGIN in line) and END not in line
        if within:
            found.add(number)
    return found


def _joined(text: str, first: int, last: int) -> str:
    return "\n".join(line.strip() for line in text.split("\n")[first - 1 : last])


def _bytecode(text: str) -> tuple[object, ...] | None:
    """What makes two sources do the same: all but places in the source. None: it does not compile."""
    try:
        return _of_code(compile(text, "", "exec", dont_inherit=True))
    except (SyntaxError, ValueError):
        return None


def _of_code(code: CodeType) -> tuple[object, ...]:
    constants = tuple(_of_code(c) if isinstance(c, CodeType) else (type(c), repr(c)) for c in code.co_consts)
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
