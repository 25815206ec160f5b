"""Whose a file is, by the names that learning management systems give to what they let an instructor download.

Each form has one place that says who handed in. It lies between marks of the LMS, and a student may have written what
stands before it (a name) and after it (a file's name). Where such text makes a second place look like the first one,
the file has several readings and is `doubtful`: nothing here chooses. Where each form comes from:

canvas: Canvas' own source, `lib/content_zipper.rb`: NAME_LATE_USERID_FILEID_FILENAME in one flat zip. NAME is the
  sortable name without what is no letter, digit or `_`; with anonymous grading it is missing and USERID is `anon_`
  and five letters. LATE only where it is. A second file of one name gets `-1` before its ending (`attachment.rb`).
moodle: Moodle's own source, `mod/assign/classes/downloader.php`: folders `Name_PARTICIPANT_assignsubmission_file`
  (until Moodle 3 with a `_` at the end), or flat, with `_FILENAME` after it. PARTICIPANT is another number in every
  assignment (`assign_user_mapping`), `Participant_7` with blind marking, and a group's number for groups.
blackboard: nbgrader's documentation of zip_collect, and several public tools that read such zips:
  TITLE_USERNAME_attempt_YEAR-MONTH-DAY-HOUR-MINUTE-SECOND_FILENAME, flat, with a .txt for each attempt. TITLE and
  USERNAME are not a student's to choose, so the first `_attempt_TIME` is Blackboard's.
gradescope: public tools that read the export of a programming assignment: folders `submission_NUMBER` beside
  `submission_metadata.yml` with :submitters: (:name:, :sid:, :email:) and :created_at:. Not confirmed by Gradescope.
exchange: nbgrader's own source, `exchange/default/submit.py`: folders USER+LAB+TIME UTC+RANDOM in `inbound`. Students
  make these folders, so USER counts only where the folder is the user's own (`collect.py`).
folders: no system's form: STUDENT/LAB/FILE, STUDENT/FILE, or STUDENT.ipynb, as nbgrader's `submitted` has it. STUDENT
  is the outermost name, which the instructor wrote. Also what Google Drive packs of a Classroom assignment: STUDENT -
  FILE.ipynb, where FILE is the lab's, a `Copy of` it, or has a number behind it; such a FILE alone names no student.

A zip of Canvas or Moodle holds the time of the download, not of the submission, so no time is taken from there.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import PurePosixPath
from typing import Any

import yaml

from grader.course import CourseError
from grader.examination.notebook_file import Refused
from grader.submissions.handed_in import Entry, printable, without_outer_folder

FORMATS = ("gradescope", "moodle", "blackboard", "exchange", "canvas", "folders")
METADATA = "submission_metadata.yml"
ON_THIS_CLOCK = ", as this machine's clock has it"
MAX_NAME = 1000  # characters; no LMS writes a longer name, and the work for one stays bounded
COPYING = timedelta(minutes=1)  # between the time in an exchange folder's name and that of the files in it

_CANVAS = re.compile(r"(?:^|_)(?P<id>[1-9][0-9]*)(?=_(?P<number>[1-9][0-9]*)_)")
_CANVAS_TEXT = re.compile(r"(?:^|_)(?P<id>[1-9][0-9]*)_(?P<entry>(?:text|link)\.html)$")
_CANVAS_ANONYMOUS = re.compile(
    r"(?P<late>LATE_)?(?P<id>anon_[A-Za-z0-9]{5})_(?:(?P<number>[0-9]+)_(?P<file>.+)|(?P<entry>(?:text|link)\.html))"
)
_MOODLE = re.compile(r"_(?P<id>[0-9]+)_assignsubmission_[a-z]+(?=_)")
_MOODLE_FOLDER = re.compile(r"_(?P<id>[0-9]+)_assignsubmission_[a-z]+_?$")
_BLACKBOARD = re.compile(r"_attempt_(?P<time>[0-9]{4}(?:-[0-9]{2}){5})(?:_(?=.)|(?=\.txt$))")
_EXCHANGE = re.compile(
    r"(?P<user>.+)\+(?P<lab>[^+]+)\+(?P<time>[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:]{8}(?:\.[0-9]+)?) UTC(?:\+[^+]*)?"
)
_GRADESCOPE_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d{1,6})?\d* ?(Z|UTC|[+-]\d\d:\d\d)?", re.ASCII)
_NOTEBOOK = re.compile(r"(\.ipynb(\.\w+)?|\.zip)$", re.IGNORECASE)


@dataclass(frozen=True)
class Owner:
    """Whose a file is. person: what tells people apart in this download; file: its name as the learner gave it.

    claim: the text that says so, as it came, letter by letter: two claims are never taken for one person. ids: what may
    identify them in a roster, kind and value; attempt: when it was handed in, where the name says so; late: what the
    LMS says, None where it says nothing; own: the instructor chose the name, so it is the student's id; number:
    Canvas' number of the file, the newer the higher; notes: what an instructor should know of it.
    """

    person: str
    file: str
    ids: tuple[tuple[str, str], ...] = ()
    name: str = ""
    attempt: datetime | None = None
    late: bool | None = None
    own: bool = False
    claim: tuple[str, ...] = ()
    number: int = 0
    notes: tuple[str, ...] = ()


# Each reading names all owners of a file: a group in Gradescope has several. Several readings: it is doubtful whose.
Reading = tuple[Owner, ...]
Reader = Callable[[Entry], list[Reading]]


@dataclass(frozen=True)
class Download:
    """A folder or zip that was understood. owned: each file with whose it is; doubtful: files that can be read in more
    than one way; ignored: files without an owner.
    """

    form: str
    owned: list[tuple[Owner, Entry]]
    ignored: list[PurePosixPath]
    doubtful: list[tuple[Entry, list[Reading]]] = field(default_factory=list)
    clock: str = ""  # what was assumed of its times, where it does not say their zone

    @property
    def times_are_real(self) -> bool:
        """Whether a file's own time may be when it was handed in."""
        return self.form not in ("canvas", "moodle", "gradescope")


