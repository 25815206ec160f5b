"""What a file needs: itself, the files of this repository that it imports, directly or not, and the data it names.

Nothing is executed. A file is parsed, and these count: imports anywhere in it (not those for type checkers); strings
that name a module (`import_module("a.b")`, `"-m", "a.b"`, a script in a string); paths that begin at `__file__`, with a
`*` where a part is only known when it runs; other strings that name a file or folder of the repository; of a test also
the conftest.py files above it, of which a fixture counts only where it is asked for.

It says too much rather than too little, with two exceptions. A path whose beginning is only known when it runs (a
parameter) counts only if a string of it alone names something here. And the repository's root is never "a folder that
is read": everything would depend on everything.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from tests.closure_names import Names
from tests.closure_reader import PASSED, ROOTED, Facts, read

ROOT = Path(__file__).resolve().parent.parent


def closure(paths: Iterable[Path], root: Path = ROOT) -> frozenset[Path]:
    """The files and all that they need. Paths are absolute in the answer; given ones may be relative to the root."""
    return frozenset().union(*(steps(path, root) for path in paths))


@functools.cache
def steps(path: Path, root: Path = ROOT) -> dict[Path, int]:
    """What one file needs -> how many imports away it is: 0 for the file itself, 1 for what it names, and so on."""
    graph = _graph(Path(os.path.abspath(root)))
    near = graph.distances(graph.relative(path))
    return {graph.root / name: distance for name, distance in near.items()}


def fingerprint(paths: Iterable[Path], root: Path = ROOT) -> str:
    """SHA-256 of names, relative to the root, and contents, for which CRLF is LF. A file that is not there says so."""
    whole, graph = hashlib.sha256(), _graph(Path(os.path.abspath(root)))
    for name in sorted({graph.relative(path) for path in paths}):
        path = graph.root / name
        content = _content_hash(path) if path.is_file() else "missing"
        whole.update(f"{name}\0{content}\n".encode())
    return whole.hexdigest()


def forget() -> None:
    """For those who change files between two questions: everything is read once per process."""
    for cached in (steps, _graph, _content_hash):
        cached.cache_clear()


@functools.cache
def _content_hash(path: Path) -> str:
    content = path.read_bytes()
    if b"\0" not in content[:4096]:
        content = content.replace(b"\r\n", b"\n")
    return hashlib.sha256(content).hexdigest()


@functools.cache
def _graph(root: Path) -> Graph:
    return Graph(root)


class Graph:
    """Files are known by their path relative to the root, with slashes."""

    def __init__(self, root: Path):
        self.root, self.names = root, Names(root)
        self.facts = functools.cache(self._facts)

    def relative(self, path: Path) -> str:
        return Path(os.path.relpath(self.root / path, self.root)).as_posix()

    def _facts(self, name: str) -> Facts:
        return read(self.names, name.lstrip(PASSED + ROOTED), rooted=name.startswith(ROOTED))

    def distances(self, start: str) -> dict[str, int]:
        """Breadth first. What a fixture needs is as near as the test that asks for it."""
        above = self._conftests(start)
        found = {start: 0, **dict.fromkeys(above, 1)}
        queue = list(found)
        used: set[tuple[str, str]] = set()
        asked: set[str] = set()
        while queue:
            following: list[str] = []
            for name in queue:
                facts = self.facts(name)
                needs = set(facts.needs)
                if not name.startswith(PASSED):
                    needs |= facts.later
                if name not in above:  # a conftest.py that was imported, or named: all of it
                    needs = needs.union(*(fixture.needs for fixture in facts.fixtures.values()))
                    asked = asked.union(*(fixture.asks for fixture in facts.fixtures.values()))
                if above and _is_of_tests(name, start):
                    asked |= facts.asks
                following += self._add(found, needs, found[name] + 1)
            following += self._fixtures(above, asked, used, found)
            queue = following
        near: dict[str, int] = {}
        for name, distance in found.items():
            name = name.lstrip(PASSED + ROOTED)
            near[name] = min(distance, near.get(name, distance))
        return near

    def _fixtures(
        self, above: list[str], asked: set[str], used: set[tuple[str, str]], found: dict[str, int]
    ) -> list[str]:
        """What the fixtures need that are asked for, by a test or by one another, and that were not before."""
        new: list[str] = []
        before = -1
        while before != len(used):
            before = len(used)
            for conftest in above:
                for name, fixture in self.facts(conftest).fixtures.items():
                    if name in asked and (conftest, name) not in used:
                        used.add((conftest, name))
                        asked |= fixture.asks
                        new += self._add(found, fixture.needs, 1)
        return new

    @staticmethod
    def _add(found: dict[str, int], needs: Iterable[str], distance: int) -> list[str]:
        new = [name for name in needs if name not in found]
        found.update(dict.fromkeys(new, distance))
        return new

    def _conftests(self, name: str) -> list[str]:
        path = PurePosixPath(name)
        if not path.name.startswith("test_") and path.name != "conftest.py":
            return []
        above = (str(folder / "conftest.py") for folder in path.parents)
        return [conftest for conftest in above if conftest in self.names.present and conftest != name]


def _is_of_tests(name: str, start: str) -> bool:
    return name.partition("/")[0] == start.partition("/")[0]
