"""`make test` runs what a change can break: the record of what tests needed, and the choice that follows from it."""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from importlib import util
from pathlib import Path

import pytest

from tests.selection import record
from tests.selection.choice import Choice
from tests.selection.record import Line, Record
from tests.selection.sources import File, Tree, functions

ROOT = Path(__file__).resolve().parent.parent
ENGINE = '''"""An engine."""

LIMIT = 3


def ours(x=1):
    # a comment
    return x + LIMIT


class Part:
    size = 2

    def half(self):
        def inner():
            return 2

        return self.size // inner()
'''
TESTS = "from thing import engine\n\ndef test_it():\n    assert engine.ours() == 4\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    files = {"thing/engine.py": ENGINE, "tests/test_it.py": TESTS, "data/a.json": "1", "data/b.json": "2",
             "pyproject.toml": "[project]\nname = 'thing'\n", "constraints.txt": "pytest==8\n"}  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    return tmp_path


def tree(root: Path) -> Tree:
    return Tree(root, record.PATH)


def recorded(root: Path, *said: str, functions: tuple[int, ...] = (1,)) -> Record:
    """A record in which tests/test_it.py imported the engine, entered these functions of it, and did what is said."""
    now = tree(root)
    entered = (f"{number} thing/engine.py" for number in (0, *functions))
    needs = record.needed(now, {"tests tests/test_it.py", *said, *entered})
    line = Line("tests/test_it.py", 1.5, now.environment, {"abc12": 0.5}, frozenset(needs))
    Record({file.id: file for file in needs.values()}, {}, [line]).write(root / record.PATH)
    return Record.read(root / record.PATH)


def holds(root: Path, known: Record) -> bool:
    holding, why = known.judge(tree(root))
    assert holding.keys().isdisjoint(why)
    return bool(holding)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new), "utf-8")


def test_functions_are_known_by_their_bodies_and_the_rest_of_a_source_by_all_that_an_import_runs() -> None:
    source = File.of("thing/engine.py", ENGINE.encode())
    assert [name for name, _ in functions(ast.parse(ENGINE))] == ["ours", "Part.half"]

    def differs(old: str, new: str) -> tuple[bool, list[int]]:
        other = File.of("thing/engine.py", ENGINE.replace(old, new).encode())
        changed = [n for n, (a, b) in enumerate(zip(source.functions, other.functions, strict=True)) if a != b]
        return other.rest != source.rest, changed

    assert differs("x + LIMIT", "x - LIMIT") == (False, [0])
    assert differs("return 2", "return 3") == (False, [1])
    assert differs("# a comment", "# another") == (False, [])
    assert differs("An engine", "One") == (False, [])
    assert differs('An engine."""', 'One."""\nsaid = __doc__')[0]
    for old, new in (("LIMIT = 3", "LIMIT = 4"), ("x=1", "x=2"), ("size = 2", "size = 3")):
        assert differs(old, new) == (True, [])
    assert differs("def ours", "@thing\ndef ours") == (True, [])


@pytest.mark.parametrize(
    ("old", "new", "still_holds"),
    [
        ("x + LIMIT", "x - LIMIT", False),  # in the function that was entered
        ("return 2", "return 3", True),  # in another
        ("LIMIT = 3", "LIMIT = 4", False),
        ("x=1", "x=2", False),
        ("size = 2", "size = 4", False),
        ("# a comment", "# another", True),
    ],
)
def test_a_test_runs_again_when_a_function_that_it_entered_or_anything_outside_of_functions_changes(
    root: Path, old: str, new: str, still_holds: bool
) -> None:
    known = recorded(root)
    assert holds(root, known)
    edit(root / "thing" / "engine.py", old, new)
    assert holds(root, known) is still_holds
    edit(root / "thing" / "engine.py", new, old)
    assert holds(root, known)


def test_a_docstring_counts_where_something_may_read_it() -> None:
    def rest(text: str) -> str:
        return File.of("a.py", text.encode()).rest

    for source in ('"""Doc."""\n', 'class A:\n    """Doc."""\n'):
        assert rest(source) == rest(source.replace("Doc", "Other"))
        assert rest(f"{source}x = __doc__") != rest(f"{source}x = __doc__".replace("Doc", "Other"))
    plain = 'def f():\n    """Doc."""\n    return 1\n'
    counts = (f"{plain}x = f.__doc__", f"import typer\n@app.command()\n{plain}")
    for source in (plain, f"@cache\n{plain}", *counts):
        old, new = (File.of("a.py", text.encode()) for text in (source, source.replace("Doc", "Other")))
        assert ((old.rest, old.functions) == (new.rest, new.functions)) is (source not in counts)
    model = 'class A(Model):\n    """Doc."""\n'
    assert rest(model) == rest(model.replace("Doc", "Other"))
    model = f"import pydantic\n{model}"  # which makes it a description
    assert rest(model) != rest(model.replace("Doc", "Other"))


