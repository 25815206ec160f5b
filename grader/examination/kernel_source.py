"""A learner's Triton kernel as source that may cross: the kernel, what it calls, and nothing that is no kernel.

A kernel is graded by itself: its text goes to a process in which no other code of the learner's runs. So that the text
can do nothing but compute, it is limited to what a kernel consists of: `tl`, arithmetic, conditions, loops, and other
`@triton.jit` functions. The rules say what is refused, and where.
"""

from __future__ import annotations

import ast
import linecache
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# Functions of `tl`, besides the dtypes. No printing, no inline assembly, no atomics, no pointers made of numbers.
OPERATIONS = frozenset(
    "abs advance arange argmax argmin associative_scan assume broadcast broadcast_to cast cat cdiv ceil clamp cos "
    "cumprod cumsum div_rn dot erf exp exp2 expand_dims fdiv flip floor fma full gather interleave join load log "
    "log2 make_block_ptr make_tensor_descriptor max max_constancy max_contiguous maximum min minimum multiple_of "
    "num_programs permute program_id range ravel reduce reshape rsqrt sigmoid sin softmax sort split sqrt sqrt_rn "
    "static_assert static_range store sum swizzle2d trans umulhi view where xor_sum zeros zeros_like".split()
)
TYPES = frozenset(
    "int1 int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 float8e4nv float8e5 "
    "constexpr".split()
)
METHODS = frozenset(  # that Triton's interpreter knows
    "to trans reshape view sum max min argmax argmin abs cumsum sigmoid softmax sort load store broadcast_to "
    "expand_dims permute cast".split()
)
ATTRIBUTES = frozenset("dtype element_ty T shape value type numel".split())
BUILTINS = frozenset("range min max abs float int bool len".split())
MODULES = {"triton": frozenset(("cdiv", "next_power_of_2")), "tl": OPERATIONS | TYPES | {"math"}}
STATEMENTS = (
    ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For, ast.While, ast.If, ast.Pass, ast.Break, ast.Continue,
    ast.Return, ast.Assert,
)  # fmt: skip
EXPRESSIONS = (
    ast.Name, ast.Constant, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Tuple, ast.List,
    ast.Subscript, ast.Slice, ast.Call, ast.keyword, ast.Attribute, ast.expr_context, ast.operator, ast.unaryop,
    ast.boolop, ast.cmpop,
)  # fmt: skip


class NotAKernel(ValueError):
    """What is written is no kernel: says what was expected, what stands there, and in which line."""


@dataclass(frozen=True)
class Part:
    """A statement at the top of a cell. text: the whole cell's."""

    cell: str
    text: str
    node: ast.stmt


Find = Callable[[str], "Part | None"]


def is_jitted(node: ast.AST) -> bool:
    """Whether this is a function under `@triton.jit`, without arguments, or `@jit`."""
    return isinstance(node, ast.FunctionDef) and any(
        ast.unparse(decorator) in ("triton.jit", "jit") for decorator in node.decorator_list
    )


def in_cells(cells: Sequence[tuple[str, str]]) -> Find:
    """Finds names in cells (source, name), as running them in this order would leave them."""
    found: dict[str, Part] = {}
    for source, cell in cells:
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        for node in tree.body:
            found |= {name: Part(cell, source, node) for name in _bound(node)}
    return found.get


def in_namespace(namespace: dict[str, Any]) -> Find:
    """Finds names in a notebook that runs: where a kernel was written is read from the kernel."""

    def find(name: str) -> Part | None:
        value = namespace.get(name)
        function = getattr(value, "fn", value)  # under triton.jit
        code = getattr(function, "__code__", None)
        if code is None:
            number = getattr(value, "value", value)  # of a tl.constexpr
            if not isinstance(number, int | float):
                return None
            text = f"{name} = tl.constexpr({_literal(number)})"
            return Part("constants", text, ast.parse(text).body[0])
        source = "".join(linecache.getlines(code.co_filename))
        cell = code.co_filename.removeprefix("<").removesuffix(">").removeprefix("cell ")
        return in_cells([(source, cell)])(name)

    return find


def _literal(number: float) -> str:
    return repr(number) if number == number and abs(number) != float("inf") else f'float("{number}")'


