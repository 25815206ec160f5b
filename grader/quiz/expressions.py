"""Expressions of quiz.yaml: arithmetic over `reference_impl.theory` and drawn numbers, and nothing else."""

from __future__ import annotations

import ast
import functools
import importlib
import math
import operator
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any


@functools.cache
def theory_modules() -> tuple[str, ...]:
    """Names of all modules of `reference_impl.theory`: a new one can be used in quizzes as soon as it is there."""
    from reference_impl import theory

    return tuple(sorted(module.name for module in pkgutil.iter_modules(theory.__path__) if module.name[0] != "_"))


class QuizError(ValueError):
    """quiz.yaml cannot be used: says which file, which item, and what was expected."""


_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "round": round,
    "int": int,
    "float": float,
    "floor": math.floor,
    "ceil": math.ceil,
}


def evaluate(expression: str | int | float, names: Mapping[str, Any]) -> Any:
    """The value of an expression: numbers, strings, arithmetic, public members of theory modules, and their calls.

    names: the values of params and let. Anything else (imports, lambdas, subscripts, private names) raises QuizError.
    """
    if isinstance(expression, (int, float)):
        return expression
    try:
        return _value(ast.parse(expression, mode="eval").body, names)
    except QuizError:
        raise
    except Exception as error:
        raise QuizError(f"{expression!r}: {type(error).__name__}: {error}") from error


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=int() | float() | str() | None):
            return node.value
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](_value(node.left, names), _value(node.right, names))
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand, names)
        case ast.IfExp(test=ast.Compare(left=left, ops=[ast.Lt() | ast.Gt() as op], comparators=[right])):
            a, b = _value(left, names), _value(right, names)
            return _value(node.body if (a < b if isinstance(op, ast.Lt) else a > b) else node.orelse, names)
        case ast.Name(id=name):
            if name in names:
                return names[name]
            if name in _FUNCTIONS:
                return _FUNCTIONS[name]
            if name in theory_modules():
                return importlib.import_module(f"reference_impl.theory.{name}")
            raise QuizError(f"unknown name {name!r}; expected one of {sorted(names)}, {', '.join(theory_modules())}")
        case ast.Attribute(value=inner, attr=attr) if not attr.startswith("_"):
            owner = _value(inner, names)
            found = getattr(owner, attr)
            if not str(getattr(owner, "__name__", type(owner).__module__)).startswith("reference_impl.theory."):
                raise QuizError(f"{ast.unparse(node)}: only members of reference_impl.theory can be used")
            if hasattr(found, "__spec__") or str(getattr(found, "__module__", "reference_impl")).split(".")[0] not in (
                "reference_impl",
                "builtins",
            ):
                raise QuizError(f"{ast.unparse(node)}: not a part of reference_impl.theory")
            return found
        case ast.Call():
            called = _value(node.func, names)
            keywords = {k.arg: _value(k.value, names) for k in node.keywords if k.arg is not None}
            if len(keywords) != len(node.keywords):
                raise QuizError(f"{ast.unparse(node)}: ** is not allowed")
            return called(*(_value(argument, names) for argument in node.args), **keywords)
        case _:
            raise QuizError(f"{ast.unparse(node)!r} is not allowed in an expression")