def understand(
    entries: list[Entry],
    form: str,
    lab: str,
    name: str,
    other_labs: Iterable[str],
    outer: str = "",
    known: Callable[[str], bool] = lambda student: False,
    zone: tzinfo | None = None,
) -> Download:
    """Find the form of a download (`auto`) or take the given one. Raises CourseError where it does not fit.

    lab: the lab's folder; name: its notebook's file name; other_labs: folders of other labs, whose files are ignored;
    outer: the folder that a zip of a folder would hold, from the zip's name; known: whether this is a student; zone:
    that of Blackboard's server, whose times name none: this machine's if None.
    """
    if form not in ("auto", *FORMATS):
        raise CourseError(f"no format {form!r}; known: auto, {', '.join(FORMATS)}")
    entries = _without_outer(entries, form, lab, name, outer, known)
    form = _detect(entries, lab) if form == "auto" else form
    if form == "folders":
        others = set(other_labs) - {lab}
        return _download(form, [(e, _folders(e, others, name)) for e in entries if _is_meant(e)], entries)
    reader = _reader(form, entries, lab, zone)
    found = _download(form, [(entry, reader(entry)) for entry in entries], entries)
    if not found.owned and not found.doubtful:
        raise CourseError(f"no file in it has a name of the form {form}; without --format the form is found out")
    return replace(found, clock=ON_THIS_CLOCK) if form == "blackboard" and zone is None else found


