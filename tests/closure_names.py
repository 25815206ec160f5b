"""Which files of a repository a dotted name, or a path, stands for."""

from __future__ import annotations

import ast
import fnmatch
import functools
import os
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

PASSED = "^"  # before a package's __init__.py that is only passed: its functions are not called by that

_OUTSIDE = {"__pycache__", "build", "dist"}
_SCRIPT_IMPORT = re.compile(r"\bfrom\s+([\w.]+)\s+import\s+\(?\s*([\w, ]+)")
_TEST_FILE = re.compile(r"(^|/)test_\w+\.py\b")
_WILD = re.compile(r"[*?\[]")


class Names:
    """Files are known by their path relative to the root, with slashes."""

    def __init__(self, root: Path):
        self.root = root
        self.files = sorted(_files(str(root), ""))
        self.present = set(self.files)
        self.folders = {str(folder) for name in self.files for folder in PurePosixPath(name).parents} - {"."}
        self.modules = dict(_modules(self.files))
        self.tops = {name.partition(".")[0] for name in self.modules} - {"conftest"}
        tops = "|".join(sorted(map(re.escape, self.tops))) or "(?!)"
        self.dotted = re.compile(rf"(?<![\w./])(?:{tops})\b(?:\.\w+)*\.?(?!/)")
        self.programs = self._programs()
        self.lazy = functools.cache(self._lazy)

    def _programs(self) -> dict[str, str]:
        """Commands that the project installs -> the module that is run."""
        project = self.root / "pyproject.toml"
        if not project.is_file():
            return {}
        scripts = tomllib.loads(project.read_text("utf-8")).get("project", {}).get("scripts", {})
        return {name: entry.partition(":")[0] for name, entry in scripts.items()}

    # ------------------------------------------------------------ modules

    def _lazy(self, package: str) -> dict[str, str]:
        """Names that a package's __getattr__ imports when they are asked for -> their modules, as type checkers see."""
        home = self.modules.get(package)
        if not home or not home.endswith("__init__.py"):
            return {}
        text = (self.root / home).read_text("utf-8")
        if "__getattr__" not in text:
            return {}
        table = {}
        for node in ast.parse(text).body:
            if isinstance(node, ast.If) and is_type_checking(node.test):
                for line in node.body:
                    if isinstance(line, ast.ImportFrom) and line.module and not line.level:
                        table.update({alias.asname or alias.name: line.module for alias in line.names})
        return table

    def module(self, dotted: str, beside: str = "") -> set[str]:
        """Files that importing it runs: its own and those of the packages around it. Beside: for a script's imports."""
        parts = dotted.split(".")
        above = (self.modules.get(".".join(parts[:end])) for end in range(1, len(parts)))
        found = {f"{PASSED}{name}" for name in above if name}
        if home := self.modules.get(dotted):
            found.add(home)
        if not found and beside:
            found = {str(PurePosixPath(beside).parent / f"{parts[0]}.py")} & self.present
        return found

    def imported(self, dotted: str, names: Iterable[str], beside: str = "") -> set[str]:
        """`from dotted import names`: a package of which only modules, or lazy names, are taken is only passed."""
        taken = {name: self._homes(dotted, name) for name in names}
        whole = self.module(f"{dotted}.") if taken and all(taken.values()) else self.module(dotted, beside)
        return whole.union(*taken.values())

    def _homes(self, package: str, name: str) -> set[str]:
        if (inner := f"{package}.{name}") in self.modules:
            return self.module(inner)
        home = self.lazy(package).get(name)
        return self.module(home) if home else set()

    def chain(self, dotted: str) -> set[str]:
        """`package.module.name`, as far as there are modules; the name may be a lazy one of the package."""
        parts = dotted.split(".")
        for end in range(len(parts), 0, -1):
            known = ".".join(parts[:end])
            if known in self.modules:
                return self.imported(known, parts[end : end + 1])
        return set()

    def named_modules(self, text: str) -> set[str]:
        found: set[str] = set()
        for dotted in set(self.dotted.findall(text)):
            package = dotted.rstrip(".")
            if "." not in package:
                continue  # a word
            found |= self.chain(package)
            main = f"{package}.__main__"
            if main in self.modules and dotted == text:
                found.add(self.modules[main])
            if dotted == text and dotted.endswith("."):  # f"package.room.{name}": any of the room
                found |= {home for name, home in self.modules.items() if name.rpartition(".")[0] == package}
        if "import" in text:
            for dotted, names in _SCRIPT_IMPORT.findall(text):
                if dotted.partition(".")[0] in self.tops:
                    found |= self.imported(dotted, re.findall(r"\w+", names))
        return found

    # ------------------------------------------------------------ data

    def data(self, pattern: str, of: str) -> set[str]:
        """Files at a path relative to the root that may have wildcards; all below it if it is a folder."""
        pattern = os.path.normpath(pattern).replace(os.sep, "/")
        if pattern == "." or pattern.startswith(("../", "/")) or _WILD.search(pattern.partition("/")[0]):
            return set()
        if PurePosixPath(pattern) in PurePosixPath(of).parents:  # "my own folder": what of it is said elsewhere
            return set()
        if "/" not in pattern and pattern in self.folders and not of.startswith("tests/"):
            return set()  # code says where chapters or labs are; what of them it reads, its test says
        if not _WILD.search(pattern):
            return {pattern} if pattern in self.present else self._below(pattern) if pattern in self.folders else set()
        deep = "**" in pattern
        folder_only = not deep and bool(_WILD.search(pattern.rpartition("/")[0]))
        if folder_only:  # FOLDER.glob("*/*.py"): what lies beside them is found through them (path.parent / ...)
            pattern = pattern.rpartition("/")[0]
        fixed = pattern.partition("*")[0].partition("?")[0].partition("[")[0].rpartition("/")[0]
        match, depth = re.compile(fnmatch.translate(pattern)).match, pattern.count("/")
        code_too = not pattern.endswith("/*")  # FOLDER / name is a folder or a file with data
        found: set[str] = set()
        for name in self._below(fixed):
            parts = name.split("/")
            whole = name if deep else "/".join(parts[: depth + 1])
            if match(whole) and (
                whole != name if folder_only else code_too or whole != name or parts[-1][-3:] != ".py"
            ):
                found.add(name)
        return found

    def _below(self, folder: str) -> set[str]:
        return {name for name in self.files if name.startswith(f"{folder}/")}

    def named_data(self, text: str, of: str) -> set[str]:
        """A string that names a file or folder, with a slash: from the root, or beside the file or above it; without
        one: a file beside it."""
        folder = PurePosixPath(of).parent
        if _TEST_FILE.search(text):
            return set()  # a node id: what orders or counts tests does not need what they need
        if "/" not in text:
            beside = str(folder / text)
            return {beside} if "." in text and not text.endswith(".py") and beside in self.present else set()
        if text.startswith(("/", "..", ".")) and not text.startswith("./"):
            return {text} & self.present
        first = text.removeprefix("./").partition("/")[0]
        for base in (PurePosixPath("."), *folder.parents[:-1], folder):
            if str(base / first) in self.folders and (found := self.data(str(base / text), of)):
                return found
        return set()


def _files(root: str, below: str) -> Iterator[str]:
    for entry in os.scandir(os.path.join(root, below)):
        name = f"{below}/{entry.name}" if below else entry.name
        if entry.is_dir(follow_symlinks=False):
            hidden = entry.name.startswith(".") and entry.name != ".ci"
            if not hidden and entry.name not in _OUTSIDE and not entry.name.endswith(".egg-info"):
                yield from _files(root, name)
        elif not entry.name.endswith(".pyc"):
            yield name


def _modules(files: Iterable[str]) -> Iterator[tuple[str, str]]:
    for name in files:
        parts = name.removesuffix(".py").split("/")
        if name.endswith(".py") and all(part.isidentifier() for part in parts):
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), name


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )
