"""Makes the two notebooks of a lab from its one hand-written file, `solutions/NN_slug/SLUG.py`.

    SLUG.py (percent format) -> solutions/NN_slug/SLUG.ipynb -> nbgrader generate_assignment -> labs/NN_slug/SLUG.ipynb

The format is described in `grader/README.md`. What a learner neither writes nor needs to read is folded (`_folded`),
and comments to formatter and linter are left out (`grader.cell_form`). Builds are byte-identical: a cell's id is its
grade_id.
`python -m grader.labs.lab_source` rebuilds all labs of the repository; with `--check` it only says which files differ.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grader.bootstrap import bootstrap_source
from grader.cell_form import FOLDED, LONGEST, num_lines, without_tool_comments
from grader.labs.convention import Option, changed_cells
from grader.labs.lab import Cell, LabError, lab_from_notebook, split_hidden
from grader.labs.percent_file import notebook_cell, percent_cells, validate_lab
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


def solution_notebook(
    path: Path, install_url: str | None = None, changed: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """The solution notebook of a percent file, or of its cells `changed`, with nbgrader's metadata. Raises LabError."""
    cells: list[dict[str, Any]] = [
        notebook_cell(raw, path) for raw in (percent_cells(path) if changed is None else changed)
    ]
    if not any(cell["id"] == "bootstrap" for cell in cells):
        first = next((i for i, cell in enumerate(cells) if cell["cell_type"] == "code"), len(cells))
        raw = {
            "cell_type": "code",
            "source": f"{bootstrap_source(install_url)}\n\n{SHOW_CHECKS}",
            "metadata": {"nbgrader": {"grade_id": "bootstrap"}, "inferlab": {"where": "notebook"}},
        }
        cells.insert(first, notebook_cell(raw, path))
    last = notebook_cell({"cell_type": "markdown", "source": "", "metadata": {"nbgrader": {"grade_id": LINKS}}}, path)
    cells = with_links(cells, f"labs/{path.parent.name}/{path.stem}.ipynb", last)
    notebook = {"cells": cells, "metadata": KERNEL, "nbformat": 4, "nbformat_minor": 5}
    lab = lab_from_notebook(notebook, path.parent.name, path.stem)
    validate_lab(lab)
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


def private_notebook(source: Path, options: Sequence[Option], install_url: str | None = None) -> dict[str, Any]:
    """The solution notebook of a lab with these options; without any it is the public one. Raises LabError."""
    return solution_notebook(source, install_url, changed_cells(source, options))


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
