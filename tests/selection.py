"""Which tests a narrow run takes, and the run itself. The Makefile calls it:

    python -P tests/selection.py quick        what changed since the last green commit: `make test-quick`
    python -P tests/selection.py lab 05       `make test LAB=05`
    python -P tests/selection.py chapter 03   `make test CHAPTER=03`
    python -P tests/selection.py begin        before a whole run: is the tree clean, what is as it was when recorded?
    python -P tests/selection.py green        after a whole run that passed: remember the commit, if it still is

The commit is remembered as a reference of git's (`refs/inferlab/green`): all worktrees of a clone share it.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tests import unchanged  # noqa: E402
from tests.closure import closure, steps  # noqa: E402
from tests.narrow import PLAN, QUICK, RECORD, names_of, recorded  # noqa: E402

PLUGINS = ROOT / "tests" / "quick"
GREEN = "refs/inferlab/green"
CLEAN = ".venv/.clean"  # the commit of a whole run that began in a clean tree
# Of a quick run: seconds until the end, and of them for tests by what is recorded (two cores share them).
SECONDS, TEST_SECONDS, CORES = 86.0, 50.0, 2
UNKNOWN = 1.0  # seconds for a test that never ran here
IMPORT = 0.5  # seconds for a file, whatever it holds
SENTINELS = ("tests/test_import.py", "tests/test_markers.py", "tests/test_packaging.py")
# Of these nearly every test depends on nearly everything: a quick run says so, and tries the sentinels.
WIDE = ("pyproject.toml", "constraints.txt", "Makefile", ".ci/run", ".ci/install.py", ".ci/installing.py")
_FOLDER = re.compile(r"^(?:solutions|labs|chapters|tests/labs)/(\d\d_\w+)/")


class SelectionError(Exception):
    """Said to the user without a traceback."""


@dataclass
class Taken:
    """Tests of one file. near: imports between it and what changed; away: that is in another room. folders: labs and
    chapters, if only these; strict: nothing that names none of them. parts: `02_kv_cache-a_mechanism`, the notebooks
    that changed."""

    near: int = 0
    away: bool = True
    folders: set[str] | None = None
    strict: bool = False
    parts: set[str] = field(default_factory=set)


# ---------------------------------------------------------------- what changed


def git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        raise SelectionError("git is not installed; without it nobody knows what changed: make test") from None
    if done.returncode:
        raise SelectionError(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


def commit_of(root: Path, name: str) -> str | None:
    try:
        return git(root, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    except SelectionError:
        return None


def base(root: Path) -> tuple[str, str]:
    """The commit to compare with, and why this one."""
    git(root, "rev-parse", "--git-dir")  # is git there, and a repository?
    if green := commit_of(root, GREEN):
        return green, f"since {green[:10]}, the last commit that passed `make test` here"
    no_green = "`make test` has not passed here on a clean tree yet; compared"
    if commit_of(root, "origin/main") and (common := git(root, "merge-base", "HEAD", "origin/main")):
        return common, f"{no_green} with {common[:10]}, where this branch left origin/main"
    if head := commit_of(root, "HEAD"):
        return head, f"{no_green} with {head[:10]}, HEAD: only what is not committed"
    raise SelectionError("there is no commit yet to compare with: make test")


def changed_files(root: Path, since: str) -> set[str]:
    """In commits since, in the working tree, and new; under their new and their old names."""
    listed = git(root, "diff", "--name-only", "--no-renames", "-z", since).split("\0")
    new = git(root, "ls-files", "--others", "--exclude-standard", "-z").split("\0")
    return {name for name in (*listed, *new) if name}


def is_clean(root: Path) -> bool:
    return not git(root, "status", "--porcelain")


def begin(root: Path) -> None:
    mark = root / CLEAN
    mark.unlink(missing_ok=True)
    if is_clean(root) and (head := commit_of(root, "HEAD")):
        mark.parent.mkdir(exist_ok=True)
        mark.write_text(head)


def green(root: Path) -> str:
    """Remember the commit, if the tree is clean and was when the run began; says what it did."""
    mark = root / CLEAN
    began = mark.read_text() if mark.is_file() else None
    mark.unlink(missing_ok=True)
    if began is None or not is_clean(root) or commit_of(root, "HEAD") != began:
        return "not recorded as green: there were changes that are not committed"
    git(root, "update-ref", GREEN, began)
    return f"recorded as green: {began[:10]}"


# ---------------------------------------------------------------- which files of tests


def test_files(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.glob("tests/**/test_*.py"))


def content_folders(root: Path) -> list[str]:
    """`02_kv_cache` and its like: what parameters of tests are called after."""
    found = (path.name for top in ("solutions", "labs", "chapters") for path in root.glob(f"{top}/[0-9][0-9]_*"))
    return sorted(set(found))


def wide_files(root: Path) -> set[str]:
    """What conftest.py of all tests needs at once, and what installs and starts them."""
    conftest = root / "tests" / "conftest.py"
    needs = closure([conftest], root) if conftest.is_file() else ()
    own = {path.relative_to(root).as_posix() for path in needs}
    return {*WIDE, *(name for name in own if name.startswith("tests/"))}


def near_changes(root: Path, changed: Iterable[str]) -> dict[str, Taken]:
    """The test files that need something that changed."""
    wide = wide_files(root)
    narrow = set(changed) - wide
    found: dict[str, Taken] = {}
    for test in test_files(root):
        distances = {path.relative_to(root).as_posix(): far for path, far in steps(root / test, root).items()}
        met = narrow & distances.keys()
        if not met:
            continue
        folders = {folder[1] if (folder := _FOLDER.match(name)) else None for name in met}
        room = test.split("/")[1]
        taken = Taken(min(distances[name] for name in met), all(room not in rooms(name) for name in met))
        if None not in folders:
            taken.folders = {folder for folder in folders if folder}
            taken.parts = {
                f"{Path(name).parent.name}-{Path(name).stem}" for name in met if name.startswith("chapters/")
            }
        found[test] = taken
    if set(changed) & wide:
        for sentinel in SENTINELS:
            if (root / sentinel).is_file():
                found.setdefault(sentinel, Taken(1))
    return dict(sorted(found.items(), key=lambda entry: (entry[1].away, entry[1].near, entry[0])))


def rooms(name: str) -> list[str]:
    """What a folder under tests/ for this file would be called: `sampling`, `grader`, `chapters`, `labs`."""
    parts = name.split("/")[:-1]
    return [*parts, "labs"] if parts[:1] == ["solutions"] else parts


def one(root: Path, kind: str, number: str) -> dict[str, Taken]:
    """All about a lab or a chapter: tests that have its name as a parameter, or in their text; its claims; widgets."""
    top = {"lab": "solutions", "chapter": "chapters"}[kind]
    every = {path.name[:2]: path.name for path in sorted(root.glob(f"{top}/[0-9][0-9]_*"))}
    folder = every.get(number.zfill(2))
    if folder is None:
        raise SelectionError(f"there is no {kind} {number!r}; there are: {', '.join(every)}")
    own = {root / name for name in _own_files(root, kind, folder)}
    used = _widgets(root.glob(f"chapters/{folder}/*.py")) if kind == "chapter" else set()
    found: dict[str, Taken] = {}
    for test in test_files(root):
        text = (root / test).read_text("utf-8")
        claims = re.fullmatch(rf"tests/claims/test_(ch|chapter_|register_){folder[:2]}\w*\.py", test)
        widgets = test.startswith("tests/chapters/test_widget") and _widgets([root / test]) & used
        # What tests the grader has labs as its examples: of it, only what has this one as a parameter.
        names_it = folder in text and test.split("/")[1] not in ("grader", "attacks")
        if claims or widgets or names_it:
            found[test] = Taken()
        elif own & steps(root / test, root).keys():
            found[test] = Taken(1, folders={folder}, strict=True)
    return found


def _own_files(root: Path, kind: str, folder: str) -> set[str]:
    tops = ("solutions", "labs", "tests/labs") if kind == "lab" else ("chapters",)
    return {p.relative_to(root).as_posix() for top in tops for p in root.glob(f"{top}/{folder}/**/*") if p.is_file()}


def _widgets(paths: Iterable[Path]) -> set[str]:
    """Names of widgets that these files import; not `show`, which every chapter uses."""
    found: set[str] = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("chapters.widgets"):
                found |= {alias.name for alias in node.names} | {(node.module or "").rpartition(".")[2]}
    return found - {"show", "widgets", "figure"}


# ---------------------------------------------------------------- which tests, in the time there is


def within(
    taken: dict[str, Taken], durations: dict[str, float], folders: list[str], root: Path, seconds: float = TEST_SECONDS
) -> tuple[set[str], set[str]]:
    """(tests, test files) to leave out. First run those that have the lab or chapter that changed as a parameter, then
    those of the same room, then the nearest, and of these the shortest, until the time is used up.

    A file is one worker's, so none gets more than `seconds`, and half of them if nothing in it is called after what
    changed; every worker imports every file, which is counted, too. Of a file that never ran here its tests are counted
    in its text, and all of it runs or none.
    """
    units: list[tuple[bool, bool, bool, int, float, str, str]] = []
    for test, entry in taken.items():
        known = {name: s for name, s in durations.items() if name.startswith(f"{test}::")}
        if not known:
            count = len(re.findall(r"^\s*(?:async )?def test_", (root / test).read_text("utf-8"), re.MULTILINE))
            units.append((True, True, entry.away, entry.near, max(1, count) * UNKNOWN, test, ""))
        for name, duration in known.items():
            named, part = names_of(name, folders), any(part in name for part in entry.parts)
            meant = bool(entry.folders and named & entry.folders)
            if meant or entry.folders is None or not named:
                units.append((not part, not meant, entry.away, entry.near, duration, test, name))
    total, of_file = 0.0, dict[str, float]()
    left_tests, left_files = set[str](), set[str]()
    for _, distant, _, _, duration, test, name in sorted(units):
        opening = 0.0 if test in of_file else IMPORT
        most = seconds / 2 if distant else seconds
        if total + opening + duration <= CORES * seconds and of_file.get(test, 0.0) + duration <= most:
            total, of_file[test] = total + opening + duration, of_file.get(test, 0.0) + duration
        elif name:
            left_tests.add(name)
        else:
            left_files.add(test)
    left_files |= {test for test in taken if test not in of_file}
    return left_tests, left_files


# ---------------------------------------------------------------- runs


def run(
    root: Path, taken: dict[str, Taken], left: set[str], deadline: float | None, durations: dict[str, float]
) -> int:
    """pytest with a plan; its exit status."""
    made = {
        "files": {
            test: {"folders": sorted(entry.folders) if entry.folders is not None else None, "strict": entry.strict}
            for test, entry in taken.items()
        },
        "left": sorted(left),
        "folders": content_folders(root),
        "deadline": deadline,
        "expected": {name: s for name, s in durations.items() if name.partition("::")[0] in taken},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.write_text(json.dumps(made), "utf-8")
        command = [sys.executable, "-P", "-m", "pytest", "-q", "-n", "auto", "--dist", "loadscope"]
        command += ["--no-loadscope-reorder", "-m", "not slow", *taken]
        environment = os.environ | {PLAN: str(path)}
        if deadline:
            environment[QUICK] = "1"
            command += ["-p", "unshrunk"]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PLUGINS), environment.get("PYTHONPATH")]))
        return subprocess.run(command, cwd=root, env=environment).returncode


def quick(root: Path) -> int:
    deadline = time.time() + SECONDS
    since, why = base(root)
    changed = changed_files(root, since)
    print(f"Compared: {why}.\n{len(changed)} files changed{':' if changed else '.'}")
    for name in sorted(changed)[:20]:
        print(f"  {name}{'' if (root / name).exists() else ' (gone)'}")
    if len(changed) > 20:
        print(f"  and {len(changed) - 20} more")
    failed = sum(subprocess.run([sys.executable, "-P", "-m", "ruff", *said, "."], cwd=root).returncode for said in RUFF)
    with contextlib.ExitStack() as files:
        # Beside the tests: these wait for nothing of theirs.
        checks = []
        for command in slow_lint(changed):
            said = files.enter_context(tempfile.TemporaryFile("w+"))
            checks.append((said, subprocess.Popen(command, cwd=root, stdout=said, stderr=subprocess.STDOUT)))
        failed += _quick_tests(root, changed, deadline)
        for said, check in checks:
            if check.wait():
                failed += 1
                said.seek(0)
                print(said.read(), end="")
    print("FAILED: the lines above say what." if failed else "Passed, as far as it went. Before you commit: make test")
    return 1 if failed else 0


RUFF = (["check", "-q"], ["format", "-q", "--check"])


def slow_lint(changed: set[str]) -> list[list[str]]:
    """Types and arrows; where chapters or labs changed, whether the generated notebooks are those of their sources."""
    python = [sys.executable, "-P", "-m"]
    found = [[*python, "mypy"], [str(Path(sys.executable).with_name("lint-imports")), "--no-logo"]]
    generated = {"chapter_source": ("chapters/",), "labs.lab_source": ("solutions/", "labs/")}
    for module, folders in generated.items():
        if any(name.startswith((*folders, "grader/")) for name in changed):
            found.append([*python, f"grader.{module}", "--check"])
    return found


def _quick_tests(root: Path, changed: set[str], deadline: float) -> int:
    durations, folders = recorded(root / RECORD.relative_to(ROOT)), content_folders(root)
    taken = near_changes(root, changed)
    for name in sorted(changed & wide_files(root)):
        print(f"NOT ENOUGH: {name} changed, on which every test depends. Only sentinels run for it: make test")
    if not taken:
        print("No test depends on what changed.")
        return 0
    left_tests, left_files = within(taken, durations, folders, root)
    for test in left_files:
        del taken[test]
    print(f"{len(taken)} files of tests depend on it and fit into the time.", flush=True)
    status = run(root, taken, left_tests, deadline, durations) if taken else 0
    _say_left({*left_files, *(name.partition("::")[0] for name in left_tests)}, left_tests)
    return int(status not in (0, 5))  # 5: nothing was collected; what is left was said


def _say_left(files: set[str], tests: set[str]) -> None:
    """A line for each folder: its files, with how many tests of theirs did not run where others did."""
    if not files:
        return
    print("LEFT TO `make test`, for want of time (the nearest and shortest ran):")
    for folder, names in itertools.groupby(sorted(files), key=lambda name: name.rpartition("/")[0]):
        counted = ((name, sum(test.startswith(f"{name}::") for test in tests)) for name in names)
        said = (f"{name.rpartition('/')[2]} ({count or 'all'})" for name, count in counted)
        print(textwrap.fill(f"{folder}: {', '.join(said)}", 120, initial_indent="  ", subsequent_indent="    "))


def main(arguments: list[str], root: Path = ROOT) -> int:
    try:
        match arguments:
            case ["quick"]:
                return quick(root)
            case ["lab" | "chapter" as kind, number]:
                durations = recorded(root / RECORD.relative_to(ROOT))
                return run(root, one(root, kind, number), set(), None, durations)
            case ["begin"]:
                unchanged.begin(root)
                begin(root)
                return 0
            case ["green"]:
                if os.environ.get("INFERLAB_RECORD"):
                    unchanged.record(root)
                print(green(root))
                return 0
    except SelectionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 0 if arguments in (["begin"], ["green"]) else 2  # a whole run does not need git
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
