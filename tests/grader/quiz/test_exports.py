"""Exports, read back: the page for a phone by an HTML parser, the package for Anki as the database it is."""

import json
import re
import sqlite3
import zipfile
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from grader.quiz import Quiz, load_quiz
from grader.quiz.export_anki import MODEL_ID, write_anki
from grader.quiz.export_html import write_html

KV = load_quiz("02_kv_cache")


class Page(HTMLParser):
    """Elements with their attributes and text, and a check that every element is closed."""

    VOID = ("meta", "br", "hr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    path = tmp_path_factory.mktemp("export") / "quiz.html"
    assert write_html([KV], None, path) == len(KV.items)
    return Page(path.read_text("utf-8"))


def test_the_page_holds_every_question_with_its_answer_and_every_misconception(page: Page) -> None:
    for item in KV.items:
        question = KV.question(item.id, 1)
        assert flat(question.prompt) in page.text, item.id
        assert flat(question.explained()) in page.text, item.id
        for text in (*question.options, *question.notes, *question.lefts):
            assert flat(text) in page.text, item.id
    assert len(page.all("article")) == len(KV.items)
    assert len(page.all("summary")) == len(page.all("details"))


def test_the_page_is_made_for_a_phone_and_loads_and_runs_nothing(page: Page) -> None:
    metas = {meta.get("name") or meta.get("http-equiv"): meta.get("content") for meta in page.all("meta")}
    assert metas["viewport"] == "width=device-width, initial-scale=1"
    assert metas["Content-Security-Policy"] == "default-src 'none'; style-src 'unsafe-inline'"
    assert page.all("html") == [{"lang": "en"}]
    tags = {name for name, _ in page.elements}
    assert not tags & {"script", "link", "img", "iframe"}
    assert not [a for _, a in page.elements if any(name.startswith("on") or name == "src" for name in a)]


def test_headings_do_not_skip_a_level(page: Page) -> None:
    levels = [int(name[1]) for name, _ in page.elements if re.fullmatch(r"h[1-6]", name)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_the_same_quizzes_make_the_same_page_and_a_tag_selects(tmp_path: Path) -> None:
    write_html([KV], None, tmp_path / "a.html")
    write_html([KV], None, tmp_path / "b.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    assert write_html([KV], "requests", tmp_path / "c.html") == len(KV.draw(tag="requests"))


def test_several_chapters_have_links_that_lead_to_them(tmp_path: Path) -> None:
    other = KV.model_copy(update={"chapter": "03_batching"})
    write_html([KV, other], None, tmp_path / "a.html")
    page = Page((tmp_path / "a.html").read_text("utf-8"))
    assert {a["href"] for a in page.all("a")} == {f"#{h['id']}" for h in page.all("h2")}
    assert len(page.all("h2")) == 2


EVIL = "<script>alert(1)</script> & {{7*7}}"


def evil(tmp_path: Path) -> Quiz:
    item = {
        "id": "x", "kind": "choice", "difficulty": 1, "tags": ["t"], "source": ["02-01"], "reviewed": "2026-11-20",
        "prompt": EVIL.replace("{", "{{").replace("}", "}}"), "why": "so",
        "options": [
            {"text": "one", "right": True}, {"text": "<b>two", "misconception": "<i>"},
            {"text": "six", "misconception": "no"},
        ],
    }  # fmt: skip
    path = tmp_path / "quiz.yaml"
    path.write_text(yaml.safe_dump({"chapter": "02_kv_cache", "items": [item]}), "utf-8")
    return load_quiz("02_kv_cache", path)


def test_what_an_item_says_is_text_and_never_markup(tmp_path: Path) -> None:
    quiz = evil(tmp_path)
    write_html([quiz], None, tmp_path / "quiz.html")
    page = Page((tmp_path / "quiz.html").read_text("utf-8"))
    assert not page.all("script")
    assert EVIL in page.text
    notes = package(write(quiz, tmp_path / "q.apkg"))["notes"]
    assert "<script" not in notes[0]["flds"]
    assert "&lt;script&gt;" in notes[0]["flds"]


# ---------------------------------------------------------------- Anki


def write(quiz: Quiz, path: Path, tag: str | None = None) -> Path:
    write_anki([quiz], tag, path)
    return path


def package(path: Path) -> dict[str, Any]:
    """Notes, cards, decks and note types, as an importer reads them."""
    with zipfile.ZipFile(path) as archive:
        assert json.loads(archive.read("media")) == {}
        content = archive.read("collection.anki2")
    base = sqlite3.connect(":memory:")
    base.deserialize(content)
    base.row_factory = sqlite3.Row
    collection = base.execute("select * from col").fetchone()
    return {
        "notes": base.execute("select * from notes order by id").fetchall(),
        "cards": base.execute("select * from cards").fetchall(),
        "decks": json.loads(collection["decks"]),
        "models": json.loads(collection["models"]),
    }


@pytest.fixture(scope="module")
def anki(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return package(write(KV, tmp_path_factory.mktemp("export") / "quiz.apkg"))


def test_the_package_has_a_card_for_every_copy_of_every_item(anki: dict[str, Any]) -> None:
    names = [note["flds"].split("\x1f")[0] for note in anki["notes"]]
    assert {name.split("#")[0] for name in names} == {f"02_kv_cache/{item.id}" for item in KV.items}
    assert len(set(names)) == len(names) == len(anki["cards"])
    assert sum(name.startswith("02_kv_cache/bytes-per-token#") for name in names) == 3
    assert {card["nid"] for card in anki["cards"]} == {note["id"] for note in anki["notes"]}


def test_a_card_asks_on_its_front_and_explains_on_its_back(anki: dict[str, Any]) -> None:
    for note in anki["notes"]:
        name, front, back = note["flds"].split("\x1f")
        id, seed = name.split("/")[1].split("#")
        question = KV.question(id, int(seed))
        front, back = Page(front).text, Page(back).text
        assert flat(question.prompt) in front
        assert flat(question.explained()) in back
        assert flat(question.explained()) not in front
        if question.kind != "numeric":
            assert all(flat(line) in back or question.kind == "short" for line in question.given_text(question.right))
        assert all(note in back for note in question.notes)
        assert all(mistake in back for mistake, _ in question.mistakes)
    model = anki["models"][str(MODEL_ID)]
    assert [field["name"] for field in model["flds"]] == ["Key", "Question", "Answer"]
    assert "nightMode" in model["css"]


def test_another_export_has_the_same_ids_so_that_anki_updates(tmp_path: Path, anki: dict[str, Any]) -> None:
    changed = KV.model_copy(
        update={"items": tuple(i.model_copy(update={"why": "Another reason."}) for i in KV.items[::-1])}
    )
    again = package(write(changed, tmp_path / "quiz.apkg"))
    guids = [{note["flds"].split("\x1f")[0]: note["guid"] for note in p["notes"]} for p in (anki, again)]
    assert guids[0] == guids[1]
    assert len(set(guids[0].values())) == len(guids[0])
    assert set(again["decks"]) == set(anki["decks"])
    assert set(again["models"]) == set(anki["models"])
    assert {note["mid"] for note in again["notes"]} == {MODEL_ID}


def test_decks_are_named_by_chapter_and_notes_tagged(anki: dict[str, Any]) -> None:
    assert "inferlab::02 The KV cache" in {deck["name"] for deck in anki["decks"].values()}
    for note in anki["notes"]:
        item = KV.item(note["flds"].split("#")[0].split("/")[1])
        assert set(note["tags"].split()) == {"inferlab", *item.tags}


def test_a_tag_selects_cards(tmp_path: Path) -> None:
    names = {note["flds"].split("#")[0] for note in package(write(KV, tmp_path / "q.apkg", "requests"))["notes"]}
    assert names == {question.key for question in KV.draw(tag="requests")}
