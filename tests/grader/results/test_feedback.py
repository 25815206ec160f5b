"""The feedback page: what it shows, and that nothing a learner wrote can do anything in it."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

import grader
from grader.results.feedback import feedback_page
from grader.results.result import NO_CELLS, STATUSES, CheckResult, Result
from grader.results.shown_text import MAX_CHARACTERS, MAX_LINES, shown, shown_line

SLUG = "01_toy"
HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</pre></main></body><iframe src=javascript:alert(1)>",
    "{{ 7 * 7 }} {% raw %} {# #} ${7*7}",
    "<style>body{display:none}</style><link rel=stylesheet href=//evil.example>",
    "<a href='https://evil.example'>your grade</a> https://evil.example",
    "<!-- --><![CDATA[x]]><?php ?>&lt;b&gt;&#60;i&#62;",
    "\x00null\x1b[31mred\x07\x9b31m",
    "points: \u202e6 fo 6\u202c \u2066isolated\u2069 zero\u200bwidth\ufeff",
    "Z\u0336\u0352\u0353\u0354" + "\u0334" * 300,
    "\ud800 lone surrogate",
]


class Page(HTMLParser):
    """A parsed page: tags with attributes, and the text of each element."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_comment(self, data: str) -> None:
        self.tags.append(("comment", {}))

    def shape(self) -> list[tuple[str, tuple[str, ...]]]:
        return [(tag, tuple(attrs)) for tag, attrs in self.tags]


def result(text: str = "plain", **changes: Any) -> Result:
    checks = [
        CheckResult("check_a", 2, 2, "passed", "It holds.", "", "not shown", text, 0.25),
        CheckResult("check_b", 3, 0, "failed", "It is exact.", text, "Look at it.", text, 0.5),
    ]
    given = {"lab": "02_x", "points": 5.0, "checks": checks, "notes": [text], "printed": text, "student": text}
    return Result(**{**given, **changes})


def notebook(text: str = "plain", score: float = 0.0, by_hand: bool = False) -> Any:
    def meta(grade_id: str, **more: Any) -> dict[str, Any]:
        return {"nbgrader": {"grade_id": grade_id, "grade": False, "solution": False, **more}}

    return new_notebook(
        cells=[
            new_code_cell(
                "SECRET OF THE CHECK", metadata=meta("check_b", grade=True, score=score, points=3.0, by_hand=by_hand)
            ),
            new_code_cell(text, metadata=meta("part", solution=True, comment=text)),
            new_markdown_cell(text, metadata=meta("essay", solution=True, grade=True, score=None, points=4.0)),
            new_code_cell(text, metadata={}),
        ]
    )


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_changes_no_tag_and_no_attribute_of_the_page(text: str) -> None:
    page, plain = Page(feedback_page(notebook(text), result(text))), Page(feedback_page(notebook(), result()))
    assert page.shape() == plain.shape()
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "img", "iframe", "link", "comment", "form", "base"})
    links = [attrs["href"] for tag, attrs in page.tags if tag == "a"]
    assert links == ["#check-2"]


@given(st.text(max_size=200))
def test_no_text_whatever_changes_the_page(text: str) -> None:
    stated = result(f"x{text}x")
    page = feedback_page(notebook(f"x{text}x"), stated)
    assert Page(page).shape() == Page(feedback_page(notebook(), result())).shape()
    page.encode("utf-8")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]", page)


def test_template_syntax_in_an_answer_is_text() -> None:
    assert "{{ 7 * 7 }}" in Page(feedback_page(notebook("{{ 7 * 7 }}"), result("{{ 7 * 7 }}"))).text


def test_the_policy_of_the_page_lets_nothing_run_or_load() -> None:
    policy = [attrs["content"] for tag, attrs in Page(feedback_page(notebook(), result())).tags
              if attrs.get("http-equiv") == "Content-Security-Policy"]  # fmt: skip
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"]


