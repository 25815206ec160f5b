"""Takes in one notebook per student from a folder, a zip or an LMS's download of submissions.

Files are listed first and read one at a time, so a class of any size takes no more memory than its largest notebook.
`lms.py` says whose a file is, `roster.py` which student that is, `choice.py` which of several files counts.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, tzinfo
from pathlib import Path, PurePosixPath

from grader.course import CourseError, course_lock
from grader.examination.notebook_file import MAX_BYTES, Refused
from grader.submissions.choice import MAX_OPENED, Files, attempts_of, what_counts
from grader.submissions.handed_in import CHECKPOINTS, Entry, hidden_notebooks, opened
from grader.submissions.history import DamagedReceipt, read_history
from grader.submissions.lms import Download, Owner, Reading, understand
from grader.submissions.receipt import (
    Handed,
    Received,
    doubt,
    keep_left_out,
    receive,
    released,
)
from grader.submissions.roster import Roster, load_roster, safe_id, save_roster, with_hash
from grader.submissions.submitted import copy_secret, take_in

NO_ZONE = (
    "Blackboard's times name no zone: they are taken for this machine's ({}), and cost nobody points until you say "
    "that they hold. If the server has another one, collect again with --zone, such as --zone Europe/Berlin, and run"
)
__all__ = ["Collected", "Handed", "Received", "collect", "receive"]


@dataclass
class Collected:
    """What a collect did. form: how the download was understood; ignored: files without an owner; of_other_labs:
    folders of the course's labs that were not asked for; unknown: ids, with names, of those not in the roster; missing:
    ids of the roster's students who have handed in nothing; kept: why what a student had before still counts; warnings:
    what an instructor should look at; damaged: of whom nothing was taken in, because what is there cannot be read.
    """

    form: str
    received: list[Received] = field(default_factory=list)
    ignored: list[PurePosixPath] = field(default_factory=list)
    of_other_labs: list[str] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    damaged: list[DamagedReceipt] = field(default_factory=list)


def collect(
    root: Path,
    lab_slug: str,
    source: Path,
    form: str = "auto",
    whose: Mapping[str, str] | None = None,
    allow: Callable[[dict[str, str]], bool] = lambda doubts: True,
    zone: tzinfo | None = None,
) -> Collected:
    """Take in all submissions in `source`. Raises CourseError when `source` holds none, or where it is doubtful whose a
    file is, and takes in nothing then.

    whose: the student by a file, or by the folder it is in, where the instructor says so; an empty one leaves it out.
    allow: is asked once for all students for whom a worse or an older file would replace what is there. zone: that of
    Blackboard's server; this machine's if None.
    """
    release_path = next((root / "labs" / lab_slug).glob("*.ipynb"), None)
    if release_path is None:
        raise CourseError(f"{lab_slug} is not released in this course; first: inferlab grade release {lab_slug}")
    roster = load_roster(root)
    others = [path.name for path in (root / "labs").iterdir()]
    with opened(source) as entries, course_lock(root):
        if form == "auto" and _everybody_writes(source, entries):
            form = "exchange"
        outer = "" if source.is_dir() else re.sub(r"( ?\([0-9]+\)|-[0-9]+)$", "", source.stem)
        download = understand(
            entries,
            form,
            lab_slug,
            release_path.name,
            others,
            outer,
            lambda name: _is_student(root, roster, name),
            zone,
        )
        done = Collected(download.form)
        hidden = [_why_not(name) for name in hidden_notebooks(source, entries)]
        done.warnings += hidden
        if download.clock:
            done.warnings.append(NO_ZONE.format(datetime.now().astimezone().tzname()))
        elif zone is not None and download.form != "blackboard":
            raise CourseError(f"--zone is for Blackboard, whose times name none; this is {download.form}")
        if download.form == "exchange":
            download = without_forged(download, done.warnings)
        download, left_out = _told(download, roster, whose or {})
        elsewhere = [path for path in download.ignored if set(re.split(r"[/+]", str(path))) & ({*others} - {lab_slug})]
        done.ignored = [path for path in download.ignored if path not in elsewhere]
        done.of_other_labs = sorted({str(path.parent) for path in elsewhere})
        if not download.owned:
            expected = f"STUDENT/{lab_slug}/{release_path.name} or STUDENT.ipynb"
            raise CourseError(
                "\n".join([f"no notebook in {source}; expected {expected}, or an LMS's download", *hidden])
            )
        people = _people(root, roster, download, done)
        for owner, entry in left_out:
            _keep_left_out(root, lab_slug, _may_be_of(roster, owner, download.form, entry), [entry])
        save_roster(root, roster)
        _, _, lab = released(root, lab_slug)

        def take(student: str, ask: bool) -> str:
            if (root / "submitted" / student / lab_slug).is_dir():
                take_in(root, lab_slug, student)  # what the exchange brought before is kept, too
            *earlier, last = attempts_of(people[student])
            handed = what_counts(last, download, lab)
            known = bool(read_history(root, lab_slug, student))
            for attempt in earlier if ask else ():
                before = what_counts(attempt, download, lab)
                if before.raw and not doubt(root, lab_slug, student, before):
                    receive(root, lab_slug, student, before)
                    note = f"an earlier attempt is kept, too, of {before.changed:%Y-%m-%d %H:%M} UTC"
                    handed = replace(handed, notes=(*handed.notes, note))
            if ask and (why := doubt(root, lab_slug, student, handed) or handed.doubt):
                return why
            received = receive(root, lab_slug, student, handed)
            _keep_left_out(root, lab_slug, student, _others(last, handed))
            done.received.append(received if known else replace(received, news="new"))
            if download.form == "exchange":
                copy_secret(root, root / "submitted" / student / lab_slug, people[student])
            return ""

        def isolated(student: str, ask: bool) -> str:
            """Takes in one submission. Whatever is wrong with it is the reason for refusing it, and stops no other."""
            try:
                return take(student, ask)
            except DamagedReceipt as error:
                done.damaged.append(error)
                return ""
            except (OSError, CourseError):  # a full disk, a damaged course: nothing that a submission does
                raise
            except Exception as error:
                problem = f"the file could not be read: {type(error).__name__}"
                if ask and read_history(root, lab_slug, student):
                    return problem
                done.received.append(receive(root, lab_slug, student, problem))
                return ""

        doubts = {student: why for student in sorted(people) if (why := isolated(student, ask=True))}
        if doubts and allow(doubts):
            for student in doubts:
                isolated(student, ask=False)
        else:
            done.kept = doubts
            for student in doubts:
                _keep_left_out(root, lab_slug, student, [entry for _, entry in attempts_of(people[student])[-1]])
    done.missing = [s for s in sorted(roster.students) if not (root / "submitted" / s / lab_slug).is_dir()]
    return done


def _why_not(hidden: str) -> str:
    if hidden.endswith(CHECKPOINTS):
        return f"{hidden}: only the copy that Jupyter keeps of a notebook: not taken in; ask for the notebook itself"
    return (
        f"{hidden}: hidden, its name begins with a dot: not taken in; if it is handed in, rename it and collect again"
    )


def _keep_left_out(root: Path, lab_slug: str, student: str, entries: Sequence[Entry]) -> None:
    """Keep notebooks and zips that do not count: the first ones, of no more bytes together than one may have."""
    files: list[tuple[PurePosixPath, bytes]] = []
    size = 0
    meant = [e for e in entries if not e.problem and (".ipynb" in e.name.lower() or e.name.lower().endswith(".zip"))]
    for entry in meant[:MAX_OPENED]:
        with contextlib.suppress(Refused):
            raw = entry.read()
            size += len(raw)
            if size > MAX_BYTES:
                break
            files.append((entry.path, raw))
    keep_left_out(root, lab_slug, student, files)


def _others(files: Files, handed: Handed) -> list[Entry]:
    """All files but the one that counts, which may have been a zip."""
    paths = [entry.path for _, entry in files]
    counts = handed.path if handed.path in paths else handed.path.with_suffix(".zip")
    return [entry for _, entry in files if entry.path != counts]


def _may_be_of(roster: Roster, owner: Owner | None, form: str, entry: Entry) -> str:
    """The folder for a file that the instructor left out: that of the student whom it names, if there is one."""
    if owner is not None and (student := roster.find(owner.ids)):
        return student.id
    if owner is not None and (student_id := roster.given(f"{'folders' if owner.own else form}:{owner.person}")):
        return student_id
    return with_hash("unnamed", escaped(entry))


def _everybody_writes(source: Path, entries: list[Entry]) -> bool:
    """Whether others than the instructor can put files there, and did: then names prove nothing, only owners do."""
    info = source.lstat()
    if not source.is_dir() or not info.st_mode & stat.S_IWOTH:
        return False
    return any(entry.owners - {os.geteuid(), info.st_uid} for entry in entries)


def _is_student(root: Path, roster: Roster, name: str) -> bool:
    if roster.find([(kind, name) for kind in ("id", "login", "email", "name")]):
        return True
    return name in roster.others or (root / "received" / safe_id(name)).is_dir()


def without_forged(download: Download, warnings: list[str]) -> Download:
    """The download without what one user put into nbgrader's exchange in another's name: every user may write there.

    A copy that the instructor made belongs to the instructor, and counts.
    """
    forged, copied = {}, set()
    for owner, entry in download.owned:
        users = entry.owners - {os.geteuid()}
        if not users:
            copied.add(owner.person)
        elif others := sorted({_user(user) for user in users} - {owner.claim[0]}):
            forged[entry.path] = f"{entry.path.parts[0]} belongs to {', '.join(others)}: left out"
    warnings += sorted(set(forged.values()))
    if copied:
        warnings.append(
            f"belong to you, so that only a name says whose they are ({len(copied)}): {', '.join(sorted(copied)[:20])}"
        )
    owned = [(owner, entry) for owner, entry in download.owned if entry.path not in forged]
    return replace(download, owned=owned, ignored=[*download.ignored, *sorted(forged)])


def _user(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"the user number {user}"  # no name that a folder could carry: there is a blank in it


def _told(
    download: Download, roster: Roster, whose: Mapping[str, str]
) -> tuple[Download, list[tuple[Owner | None, Entry]]]:
    """The download with each file given to the student whom the instructor, or else the roster, says it is of; and what
    the instructor leaves out, with whose it may be.

    Raises CourseError where neither says it.
    """
    owned: Files = []
    left_out: list[tuple[Owner | None, Entry]] = []
    ignored = list(download.ignored)
    questions: list[str] = []
    clear: list[tuple[Entry, list[Reading]]] = [(entry, [(owner,)]) for owner, entry in download.owned]
    entries = [entry for entry, _ in [*clear, *download.doubtful]]
    told, unknown = _named(entries, whose)
    for entry, alternatives in [*clear, *download.doubtful]:
        student = told.get(entry.names)
        if student == "":
            ignored.append(entry.path)
            left_out.append((alternatives[0][0] if len(alternatives) == 1 and alternatives[0] else None, entry))
        elif student is not None:
            ids = tuple((kind, student) for kind in ("id", "login", "email"))
            first = [r[0] for r in alternatives if r] or [Owner(student, entry.name)]
            meant = [one for one in first if student in (one.person, getattr(roster.find(one.ids), "id", ""))]
            owner = replace((meant or first)[0], person=student, name=student, ids=ids, own=True, claim=())
            owned.append((owner, entry))
        elif not alternatives[0]:
            file = _shown(entry, entries)
            questions.append(f'{file} names no student: --whose "{file}=STUDENT"')
        else:
            fit = alternatives if len(alternatives) == 1 else _fitting(alternatives, roster)
            if len(fit) == 1:
                owned += [(owner, entry) for owner in fit[0]]
            else:
                who = " or ".join(f"{reading[0].person} ({reading[0].name})" for reading in alternatives[:5])
                file = _shown(entry, entries)
                questions.append(f'{file} can be of {who}: --whose "{file}={alternatives[0][0].person}"')
    if unknown:
        raise CourseError(f"--whose names no file and no folder in it: {', '.join(unknown)}")
    if questions:
        raise CourseError(_question("it is doubtful whose these files are", questions))
    return replace(download, owned=owned, ignored=ignored, doubtful=[]), left_out


def _named(entries: list[Entry], whose: Mapping[str, str]) -> tuple[dict[tuple[str, ...], str], list[str]]:
    """The student of each file that --whose names, by the file's `names`, and the keys that name nothing.

    A key is a file or a folder as it is, else as `escaped` writes it, else as it is shown. Of a file and its folder the
    file's counts. Raises CourseError where what is shown is two files or two folders, which look alike.
    """
    told: dict[int, dict[tuple[str, ...], str]] = {1: {}, 2: {}}  # of folders, of files
    unknown = []
    for key, student in sorted(whose.items()):
        kinds: list[Callable[[Entry], str]] = [
            lambda entry: "/".join(entry.given),
            escaped,
            lambda entry: str(entry.path),
        ]
        for kind in kinds:
            files = [entry for entry in entries if kind(entry) == key]
            inside = [entry for entry in entries if kind(_top(entry)) == key]
            if files or inside:
                break
        alike = sorted({escaped(entry) for entry in files} | {escaped(_top(entry)) for entry in inside})
        if len(alike) > 1:
            raise CourseError(
                f"--whose {key!r} fits {len(alike)} names that look alike: {', '.join(alike)}. Nothing was taken in. "
                "Give one of them as it is written here"
            )
        told[2] |= dict.fromkeys((entry.names for entry in files), student.strip())
        told[1] |= dict.fromkeys((entry.names for entry in inside), student.strip())
        unknown += [] if alike else [key]
    return told[1] | told[2], unknown


def _top(entry: Entry) -> Entry:
    return replace(entry, path=PurePosixPath(entry.path.parts[0]), names=entry.given[:1])


def escaped(entry: Entry) -> str:
    """A file's path with all but ASCII written as escapes: names that look alike differ here."""
    return "/".join(entry.given).encode("unicode_escape").decode()


def _shown(entry: Entry, entries: list[Entry]) -> str:
    """A file's path as --whose takes it: escaped where another file, or another's folder, looks the same."""
    alike = {escaped(_top(one)) for one in entries if one.path.parts[0] == entry.path.parts[0]}
    same = {escaped(one) for one in entries if one.path == entry.path}
    return escaped(entry) if max(len(alike), len(same)) > 1 else str(entry.path)


def _fitting(alternatives: list[Reading], roster: Roster) -> list[Reading]:
    """The readings that the roster allows. Only a number that an LMS gave counts, together with the name beside it."""
    fit = []
    for reading in alternatives:
        student = roster.find(reading[0].ids[:1])
        if student is not None and student is roster.find(reading[0].ids[1:]):
            fit.append(reading)
    known = [reading for reading in alternatives if roster.find(reading[0].ids[:1])]
    return fit if len(fit) == len(known) == 1 else alternatives


def _question(what: str, questions: list[str]) -> str:
    more = f"\n  and {len(questions) - 20} more" if len(questions) > 20 else ""
    return (f"{what}:\n  " + "\n  ".join(questions[:20]) + more + "\nNothing was taken in. Say whose they are, --whose"
            ' "FILE=STUDENT", or "FILE=" to leave it out; for all files of a folder, its name')  # fmt: skip


