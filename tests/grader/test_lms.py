"""Whose a file is, in each form of download, with names as the LMSs write them."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Any

import pytest

from grader.course import CourseError
from grader.submissions.handed_in import Entry
from grader.submissions.lms import Download, understand


def entry(path: str, text: str = "") -> Entry:
    return Entry(PurePosixPath(path), None, "", lambda: text.encode())


def download(*paths: str, form: str = "auto", texts: dict[str, str] | None = None) -> Download:
    files = [entry(path) for path in paths] + [entry(path, text) for path, text in (texts or {}).items()]
    return understand(files, form, "02_kv_cache", "kv_cache.ipynb", ["01_attention", "02_kv_cache"])


def owners(found: Download) -> list[tuple[str, str]]:
    return [(owner.person, owner.file) for owner, _ in found.owned]


CANVAS = {
    "lovelaceada_12345_678910_kv_cache.ipynb": ("12345", "kv_cache.ipynb", False),
    "lovelaceada_LATE_12345_678910_kv_cache-1.ipynb": ("12345", "kv_cache-1.ipynb", True),
    "LATE_anon_x7Dk2_678910_kv_cache.ipynb": ("anon_x7Dk2", "kv_cache.ipynb", True),
    "anon_x7Dk2_678910_kv_cache.ipynb": ("anon_x7Dk2", "kv_cache.ipynb", False),
    "garcía_márquezgabriel_7_8_my_kv_2_cache.ipynb": ("7", "my_kv_2_cache.ipynb", False),
    "lovelaceada_12345_text.html": ("12345", "text.html", False),
}


@pytest.mark.parametrize("name", CANVAS)
@pytest.mark.parametrize("folder", ["", "submissions/"])
def test_a_canvas_name_tells_person_file_and_lateness(name: str, folder: str) -> None:
    found = download(folder + name, folder + "x_1_2_kv_cache.ipynb")
    assert found.form == "canvas"
    owner = found.owned[0][0]
    assert (owner.person, owner.file, owner.late) == CANVAS[name]
    assert not found.times_are_real


@pytest.mark.parametrize("end", ["_assignsubmission_file", "_assignsubmission_file_"])
@pytest.mark.parametrize("folder", ["", "CS1-Lab 2-77/"])
def test_moodle_folders_tell_name_and_participant(end: str, folder: str) -> None:
    found = download(
        f"{folder}Ada Lovelace_123{end}/kv_cache.ipynb",
        f"{folder}Ada Lovelace_124{end}/sub/kv_cache.ipynb",
        f"{folder}Ada Lovelace_124_assignsubmission_onlinetext/onlinetext.html",
        f"{folder}Participant_9{end}/x.ipynb",
    )
    assert found.form == "moodle"
    assert [owner.person for owner, _ in found.owned] == [
        "Ada Lovelace 123", "Ada Lovelace 124", "Ada Lovelace 124", "Participant 9",
    ]  # fmt: skip
    assert ("participant", "123") in found.owned[0][0].ids


def test_moodles_flat_form_is_understood_too() -> None:
    found = download("Zoë van der Berg_55_assignsubmission_file_kv_cache (1).ipynb")
    assert (found.form, owners(found)) == ("moodle", [("Zoë van der Berg 55", "kv_cache (1).ipynb")])


def test_blackboard_tells_the_attempts_and_their_times() -> None:
    found = download(
        "Lab 2_ada_attempt_2026-11-01-10-20-30_kv_cache.ipynb",
        "Lab 2_ada_attempt_2026-11-01-10-20-30.txt",
        "Lab_2_bob_attempt_2026-11-02-00-00-00_kv_cache.ipynb",
    )
    assert found.form == "blackboard"
    assert [owner.person for owner, _ in found.owned] == ["ada", "ada", "bob"]
    assert found.owned[0][0].attempt == datetime(2026, 11, 1, 10, 20, 30).astimezone(UTC)


GRADESCOPE = """\
submission_11:
  :submitters:
  - :name: Ada Lovelace
    :sid: '100'
    :email: ada@uni.example
  :created_at: 2026-11-01 20:13:49.612107000 Z
  :score: !ruby/object:BigDecimal 18:0.1e1
submission_12:
  :submitters:
  - :name: Bob
    :sid:
    :email: bob@uni.example
  - :name: Cy
    :sid: '102'
    :email: cy@uni.example
  :created_at: !ruby/object:Time 2026-11-02
