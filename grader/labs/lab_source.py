"""From the one hand-written file of a lab, `solutions/NN_slug/SLUG.py`, to its two notebooks.

    SLUG.py (percent format) -> solutions/NN_slug/SLUG.ipynb -> nbgrader generate_assignment -> labs/NN_slug/SLUG.ipynb

The format is described in `grader/README.md`. What a learner neither writes nor needs to read is folded (`_folded`),
and comments to formatter and linter are left out (`grader.cell_form`). Builds are byte-identical: a cell's id is its
grade_id.
`python -m grader.labs.lab_source` rebuilds all labs of the repository; with `--check` it only says which files differ.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from grader.bootstrap import bootstrap_source
from grader.cell_form import FOLDED, LONGEST, num_lines, without_tool_comments
from grader.labs.lab import (
    BEGIN_HIDDEN,
    END_HIDDEN,
    HELPS,
    Cell,
    Lab,
    LabError,
    comment_text,
    lab_from_notebook,
    split_hidden,
    without_helps,
)
from grader.labs.release import course_directory, quiet_log, release_config
from grader.links import LINKS, with_links

KERNEL = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
# Ends the first cell of a lab's notebook.
SHOW_CHECKS = """\
import grader

grader.show_checks()  # what a check found is shown below it"""
_ID = re.compile(r"^[A-Za-z0-9_-]{1,64}$")


