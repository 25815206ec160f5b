"""What the compiler makes of a kernel's source: hints for the caches that it keeps, and types as in the interpreter."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl

from reference_impl import kernels
from tests.kernels.compile_table import TABLE
from tests.warm import Warm

FILES = sorted(Path(next(iter(kernels.__path__))).glob("*.py"))
HINTS = ("eviction_policy", "cache_modifier")


def functions_with_hints() -> Iterator[tuple[str, str, str, str]]:
    """(file, function, its source, hint)."""
    for file in FILES:
        source = file.read_text("utf-8")
        for function in ast.walk(ast.parse(source)):
            if isinstance(function, ast.FunctionDef):
                text = ast.get_source_segment(source, function) or ""
                given = [word for word in ast.walk(function) if isinstance(word, ast.keyword) and word.arg in HINTS]
                for hint in sorted({str(ast.literal_eval(word.value)) for word in given}):
                    yield file.stem, function.name, text, hint


def kernels_that_call(module: str, function: str) -> set[str]:
    """Names in the compile table, of the function itself or of those that call it."""
    names = {function.strip("_")}
    for file in FILES:
        for other in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(other, ast.FunctionDef):
                calls = (node.func for node in ast.walk(other) if isinstance(node, ast.Call))
                if any(isinstance(called, ast.Name) and called.id == function for called in calls):
                    names.add(other.name.strip("_"))
    return names


def test_a_hint_is_in_a_source_only_where_the_compiler_keeps_it_on_the_gpu_that_stands_beside_it() -> None:
    """Copies that are sent ahead lose it; whoever writes `.cg, found on sm_90` has looked."""
    table, found = json.loads(TABLE.read_text()), 0
    for module, function, text, hint in functions_with_hints():
        named = re.search(rf"{re.escape(hint)}, found on (\w+)", text)
        assert named, f"{module}.{function}: say `{hint}, found on` which GPU of the compile table"
        ends = tuple(f": {name}, {named[1]}" for name in kernels_that_call(module, function))
        lines = [name for name, entry in table.items() if name.endswith(ends) and hint in entry["hints"]]
        assert lines, f"{module}.{function}: no line of the compile table has {hint} on {named[1]}"
        found += 1
    assert found == 3, "partial sums of splits: gemm, fused_linear, paged_decode"


# ------------------------------------------------------------ half precision and float arguments

WIDE, HALF, FLOAT = "float32", "as loaded", "a float argument"
Kind = Any  # one of these, None, or a tuple of them


def joined(*kinds: Kind) -> Kind:
    """Of a result. float32 widens; a float argument gives way to a block."""
    flat = [kind for kind in kinds if not isinstance(kind, tuple)]
    return next((kind for kind in (WIDE, HALF, FLOAT) if kind in flat), None)


def merged(one: dict[str, Kind], other: dict[str, Kind]) -> dict[str, Kind]:
    """After a branch or a loop: what may be in half precision counts as such."""
    names = one | other
    return {name: HALF if HALF in (one.get(name), other.get(name)) else names[name] for name in names}


class Types:
    """What a kernel's values are, as far as its text says: of what is loaded nothing is known until `.to`."""

    def __init__(self, function: Any, kinds: dict[str, Kind]):
        self.function = getattr(function, "fn", function)
        self.names, self.found, self.result = dict(kinds), set[str](), None
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(self.function))).body
        assert isinstance(tree, ast.FunctionDef)
        self.parameters = [argument.arg for argument in tree.args.args]
        self.first_line = inspect.getsourcelines(self.function)[1]
        self.run(tree.body)

    def run(self, body: list[ast.stmt]) -> None:
        for statement in body:
            match statement:
                case ast.If(test=test, body=then, orelse=otherwise):
                    self.kind(test)
                    before = dict(self.names)
                    self.run(then)
                    after, self.names = self.names, before
                    self.run(otherwise)
                    self.names = merged(after, self.names)
                case ast.For(iter=over, body=inside) | ast.While(test=over, body=inside):
                    self.kind(over)
                    for _ in range(2):
                        before = dict(self.names)
                        self.run(inside)
                        self.names = merged(before, self.names)
                case ast.Assign(targets=targets, value=value):
                    found = self.kind(value)
                    for target in targets:
                        self.put(target, found)
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    self.put(target, self.kind(value))
                case ast.AugAssign(target=target, op=op, value=value):
                    self.put(target, self.meeting(statement, op, self.kind(target), self.kind(value)))
                case ast.Return(value=ast.expr() as value):
                    self.result = self.kind(value)
                case ast.Expr(value=value):
                    self.kind(value)

    def put(self, target: ast.expr, kind: Kind) -> None:
        if isinstance(target, ast.Tuple):
            kinds = kind if isinstance(kind, tuple) else [kind] * len(target.elts)
            for element, one in zip(target.elts, kinds, strict=True):
                self.put(element, one)
        elif isinstance(target, ast.Name):
            self.names[target.id] = kind

    def meeting(self, node: ast.AST, op: ast.operator | None, *kinds: Kind) -> Kind:
        """A quotient of half precision is float32 in both."""
        if HALF in kinds and FLOAT in kinds and WIDE not in kinds and not isinstance(op, ast.Div):
            self.found.add(f"{self.function.__name__}, line {self.first_line + getattr(node, 'lineno', 1) - 1}")
        return joined(*kinds)

    def kind(self, node: ast.expr) -> Kind:
        match node:
            case ast.Name(id=name):
                return self.names.get(name)
            case ast.Tuple(elts=elements):
                return tuple(map(self.kind, elements))
            case ast.BinOp(left=left, op=op, right=right):
                return self.meeting(node, op, self.kind(left), self.kind(right))
            case ast.Call():
                return self.call(node)
            case ast.Subscript(value=value) | ast.UnaryOp(operand=value):
                return self.kind(value)
            case ast.IfExp(test=test, body=one, orelse=other):
                self.kind(test)
                return joined(self.kind(one), self.kind(other))
            case ast.NamedExpr(target=target, value=value):
                self.put(target, found := self.kind(value))
                return found
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.kind(child)
        return None

    def call(self, node: ast.Call) -> Kind:
        kinds, name = [self.kind(argument) for argument in node.args], ast.unparse(node.func)
        by_name = {keyword.arg: self.kind(keyword.value) for keyword in node.keywords}
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            self.kind(node.func.value)
            return of_dtype(given["dtype"] if "dtype" in given else node.args[0])
        if name in ("tl.zeros", "tl.full", "tl.cast"):
            return of_dtype(given["dtype"] if "dtype" in given else node.args[-1])
        if name in ("tl.load", "tl.dot"):
            return HALF if name == "tl.load" else WIDE
        if name in ("tl.maximum", "tl.minimum", "tl.clamp", "tl.fma", "tl.math.fma"):
            return self.meeting(node, None, *kinds, *by_name.values())
        if name == "tl.where":
            return self.meeting(node, None, *kinds[1:], by_name.get("x"), by_name.get("y"))
        helper = self.function.__globals__.get(name)
        if isinstance(node.func, ast.Name) and inspect.isfunction(getattr(helper, "fn", None)):
            parameters = list(inspect.signature(helper.fn).parameters)
            inner = Types(helper, dict(zip(parameters, kinds, strict=False)) | by_name)
            self.found |= inner.found
            return inner.result
        own = [self.kind(node.func.value)] if isinstance(node.func, ast.Attribute) else []
        return joined(*own, *kinds, *by_name.values())


