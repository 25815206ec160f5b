"""Which submissions resemble each other, or a known solution, more than independent work does.

After winnowing (Schleimer, Wilkerson, Aiken: "Winnowing: local algorithms for document fingerprinting", SIGMOD 2003),
over the syntax tree in place of the text: a definition becomes a sequence of node types, operators, constants and names
of what the learner did not name; own names, comments, docstrings, annotations and layout are gone. Hashes of every
GRAM tokens in a row, the smallest of each WINDOW, are its fingerprints. Definitions are taken one by one, so their
order does not matter. What the released lab itself contains is subtracted. If a submission resembles a known solution,
that solution is subtracted too before students are compared: a common ancestor does not make them copies of each other.

Similarity is a reason to look at two submissions, never a proof: a short function has few ways to be written.
"""

from __future__ import annotations

import ast
import builtins
import heapq
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from grader.examination.cell_source import plain_python

GRAM, WINDOW = 12, 4
MIN_PRINTS = 20  # less says nothing: a few lines can only be written in a few ways
THRESHOLD = 0.5  # the share of fingerprints in common; measured in tests/grader/test_similarity.py
MAX_PAIRS = 5000  # that are kept; a class in which all resemble each other has n * n / 2
MAX_CODE = 100_000  # characters of one submission's cells: what follows is not compared, and its student is named
LARGE = 1 << 64  # an int from here on is any int
_BUILTINS = frozenset(dir(builtins))
_ATTRIBUTES = frozenset(name for kind in (list, dict, set, str, tuple) for name in dir(kind)) | frozenset(
    "shape dtype device data ndim size mean sum".split()
)  # stay, also where the author has an attribute of that name
_SKIPPED = (ast.expr_context, ast.alias, ast.Import, ast.ImportFrom, ast.Pass)


@dataclass(frozen=True)
class Pair:
    """Two submissions, or one and a known solution. share: of the fingerprints of both, those in common, 0 to 1."""

    left: str
    right: str
    share: float


@dataclass(frozen=True)
class Similar:
    """What was found. clusters: students, each with a pair above the threshold to another of its cluster; pairs: the
    MAX_PAIRS closest, by what they have beside a known solution that they resemble; known: a student and a known
    solution; compared: submissions with enough code of their own; too_short: the others, and those whose code could
    not be read; too_long: those of whom only the first MAX_CODE characters, in whole cells, were compared.
    """

    clusters: tuple[tuple[str, ...], ...]
    pairs: tuple[Pair, ...]
    known: tuple[Pair, ...]
    compared: int
    too_short: tuple[str, ...]
    too_long: tuple[str, ...] = ()


def similar(
    submissions: Mapping[str, Sequence[str]],
    release: Sequence[str],
    known: Mapping[str, Sequence[str]] | None = None,
    threshold: float = THRESHOLD,
) -> Similar:
    """Compare the cells of each student with each other's and with `known` solutions; `release`: the stub's cells."""
    given = frozenset(name for source in release for name in _names_in(source))
    stub = fingerprints(release, given)
    prints = {student: _of_student(cells, given) - stub for student, cells in submissions.items()}
    too_short = tuple(sorted(student for student, found in prints.items() if len(found) < MIN_PRINTS))
    students = [student for student in sorted(prints) if student not in set(too_short)]
    solutions = {name: fingerprints(cells, given) - stub for name, cells in (known or {}).items()}
    alike = [
        Pair(student, name, share)
        for student in students
        for name, solution in solutions.items()
        if len(solution) >= MIN_PRINTS and (share := _share(prints[student], solution)) >= threshold
    ]
    # Who both resemble a known solution resemble each other by that: of them only the rest is compared.
    known_of: dict[str, frozenset[int]] = defaultdict(frozenset)
    for pair in alike:
        known_of[pair.left] |= solutions[pair.right]
    rest = {student: prints[student] - known_of[student] for student in students}
    paired = [student for student in students if len(rest[student]) >= MIN_PRINTS]
    groups = _Groups()
    pairs = heapq.nlargest(
        MAX_PAIRS,
        (groups.joined(pair) for pair in _pairs([rest[student] for student in paired], paired, threshold)),
        key=lambda pair: pair.share,
    )
    return Similar(
        tuple(groups.clusters()),
        tuple(sorted(pairs, key=lambda pair: (-pair.share, pair.left, pair.right))),
        tuple(sorted(alike, key=lambda pair: (-pair.share, pair.left, pair.right))),
        len(students),
        too_short,
        tuple(sorted(student for student, cells in submissions.items() if sum(map(len, cells)) > MAX_CODE)),
    )


def _of_student(cells: Sequence[str], given: frozenset[str]) -> frozenset[int]:
    """The fingerprints of a student's cells; none where they cannot be read, so no code stops the comparison."""
    try:
        return fingerprints(cells, given)
    except Exception:
        return frozenset()


def fingerprints(cells: Iterable[str], given: frozenset[str] = frozenset()) -> frozenset[int]:
    """The fingerprints of some cells. given: names that the lab fixes and that therefore stay. Cells that are not
    Python are left out.
    """
    trees = [tree for source in _first(cells) if (tree := _parsed(source)) is not None]
    own = _own_names(trees) - given
    found: set[int] = set()
    for unit in _units(trees):
        found.update(_winnow([zlib.crc32(token.encode("utf-8", "replace")) for token in _tokens(unit, own)]))
    return frozenset(found)


def _first(cells: Iterable[str]) -> Iterator[str]:
    """The cells up to the one with which they would be longer than MAX_CODE."""
    left = MAX_CODE
    for source in cells:
        left -= len(source)
        if left < 0:
            return
        yield source


