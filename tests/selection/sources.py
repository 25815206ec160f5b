"""What files hold, as short hashes: of a Python source the hash of each function, and of all the rest.

A function here is one of a module or a class; what is defined inside it belongs to it. Its body is what it is known
by. The rest is what an import runs or makes: constants, defaults, signatures, decorators, class bodies. Comments and
layout count for nothing, except to a test that reads the file as text.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from tests.selection.tracing import functions

LENGTH = 6  # characters of a hash: 36 bits


def digest(*parts: str | bytes, length: int = LENGTH) -> str:
    whole = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        whole.update(len(raw).to_bytes(8, "big") + raw)
    return base64.urlsafe_b64encode(whole.digest())[:length].decode()


@dataclass(frozen=True)
class Source:
    """Hashes of the rest, and of the functions in their order."""

    rest: str
    functions: tuple[str, ...]


@cache
def parse(content: bytes) -> Source | None:
    """None if it is no Python."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return None
    found = []
    for name, node in functions(tree):
        found.append(digest(name, *map(ast.dump, node.body)))
        # A decorator may take the docstring: of a command it becomes the help.
        node.body = node.body[:1] if node.decorator_list and ast.get_docstring(node) else []
    return Source(digest(ast.dump(tree)), tuple(found))


class Tree:
    """The files that git knows or would take, by their path relative to the root; all that an outcome may depend on."""

    def __init__(self, root: Path, but: str):
        """but: the path of the record, which is no part of what it records."""
        self.root = root
        self.names = frozenset(name for name in _listed(root) if (root / name).is_file()) - {but}
        self.modules = sorted(name for name in self.names if name.endswith(".py"))

    @cache  # noqa: B019  # a tree lives as long as its program
    def content(self, name: str) -> str | None:
        """The hash of a file; of a folder (its name ends with a slash) that of the names in it; of "*" all."""
        if name == "*":
            return digest(*(f"{each}\0{self.content(each)}" for each in sorted(self.names)))
        if name.endswith("/"):
            return digest(*sorted(self._folders.get(name, ())))
        return digest((self.root / name).read_bytes()) if name in self.names else None

    @cached_property
    def _folders(self) -> dict[str, set[str]]:
        """Folder -> the names in it; the root, which only `git ls-files` lists, has the paths of all files."""
        found: dict[str, set[str]] = {"/": set(self.names)}
        for name in self.names:
            while "/" in name:
                folder, _, last = name.rpartition("/")
                found.setdefault(f"{folder}/", set()).add(last)
                name = folder
        return found

    def holds(self, folder: str) -> bool:
        return folder in self._folders

    @cached_property
    def by_content(self) -> dict[str, str]:
        return {str(self.content(name)): name for name in sorted(self.names) if name.endswith(".py")}

    def source(self, name: str) -> Source | None:
        return parse((self.root / name).read_bytes()) if name.endswith(".py") else None


def _listed(root: Path) -> Iterator[str]:
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        yield from filter(None, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0"))
    except (OSError, subprocess.CalledProcessError):
        for folder, folders, files in os.walk(root):
            folders[:] = [each for each in folders if each == ".ci" or not each.startswith((".", "__pycache__"))]
            yield from (os.path.relpath(os.path.join(folder, each), root) for each in files)
