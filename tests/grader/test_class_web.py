"""`inferlab grade web`: who may see it, what it shows, and that it changes nothing."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from grader.reports.class_web import POLICY, class_app

SLUG, TOKEN = "01_toy", "a token"


def inferlab(*arguments: str) -> str:
    from grader.commands.grade_cli import app

    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output + str(done.exception)
    return done.output


@pytest.fixture(scope="module")
def course(
    tmp_path_factory: pytest.TempPathFactory,
    released_course: Callable[[Path], Path],
    solution_text: str,
    release_text: str,
    warm_examiners: None,
) -> Path:
    """Three students: one solved the lab, one nothing, one handed in no notebook."""
    folder = tmp_path_factory.mktemp("web")
    root, handed = released_course(folder / "course"), folder / "handed"
    handed.mkdir()
    for student, text in {"ada": solution_text, "bob": release_text, "cy": "<b>no notebook"}.items():
        (handed / f"{student}.ipynb").write_text(text)
    inferlab("collect", "01", str(handed), "--course", str(root))
    inferlab("run", "01", "--insecure", "--workers", "1", "--course", str(root))
    inferlab("feedback", "01", "--course", str(root))
    return root


def client(root: Path, host: str = "127.0.0.1:8000") -> TestClient:
    return TestClient(class_app(root, TOKEN), base_url=f"http://{host}", raise_server_exceptions=False)


@pytest.fixture
def known(course: Path) -> TestClient:
    """A browser that has opened the address with the token."""
    found = client(course)
    assert found.get(f"/?token={TOKEN}").url.query == b""
    return found


def rows(page: str) -> dict[str, list[str]]:
    """What the table shows, by student."""
    found = {}
    for row in re.findall(r"<tr><th scope=\"row\">(.*?)</tr>", page, re.DOTALL):
        name, *cells = [" ".join(re.sub(r"<[^>]*>", " ", cell).split()) for cell in row.split("<td")]
        found[name] = [cell.partition(">")[2].strip() for cell in cells]
    return found


def test_the_class_is_shown_with_points_and_what_is_unusual(known: TestClient) -> None:
    answer = known.get("/")
    assert answer.headers["content-security-policy"] == POLICY
    assert rows(answer.text) == {"ada": ["6", "6"], "bob": ["0", "0"], "cy": ["0 refused", "0"]}
    assert "3 of 3" in answer.text


def test_from_a_student_the_way_leads_to_lab_and_feedback(known: TestClient) -> None:
    page = known.get("/students/bob").text
    assert "check_window, check_len, check_calls" in page
    links = re.findall(r'href="([^"]*)"', page)
    assert links == ["/", f"/labs/{SLUG}", f"/feedback/bob/{SLUG}"]
    assert [known.get(link).status_code for link in links] == [200, 200, 200]
    assert "3 graded of 3 students" in known.get(f"/labs/{SLUG}").text


@pytest.mark.parametrize("path", ["/", f"/labs/{SLUG}", "/students/bob", f"/feedback/bob/{SLUG}", "/openapi.json"])
def test_nobody_without_the_token_and_no_other_page_gets_anything(course: Path, path: str) -> None:
    assert client(course).get(path).status_code == 403
    assert client(course).get(path, params={"token": "another"}).status_code == 403
    for host in ("rebound.example", "127.0.0.1.example:80", "0.0.0.0"):
        assert client(course, host).get(path, params={"token": TOKEN}).status_code == 403
    answer = client(course).get(path, params={"token": TOKEN}, follow_redirects=False)
    assert "samesite=strict" in answer.headers["set-cookie"].lower()
    assert "httponly" in answer.headers["set-cookie"].lower()


@pytest.mark.parametrize(
    "path",
    ["/students/nobody", "/labs/99_x", "/labs/..", "/feedback/bob/..", "/feedback/..%2f..%2fetc/passwd",
     f"/feedback/nobody/{SLUG}", "/students/%3Cscript%3E"],
)  # fmt: skip
def test_an_address_leads_to_nothing_but_the_course(known: TestClient, path: str) -> None:
    answer = known.get(path)
    assert answer.status_code == 404 or answer.url.path == "/"
    assert "<script>" not in answer.text or answer.headers["content-type"].startswith("text/plain")


def test_nothing_changes_by_looking(known: TestClient, course: Path) -> None:
    def files() -> dict[str, str]:
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(course.rglob("*.*"))
                if path.is_file()}  # fmt: skip

    before = files()
    for path in ("/", f"/labs/{SLUG}", "/students/ada", f"/feedback/ada/{SLUG}"):
        assert known.get(path).status_code == 200
        for method in ("POST", "PUT", "DELETE"):
            assert known.request(method, path).status_code == 405
    assert files() == before


def test_a_damaged_result_is_named_and_the_page_still_comes(known: TestClient, course: Path) -> None:
    path = course / "results" / SLUG / "bob.json"
    whole = path.read_bytes()
    path.write_text("{")
    try:
        assert "bob.json is damaged" in known.get("/").text
        assert rows(known.get("/").text)["ada"][0] == "6"
        assert rows(known.get("/").text)["bob"][0] == "0 damaged result"
        for page in ("/", f"/labs/{SLUG}"):
            assert f"inferlab grade run {SLUG} --student bob" in known.get(page).text
    finally:
        path.write_bytes(whole)


def test_what_a_student_is_called_is_text(known: TestClient, course: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from grader.reports import class_labs

    real = class_labs.scores

    def renamed(*arguments: Any) -> list[Any]:
        from dataclasses import replace

        return [replace(one, first_name="<script>alert(1)</script>\u202e") for one in real(*arguments)]

    monkeypatch.setattr(class_labs, "scores", renamed)
    for path in ("/", "/students/ada"):
        assert "<script" not in known.get(path).text
        assert "&lt;script&gt;" in known.get(path).text


def test_the_command_answers_at_the_address_that_it_prints(course: Path) -> None:
    command = [
        sys.executable,
        "-P",
        "-c",
        "from grader.cli import main; main()",
        "grade",
        "web",
        "--course",
        str(course),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            address = re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", running.stdout.readline())
            assert address is not None
            opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(), urllib.request.ProxyHandler({}))
            with opener.open(address[0], timeout=600) as answer:
                assert "ada" in rows(answer.read().decode())
        finally:
            running.terminate()


def test_a_course_without_labs_says_what_to_do(tmp_path: Path) -> None:
    inferlab("new-course", str(tmp_path / "empty"))
    found = client(tmp_path / "empty")
    assert "inferlab grade release 02" in found.get(f"/?token={TOKEN}").text