def test_a_listing_of_the_root_is_not_one_of_every_file(root: Path) -> None:
    known, every = recorded(root, "lists ."), recorded(root, "lists ")
    (root / "data" / "c.json").write_text("3", "utf-8")
    assert holds(root, known)
    assert not holds(root, every)
    (root / "new.txt").write_text("3", "utf-8")
    assert not holds(root, known)


def test_a_source_read_as_text_counts_with_its_comments(root: Path) -> None:
    known = recorded(root, "reads thing/engine.py")
    edit(root / "thing" / "engine.py", "# a comment", "# another")
    assert not holds(root, known)


def test_data_a_folders_names_and_the_tests_own_file_count(root: Path) -> None:
    known = recorded(root, "reads data/a.json", "lists data", "lists nowhere", "reads .venv/bin/python")
    assert holds(root, known)
    (root / "data" / "b.json").write_text("3", "utf-8")
    assert holds(root, known), "it was listed, and not read"
    (root / "data" / "c.json").write_text("3", "utf-8")
    assert not holds(root, known), "a new file in a folder that was listed"
    (root / "data" / "c.json").unlink()
    for path, other in ((root / "data" / "a.json", "4"), (root / "tests" / "test_it.py", TESTS.replace("4", "5"))):
        before = path.read_text("utf-8")
        path.write_text(other, "utf-8")
        assert not holds(root, known)
        path.write_text(before, "utf-8")
    (root / "data" / "a.json").unlink()
    assert not holds(root, known)


def test_of_data_in_datasets_the_whole_folder_counts_since_libraries_in_rust_read_it_unseen(root: Path) -> None:
    (root / "datasets" / "model").mkdir(parents=True)
    for name in ("config.json", "weights.bin"):
        (root / "datasets" / "model" / name).write_text("1", "utf-8")
    known = recorded(root, "reads datasets/model/config.json")
    (root / "datasets" / "model" / "weights.bin").write_text("2", "utf-8")
    assert not holds(root, known)


def test_what_is_left_out_since_no_outcome_depends_on_it_is_still_there() -> None:
    """The grader's hash of its own source would make every change one of all graded classes and labs."""
    assert "\ndef versions() " in (ROOT / "grader" / "examination" / "worker.py").read_text("utf-8")
    assert util.find_spec("hypothesis.internal.constants_ast")


@pytest.mark.parametrize("name", ["constraints.txt", "Makefile", "tests/conftest.py"])
def test_pins_build_files_and_a_new_conftest_are_needed_by_all(root: Path, name: str) -> None:
    known = recorded(root)
    (root / name).write_text("pytest==9\n", "utf-8")
    assert not holds(root, known)


def test_of_the_projects_settings_only_what_tests_depend_on_counts(root: Path) -> None:
    known = recorded(root)
    with (root / "pyproject.toml").open("a", encoding="utf-8") as settings:
        settings.write("[tool.importlinter]\nroot = 1\n")
    assert holds(root, known)
    edit(root / "pyproject.toml", "'thing'", "'other'")
    assert not holds(root, known)


def test_a_moved_file_keeps_its_records(root: Path) -> None:
    known = recorded(root)
    (root / "thing" / "engine.py").rename(root / "thing" / "motor.py")
    assert holds(root, known)
    (root / "tests" / "test_it.py").rename(root / "tests" / "test_that.py")
    holding, _ = known.judge(tree(root))
    assert list(holding) == ["tests/test_that.py"]
    edit(root / "thing" / "motor.py", "x + LIMIT", "x - LIMIT")
    assert not holds(root, known)


def test_a_merge_keeps_the_lines_of_both_sides_and_what_is_damaged_only_loses_its_own_line(root: Path) -> None:
    ours = recorded(root)
    before = (root / "thing" / "engine.py").read_text("utf-8")
    edit(root / "thing" / "engine.py", "x + LIMIT", "LIMIT + x")
    theirs = recorded(root)
    theirs.lines.append(replace(theirs.lines[0], unit="tests/test_new.py"))
    for one, name in ((ours, "ours"), (theirs, "theirs")):
        one.write(root / name)
    merged = sorted({*(root / "ours").read_text().splitlines(), *(root / "theirs").read_text().splitlines()})
    text = "\n".join(["<<<<<<< ours", *merged, "=======", "t\ttests/test_half.py\t1.0", ">>>>>>> theirs"])
    (root / record.PATH).write_text(text, "utf-8")
    assert holds(root, Record.read(root / record.PATH)), "theirs is the tree's"
    (root / "thing" / "engine.py").write_text(before, "utf-8")
    assert holds(root, Record.read(root / record.PATH)), "now ours is"
    for lost in (line for line in merged if line.startswith(("f\t", "g\t"))):
        (root / record.PATH).write_text(text.replace(lost, lost[:9]), "utf-8")
        known = Record.read(root / record.PATH)
        holding, _ = known.judge(tree(root))
        assert "tests/test_new.py" not in holding, "what a part is missing of never holds"