def solution_notebook(
    path: Path, install_url: str | None = None, changed: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """The solution notebook of a percent file, or of its cells `changed`, with nbgrader's metadata. Raises LabError."""
    cells: list[dict[str, Any]] = [_cell(raw, path) for raw in (percent_cells(path) if changed is None else changed)]
    if not any(cell["id"] == "bootstrap" for cell in cells):
        first = next((i for i, cell in enumerate(cells) if cell["cell_type"] == "code"), len(cells))
        raw = {
            "cell_type": "code",
            "source": f"{bootstrap_source(install_url)}\n\n{SHOW_CHECKS}",
            "metadata": {"nbgrader": {"grade_id": "bootstrap"}, "inferlab": {"where": "notebook"}},
        }
        cells.insert(first, _cell(raw, path))
    last = _cell({"cell_type": "markdown", "source": "", "metadata": {"nbgrader": {"grade_id": LINKS}}}, path)
    cells = with_links(cells, f"labs/{path.parent.name}/{path.stem}.ipynb", last)
    notebook = {"cells": cells, "metadata": KERNEL, "nbformat": 4, "nbformat_minor": 5}
    lab = lab_from_notebook(notebook, path.parent.name, path.stem)
    _validate(lab)
    for made, cell in zip(cells, lab.cells, strict=True):
        if made["cell_type"] == "code":
            made["source"] = without_tool_comments(made["source"])
        if _folded(cell):
            made["metadata"].update(FOLDED)
    return notebook


def _folded(cell: Cell) -> bool:
    """Whether a cell is folded: set-up, helpers of the checks, and any given code or check that is long.

    A check's hidden part does not count: the released notebook and the instructor's are folded alike.
    """
    if cell.kind == "code":
        helper = cell.where in ("examiner", "learner")
        return helper or cell.grade_id in ("bootstrap", "imports") or num_lines(cell.source) > LONGEST
    return cell.kind == "check" and num_lines(split_hidden(cell.source)[0]) > LONGEST


def percent_cells(path: Path) -> list[dict[str, Any]]:
    """The cells of a percent file as plain dicts. Raises LabError for a cell without grade_id."""
    return percent_cells_of(path.read_text("utf-8"), path.name)


def percent_cells_of(text: str, name: str) -> list[dict[str, Any]]:
    """The cells of a text in percent format; `name` is for messages. Raises LabError for a cell without grade_id."""
    import jupytext

    cells = [dict(cell) for cell in jupytext.reads(text, fmt="py:percent").cells]
    for cell in cells:
        if not (cell["metadata"].get("nbgrader") or {}).get("grade_id"):
            raise LabError(f"{name}: a cell has no grade_id: {cell['source'][:60]!r}")
    return cells


def _cell(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    given = dict(raw["metadata"]["nbgrader"])
    grade_id, grade, solution = given.pop("grade_id"), given.pop("grade", False), given.pop("solution", False)
    meta = {
        "grade": grade,
        "grade_id": grade_id,
        "locked": not solution,
        "schema_version": 3,
        "solution": solution,
        "task": False,
    }
    if grade:
        if "points" not in given:
            raise LabError(f"{path.name}, cell {grade_id}: a graded cell needs points")
        meta["points"] = given.pop("points")
    if given:
        raise LabError(f"{path.name}, cell {grade_id}: unknown nbgrader keys {', '.join(given)}")
    metadata: dict[str, Any] = {"nbgrader": meta}
    if "inferlab" in raw["metadata"]:
        if set(raw["metadata"]["inferlab"]) - {"where"}:
            raise LabError(f"{path.name}, cell {grade_id}: inferlab knows only the key where")
        metadata["inferlab"] = dict(raw["metadata"]["inferlab"])
    source = raw["source"]
    if grade and not solution:
        helps = {key: text for key in HELPS if (text := comment_text(source, key))}
        if helps:
            metadata["inferlab"] = metadata.get("inferlab", {}) | helps
        source = without_helps(source)
    cell: dict[str, Any] = {"cell_type": raw["cell_type"], "id": grade_id, "metadata": metadata, "source": source}
    return cell | ({"execution_count": None, "outputs": []} if raw["cell_type"] == "code" else {})


def _validate(lab: Lab) -> None:
    """Report an author's mistakes in a lab before they cost a learner points."""
    ids = [cell.grade_id for cell in lab.cells]
    for cell in lab.cells:
        where = f"{lab.slug}, cell {cell.grade_id}"
        if not _ID.match(cell.grade_id) or ids.count(cell.grade_id) > 1:
            raise LabError(f"{where}: a grade_id is unique, of letters, digits, - and _")
        if cell.kind in ("solution", "check", "code"):
            try:
                tree = ast.parse(cell.source)
            except SyntaxError as error:
                raise LabError(f"{where}: {error}") from None
            if cell.kind == "check":
                _validate_check(cell, tree, where)
        if cell.kind == "solution":
            if "BEGIN SOLUTION" not in cell.source:
                raise LabError(f"{where}: no ### BEGIN SOLUTION; the whole cell would be blanked")
            if not cell.names:
                raise LabError(f"{where}: defines no function or class at its top level")
    names = lab.graded_names
    if len(set(names)) != len(names):
        raise LabError(f"{lab.slug}: a graded name is defined in two solution cells")


def _validate_check(cell: Cell, tree: ast.Module, where: str) -> None:
    if not cell.property_text or not cell.hint:
        raise LabError(f"{where}: a check starts with the comments '# property: ...' and '# hint: ...'")
    if cell.source.count(BEGIN_HIDDEN) != cell.source.count(END_HIDDEN):
        raise LabError(f"{where}: hidden tests begin or end without the other")
    asserts = [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    if any(node.msg is None for node in asserts):
        raise LabError(f"{where}: every assert needs a message that says what was seen")
    if re.search(r"\breference\.", split_hidden(cell.source)[0]):
        raise LabError(f"{where}: the reference exists only in hidden tests; a learner's notebook has none")


def write_notebook(notebook: dict[str, Any]) -> str:
    """The text of a notebook file, in nbformat's own layout: a source is a list of lines."""
    cells = [cell | {"source": "".join(cell["source"]).splitlines(keepends=True)} for cell in notebook["cells"]]
    return json.dumps(notebook | {"cells": cells}, ensure_ascii=False, indent=1, sort_keys=True) + "\n"


def released_notebook(solution_text: str, slug: str, name: str) -> str:
    """The released notebook for a solution notebook: nbgrader's generate_assignment in a folder of its own."""
    from nbgrader.converters import GenerateAssignment
    from nbgrader.preprocessors import SaveCells

    with tempfile.TemporaryDirectory(prefix="release-") as folder:
        source = Path(folder, "solutions", slug)
        source.mkdir(parents=True)
        (source / f"{name}.ipynb").write_text(solution_text, "utf-8")
        config = release_config(Path(folder))
        steps = [step for step in GenerateAssignment.preprocessors.default_args[0] if step is not SaveCells]
        config.GenerateAssignment.preprocessors = steps
        directory = course_directory(config, slug)
        converter = GenerateAssignment(coursedir=directory, config=config, log=quiet_log())
        converter.no_database = True
        converter.start()
        made = json.loads(Path(folder, "labs", slug, f"{name}.ipynb").read_text("utf-8"))
    return write_notebook(made)


def build_labs(root: Path) -> dict[Path, str]:
    """All generated files of the labs under `root`, with their text. Raises LabError."""
    files: dict[Path, str] = {}
    for source in sorted((root / "solutions").glob("[0-9]*_*/*.py")):
        slug, name = source.parent.name, source.stem
        text = write_notebook(solution_notebook(source))
        files[source.with_suffix(".ipynb")] = text
        files[root / "labs" / slug / f"{name}.ipynb"] = released_notebook(text, slug, name)
    return files


def differing(files: dict[Path, str]) -> list[Path]:
    """Those files that are missing or differ from what they should be."""
    return [path for path, text in files.items() if not path.exists() or path.read_text("utf-8") != text]


def replaced(notebook: dict[str, Any], replacements: dict[str, str]) -> dict[str, Any]:
    """A copy of `notebook` with the sources of some cells replaced, by grade_id. Raises LabError for an unknown id."""
    copy = json.loads(json.dumps(notebook))
    by_id = {cell["metadata"]["nbgrader"]["grade_id"]: cell for cell in copy["cells"] if "nbgrader" in cell["metadata"]}
    for grade_id, source in replacements.items():
        if grade_id not in by_id:
            raise LabError(f"no cell {grade_id} in this lab")
        by_id[grade_id]["source"] = source
    return copy


def main(arguments: list[str]) -> int:
    """`python -m grader.labs.lab_source [--check]`; returns the exit status."""
    root = Path(__file__).resolve().parents[2]
    files = build_labs(root)
    wrong = differing(files)
    for path in wrong:
        print(("differs: " if "--check" in arguments else "written: ") + path.relative_to(root).as_posix())
        if "--check" not in arguments:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path], "utf-8")
    return 1 if wrong and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
