"""The labs' sources, and what part of their proofs `make test` tries.

`make test-all` proves every lab in full; `tests/record.txt` has what that needed, and a run says which are older.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from tests.selection.record import PATH, Record
from tests.selection.sources import Tree, commits

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "solutions").glob("[0-9]*_*/*.py"))


def draw_of(source: Path) -> str:
    """The seed of what is drawn for a lab: a hash of its own files. A commit that leaves a lab alone draws what was
    drawn before, so that no draw fails which that commit has nothing to do with."""
    tree = Tree(ROOT, PATH)
    tops = [f"{top}/{source.parent.name}/" for top in ("solutions", "tests/labs")]
    own = sorted(name for name in tree.names if name.startswith(tuple(tops)))
    return hashlib.sha256("".join(f"{name} {tree.content(name)}\n" for name in own).encode()).hexdigest()


@functools.cache
def due() -> tuple[Path, ...]:
    """The labs of which a run tries most: the one whose turn it is, and those whose own files are not as they
    were when the tests were last recorded. The record sees what else changed: of another lab, `make test` tries that
    what is right passes and what is wrong does not."""
    turn = SOURCES[commits(ROOT) % len(SOURCES)]
    tree, record = Tree(ROOT, PATH), Record.read(ROOT / PATH)
    known = {(file.path, file.content) for file in record.files.values()}
    changed = [name for name in tree.names if (name, tree.content(name)) not in known]
    tops = ("solutions", "labs", "tests/labs")
    return tuple(source for source in SOURCES
                 if source == turn or any(name.startswith(f"{top}/{source.parent.name}/") for name in changed
                                          for top in tops))  # fmt: skip


def was_tried(source: Path) -> bool:
    """Whether the full proofs of this lab were ever recorded as passed."""
    lines = Record.read(ROOT / PATH).lines
    return any(line.file == f"tests/labs/in_full/test_{source.parent.name}.py" for line in lines)
