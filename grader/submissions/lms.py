"""Whose a file is, by the names that learning management systems give to what they let an instructor download.

Where each form comes from:
canvas: Canvas' own source, `lib/content_zipper.rb`: NAME_LATE_USERID_FILEID_FILENAME in one flat zip. NAME is the
  sortable name without what is no letter, digit or `_`; with anonymous grading it is missing and USERID is `anon_`
  and five letters. LATE only where it is. A second file of one name gets `-1` before its ending (`attachment.rb`).
moodle: Moodle's own source, `mod/assign/classes/downloader.php`: folders `Name_PARTICIPANT_assignsubmission_file`
  (until Moodle 3 with a `_` at the end), or flat, with `_FILENAME` after it. PARTICIPANT is another number in every
  assignment (`assign_user_mapping`), `Participant_7` with blind marking, and a group's number for groups.
blackboard: nbgrader's documentation of zip_collect, and several public tools that read such zips:
  TITLE_USERNAME_attempt_YEAR-MONTH-DAY-HOUR-MINUTE-SECOND_FILENAME, flat, with a .txt for each attempt.
gradescope: public tools that read the export of a programming assignment: folders `submission_NUMBER` beside
  `submission_metadata.yml` with :submitters: (:name:, :sid:, :email:) and :created_at:. Not confirmed by Gradescope.
exchange: nbgrader's own source, `exchange/default/submit.py`: folders USER+LAB+TIME UTC+RANDOM in `inbound`.
folders: no system's form: STUDENT/LAB/FILE, STUDENT/FILE, or STUDENT.ipynb, as nbgrader's `submitted` has it.

A zip of Canvas or Moodle holds the time of the download, not of the submission, so no time is taken from there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Any

import yaml

from grader.course import CourseError
from grader.examination.notebook_file import Refused
from grader.submissions.handed_in import Entry, without_outer_folder

FORMATS = ("gradescope", "moodle", "blackboard", "exchange", "canvas", "folders")
METADATA = "submission_metadata.yml"

_CANVAS = re.compile(
    r"(?:(?P<name>\w*?)_)??(?P<late>LATE_)?(?P<id>\d+|anon_[A-Za-z0-9]+)"
    r"(?:_(?P<number>\d+)_(?P<file>.+)|_(?P<entry>text|link)\.html)"
)
_MOODLE = re.compile(r"(?P<name>.+)_(?P<id>\d+)_assignsubmission_[a-z]+(?:_(?P<file>.*))?")
_BLACKBOARD = re.compile(r".*_(?P<user>[^_]+)_attempt_(?P<time>\d{4}(?:-\d\d){5})(?:_(?P<file>.+)|\.txt)")
_EXCHANGE = re.compile(r"(?P<user>.+)\+(?P<lab>[^+]+)\+(?P<time>\d{4}-\d\d-\d\d [\d:]{8}(?:\.\d+)?) UTC(?:\+.*)?")
_NOTEBOOK = re.compile(r"(\.ipynb(\.\w+)?|\.zip)$", re.IGNORECASE)


@dataclass(frozen=True)
class Owner:
    """Whose a file is. person: what tells people apart in this download; file: its name as the learner gave it.

    ids: what may identify them in a roster, kind and value; attempt: when it was handed in, where the name says so;
    late: what the LMS says, None where it says nothing; own: the instructor chose the name, so it is the student's id.
    """

    person: str
    file: str
    ids: tuple[tuple[str, str], ...] = ()
    name: str = ""
    attempt: datetime | None = None
    late: bool | None = None
    own: bool = False


Reader = Callable[[PurePosixPath], list[Owner]]


@dataclass(frozen=True)
class Download:
    """A folder or zip that was understood. owned: each file with whose it is; ignored: files without an owner."""

    form: str
    owned: list[tuple[Owner, Entry]]
    ignored: list[PurePosixPath]

    @property
    def times_are_real(self) -> bool:
        """Whether a file's own time may be when it was handed in."""
        return self.form not in ("canvas", "moodle", "gradescope")


def understand(entries: list[Entry], form: str, lab: str, name: str, other_labs: Iterable[str]) -> Download:
    """Find the form of a download (`auto`) or take the given one. Raises CourseError where it does not fit.

    lab: the lab's folder; name: its notebook's file name; other_labs: folders of other labs, whose files are ignored.
    """
    if form not in ("auto", *FORMATS):
        raise CourseError(f"no format {form!r}; known: auto, {', '.join(FORMATS)}")
    for candidate in FORMATS[:-1] if form == "auto" else [form] if form != "folders" else []:
        for variant in (entries, without_outer_folder(entries)):
            reader = _reader(candidate, variant, lab)
            owned = [(owner, entry) for entry in variant for owner in reader(entry.path)]
            counted = [e for e in variant if not (e.name == METADATA or e.path.suffix in (".csv", ".html"))]
            if owned and (form != "auto" or 2 * len({id(entry) for _, entry in owned}) >= len(counted)):
                return _download(candidate, owned, variant)
    if form not in ("auto", "folders"):
        raise CourseError(f"no file in it has a name of the form {form}; without --format the form is found out")
    inner = _without_outer_of_folders(entries, lab, name)
    reader = _folders(set(other_labs) - {lab})
    owned = [(owner, entry) for entry in inner for owner in reader(entry.path) if _is_meant(entry)]
    return _download("folders", owned, inner)


