"""Whose a file is, in each form of download, with names as the LMSs write them."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from grader.course import CourseError
from grader.submissions.handed_in import Entry
from grader.submissions.lms import MAX_NAME, ON_THIS_CLOCK, Download, understand


def entry(path: str, text: str = "") -> Entry:
    return Entry(PurePosixPath(path), None, "", lambda: text.encode())


def download(*paths: str, form: str = "auto", texts: dict[str, str] | None = None, **more: Any) -> Download:
    files = [entry(path) for path in paths] + [entry(path, text) for path, text in (texts or {}).items()]
    return understand(files, form, "02_kv_cache", "kv_cache.ipynb", ["01_attention", "02_kv_cache"], **more)


def owners(found: Download) -> list[tuple[str, str]]:
    return [(owner.person, owner.file) for owner, _ in found.owned]


def test_what_google_drive_packs_of_a_classroom_is_whose_name_stands_before_the_labs() -> None:
    found = download(
        "Ada Lovelace - kv_cache.ipynb", "Jean-Luc P. - Copy of kv_cache.ipynb", "Bob - x - kv_cache (2).ipynb",
        "carol.ipynb", "dan/kv_cache (1).ipynb", "Eve - notes.ipynb",
    )  # fmt: skip
    assert owners(found) == [
        ("Ada Lovelace", "kv_cache.ipynb"),
        ("Jean-Luc P.", "Copy of kv_cache.ipynb"),
        ("Bob - x", "kv_cache (2).ipynb"),
        ("carol", "carol.ipynb"),
        ("dan", "kv_cache (1).ipynb"),
        ("Eve - notes", "Eve - notes.ipynb"),
    ]
    nobodys = download("kv_cache.ipynb", "kv_cache (1).ipynb", "Copy of Copy of kv_cache.ipynb", "ada.ipynb")
    assert owners(nobodys) == [("ada", "ada.ipynb")]
    assert [(str(one.path), readings) for one, readings in nobodys.doubtful] == [
        (name, [(), ()]) for name in ("kv_cache.ipynb", "kv_cache (1).ipynb", "Copy of Copy of kv_cache.ipynb")
    ]


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
    other = "anon_abcde_9_kv_cache.ipynb" if "anon_" in name else "x_1_2_kv_cache.ipynb"
    found = download(folder + name, folder + other, outer="submissions")
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
        outer="CS1-Lab 2-77",
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
    found = download(*paths, texts={"assignment_1_export/submission_metadata.yml": GRADESCOPE}, outer="download")
    assert found.form == "gradescope"
    assert [owner.person for owner, _ in found.owned] == ["100", "bob@uni.example", "102", "submission_13"]
    assert found.owned[0][0].attempt == datetime(2026, 11, 1, 20, 13, 49, 612107, UTC)
    assert found.owned[1][1] is found.owned[2][1]


@pytest.mark.parametrize(
    "text", ["2026-99-99", "9" * 5000, "-", "<<", "~", "0o9", "=", "2026-02-30 10:00:00", "1:99:99"]
)
def test_what_students_wrote_into_the_metadata_is_text(text: str) -> None:
    """Gradescope's export holds names and what tests printed, and another YAML may take them for dates or numbers."""
    quoted = f"'{text}'" if text in ("-", "<<") else text
    results = f"  :results:\n    :output: {quoted}\n    :number: {'7' * 5000}\n    :when: 2026-13-45\n"
    metadata = GRADESCOPE.replace("  :score:", f"{results}  :score:").replace(":name: Bob", f":name: {quoted}")
    paths = [f"submission_{n}/kv_cache.ipynb" for n in (11, 12)]
    found = download(*paths, texts={"submission_metadata.yml": metadata})
    assert [owner.person for owner, _ in found.owned] == ["100", "bob@uni.example", "102"]
    assert found.owned[0][0].attempt == datetime(2026, 11, 1, 20, 13, 49, 612107, UTC)


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
    found = download(*paths, outer="lab02")
    assert (found.form, [owner.person for owner, _ in found.owned]) == ("folders", ["ada", "bob"])


@pytest.mark.parametrize("path", ["ada/kv_cache.ipynb", "ada.ipynb", "handed/ada/kv_cache.ipynb", "ada/x.ipynb"])
def test_a_single_submission_is_understood_too(path: str) -> None:
    assert [owner.person for owner, _ in download(path, outer="handed").owned] == ["ada"]


INSIDE = [
    "bob/kv_cache.ipynb", "bob.ipynb", "bob_4242_1_kv_cache.ipynb", "Bob_7_assignsubmission_file/kv_cache.ipynb",
    "L_bob_attempt_2026-11-01-10-20-30_kv_cache.ipynb", "bob+02_kv_cache+2026-11-01 10:20:30 UTC+r/kv_cache.ipynb",
]  # fmt: skip


