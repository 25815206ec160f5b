"""A narrow run takes the tests that need what changed, the nearest first, and says what it leaves."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import narrow, selection
from tests.closure import ROOT, forget
from tests.selection import GREEN, Taken

pytestmark = pytest.mark.git

TREE = {
    "engine/low.py": "",
    "engine/high.py": "import engine.low\n",
    "solutions/01_a/a.py": "",
    "solutions/02_b/b.py": "",
    "chapters/01_a/intro.py": "from chapters.widgets import show, wheel\n",
    "chapters/01_a/intro.ipynb": "",
    "chapters/02_b/only.py": "",
    "tests/conftest.py": "import tests.helper\n",
    "tests/helper.py": "",
    "tests/test_import.py": "",
    "tests/test_low.py": "import engine.low\n\ndef test_one(): pass\n\ndef test_two(): pass\n",
    "tests/test_high.py": "import engine.high\n",
    "tests/test_other.py": "",
    "tests/test_each.py": 'from pathlib import Path\nLABS = (Path(__file__).parents[1] / "solutions").glob("*/*.py")\n',
    "tests/test_names_it.py": 'LAB = "02_b"\n',
    "tests/claims/test_ch02_more.py": "",
    "tests/claims/test_chapter_02.py": "",
    "tests/chapters/test_notebooks.py": (
        'from pathlib import Path\nALL = (Path(__file__).parents[2] / "chapters").glob("*/*.py")\n'
    ),
    "tests/chapters/test_widget_wheel.py": "from chapters.widgets.wheels import wheel\n",
    "tests/chapters/test_widget_other.py": "from chapters.widgets import other, show\n",
    ".gitignore": ".venv/\n__pycache__/\n",
}
FOLDERS = ["01_a", "02_b"]


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", root, *arguments], check=True, capture_output=True, text=True).stdout.strip()


def commit(root: Path) -> str:
    git(root, "add", "-A")
    git(root, "commit", "-q", "--allow-empty", "-m", "change")
    return git(root, "rev-parse", "HEAD")


def write(root: Path, name: str, text: str = "x = 1\n") -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)
    forget()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small repository of one commit."""
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "Somebody")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "somebody@example.org")
    for name, text in TREE.items():
        write(tmp_path, name, text)
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    yield tmp_path
    forget()


# ---------------------------------------------------------------- what changed


def test_commits_edits_new_files_and_files_that_are_gone_are_changes(root: Path) -> None:
    since = git(root, "rev-parse", "HEAD")
    assert selection.changed_files(root, since) == set()
    write(root, "engine/low.py")
    commit(root)
    write(root, "engine/new file.py")
    git(root, "mv", "engine/high.py", "engine/higher.py")
    (root / "tests/test_other.py").unlink()
    write(root, ".venv/ignored.py")
    assert selection.changed_files(root, since) == {
        "engine/low.py", "engine/new file.py", "engine/high.py", "engine/higher.py", "tests/test_other.py",
    }  # fmt: skip


def test_a_green_commit_is_compared_with_and_else_the_main_branch_and_else_head(root: Path) -> None:
    first = git(root, "rev-parse", "HEAD")
    assert selection.base(root)[0] == first
    assert "only what is not committed" in selection.base(root)[1]
    git(root, "update-ref", "refs/remotes/origin/main", first)
    second = commit(root)
    assert selection.base(root)[0] == first
    assert "origin/main" in selection.base(root)[1]
    git(root, "update-ref", GREEN, second)
    commit(root)
    assert selection.base(root) == (second, f"since {second[:10]}, the last commit that passed `make test` here")


def test_a_run_in_a_clean_tree_records_its_commit(root: Path) -> None:
    selection.begin(root)
    assert selection.green(root) == f"recorded as green: {git(root, 'rev-parse', 'HEAD')[:10]}"
    assert selection.base(root)[0] == git(root, "rev-parse", GREEN) == git(root, "rev-parse", "HEAD")


@pytest.mark.parametrize("when", ["before", "meanwhile", "committed", "never began"])
def test_a_run_in_a_tree_with_changes_records_nothing(root: Path, when: str) -> None:
    if when == "before":
        write(root, "engine/low.py")
    if when != "never began":
        selection.begin(root)
    if when == "before":
        git(root, "checkout", "-q", "engine/low.py")
    if when in ("meanwhile", "committed"):
        write(root, "engine/low.py")
    if when == "committed":
        commit(root)
    assert selection.green(root) == "not recorded as green: there were changes that are not committed"
    assert selection.commit_of(root, GREEN) is None


