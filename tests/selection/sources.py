"""What files hold, as short hashes: of a Python source the hash of each function, and of all the rest.

A function here is one of a module or a class; what is defined inside it belongs to it. Its body is what it is known
by. The rest is what an import runs or makes: constants, defaults, signatures, decorators, class bodies. Comments and
layout count for nothing, except to a test that reads the file as text; nor do docstrings, but in a source that names
`__doc__`, or what makes a help or a description of them.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import os
import platform
import re
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import CodeType

from tests.selection.tracing import NOTE, SEEN

LENGTH = 6  # characters of a hash: 36 bits
DOCUMENTED = re.compile(rb"__doc__|\b(typer|pydantic|[Ff]ast_?[Aa][Pp][Ii])\b")
BUILD = ("constraints.txt", "Makefile", ".ci/install.py", ".ci/installing.py", ".gitattributes")


def digest(*parts: str | bytes, length: int = LENGTH) -> str:
    whole = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        whole.update(len(raw).to_bytes(8, "big") + raw)
    return base64.urlsafe_b64encode(whole.digest())[:length].decode()


def short(*parts: str) -> str:
    """A name in the record, which has thousands."""
    return digest(*parts, length=5)


def git(root: Path, *arguments: str) -> str:
    """What it prints; empty where git is missing, or has no answer."""
    try:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""


def commits(root: Path) -> int:
    """How many there are: it says whose turn it is."""
    return int(git(root, "rev-list", "--count", "--first-parent", "HEAD") or 0)


def functions(parent: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Those of a module and its classes, by name; what is defined inside a function is part of it."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        elif not isinstance(node, ast.expr):
            yield from functions(node, f"{prefix}{node.name}." if isinstance(node, ast.ClassDef) else prefix)


def marked_code(root: Path, path: str) -> CodeType:
    """A module that notes in each process what of it is entered: see tracing.py."""
    module = ast.parse((root / path).read_bytes())
    for number, node in enumerate([module, *(node for _, node in functions(module))]):
        first = 0 if ast.get_docstring(node, clean=False) is None else 1  # this and imports from __future__ stay first
        while first < len(node.body) and getattr(node.body[first], "module", "") == "__future__":
            first += 1
        line = f"{number} {path}"
        mark = ast.parse(f"{line!r} in {SEEN} or {NOTE}({line!r})").body[0]
        at = node.body[min(first, len(node.body) - 1)].lineno if node.body else 1
        for each in ast.walk(mark):
            ast.copy_location(each, ast.Pass(lineno=at, col_offset=0, end_lineno=at, end_col_offset=0))
        node.body.insert(first, mark)
    return compile(module, str(root / path), "exec", dont_inherit=True)


@dataclass(frozen=True)
class File:
    """A file as it was found: its hash, and of a Python source those of the rest and of each function, in order."""

    path: str
    content: str
    rest: str = ""
    functions: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return short(self.path, self.content)

    @classmethod
    def of(cls, path: str, content: bytes) -> File:
        if not path.endswith(".py"):
            return cls(path, digest(content))
        try:
            module = ast.parse(content)
        except (SyntaxError, ValueError):
            return cls(path, digest(content))
        found, keeps = [], DOCUMENTED.search(content)
        for name, node in functions(module):
            docstring = node.body[: ast.get_docstring(node) is not None]
            found.append(digest(name, *map(ast.dump, node.body if keeps else node.body[len(docstring) :])))
            node.body = docstring if keeps else []
        for node in ast.walk(module) if not keeps else ():
            if isinstance(node, ast.Module | ast.ClassDef) and ast.get_docstring(node) is not None:
                del node.body[0]
        return cls(path, digest(content), digest(ast.dump(module)), tuple(found))


class Tree:
    """The files that git knows or would take, by their path relative to the root; all that an outcome may depend on."""

    def __init__(self, root: Path, but: str):
        """but: the path of the record, which is no part of what it records."""
        self.root = root
        listed = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
        if listed == [""]:  # no git here
            every = (str(path.relative_to(root)) for path in root.rglob("*"))
            listed = [name for name in every if not re.search(r"(^|/)(\.(?!ci)|__pycache__)", name)]
        self.names = frozenset(name for name in listed if (root / name).is_file()) - {but}

    @cache  # noqa: B019  # a tree lives as long as its program
    def content(self, name: str) -> str | None:
        """The hash of a file; of a folder (its name ends with a slash) that of the names in it; of "*" all."""
        if name == "*":
            return digest(*(f"{each}\0{self.content(each)}" for each in sorted(self.names)))
        if name.endswith("/"):
            return digest(*sorted(self.folders.get(name, ())))
        return digest((self.root / name).read_bytes()) if name in self.names else None

    @cache  # noqa: B019
    def file(self, name: str) -> File:
        """One that `content` knows."""
        if name.endswith(".py"):
            return File.of(name, (self.root / name).read_bytes())
        return File(name, str(self.content(name)))

    @cached_property
    def folders(self) -> dict[str, set[str]]:
        """Folder -> the names in it; the root is "./", and "/" has all paths, as `git ls-files` lists them."""
        found: dict[str, set[str]] = {"/": set(self.names)}
        for name in self.names:
            while name != ".":
                folder, last = os.path.split(name)
                name = folder or "."
                found.setdefault(f"{name}/", set()).add(last)
        return found

    @cached_property
    def modules(self) -> dict[str, str]:
        """Content -> name of a Python source."""
        return {str(self.content(name)): name for name in sorted(self.names) if name.endswith(".py")}

    @cached_property
    def environment(self) -> str:
        """What every test needs: Python, the versions of pinned packages, how all is built, where a conftest.py is."""
        project = tomllib.loads((self.root / "pyproject.toml").read_text("utf-8"))
        asked = [project.get("project"), project.get("build-system")]
        asked += [project.get("tool", {}).get(name) for name in ("hatch", "pytest")]
        found = [".".join(platform.python_version_tuple()[:2]), repr(asked)]
        found += [f"{name} {self.content(name)}" for name in BUILD]
        found += sorted(name for name in self.names if name.endswith("conftest.py"))
        for line in (self.root / "constraints.txt").read_text("utf-8").splitlines():
            if name := line.partition("==")[0].strip():
                try:
                    found.append(f"{name} {version(name).partition('+')[0]}")
                except (PackageNotFoundError, ValueError):
                    found.append(f"{name} is not here")
        return digest(*found)
