"""The report of a lab: what it counts, which misconceptions it names, and that its page holds what students wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grader.courses.misconceptions import Misconception, explanations, misconceptions_of, read_misconceptions
from grader.labs.convention import load_conventions
from grader.labs.lab import LabError
from grader.reports.report import Report, _check_rows, _patterns, histogram, make_report, quartiles
from grader.reports.report_page import report_json, report_page
from grader.reports.similarity import MAX_CODE
from grader.results.result import CheckResult, Result

SLUG, ROOT = "01_toy", Path(__file__).parents[3]


@pytest.fixture(scope="module")
def report(graded_course: Path) -> Report:
    return make_report(graded_course, SLUG)


def test_every_student_is_counted_once_whatever_became_of_the_submission(report: Report) -> None:
    assert report.students == 10
    assert report.not_handed_in == ("zoe",)
    assert report.not_graded == ()
    assert len(report.totals) == sum(report.histogram) == 9
    assert report.quartiles[0] == 0
    assert report.quartiles[-1] == report.points == 6


def test_a_check_says_how_many_passed_failed_and_never_tried(report: Report) -> None:
    rows = {row.grade_id: row for row in report.checks}
    # passed: ada bob dan gus; failed: cyd eve mal; not tried: fay's stub, hal's refused file
    assert (rows["check_window"].passed, rows["check_window"].failed, rows["check_window"].untried) == (4, 3, 2)
    assert all(row.passed + row.failed + row.untried == 9 for row in report.checks)


def test_a_known_misconception_is_named_for_exactly_those_who_failed_its_checks(report: Report) -> None:
    named = {fault: pattern.students for pattern in report.patterns for fault in pattern.faults}
    assert named["the window keeps every vector."] == ("cyd", "eve")
    assert named["the model is called once for all tokens."] == ("dan",)
    assert "len() ends the process." not in named  # gus' code crashed, which says nothing of what was understood
    unknown = [pattern.students for pattern in report.patterns if not pattern.faults]
    assert sorted(unknown) == [("gus",), ("mal",)]
    likely = {row.grade_id: row.likely for row in report.checks}
    assert likely["check_len"][0] == ("the window keeps every vector.", 2)


def test_where_several_mistakes_fit_their_number_is_said_and_none_is_named() -> None:
    check = CheckResult("a", 1, 0, "failed", "", "seen 2")
    graded = {name: Result("lab", 1, checks=[check]) for name in ("ada", "bob")}
    known = [Misconception(name, f"{name} is wrong.", ("a",)) for name in ("one", "two")]
    (pattern,) = patterns = _patterns(graded, known)
    assert pattern.faults == ("one is wrong.", "two is wrong.")
    (row,) = _check_rows(list(graded.values()), patterns)
    assert row.likely == (("one of 2 known mistakes, under 'Failed together'", 2),)


def test_refused_and_crashed_submissions_stand_with_their_reason(report: Report) -> None:
    trouble = {student: (status, reason) for student, status, reason in report.trouble}
    assert set(trouble) == {"gus", "hal"}
    assert trouble["gus"][0] == "crashed in check_len"
    assert trouble["hal"][0] == "refused"
    assert len(trouble["hal"][1]) > 10


def test_a_renamed_and_reordered_copy_is_found_and_the_others_are_not(report: Report) -> None:
    assert report.similar is not None
    assert [cluster for cluster in report.similar.clusters if "ada" in cluster] == [("ada", "bob", "cyd")]
    assert "fay" in report.similar.too_short


def test_in_a_private_course_no_mistake_is_named_that_the_course_may_ask_for() -> None:
    source = ROOT / "solutions" / "06_prefix_caching" / "prefix_index.py"
    mutants = ROOT / "tests" / "labs" / "06_prefix_caching" / "mutants"
    options = {o.name: o for convention in load_conventions(source) for o in convention.options}
    names = {one.name for one in misconceptions_of(mutants)}
    kept = {one.name for one in misconceptions_of(mutants, [options["big_endian"], options["rate_first"]])}
    assert "link_big_endian" in names - kept
    assert len(kept) > 0.9 * len(names)


def test_what_is_not_written_yet_does_not_hide_a_misconception() -> None:
    checks = [CheckResult("a", 1, 0, "failed", ""), CheckResult("b", 1, 1, "passed", ""),
              CheckResult("c", 1, 0, "not written", "")]  # fmt: skip
    faults = {"one": ("a", "c"), "two": ("a", "b"), "three": ("a",), "four": ("c",)}
    known = [Misconception(name, "", fails) for name, fails in faults.items()]
    assert [one.name for one in explanations(Result("lab", 3, checks=checks), known)] == ["one", "three"]


@pytest.mark.parametrize(
    ("status", "message"),
    [
        ("timed out", "the check took more than 20 s"),
        ("crashed", "the process ended"),
        ("failed", "your code raised IndexError: list index out of range"),
        ("failed", "Window is not defined\ncell Window:\nIndentationError: unexpected indent"),
    ],
)
def test_no_known_mistake_is_named_for_what_failed_without_a_result(status: str, message: str) -> None:
    known = [Misconception("one", "", ("a",)), Misconception("two", "", ("b",))]
    broken = CheckResult("a", 1, 0, status, "", message)
    assert explanations(Result("lab", 2, checks=[broken]), known) == []
    wrong = CheckResult("b", 1, 0, "failed", "", "expected 3, saw 4")
    assert [one.name for one in explanations(Result("lab", 2, checks=[broken, wrong]), known)] == ["two"]


def test_a_mutant_without_its_headers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text("# fault: it is wrong.\n\n# %% \n# fails: no header\n")
    with pytest.raises(LabError, match="some.py.*fails"):
        misconceptions_of(tmp_path)


def test_a_release_writes_the_table_of_its_lab_and_does_not_hand_it_out(
    tmp_path: Path, grade: Callable[..., str]
) -> None:
    grade("new-course", str(tmp_path / "c"))
    grade("release", "02", "--course", str(tmp_path / "c"))
    table = json.loads((tmp_path / "c" / "misconceptions" / "02_kv_cache.json").read_text())
    assert len(table) >= 15
    assert [path.name for path in (tmp_path / "c" / "labs").rglob("*") if path.is_file()] == ["kv_cache.ipynb"]


def test_a_released_lab_without_a_table_uses_the_checkouts_mutants(graded_course: Path) -> None:
    table = read_misconceptions(graded_course, "02_kv_cache")
    assert len(table) >= 15
    assert all(one.fault and one.fails for one in table)


@given(st.lists(st.floats(0, 20), max_size=60))
def test_histogram_and_quartiles_hold_everybody(totals: list[float]) -> None:
    assert sum(histogram(totals, 20)) == len(totals)
    found = quartiles(totals)
    assert len(found) == (5 if totals else 0)
    assert list(found) == sorted(found)


@pytest.mark.parametrize(("total", "place"), [(0, 0), (1.99, 0), (2, 1), (6, 3), (19.9, 9), (20, 9)])
def test_a_tenth_begins_at_its_lower_end_and_full_marks_are_in_the_last(total: float, place: int) -> None:
    assert histogram([total], 20)[place] == 1


class Tags(HTMLParser):
    """The tags and attributes of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_says_it_all_without_script_or_anything_loaded(report: Report) -> None:
    page = Tags(report_page(report))
    assert not {"script", "link", "img", "iframe", "object", "form"} & {tag for tag, _ in page.tags}
    assert not [attrs for _, attrs in page.tags if any(name.startswith("on") for name in attrs)]
    for words in ("the window keeps every vector", "crashed in check_len", "not a proof", "ada, bob", "median"):
        assert words in page.text
    assert [attrs for tag, attrs in page.tags if tag == "html"] == [{"lang": "en"}]