def _people(root: Path, roster: Roster, download: Download, done: Collected) -> dict[str, Files]:
    """The files of each student, by id. Those not in the roster are put into `done.unknown`.

    Raises CourseError where two claims lead to one student.
    """
    claims: dict[tuple[str, ...], Files] = {}
    for owner, entry in download.owned:
        claims.setdefault((owner.person, *owner.claim), []).append((owner, entry))
    tops = (root / "submitted", root / "received")
    folders = {path.name for top in tops for path in top.glob("*")} - roster.students.keys() - roster.others.keys()
    people: dict[str, list[Files]] = {}
    for _, files in sorted(claims.items()):
        owner = files[0][0]
        student = roster.find(owner.ids)
        if student is None:
            key = f"{'folders' if owner.own else done.form}:{owner.person}"
            student_id = roster.id_for(owner.person, key, owner.own, folders)
            done.unknown[student_id] = owner.name
        people.setdefault(student.id if student else student_id, []).append(files)
    questions = []
    for student_id, found in sorted(people.items()):
        own = [files for files in found if files[0][0].claim]  # what the instructor gave a student is no claim
        if len(own) > 1:
            named = [_shown(files[0][1], [entry for _, entry in download.owned]) for files in own[:5]]
            questions.append(f"{student_id}: {' and '.join(named)}")
    if questions:
        raise CourseError(_question("two claim to be one student", questions))
    return {student_id: [one for files in found for one in files] for student_id, found in people.items()}
