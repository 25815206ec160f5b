"""Which of the files that a student handed in is the lab's notebook, and what is kept of it (`Handed`)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from grader.examination.notebook_file import MAX_BYTES, Refused, read_cells
from grader.labs.lab import Lab
from grader.submissions.handed_in import MAX_FILES, Entry, files_in_student_zip
from grader.submissions.lms import Download, Owner
from grader.submissions.receipt import Handed

Files = list[tuple[Owner, Entry]]

MAX_OPENED = 20  # files of one student that are opened to see which is the lab's


@dataclass(frozen=True)
class Choice:
    """The file of a student that counts, and its bytes; or the problem, with what there is to keep."""

    entry: Entry | None
    raw: bytes = b""
    problem: str = ""
    notes: tuple[str, ...] = ()


def choose(
    files: Sequence[tuple[str, Entry]], lab: Lab, inside: str = "", numbers: Sequence[int] | None = None
) -> Choice:
    """The one of a student's files (name as the student gave it, file) that is this lab's; `inside`: of which zip;
    numbers: Canvas' number of each, for which "NAME-1" is NAME handed in again, and the highest number counts.

    In this order: the lab's folder and name, its name, its name in other letters, a copy of it ("NAME (1)", "NAME-1",
    "NAME-Copy1", "Copy of NAME"), its name with .txt or .json after it, any notebook, a zip. Of equals the one in
    fewer folders, then the highest number of a copy, then the newest. Several notebooks of other names are opened, and
    the one that holds cells of the lab counts.
    """
    if len(files) > MAX_FILES:
        return Choice(None, problem=f"more than {MAX_FILES} files were handed in: hand in the notebook alone")
    numbers = [0] * len(files) if numbers is None else numbers
    kept = [n for n, (_, entry) in enumerate(files) if not entry.problem]
    readable = [files[n] for n in kept]
    ranks = [_rank(*files[n], lab, numbers[n]) for n in kept]
    ranked = sorted(((rank, n) for n, rank in enumerate(ranks)), reverse=True)
    ranked = [(rank, n) for rank, n in ranked if rank[0] > 0]
    if not ranked:
        return _none(files, lab, inside)
    best = [readable[n] for rank, n in ranked if rank[0] == ranked[0][0][0]]
    name, entry = best[0]
    if ranked[0][0][0] == ANY and len(best) > 1:
        ours = with_cells_of(best, lab)
        if len(ours) != 1 and (len({_uncopied(name) for name, _ in ours}) != 1 or not all(numbers)):
            names = file_names(name for name, _ in best)
            problem = f"several notebooks were handed in ({names}), none of them is named {lab.name}.ipynb"
            return Choice(None, problem=problem)
        name, entry = ours[0]
    notes = []
    if name != f"{lab.name}.ipynb":
        notes.append(f"the file is named {file_names([name])}: it was taken for {lab.name}.ipynb")
    left = [other for _, n in ranked if (other := readable[n][0]) and readable[n][1] is not entry]
    if left:
        notes.append(f"of several files {file_names([name])} was taken; left out: {file_names(left)}")
    try:
        raw = entry.read()
    except Refused as error:
        return Choice(entry, problem=str(error), notes=tuple(notes))
    if raw.startswith((b"PK\x03\x04", b"PK\x05\x06")):  # the second one: an empty zip
        return _from_zip(name, entry, raw, lab, inside, notes)
    return Choice(entry, raw, notes=tuple(notes))


def file_names(names: Iterable[str]) -> str:
    """A list of file names, short enough to be read however long the names are."""
    names = sorted(names)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(name if len(name) <= 60 else f"{name[:40]}...{name[-15:]}" for name in names[:5]) + more


def _from_zip(name: str, entry: Entry, raw: bytes, lab: Lab, inside: str, notes: list[str]) -> Choice:
    if inside:
        return Choice(entry, problem=f"{inside} holds a zip in a zip: hand in the notebook itself", notes=tuple(notes))
    try:
        found = choose([(file.name, file) for file in files_in_student_zip(raw)], lab, file_names([name]))
    except Refused as error:
        return Choice(entry, raw, str(error), tuple(notes))
    if not found.raw:  # it holds no notebook: the zip is kept
        return Choice(entry, raw, found.problem, tuple(notes))
    notes = [f"a zip was handed in ({file_names([name])}): the notebook in it was taken", *found.notes]
    entry = replace(entry, path=entry.path.with_suffix(".ipynb"))
    return Choice(entry, found.raw, found.problem, tuple(notes))


EXACT, SAME, LETTERS, COPY, SUFFIXED, ANY, ZIP = 7, 6, 5, 4, 3, 2, 1


def _rank(name: str, entry: Entry, lab: Lab, canvas: int) -> tuple[int, int, int, float]:
    """(how well the name fits, 0 for no notebook; minus its depth; number of the copy; time), the highest is best."""
    wanted = f"{lab.name}.ipynb"
    name = _uncopied(name) if canvas else name
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
    number = canvas or number
    return fit, -len(entry.path.parts), number, entry.changed.timestamp() if entry.changed else 0.0


def _uncopied(name: str) -> str:
    """The name of which Canvas calls a second file NAME-1."""
    return re.sub(r"-[0-9]{1,6}(?=\.[^.]*$)", "", name)


def _none(files: Sequence[tuple[str, Entry]], lab: Lab, inside: str) -> Choice:
    """The choice where a student has no notebook, with the reason; a single file is kept, whatever it is."""
    problems = [entry.problem for _, entry in files if entry.problem]
    names = file_names(name for name, _ in files) or "nothing"
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


def with_cells_of(files: Sequence[tuple[str, Entry]], lab: Lab) -> list[tuple[str, Entry]]:
    """The first files that hold cells of the lab; no more are opened than a single large one takes to read."""
    known = {cell.grade_id for cell in lab.cells}
    found, size = [], 0
    for name, entry in files[:MAX_OPENED]:
        try:
            raw = entry.read()
            size += len(raw)
            if size > MAX_BYTES:
                break
            cells = read_cells(raw, [])
        except Refused:
            continue
        if any(cell.grade_id in known or cell.cell_id in known for cell in cells):
            found.append((name, entry))
    return found


def attempts_of(files: Files) -> list[Files]:
    """The files of one person by attempt, the oldest first: one group where the download tells no attempts."""
    times = sorted({owner.attempt for owner, _ in files if owner.attempt})
    groups = [[one for one in files if one[0].attempt == time] for time in times]
    return groups or [files]


def what_counts(files: Files, download: Download, lab: Lab) -> Handed:
    """What one person handed in: the file that counts, read, or the reason why there is none."""
    attempt = attempts_of(files)[-1]
    newest = attempt[0][0].attempt
    numbers = [owner.number for owner, _ in attempt]
    found = choose([(owner.file, entry) for owner, entry in attempt], lab, numbers=numbers)
    entry = found.entry or attempt[0][1]
    owner = next((owner for owner, other in attempt if other.path == entry.path), attempt[0][0])
    shared = sum(1 for _, other in download.owned if other is entry)
    notes = [*owner.notes, *found.notes, *([f"handed in by a group of {shared}"] if shared > 1 else [])]
    changed, time_from = newest, f"{download.form}'s name for it{download.clock}"
    if owner.notes:
        time_from = "the files' own times"
    if newest is None:
        changed = entry.changed if download.times_are_real else None
        time_from = "the file's own time" if changed else ""
    return Handed(entry.path, found.raw, changed, found.problem, download.form, time_from, owner.late, tuple(notes),
                  owner.number, _newer(attempt, owner, lab))  # fmt: skip


def _newer(files: Files, chosen: Owner, lab: Lab) -> str:
    """A note where Canvas has a notebook of the lab that is newer than the one chosen by its name; else nothing."""
    later = [(owner, entry) for owner, entry in files if owner.number > chosen.number > 0]
    notebooks = [(owner.file, entry) for owner, entry in later if owner.file.casefold().endswith(".ipynb")]
    if newer := file_names(name for name, _ in with_cells_of(notebooks, lab)):
        return f"{newer} is newer, and holds cells of this lab; {file_names([chosen.file])} was chosen by its name"
    return ""