def test_the_summary_names_points_checks_and_the_first_thing_to_do() -> None:
    text = " ".join(Page(feedback_page(notebook(), result(), late_penalty=0.5)).text.split())
    assert (
        "1.5 of 9 points" in text
    )  # 2 for check_a, 0 for check_b, the essay not read yet, half a point for being late
    assert "1 of 2 checks passed" in text
    assert "0.5 points were taken off" in text
    assert "1 answer is still to be read by a person" in text
    assert "What to do first: check_b: It is exact. Hint: Look at it." in text


@pytest.mark.parametrize(
    ("status", "message", "said"),
    [
        (
            "failed",
            "attend is not defined\ncell attend begins with %%bash: take that line out",
            "cell attend begins with",
        ),
        (
            "failed",
            "Cache is not defined\ncell Cache ended with sys.exit() or exit()",
            "cell Cache ended with sys.exit()",
        ),
        ("timed out", "your code had not finished after 20 s", "your code had not finished after 20 s"),
    ],
)
def test_what_to_do_first_is_the_cells_error_where_there_is_one(status: str, message: str, said: str) -> None:
    broken = result()
    broken.checks[1].status, broken.checks[1].message = status, message
    text = " ".join(Page(feedback_page(notebook(), broken)).text.split())
    first = text.split("What to do first: ")[1].split("About your file")[0]
    assert first.startswith("what check_b met: " + said)
    assert "Look at it." not in first


def test_who_handed_in_another_labs_notebook_reads_that_first() -> None:
    text = " ".join(Page(feedback_page(notebook(), result(notes=[NO_CELLS]))).text.split())
    assert "What to do first: this file has none of the lab's cells: hand in the notebook of this lab." in text


def test_a_passed_check_shows_no_hint_and_the_source_of_a_check_is_nowhere() -> None:
    page = feedback_page(notebook(), result())
    assert "not shown" not in page
    assert "SECRET" not in page


def test_points_that_an_instructor_set_stand_beside_those_of_the_grader() -> None:
    text = " ".join(Page(feedback_page(notebook(score=2.5, by_hand=True), result())).text.split())
    assert "4.5 of 9 points" in text
    assert "Your instructor set these points; the grader gave 0" in text
    assert "What to do first: check_b" in text  # half a point is still to be had


def test_a_check_with_full_points_by_hand_is_nothing_to_do() -> None:
    page = feedback_page(notebook(score=3.0, by_hand=True), result())
    text = " ".join(Page(page).text.split())
    assert "5 of 9 points" in text
    assert "1 of 2 checks passed; your instructor accepted 1 more." in text
    assert "accepted by your instructor: 3 of 3 points" in text
    assert "What to do first" not in text
    assert "Look at it." not in text
    assert "Nothing is left to do here" in text
    assert page.count('class="check passed"') == 2


def test_points_taken_off_by_hand_are_said_at_a_check_that_passed() -> None:
    changed = notebook()
    changed.cells[0].metadata.nbgrader |= {"grade_id": "check_a", "score": 0.5, "points": 2.0, "by_hand": True}
    text = " ".join(Page(feedback_page(changed, result())).text.split())
    assert "passed: 0.5 of 2 points" in text
    assert "Your instructor set these points; the grader gave 2" in text


def test_a_failure_of_the_grader_that_a_person_has_graded_waits_for_nobody() -> None:
    graded = result(checks=[CheckResult("check_b", 3, 0, "machinery", "It is exact.", "disk full")])
    assert "your instructor will look" in feedback_page(notebook(), graded)
    text = " ".join(Page(feedback_page(notebook(score=1.0, by_hand=True), graded)).text.split())
    assert "your instructor will look" not in text
    assert "graded by your instructor: 1 of 3 points" in text


def test_points_that_only_a_recording_is_behind_are_not_called_an_instructors() -> None:
    assert "Your instructor set" not in feedback_page(notebook(score=2.5), result())


def test_flags_are_for_the_instructor_only() -> None:
    assert "imports the engine" not in feedback_page(notebook(), result(flags=["cell part imports the engine"]))


