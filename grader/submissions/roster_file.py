"""A roster from a CSV file: an instructor's own, Canvas' gradebook, Moodle's participants or grading worksheet.

Canvas exports Student ("Last, First"), ID, SIS User ID, SIS Login ID, Section and a column per assignment, with a row
of possible points below the header and a test student at the end. Moodle exports First name, Surname (or Last name),
ID number, Email address; its worksheet of an assignment has Identifier ("Participant 7"), Full name, Email address.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from grader.course import CourseError
from grader.submissions.csv_file import column_name, csv_rows
from grader.submissions.roster import Roster, Student, safe_id

COLUMNS = {
    "id": "id", "student id": "id", "student_id": "id", "studentid": "id",
    "first name": "first_name", "first_name": "first_name", "firstname": "first_name", "given name": "first_name",
    "last name": "last_name", "last_name": "last_name", "lastname": "last_name", "surname": "last_name",
    "family name": "last_name", "name": "name", "full name": "name", "student": "name",
    "email": "email", "email address": "email", "e-mail": "email", "mail": "email",
    "canvas id": "canvas_id", "canvas_id": "canvas_id", "sis user id": "sis_user_id", "sis_user_id": "sis_user_id",
    "sis login id": "login", "username": "login", "user name": "login", "login": "login", "login_id": "login",
    "id number": "id_number", "id_number": "id_number", "sid": "sid", "section": "section", "sections": "section",
    "identifier": "participant", "participant": "participant",
    # Moodle's lists of participants in German, French, Spanish, Italian, Portuguese and Dutch.
    "vorname": "first_name", "prénom": "first_name", "nombre": "first_name", "nome": "first_name",
    "voornaam": "first_name", "nachname": "last_name", "nom": "last_name", "nom de famille": "last_name",
    "apellido(s)": "last_name", "apellidos": "last_name", "cognome": "last_name", "sobrenome": "last_name",
    "apelido": "last_name", "achternaam": "last_name", "e-mail-adresse": "email", "adresse de courriel": "email",
    "dirección de correo": "email", "correo electrónico": "email", "indirizzo email": "email",
    "endereço de email": "email", "endereço de e-mail": "email", "e-mailadres": "email", "id-nummer": "id_number",
    "numéro d'identification": "id_number", "número de id": "id_number", "codice identificativo": "id_number",
    "número de identificação": "id_number", "anmeldename": "login", "nom d'utilisateur": "login",
    "nombre de usuario": "login", "gebruikersnaam": "login", "vollständiger name": "name", "nom complet": "name",
    "nombre completo": "name",
}  # fmt: skip
# Which column makes the id where none is called so, and which two rows may share without being one person.
_ID_FROM = ("login", "sis_user_id", "id_number", "canvas_id", "sid", "email")
_SAME_PERSON = ("canvas_id", "sis_user_id", "login", "id_number", "sid", "participant")
MAX_CELL = 1000  # characters of a name or an id; to compose letters takes the square of their number


@dataclass
class Imported:
    """What a roster file brought. added, changed, absent: ids; changes: what of those that were there before, and what
    it was, one line each; notes: what an instructor should know."""

    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def import_roster(path: Path, roster: Roster) -> Imported:
    """Add what a CSV file says to `roster`; students already in it keep their ids. Raises CourseError, OSError."""
    done = Imported()
    there = set(roster.students)
    before = {key: given for given, key in roster.others.items()}
    # The key of a download from Moodle ends in the participant's number.
    before |= {f"participant:{key.rpartition(' ')[2]}": i for key, i in before.items() if key.startswith("moodle:")}
    lines: dict[str, int] = {}
    folded = {student.casefold(): {student} for student in roster.students}
    for number, row in _rows(path, done.notes):
        student = _student(row)
        if student is None:
            done.notes.append(f"line {number} has nothing that tells who it is: left out")
            continue
        known = roster.find([(kind, student.ids.get(kind, "")) for kind in _SAME_PERSON] + [("email", student.email)])
        if known is None or (row.get("id") and known.id != student.id and student.id in roster.students):
            known = roster.students.get(student.id)
        if known is not None and known.id in lines:
            if (known.first_name, known.last_name) != (student.first_name, student.last_name):
                raise CourseError(
                    f"{path.name}, line {number}: the id {known.id} is also on line {lines[known.id]}, with another "
                    "name; nothing was imported. Give each person an id of their own"
                )
            done.notes.append(f"line {number} is about {known.id} again, as line {lines[known.id]}: taken together")
        if known is None:
            student.id = _id_given_before(before, student, done) or student.id
            if twin := next((i for i in folded.get(student.id.casefold(), ()) if i != student.id), ""):
                raise CourseError(
                    f"{path.name}, line {number}: the ids {twin} and {student.id} differ only in case, and some file "
                    "systems take them for one; nothing was imported. Change one of them"
                )
            folded.setdefault(student.id.casefold(), set()).add(student.id)
        lines[(known or student).id] = number
        _merge(roster, known, student, done)
    if not lines:
        raise CourseError(f"{path} names no student; a roster has a header such as: id,first name,last name,email")
    done.absent = sorted(there - set(lines))
    return done


def _merge(roster: Roster, known: Student | None, student: Student, done: Imported) -> None:
    if known is None:
        roster.put(student)
        roster.others.pop(student.id, None)
        done.added.append(student.id)
        return
    old = (known.first_name, known.last_name, known.email, dict(known.ids))
    for key in ("first_name", "last_name", "email"):
        setattr(known, key, getattr(student, key) or getattr(known, key))
    participants = dict.fromkeys(f"{known.ids.get('participant', '')} {student.ids.get('participant', '')}".split())
    known.ids |= student.ids | ({"participant": " ".join(participants)} if participants else {})
    roster.put(known)
    if old != (known.first_name, known.last_name, known.email, known.ids) and known.id not in done.added:
        done.changed.append(known.id)
        now = (known.first_name, known.last_name, known.email)
        done.changes += [
            f"{known.id}: {what} {after!r}, was {before!r}"
            for what, before, after in zip(("first name", "last name", "email"), old, now, strict=False)
            if before and before != after
        ]


def _id_given_before(before: dict[str, str], student: Student, done: Imported) -> str:
    """The id under which a student handed in before being in the roster: it stays theirs."""
    named = {**student.ids, "email": student.email}
    kinds = (("canvas", "canvas_id"), ("blackboard", "login"), ("gradescope", "sid"), ("gradescope", "email"),
             ("participant", "participant"))  # fmt: skip
    keys = [f"{form}:{named[kind]}" for form, kind in kinds if named.get(kind)]
    given = next((before[key] for key in keys if key in before), "")
    if given:
        done.notes.append(f"{student.name or student.id} has handed in as {given}: that stays the id")
    return given


def _student(row: dict[str, str]) -> Student | None:
    first, last = row.get("first_name", ""), row.get("last_name", "")
    if not (first or last) and row.get("name"):
        name = row["name"]
        last, first = [part.strip() for part in name.split(",", 1)] if "," in name else name.rpartition(" ")[::-2]
    ids = {kind: row[kind] for kind in (*_SAME_PERSON, "section") if row.get(kind)}
    if "participant" in ids:
        ids["participant"] = "".join(re.findall(r"\d+", ids["participant"])[-1:])
    own = row.get("id") or next((row[kind] for kind in _ID_FROM if row.get(kind)), "")
    if not own and ids.get("participant"):
        own = f"participant-{ids['participant']}"
    return Student(safe_id(own), first, last, row.get("email", ""), ids) if own else None


def _rows(path: Path, notes: list[str]) -> list[tuple[int, dict[str, str]]]:
    """The rows of the file as (line, value by our name of its column); empty values are left out."""
    columns: list[str] = []
    rows: list[tuple[int, dict[str, str]]] = []
    for number, cells in csv_rows(path, COLUMNS, notes):
        if not columns:
            columns = _columns(cells, notes)
            continue
        row = {key: cell.strip() for key, cell in zip(columns, cells, strict=False) if key and cell.strip()}
        if not row or cells[0][:100].strip().lower().startswith("points possible"):
            continue
        if too_long := next((key for key, cell in row.items() if len(cell) > MAX_CELL), ""):
            raise CourseError(
                f"{path.name}, line {number}: the {too_long} has {len(row[too_long]):,} characters, expected at most "
                f"{MAX_CELL:,}; nothing was imported. Is there a quotation mark too many, or is it another file?"
            )
        if row.get("name") in ("Student, Test", "Test Student") and "sis_user_id" not in row:
            notes.append(f"line {number} is Canvas' test student: left out")
            continue
        rows.append((number, row))
    return rows


def _columns(cells: list[str], notes: list[str]) -> list[str]:
    names = list(map(column_name, cells))
    found = [COLUMNS.get(name, "") for name in names]
    if "sis login id" in names or "sis user id" in names:  # Canvas: its ID is its own number of the user
        found = ["canvas_id" if name == "id" else key for name, key in zip(names, found, strict=True)]
    twice = {key for key in found if key and found.count(key) > 1}
    if twice:
        raise CourseError(f"two columns are the {', '.join(sorted(twice))}: {', '.join(cells)[:200]}; remove one")
    if unknown := [cell.strip() for cell, key in zip(cells, found, strict=True) if not key and cell.strip()]:
        notes.append(f"columns that are not used ({len(unknown)}): " + ", ".join(unknown)[:300])
    return found