def test_what_is_written_is_read_again_and_in_a_stable_order(root: Path) -> None:
    known = recorded(root, "reads data/a.json", "lists data", functions=(1, 2))
    known.lines.append(replace(known.lines[0], unit="tests/test_z.py::test_of_a[b c]", costly={}))
    known.write(root / record.PATH)
    first = (root / record.PATH).read_text("utf-8")
    again = Record.read(root / record.PATH)
    assert {line.unit: line for line in again.lines} == {line.unit: line for line in known.lines}
    again.lines.reverse()
    again.write(root / record.PATH)
    assert (root / record.PATH).read_text("utf-8") == first


def test_a_test_that_reads_most_of_the_tree_needs_all_of_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MANY", 2)
    known = recorded(root, "reads data/a.json")
    assert holds(root, known)
    (root / "data" / "b.json").write_text("3", "utf-8")
    assert not holds(root, known)


def test_a_module_may_have_any_number_of_functions(root: Path) -> None:
    many = "\n".join(f"def f{number}():\n    return {number}" for number in range(300))
    (root / "thing" / "engine.py").write_text(many, "utf-8")
    known = recorded(root, functions=(1, 300))
    edit(root / "thing" / "engine.py", "return 298\n", "return 0\n")
    assert holds(root, known)
    edit(root / "thing" / "engine.py", "return 299", "return 0")
    assert not holds(root, known)


# ---------------------------------------------------------------- the commands, in a small project

PROGRAM = """import pathlib, subprocess, sys, threading, time

SECONDS = 0.2

def read():
    return pathlib.Path(__file__).with_name("said.txt").read_text()

def work(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return 1

def in_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(threaded()))
    thread.start()
    thread.join()
    return found[0]

def threaded():
    return 2

def in_a_process():
    code = "import sys; sys.path.insert(0, sys.argv[1]); from thing.program import killed; killed()"
    return subprocess.run([sys.executable, "-P", "-c", code, str(pathlib.Path(__file__).parents[1])], env={}).returncode

def killed():
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
"""
PROJECT_TESTS = {
    "quick": "def test_quick():\n    from thing.program import read\n    assert read() == 'hello'\n",
    "long": "from grader.examination.worker import versions\nfrom thing.program import SECONDS, work\n\n"
    "def test_long():\n    assert work(SECONDS) == 1\n    assert versions()\n",
    "thread": "from tests.test_quick import test_quick as other\nfrom thing.program import in_a_thread, work\n\n"
    "def test_thread():\n    work(0.2)\n"
    "    assert in_a_thread() == 2\n",
    "process": "from thing.program import in_a_process, work\n\ndef test_process():\n    work(0.2)\n"
    "    assert in_a_process() == -9\n",
}


CONFTEST = """import sys, pathlib

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

def pytest_configure(config):
    from tests.selection import plugin
    plugin.register(config)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with four files of tests, recorded."""
    root = tmp_path_factory.mktemp("project")
    files = {f"tests/test_{name}.py": text for name, text in PROJECT_TESTS.items()}
    files |= {
        "thing/program.py": PROGRAM,
        "grader/examination/worker.py": "from pathlib import Path\n\ndef versions():\n"
        "    return Path(__file__).parents[2].joinpath('thing/program.py').read_text()\n",
        "thing/said.txt": "hello",
        ".gitignore": ".venv\n__pycache__\n",
        "constraints.txt": "",
        "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '--import-mode=importlib'\n",
        "tests/conftest.py": CONFTEST,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, "utf-8")
    shutil.copytree(ROOT / "tests" / "selection", root / "tests" / "selection")
    for name in ("warm.py", "neutral.py"):
        shutil.copy(ROOT / "tests" / name, root / "tests" / name)
    (root / ".venv").mkdir()
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run(["git", *words], cwd=root, check=True)
    assert "4 of 4 tests ran" in run(root, "test", INFERLAB_RECORD="1")
    return root


