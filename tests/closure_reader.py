"""What one file names: modules, data, fixtures. One pass over its syntax tree; nothing is executed."""

from __future__ import annotations

import ast
import contextlib
import gc
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from tests.closure_names import PASSED as PASSED
from tests.closure_names import Names, is_type_checking

ROOTED = "@"  # before a module of which a function was given the repository's root, as `root` or `repository`

_ROOTS = {"root", "repository"}
_LEAVES = frozenset(
    {ast.Name, ast.Load, ast.Store, ast.Del, ast.Pass, ast.Break, ast.Continue, ast.Global, ast.Nonlocal}
    | set(ast.operator.__subclasses__())
    | set(ast.cmpop.__subclasses__())
    | set(ast.unaryop.__subclasses__())
    | set(ast.boolop.__subclasses__())
)


@dataclass
class Fixture:
    needs: set[str]
    asks: set[str]


@dataclass
class Facts:
    """Of one file. needs: by what runs when it is imported; later: by its functions. asks: names of arguments and
    strings, which may be names of fixtures."""

    needs: set[str] = field(default_factory=set)
    later: set[str] = field(default_factory=set)
    asks: set[str] = field(default_factory=set)
    fixtures: dict[str, Fixture] = field(default_factory=dict)


def read(names: Names, name: str, rooted: bool = False) -> Facts:
    path = names.root / name
    try:
        if path.suffix == ".py":
            with _no_collection():
                return _Reader(names, name, ast.parse(path.read_bytes()), rooted).facts
        if path.suffix in (".ipynb", ".yaml", ".sh", ".ipy"):
            return Facts(names.named_modules(path.read_text("utf-8")))
    except (SyntaxError, ValueError, OSError):  # a file that is wrong on purpose, or gone: it needs nothing else
        pass
    return Facts()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """The garbage collector would look at every node of the tree again and again, for twice the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Reader:
    """One pass over a module's tree."""

    def __init__(self, names: Names, name: str, tree: ast.Module, rooted: bool = False):
        self.names, self.name, self.rooted, self.facts = names, name, rooted, Facts()
        self.of_tests = name.startswith("tests/")
        self.conftest = name.endswith("conftest.py")
        self.package = PurePosixPath(name).parent.as_posix().replace("/", ".")
        self.needs, self.asks = self.facts.needs, self.facts.asks
        self.imports: dict[str, str] = {}  # local name -> what it is in full
        self._block(tree.body, {"__file__": {name}})

    # ------------------------------------------------------------ statements and expressions

    def _block(self, body: list[ast.stmt], known: dict[str, set[str]]) -> None:
        for node in body:
            self._statement(node, known)

    def _statement(self, node: ast.stmt, known: dict[str, set[str]]) -> None:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return  # a docstring
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self._function(node, known)
        elif isinstance(node, ast.If) and is_type_checking(node.test):
            self._block(node.orelse, known)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                self.imports[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
                self.needs |= self.names.module(alias.name, self.name)
        elif isinstance(node, ast.ImportFrom):
            self._import_from(node)
        else:
            self._children(node, known)
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                self._assign(node, known)

    def _children(self, node: ast.AST, known: dict[str, set[str]]) -> None:
        for name in node._fields:
            value = getattr(node, name, None)
            if value.__class__ is list:
                for child in value:
                    self._visit(child, known)
            elif isinstance(value, ast.AST):
                self._visit(value, known)

    def _visit(self, node: ast.AST, known: dict[str, set[str]]) -> None:
        kind = node.__class__
        if kind in _LEAVES or not isinstance(node, ast.AST):
            return
        if isinstance(node, ast.stmt):
            self._statement(node, known)
            return
        if kind is ast.Constant:
            if node.value.__class__ is str:  # type: ignore[attr-defined]
                self._string(node.value)  # type: ignore[attr-defined]
            return
        if (kind is ast.BinOp or kind is ast.Call or kind is ast.Attribute) and self._path_or_chain(node, known):
            self._beside_path(node, known)
        else:
            self._children(node, known)

    def _beside_path(self, node: ast.AST, known: dict[str, set[str]]) -> None:
        """The rest of a path's expression: its beginning says where to look for something, and is not read itself."""
        if isinstance(node, ast.BinOp):
            self._visit(node.right, known)
            self._beside_path(node.left, known)
        elif isinstance(node, ast.Call):
            for argument in node.args[1:] if isinstance(node.func, ast.Name) else node.args:
                self._visit(argument, known)
            inner = [node.func] if isinstance(node.func, ast.Attribute) else node.args[:1]
            for part in inner:
                self._beside_path(part, known)
        elif isinstance(node, (ast.Attribute, ast.Subscript)):
            self._beside_path(node.value, known)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, known: dict[str, set[str]]) -> None:
        arguments = node.args
        names = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        outer = (self.needs, self.asks)
        fixture = self._fixture_name(node) if self.conftest else None
        if fixture:
            self.needs, self.asks = set(), set()
        elif self.needs is self.facts.needs:
            self.needs = self.facts.later
        self.asks |= names
        for decorator in node.decorator_list:
            self._visit(decorator, known)
        self._children(arguments, known)
        inner = {name: value for name, value in known.items() if name not in names}
        if self.rooted:
            inner |= {name: {"."} for name in names & _ROOTS}
        self._block(node.body, inner)
        if fixture:
            self.facts.fixtures[fixture] = Fixture(self.needs, self.asks)
        self.needs, self.asks = outer

    @staticmethod
    def _fixture_name(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
        """The name under which tests ask for it; None if it is no fixture, or one for every test."""
        for decorator in node.decorator_list:
            call = decorator.func if isinstance(decorator, ast.Call) else decorator
            if ast.unparse(call) not in ("pytest.fixture", "fixture"):
                continue
            said = {k.arg: k.value for k in decorator.keywords} if isinstance(decorator, ast.Call) else {}
            if "autouse" in said:
                return None
            name = said.get("name")
            return str(name.value) if isinstance(name, ast.Constant) else node.name
        return None

    def _import_from(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level:
            above = self.package.split(".")[: len(self.package.split(".")) - node.level + 1]
            module = ".".join([*above, module] if module else above)
        for alias in node.names:
            self.imports[alias.asname or alias.name] = f"{module}.{alias.name}"
        self.needs |= self.names.imported(module, [alias.name for alias in node.names], self.name)

    def _string(self, text: str) -> None:
        if text.isidentifier():
            self.asks.add(text)
        elif not text or text.isspace():
            return
        if len(text) < 200 and "\n" not in text and ("." in text or "/" in text):
            self.needs |= self.names.named_data(text, self.name)
        if any(top in text for top in self.names.tops):
            self.needs |= self.names.named_modules(text)

    # ------------------------------------------------------------ paths that begin at __file__

    def _path_or_chain(self, node: ast.AST, known: dict[str, set[str]]) -> bool:
        """Whether it was a path."""
        if isinstance(node, ast.Attribute):
            chain = _chain(node)
            if chain and (full := self.imports.get(chain[0])) and full.partition(".")[0] in self.names.tops:
                self.needs |= self.names.chain(".".join([full, *chain[1:]]))
        program: ast.AST | None = None
        if isinstance(node, ast.BinOp):
            program = node.right
        elif _called(node) in ("with_name", "which", "joinpath") and isinstance(node, ast.Call) and node.args:
            program = node.args[0]
        if isinstance(program, ast.Constant) and program.value in self.names.programs:
            self.needs |= self.names.module(self.names.programs[str(program.value)])
        if isinstance(node, ast.Call):
            self._given_the_root(node, known)
            if isinstance(node.func, ast.Attribute) and node.func.attr in ("exists", "is_dir", "is_file"):
                return bool(self._paths(node.func.value, known))
        paths = self._paths(node, known)
        for pattern in paths:
            self.needs |= self.names.data(pattern, self.name)
        return bool(paths)

    def _given_the_root(self, node: ast.Call, known: dict[str, set[str]]) -> None:
        """In a test, or where a test gave it: in the code itself it is only where things are, not what is read."""
        if not (self.rooted or self.of_tests):
            return
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        names = (argument for argument in given if isinstance(argument, (ast.Name, ast.Call)))
        if not any(os.path.normpath(path) == "." for name in names for path in self._paths(name, known)):
            return
        chain = _chain(node.func)
        full = ".".join([self.imports.get(chain[0], ""), *chain[1:]]) if chain else ""
        if home := self.names.modules.get(full.rpartition(".")[0]):
            self.needs.add(ROOTED + home)
        elif chain and len(chain) == 1:
            self.needs.add(ROOTED + self.name)  # a function of this module

    def _assign(self, node: ast.Assign | ast.AnnAssign, known: dict[str, set[str]]) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        values = [node.value]
        if len(targets) == 1 and isinstance(targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            targets, values = targets[0].elts, node.value.elts  # type: ignore[assignment]
        for target, value in zip(targets, values, strict=False):
            if isinstance(target, ast.Name) and value is not None:
                if paths := self._paths(value, known):
                    known[target.id] = paths
                else:
                    known.pop(target.id, None)

    def _paths(self, node: ast.AST, known: dict[str, set[str]]) -> set[str]:
        """Patterns, relative to the root, of what an expression can be; empty if it does not begin at __file__."""
        if isinstance(node, ast.Name):
            if node.id in known:
                return known[node.id]
            return self._imported_root(node.id)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            return {f"{base}/{_pattern(node.right)}" for base in self._paths(node.left, known)}
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "parents":
            number = node.slice.value if isinstance(node.slice, ast.Constant) else None
            up = "/.." * (number + 1) if isinstance(number, int) else ""
            return {f"{base}{up}" for base in self._paths(node.value.value, known)} if up else set()
        if isinstance(node, ast.Attribute):
            if node.attr == "parent":
                return {f"{base}/.." for base in self._paths(node.value, known)}
            if node.attr == "__file__" and (chain := _chain(node)):
                module = ".".join([self.imports.get(chain[0], chain[0]), *chain[1:-1]])
                return {self.names.modules[module]} if module in self.names.modules else set()
        return self._called_paths(node, known) if isinstance(node, ast.Call) else set()

    def _imported_root(self, name: str) -> set[str]:
        """ROOT, REPOSITORY, data_root() and their like, if they come from here; chapters_root() is chapters."""
        if not self.of_tests or self.imports.get(name, "").partition(".")[0] not in self.names.tops:
            return set()
        first, _, last = name.lower().rpartition("_")
        return ({first} if first in self.names.folders else {"."}) if last in _ROOTS else set()

    def _called_paths(self, node: ast.Call, known: dict[str, set[str]]) -> set[str]:
        called, first = _called(node), node.args[0] if node.args else None
        if first is None and isinstance(node.func, ast.Name):
            return self._imported_root(node.func.id)
        if called in ("Path", "str", "sorted", "list", "abspath", "realpath", "dirname") and first is not None:
            inner = self._paths(first, known)
            return {f"{base}/.." for base in inner} if called == "dirname" else inner
        if not isinstance(node.func, ast.Attribute):
            return set()
        if called in ("join",) and first is not None and ast.unparse(node.func) == "os.path.join":
            rest = "".join(f"/{_pattern(part)}" for part in node.args[1:])
            return {f"{base}{rest}" for base in self._paths(first, known)}
        bases = self._paths(node.func.value, known)
        if called in ("resolve", "absolute", "as_posix", "expanduser"):
            return bases
        if called in ("glob", "joinpath", "rglob") and first is not None:
            between = "**/" if called == "rglob" else ""
            return {f"{base}/{between}{'/'.join(map(_pattern, node.args))}" for base in bases}
        if called in ("with_name", "with_suffix") and first is not None:
            name = _pattern(first) if called == "with_name" else "*"
            return {f"{base}/../{name}" for base in bases}
        return set()


def _chain(node: ast.AST) -> list[str]:
    """`a.b.c` -> its names; empty if it does not begin with a name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def _called(node: ast.AST) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _pattern(node: ast.AST) -> str:
    """A part of a path, with a star for what is not known."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return re.sub(r"\*+", "*", "".join(_pattern(part) for part in node.values))
    return "*"
