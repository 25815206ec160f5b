"""One batch of hostile and honest submissions, graded as an instructor does it, and what was there before and after.

`hostile/`, `greedy/` and `honest/` hold one submission a file: comments that say what is expected, then cells.
`# %% NAME` replaces solution cell NAME of the toy lab, `# %% first` and `# %% last` add a cell; all other cells are as
in the reference, or as released with `# base: stub`. In the text @PORT@, @COURSE@, @HOME@, @MARK@ and @CHECKOUT@ stand
for what differs from run to run, @DEEP@ and @GIANT@ for a long row of attributes and of digits.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

HERE = Path(__file__).parent
SOURCES = HERE.parent / "grader" / "toy_lab" / "solutions"
SLUG, POINTS = "01_toy", {"check_window": 2.0, "check_len": 1.0, "check_calls": 3.0}
# Of all that comes to an end by itself, hostile or honest: no clock decides about it, however busy the machine is.
LIMITS = {"call": 120.0, "check": 600.0, "total": 1200.0, "rest": 1200.0, "memory": 1 << 30}
# Of those that never end: they are given little, so that they cost little. What is honest in them takes milliseconds
# of the processor time that a call has, and no wall-clock time counts for a whole check.
HANGING_LIMITS = {**LIMITS, "call": 2.0}
# Of those that fill memory: it ends them, not the clock. A virtual machine can take minutes to give out what it has not
# had before.
GREEDY_LIMITS = {**LIMITS, "learner_memory": 256 << 20}


@dataclass(frozen=True)
class Case:
    """One submission. expect: status per check that is not passed; says: texts in its result."""

    name: str
    attack: str
    base: str
    cells: dict[str, str]
    expect: dict[str, str]
    says: list[str] = field(default_factory=list)
    fills_memory: bool = False

    points = POINTS

    @property
    def limits(self) -> dict[str, float]:
        if self.fills_memory:
            return GREEDY_LIMITS
        return HANGING_LIMITS if "timed out" in self.expect.values() else LIMITS

    @property
    def earned(self) -> float:
        return sum(points for check, points in POINTS.items() if check not in self.expect)


def read_case(path: Path) -> Case:
    head, *parts = re.split(r"^# %% (\w+)\n", path.read_text("utf-8"), flags=re.MULTILINE)
    said = re.findall(r"^# (\w+): (.*)$", head, re.MULTILINE)
    cells: dict[str, str] = {}
    for name, source in zip(parts[::2], parts[1::2], strict=True):
        cells[name] = source.strip("\n")
    known = dict(said)
    wanted = [words.rsplit(" = ", 1) for words in re.split(r",\s*", known.get("expect", "passed")) if words != "passed"]
    says = [text for key, text in said if key == "says"]
    expect = dict(wanted)
    if set(expect) == {"all"}:
        expect = dict.fromkeys(POINTS, expect["all"])
    return Case(path.stem, known["attack" if "attack" in known else "honest"], known.get("base", "solved"), cells,
                expect, says, path.parent.name == "greedy")  # fmt: skip


def cases(folder: str) -> list[Case]:
    return [read_case(path) for path in sorted((HERE / folder).glob("*.*py"))]


def notebook_of(case: Case, solution: str, release: str) -> dict[str, Any]:
    """The notebook that is handed in."""
    notebook: dict[str, Any] = json.loads(release)
    solved = {cell["id"]: cell["source"] for cell in json.loads(solution)["cells"]}
    for cell in notebook["cells"]:
        if cell["metadata"]["nbgrader"]["solution"]:
            text = solved[cell["id"]] if case.base == "solved" else cell["source"]
            cell["source"] = case.cells.get(cell["id"], "".join(text))
    for name, place in (("first", 0), ("last", len(notebook["cells"]))):
        if name in case.cells:
            notebook["cells"].insert(place, code_cell(case.cells[name]))
    return notebook


def code_cell(source: str, **metadata: Any) -> dict[str, Any]:
    return {"cell_type": "code", "metadata": metadata, "source": source, "outputs": [], "execution_count": None,
            "id": secrets.token_hex(4)}  # fmt: skip


def inferlab(*arguments: str, ok: bool = True) -> str:
    from grader.commands.grade_cli import app

    done = CliRunner().invoke(app, list(arguments))
    assert (done.exit_code == 0) == ok, done.output + str(done.exception)
    return done.output


@dataclass
class Class:
    """A course folder with its submissions, and what happened to them."""

    root: Path
    machine: Machine
    said: str = ""
    said_by_collect: str = ""
    before: dict[str, str] = field(default_factory=dict)
    children_before: set[int] = field(default_factory=set)

    def student(self, name: str) -> str:
        """The id of the one who handed in `name`."""
        found = [path.name for path in (self.root / "submitted").iterdir() if path.name.partition("-")[2] == name]
        assert len(found) == 1, f"no submission {name}"
        return found[0]

    def result(self, student: str) -> dict[str, Any]:
        return dict(json.loads((self.root / "results" / SLUG / f"{student}.json").read_text("utf-8")))

    def statuses(self, student: str) -> dict[str, str]:
        return {check["grade_id"]: check["status"] for check in self.result(student)["checks"]}

    def page(self, student: str) -> str:
        return next((self.root / "feedback" / student / SLUG).glob("*.html")).read_text("utf-8")

    def recorded(self) -> dict[str, tuple[float, int]]:
        """Student -> points of the checks in the gradebook, and how many of them nobody has given yet."""
        question = """
            select s.student_id, sum(coalesce(g.auto_score, 0)), sum(g.auto_score is null)
            from grade g join grade_cells c on g.cell_id = c.id join base_cell b on b.id = c.id
            join submitted_notebook n on n.id = g.notebook_id join submitted_assignment s on s.id = n.assignment_id
            where c.cell_type = 'code' group by s.student_id
        """
        with contextlib.closing(sqlite3.connect(f"file:{self.root}/gradebook.db?mode=ro", uri=True)) as book:
            return {student: (earned, missing) for student, earned, missing in book.execute(question)}

    def files(self) -> dict[str, str]:
        """What nobody but the instructor may write: digests of all that a run has no business with."""
        tops = ("solutions", "labs", "received", "course_secret.json", "canary.txt", "nbgrader_config.py")
        paths = [path for top in tops for path in [self.root / top, *sorted((self.root / top).rglob("*"))]]
        paths += sorted(self.machine.home.rglob("*"))
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()}


@dataclass
class Machine:
    """What surrounds the courses: canaries that nobody may read or change, listeners that nobody may reach."""

    folder: Path
    token: str
    mark: str
    port: int = 0
    visitors: list[str] = field(default_factory=list)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def temporary(self) -> Path:
        return self.folder / "temporary"


def own_children() -> set[int]:
    """The processes that this one has started."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rsplit(")", 1)[1].split()[1]) == os.getpid():
                found.add(int(path.parent.name))
    return found


