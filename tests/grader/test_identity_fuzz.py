"""Whatever students write into their names and files' names, no file is taken for another student's.

Each download is put together as its LMS does it, from what the LMS writes and from what a student can choose; the texts
to choose from are made of other forms' separators.
"""

from __future__ import annotations

import unicodedata
from pathlib import PurePosixPath

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grader.course import CourseError
from grader.results.shown_text import shown
from grader.submissions.handed_in import Entry, printable
from grader.submissions.lms import Download, understand
from tests.examples import examples

VICTIM, MALLORY = "4242", "1001"
PIECES = [
    "bob", "4242", "1001", "55", "7", "0", "_", "_", "__", "-1", "+", "LATE", "_LATE_", "late", "_4242_1_", "_4242_",
    "text.html", "_text.html", "anon_abcde", "anon_", "_attempt_", "_attempt_2099-01-01-00-00-00_", "2020-01-01",
    "_victim_attempt_2099-01-01-00-00-00_", "_4242_assignsubmission_file_", "_assignsubmission_file",
    "Participant_4242", "+02_kv_cache+2020-01-01 10:00:00 UTC+", " UTC", "02_kv_cache", "kv_cache.ipynb", ".ipynb",
    ".zip", ".txt", " ", ".", "\u200b", "\u202e", "\ufeff", "e\u0301", "\u00e9", "\uff14\uff12\uff14\uff12", "\u0664",
    "\\u200b", "\\", "\u034f", "\u3164",
]  # fmt: skip
text = st.lists(st.sampled_from(PIECES), min_size=1, max_size=8).map("".join)
file_name = text.map(lambda name: f"{name}.ipynb")


def read(*paths: str, form: str) -> Download:
    entries = []
    for path in paths:
        names = PurePosixPath(path).parts
        shown = PurePosixPath(*map(printable, names))
        entries.append(Entry(shown, None, "", bytes, names))
    return understand(
        entries, form, "02_kv_cache", "kv_cache.ipynb", [], known=lambda name: name in ("mallory", "victim")
    )


def owner_of(found: Download, number: int, paths: tuple[str, ...]) -> str | None:
    """The person to whom the file was given; None where it was given to nobody."""
    wanted = PurePosixPath(*map(printable, PurePosixPath(paths[number]).parts))
    people = {owner.person for owner, entry in found.owned if entry.path == wanted}
    assert len(people) <= 1
    return next(iter(people), None)


def check(paths: tuple[str, ...], people: list[str], form: str) -> None:
    """Every file is its student's, or nobody's; and a batch that nobody tampers with is read."""
    for how in ("auto", form):
        try:
            found = read(*paths, form=how)
        except CourseError:
            continue  # a question: nothing was taken in
        assert found.form == form
        for number, person in enumerate(people):
            assert owner_of(found, number, paths) in (person, None)


def word_characters(name: str) -> str:
    """As Canvas leaves a name in a file's name."""
    return "".join(char for char in unicodedata.normalize("NFC", name) if char.isalnum() or char == "_")


@settings(max_examples=examples(600))
@given(name=text, file=file_name, late=st.booleans(), entry=st.booleans())
@example(name="4242_4242_assignsubmission_file_\u3164", file="bob.ipynb", late=False, entry=False)
def test_canvas(name: str, file: str, late: bool, entry: bool) -> None:
    end = "text.html" if entry else f"77_{file}"
    path = f"{word_characters(name)}_{'LATE_' if late else ''}{MALLORY}_{end}"
    check((path, f"victimvera_{VICTIM}_78_kv_cache.ipynb", "ada_5_79_kv_cache.ipynb"), [MALLORY, VICTIM, "5"], "canvas")


@settings(max_examples=examples(200))
@given(file=file_name, late=st.booleans())
def test_canvas_without_names(file: str, late: bool) -> None:
    paths = (f"{'LATE_' if late else ''}anon_mmmmm_77_{file}", "anon_abcde_78_kv_cache.ipynb")
    check(paths, ["anon_mmmmm", "anon_abcde"], "canvas")


@settings(max_examples=examples(400))
@given(name=text, file=file_name, flat=st.booleans())
def test_moodle(name: str, file: str, flat: bool) -> None:
    place = "_assignsubmission_file" + ("_" if flat else "/")
    name = name.replace("/", "")
    paths = (f"{name}_{MALLORY}{place}{file}", f"Vera Vee_{VICTIM}{place}kv_cache.ipynb")
    mallory = printable(name).replace("_", " ")
    check(paths, [f"{mallory} {MALLORY}", f"Vera Vee {VICTIM}"], "moodle")


@settings(max_examples=examples(400))
@given(file=file_name, title=st.sampled_from(["Lab 02", "Lab_02", "Lab_02_attempt", "KV_4242_1_x"]))
def test_blackboard(file: str, title: str) -> None:
    time = "attempt_2026-11-01-10-20-30"
    paths = (
        f"{title}_mallory_{time}_{file}",
        f"{title}_victim_{time}_kv_cache.ipynb",
        f"{title}_mal_victim_{time}.txt",
    )
    check(paths, ["mallory", "victim", "mal_victim"], "blackboard")


@settings(max_examples=examples(400))
@given(inside=st.lists(text, min_size=1, max_size=3).map("/".join), file=file_name, alone=st.booleans())
def test_folders(inside: str, file: str, alone: bool) -> None:
    paths = (f"mallory/{inside}/{file}", *(() if alone else ("victim/kv_cache.ipynb",)))
    check(paths, ["mallory", "victim"][: len(paths)], "folders")


@pytest.mark.parametrize(
    "nothing", [*"\u034f\u115f\u1160\u17b4\u180b\u180f\u200b\u2060\u2800\u3164\ufe00\uffa0\U000e0041\U000e0100"]
)
def test_what_shows_as_nothing_is_written_out(nothing: str) -> None:
    """Unicode's letters and marks that are drawn as nothing (Default_Ignorable_Code_Point), and empty Braille."""
    assert printable(f"ada{nothing}").isascii()
    assert shown(f"ada{nothing}") == f"ada‹U+{ord(nothing):04X}›"


def test_a_picture_stays_a_picture() -> None:
    assert shown("\u2764\ufe0f \u26a0\ufe0e") == "\u2764\ufe0f \u26a0\ufe0e"
    assert printable("\u2764\ufe0f") == "\u2764\\ufe0f"  # as a name it could be another's
