"""From a folder, a zip or an LMS's download of submissions to one notebook per student, each of them taken in.

Files are listed first and read one at a time, so a class of any size takes no more memory than its largest notebook.
`lms.py` says whose a file is, `roster.py` which student that is; here is which of several files counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pwd
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from grader.course import CourseError, course_lock
from grader.examination.intake import Refused
from grader.examination.notebook_file import read_cells
from grader.labs.lab import Lab
from grader.submissions.handed_in import MAX_FILES, Entry, files_in_student_zip, opened
from grader.submissions.lms import Download, Owner, understand
from grader.submissions.receipt import Handed, Received, derive, keep, read_history, receive, released, write_safely
from grader.submissions.roster import Roster, load_roster, save_roster, with_hash

__all__ = ["Collected", "Handed", "Received", "choose", "collect", "receive", "take_in"]

SECRET = "submission_secret.txt"  # nbgrader finds a student's feedback by it
_HEX = re.compile(rb"[0-9a-f]{1,256}")
MAX_OPENED = 20  # files of one student that are opened to see which is the lab's


@dataclass
class Collected:
    """What a collect did. form: how the download was understood; ignored: files without an owner; unknown: ids, with
    names, of those not in the roster; missing: ids of the roster's students who have handed in nothing.
    """

    form: str
    received: list[Received] = field(default_factory=list)
    ignored: list[PurePosixPath] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def collect(root: Path, lab_slug: str, source: Path, form: str = "auto") -> Collected:
    """Take in all submissions in `source`. Raises CourseError when `source` holds none, and takes in nothing then."""
    release_path = next((root / "labs" / lab_slug).glob("*.ipynb"), None)
    if release_path is None:
        raise CourseError(f"{lab_slug} is not released in this course; first: inferlab grade release {lab_slug}")
    roster = load_roster(root)
    others = [path.name for path in (root / "labs").iterdir()]
    with opened(source) as entries, course_lock(root):
        download = understand(entries, form, lab_slug, release_path.name, others)
        if download.form == "exchange":
            download = without_forged(download, source)
        if not download.owned:
            expected = f"STUDENT/{lab_slug}/{release_path.name} or STUDENT.ipynb"
            raise CourseError(f"no notebook in {source}; expected {expected}, or an LMS's download")
        people: dict[str, list[tuple[Owner, Entry]]] = {}
        for owner, entry in download.owned:
            people.setdefault(owner.person, []).append((owner, entry))
        done = Collected(download.form, ignored=download.ignored)
        ids = _ids(root, roster, {person: files[0][0] for person, files in people.items()}, done)
        save_roster(root, roster)
        _, _, lab = released(root, lab_slug)
        for person in sorted(people, key=lambda person: ids[person]):
            if (root / "submitted" / ids[person] / lab_slug).is_dir():
                take_in(root, lab_slug, ids[person])  # what the exchange brought before is kept, too
            handed = _handed(people[person], download, lab)
            done.received.append(receive(root, lab_slug, ids[person], handed))
            if download.form == "exchange":
                _copy_secret(root, root / "submitted" / ids[person] / lab_slug, people[person])
    done.missing = [s for s in sorted(roster.students) if not (root / "submitted" / s / lab_slug).is_dir()]
    return done


def without_forged(download: Download, source: Path) -> Download:
    """Every user may write to nbgrader's exchange: what one put there in another's name is ignored.

    A copy that the instructor made belongs to the instructor, and counts.
    """
    forged = {entry.path for owner, entry in download.owned
              if folder_owner(source / entry.path.parts[0]) not in (None, owner.person)}  # fmt: skip
    owned = [(owner, entry) for owner, entry in download.owned if entry.path not in forged]
    return replace(download, owned=owned, ignored=[*download.ignored, *sorted(forged)])


def folder_owner(path: Path) -> str | None:
    """The folder's owner; None if that is the current user, or a user id without a name on this machine."""
    try:
        user = path.lstat().st_uid
        return None if user == os.geteuid() else pwd.getpwuid(user).pw_name
    except (OSError, KeyError):
        return None


