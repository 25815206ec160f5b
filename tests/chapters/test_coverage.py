"""chapters/coverage.yaml is complete, and every place it points to exists."""

import ast
import functools
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
COVERAGE = yaml.load((ROOT / "chapters/coverage.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
ITEMS: dict[str, dict[str, Any]] = COVERAGE["items"]
CHAPTERS: dict[str, dict[str, Any]] = COVERAGE["chapters"]

# Items per chapter, 00 to 19: 525 in all. And how many items ask for each form.
ITEMS_PER_CHAPTER = (21, 31, 31, 27, 18, 37, 15, 42, 24, 14, 13, 13, 29, 20, 12, 38, 24, 11, 11, 94)
FORMS = {"engine": 183, "triton_kernel": 47, "calculator": 228, "lab": 109, "quiz": 251, "prose": 99}
KINDS = ("test", "notebook", "lab", "widget", "quiz", "later")


def targets(form: object) -> Iterator[tuple[str, str]]:
    """(kind, target) of one form: a mapping with one key, or a list of such mappings."""
    for entry in form if isinstance(form, list) else [form]:
        assert isinstance(entry, dict), f"expected 'kind: target', got {entry!r}"
        assert len(entry) == 1, f"expected one kind per entry, got {entry!r}"
        yield from entry.items()


def problem(kind: str, target: str, root: Path = ROOT) -> str | None:
    """What is wrong with a target, or None if it exists."""
    if kind == "later":
        return None if target.strip() else "expected the part or chapter it waits for, got nothing"
    if kind not in KINDS:
        return f"expected a kind among {KINDS}, got {kind!r}"
    separator = {"test": "::", "widget": "."}.get(kind, "#")
    place, found, name = target.partition(separator)
    if not found or not name:
        return f"expected '{kind}: place{separator}name', got {target!r}"
    return CHECKS[kind](place, name, root)


def _test(path: str, name: str, root: Path) -> str | None:
    if not (root / path).is_file():
        return f"no file {path}"
    function = name.split("::")[-1].split("[")[0]
    names = {n.name for n in ast.walk(_parse(root / path)) if isinstance(n, ast.FunctionDef)}
    return None if function in names else f"no test {function} in {path}"


def _notebook(path: str, cell: str, root: Path) -> str | None:
    if not (root / path).is_file():
        return f"no notebook {path}"
    cells = json.loads((root / path).read_text(encoding="utf-8"))["cells"]
    return None if cell in {c.get("id") for c in cells} else f"no cell {cell} in {path}"


def _lab(slug: str, grade_id: str, root: Path) -> str | None:
    sources = sorted((root / "solutions" / slug).glob("*.py"))
    if not sources:
        return f"no source under solutions/{slug}"
    pattern = re.compile(rf'"grade_id"\s*:\s*"{re.escape(grade_id)}"')
    found = any(pattern.search(source.read_text(encoding="utf-8")) for source in sources)
    return None if found else f"no grade_id {grade_id} in solutions/{slug}"


def _widget(module: str, name: str, root: Path) -> str | None:
    path = root / "chapters/widgets" / f"{module}.py"
    if not path.is_file():
        return f"no module chapters/widgets/{module}.py"
    names = {n.name for n in _parse(path).body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    return None if name in names else f"no {name} in chapters/widgets/{module}.py"


def _quiz(path: str, item: str, root: Path) -> str | None:
    if not (root / path).is_file():
        return f"no quiz {path}"
    loaded = _read_yaml(root / path)
    items = loaded["items"] if isinstance(loaded, dict) else loaded
    return None if item in {entry["id"] for entry in items} else f"no item {item} in {path}"


@functools.cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def _read_yaml(path: Path) -> Any:
    return yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader)


CHECKS = {"test": _test, "notebook": _notebook, "lab": _lab, "widget": _widget, "quiz": _quiz}


def test_there_are_525_items_each_once_and_in_order() -> None:
    expected = [f"{ch:02d}-{n:02d}" for ch, count in enumerate(ITEMS_PER_CHAPTER) for n in range(1, count + 1)]
    assert list(ITEMS) == expected
    assert len(ITEMS) == 525
    # A YAML key that appears twice is silently overwritten; count the lines as well.
    text = (ROOT / "chapters/coverage.yaml").read_text(encoding="utf-8")
    assert len(re.findall(r"^  \d\d-\d\d:$", text, flags=re.MULTILINE)) == 525


def test_every_form_is_asked_for_as_often_as_planned() -> None:
    assert Counter(form for item in ITEMS.values() for form in item["forms"]) == FORMS


def test_titles_are_short_and_forms_are_not_empty() -> None:
    for name, item in ITEMS.items():
        assert set(item) == {"title", "forms"}, name
        assert 1 <= len(item["title"].split()) <= 12, name
        assert item["forms"], name
    counts = Counter(item["title"].lower() for item in ITEMS.values())
    assert [title for title, n in counts.items() if n > 1] == []


def test_every_target_exists() -> None:
    wrong = [
        f"{name} {form}: {reason}"
        for name, item in ITEMS.items()
        for form, shown in item["forms"].items()
        for kind, target in targets(shown)
        if (reason := problem(kind, target))
    ]
    assert wrong == []


def test_chapters_are_those_of_the_items_and_of_the_manifest() -> None:
    assert list(CHAPTERS) == sorted({name[:2] for name in ITEMS})
    manifest = yaml.load((ROOT / "chapters/course.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)["chapters"]
    expected = {
        f"{row['number']:02d}": {
            "slug": f"{row['number']:02d}_{row['slug']}",
            "finished": row["status"] == "finished",
        }
        for row in manifest
    }
    assert expected == CHAPTERS


def open_for_itself(number: str, items: dict[str, dict[str, Any]]) -> list[str]:
    """Forms of a chapter that wait for that very chapter."""
    return [
        f"{name} {form}"
        for name, item in items.items()
        if name.startswith(f"{number}-")
        for form, shown in item["forms"].items()
        for kind, target in targets(shown)
        if kind == "later" and re.search(rf"\bchapter {number}\b", target)
    ]


def test_a_finished_chapter_leaves_nothing_open_but_what_waits_for_other_parts() -> None:
    for number in (number for number, chapter in CHAPTERS.items() if chapter["finished"]):
        assert (ROOT / "chapters" / CHAPTERS[number]["slug"]).is_dir()
        assert open_for_itself(number, ITEMS) == []


def test_an_open_item_of_its_own_chapter_is_noticed() -> None:
    items = {
        "02-01": {"forms": {"quiz": {"later": "chapter 02"}, "engine": {"later": "chapter 04"}}},
        "02-02": {"forms": {"lab": [{"later": "lab of chapter 02"}, {"test": "a::b"}]}},
        "03-01": {"forms": {"quiz": {"later": "chapter 02"}}},
    }
    assert open_for_itself("02", items) == ["02-01 quiz", "02-02 lab"]


def test_a_target_that_does_not_exist_is_named(tmp_path: Path) -> None:
    files = {
        "tests/test_a.py": "def test_here():\n    pass\n",
        "chapters/02_x/chapter.ipynb": json.dumps({"cells": [{"id": "idea"}]}),
        "chapters/02_x/quiz.yaml": "- {id: q1}\n",
        "solutions/02_x/x.py": '# %% nbgrader={"grade": true, "grade_id": "append"}\n',
        "chapters/widgets/memory.py": "def calculator():\n    pass\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    good = {
        "test": "tests/test_a.py::test_here",
        "notebook": "chapters/02_x/chapter.ipynb#idea",
        "quiz": "chapters/02_x/quiz.yaml#q1",
        "lab": "02_x#append",
        "widget": "memory.calculator",
        "later": "chapter 07",
    }
    for kind, target in good.items():
        assert problem(kind, target, tmp_path) is None
        assert problem(kind, "" if kind == "later" else f"{target}_gone", tmp_path)
        assert problem(kind, "" if kind == "later" else f"no_such_{target}", tmp_path)
    assert "expected 'test: place::name'" in str(problem("test", "tests/test_a.py", tmp_path))
    assert "expected a kind" in str(problem("song", "a#b", tmp_path))