def command(root: Path, kind: str, **variables: str) -> tuple[list[str], dict[str, str]]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("INFERLAB_")} | variables
    environment["INFERLAB_TRACE"] = ""  # this run may be recorded, which is another project's matter
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # to load what others plug in takes longer than all else here
    code = "import sys; sys.path.insert(0, sys.argv[1]); from tests.selection import run; run.IMPORTED = ('pytest',); "
    code += "run.PROGRAMS = (); "
    return [sys.executable, "-P", "-c", code + "sys.exit(run.main(sys.argv[2:]))", str(root), kind], environment


def run(root: Path, kind: str, fails: bool = False, **variables: str) -> str:
    words, environment = command(root, kind, **variables)
    done = subprocess.run(words, env=environment, cwd=root, capture_output=True, text=True, timeout=600)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout


def ran(said: str) -> int:
    found = re.search(r"^(\d+) of \d+ tests ran", said, re.MULTILINE)
    assert found, said
    return int(found[1])


@pytest.mark.git
def test_a_run_takes_short_tests_and_what_a_change_touches_in_threads_and_killed_processes_too(project: Path) -> None:
    known = Record.read(project / record.PATH)
    entered = {
        line.unit: {bit for name, mask in (need.split(":") for need in line.needs if ":" in need)
                    if known.files[name].path == "thing/program.py"
                    for bit in range(9) if int(mask, 16) >> bit & 1}
        for line in known.lines
    }  # fmt: skip
    assert entered == {
        "tests/test_quick.py": {0}, "tests/test_long.py": {1}, "tests/test_thread.py": {1, 2, 3},
        "tests/test_process.py": {1, 4, 5},
    }  # fmt: skip
    paths = {line.unit: known.paths(line) for line in known.lines}
    assert "tests/test_quick.py" in paths["tests/test_thread.py"], "it imports that, which pytest compiles itself"
    text_of_a_source = {line.unit for line in known.lines if any(need.endswith(":-1") for need in line.needs)}
    assert "tests/test_long.py" not in text_of_a_source, "what `versions` reads changes no outcome"
    program, said = project / "thing" / "program.py", project / "thing" / "said.txt"
    faults = (("return 2", "return 3", program), ("hello", "hallo", said), ("SIGKILL", "SIGTERM", program))
    for old, new, changed in faults:  # each in what one test alone needs
        edit(changed, old, new)
    subprocess.run(["git", "mv", "tests/test_long.py", "tests/test_longer.py"], cwd=project, check=True)
    text = run(project, "test", fails=True)
    failed = sorted(f"tests/test_{name}.py::test_{name}" for name in ("quick", "thread", "process"))
    assert sorted(re.findall("^  (tests/.*)$", text, re.MULTILINE)) == failed
    assert ran(text) in (3, 4), "a renamed file keeps its record, and may have its turn"
    subprocess.run(["git", "mv", "tests/test_longer.py", "tests/test_long.py"], cwd=project, check=True)
    for old, new, changed in faults:
        edit(changed, new, old)
    edit(program, "SECONDS = 0.2", "SECONDS = 'much'")  # outside of functions: of all that import it
    text = run(project, "test", fails=True)
    edit(program, "SECONDS = 'much'", "SECONDS = 0.2")
    assert "FAILED\n  tests/test_long.py::test_long" in text
    assert ran(text) == 4
    assert left(project) == {"tests/test_quick.py": 0, "tests/test_long.py": 1, "tests/test_thread.py": 1,
                             "tests/test_process.py": 1}  # fmt: skip
    (project / record.PATH).rename(project / "kept")
    assert set(left(project).values()) == {0}, "without a record all run"
    (project / "kept").rename(project / record.PATH)


def left(root: Path) -> dict[str, int]:
    """How many tests of each file a run would leave out without any turn."""
    choice = Choice(root)
    return {name: len(tests) for job in choice.jobs(choice.stale) for name, tests in job.leave.items()}


@pytest.mark.git
def test_a_run_of_everything_goes_on_where_it_was_killed(project: Path) -> None:
    words, environment = command(project, "all")
    waits = project / "tests" / "test_waits.py"
    waits.write_text("import time\n\ndef test_waits():\n    time.sleep(1000)\n", "utf-8")
    process = subprocess.Popen(words, env=environment, cwd=project, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(4):  # the others
        assert "passed" in process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=600)
    waits.write_text("def test_waits():\n    pass\n", "utf-8")
    said = run(project, "all")
    assert "4 of 5 jobs were finished by a run that was killed" in said
    assert ran(said) == 1
    assert {line.unit for line in Record.read(project / record.PATH).lines} >= {
        "tests/test_waits.py",
        "tests/test_long.py",
    }
    waits.unlink()
    choice = Choice(project)
    assert "tests/test_waits.py" not in choice.units | choice.why.keys()