def _without_outer(
    entries: list[Entry], form: str, lab: str, name: str, outer: str, known: Callable[[str], bool]
) -> list[Entry]:
    """Takes off a folder that holds all submissions, as a zip of a folder has. A student's own folder is kept: what a
    student put into it must never be read as other students'. Raises CourseError where it could be either.
    """
    inner = without_outer_folder(entries)
    if inner is entries:
        return entries
    top = entries[0].path.parts[0]
    if outer and (top == outer or re.fullmatch(r"assignment_[0-9]+_export", top)):
        return inner
    forms = FORMATS[:-1] if form == "auto" else [form] if form != "folders" else []
    if any(_fits(other, entries, lab) for other in forms) or form == "folders" or known(top):
        return entries
    if form != "auto":
        return inner
    plain = any(e.path.parts[1:] == (name,) or e.path.parts[1] == lab for e in entries)
    if plain or (len(entries) == 1 and len(entries[0].path.parts) == 2):
        return entries
    raise CourseError(
        f"all of it lies in one folder, {top}: is that a student, or does it hold the students? If it is a student: "
        f"--format folders. If it holds the students, collect {top} itself; out of a zip, unpack it first. If an LMS "
        "made it, name the LMS with --format. Nothing was taken in"
    )


def _detect(entries: list[Entry], lab: str) -> str:
    """The one form that reads what any other form reads. Raises CourseError where no form does.

    Counting would not do: everybody may write to nbgrader's exchange, and name files as they like.
    """
    fits = {form: _fits(form, entries, lab) for form in FORMATS[:-1]}
    counted = [e for e in entries if not (e.name == METADATA or e.path.suffix in (".csv", ".html"))]
    large = [form for form, found in fits.items() if found and (2 * len(found) >= len(counted) or form == "exchange")]
    if not large:
        return "folders"
    best = [form for form in large if all(fits[form] >= found for found in fits.values())]
    if len(best) == 1:
        return best[0]
    raise CourseError(
        f"it could be a download of {' or '.join(form for form, found in fits.items() if found)}: say which with "
        "--format. Nothing was taken in"
    )


def _fits(form: str, entries: list[Entry], lab: str) -> set[int]:
    """The places of the entries that have a name of this form."""
    reader = _reader(form, entries, None)
    return {n for n, entry in enumerate(entries) if reader(entry)}


def _download(form: str, read: list[tuple[Entry, list[Reading]]], entries: list[Entry]) -> Download:
    used = {id(entry) for entry, readings in read if readings}
    owned = [(owner, entry) for entry, readings in read if len(readings) == 1 for owner in readings[0]]
    ignored = [e.path for e in entries if id(e) not in used and e.name != METADATA]
    return Download(form, owned, ignored, [(entry, readings) for entry, readings in read if len(readings) > 1])


def _reader(form: str, entries: list[Entry], lab: str | None, zone: tzinfo | None = None) -> Reader:
    if form == "gradescope":
        return _gradescope(entries)
    if form == "exchange":
        return _exchange(entries, lab)
    if form == "blackboard":
        return _blackboard(entries, zone)
    if form == "canvas":
        names = [entry.given[-1] for entry in _flat(entries)]
        anonymous = [name for name in names if _CANVAS_ANONYMOUS.fullmatch(name)]
        named = [name for name in names if _canvas_named(name)]
        return _canvas_anonymous if anonymous and set(named) <= set(anonymous) else _canvas
    return _moodle


def _flat(entries: list[Entry]) -> list[Entry]:
    return [entry for entry in entries if len(entry.path.parts) == 1 and len(entry.path.name) <= MAX_NAME]


def _canvas(entry: Entry) -> list[Reading]:
    return [(owner,) for owner in _canvas_named(entry.given[-1])] if _flat([entry]) else []


def _canvas_named(text: str) -> list[Owner]:
    """The owners that a name of Canvas can mean. text: letter by letter. Canvas takes letters that are drawn as nothing
    for letters; written out, as they are shown, they would not look like a name of its making."""
    found = [(m.start(), m["id"], int(m["number"][:18]), text[m.end("number") + 1 :]) for m in _CANVAS.finditer(text)]
    if match := _CANVAS_TEXT.search(text):
        found.append((match.start(), match["id"], 0, match["entry"]))
    owners = []
    for start, user, number, file in found:
        name = text[:start]
        late = name == "LATE" or name.endswith("_LATE")
        name = name[: -len("_LATE")] if late else name
        if file and all(char == "_" or char.isalnum() or unicodedata.category(char)[0] == "M" for char in name):
            ids = (("canvas_id", user), ("canvas_name", name))
            whose = Owner(user, printable(file), ids, printable(name), late=late, claim=(name, user), number=number)
            owners.append(whose)
    return owners


