"""Random zips of submissions: whatever is in them, everybody has one clean notebook or a recorded refusal."""

from __future__ import annotations

import io
import json
import stat
import tempfile
import warnings
import zipfile
from pathlib import Path

import nbformat
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grader.course import CourseError
from grader.submissions.collect import collect
from grader.submissions.submitted import take_in
from tests.examples import examples

PARTS = [
    "ada", "Ada", "ADA", "bob", "toy.ipynb", "Toy.IPYNB", "toy (1).ipynb", "toy-1.ipynb", "toy.py", "a.zip", "x.ipynb",
    "01_toy", "..", ".", "/", "C:", "con", "nul.ipynb", "é", "e\u0301", "\x1b[31m", "a\\b", "-rf", "~", "$(x)", "[*]",
    "l" * 200, "submission_metadata.yml", "__MACOSX", ".hidden",
]  # fmt: skip
DOWNLOADS = [
    [
        "lovelaceada_LATE_1_2_toy.ipynb", "lovelaceada_1_3_toy-1.ipynb", "anon_abcde_4_toy.ipynb", "x_5_text.html",
        "y_6_7_a.zip",
    ],
    [
        "Ada L_7_assignsubmission_file/toy.ipynb", "Ada L_8_assignsubmission_file_/x.ipynb",
        "Ada L_7_assignsubmission_file/a.zip",
    ],
    ["Ada L_9_assignsubmission_file_toy.ipynb", "Ada L_9_assignsubmission_file_toy (1).ipynb"],
    [
        "L_ada_attempt_2026-11-01-10-20-30_toy.ipynb", "L_ada_attempt_2026-11-02-10-20-30_x.ipynb",
        "L_b_attempt_2026-99-01-10-20-30_toy.ipynb",
    ],
    ["submission_1/toy.ipynb", "submission_2/toy.ipynb", "submission_metadata.yml"],
    [
        "ada+01_toy+2026-11-01 10:20:30.1 UTC+r/toy.ipynb", "ada+01_toy+2026-11-02 10:20:30.1 UTC+r/toy.py",
        "b+02_x+2026-11-02 10:20:30.1 UTC/toy.ipynb",
    ],
    ["ada/toy.ipynb", "ada/toy (1).ipynb", "Ada/x.ipynb", "ada/a.zip", "bob.ipynb", "c/toy.py"],
]  # fmt: skip
odd = st.lists(st.sampled_from(PARTS) | st.text(min_size=1, max_size=4), min_size=1, max_size=4).map("/".join)
files = [0, 0, 0, stat.S_IFREG | 0o644, stat.S_IFREG | 0o644]
modes = st.sampled_from([*files, stat.S_IFLNK | 0o777, stat.S_IFIFO, stat.S_IFDIR])
years = st.sampled_from([(1980, 0, 0, 0, 0, 0), (2026, 11, 1, 12, 0, 0), (2107, 15, 31, 31, 63, 62)])
METADATA = (
    b"submission_1:\n  :submitters:\n  - {':sid': ada}\n  - {':sid': '../x'}\n  :created_at: 2026-11-01 10:00:00 Z\n"
)


def contents(release_text: str) -> list[bytes]:
    notebook = json.loads(release_text)
    notebook["cells"].reverse()
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr("../toy.ipynb", release_text)
        archive.writestr("lab/toy (1).ipynb", json.dumps(notebook))
    good = release_text.encode()
    return [good, good, json.dumps(notebook).encode(), b"", b"{", inner.getvalue(), METADATA, bytes(3), good[:999]]


def zip_of(
    entries: list[tuple[str, int, int, tuple[int, ...]]], release_text: str, damage: list[tuple[float, int]]
) -> bytes:
    made = io.BytesIO()
    possible = contents(release_text)
    with warnings.catch_warnings(), zipfile.ZipFile(made, "w") as archive:
        warnings.simplefilter("ignore")
        for name, content, mode, time in entries:
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            archive.writestr(info, b"" if name.endswith("/") else possible[content])
            info.date_time = time  # type: ignore[assignment]
    raw = bytearray(made.getvalue())
    for place, value in damage:
        raw[int(place * len(raw))] = value
    return bytes(raw)


def entries_named(names: st.SearchStrategy[str]) -> st.SearchStrategy[list[tuple[str, int, int, tuple[int, ...]]]]:
    return st.lists(st.tuples(names, st.integers(0, 8), modes, years), max_size=8)


downloads = st.sampled_from(DOWNLOADS).flatmap(lambda known: entries_named(st.sampled_from(known)))
mixed = st.sampled_from(DOWNLOADS).flatmap(lambda known: entries_named(st.sampled_from(known) | odd))
damages = st.just([]) | st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=3)


@settings(deadline=None, max_examples=examples(120), suppress_health_check=[HealthCheck.too_slow])
@given(entries=downloads | mixed | entries_named(odd), damage=damages)
def test_any_zip_ends_as_clean_notebooks_and_recorded_refusals(
    release_text: str, entries: list[tuple[str, int, int, tuple[int, ...]]], damage: list[tuple[float, int]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "course"
        (root / "labs" / "01_toy").mkdir(parents=True)
        (root / "labs" / "01_toy" / "toy.ipynb").write_text(release_text)
        source = Path(folder) / "in.zip"
        source.write_bytes(zip_of(entries, release_text, damage))
        try:
            done = collect(root, "01_toy", source)
        except CourseError:
            return
        students = [one.student for one in done.received]
        assert len({student.casefold() for student in students}) == len(students) > 0
        for one in done.received:
            submitted = root / "submitted" / one.student / "01_toy"
            record = json.loads((submitted / "intake.json").read_text())
            assert record["refused"] == one.refused
            assert record["path"].isprintable()
            nbformat.validate(nbformat.read(submitted / "toy.ipynb", as_version=4))
            take_in(root, "01_toy", one.student)
        assert sorted(path.name for path in (root / "submitted").iterdir()) == sorted(students)
        assert {path.name for path in Path(folder).iterdir()} == {"course", "in.zip"}
        again = collect(root, "01_toy", source)
        assert {one.news for one in again.received} <= {"unchanged", "older"}
        assert [one.student for one in again.received] == students