def test_without_git_or_a_repository_a_quick_run_says_so_and_a_whole_run_goes_on(
    root: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    elsewhere = tmp_path_factory.mktemp("no repository")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(elsewhere.parent))
    assert selection.main(["quick"], elsewhere) == 2
    assert "not a git repository" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "")
    assert selection.main(["quick"], root) == 2
    assert "git is not installed" in capsys.readouterr().err
    assert selection.main(["begin"], root) == selection.main(["green"], root) == 0


# ---------------------------------------------------------------- which files


def near(root: Path, *changed: str) -> dict[str, Taken]:
    return selection.near_changes(root, set(changed))


def test_tests_that_import_what_changed_come_before_those_that_reach_it_through_others(root: Path) -> None:
    assert list(near(root, "engine/low.py")) == ["tests/test_low.py", "tests/test_high.py"]
    assert list(near(root, "engine/high.py")) == ["tests/test_high.py"]
    assert list(near(root, "tests/test_high.py", "engine/low.py")) == ["tests/test_high.py", "tests/test_low.py"]
    assert near(root, "README.md") == {}


def test_a_lab_that_changed_is_tested_alone(root: Path) -> None:
    assert near(root, "solutions/02_b/b.py") == {"tests/test_each.py": Taken(1, folders={"02_b"})}
    assert near(root, "solutions/02_b/b.py", "tests/test_each.py")["tests/test_each.py"].folders is None


def test_a_chapter_that_changed_is_tested_alone_and_its_changed_notebook_first(root: Path) -> None:
    taken = near(root, "chapters/01_a/intro.py")
    assert taken == {"tests/chapters/test_notebooks.py": Taken(1, False, {"01_a"}, parts={"01_a-intro"})}


@pytest.mark.parametrize("wide", ["pyproject.toml", "tests/conftest.py", "tests/helper.py"])
def test_what_every_test_depends_on_calls_for_sentinels_only(root: Path, wide: str) -> None:
    assert near(root, wide) == {"tests/test_import.py": Taken(1)}
    assert list(near(root, wide, "engine/high.py")) == ["tests/test_high.py", "tests/test_import.py"]


def test_all_about_a_lab(root: Path) -> None:
    assert selection.one(root, "lab", "2") == selection.one(root, "lab", "02") == {
        "tests/claims/test_ch02_more.py": Taken(),
        "tests/claims/test_chapter_02.py": Taken(),
        "tests/test_each.py": Taken(1, folders={"02_b"}, strict=True),
        "tests/test_names_it.py": Taken(),
    }  # fmt: skip


def test_all_about_a_chapter_with_the_widgets_that_it_shows(root: Path) -> None:
    assert selection.one(root, "chapter", "01") == {
        "tests/chapters/test_notebooks.py": Taken(1, folders={"01_a"}, strict=True),
        "tests/chapters/test_widget_wheel.py": Taken(),
    }