def _parsed(source: str) -> ast.Module | None:
    for as_python in (str, plain_python):  # most cells hold no magics, and to look for them takes another parse
        try:
            return ast.parse(as_python(source))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return None


def _units(trees: Iterable[ast.Module]) -> Iterator[ast.AST]:
    """Yields what is compared as one sequence: functions, methods, what else a class holds, loose statements."""
    for tree in trees:
        rest = []
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                for part in node.body:
                    if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
                        yield part
                    else:
                        rest.append(part)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield node
            else:
                rest.append(node)
        yield ast.Module(body=rest, type_ignores=[])


def _own_names(trees: Iterable[ast.Module]) -> set[str]:
    """Names the author chose: variables, arguments, functions, classes, attributes that are set somewhere."""
    own: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            match node:
                case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                    own.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store()):
                    own.add(name)
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
                    own.add(name)
                case ast.ExceptHandler(name=str(name)):
                    own.add(name)
    return own


def _names_in(source: str) -> set[str]:
    """Names the lab fixes: what the released cells define, with their arguments and methods."""
    tree = _parsed(source)
    nodes = ast.walk(tree) if tree is not None else iter(())
    kinds = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
    return {node.name for node in nodes if isinstance(node, kinds)}


def _tokens(node: ast.AST, own: set[str]) -> Iterator[str]:
    """The tree in prefix order, each node as a word. Iterative, so that no depth of nesting ends it."""
    stack: list[ast.AST | str] = [node]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
            continue
        if isinstance(item, _SKIPPED) or _is_docstring(item):
            continue
        word = _word(item, own)
        if word:
            yield word
        children = [child for name, child in _children(item) if name not in ("annotation", "returns", "type_comment")]
        if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef, ast.For, ast.While, ast.If, ast.Call)):
            stack.append(f"end {type(item).__name__}")
        stack.extend(reversed(children))


def _children(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for name, value in ast.iter_fields(node):
        if isinstance(value, ast.AST):
            yield name, value
        elif isinstance(value, list):
            yield from ((name, part) for part in value if isinstance(part, ast.AST))


def _word(node: ast.AST, own: set[str]) -> str:
    match node:
        case ast.Module() | ast.Expr() | ast.arguments():
            return ""
        case ast.Name(id=name):
            return "name" if name in own or name not in _BUILTINS else name
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return "attribute" if name in own else f".{name}"
        case ast.Attribute(attr=name):
            return "attribute" if name in own - _ATTRIBUTES else f".{name}"
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return "def" if name in own else f"def {name}"
        case ast.keyword(arg=name):
            return f"{name}="
        case ast.Constant(value=value):
            small = isinstance(value, (float, bool, type(None))) or (isinstance(value, int) and abs(value) < LARGE)
            return repr(value) if small else type(value).__name__  # Python writes no int of 5000 digits
        case ast.JoinedStr():
            return "str"
        case ast.AnnAssign():
            return "Assign"
        case _:
            return type(node).__name__


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _winnow(tokens: Sequence[int]) -> set[int]:
    """The smallest hash of every WINDOW consecutive grams. A sequence shorter than a gram has none."""
    if len(tokens) < GRAM:
        return set()
    # hash = sum over the gram of token * B^i, in 64 bits, wrapping; then mixed, as low bits of a sum are not random
    row = np.array(tokens, dtype=np.uint64)
    factors = np.power(np.uint64(0x9E3779B97F4A7C15), np.arange(GRAM, dtype=np.uint64))
    grams = (np.lib.stride_tricks.sliding_window_view(row, GRAM) * factors).sum(1, dtype=np.uint64)
    grams = (grams ^ (grams >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    windows = np.lib.stride_tricks.sliding_window_view(grams, min(WINDOW, len(grams)))
    return set(windows.min(1).tolist())


def _share(left: frozenset[int], right: frozenset[int]) -> float:
    """Twice the fingerprints in common over those of both (Dice's coefficient)."""
    return 2 * len(left & right) / (len(left) + len(right)) if left or right else 0.0


def _pairs(prints: Sequence[frozenset[int]], names: Sequence[str], threshold: float) -> Iterator[Pair]:
    """All pairs above the threshold, by an inverted index: only fingerprints in common are counted."""
    having: dict[int, list[int]] = defaultdict(list)
    for number, found in enumerate(prints):
        for one in found:
            having[one].append(number)
    rows = {one: np.array(numbers, dtype=np.int64) for one, numbers in having.items() if len(numbers) > 1}
    sizes = np.array([len(found) for found in prints], dtype=np.float64)
    for number, found in enumerate(prints):
        shared = [rows[one] for one in found if one in rows]
        if not shared:
            continue
        common = np.bincount(np.concatenate(shared), minlength=len(prints))
        share = 2 * common / (sizes + sizes[number])
        for other in np.flatnonzero(share[number + 1 :] >= threshold) + number + 1:
            yield Pair(names[number], names[int(other)], float(share[other]))


class _Groups:
    """Students who are connected by pairs, updated pair by pair."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}

    def joined(self, pair: Pair) -> Pair:
        self._parent[self._find(pair.left)] = self._find(pair.right)
        return pair

    def _find(self, name: str) -> str:
        while self._parent.setdefault(name, name) != name:
            self._parent[name] = self._parent[self._parent[name]]
            name = self._parent[name]
        return name

    def clusters(self) -> list[tuple[str, ...]]:
        """The groups, the largest first."""
        members: dict[str, list[str]] = defaultdict(list)
        for name in list(self._parent):
            members[self._find(name)].append(name)
        return sorted((tuple(sorted(group)) for group in members.values()), key=lambda group: (-len(group), group))
