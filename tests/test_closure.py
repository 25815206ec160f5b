"""What a file needs is found without running it: imports, modules and data named by strings, fixtures that are used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.closure import ROOT, closure, fingerprint, forget, steps

TREE = {
    "pyproject.toml": '[project]\nname = "toy"\n[project.scripts]\ntoy = "engine.command:main"\n',
    "engine/__init__.py": """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from engine.front import Door
    from engine.store import Store

def __getattr__(name):
    from importlib import import_module
    return getattr(import_module(f"engine.{name}"), name)

def check():
    from engine.heavy import heavy
""",
    "engine/front.py": "from engine.store import Store\nfrom .parts import wheel\nclass Door: pass\n",
    "engine/store.py": 'from pathlib import Path\nTABLE = Path(__file__).parent / "table.json"\n',
    "engine/table.json": "{}",
    "engine/heavy.py": "",
    "engine/command.py": "",
    "engine/parts/__init__.py": "import engine.parts.axle\n",
    "engine/parts/axle.py": "",
    "engine/parts/wheel.py": "def turn():\n    from engine import late\n",
    "engine/late.py": "",
    "engine/tool/__init__.py": "",
    "engine/tool/__main__.py": "",
    "labs/01_a/lab.py": "import engine.heavy\n",
    "labs/01_a/lab.yaml": "",
    "labs/02_b/lab.py": "",
    "labs/other.md": "",
    "data/small/a.json": "",
    "data/large/b.json": "",
    "tests/conftest.py": """
import pytest

@pytest.fixture
def door(wheel):
    from engine import Door

@pytest.fixture(name="wheel")
def made_wheel():
    from engine.parts import wheel

@pytest.fixture(autouse=True)
def always():
    import tests.helper