@pytest.mark.parametrize("kind", ["lab", "chapter"])
def test_a_lab_or_chapter_that_is_not_there_is_refused_with_those_that_are(
    root: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert selection.main([kind, "07"], root) == 2
    assert f"there is no {kind} '07'; there are: 01, 02" in capsys.readouterr().err


# ---------------------------------------------------------------- which tests


def test_the_nearest_and_of_those_the_shortest_run_until_the_time_is_used_up(root: Path) -> None:
    taken = {"tests/test_low.py": Taken(1), "tests/test_high.py": Taken(2), "tests/test_other.py": Taken(3)}
    durations = {
        "tests/test_low.py::test_long": 4.0, "tests/test_low.py::test_short": 2.0, "tests/test_high.py::test_a": 4.0,
        "tests/test_other.py::test_b": 5.0, "tests/test_import.py::test_c": 1.0,
    }  # fmt: skip
    assert selection.within(taken, durations, FOLDERS, root, seconds=100) == (set(), set())
    left = {"tests/test_low.py::test_long", "tests/test_other.py::test_b"}
    assert selection.within(taken, durations, FOLDERS, root, seconds=9) == (left, {"tests/test_other.py"})


def test_what_names_the_lab_that_changed_comes_before_what_is_nearer(root: Path) -> None:
    durations = {"tests/test_low.py::test_near": 9.0, "tests/test_each.py::test_it[02_b]": 9.0}
    taken = {"tests/test_low.py": Taken(1, folders={"02_b"}), "tests/test_each.py": Taken(2, folders={"02_b"})}
    left, _ = selection.within(taken, durations, FOLDERS, root, seconds=9)
    assert left == {"tests/test_low.py::test_near"}


def test_a_file_that_never_ran_is_counted_by_its_tests(root: Path) -> None:
    taken = {"tests/test_low.py": Taken(1)}
    assert selection.within(taken, {}, FOLDERS, root, seconds=4.0) == (set(), set())
    assert selection.within(taken, {}, FOLDERS, root, seconds=3.9) == (set(), {"tests/test_low.py"})


def test_the_notebook_that_changed_comes_before_a_shorter_one_and_other_chapters_cost_nothing(root: Path) -> None:
    test = "tests/chapters/test_notebooks.py"
    durations = {f"{test}::t[01_a-intro]": 9.0, f"{test}::t[01_a-more]": 8.0, f"{test}::t[02_b-only]": 1.0}
    left, _ = selection.within(
        {test: Taken(1, False, {"01_a"}, parts={"01_a-intro"})}, durations, FOLDERS, root, seconds=10
    )
    assert left == {f"{test}::t[01_a-more]"}


@pytest.mark.parametrize(
    ("nodeid", "taken"),
    [
        ("a.py::test_plain", True),
        ("a.py::test[01_a]", True),
        ("a.py::test_left", False),
        ("b.py::test_plain", True),
        ("b.py::test[02_b-x]", True),
        ("b.py::test[01_a]", False),
        ("c.py::test_plain", False),
        ("c.py::test[02_b]", True),
        ("d.py::test_plain", False),
    ],
)
def test_a_plan_takes_files_or_what_names_a_lab(nodeid: str, taken: bool) -> None:
    files = {
        "a.py": {"folders": None, "strict": False},
        "b.py": {"folders": ["02_b"], "strict": False},
        "c.py": {"folders": ["02_b"], "strict": True},
    }
    made = {"files": files, "left": {"a.py::test_left"}, "folders": FOLDERS}
    assert narrow.is_taken(nodeid, made) is taken


def test_a_damaged_record_of_durations_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "durations.json"
    assert narrow.recorded(path) == {}
    for text in ("{", "[]", '{"a": "long"}', json.dumps(None)):
        path.write_text(text)
        assert narrow.recorded(path) == {}


# ---------------------------------------------------------------- this repository


def here(*changed: str) -> dict[str, Taken]:
    return selection.near_changes(ROOT, set(changed))


def test_a_change_of_the_sampler_takes_the_cores_tests_first_and_then_the_samplers() -> None:
    taken = here("reference_impl/core/sampler.py")
    assert next(iter(taken)).startswith("tests/core/")
    assert taken["tests/sampling/test_sampler.py"].near == 1
    assert taken["tests/engine/test_llm.py"].near > 1
    assert "tests/kv/test_block_pool.py" not in taken


def test_a_change_of_a_lab_takes_its_proof_and_no_other_labs() -> None:
    taken = here("solutions/02_kv_cache/kv_cache.py")
    assert taken["tests/labs/test_labs.py"].folders == {"02_kv_cache"}
    assert all(name.startswith("tests/labs/") for name in list(taken)[:2])
    assert "tests/engine/test_llm.py" not in taken
    assert here("tests/labs/02_kv_cache/mutants/append_at_zero.py")["tests/labs/test_labs.py"].folders == {
        "02_kv_cache"
    }


def test_a_change_of_a_notebooks_source_takes_that_chapters_notebooks() -> None:
    taken = here("chapters/03_batching/a_batching.py")["tests/chapters/test_notebooks.py"]
    assert (taken.folders, taken.parts) == ({"03_batching"}, {"03_batching-a_batching"})


def test_every_lab_and_every_chapter_has_tests_of_its_own() -> None:
    for path in sorted(ROOT.glob("solutions/[0-9]*")):
        taken = selection.one(ROOT, "lab", path.name[:2])
        assert {"tests/labs/test_labs.py", "tests/labs/test_conventions.py"} <= taken.keys()
    for path in sorted(ROOT.glob("chapters/[0-9]*")):
        taken = selection.one(ROOT, "chapter", path.name[:2])
        assert {"tests/chapters/test_notebooks.py", "tests/chapters/test_quiz.py"} <= taken.keys()


@pytest.mark.parametrize(
    ("changed", "modules"),
    [
        ("reference_impl/assembly/engine.py", []),
        ("chapters/03_batching/a_batching.py", ["grader.chapter_source"]),
        ("solutions/02_kv_cache/kv_cache.py", ["grader.labs.lab_source"]),
        ("grader/bootstrap.py", ["grader.chapter_source", "grader.labs.lab_source"]),
    ],
)
def test_where_sources_of_notebooks_changed_they_are_compared_with_the_notebooks(
    changed: str, modules: list[str]
) -> None:
    commands = selection.slow_lint({changed})
    assert [command[3] for command in commands if command[-1] == "--check"] == modules
