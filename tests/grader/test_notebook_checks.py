"""What a learner sees below a check's cell, in a real kernel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grader.results.result import CheckResult
from grader.study.check_view import check_html, check_text, findings, grouped
from grader.study.lab_hints import Step

WINDOW = """class Window:
    def __init__(self, size):
        self.size, self.rows = size, []
    def append(self, x):
        self.rows = [*self.rows, x]
    def mean(self):
        return torch.stack(self.rows).mean(0)
    def __len__(self):
        LENGTH
"""
HANGS = "while self.size:\n            pass"
ERROR = "return self.rows.nothing"


@pytest.fixture
def run(release_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """run([(cell id, source), ...]): the outputs of each cell of the toy lab in a kernel, by id, in this order."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    path = tmp_path / "root" / "labs" / "01_toy" / "toy.ipynb"
    path.parent.mkdir(parents=True)
    path.write_text(release_text)
    monkeypatch.setenv("INFERLAB_DATA", str(tmp_path / "data"))
    released = {cell["id"]: "".join(cell["source"]) for cell in json.loads(release_text)["cells"]}
    here = (
        "from pathlib import Path\nfrom grader.study import workspace\n"
        f"workspace.data_root = lambda: Path({str(tmp_path / 'root')!r})\n"
        "import grader.notebook_checks as n\nn.OWN_CALL = 3.0\nn.SHOWN_AFTER = 0.5"
    )

    def run_cells(cells: list[tuple[str, str]]) -> list[tuple[bool, dict[str, Any], str]]:
        cells = [("here", here), ("bootstrap", ""), ("imports", ""), *cells]
        notebook = nbformat.v4.new_notebook()
        notebook.cells = [nbformat.v4.new_code_cell(source or released[name]) for name, source in cells]
        found, client = [], NotebookClient(notebook, timeout=600)
        with client.setup_kernel():
            for number, cell in enumerate(notebook.cells):
                try:
                    client.execute_cell(cell, number)
                    passed = True
                except CellExecutionError:
                    passed = False
                data = [output["data"] for output in cell.outputs if output["output_type"] == "display_data"]
                said = "".join(output.get("text", "") for output in cell.outputs)
                said += "".join(output.get("evalue", "") for output in cell.outputs)
                found.append((passed, data[-1] if data else {}, said))
        assert all(passed for passed, _, _ in found[:3]), found
        return found[3:]

    return run_cells


def test_a_check_says_passed_or_what_failed_and_an_error_shows_the_learners_lines(run: Any) -> None:
    undefined, _, passed, failed, _, broken, hint, other = run(
        [
            ("check_len", ""),
            ("", WINDOW.replace("LENGTH", "return min(len(self.rows), self.size)")),
            ("check_len", ""),
            ("check_window", ""),
            ("", WINDOW.replace("LENGTH", ERROR)),
            ("check_len", ""),
            ("", "grader.hint()"),
            ("", "1 / 0"),
        ]
    )
    assert not undefined[0]
    assert "Window is not defined: run the cells above" in undefined[1]["text/plain"]
    assert passed[0]
    assert passed[1]["text/plain"] == "passed, 1 point: check_len"
    assert "#2e7d32" in passed[1]["text/html"]
    assert not failed[0]  # so that "Run all" stops here
    assert "Expected: a mean of 3" in failed[1]["text/plain"]
    assert "after 1, 2, 4 in a window of 2" in failed[2]  # what the check prints stays
    assert "<summary" in failed[1]["text/html"]
    assert not broken[0]
    lines = broken[1]["text/plain"].split("\n")
    assert "your code raised AttributeError" in broken[1]["text/plain"]
    assert "cell Window, line 9, in __len__" in lines
    assert f"    {ERROR}" in lines
    assert "Traceback" not in broken[1]["text/plain"] + broken[2]
    assert "Hint: it never exceeds the size of the window." in hint[2]
    assert not other[0]
    assert "division by zero" in other[2]  # a cell that is no check is as always
    assert not other[1]


def test_a_loop_without_end_is_ended_and_the_next_check_waits_less(run: Any) -> None:
    _, first, after = run([("", WINDOW.replace("LENGTH", HANGS)), ("check_len", ""), ("", "print('the kernel lives')")])
    assert not first[0]
    text = first[1]["text/plain"]
    assert "did not finish in time" in text
    assert "__len__ (cell Window) had not finished after" in text
    assert "while self.size:" in text or "pass" in text
    assert "KeyboardInterrupt" not in text + first[2]
    assert "the kernel lives" in after[2]


FAILED = CheckResult("check_a", 2, 0, "failed", "a holds", "with n=3, k=<2>: expected 7 tokens, saw 6")


@pytest.mark.parametrize(
    ("message", "rows"),
    [
        (FAILED.message, [("Input", "with n=3, k=<2>"), ("Expected", "7 tokens"), ("Came", "6")]),
        ("expected 3 calls, saw 2", [("Expected", "3 calls"), ("Came", "2")]),
        ("view(): keys are (1, 2), saw (3,)", [("Expected", "view(): keys are (1, 2)"), ("Came", "(3,)")]),
        ("an input was changed", [("Seen", "an input was changed")]),
    ],
)
def test_what_failed_is_told_in_order(message: str, rows: list[tuple[str, str]]) -> None:
    assert findings(CheckResult("check_a", 2, 0, "failed", "a holds", message)) == [("Property", "a holds"), *rows]


def test_html_and_text_say_the_same_and_hints_are_folded_inside_each_other() -> None:
    steps = [Step("Question", "why <b>?"), Step("Hint", "so"), Step("Explanation", "", "opens after 3 tries")]
    html, text = check_html(FAILED, steps), check_text(FAILED, steps, "grader.hint()")
    assert "k=&lt;2&gt;" in html
    assert "why &lt;b&gt;?" in html
    assert "<style" not in html
    assert html.index("Question") < html.index("Hint") < html.index("opens after 3 tries")
    assert html.count("<details") == 2
    assert html.index("</details>") > html.index("opens after 3 tries")
    assert "why" not in text
    for part in ("not yet", "a holds", "7 tokens", "check_a"):
        assert part in html
        assert part in text


def test_what_hangs_once_is_one_row() -> None:
    hung = [CheckResult(name, 1, 0, "not run", "p", "it needs X") for name in ("check_b", "check_c")]
    passed = [CheckResult(name, 1, 1, "passed", "p") for name in ("check_d", "check_e")]
    assert [(check.grade_id, more) for check, more in grouped([FAILED, *hung, *passed])] == [
        ("check_a", []), ("check_b", ["check_c"]), ("check_d", []), ("check_e", []),
    ]  # fmt: skip
