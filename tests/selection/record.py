"""What each test needed when it last passed: tests/record.txt, lines of three kinds, sorted, fields between tabs.

    f  id  content  path  rest  functions           a file as some test found it; of Python, hashes of its parts
    g  id  needs                                    what is needed together, or not at all
    t  unit  seconds  environment  costly  needs    a unit of tests, and the groups and files it needed

A unit is a file of tests, or one test that takes long. `needs` names functions as bits of a hexadecimal number
(`id:2f`); where it has none, a file was only imported, or read; `id:-1` is the text of a Python source. `costly` are
the unit's tests of 50 ms or more: the others always run. A line stands for itself: it holds for a tree if the tree has
what it names, whichever branch wrote it. So a merge keeps both sides' lines (.gitattributes), and a line that cannot be
read is left out, and its tests run.

Seconds are CPU seconds, the children's included, of a machine on which `calibrate` takes LOOP seconds.
"""

from __future__ import annotations

import platform
import time
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.selection.sources import LENGTH, Tree, digest
from tests.selection.tracing import EACH

PATH = "tests/record.txt"
LOOP = 0.0125
COSTLY, OWN, TOO_MUCH = 0.05, 4.0, 20.0  # seconds: does not always run; has a line of its own; should be `slow`
SLOW = "slow"  # the unit FILE::slow is about all slow tests of a file; it stands among the costly of a slow unit
ALL = -1  # what changed of a file: every function, or the rest
TEXT = -1  # what is needed of it: its text, comments and all
MANY = 800  # files; a test that needs more is taken to need the whole tree
WIDE = "what all tests need: versions, build files, which conftest.py there are"
BUILD = ("constraints.txt", "Makefile", ".ci/install.py", ".ci/installing.py", ".gitattributes")


def calibrate() -> float:
    """CPU seconds of a fixed loop."""
    begin, total = time.thread_time(), 0
    for number in range(200_000):
        total += number * number
    return time.thread_time() - begin


def short(*parts: str) -> str:
    """A name in the record, which has thousands."""
    return digest(*parts, length=5)


def short_name(test: str) -> str:
    """A test's name without its file, hashed: a renamed file keeps its lines."""
    return short(test.partition("::")[2])


def environment(tree: Tree) -> str:
    """What every test needs: Python, the versions of the pinned packages, how all is built, where a conftest.py is."""
    project = tomllib.loads((tree.root / "pyproject.toml").read_text("utf-8"))
    asked = [project.get("project"), project.get("build-system")]
    asked += [project.get("tool", {}).get(name) for name in ("hatch", "pytest")]
    found = [".".join(platform.python_version_tuple()[:2]), repr(asked)]
    found += [f"{name} {tree.content(name)}" for name in BUILD]
    found += sorted(name for name in tree.names if name.endswith("conftest.py"))
    for line in (tree.root / "constraints.txt").read_text("utf-8").splitlines():
        if name := line.partition("==")[0].strip():
            try:
                found.append(f"{name} {version(name).partition('+')[0]}")
            except (PackageNotFoundError, ValueError):
                found.append(f"{name} is not here")
    return digest(*found)


@dataclass(frozen=True)
class File:
    content: str
    path: str
    rest: str = ""
    functions: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return short(self.path, self.content)

    @classmethod
    def of(cls, tree: Tree, path: str) -> File:
        found = tree.source(path)
        content = str(tree.content(path))
        return cls(content, path, found.rest, found.functions) if found else cls(content, path)

    def changed(self, tree: Tree) -> int:
        """Which of the functions are not in the tree any more, as a mask; ALL if the rest is not."""
        now = tree.content(self.path)
        if now == self.content or (now is None and self.rest and self.content in tree.by_content):  # the same, or moved
            return 0
        source = tree.source(self.path) if now and self.rest else None
        if source is None or source.rest != self.rest:
            return ALL
        return sum(1 << bit for bit, function in enumerate(self.functions) if function not in source.functions)


@dataclass(frozen=True)
class Line:
    """needs: id of a file -> mask of its functions."""

    unit: str
    seconds: float
    environment: str
    costly: dict[str, float] = field(default_factory=dict)
    needs: dict[str, int] = field(default_factory=dict)

    @property
    def file(self) -> str:
        return self.unit.partition("::")[0]