def take_in(root: Path, lab_slug: str, student: str) -> None:
    """Make sure, before grading, that what lies in `submitted/` is intake's: finish what a kill interrupted, and take
    in what came by another way than `collect`, such as nbgrader's exchange.
    """
    folder = root / "submitted" / student / lab_slug
    name = next((root / "labs" / lab_slug).glob("*.ipynb")).name
    ours = {name, "intake.json", "timestamp.txt", SECRET}
    if all(path.name in ours and path.is_file() and not path.is_symlink() for path in folder.iterdir()):
        record, history = read_record(folder), read_history(root, lab_slug, student)
        # Only received/ counts, because intake alone writes there; a submission may bring an intake.json of its own.
        whole = (
            record and record == read_record(root / "received" / student / lab_slug) and _holds(folder / name, record)
        )
        if history and (record.get("pending") or (whole and record.get("sha256") != history[-1].sha256)):
            derive(root, lab_slug, student)
            return
        if whole:
            return
    if not (folder / "intake.json").is_dir():
        (folder / "intake.json").unlink(missing_ok=True)
    _, _, lab = released(root, lab_slug)
    with opened(folder) as entries:
        owner = Owner(student, "", own=True)
        files = [
            (replace(owner, file=entry.name), entry) for entry in entries if entry.name not in ("timestamp.txt", SECRET)
        ]
        if files or not read_history(root, lab_slug, student):
            handed = _handed(files, Download("", [], []), lab) if files else "nothing was handed in"
            if isinstance(handed, Handed):
                handed = replace(handed, changed=None, time_from="")  # nbgrader's timestamp.txt says when
            keep(root, lab_slug, student, handed)
    _set_aside(root, lab_slug, student)
    derive(root, lab_slug, student)