def _bound(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def kernel_source(name: str, find: Find, arguments: Sequence[str], constants: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs (cell, text) of kernel `name` and what it uses; other lines are blank, so that line numbers are the cell's.

    arguments, constants: the parameters that it must have, in this order, the latter annotated with tl.constexpr.
    Raises NotAKernel, and NotImplementedError for the released stub.
    """
    try:
        return _checked(name, find, arguments, constants)
    except NotAKernel:
        raise
    except RecursionError:
        raise NotAKernel(f"{name} is nested too deeply to be read") from None
    except (ValueError, OverflowError) as error:  # an integer that Python does not write out, or is beyond any float
        raise NotAKernel(f"{name} cannot be read: {error}") from None


def _checked(name: str, find: Find, arguments: Sequence[str], constants: Sequence[str]) -> list[tuple[str, str]]:
    parts = _parts(name, find)
    first = parts[0].node
    assert isinstance(first, ast.FunctionDef)
    expected = [*arguments, *(f"{constant}: tl.constexpr" for constant in constants)]
    got = [a.arg + (": tl.constexpr" if a.annotation is not None else "") for a in first.args.args]
    if got != expected:
        raise NotAKernel(
            f"the lab fixes the parameters of {name}: expected ({', '.join(expected)}), got ({', '.join(got)})"
        )
    return _texts(parts)


def _parts(name: str, find: Find) -> list[Part]:
    """The kernel, then what it uses."""
    todo, used = [name], dict[str, Part]()
    while todo:
        one = todo.pop()
        part = find(one)
        if part is None:
            raise NotAKernel(f"expected a kernel {one} under @triton.jit in a cell, found none")
        if isinstance(part.node, ast.Assign | ast.AnnAssign) and one != name:
            used[one] = _constant(part, one)
            continue
        if not isinstance(part.node, ast.FunctionDef) or not is_jitted(part.node):
            raise NotAKernel(f"{one} is no kernel: expected a function under @triton.jit")
        if _is_stub(part.node):
            raise NotImplementedError(f"{one} is not written yet")
        used[one] = part
        more = _Rules(part, find).names()
        todo += [other for other in more if other not in used and other not in todo]
    return list(used.values())


def _texts(parts: list[Part]) -> list[tuple[str, str]]:
    """Per cell its text with all but the parts' lines left blank; constants first.

    What is left is parsed again and must be the parts and nothing else: a line can hold more than one statement.
    """
    cells: dict[tuple[str, str], list[Part]] = {}
    for part in sorted(parts, key=lambda part: isinstance(part.node, ast.FunctionDef)):
        cells.setdefault((part.cell, part.text), []).append(part)
    texts = []
    for (cell, text), found in cells.items():
        lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        kept = [""] * len(lines)
        found.sort(key=lambda part: part.node.lineno)
        for part in found:
            node = part.node
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            kept[first - 1 : node.end_lineno] = lines[first - 1 : node.end_lineno]
        texts.append((cell, "\n".join(kept)))
        try:
            left = [ast.dump(node) for node in ast.parse(texts[-1][1]).body]
        except (SyntaxError, ValueError):
            left = []
        if left != [ast.dump(part.node) for part in found]:
            raise NotAKernel(f"cell {cell}: expected each kernel, and each number that it uses, on lines of its own")
    return texts


def _is_stub(node: ast.FunctionDef) -> bool:
    return any(
        isinstance(part, ast.Raise) and part.exc is not None and "NotImplementedError" in ast.unparse(part.exc)
        for part in node.body
    )


def _constant(part: Part, name: str) -> Part:
    """A number that a kernel uses, as `NAME = tl.constexpr(number)` and nothing else of what stands in its line.

    It stays in the line in which it was written.
    """
    node, number = part.node, None
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    if len(targets) == 1 and isinstance(targets[0], ast.Name):
        number = _number(getattr(node, "value", None))
    if number is None:
        raise NotAKernel(f"{name} is used in a kernel: expected NAME = number or NAME = tl.constexpr(number)")
    text = "\n" * (node.lineno - 1) + f"{name} = tl.constexpr({_literal(number)})"
    return Part(f"{part.cell}, {name}", text, ast.parse(text).body[0])


def _number(node: ast.AST | None) -> float | None:
    """The value of a number, with signs and + - * /, in float() or tl.constexpr(); None for anything else."""
    match node:
        case ast.Constant(value=bool() | int() | float() as number):
            return number
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand) if (value := _number(operand)) is not None:
            return -value if isinstance(node.op, ast.USub) else value
        case ast.BinOp(left=left, right=right) if type(node.op) in _EXACT:
            first, second = _number(left), _number(right)
            try:
                return None if first is None or second is None else _EXACT[type(node.op)](first, second)
            except (ArithmeticError, ValueError):
                return None
        case ast.Call(func=function, args=[ast.Constant(value=str() as text)], keywords=[]):
            known = text.lower().lstrip("+-") in ("inf", "infinity")
            return float(text) if ast.unparse(function) == "float" and known else None
        case ast.Call(func=function, args=[argument], keywords=[]):
            return _number(argument) if ast.unparse(function) in ("tl.constexpr", "float") else None
    return None


_EXACT: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


class _Rules:
    """One kernel against the rules."""

    def __init__(self, part: Part, find: Find):
        assert isinstance(part.node, ast.FunctionDef)
        self.node, self.find, self.where = part.node, find, f"kernel {part.node.name}"
        arguments = part.node.args
        if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.posonlyargs:
            raise self.wrong(part.node, "expected plain parameters", "* or **")
        self.local = {argument.arg for argument in arguments.args}
        self.local |= {
            each.id for each in ast.walk(part.node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
        }

    def wrong(self, node: ast.AST, expected: str, came: str) -> NotAKernel:
        line = getattr(node, "lineno", self.node.lineno)
        return NotAKernel(f"{self.where}, line {line}: {expected}, got {came}. A graded kernel computes with tl, "
                          "arithmetic, loops and other kernels")  # fmt: skip

    def names(self) -> list[str]:
        """The names that it uses and that other cells must give. Raises NotAKernel."""
        free: dict[str, None] = {}
        node = self.node
        says_none = isinstance(node.returns, ast.Constant) and node.returns.value is None
        if getattr(node, "type_params", None) or not (node.returns is None or says_none):
            raise self.wrong(node, "expected a kernel without types, or -> None", "-> or [...]")
        if len(node.decorator_list) != 1:
            raise self.wrong(node, "expected @triton.jit and no other decorator", "more")
        for default in node.args.defaults:
            if not isinstance(default, ast.Constant):
                raise self.wrong(default, "expected a number for a default", ast.unparse(default)[:40])
        for annotation in [a.annotation for a in node.args.args if a.annotation is not None]:
            if ast.unparse(annotation) not in ("tl.constexpr", "constexpr", "'tl.constexpr'"):
                raise self.wrong(annotation, "expected tl.constexpr or no annotation", ast.unparse(annotation)[:40])
        body = [each for statement in node.body for each in self.walk(statement)]
        for each in body:
            if isinstance(each, ast.stmt) and not isinstance(each, STATEMENTS):
                raise self.wrong(each, "expected a statement of a kernel", type(each).__name__.lower())
            if isinstance(each, ast.Name):
                self.check_name(each, free)
            elif isinstance(each, ast.Attribute):
                self.check_attribute(each)
            elif isinstance(each, ast.Constant):
                self.check_constant(each)
            elif isinstance(each, ast.Call):
                self.check_call(each)
            elif not isinstance(each, STATEMENTS + EXPRESSIONS):
                raise self.wrong(each, "expected an expression of a kernel", type(each).__name__)
        return list(free)

    def walk(self, statement: ast.stmt) -> list[ast.AST]:
        """All nodes below, without annotations of assignments, which are not evaluated as values."""
        if isinstance(statement, ast.AnnAssign) and statement.annotation is not None:
            if ast.unparse(statement.annotation) not in ("tl.constexpr", "int", "float"):
                raise self.wrong(
                    statement, "expected tl.constexpr as annotation", ast.unparse(statement.annotation)[:40]
                )
            statement = ast.copy_location(ast.Assign([statement.target], statement.value or ast.Constant(0)), statement)
        return list(ast.walk(statement))

    def check_name(self, node: ast.Name, free: dict[str, None]) -> None:
        if node.id.startswith("__"):
            raise self.wrong(node, "expected a name without __", node.id)
        if isinstance(node.ctx, ast.Store):
            if node.id in MODULES or node.id in BUILTINS:
                raise self.wrong(node, "expected another name", f"{node.id} = ...")
        elif isinstance(node.ctx, ast.Load) and node.id not in self.local | BUILTINS | set(MODULES):
            if self.find(node.id) is None:
                raise self.wrong(node, "expected a name of this kernel, another kernel or a number", node.id)
            free[node.id] = None

    def check_attribute(self, node: ast.Attribute) -> None:
        text = ast.unparse(node)
        if isinstance(node.ctx, ast.Store):
            raise self.wrong(node, "expected a name on the left", text[:60])
        if isinstance(node.value, ast.Name) and node.value.id in MODULES and node.value.id not in self.local:
            known = node.attr in MODULES[node.value.id]
        elif text.startswith("tl.math."):
            known = node.attr in OPERATIONS
        else:
            known = node.attr in ATTRIBUTES | METHODS
        if not known:
            instead = f" (write tl.{node.attr}(...))" if node.attr in OPERATIONS else ""
            raise self.wrong(node, "expected an operation that a graded kernel may use", text[:60] + instead)

    def check_constant(self, node: ast.Constant) -> None:
        if not isinstance(node.value, bool | int | float | str | type(None)):
            raise self.wrong(node, "expected a number", type(node.value).__name__)

    def check_call(self, node: ast.Call) -> None:
        if not isinstance(node.func, ast.Name | ast.Attribute):
            raise self.wrong(node, "expected the name of an operation before (", ast.unparse(node.func)[:60])
        if any(isinstance(argument, ast.Starred) for argument in node.args) or any(
            k.arg is None for k in node.keywords
        ):
            raise self.wrong(node, "expected plain arguments", "* or **")