def _canvas_anonymous(entry: Entry) -> list[Reading]:
    match = _CANVAS_ANONYMOUS.fullmatch(entry.path.name)
    if match is None or not _flat([entry]):
        return []
    number = int((match["number"] or "0")[:18])
    late, user = match["late"] is not None, match["id"]
    return [(Owner(user, match["file"] or match["entry"], late=late, claim=(user,), number=number),)]


def _moodle(entry: Entry) -> list[Reading]:
    top = entry.path.parts[0]
    if len(top) > MAX_NAME:
        return []
    if len(entry.path.parts) > 1:
        match = _MOODLE_FOLDER.search(top)
        return [(_moodle_owner(top[: match.start()], match["id"], entry.path.name),)] if match else []
    found = [(top[: m.start()], m["id"], top[m.end() + 1 :]) for m in _MOODLE.finditer(top)]
    return [(_moodle_owner(*one),) for one in found if one[0] and one[2]]


def _moodle_owner(name: str, number: str, file: str) -> Owner:
    name = name.replace("_", " ")
    ids = (("participant", number), ("name", name))
    return Owner(f"{name} {number}", file, ids, name, claim=(name, number))


def moodle_participant(path: PurePosixPath) -> str:
    """Moodle's number of a person for one assignment, by the path of their file; empty where it cannot be told."""
    readings = _moodle(Entry(path, None, "", bytes))
    return readings[0][0].ids[0][1] if len(readings) == 1 else ""


def _blackboard(entries: list[Entry], zone: tzinfo | None) -> Reader:
    heads = [entry.path.name[: m.start()] for entry in _flat(entries) if (m := _BLACKBOARD.search(entry.path.name))]
    titles = sorted({head.rpartition("_")[0] for head in heads}, key=len)

    def read(entry: Entry) -> list[Reading]:
        name = entry.path.name
        match = _BLACKBOARD.search(name) if _flat([entry]) else None
        if match is None:
            return []
        # All files of a download have one title, so what a longer title has more belongs to a name with a `_` in it.
        head = name[: match.start()]
        title = next((title for title in titles if head.startswith(title + "_")), "")
        user = head.removeprefix(title).removeprefix("_")
        try:
            # The server's clock, without a zone. Of a time that occurs twice the earlier one is meant.
            attempt = datetime.strptime(match["time"], "%Y-%m-%d-%H-%M-%S").replace(tzinfo=zone).astimezone(UTC)
        except (ValueError, OverflowError, OSError):
            return []
        file = name[match.end() :] if name[match.end() - 1] == "_" else "comment.txt"
        return [(Owner(user, file, (("login", user),), user, attempt, claim=(user,)),)] if user else []

    return read


def _exchange(entries: list[Entry], lab: str | None) -> Reader:
    """The reader of nbgrader's exchange. lab: None to read the folders of any lab."""
    latest: dict[str, datetime] = {}  # a student can give a file an old time, but not make the system forget the change
    for entry in entries:
        if entry.settled and len(entry.path.parts) > 1:
            top = entry.path.parts[0]
            latest[top] = max(entry.settled, latest.get(top, entry.settled))

    def read(entry: Entry) -> list[Reading]:
        top = entry.path.parts[0]
        match = _EXCHANGE.fullmatch(top) if len(entry.path.parts) > 1 else None
        if match is None or (lab is not None and match["lab"] != lab):
            return []
        try:
            attempt = datetime.fromisoformat(match["time"]).replace(tzinfo=UTC)
        except ValueError:
            return []
        user = match["user"]
        notes: tuple[str, ...] = ()
        if (changed := latest.get(top)) and changed - attempt > COPYING:
            said = f"{attempt:%Y-%m-%d %H:%M} by its folder's name, {changed:%Y-%m-%d %H:%M} UTC by its files"
            attempt, notes = changed, (f"{said}: the later time counts",)
        claim = (_EXCHANGE.fullmatch(entry.given[0]) or match)["user"]
        ids = (("login", user),)
        return [(Owner(user, entry.path.name, ids, user, attempt, own=True, claim=(claim,), notes=notes),)]

    return read


