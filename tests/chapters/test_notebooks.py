"""Every notebook equals its source, has the anatomy of a chapter, and runs from top to bottom."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from grader.chapter_source import ChapterError, build_chapters, cell_names, chapter_notebook, chapter_sources
from tests.chapters.prose import absent_here, read_notebook, silent_cells, unprinted_numbers

ROOT = Path(__file__).parents[2]
SOURCES = chapter_sources(ROOT)
HEADINGS = (
    "1. A question with a number",
    "2. The idea",
    "3. From scratch",
    "4. The same thing inside the engine",
    "5. Measure and explain",
    "6. Explore",
    "7. What the cheat sheets get wrong",
    "8. In production",
    "9. Quiz",
    "10. Card",
)
built = functools.cache(build_chapters)
every_notebook = pytest.mark.parametrize("source", SOURCES, ids=lambda path: f"{path.parent.name}-{path.stem}")


def markdown(notebook: dict[str, Any]) -> str:
    return "\n\n".join(cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "markdown")


def test_there_are_chapters() -> None:
    assert SOURCES


@every_notebook
def test_the_notebook_equals_its_source(source: Path) -> None:
    path = source.with_suffix(".ipynb")
    assert path.read_text("utf-8") == built(ROOT)[path], "run: python -m grader.chapter_source"


def test_no_notebook_is_without_a_source() -> None:
    notebooks = sorted((ROOT / "chapters").glob("[0-9]*/*.ipynb"))
    assert notebooks == [source.with_suffix(".ipynb") for source in SOURCES]


@every_notebook
def test_the_notebook_has_the_ten_parts_of_a_chapter_in_order(source: Path) -> None:
    text = markdown(read_notebook(source.with_suffix(".ipynb")))
    assert tuple(re.findall(r"^## (\d+\. .+)$", text, flags=re.MULTILINE)) == HEADINGS


@every_notebook
def test_the_notebook_is_valid_and_has_no_outputs(source: Path) -> None:
    notebook = json.loads(source.with_suffix(".ipynb").read_text("utf-8"))
    nbformat.validate(notebook)
    assert notebook["cells"][1]["id"] == "bootstrap"
    for cell in notebook["cells"]:
        assert not cell.get("outputs"), cell["id"]
        assert cell.get("execution_count") is None, cell["id"]


@every_notebook
def test_links_lead_to_files_that_are_copied_to_the_learner(source: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", markdown(read_notebook(source.with_suffix(".ipynb")))):
        if not target.startswith("https://"):
            assert re.fullmatch(r"\.\./\.\./((labs|chapters)/\d\d_\w+/\w+|START)\.ipynb|\w+\.ipynb", target), target


@pytest.fixture(params=["warm", pytest.param("cold", marks=pytest.mark.slow)])
def kernel(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a kernel: cold as Jupyter starts it, warm with torch and matplotlib imported beforehand."""
    if request.param == "cold":
        return "python3"
    spec = tmp_path / "jupyter" / "kernels" / "warm" / "kernel.json"
    spec.parent.mkdir(parents=True)
    argv = request.getfixturevalue("warm").command(("-m", "ipykernel_launcher", "-f", "{connection_file}"))
    spec.write_text(json.dumps({"argv": argv, "display_name": "warm", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    return "warm"


@pytest.mark.timeout(900)
@every_notebook
def test_the_notebook_runs_from_top_to_bottom(
    source: Path, kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an empty folder, with no front end. The limit is liveness, not speed: 60 s are the aim on two idle cores."""
    monkeypatch.setenv("INFERLAB_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "cwd").mkdir()
    notebook = nbformat.from_dict(chapter_notebook(source, "inferlab"))
    client = NotebookClient(
        notebook, timeout=600, kernel_name=kernel, resources={"metadata": {"path": str(tmp_path / "cwd")}}
    )
    client.execute()
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if output.output_type in ("display_data", "execute_result"):
                assert "text/plain" in output.data, f"{cell.id}: nothing for a terminal"
                for page in re.findall(r"<img [^>]*>", output.data.get("text/html", "")):
                    assert re.search(r'alt="[^"]{20,}"', page), f"{cell.id}: a figure without alt text"
                assert "image/png" not in output.data, f"{cell.id}: use show(fig, alt)"
            assert output.output_type != "stream" or output.name == "stdout", f"{cell.id}: {output.text}"
    assert list((tmp_path / "cwd").iterdir()) == [], "a notebook leaves no files behind"
    assert silent_cells(notebook, absent_here()) == [], "cells that print or show something, and show nothing"
    assert unprinted_numbers(notebook) == [], "numbers of the prose whose mark names a cell that does not print them"


# ---------------------------------------------------------------- the generator


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "part.py"
    path.write_text(text, "utf-8")
    return path


def test_cell_ids_are_the_names_and_survive_an_edit_elsewhere(tmp_path: Path) -> None:
    text = '# %% [markdown] name="title"\n# # T\n\n# %% name="one"\nx = 1\n\n\n# %% name="two"\nx = 2\n'
    assert cell_names(written(tmp_path, text)) == ["title", "bootstrap", "one", "two"]
    edited = text.replace("x = 1", "x = 1\ny = 2")
    before, after = (chapter_notebook(written(tmp_path, t), "inferlab")["cells"] for t in (text, edited))
    assert before[3] == after[3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# %%\nx = 1\n", "name="),
        ('# %% name="a b"\nx = 1\n', "a b"),
        ('# %% name="a"\nx = 1\n\n# %% name="a"\nx = 2\n', "taken"),
        ('# %% name="bootstrap"\nx = 1\n', "taken"),
        ('# %% name="a" colour="red"\nx = 1\n', "colour"),
        ('# %% name="a"\nx = = 1\n', "cell a"),
    ],
)
def test_a_wrong_source_is_refused_by_cell(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ChapterError, match=message):
        chapter_notebook(written(tmp_path, text), "inferlab")