@pytest.fixture(scope="session", autouse=True)
def _examiners_start_warm(examiners_start_warm: Callable[[], str]) -> None:
    examiners_start_warm()  # before `machine`, whose folder for temporary files holds what is left behind


# As long as a module: what it does to the environment must not reach the tests of others.
@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """This machine with canaries in places that code might look at."""
    from grader.examination import verdict

    made = Machine(
        tmp_path_factory.mktemp("attacks"), f"CANARY-{secrets.token_hex(8)}", f"attack-{secrets.token_hex(4)}"
    )
    (made.home / ".config").mkdir(parents=True)
    made.temporary.mkdir()
    outside = [Path("/dev/shm", f"{made.mark}.txt"), Path("/tmp", f"{made.mark}.txt")]
    spots = [made.home / "canary.txt", made.temporary / "canary.txt", *outside]
    for path in spots:
        path.write_text(made.token)
        path.chmod(0o666)  # only the wall keeps it from being read
    with pytest.MonkeyPatch.context() as patch, listeners(made):
        patch.setenv("HOME", str(made.home))
        patch.setenv("TMPDIR", str(made.temporary))
        patch.setenv("SECRET_OF_THE_INSTRUCTOR", made.token)
        patch.setattr("tempfile.tempdir", str(made.temporary))
        verdict._folders.cache_clear()  # which home and temporary folder there are is asked once per process
        yield made
    verdict._folders.cache_clear()
    assert [path.read_text() for path in spots] == [made.token] * len(spots)
    for path in outside:
        path.unlink()


@pytest.fixture(scope="module")
def place(machine: Machine) -> Callable[[str], Class]:
    """place(name): a new course with the toy lab."""

    def make(name: str) -> Class:
        made = Class(machine.folder / name, machine)
        inferlab("new-course", str(made.root))
        inferlab("release", "01", "--course", str(made.root), "--sources", str(SOURCES))
        (made.root / "canary.txt").write_text(machine.token)
        return made

    return make