""",
    "tests/helper.py": "",
    "tests/low/conftest.py": "import engine.late\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    for name, text in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    yield tmp_path
    forget()


def needs(root: Path, text: str, name: str = "script.py") -> set[str]:
    """What a file with this text needs beside itself."""
    (root / name).write_text(text)
    return {path.relative_to(root).as_posix() for path in closure([Path(name)], root)} - {name}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import engine.late", "engine/__init__.py engine/late.py"),
        ("def f():\n    import engine.late", "engine/__init__.py engine/late.py"),
        ("from engine import late", "engine/__init__.py engine/late.py"),
        ("from engine import Store", "engine/__init__.py engine/store.py engine/table.json"),
        ("import engine\nengine.Store()", "engine/__init__.py engine/heavy.py engine/store.py engine/table.json"),
        ("import engine as e\ne.late.f()", "engine/__init__.py engine/heavy.py engine/late.py"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import engine.late", ""),
        ("import json, torch, notes", ""),
        ('"""See engine.late."""', ""),
        ('import_module("engine.late")', "engine/__init__.py engine/late.py"),
        ('run([python, "-m", "engine.tool"])', "engine/__init__.py engine/tool/__init__.py engine/tool/__main__.py"),
        ('run(["-c", "from engine import Store; Store()"])', "engine/__init__.py engine/store.py engine/table.json"),
        ('import_module(f"engine.tool.{name}")', "engine/__init__.py engine/tool/__init__.py engine/tool/__main__.py"),
        ('Path(sys.executable).with_name("toy")', "engine/__init__.py engine/command.py"),
        ('open("data/small/a.json")', "data/small/a.json"),
        ('print("engine, data, labs")', ""),
    ],
)  # fmt: skip
def test_modules_and_files_are_found_where_they_are_named(root: Path, text: str, names: str) -> None:
    found = needs(root, text)
    assert found - {"engine/heavy.py"} == set(names.split()) - {"engine/heavy.py"}
    assert ("engine/heavy.py" in found) == ("engine/heavy.py" in names)


def test_imports_are_followed_through_packages_functions_and_dots(root: Path) -> None:
    assert needs(root, "from engine import Door") == {
        "engine/__init__.py", "engine/front.py", "engine/store.py", "engine/table.json", "engine/late.py",
        "engine/parts/__init__.py", "engine/parts/axle.py", "engine/parts/wheel.py",
    }  # fmt: skip


BASE = "ROOT = Path(__file__).parent\n"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('ROOT / "data" / "small"', "data/small/a.json"),
        ('ROOT / "data" / name', "data/small/a.json data/large/b.json"),
        ('(ROOT / "data").is_dir()', ""),
        ("exists(name) or sorted() or f().exists()", ""),
        ('ROOT / "labs" / slug / f"{name}.yaml"', "labs/01_a/lab.py labs/01_a/lab.yaml labs/02_b/lab.py"),
        ('sorted((ROOT / "labs").glob("[0-9]*/*.py"))', "labs/01_a/lab.py labs/01_a/lab.yaml labs/02_b/lab.py"),
        ('os.path.join(ROOT, "labs/other.md")', "labs/other.md"),
        ("ROOT / name", ""),
        ('tmp_path / "data"', ""),
        ('import engine.store\nPath(engine.store.__file__).with_name("table.json")', "engine/table.json"),
    ],
)
def test_a_path_that_begins_at_the_file_is_followed(root: Path, text: str, names: str) -> None:
    found = needs(root, BASE + text)
    if "labs/01_a/lab.py" in found:  # what data that is code imports is needed too
        assert "engine/heavy.py" in found
    assert {name for name in found if not name.endswith(".py") or name.startswith("labs/")} == set(names.split())


def test_the_root_that_a_test_gives_to_a_function_is_known_inside_it(root: Path) -> None:
    (root / "engine/late.py").write_text('def build(root):\n    return (root / "labs").glob("*.md")\n')
    text = 'from engine.late import build\nROOT = Path(__file__).parents[1]\nbuild(ROOT / "data")\nbuild(ROOT)\n'
    assert "labs/other.md" in needs(root, text, "tests/test_a.py")
    assert "labs/other.md" not in needs(root, text.replace("build(ROOT)\n", ""), "tests/test_b.py")


def test_a_test_needs_the_fixtures_that_it_asks_for_and_what_they_ask_for(root: Path) -> None:
    every = {"tests/conftest.py", "tests/helper.py"}
    assert needs(root, "def test_it(): pass", "tests/test_a.py") == every
    wheel = every | {f"engine/{n}.py" for n in ("__init__", "late", "parts/__init__", "parts/axle", "parts/wheel")}
    assert needs(root, "def test_it(wheel): pass", "tests/test_b.py") == wheel
    door = wheel | {"engine/front.py", "engine/store.py", "engine/table.json"}
    assert needs(root, "def test_it(door): pass", "tests/test_c.py") == door
    assert needs(root, '@pytest.mark.usefixtures("door")\ndef test_it(): pass', "tests/test_d.py") == door
    low = needs(root, "def test_it(): pass", "tests/low/test_e.py")
    assert low == every | {"tests/low/conftest.py", "engine/__init__.py", "engine/late.py"}


def test_a_node_id_is_no_need(root: Path) -> None:
    (root / "tests/test_a.py").write_text("import engine.late")
    assert "tests/test_a.py" not in needs(root, 'FIRST = "tests/test_a.py"', "tests/test_b.py")


def test_a_file_that_is_wrong_or_absent_needs_only_itself(root: Path) -> None:
    assert needs(root, "import engine.late\ndef (:") == set()
    assert closure([Path("nothing.py")], root) == {root / "nothing.py"}


def test_what_is_named_directly_is_nearer_than_what_that_needs(root: Path) -> None:
    (root / "script.py").write_text("import engine.front")
    near = {path.relative_to(root).as_posix(): distance for path, distance in steps(root / "script.py", root).items()}
    assert (near["script.py"], near["engine/front.py"], near["engine/store.py"]) == (0, 1, 2)
    assert near["engine/table.json"] == 3


def test_a_fingerprint_changes_with_contents_and_names_and_not_with_line_ends_or_order(root: Path) -> None:
    paths = [root / "labs/other.md", Path("data/small/a.json")]

    def after(name: str, content: bytes) -> str:
        forget()
        (root / name).write_bytes(content)
        return fingerprint(paths, root)

    first = after("labs/other.md", b"one\ntwo\n")
    assert fingerprint(reversed(paths), root) == first == after("labs/other.md", b"one\r\ntwo\r\n")
    assert after("labs/other.md", b"one\ntwo") != first
    assert after("data/large/b.json", b"other") != first
    assert after("labs/other.md", b"one\ntwo\n") == first
    (root / "labs/other.md").unlink()
    forget()
    assert fingerprint(paths, root) != first
    assert fingerprint([root / "labs/02_b/lab.py"], root) != fingerprint([root / "engine/late.py"], root)


# ---------------------------------------------------------------- this repository


def names_in(test: str) -> set[str]:
    return {path.relative_to(ROOT).as_posix() for path in closure([Path(test)])}


def test_the_block_pools_tests_need_the_pool_and_not_the_server() -> None:
    found = names_in("tests/kv/test_block_pool.py")
    assert {"reference_impl/core/block_pool.py", "reference_impl/interfaces/request.py", "tests/conftest.py"} <= found
    assert not any(name.startswith(("reference_impl/serving", "reference_impl/models", "grader")) for name in found)


def test_the_front_doors_tests_need_the_engine_and_the_course_model() -> None:
    found = names_in("tests/engine/test_llm.py")
    assert {"reference_impl/core/sampler.py", "datasets/course_model/target/model.safetensors"} <= found
    assert not any(name.startswith(("reference_impl/serving", "grader", "solutions")) for name in found)


def test_proofs_need_labs_and_their_cases_and_the_prover() -> None:
    found = names_in("tests/labs/test_labs.py")
    assert {"solutions/02_kv_cache/kv_cache.py", "grader/proofs/proof.py", "reference_impl/interfaces/plan.py"} <= found
    assert any(name.startswith("tests/labs/02_kv_cache/mutants/") for name in found)


def test_notebooks_tests_need_every_chapter() -> None:
    found = names_in("tests/chapters/test_notebooks.py")
    assert {path.relative_to(ROOT).as_posix() for path in ROOT.glob("chapters/[0-9]*/*.py")} <= found
    assert "chapters/widgets/timeline.py" in found


def test_every_file_of_the_code_is_needed_by_some_test() -> None:
    tests = [path for path in ROOT.glob("tests/**/test_*.py") if path != Path(__file__)]
    reached = closure(tests)
    code = [
        path
        for room in ("reference_impl", "grader", "chapters", "solutions", "labs")
        for path in ROOT.glob(f"{room}/**/*")
    ]
    kinds = (".py", ".ipynb", ".yaml", ".html", ".json")
    missed = [str(p.relative_to(ROOT)) for p in code if p.suffix in kinds and "__pycache__" not in p.parts]
    missed = [name for name in missed if ROOT / name not in reached and ".ipynb_checkpoints" not in name]
    assert not missed