def _download(form: str, owned: list[tuple[Owner, Entry]], entries: list[Entry]) -> Download:
    used = {id(entry) for _, entry in owned}
    return Download(form, owned, [e.path for e in entries if id(e) not in used and e.name != METADATA])


def _reader(form: str, entries: list[Entry], lab: str) -> Reader:
    if form == "gradescope":
        return _gradescope(entries)
    if form == "exchange":
        return lambda path: _exchange(path, lab)
    return {"canvas": _canvas, "moodle": _moodle, "blackboard": _blackboard}[form]


def _canvas(path: PurePosixPath) -> list[Owner]:
    match = _CANVAS.fullmatch(path.name)
    if match is None or len(path.parts) != 1:
        return []
    name, user = match["name"] or "", match["id"]
    ids = (("canvas_id", user), ("canvas_name", name)) if name else ()
    return [Owner(user, match["file"] or f"{match['entry']}.html", ids, name, late=match["late"] is not None)]


def _moodle(path: PurePosixPath) -> list[Owner]:
    match = _MOODLE.fullmatch(path.parts[0])
    if match is None or (len(path.parts) == 1) != bool(match["file"]):
        return []
    name = match["name"].replace("_", " ")
    ids = (("participant", match["id"]), ("name", name))
    return [Owner(f"{name} {match['id']}", match["file"] or path.name, ids, name)]


def _blackboard(path: PurePosixPath) -> list[Owner]:
    match = _BLACKBOARD.fullmatch(path.name)
    if match is None or len(path.parts) != 1:
        return []
    user = match["user"]
    try:
        # The server's clock, without a zone: taken for this machine's.
        attempt = datetime.strptime(match["time"], "%Y-%m-%d-%H-%M-%S").astimezone(UTC)
    except (ValueError, OverflowError, OSError):
        return []
    return [Owner(user, match["file"] or "comment.txt", (("login", user),), user, attempt)]


def _exchange(path: PurePosixPath, lab: str) -> list[Owner]:
    match = _EXCHANGE.fullmatch(path.parts[0])
    if match is None or len(path.parts) < 2 or match["lab"] != lab:
        return []
    try:
        attempt = datetime.fromisoformat(match["time"]).replace(tzinfo=UTC)
    except ValueError:
        return []
    return [Owner(match["user"], path.name, (("login", match["user"]),), match["user"], attempt, own=True)]


def _gradescope(entries: list[Entry]) -> Reader:
    metadata = next((entry for entry in entries if entry.path.parts == (METADATA,)), None)
    known = {} if metadata is None else _gradescope_metadata(metadata)

    def read(path: PurePosixPath) -> list[Owner]:
        submission = known.get(path.parts[0])
        if not isinstance(submission, dict) or len(path.parts) < 2:
            return []
        when = submission.get(":created_at")
        attempt = when if isinstance(when, datetime) else None
        if attempt is not None and attempt.tzinfo is None:
            attempt = attempt.replace(tzinfo=UTC)
        submitters = submission.get(":submitters")
        people = [p for p in submitters if isinstance(p, dict)] if isinstance(submitters, list) else []
        return [_gradescope_owner(person, path, attempt) for person in people or [{}]]

    return read


def _gradescope_owner(person: dict[Any, Any], path: PurePosixPath, attempt: datetime | None) -> Owner:
    sid, email, name = (str(person.get(f":{key}") or "").strip() for key in ("sid", "email", "name"))
    ids = tuple((kind, value) for kind, value in (("sid", sid), ("email", email), ("name", name)) if value)
    return Owner(sid or email or path.parts[0], path.name, ids, name, attempt)


class _PlainLoader(yaml.SafeLoader):
    """YAML as data; what a Ruby program marked as its own object is read as the table or text it is written as."""


def _construct_anything(loader: Any, _: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    return loader.construct_sequence(node, deep=True) if isinstance(node, yaml.SequenceNode) else str(node.value)


_PlainLoader.add_multi_constructor("", _construct_anything)


def _gradescope_metadata(entry: Entry) -> dict[Any, Any]:
    try:
        known = yaml.load(entry.read().decode("utf-8"), _PlainLoader)  # a subclass of the safe loader
    except (yaml.YAMLError, Refused, ValueError, RecursionError) as error:
        raise CourseError(f"{METADATA} cannot be read: {error}") from error
    return known if isinstance(known, dict) else {}


def _folders(other_labs: set[str]) -> Reader:
    def read(path: PurePosixPath) -> list[Owner]:
        if len(path.parts) > 2 and path.parts[1] in other_labs:
            return []
        person = path.parts[0] if len(path.parts) > 1 else _NOTEBOOK.sub("", path.name)
        ids = tuple((kind, person) for kind in ("id", "login", "email", "name"))
        return [Owner(person, path.name, ids, person, own=True)]

    return read


def _is_meant(entry: Entry) -> bool:
    """Whether a file is a student's: in a folder everything is, at the top only what can be a notebook."""
    return len(entry.path.parts) > 1 or bool(entry.problem) or bool(_NOTEBOOK.search(entry.name))


def _without_outer_of_folders(entries: list[Entry], lab: str, name: str) -> list[Entry]:
    """Takes off a folder that holds all submissions, as a zip of a folder has; a student's own folder is kept."""
    inner = without_outer_folder(entries)
    if inner is entries or any(e.path.parts == (name,) or e.path.parts[0] == lab for e in inner):
        return entries
    return entries if len(inner) == 1 and len(inner[0].path.parts) == 1 else inner