@pytest.mark.parametrize("inside", INSIDE)
def test_what_a_student_puts_into_their_own_folder_is_theirs(inside: str) -> None:
    """`mail/ada`, and nothing else in `mail`."""
    paths = (f"ada/{inside}", f"ada/{inside.replace('bob', 'cy').replace('Bob', 'Cy')}")
    with pytest.raises(CourseError, match="all of it lies in one folder, ada: is that a student"):
        download(*paths)
    for found in (download(*paths, known=lambda name: name == "ada"), download(*paths, form="folders")):
        assert [owner.person for owner, _ in found.owned] == ["ada", "ada"]
    beside = download(*paths, "ada/kv_cache.ipynb")  # the notebook itself says whose folder it is
    assert {owner.person for owner, _ in beside.owned} == {"ada"}


# What mallory writes (a name, a file's name, a user's name), and whom the LMS says it is of.
FORGED = [
    ("canvas", "bob_4242_1_a_1001_55_kv_cache.ipynb"),
    ("canvas", "mallory_1001_55_x_4242_1_kv_cache.ipynb"),
    ("canvas", "bob_4242_1001_text.html"),
    ("moodle", "Mal_7_assignsubmission_file_x_9_assignsubmission_file_kv_cache.ipynb"),
]


@pytest.mark.parametrize(("form", "name"), FORGED)
def test_a_name_with_two_readings_is_given_to_nobody(form: str, name: str) -> None:
    other = {"canvas": "x_1_2_kv_cache.ipynb", "moodle": "X_1_assignsubmission_file_kv_cache.ipynb"}[form]
    found = download(name, other)
    assert (found.form, len(found.owned)) == (form, 1)
    assert [entry.path.name for entry, _ in found.doubtful] == [name]


def test_what_a_student_names_is_beside_the_place_that_counts() -> None:
    folder = "Mal_7_assignsubmission_file_x_9_assignsubmission_file"
    assert owners(download(f"{folder}/kv_cache.ipynb")) == [("Mal 7 assignsubmission file x 9", "kv_cache.ipynb")]
    time = "attempt_2026-11-01-10-20-30"
    found = download(
        f"Lab 02_mallory_{time}_victim_attempt_2099-01-01-00-00-00_kv_cache.ipynb", f"Lab 02_bob_{time}.txt"
    )
    assert [owner.person for owner, _ in found.owned] == ["mallory", "bob"]
    assert found.owned[0][0].file == "victim_attempt_2099-01-01-00-00-00_kv_cache.ipynb"
    found = download(f"Lab 02_x_victim_{time}_kv_cache.ipynb", f"Lab 02_victim_{time}_kv_cache.ipynb")
    assert [owner.person for owner, _ in found.owned] == ["x_victim", "victim"]
    found = download("anon_x7Dk2_9_4242_1_kv_cache.ipynb", "anon_abcde_4_kv_cache.ipynb")
    assert owners(found)[0] == ("anon_x7Dk2", "4242_1_kv_cache.ipynb")


def test_a_download_that_could_be_of_two_systems_is_asked_about() -> None:
    """Everybody may write to an exchange, and so try to have it read as something else."""
    honest = "ada+02_kv_cache+2026-11-01 10:20:30 UTC+r/kv_cache.ipynb"
    planted = [f"bob_4242_{number}_kv_cache.ipynb" for number in range(1, 9)]
    with pytest.raises(CourseError, match="it could be a download of exchange or canvas"):
        download(honest, *planted)
    assert owners(download(honest, *planted, form="exchange")) == [("ada", "kv_cache.ipynb")]
    found = download(honest, *(f"bob{n}/kv_cache.ipynb" for n in range(9)))
    assert (found.form, owners(found)) == ("exchange", [("ada", "kv_cache.ipynb")])
    canvas = [
        "x_1_2_a.ipynb",
        "y_3_4_L_bob_attempt_2026-11-01-10-20-30_a.ipynb",
        "z_5_6_Z_7_assignsubmission_file_a.ipynb",
    ]
    assert download(*canvas).form == "canvas"


def test_blackboards_times_are_in_the_zone_that_is_said_or_this_machines_and_that_is_said() -> None:
    name = "Lab 2_ada_attempt_2026-11-01-10-20-30_kv_cache.ipynb"
    there, here = download(name, zone=ZoneInfo("Europe/Berlin")), download(name)
    assert there.owned[0][0].attempt == datetime(2026, 11, 1, 9, 20, 30, tzinfo=UTC)
    assert (there.clock, here.clock) == ("", ON_THIS_CLOCK)
    assert download("x_1_2_kv_cache.ipynb").clock == ""


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


def test_an_endless_name_of_gradescopes_is_looked_at_in_part() -> None:
    endless = "a" + "\u0301\u0316" * 40_000  # to compose these takes the square of their number
    text = f"submission_1:\n  :submitters:\n  - :name: {endless}\n    :sid: {endless}\n"
    found = download("submission_1/kv_cache.ipynb", texts={"submission_metadata.yml": text})
    owner, _ = found.owned[0]
    assert owner.person.startswith("a")
    assert max(map(len, (owner.person, owner.name, *owner.claim))) <= MAX_NAME