def bound_alike() -> tuple[socket.socket, socket.socket]:
    """TCP and UDP at the same port. The system gives out those of each without a look at the other's."""
    while True:
        tcp, udp = socket.socket(), socket.socket(type=socket.SOCK_DGRAM)
        tcp.bind(("127.0.0.1", 0))
        with contextlib.suppress(OSError):
            udp.bind(tcp.getsockname())
            return tcp, udp
        tcp.close()
        udp.close()


@contextlib.contextmanager
def listeners(made: Machine) -> Iterator[None]:
    """TCP, UDP and an abstract socket of this machine; who comes by is written down."""
    (tcp, udp), local = bound_alike(), socket.socket(socket.AF_UNIX)
    local.bind("\0" + made.mark)
    for one in (tcp, local):
        one.listen()

    def wait(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                made.visitors.append(str(sock.recv(10) if sock is udp else sock.accept()))

    for one in (tcp, udp, local):
        threading.Thread(target=wait, args=(one,), daemon=True).start()
    made.port = tcp.getsockname()[1]
    yield
    for one in (tcp, udp, local):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()


def texts_of(made: Class) -> tuple[str, str]:
    """Solution and release of the toy lab, as files hold them."""
    solution, release = ((made.root / top / SLUG / "toy.ipynb").read_text("utf-8") for top in ("solutions", "labs"))
    return solution, release


@pytest.fixture(scope="session")
def command() -> Callable[..., str]:
    """command("collect", ...): a command of `inferlab grade`; returns what it printed."""
    return inferlab


@pytest.fixture(scope="session")
def solved() -> Callable[[Class], dict[str, Any]]:
    """The released notebook with the reference in it."""
    return lambda made: notebook_of(Case("", "", "solved", {}, {}), *texts_of(made))


@pytest.fixture(scope="session")
def grade(bwrap: None) -> Callable[..., None]:
    """Collect, run and feedback, by the commands; some students have limits of their own."""
    from grader.courses import batch

    def do(
        made: Class,
        handed: Path,
        limits_of: Callable[[str], dict[str, float] | None] = lambda student: None,
        workers: int = 1,
    ) -> None:
        made.said_by_collect = inferlab("collect", "01", str(handed), "--course", str(made.root))
        made.before, made.children_before = made.files(), own_children()
        examine = batch.grade_submission
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                batch, "grade_submission", lambda job: examine(replace(job, limits=limits_of(job.student) or LIMITS))
            )
            made.said = inferlab("run", "01", "--course", str(made.root), "--workers", str(workers))
        inferlab("feedback", "01", "--course", str(made.root))

    return do


@pytest.fixture(scope="module")
def batch_of_code(place: Any, grade: Any, tmp_path_factory: pytest.TempPathFactory) -> Class:
    """All of `hostile/`, `greedy/` and `honest/`, mixed: honest ones first, last and between the others.

    After a greedy one comes an honest one with as little memory.
    """
    handed, made = tmp_path_factory.mktemp("code"), place("course")
    hostile, honest = [*cases("hostile"), *cases("greedy"), modest()], cases("honest")
    step = len(hostile) // (len(honest) - 1) + 1
    order: list[Case] = []
    for number, case in enumerate(honest):
        order += [case, *hostile[number * step : (number + 1) * step]]
    hand_in(made, order, handed)
    by_name = {case.name: case for case in order}
    # Two at a time: some look for another submission.
    grade(made, handed, limits_of=lambda student: by_name[student.partition("-")[2]].limits, workers=2)
    return made


def modest() -> Case:
    """An honest submission that has no more memory than the greedy ones."""
    return replace(read_case(HERE / "honest" / "uses_numpy.py"), name="uses_little_memory", fills_memory=True)


def hand_in(made: Class, order: list[Case], handed: Path) -> None:
    """Write the notebooks of these submissions, with the values of this run in them."""
    solution, release = texts_of(made)
    values = {"PORT": made.machine.port, "COURSE": made.root, "HOME": made.machine.home, "MARK": made.machine.mark}
    values |= {"CHECKOUT": HERE.parents[1], "DEEP": ".".join(["a"] * 600), "GIANT": "f" * 20_000}
    for number, case in enumerate(order):
        text = json.dumps(notebook_of(case, solution, release))
        for word, value in values.items():
            text = text.replace(f"@{word}@", str(value))
        (handed / f"s{number:03d}-{case.name}.ipynb").write_text(text, "utf-8")


@pytest.fixture(scope="session")
def attack_case() -> Callable[[str], Case]:
    folders = [case for folder in ("hostile", "greedy", "honest") for case in cases(folder)]
    return {case.name: case for case in [*folders, modest()]}.__getitem__