def luminance(colour: str) -> float:
    """Relative luminance of #rgb or #rrggbb, as WCAG 2.2 defines it."""
    digits = colour.lstrip("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("template", ["results/feedback.html", "reports/report.html"])
def test_every_text_has_the_contrast_that_wcag_asks_for_in_light_and_dark(template: str) -> None:
    source = (Path(grader.__file__).parent / template).read_text()
    schemes = re.findall(r":root \{([^}]*)\}", source)
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--([a-z]+): (#[0-9a-f]+)", scheme))
        for text in {"text", "quiet", "todo", "done"} & set(colours):
            for page in {"page", "box"} & set(colours):
                light, dark = sorted((luminance(colours[text]), luminance(colours[page])), reverse=True)
                assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, page)


@pytest.mark.parametrize("status", STATUSES)
def test_every_status_has_words_and_not_only_a_colour(status: str) -> None:
    page = Page(feedback_page(notebook(), result(checks=[CheckResult("c", 1, 0, status, "P.", "why", "H.")])))
    assert len(page.text.split(": 0 of 1 points")[0].rsplit("P.", 1)[1].strip()) > 5


def test_a_refused_file_says_why_once_and_not_at_every_check() -> None:
    checks = [CheckResult(name, 1, 0, "refused", "P.", "the file is empty") for name in "abc"]
    assert feedback_page(notebook(), result(checks=checks)).count("the file is empty") == 1


def test_a_failure_of_the_grader_is_not_explained_with_its_insides() -> None:
    checks = [CheckResult("a", 1, 0, "machinery", "P.", "RuntimeError in /srv/course: disk full")]
    page = feedback_page(notebook(), result(checks=checks))
    assert "your instructor will look" in page
    assert "disk full" not in page


def test_endless_output_makes_a_page_of_bounded_size() -> None:
    page = feedback_page(notebook("a" * 1_000_000), result("x\n" * 500_000))
    assert len(page) < 20 * MAX_CHARACTERS
    assert "characters left out" in page


@given(st.text(), st.integers(10, 100))
def test_shown_text_is_bounded_and_its_own_fixed_point_when_short(text: str, limit: int) -> None:
    found = shown(text, limit)
    assert len(found.split("\n")) <= MAX_LINES + 2
    assert shown(shown_line(text)) == shown_line(text)


def test_the_end_of_what_was_printed_is_kept_for_there_stands_the_error() -> None:
    assert shown("begin" + "x" * 100_000 + "the error").endswith("the error")
    assert shown("one\r\ntwo\rthree\tfour") == "one\ntwo\nthree\tfour"
    assert shown("a\u202eb") == "a‹U+202E›b"
    assert shown("żółw 中文 עברית 🙂 é") == "żółw 中文 עברית 🙂 é"


def test_the_pages_of_a_graded_class_hold_what_each_student_needs(course: Path, grade: Callable[..., str]) -> None:
    grade("due", "01", "2026-03-01 23:59 Europe/Berlin", "--course", str(course))
    grade("late", "01", "--per-day", "0.1", "--course", str(course))
    assert "9 pages" in grade("feedback", "01", "--course", str(course))
    pages = {path.parts[-3]: path.read_text() for path in (course / "feedback").glob(f"*/{SLUG}/*.html")}
    assert "Every check passed" in pages["ada"]
    assert "accumulator" in pages["bob"]
    assert "1.2 points were taken off" in pages["eve"]
    assert "not written yet" in pages["fay"]
    assert "ended its process" in pages["gus"]
    assert "your file could not be read" in pages["hal"]
    assert "‹U+202E›" in pages["mal"]
    for page in pages.values():
        assert "HIDDEN" not in page
        assert "torch.randn" not in page
        assert "alert(1)</script>" not in page


def test_a_comment_and_a_manual_grade_of_the_gradebook_reach_the_page(course: Path, grade: Callable[..., str]) -> None:
    from nbgrader.api import Gradebook

    with Gradebook(f"sqlite:///{course}/gradebook.db") as book:
        book.find_grade("check_window", "toy", SLUG, "cyd").manual_score = 1.0
        book.find_comment("Window", "toy", SLUG, "cyd").manual_comment = "Close! <b>See</b> me."
        book.db.commit()
    grade("feedback", "01", "--course", str(course))
    page = (course / "feedback" / "cyd" / SLUG / "toy.html").read_text()
    assert "4 of 6 points" in page
    assert "the grader gave 0" in page
    assert "What to do first" in page
    assert "Close! &lt;b&gt;See&lt;/b&gt; me." in page


def test_a_page_that_cannot_be_written_is_named_and_stops_no_other(course: Path, grade: Callable[..., str]) -> None:
    (course / "results" / SLUG / "cyd.json").write_text('{"damaged"')
    said = grade("feedback", "01", "--course", str(course), ok=False)
    assert "8 pages in feedback/" in said
    assert "cyd: no page could be written (" in said
    assert (course / "feedback" / "mal" / SLUG / "toy.html").exists()


@pytest.mark.parametrize(
    ("automatic", "manual", "extra", "seen"),
    [(None, None, None, (None, False)), (1.0, None, None, (1.0, False)), (1.0, 2.0, None, (1.0, True)),
     (None, 0.0, None, (1.0, True)), (1.0, None, 0.5, (1.0, True))],
)  # fmt: skip
def test_what_nobody_has_read_yet_is_no_zero(automatic: Any, manual: Any, extra: Any, seen: Any) -> None:
    from grader.courses.nbgrader_hooks import GetGradesByHand

    grade = SimpleNamespace(score=1.0, max_score=3.0, auto_score=automatic, manual_score=manual, extra_credit=extra)
    step, cell = GetGradesByHand(), notebook().cells[0]
    step.gradebook = SimpleNamespace(find_grade=lambda *_: grade)
    step.notebook_id = step.assignment_id = step.student_id = "x"
    step._get_score(cell, {})
    assert (cell.metadata.nbgrader["score"], cell.metadata.nbgrader["by_hand"]) == seen


def test_every_page_shows_the_points_of_the_gradebook(course: Path, grade: Callable[..., str]) -> None:
    from nbgrader.api import Gradebook

    from grader.courses.scores import scores

    grade("due", "01", "2026-03-01 23:59 Europe/Berlin", "--course", str(course))
    grade("late", "01", "--per-day", "0.1", "--course", str(course))
    with Gradebook(f"sqlite:///{course}/gradebook.db") as book:
        given = [("cyd", "check_window", 2.0), ("ada", "check_len", 0.5), ("eve", "check_len", 1.0),
                 ("mal", "check_calls", 0.25), ("gus", "check_len", 0.0)]  # fmt: skip
        for student, check, points in given:
            book.find_grade(check, "toy", SLUG, student).manual_score = points
        book.find_grade("check_calls", "toy", SLUG, "dan").extra_credit = 0.75
        book.db.commit()
    grade("feedback", "01", "--course", str(course))
    for score in scores(course, SLUG):
        if score.total is not None:
            page = (course / "feedback" / score.student / SLUG / "toy.html").read_text()
            assert f"<h1>{score.total:.4g} of 6 points</h1>" in page, score.student
            for name, points in score.cells.items():
                said = rf": {points:.4g} of [\d.]+ points <span class=\"quiet\">· {name}"
                assert re.search(said, page), (score.student, name)
    page = (course / "feedback" / "cyd" / SLUG / "toy.html").read_text()
    assert "accepted by your instructor" in page
    assert 'What to do first:</strong> <a href="#check-2">check_len' in page
    sent = grade("export", "01", "--format", "moodle", "--course", str(course))
    cyd = sent[sent.index("cyd") : sent.index("dan")]
    assert "check_window: accepted by your instructor." in cyd
    assert "check_len: failed." in cyd