@dataclass
class Record:
    files: dict[str, File] = field(default_factory=dict)
    groups: dict[str, list[str]] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)

    @classmethod
    def read(cls, *paths: Path) -> Record:
        made = cls()
        for path in paths:
            for text in path.read_text("utf-8").splitlines() if path.is_file() else ():
                try:
                    made._take(text.split("\t"))
                except (ValueError, TypeError):
                    continue  # half a line, or a mark of a conflict
        return made

    def _take(self, fields: list[str]) -> None:
        match fields:
            case ["f", name, content, path, rest, functions]:
                cut = tuple(functions[at : at + LENGTH] for at in range(0, len(functions), LENGTH))
                if (file := File(content, path, rest, cut)).id == name:
                    self.files[name] = file
            case ["g", name, files] if short(files) == name:
                self.groups[name] = files.split()
            case ["t", unit, seconds, environment, costly, needs]:
                tests = (each.split("=") for each in costly.split())
                words = [word for name in needs.split() for word in self.groups.get(name, [name])]
                masks = {name: int(mask or "0", 16) for name, _, mask in sorted(word.partition(":") for word in words)}
                self.lines.append(
                    Line(
                        unit, float(seconds), environment,
                        {name: float(took) for name, took in tests},
                        masks,
                    )
                )  # fmt: skip

    def add(self, line: Line, files: Iterable[File]) -> None:
        self.lines = [each for each in self.lines if each.unit != line.unit] + [line]
        self.files |= {file.id: file for file in files}

    def write(self, path: Path) -> None:
        needing: dict[str, list[int]] = {}
        for number, line in enumerate(self.lines):
            for word in (word for name, mask in line.needs.items() for word in (name, f"{name}:{mask:x}" * bool(mask))):
                needing.setdefault(word, []).append(number)
        needing.pop("", None)
        together: dict[tuple[int, ...], list[str]] = {}
        for word in sorted(needing):
            together.setdefault(tuple(needing[word]), []).append(word)
        groups = {tuple(numbers): " ".join(words) for numbers, words in together.items()}
        named = {numbers: short(words) if " " in words else words for numbers, words in groups.items()}
        found = {f"g\t{named[numbers]}\t{words}" for numbers, words in groups.items() if " " in words}
        for name in needing.keys() & self.files.keys():
            file = self.files[name]
            found.add("\t".join(("f", name, file.content, file.path, file.rest, "".join(file.functions))))
        needs: list[list[str]] = [[] for _ in self.lines]
        for numbers, name in named.items():
            for number in numbers:
                needs[number].append(name)
        for line, names in zip(self.lines, needs, strict=True):
            costly = " ".join(f"{name}={took:.2f}" for name, took in sorted(line.costly.items()))
            found.add(
                "\t".join(("t", line.unit, f"{line.seconds:.2f}", line.environment, costly, " ".join(sorted(names))))
            )
        path.write_text("".join(f"{text}\n" for text in sorted(found)), "utf-8")

    def judge(self, tree: Tree, now: str) -> tuple[dict[str, Line], dict[str, set[str]]]:
        """Unit -> its line that holds for this tree; unit -> why none does, as paths that changed."""
        changed = {name: file.changed(tree) for name, file in self.files.items()}
        holding: dict[str, Line] = {}
        why: dict[str, set[str]] = {}
        for line in self.lines:
            line = self._under_its_name(line, tree)
            met = {
                self.files[name].path if name in self.files else "a part of the record that is missing"
                for name, mask in line.needs.items() if (bits := changed.get(name, ALL)) & mask or bits == ALL
                or (mask == TEXT and self.files[name].content != tree.content(self.files[name].path))
            }  # fmt: skip
            if line.environment != now:
                met.add(WIDE)
            if met:
                why[line.unit] = met
            else:
                holding[line.unit] = line
        return holding, {unit: met for unit, met in why.items() if unit not in holding}

    def _under_its_name(self, line: Line, tree: Tree) -> Line:
        """A file of tests may have been moved as it was."""
        if line.file in tree.names:
            return line
        found = (file.content for file in self.files.values() if file.path == line.file)
        moved = next((tree.by_content[content] for content in found if content in tree.by_content), None)
        return replace(line, unit=moved + line.unit[len(line.file) :]) if moved else line

    def paths(self, line: Line) -> set[str]:
        return {self.files[name].path for name in line.needs if name in self.files}


def needed(tree: Tree, said: set[str], marks: Iterable[int]) -> tuple[dict[str, int], list[File]]:
    """id -> mask, and the files. said: the lines that `tracing.py` wrote; marks: its numbers, by `tree.modules`."""
    masks: dict[str, int] = {}
    for module, function in (divmod(mark, EACH) for mark in marks):
        if tree.modules[module].startswith("tests/selection/"):
            continue  # runs the tests, and is tested by one that always runs
        bits = 0 if function == 0 else 1 << function - 1 if function < EACH - 1 else ALL << EACH - 2
        masks[tree.modules[module]] = masks.get(tree.modules[module], 0) | bits
    for kind, path in (entry.split(" ", 1) for entry in sorted(said, reverse=True)):  # what is read as text comes last
        if kind == "lists" and tree.holds(f"{path}/"):
            masks[f"{path}/"] = 0
        elif kind == "tests" and path in tree.names:  # pytest compiles these itself
            masks[path] = (1 << len(getattr(tree.source(path), "functions", ()))) - 1
        elif kind == "reads" and path in tree.names:
            masks[path] = TEXT if path.endswith(".py") else 0
            if path.startswith("datasets/"):  # libraries in Rust read the files beside it, which no hook sees
                folder = path.rpartition("/")[0]
                masks |= {name: 0 for name in tree.names if name.rpartition("/")[0] == folder}
    if len(masks) > MANY:
        masks = {"*": 0}
    files = {path: File.of(tree, path) for path in masks}
    return {files[path].id: mask for path, mask in masks.items()}, list(files.values())