def test_the_json_report_can_be_read_by_a_program(report: Report) -> None:
    data = json.loads(report_json(report))
    assert {row["student"]: row["total"] for row in data["rows"]}["ada"] == 6
    assert data["checks"][0]["grade_id"] == "check_window"


def test_the_command_prints_the_report_and_writes_both_files(
    graded_course: Path, tmp_path: Path, grade: Callable[..., str]
) -> None:
    files = tmp_path / "r.json", tmp_path / "r.html"
    said = grade("report", "01", "--course", str(graded_course), "--json", str(files[0]), "--html", str(files[1]))
    for words in (
        "9 graded of 10 students",
        "largest 6",
        "the window keeps every vector",
        "not a proof",
        "gus: crashed",
    ):
        assert words in said
    assert "\u202e" not in said + files[1].read_text()
    assert json.loads(files[0].read_text())["lab"] == SLUG


def test_more_solutions_can_be_named_to_compare_with(
    graded_course: Path, tmp_path: Path, grade: Callable[..., str]
) -> None:
    copied = json.loads((graded_course / "submitted" / "ada" / SLUG / "toy.ipynb").read_text())
    (tmp_path / "found_on_the_web.ipynb").write_text(json.dumps(copied))
    said = grade("report", "01", "--course", str(graded_course), "--against", str(tmp_path))
    assert "found_on_the_web.ipynb: 100% in common" in said, said
    said = grade("report", "01", "--course", str(graded_course), "--against", str(graded_course / "labs"), ok=True)
    assert "toy.ipynb: 100%" not in said  # the released lab itself is subtracted


def test_a_submission_with_more_code_than_is_compared_is_named(course: Path, grade: Callable[..., str]) -> None:
    path = course / "submitted" / "ada" / SLUG / "toy.ipynb"
    notebook = json.loads(path.read_text())
    added = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    notebook["cells"] += [{**added, "id": f"more{number}", "source": "a = 1\n" * 1000} for number in range(20)]
    path.write_text(json.dumps(notebook))
    page = course / "report.html"
    said = grade("report", "01", "--html", str(page), "--course", str(course))
    assert f"Only the first {MAX_CODE} characters of their code were compared" in said
    assert f"Only the first {MAX_CODE} characters were compared of: ada." in page.read_text()
    assert "ada, bob" in said  # its beginning is