submission_13: {}
"""


def test_a_gradescope_export_tells_submitters_groups_and_times() -> None:
    paths = [f"assignment_1_export/submission_{n}/kv_cache.ipynb" for n in (11, 12, 13)]
    found = download(*paths, texts={"assignment_1_export/submission_metadata.yml": GRADESCOPE})
    assert found.form == "gradescope"
    assert [owner.person for owner, _ in found.owned] == ["100", "bob@uni.example", "102", "submission_13"]
    assert found.owned[0][0].attempt == datetime(2026, 11, 1, 20, 13, 49, 612107, UTC)
    assert found.owned[1][1] is found.owned[2][1]


def test_a_damaged_metadata_file_stops_with_its_name() -> None:
    with pytest.raises(CourseError, match=r"submission_metadata.yml cannot be read"):
        download("submission_1/a.ipynb", texts={"submission_metadata.yml": "a: ["})


def test_nbgraders_exchange_tells_user_lab_and_time() -> None:
    found = download(
        "a+b+02_kv_cache+2026-11-01 10:20:30.123456 UTC+c2FsdA==/kv_cache.ipynb",
        "a+b+02_kv_cache+2026-11-01 11:20:30.123456 UTC+c2FsdB==/kv_cache.ipynb",
        "bob+01_attention+2026-11-01 10:20:30.123456 UTC/attention.ipynb",
    )
    assert found.form == "exchange"
    assert owners(found) == [("a+b", "kv_cache.ipynb")] * 2
    assert found.owned[1][0].attempt == datetime(2026, 11, 1, 11, 20, 30, 123456, UTC)
    assert len(found.ignored) == 1


@pytest.mark.parametrize(
    "paths",
    [
        ("ada/02_kv_cache/kv_cache.ipynb", "bob/02_kv_cache/kv_cache.ipynb"),
        ("ada/kv_cache.ipynb", "bob/kv_cache.ipynb"),
        ("ada/anything.ipynb", "bob/deep/er/kv_cache.ipynb"),
        ("ada.ipynb", "bob.ipynb.txt"),
        ("ada.zip", "bob/x.pdf"),
        ("lab02/ada.ipynb", "lab02/bob.ipynb"),
        ("lab02/ada/kv_cache.ipynb", "lab02/bob/kv_cache.ipynb"),
    ],
)
def test_folders_of_students_are_understood(paths: tuple[str, ...]) -> None:
    found = download(*paths)
    assert (found.form, [owner.person for owner, _ in found.owned]) == ("folders", ["ada", "bob"])


@pytest.mark.parametrize("path", ["ada/kv_cache.ipynb", "ada.ipynb", "handed/ada/kv_cache.ipynb"])
def test_a_single_submission_is_understood_too(path: str) -> None:
    assert [owner.person for owner, _ in download(path).owned] == ["ada"]


def test_files_that_are_nobodys_are_ignored_and_named() -> None:
    found = download("ada/kv_cache.ipynb", "README.txt", "bob/01_attention/attention.ipynb", "grades.csv")
    assert owners(found) == [("ada", "kv_cache.ipynb")]
    assert [str(path) for path in found.ignored] == ["README.txt", "bob/01_attention/attention.ipynb", "grades.csv"]


def test_a_format_can_be_forced_and_then_has_to_fit() -> None:
    paths = ("x_1_2_kv_cache.ipynb", "ada/kv_cache.ipynb", "bob/kv_cache.ipynb", "cy/kv_cache.ipynb")
    assert download(*paths).form == "folders"
    found = download(*paths, form="canvas")
    assert (owners(found), len(found.ignored)) == ([("1", "kv_cache.ipynb")], 3)
    with pytest.raises(CourseError, match="no file in it has a name of the form moodle"):
        download(*paths, form="moodle")
    with pytest.raises(CourseError, match="known: auto, gradescope, moodle"):
        download(*paths, form="ilias")


def test_an_alias_bomb_in_the_metadata_is_no_danger() -> None:
    bomb = "a: &a [x, x]\n" + "".join(
        f"{chr(98 + n)}: &{chr(98 + n)} [*{chr(97 + n)}, *{chr(97 + n)}]\n" for n in range(24)
    )
    found: Any = download("ada/a.ipynb", texts={"submission_metadata.yml": bomb})
    assert found.form == "folders"
