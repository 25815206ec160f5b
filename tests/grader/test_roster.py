"""Rosters from the files that Canvas, Moodle and Excel write, and ids that are safe folders and nobody else's."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grader.course import CourseError
from grader.submissions.receipt import STUDENT_ID
from grader.submissions.roster import Roster, load_roster, safe_id, save_roster
from grader.submissions.roster_file import Imported, import_roster


def imported(folder: Path, text: str | bytes, roster: Roster | None = None) -> tuple[Roster, Imported]:
    roster = Roster() if roster is None else roster
    path = folder / "roster.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return roster, import_roster(path, roster)


CANVAS = """\
Student,ID,SIS User ID,SIS Login ID,Section,Lab 1 (77),Final Score
,,,,,Manual Posting,
    Points Possible,,,,,10.00,(read only)
"Lovelace, Ada",1001,S1,ada,"CS1, CS2",9,
"O'Neil, ""Bo"" B.",1002,S2,bob,CS1,,
"Student, Test",1003,,a1b2c3,CS1,,
"""


def test_canvas_gradebook_gives_names_ids_and_sections(tmp_path: Path) -> None:
    roster, done = imported(tmp_path, CANVAS)
    assert sorted(roster.students) == ["ada", "bob"] == sorted(done.added)
    ada, bob = roster.students["ada"], roster.students["bob"]
    assert (ada.first_name, ada.last_name) == ("Ada", "Lovelace")
    assert (ada.ids["canvas_id"], ada.ids["section"]) == ("1001", "CS1, CS2")
    assert bob.first_name == '"Bo" B.'
    assert any("columns that are not used (2): Lab 1 (77), Final Score" in note for note in done.notes)
    assert any("test student" in note for note in done.notes)


def test_moodle_participants_with_a_bom_and_semicolons(tmp_path: Path) -> None:
    header = "\ufeffFirst name;Surname;ID number;Email address\r\n"
    roster, _ = imported(tmp_path, header + "Zoë;Müller;;zoe@uni.example\r\nBo;Li;77;bo@uni.example\r\n")
    assert sorted(roster.students) == ["77", "zoe@uni.example"]
    assert roster.students["zoe@uni.example"].first_name == "Zoë"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("delimiter", [";", "\t", ","])
def test_a_roster_may_be_parted_by_semicolons_or_tabs(tmp_path: Path, delimiter: str, end: str) -> None:
    rows = [["Student", "ID", "SIS Login ID", '"Lab 1, 2, 3 and 4; x (77)"'], ['"Li; ""Bo"", B"', "7", "bo", "1,5"]]
    if delimiter == ",":
        rows[1] = ['"Li, Bo"', "7", "bo", '"1,5"']
    text = end.join(delimiter.join(row) for row in rows)
    for start in ("", "\ufeff", f"sep={delimiter}{end}"):
        roster, done = imported(tmp_path, start + text)
        assert done.added == ["bo"], start
        assert roster.students["bo"].ids["canvas_id"] == "7"


@pytest.mark.parametrize("encoding", ["utf-16", "cp1252"])
def test_what_excel_writes_is_read(tmp_path: Path, encoding: str) -> None:
    roster, _ = imported(tmp_path, "id\tname\nzoe\tZoë Müller\n".encode(encoding))
    assert (roster.students["zoe"].first_name, roster.students["zoe"].last_name) == ("Zoë", "Müller")


def test_a_moodle_worksheet_adds_the_participant_numbers(tmp_path: Path) -> None:
    roster, _ = imported(tmp_path, "id,first name,last name,email\nada,Ada,Lovelace,ada@uni.example\n")
    for number in (7, 8):
        _, done = imported(
            tmp_path, f"Identifier,Full name,Email address\nParticipant {number},Ada Lovelace,ADA@uni.example\n", roster
        )
        assert (done.added, done.changed) == ([], ["ada"])
    for number in ("7", "8"):
        found = roster.find([("participant", number)])
        assert found is not None
        assert found.id == "ada"


def test_a_second_import_adds_and_keeps_and_says_who_is_not_in_it(tmp_path: Path) -> None:
    roster, _ = imported(tmp_path, "id,email\nada,a@x.example\nbob,b@x.example\n")
    _, done = imported(tmp_path, "id,email,section\nada,a@x.example,1\ncy,c@x.example,2\n", roster)
    assert (done.added, done.changed, done.absent) == (["cy"], ["ada"], ["bob"])
    assert sorted(roster.students) == ["ada", "bob", "cy"]


BAD = {
    "is also on line 2": "id,first name\nada,Ada\nada,Anna\n",
    "differ only in case": "id,first name\nada,Ada\nAda,Anna\n",
    "names no student": "id,first name\n",
    "two columns are the email": "id,email,e-mail\na,b,c\n",
    "not CSV": 'id,name\nada,"Ada\n',
}


@pytest.mark.parametrize("reason", BAD)
def test_a_roster_that_cannot_be_right_is_refused_with_the_place(tmp_path: Path, reason: str) -> None:
    with pytest.raises(CourseError, match=reason):
        imported(tmp_path, BAD[reason])


def test_what_an_import_changes_of_a_name_is_said_with_what_it_was(tmp_path: Path) -> None:
    roster, _ = imported(tmp_path, 'id,first name,last name,email\nkim,Lee,"Kim, Jr.",\n')
    _, done = imported(tmp_path, 'id,first name,last name,email\nkim,"Jr., Lee",Kim,kim@x.org\n', roster)
    assert done.changes == ["kim: first name 'Jr., Lee', was 'Lee'", "kim: last name 'Kim', was 'Kim, Jr.'"]
    assert imported(tmp_path, 'id,first name,last name\nkim,"Jr., Lee",Kim\n', roster)[1].changes == []


def test_an_endless_cell_is_refused_before_it_is_compared(tmp_path: Path) -> None:
    endless = "a" + "\u0301\u0316" * 60_000  # to compose these takes the square of their number
    with pytest.raises(CourseError, match="line 3: the last_name has 120,001 characters, expected at most 1,000"):
        imported(tmp_path, f"id,last name\nada,Lovelace\nbob,{endless}\n")


def test_a_student_id_beside_the_address_of_another_is_nobodys(tmp_path: Path) -> None:
    roster, _ = imported(tmp_path, "id,sid,email\nada@x.org,,ada@x.org\nbob,7,bob@x.org\ncy,,\n")

    def found(*ids: tuple[str, str]) -> str | None:
        student = roster.find(ids)
        return student.id if student else None

    assert found(("sid", "ada@x.org"), ("email", "bob@x.org")) is None  # Gradescope lets people write an ID
    assert found(("sid", "cy"), ("email", "bob@x.org")) is None
    assert found(("sid", "7"), ("email", "bob@x.org")) == "bob"
    assert found(("sid", "7"), ("email", "bob@home.org")) == "bob"
    assert found(("sid", "8"), ("email", "bob@x.org")) == "bob"


def test_the_same_person_on_two_lines_is_one_student(tmp_path: Path) -> None:
    roster, done = imported(tmp_path, "id,name,section\nada,Ada Lovelace,1\nada,Ada Lovelace,2\n\n,,\n")
    assert list(roster.students) == ["ada"]
    assert any("line 3 is about ada again" in note for note in done.notes)


def test_names_find_a_student_only_when_they_are_one_persons(tmp_path: Path) -> None:
    text = "id,first name,last name\na1,Ada,Lovelace\na2,José,García Márquez\nb1,Bob,Li\nb2,Bob,Li\n"
    roster, _ = imported(tmp_path, text)

    def found(kind: str, value: str) -> str | None:
        student = roster.find([(kind, value)])
        return student.id if student else None

    assert found("name", "ada lovelace") == found("name", "Lovelace, Ada") == "a1"
    assert found("canvas_name", "garcíamárquezjosé") == "a2"
    assert found("name", "Jose Garcia Marquez") == "a2"
    assert found("name", "Bob Li") is None
    assert found("login", "B1") == "b1"
    assert found("email", "") is None


def test_who_handed_in_before_the_roster_keeps_the_id(tmp_path: Path) -> None:
    roster = Roster()
    assert roster.id_for("1001", "canvas:1001", own=False) == "1001"
    imported(tmp_path, CANVAS, roster)
    assert sorted(roster.students) == ["1001", "bob"]
    assert roster.others == {}
    named = roster.id_for("Cy Li 7", "moodle:Cy Li 7", own=False)
    imported(tmp_path, "Identifier,Full name,Email address\nParticipant 7,Cy Li,cy@uni.example\n", roster)
    assert roster.students[named].email == "cy@uni.example"


def test_a_roster_survives_being_saved(tmp_path: Path) -> None:
    roster, _ = imported(tmp_path, CANVAS)
    roster.give("x", "canvas:9")
    save_roster(tmp_path, roster)
    assert load_roster(tmp_path) == roster
    (tmp_path / "roster.json").write_text("{")
    with pytest.raises(CourseError, match="damaged"):
        load_roster(tmp_path)


@given(st.text(max_size=80))
def test_any_name_makes_an_id_that_every_file_system_holds(name: str) -> None:
    made = safe_id(name)
    assert STUDENT_ID.match(made)
    assert not made.endswith(".")
    assert made.split(".")[0].lower() not in ("con", "prn", "aux", "nul", "com1", "lpt1")
    assert safe_id(made) == made


NAMES = st.text(max_size=12) | st.sampled_from(["ada", "Ada", "ADA", "a/b", "a\\b", "é", "e\u0301", "con"])


@given(st.lists(NAMES, max_size=8))
def test_two_people_never_share_a_folder_even_where_case_does_not_count(names: list[str]) -> None:
    roster = Roster()
    keys = list(dict.fromkeys(names))
    given_ids = [roster.id_for(key, f"canvas:{key}", own=False) for key in keys]
    assert len({student.casefold() for student in given_ids}) == len(keys)
    assert [roster.id_for(key, f"canvas:{key}", own=False) for key in keys] == given_ids


def test_letters_composed_in_another_way_are_the_same_name() -> None:
    assert safe_id("Zoe\u0308") == safe_id("Zoë") != safe_id("Zoe")


@pytest.mark.parametrize("who", ["gradescope:None", "gradescope:", "blackboard:None", "canvas:None", "moodle:Eve None"])
def test_who_has_no_number_does_not_get_the_id_of_one_who_is_called_none(tmp_path: Path, who: str) -> None:
    roster = Roster(others={"eve": who})
    imported(tmp_path, "id,first name,last name\nada,Ada,Lovelace\n", roster)
    assert sorted(roster.students) == ["ada"]
    assert roster.others == {"eve": who}


@pytest.mark.parametrize(
    "header",
    [
        "Vorname;Nachname;ID-Nummer;E-Mail-Adresse",
        "Prénom;Nom de famille;Numéro d'identification;Adresse de courriel",
        "Nombre;Apellido(s);Número de ID;Dirección de correo",
        "Nome;Cognome;Codice identificativo;Indirizzo email",
        "Voornaam;Achternaam;ID-nummer;E-mailadres",
    ],
)
def test_moodle_lists_participants_in_its_users_language(tmp_path: Path, header: str) -> None:
    roster, path = Roster(), tmp_path / "participants.csv"
    path.write_text(f"{header}\nAda;Lovelace;S-9;ada@example.org\n", "utf-8-sig")
    done = import_roster(path, roster)
    assert (done.notes, [*roster.students]) == ([], ["S-9"])
    ada = roster.students["S-9"]
    assert (ada.first_name, ada.last_name, ada.email) == ("Ada", "Lovelace", "ada@example.org")