def read_record(folder: Path) -> dict[str, Any]:
    """What intake noted about a submission; empty where intake has not seen it."""
    try:
        record = json.loads((folder / "intake.json").read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        return {"pending": True}
    return record if isinstance(record, dict) else {"pending": True}


def _holds(path: Path, record: dict[str, Any]) -> bool:
    return path.is_file() and record.get("notebook") == hashlib.sha256(path.read_bytes()).hexdigest()


def _set_aside(root: Path, lab_slug: str, student: str) -> None:
    """Move what a student's folder holds to `received/`; nbgrader would copy it, and follow links."""
    folder = root / "submitted" / student / lab_slug
    kept = {"timestamp.txt": _is_timestamp, SECRET: _is_secret}
    others = [path for path in folder.iterdir() if not (path.name in kept and kept[path.name](path))]
    if not others:
        return
    received = root / "received" / student / lab_slug
    number = sum(1 for _ in received.glob("exchange_*")) + 1
    aside = received / f"exchange_{number}"
    aside.mkdir(parents=True)
    for path in others:
        os.replace(path, aside / path.name)  # a link is moved, not what it points to


def _is_timestamp(path: Path) -> bool:
    """Whether nbgrader can read the file; one that it cannot stops its grading."""
    from nbgrader.utils import parse_utc

    try:
        return not path.is_symlink() and path.stat().st_size < 100 and bool(parse_utc(path.read_text("utf-8").strip()))
    except (OSError, ValueError, OverflowError):
        return False


def _is_secret(path: Path) -> bool:
    return not path.is_symlink() and path.stat().st_size < 1000 and bool(_HEX.fullmatch(path.read_bytes()))


def _copy_secret(root: Path, folder: Path, files: list[tuple[Owner, Entry]]) -> None:
    """What `nbgrader release_feedback` needs of a submission that came from the exchange."""
    newest = max((owner.attempt for owner, _ in files if owner.attempt), default=None)
    for owner, entry in files:
        if owner.file == SECRET and owner.attempt == newest:
            with contextlib.suppress(Refused):
                if _HEX.fullmatch(raw := entry.read()):
                    write_safely(root, folder / SECRET, raw)


def _ids(root: Path, roster: Roster, people: dict[str, Owner], done: Collected) -> dict[str, str]:
    """The id of each person; no two share one. Those not in the roster are put into `done.unknown`."""
    ids: dict[str, str] = {}
    used: set[str] = set()
    tops = (root / "submitted", root / "received")
    folders = {path.name for top in tops for path in top.glob("*")} - roster.students.keys() - roster.others.keys()
    for person in sorted(people, key=lambda person: (person not in roster.students, person)):
        owner = people[person]
        student = roster.find(owner.ids)
        if student is not None and student.id not in used:
            ids[person] = student.id
        else:
            key = f"{'folders' if owner.own else done.form}:{person}"
            ids[person] = roster.id_for(person, key, owner.own, folders)
            if ids[person] in used:
                ids[person] = with_hash(ids[person][:64], key)
                roster.give(ids[person], key)
            done.unknown[ids[person]] = owner.name
        used.add(ids[person])
    return ids


def _handed(files: list[tuple[Owner, Entry]], download: Download, lab: Lab) -> Handed:
    """What one person handed in: the file that counts, read, or why there is none."""
    newest = max((owner.attempt for owner, _ in files if owner.attempt), default=None)
    attempt = [(owner, entry) for owner, entry in files if owner.attempt == newest]
    found = choose([(owner.file, entry) for owner, entry in attempt], lab)
    entry = found.entry or attempt[0][1]
    shared = sum(1 for _, other in download.owned if other is entry)
    notes = [*found.notes, *([f"handed in by a group of {shared}"] if shared > 1 else [])]
    changed, time_from = newest, f"{download.form}'s name for it"
    if newest is None:
        changed = entry.changed if download.times_are_real else None
        time_from = "the file's own time" if changed else ""
    late = attempt[0][0].late
    return Handed(entry.path, found.raw, changed, found.problem, download.form, time_from, late, tuple(notes))


@dataclass(frozen=True)
class Choice:
    """The file of a student that counts, and its bytes; or the problem, with what there is to keep."""

    entry: Entry | None
    raw: bytes = b""
    problem: str = ""
    notes: tuple[str, ...] = ()


def choose(files: Sequence[tuple[str, Entry]], lab: Lab, inside: str = "") -> Choice:
    """The one of a student's files (name as the student gave it, file) that is this lab's; `inside`: of which zip.

    In this order: the lab's folder and name, its name, its name in other letters, a copy of it ("NAME (1)", "NAME-1",
    "NAME-Copy1", "Copy of NAME"), its name with .txt or .json after it, any notebook, a zip. Of equals the one in
    fewer folders, then the highest number of a copy, then the newest. Several notebooks of other names are opened, and
    the one that holds cells of the lab counts.
    """
    if len(files) > MAX_FILES:
        return Choice(None, problem=f"more than {MAX_FILES} files were handed in: hand in the notebook alone")
    readable = [(name, entry) for name, entry in files if not entry.problem]
    ranked = sorted(((_rank(name, entry, lab), n) for n, (name, entry) in enumerate(readable)), reverse=True)
    ranked = [(rank, n) for rank, n in ranked if rank[0] > 0]
    if not ranked:
        return _none(files, lab, inside)
    best = [readable[n] for rank, n in ranked if rank[0] == ranked[0][0][0]]
    name, entry = best[0]
    if ranked[0][0][0] == ANY and len(best) > 1:
        ours = [(name, entry) for name, entry in best[:MAX_OPENED] if _has_cells_of(entry, lab)]
        if len(ours) != 1:
            names = _names(name for name, _ in best)
            problem = f"several notebooks were handed in ({names}), none of them is named {lab.name}.ipynb"
            return Choice(None, problem=problem)
        name, entry = ours[0]
    notes = []
    if name != f"{lab.name}.ipynb":
        notes.append(f"the file is named {_names([name])}: it was taken for {lab.name}.ipynb")
    left = [other for _, n in ranked if (other := readable[n][0]) and readable[n][1] is not entry]
    if left:
        notes.append(f"of several files {_names([name])} was taken; left out: {_names(left)}")
    try:
        raw = entry.read()
    except Refused as error:
        return Choice(entry, problem=str(error), notes=tuple(notes))
    if raw.startswith((b"PK\x03\x04", b"PK\x05\x06")):  # the second one: an empty zip
        return _from_zip(name, entry, raw, lab, inside, notes)
    return Choice(entry, raw, notes=tuple(notes))


def _names(names: Iterable[str]) -> str:
    """A list of file names, short enough to be read however long the names are."""
    names = sorted(names)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(name if len(name) <= 60 else f"{name[:40]}...{name[-15:]}" for name in names[:5]) + more


def _from_zip(name: str, entry: Entry, raw: bytes, lab: Lab, inside: str, notes: list[str]) -> Choice:
    if inside:
        return Choice(entry, problem=f"{inside} holds a zip in a zip: hand in the notebook itself", notes=tuple(notes))
    try:
        found = choose([(file.name, file) for file in files_in_student_zip(raw)], lab, _names([name]))
    except Refused as error:
        return Choice(entry, raw, str(error), tuple(notes))
    # The bytes of the notebook inside; of a zip that holds none, the zip is kept.
    path = entry.path.with_suffix(".ipynb") if found.raw else entry.path
    entry = replace(entry, path=path)
    notes = (
        [f"a zip was handed in ({_names([name])}): the notebook in it was taken", *found.notes] if found.raw else notes
    )
    return Choice(entry, found.raw or raw, found.problem, tuple(notes))


EXACT, SAME, LETTERS, COPY, SUFFIXED, ANY, ZIP = 7, 6, 5, 4, 3, 2, 1


def _rank(name: str, entry: Entry, lab: Lab) -> tuple[int, int, int, float]:
    """(how well the name fits, 0 for no notebook; minus its depth; number of the copy; time), the highest is best."""
    wanted = f"{lab.name}.ipynb"
    folded, number = name.casefold(), 0
    stem = re.escape(lab.name.casefold())
    copy = re.fullmatch(rf"(?:copy[ _]of[ _])?{stem}((?:[-_ ]*\(\d+\)|[-_ ]+copy\d*|[-_ ]+\d+){{0,3}})\.ipynb", folded)
    if entry.path.parts[-2:] == (lab.slug, wanted):
        fit = EXACT
    elif name == wanted:
        fit = SAME
    elif folded == wanted.casefold():
        fit = LETTERS
    elif copy:
        fit, number = COPY, int((re.findall(r"\d+", copy[1]) or ["0"])[-1][:9])
    elif re.fullmatch(rf"{stem}(\.ipynb\.txt|\.ipynb\.json|\.json)", folded):
        fit = SUFFIXED
    elif folded.endswith((".ipynb", ".ipynb.txt", ".ipynb.json")):
        fit = ANY
    else:
        fit = ZIP if folded.endswith(".zip") else 0
    return fit, -len(entry.path.parts), number, entry.changed.timestamp() if entry.changed else 0.0


def _none(files: Sequence[tuple[str, Entry]], lab: Lab, inside: str) -> Choice:
    """Why a student has no notebook; a single file is kept, whatever it is."""
    problems = [entry.problem for _, entry in files if entry.problem]
    names = _names(name for name, _ in files) or "nothing"
    if problems:
        return Choice(files[0][1], problem=problems[0])
    problem = f"there is no notebook in {inside}" if inside else f"no notebook was handed in, but {names}"
    if all(name.endswith(".py") for name, _ in files) and files:
        problem = f"a Python file was handed in ({names}), not the notebook"
    raw = b""
    if len(files) == 1:
        with contextlib.suppress(Refused):
            raw = files[0][1].read()
    return Choice(files[0][1] if files else None, raw if not inside else b"", f"{problem}: hand in {lab.name}.ipynb")


def _has_cells_of(entry: Entry, lab: Lab) -> bool:
    try:
        cells = read_cells(entry.read(), [])
    except Refused:
        return False
    known = {cell.grade_id for cell in lab.cells}
    return any(cell.grade_id in known or cell.cell_id in known for cell in cells)
