"""What each test needed when it last passed: tests/record.txt, lines of three kinds, sorted, fields between tabs.

    f  id  content  path  rest  functions           a file as some test found it; of Python, hashes of its parts
    g  id  needs                                    what is needed together, or not at all
    t  unit  seconds  environment  costly  needs    a unit of tests, and what it needed

A unit is a file of tests, or one test that takes long. A need is `id`, the content of a file, of Python the rest of it;
`id:2f`, those of its functions that are the bits of a hexadecimal number; or `id:-1`, the text of a Python source.
`costly` are the unit's tests of 50 ms or more: the others always run. A line stands for itself: it holds for a tree if
the tree has what it needs, whichever branch wrote it. So a merge keeps both sides' lines (.gitattributes), and a line
that cannot be read is left out, and its tests run.

Seconds are CPU seconds, the children's included, of a machine on which `calibrate` takes LOOP seconds.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.selection.sources import LENGTH, File, Tree, short

PATH = "tests/record.txt"
LOOP = 0.0125
SLOW = "slow"  # the unit FILE::slow is about all slow tests of a file; it stands among the costly of a slow unit
TEXT = -1  # all bits
MANY = 800  # files; a test that needs more is taken to need the whole tree
WIDE = "what all tests need: versions, build files, which conftest.py there are"


def calibrate() -> float:
    """CPU seconds of a fixed loop."""
    begin, total = time.thread_time(), 0
    for number in range(200_000):
        total += number * number
    return time.thread_time() - begin


def short_name(test: str) -> str:
    """A test's name without its file, hashed: a renamed file keeps its lines."""
    return short(test.partition("::")[2])


@dataclass
class Line:
    unit: str
    seconds: float
    environment: str
    costly: dict[str, float] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()

    @property
    def file(self) -> str:
        return self.unit.partition("::")[0]


@dataclass
class Record:
    """files: by their id; groups: the needs that one name stands for."""

    files: dict[str, File] = field(default_factory=dict)
    groups: dict[str, list[str]] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Record:
        made = cls()
        for text in path.read_text("utf-8").splitlines() if path.is_file() else ():
            try:
                made._take(text.split("\t"))
            except (ValueError, TypeError):
                continue  # half a line, or a mark of a conflict
        return made

    def _take(self, fields: list[str]) -> None:
        """Groups come before the lines that name them."""
        match fields:
            case ["f", name, content, path, rest, hashes]:
                cut = (hashes[at : at + LENGTH] for at in range(0, len(hashes), LENGTH))
                if (file := File(path, content, rest, tuple(cut))).id == name:
                    self.files[name] = file
            case ["g", name, needs] if short(needs) == name:
                self.groups[name] = needs.split()
            case ["t", unit, seconds, environment, costly, needs]:
                tests = {name: float(took) for name, took in (each.split("=") for each in costly.split())}
                found = frozenset(need for name in needs.split() for need in self.groups.get(name, [name]))
                self.lines.append(Line(unit, float(seconds), environment, tests, found))

    def write(self, path: Path) -> None:
        needed_by: dict[str, list[int]] = defaultdict(list)
        for number, line in enumerate(self.lines):
            for need in line.needs:
                needed_by[need].append(number)
        together: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for need in sorted(needed_by):
            together[tuple(needed_by[need])].append(need)
        said = set()
        names: list[list[str]] = [[] for _ in self.lines]
        for numbers, needs in together.items():
            name = needs[0]
            if len(needs) > 1:
                name = short(" ".join(needs))
                said.add(f"g\t{name}\t{' '.join(needs)}")
            for number in numbers:
                names[number].append(name)
        for id in needed_by.keys() & self.files.keys():
            file = self.files[id]
            said.add(f"f\t{id}\t{file.content}\t{file.path}\t{file.rest}\t{''.join(file.functions)}")
        for line, needs in zip(self.lines, names, strict=True):
            costly = " ".join(f"{name}={took:.2f}" for name, took in sorted(line.costly.items()))
            said.add(f"t\t{line.unit}\t{line.seconds:.2f}\t{line.environment}\t{costly}\t{' '.join(sorted(needs))}")
        new = path.with_suffix(".new")
        new.write_text("".join(f"{each}\n" for each in sorted(said)), "utf-8")
        new.replace(path)

    def judge(self, tree: Tree) -> tuple[dict[str, Line], dict[str, set[str]]]:
        """Unit -> its line that holds for this tree; unit -> why none does, as paths that changed."""
        every = frozenset[str]().union(*(line.needs for line in self.lines))
        changed = {need: path for need in every if (path := self._changed(need, tree))}
        holding: dict[str, Line] = {}
        why: dict[str, set[str]] = {}
        for line in self.lines:
            line = self._under_its_name(line, tree)
            met = {changed[need] for need in line.needs & changed.keys()}
            met |= {WIDE} if line.environment != tree.environment else set()
            if met:
                why[line.unit] = met
            else:
                holding[line.unit] = line
        return holding, {unit: met for unit, met in why.items() if unit not in holding}

    def _changed(self, need: str, tree: Tree) -> str | None:
        """The path of what is needed, if the tree has it no more."""
        id, _, bits = need.partition(":")
        mask = int(bits or "0", 16)
        if id not in self.files:
            return "a part of the record that is missing"
        file = self.files[id]
        now = tree.content(file.path)
        if now is None and file.rest and mask != TEXT:  # a module may have been moved as it was
            now = file.content if file.content in tree.modules else None
        if now == file.content:
            return None
        if now is None or mask == TEXT or not file.rest:
            return file.path
        found = tree.file(file.path)
        if mask == 0:
            return None if file.rest == found.rest else file.path
        gone = (bit for bit, function in enumerate(file.functions) if function not in found.functions)
        return file.path if any(mask >> bit & 1 for bit in gone) else None

    def _under_its_name(self, line: Line, tree: Tree) -> Line:
        """A file of tests may have been moved as it was."""
        if line.file in tree.names:
            return line
        found = (file.content for file in self.files.values() if file.path == line.file)
        moved = next((tree.modules[content] for content in found if content in tree.modules), None)
        return replace(line, unit=moved + line.unit[len(line.file) :]) if moved else line

    def paths(self, line: Line) -> set[str]:
        return {self.files[id].path for need in line.needs if (id := need.partition(":")[0]) in self.files}


def needed(tree: Tree, noted: Iterable[str]) -> dict[str, File]:
    """Need -> its file. noted: the lines that tracing.py wrote."""
    masks: dict[str, int] = {}
    for kind, path in (line.split(" ", 1) for line in noted):
        if kind == "lists":
            if f"{path}/" in tree.folders:
                masks[f"{path}/"] = 0
        elif path in tree.names:
            bits = 0
            if kind == "tests":
                bits = (1 << len(tree.file(path).functions)) - 1
            elif kind != "reads":
                bits = 1 << int(kind) >> 1  # 0: imported
            elif path.endswith(".py"):
                bits = TEXT
            masks[path] = masks.get(path, 0) | bits
            if kind == "reads" and path.startswith("datasets/"):  # libraries in Rust read what is beside it, unseen
                folder = path.rpartition("/")[0]
                masks |= {name: 0 for name in tree.names if name.rpartition("/")[0] == folder}
    files = {path: tree.file(path) for path in (masks if len(masks) <= MANY else {"*": 0})}
    return {need: file for path, file in files.items()
            for need in (file.id, *([f"{file.id}:{masks[path]:x}"] if masks.get(path) else []))}  # fmt: skip