def _gradescope(entries: list[Entry]) -> Reader:
    metadata = next((entry for entry in entries if entry.path.parts == (METADATA,)), None)
    known = {} if metadata is None else _gradescope_metadata(metadata)

    def read(entry: Entry) -> list[Reading]:
        top = entry.path.parts[0]
        submission = known.get(top)
        if not isinstance(submission, dict) or len(entry.path.parts) < 2:
            return []
        attempt = _gradescope_time(submission.get(":created_at"))
        submitters = submission.get(":submitters")
        people = [p for p in submitters if isinstance(p, dict)] if isinstance(submitters, list) else []
        return [tuple(_gradescope_owner(person, entry.path, attempt) for person in people or [{}])]

    return read


def _gradescope_owner(person: dict[Any, Any], path: PurePosixPath, attempt: datetime | None) -> Owner:
    sid, email, name = (str(person.get(f":{key}") or "").strip()[:MAX_NAME] for key in ("sid", "email", "name"))
    ids = tuple((kind, value) for kind, value in (("sid", sid), ("email", email), ("name", name)) if value)
    return Owner(sid or email or path.parts[0], path.name, ids, name, attempt, claim=(path.parts[0], sid, email, name))


def _gradescope_time(text: Any) -> datetime | None:
    match = _GRADESCOPE_TIME.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        return None
    day, clock, fraction, zone = match.groups("")
    try:
        moment = datetime.fromisoformat(f"{day}T{clock}{fraction}{'' if zone in ('Z', 'UTC') else zone}")
        return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return None


def _gradescope_metadata(entry: Entry) -> dict[Any, Any]:
    try:
        # Every scalar stays text and every tag is left out: what a student printed is in this file, too.
        known = yaml.load(entry.read().decode("utf-8"), getattr(yaml, "CBaseLoader", yaml.BaseLoader))
    except (yaml.YAMLError, Refused, ValueError, RecursionError) as error:
        raise CourseError(f"{METADATA} cannot be read: {error}") from error
    return known if isinstance(known, dict) else {}


def _folders(entry: Entry, other_labs: set[str], name: str) -> list[Reading]:
    """The readings of a file in a folder of no system's form. A file at the top that is called as the lab's notebook,
    name, has two readings without an owner."""
    path = entry.path
    if len(path.parts) > 2 and path.parts[1] in other_labs:
        return []
    person, file = (path.parts[0] if len(path.parts) > 1 else _NOTEBOOK.sub("", path.name)), path.name
    claim = entry.given[0]
    if len(path.parts) == 1 and len(path.name) <= MAX_NAME:
        lab_name = re.escape(name.removesuffix(".ipynb"))
        parted = re.fullmatch(rf"(?:(.+) - )?((?:Copy of )*{lab_name}(?: ?\([0-9]+\))?)", person)
        if parted and parted[1] is None:
            return [(), ()]
        if parted:
            person, file, claim = parted[1].strip(), path.name[parted.start(2) :], parted[1]
    ids = tuple((kind, person) for kind in ("id", "login", "email", "name"))
    return [(Owner(person, file, ids, person, own=True, claim=(claim,)),)]


def _is_meant(entry: Entry) -> bool:
    """Whether a file is a student's: in a folder everything is, at the top only what can be a notebook."""
    return len(entry.path.parts) > 1 or bool(entry.problem) or bool(_NOTEBOOK.search(entry.name))
