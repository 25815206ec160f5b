"""Makes a chapter's notebook from its percent source.

    chapters/NN_slug/PART.py -> chapters/NN_slug/PART.ipynb

Every cell has a name (`# %% name="measure"`, `# %% [markdown] name="idea"`), which becomes its cell id: a rebuild
changes nothing, and coverage.yaml can point at `PART.py#measure`. The first code cell, `bootstrap`, is generated. It
is folded, and so are the cell `setup` and every cell whose source says `jupyter={"source_hidden": true}`. Comments that
only speak to a formatter or a linter (`# fmt: skip`) are left out.
`python -m grader.chapter_source` rebuilds all chapters of the repository; with `--check` it only says which differ.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

from grader.bootstrap import bootstrap_source
from grader.cell_form import FOLDED, without_tool_comments
from grader.labs.lab_source import KERNEL, differing, write_notebook
from grader.links import LINKS, START, with_links

_ID = re.compile(r"^[A-Za-z0-9_-]{1,64}$")
# Notebook metadata that a source may set beside the name, e.g. jupyter={"source_hidden": true} for a long figure.
_PASSED_ON = {"jupyter", "tags"}
_FOLDED_CELLS = ("bootstrap", "setup")


class ChapterError(ValueError):
    """A chapter source is invalid: says which file, which cell, and what was expected."""


def chapter_notebook(path: Path, install_url: str | None = None) -> dict[str, Any]:
    """The notebook of one percent file, without outputs. Raises ChapterError."""
    import jupytext

    cells = [_cell(dict(raw), path) for raw in jupytext.reads(path.read_text("utf-8"), fmt="py:percent").cells]
    names = [cell["id"] for cell in cells]
    for name in names:
        if names.count(name) > 1 or name in ("bootstrap", LINKS):
            raise ChapterError(f"{path.name}: the cell name {name!r} is taken; every cell needs a name of its own")
    first = next((i for i, cell in enumerate(cells) if cell["cell_type"] == "code"), len(cells))
    cells.insert(first, _code("bootstrap", bootstrap_source(install_url), {}))
    last = {"cell_type": "markdown", "id": LINKS, "metadata": {}}
    is_start = path.with_suffix(".ipynb").name == START
    cells = with_links(cells, START if is_start else f"chapters/{path.parent.name}/{path.stem}.ipynb", last)
    return {"cells": cells, "metadata": KERNEL, "nbformat": 4, "nbformat_minor": 5}


def cell_names(path: Path) -> list[str]:
    """The names of the cells of a percent file, in order; the names that `PART.py#name` may point at."""
    return [cell["id"] for cell in chapter_notebook(path, install_url="inferlab")["cells"]]


def _cell(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    metadata = dict(raw["metadata"])
    metadata.pop("lines_to_next_cell", None)  # jupytext's note on the blank lines of the source
    name = metadata.pop("name", None)
    shown = raw["source"][:60]
    if not isinstance(name, str) or not _ID.match(name):
        raise ChapterError(f'{path.name}: expected name="..." of letters, digits, - and _, got {name!r} at {shown!r}')
    if unknown := set(metadata) - _PASSED_ON:
        raise ChapterError(f"{path.name}, cell {name}: unknown metadata {sorted(unknown)}")
    if raw["cell_type"] == "markdown":
        return {"cell_type": "markdown", "id": name, "metadata": metadata, "source": raw["source"]}
    try:
        ast.parse(raw["source"])
        source = without_tool_comments(raw["source"])
    except SyntaxError as error:
        raise ChapterError(f"{path.name}, cell {name}: {error}") from None
    return _code(name, source, metadata)


def _code(name: str, source: str, metadata: dict[str, Any]) -> dict[str, Any]:
    folded = name in _FOLDED_CELLS or bool(metadata.get("jupyter", {}).get("source_hidden"))
    metadata = metadata | (FOLDED if folded else {})
    return {
        "cell_type": "code",
        "id": name,
        "metadata": metadata,
        "source": source,
        "execution_count": None,
        "outputs": [],
    }


def chapter_sources(root: Path) -> list[Path]:
    """The percent files under `root`/chapters, in order."""
    return sorted((root / "chapters").glob("[0-9][0-9]_*/*.py"))


def build_chapters(root: Path) -> dict[Path, str]:
    """All generated notebooks of the chapters under `root`, and START, with their text. Raises ChapterError."""
    files = {path.with_suffix(".ipynb"): write_notebook(chapter_notebook(path)) for path in chapter_sources(root)}
    if (start := start_source(root)).is_file():
        files[root / START] = write_notebook(chapter_notebook(start))
    return files


def start_source(root: Path) -> Path:
    """The source of START.ipynb, which stands beside chapters/ and labs/, in the workspace as in the repository."""
    return root / "chapters" / "start-here" / "START.py"


def main(arguments: list[str]) -> int:
    """`python -m grader.chapter_source [--check]`; returns the exit status."""
    root = Path(__file__).resolve().parent.parent
    files = build_chapters(root)
    wrong = differing(files)
    for path in wrong:
        print(("differs: " if "--check" in arguments else "written: ") + path.relative_to(root).as_posix())
        if "--check" not in arguments:
            path.write_text(files[path], "utf-8")
    return 1 if wrong and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
