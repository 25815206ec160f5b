"""START.ipynb, the first page: it runs in a workspace, and shows the engine answering, the map and what is done."""

from __future__ import annotations

import ast
import json
import re
import sys
from html import unescape
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from chapters import widgets
from grader.chapter_source import build_chapters, start_source
from grader.results.result import CheckResult, Result
from grader.study import lab_log
from grader.study.course_map import course_map
from grader.study.manifest import load_course
from grader.study.workspace import prepare
from reference_impl import LLM, course_model
from reference_impl.assembly.demo import demo_sampling

ROOT = Path(__file__).parents[2]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFERLAB_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("INFERLAB_DATA", str(tmp_path / "data"))
    return prepare().home


def test_start_equals_its_source_and_has_no_outputs() -> None:
    path = ROOT / "START.ipynb"
    assert path.read_text("utf-8") == build_chapters(ROOT)[path], "run: python -m grader.chapter_source"
    notebook = json.loads(path.read_text("utf-8"))
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook["cells"])


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


def test_start_runs_in_the_workspace_beside_a_folder_named_as_a_package(home: Path, kernel: str) -> None:
    """And says what it is told to: how many cells lie before the one that starts the engine."""
    notebook = nbformat.read(home / "START.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=300, kernel_name=kernel, resources={"metadata": {"path": str(home)}})
    client.execute()
    cells = {cell.id: cell for cell in notebook.cells}
    (shown,) = [output for output in cells["answering"].outputs if "data" in output]
    assert "return open(file, &#x27;rb&#x27;)" in shown.data["text/html"], "its last picture, for pages without widgets"
    assert "0 of 32 blocks in use" in shown.data["text/plain"]
    for output in cells["map"].outputs:
        assert "02 The KV cache: 0 of 3 notebooks read" in output.data["text/plain"]
    presses = [cell.id for cell in notebook.cells].index("answering") + 1
    assert f"**Shift+Enter** {['one', 'two', 'three', 'four', 'five'][presses - 1]} times" in cells["title"].source


def test_every_text_of_the_first_picture_ends_by_itself_and_is_python() -> None:
    """Greedy text of so small a model is nonsense soon: these prompts were chosen, and a new model needs others."""
    source = start_source(ROOT).read_text("utf-8")
    (prompts,) = [
        ast.literal_eval(node.value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "prompts"
    ]
    llm = LLM(course_model("target"), dtype="float32", device="cpu", block_size=4, num_blocks=32)
    for output in llm.generate(prompts, demo_sampling()):
        assert output.finish_reason == "stop", output.text
        ast.parse(f"{output.prompt}{output.text}\n")


def test_the_map_links_every_finished_notebook_quiz_and_lab_to_files_of_the_workspace(home: Path) -> None:
    hrefs = [unescape(href) for href in re.findall(r'href="([^"]+)"', course_map().html)]
    assert all((home / href.partition("#")[0]).is_file() for href in hrefs)
    for chapter in load_course().chapters:
        here = {href for href in hrefs if chapter.folder in href}
        labs = {f"labs/{chapter.folder}/{lab.slug}.ipynb" for lab in chapter.labs if lab.points}
        parts = {f"chapters/{chapter.folder}/{part.name}.ipynb" for part in chapter.parts}
        assert {href for href in here if "#" not in href} == labs | parts
        assert len(here) == len(labs | parts) + bool(parts), "one quiz a chapter"


def test_the_map_shows_what_was_read_and_solved(home: Path) -> None:
    part = home / "chapters/04_paged_attention/a_blocks.ipynb"
    notebook = json.loads(part.read_text("utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["execution_count"] = 1
    part.write_text(json.dumps(notebook), "utf-8")
    check = CheckResult("check", 20, 20, "passed", "")
    assert lab_log.record(Result("04_paged_attention", points=20, checks=[check])) == ""
    shown = course_map()
    assert "04 Paged attention: 1 of 1 notebooks read" in shown.text
    assert "lab 20 of 20 points" in shown.text
    assert "Done so far: 1 of " in shown.text
    assert re.search(r"1 of \d+ labs", shown.text)
    assert shown.html.count("✓") == 2


# ---------------------------------------------------------------- the picture


def test_the_picture_has_one_frame_a_step_and_the_blocks_are_those_of_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = sys.modules["chapters.widgets.answering"]
    frames, shown = [], []
    monkeypatch.setattr(module, "draw", lambda frame, draw=module.draw: frames.append(frame) or draw(frame))
    monkeypatch.setattr(module, "display", lambda view, display_id: shown.append(view))
    llm = LLM(course_model("draft"), dtype="float32", device="cpu", block_size=4, num_blocks=16, prefix_cache="off")
    widgets.answering(llm, ["def f(", "x = 1\n"], demo_sampling(6), every=2, pause=0)
    steps = llm.engine.trace.steps()
    assert len(frames) == len(steps)
    for frame, step in zip(frames, steps, strict=True):
        held = [block for answer in frame.answers for block in answer.blocks]
        assert len(held) == len(set(held)) == 16 - step.num_free_blocks
        assert [a.computed for a in frame.answers if a.computed] == [row.num_tokens for row in step.rows]
    assert [len(frame.answers) for frame in frames[:3]] == [1, 1, 2], "the second arrives two steps later"
    assert not llm.engine.has_work()
    (view,) = shown
    slider = view.box.children[1]
    slider.value = 1
    assert "Step 1." in view.picture.value


def test_an_interrupted_picture_leaves_no_request_in_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["chapters.widgets.answering"]

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module.time, "sleep", interrupted)
    monkeypatch.setattr(module, "display", lambda view, display_id: None)
    llm = LLM(course_model("draft"), dtype="float32", device="cpu", block_size=4, num_blocks=16)
    with pytest.raises(KeyboardInterrupt):
        widgets.answering(llm, ["def f("], demo_sampling(6))
    assert not llm.engine.has_work()


@pytest.mark.parametrize("count", [0, 4])
def test_more_prompts_than_letters_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 3, got {count}"):
        widgets.answering(None, ["x"] * count, None)


# ---------------------------------------------------------------- what can be read

READABLE = 4.5  # WCAG 2, level AA, for text of this size


def contrast(a: float, b: float) -> float:
    """Of two luminances."""
    dark, light = sorted((a, b))
    return (light + 0.05) / (dark + 0.05)


def luminance(red: float, green: float, blue: float) -> float:
    def linear(c: float) -> float:
        c /= 255
        return c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4

    return 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue)


def test_the_white_letters_of_requests_can_be_read() -> None:
    for colour in sys.modules["chapters.widgets.answering"].COLOURS:
        shade = luminance(*bytes.fromhex(colour[1:]))
        assert contrast(1.0, shade) >= READABLE, colour


@pytest.mark.parametrize(
    ("module", "name", "pages"),
    [
        ("chapters.widgets.answering", "asked", [(0, 0.87, 0xEE), (255, 0.87, 0x42)]),  # JupyterLab: text, on what
        ("grader.study.course_map", "planned", [(0, 0.87, 0xF5), (0, 0.87, 0xFF), (255, 0.87, 0x21)]),
    ],
)
def test_faint_text_can_be_read_on_a_light_and_on_a_dark_page(
    module: str, name: str, pages: list[tuple[int, float, int]]
) -> None:
    (opacity,) = re.findall(rf"\.{name} {{ opacity: ([\d.]+) }}", sys.modules[module]._STYLE)
    for text, alpha, page in pages:
        share = alpha * float(opacity)
        grey = text * share + page * (1 - share)
        assert contrast(luminance(*[grey] * 3), luminance(*[page] * 3)) >= READABLE, (text, page)