def of_dtype(node: ast.expr) -> Kind:
    name = ast.unparse(node)
    return WIDE if name == "tl.float32" else None if name.startswith(("tl.int", "tl.uint")) else HALF


def narrow_products(function: Any, floats: list[str]) -> list[str]:
    """Where a block that may be in half precision meets a float argument. Compiled that is float32. The interpreter
    passes the argument as a number of Python's, which takes on the type of the block."""
    return sorted(Types(function, dict.fromkeys(floats, FLOAT)).found)


@triton.jit
def _helper(block, factor):
    return block * factor


@triton.jit
def _wrong(x, out, scale, N: tl.constexpr):
    at = tl.arange(0, N)
    block = tl.load(x + at)
    early = block * scale
    wide = block.to(tl.float32) * scale
    if N > 4:
        block = block.to(tl.float32)
    late = tl.trans(block)[None, :] + scale
    half = wide.to(x.dtype.element_ty)
    half *= 2 * scale
    one = other = tl.load(x + at)
    other *= scale if N > 8 else 1.0
    added = tl.fma(one, scale, wide.to(tl.float16)) + tl.clamp(one, 0.0, max=scale)
    named = _helper(factor=scale, block=one)
    tl.store(out + at, early + late + half + _helper(tl.load(x), scale) + tl.maximum(half, scale) + added + named)


@triton.jit
def _right(x, out, scale, N: tl.constexpr):
    at = tl.arange(0, N)
    block = tl.load(x + at)
    wide = block.to(tl.float32) * scale
    score = tl.dot(block, block) * scale
    score *= scale
    wide += tl.fma(tl.cast(block, tl.float32), scale, block.to(dtype=tl.float32) * scale) + _helper(block, factor=2.0)
    tl.store(out + at, wide + score + _helper(wide, scale) + block / scale + block * 2.0)


_LINES = "early =|late =|half \\*=|tl.maximum|other \\*=|added ="


def test_the_lint_finds_half_precision_that_meets_a_float_argument() -> None:
    source, first = inspect.getsourcelines(_wrong.fn)
    wrong = [first + i for i, line in enumerate(source) if re.search(_LINES, line)]
    helper = inspect.getsourcelines(_helper.fn)[1] + 2
    expected = [f"_helper, line {helper}", *(f"_wrong, line {line}" for line in wrong)]
    assert narrow_products(_wrong, ["scale"]) == sorted(expected)
    assert narrow_products(_right, ["scale"]) == []


FLOATS = """
import json, torch
from reference_impl.kernels.architectures import ARCHITECTURES
from tests.kernels.calls import CALLS
from reference_impl.kernels.launch import recording

floats = {}
with recording(ARCHITECTURES["sm_90"]) as launches:
    for call in CALLS.values():
        call(torch.bfloat16)
for launch in launches:
    names = floats.setdefault(f"{launch.kernel.fn.__module__} {launch.kernel.__name__}", [])
    names += [name for name, type in launch.types.items() if type == "fp32" and name not in names]
print(json.dumps(floats))
"""


@pytest.mark.usefixtures("warm")
def test_no_kernel_multiplies_half_precision_by_a_float_argument(warm: Warm) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = warm.run(("-c", FLOATS), environment)
    assert done.returncode == 0, done.stderr
    floats = json.loads(done.stdout)
    assert sum(map(bool, floats.values())) >= 6, "attention, LoRA, norms, products with norms, rotation"
    for kernel, names in floats.items():
        module, name = kernel.split()
        assert narrow_products(vars(importlib.import_module(module))[name], names) == []
