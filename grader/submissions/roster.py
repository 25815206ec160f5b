"""Who is in a course, and which id stands for whom: `roster.json` in the course folder.

A student's id is a valid folder name on any file system. Everyone who ever handed in has one, in the roster or not, and
an id is never reused for another person.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import stat
import unicodedata
from collections.abc import Iterable, Iterator, Set
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from grader.course import CourseError
from grader.submissions.receipt import write_safely

FILE = "roster.json"
MAX_BYTES = 32 << 20
# kinds of `Student.ids`, beside id and email; `participant` may hold several, Moodle gives one for every assignment
KINDS = ("canvas_id", "sis_user_id", "login", "id_number", "sid", "participant", "section")
_RESERVED = re.compile(r"^(con|prn|aux|nul|com\d|lpt\d)(\.|$)", re.IGNORECASE)


@dataclass
class Student:
    """One student of the roster. ids: their ids in an LMS, by kind, see KINDS; several are separated by spaces."""

    id: str
    first_name: str = ""
    last_name: str = ""
    email: str = ""
    ids: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.first_name} {self.last_name}".strip()


@dataclass
class Roster:
    """A course's students. students: by id. others: ids given to people not in the roster, with what tells them
    apart."""

    students: dict[str, Student] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    _index: dict[tuple[str, str], set[str]] = field(default_factory=dict, repr=False)
    _given: dict[str, str] = field(default_factory=dict, repr=False)  # the inverse of others
    _taken: set[str] = field(default_factory=set, repr=False)  # every id, as it is where case does not count

    def __post_init__(self) -> None:
        for student in list(self.students.values()):
            self.put(student)
        for student_id, key in list(self.others.items()):
            self.give(student_id, key)

    def give(self, student_id: str, key: str) -> None:
        """Give an id to a person who is not in the roster."""
        self.others[student_id], self._given[key] = key, student_id
        self._taken.add(student_id.casefold())

    def given(self, key: str) -> str | None:
        """The id that was given to a sender outside the roster, if any."""
        return self._given.get(key)

    def put(self, student: Student) -> None:
        """Add a student, or update one."""
        self.students[student.id] = student
        self._taken.add(student.id.casefold())
        for key in _keys(student):
            self._index.setdefault(key, set()).add(student.id)

    def find(self, ids: Iterable[tuple[str, str]]) -> Student | None:
        """The one student who has one of these ids, tried in order; None where an id fits several.

        A name, which people choose themselves, is no student's whose number in the same LMS is another one. A student
        ID beside the e-mail address of somebody else is nobody's: a person has to say which of the two is right.
        """
        ids = list(ids)
        numbers: list[tuple[str, str]] = []
        for kind, value in ids:
            found = self._named(kind, value)
            if kind in ("name", "canvas_name"):
                found = {one for one in found if not any(self._has_another(one, *number) for number in numbers)}
            if len(found) == 1 or value in found:
                student = self.students[value if value in found else next(iter(found))]
                by_email = [self._named(other, text) for other, text in ids if kind == "sid" and other == "email"]
                return None if any(others and student.id not in others for others in by_email) else student
            if kind in ("canvas_id", "sid"):
                numbers.append((kind, value))
        return None

    def _named(self, kind: str, value: str) -> set[str]:
        return self._index.get((kind, _plain(kind, value)), set()) if value.strip() else set()

    def _has_another(self, student: str, kind: str, value: str) -> bool:
        own = self.students[student].ids.get(kind, "").split()
        return bool(own) and value not in own

    def id_for(self, person: str, key: str, own: bool, folders: Set[str] = frozenset()) -> str:
        """The id of a person who is not in the roster; the same key always gets the same id.

        own: the name was the instructor's choice, so it may be an id that is there already. folders: ids that are
        taken without being in the roster.
        """
        if key in self._given:
            return self._given[key]
        if own and person not in self.students and (person in self.others or person in folders):
            return person
        student = safe_id(person)
        if student.casefold() in self._taken or student.casefold() in {folder.casefold() for folder in folders}:
            student = with_hash(student[:64], key)
        self.give(student, key)
        return student


def load_roster(root: Path) -> Roster:
    """The course's roster, empty where there is none. Raises CourseError when the file is damaged.

    It says who a student is, so that nothing goes on without it: an empty one would give those it knew other ids.
    """
    path = root / FILE
    try:
        return _read(path)
    except FileNotFoundError:
        return Roster()
    except OSError as error:
        why = error.strerror or type(error).__name__
    except ValueError as error:
        why = str(error)
    quoted = shlex.quote(str(path))
    raise CourseError(
        f"{path} is damaged ({why}); put it back from a copy. Without one: mv {quoted} {quoted}.damaged, then inferlab "
        "grade roster FILE.csv, with the file that it was imported from; who handed in without being in that file may "
        'get a second id, and the next collect lists them under "not in the roster"'
    )


def _read(path: Path) -> Roster:
    """The roster in a file. Raises OSError, and ValueError for anything else than a whole roster."""
    state = path.stat()
    if not stat.S_ISREG(state.st_mode):  # a pipe would keep a reader waiting
        raise ValueError("a folder, expected a file" if path.is_dir() else "not a file")
    if state.st_size > MAX_BYTES:
        raise ValueError(f"{state.st_size >> 20} MiB, expected at most {MAX_BYTES >> 20}")
    try:
        data = json.loads(path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError:
        raise ValueError("not UTF-8, expected JSON") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{'cut short, or not' if state.st_size else 'empty, expected'} JSON") from None
    if not isinstance(data, dict) or data.keys() != {"students", "others"}:
        raise ValueError("expected students and others")
    students, others = data["students"], data["others"]
    if not isinstance(students, list) or not all(map(_is_student, students)):
        raise ValueError(f"expected students as a list, each with {', '.join(f.name for f in fields(Student))}")
    if not _by_name(others):
        raise ValueError("expected others as texts by id")
    if len({one["id"] for one in students}) < len(students):
        raise ValueError("an id is there twice")
    return Roster({one["id"]: Student(**one) for one in students}, others)


def _is_student(entry: Any) -> bool:
    names = {field.name for field in fields(Student)}
    if not isinstance(entry, dict) or "id" not in entry or not entry.keys() <= names:
        return False
    texts = (value for name, value in entry.items() if name != "ids")
    return bool(entry["id"]) and all(isinstance(one, str) for one in texts) and _by_name(entry.get("ids", {}))


def _by_name(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, str) for one in value.values())


def save_roster(root: Path, roster: Roster) -> None:
    students = [asdict(student) for _, student in sorted(roster.students.items())]
    text = json.dumps({"students": students, "others": roster.others}, indent=1, ensure_ascii=False) + "\n"
    write_safely(root, root / FILE, text)


def safe_id(text: str) -> str:
    """An id made of a name: ASCII letters, digits and `._@+-`, at most 64; with a hash where that lost something."""
    text = unicodedata.normalize("NFC", text)
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    plain = re.sub(r"[^A-Za-z0-9._@+-]+", "-", plain).lstrip("._@+-").rstrip(".-")[:64].rstrip(".-")
    return plain if plain and plain == text and not _RESERVED.match(plain) else with_hash(plain, text)


def with_hash(plain: str, text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{plain or 'student'}-{digest}" if not _RESERVED.match(plain) else f"student-{plain}-{digest}"


def _keys(student: Student) -> Iterator[tuple[str, str]]:
    """All that `Roster.find` finds a student by."""
    yield "id", _plain("id", student.id)
    if student.email:
        yield "email", _plain("email", student.email)
    if student.first_name and student.last_name:
        yield "name", _plain("name", f"{student.first_name} {student.last_name}")
        yield "name", _plain("name", f"{student.last_name} {student.first_name}")
        yield "canvas_name", _plain("canvas_name", f"{student.last_name}{student.first_name}")
    for kind in KINDS:
        for value in student.ids.get(kind, "").split():
            yield kind, _plain(kind, value)
    for kind in ("login", "sid"):
        if kind not in student.ids:
            yield kind, _plain(kind, student.id)


def _plain(kind: str, value: str) -> str:
    """The form in which ids are compared: without accents, punctuation and case; names as Canvas writes them in a
    file's name."""
    value = unicodedata.normalize("NFC", value.strip().casefold())
    if kind == "canvas_name":
        return re.sub(r"[\W_]+", "", value)
    if kind == "name":
        plain = "".join(c for c in unicodedata.normalize("NFKD", value) if not unicodedata.combining(c))
        return " ".join(re.findall(r"\w+", plain))
    return value
