"""nbgrader's formgrader over a hostile class: nothing that a student wrote becomes a part of its pages or runs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
import pytest
import websocket
from hypothesis import given
from hypothesis import strategies as st
from nbformat.v4 import new_code_cell, new_markdown_cell, new_output, new_raw_cell

from grader.courses.disarm import disarm
from grader.results.shown_text import fenced, unfenced

TOY = Path(__file__).parents[1] / "toy_lab" / "solutions" / "01_toy" / "toy.py"
ESSAY = """
# %% [markdown] nbgrader={"grade_id": "essay", "grade": true, "solution": true, "points": 2}
# Why?
"""
# What runs if a payload does: it marks the page and calls the server.
RUN = (
    "document.documentElement.setAttribute('ran','NAME');"
    "fetch('/api/contents',{method:'POST',headers:{'X-XSRFToken':document.cookie.match(/_xsrf=([^;]+)/)[1]}})"
)
NAME = "<img src=x onerror=document.documentElement.setAttribute('ran','name')>"
TOKEN = "a-token-of-the-test"
PAYLOADS = {
    "script": "<script>RUN</script>",
    "img": '<img src=x onerror="RUN">',
    "svg": '<svg onload="RUN"></svg>',
    "srcdoc": "<iframe srcdoc=\"<script>parent.eval('RUN2')</script>\"></iframe>",
    "link": "[Click](javascript:RUN) <a href='javascript:eval(1)'>x</a> <javascript:RUN>",
    "style": "<style>body{display:none}</style><link rel=stylesheet href=//evil.example><base href=//evil.example>",
    "form": '<form action=/hub><input autofocus onfocus="RUN"></form>',
    "closes-tags": "</div></div></pre></code></body></html>--><!-- --> ]]> <script>RUN</script>",
    "closes-fence": "```\n</code></pre><script>RUN</script>\n```\n~~~\n~~~\n<script>RUN</script>",
    "longer-fence": "````\n`````````\n<script>RUN</script>\n`````````",
    "looks-fenced": "```\na\n```\n<script>RUN</script>\n```\nb\n```",
    "line-ends": "a\r```\r<script>RUN</script>\x0b```\x0c```\u2028```\u2029```\x85<script>RUN</script>",
    "math": r"$$\href{javascript:RUN}{x}$$ $\style{x:expression(1)}{<script>RUN</script>}$ $<script>RUN</script>$",
    "math-around": "$a\n```\n<script>RUN</script>\n$b",
    "environment": "\\begin{equation}<script>RUN</script>\\end{equation}",
    "attachment": "![x](attachment:evil.html) ![y](attachment:evil.svg)",
    "template": "{{ 7 * 7 }} {% raw %} {# #} {{ cell.__class__ }}",
    "reference": '[a]: javascript:RUN "x"\n[a]\n\n| <b>x</b> |\n|---|\n| <i>y</i> |',
    "mermaid": '```mermaid\nflowchart LR\nA["<img src=x onerror=RUN>"]\nclick A href "javascript:RUN"\n```',
}


def payload(name: str) -> str:
    run = RUN.replace("NAME", name)
    return PAYLOADS[name].replace("RUN2", run.replace("'", '"').replace('"', "&quot;")).replace("RUN", run)


def cells_with(text: str, name: str) -> list[Any]:
    """The text as each kind of cell, with every kind of output, attachment and metadata that a page may show."""
    script = f"<script>{RUN.replace('NAME', name + '-output')}</script>"
    evil = {"evil.html": {"text/html": script}, "evil.svg": {"image/svg+xml": f"<svg>{script}</svg>"}}
    cells = [
        new_markdown_cell(text, attachments=evil, metadata={"nbgrader": {"grade_id": text, "solution": True}}),
        new_raw_cell(text, metadata={"raw_mimetype": "text/html", "format": "text/html"}),
        new_code_cell(f"%%html\n{text}", metadata={"magics_language": text}),
    ]
    cells[-1].outputs = [
        new_output("display_data", data={"text/html": script}),
        new_output("display_data", data={"application/javascript": RUN.replace("NAME", name + "-js")}),
        new_output("display_data", data={"image/svg+xml": f"<svg>{script}</svg>", "text/markdown": text}),
        new_output("display_data", data={"text/latex": text}),
        new_output("display_data", data={"application/vnd.jupyter.widget-view+json": {"model_id": text}}),
        new_output("error", ename=text, evalue=text, traceback=[text, script]),
        new_output("stream", name="stderr", text=text),
    ]
    return cells


def widgets() -> dict[str, Any]:
    state = {"x": {"model_name": "HTMLModel", "model_module": "</script><script>" + RUN, "state": {"value": "<b>"}}}
    return {"application/vnd.jupyter.widget-state+json": {"state": state, "version_major": 2}}


@pytest.fixture(scope="session")
def release(made_once: Callable[[str, Callable[[Path], None]], Path]) -> dict[str, Any]:
    """The toy lab with a question that a person grades, as students get it."""
    from grader.labs.lab_source import released_notebook, solution_notebook, write_notebook

    def make(folder: Path) -> None:
        (folder / "01_toy").mkdir()
        (folder / "01_toy" / "toy.py").write_text(TOY.read_text("utf-8") + ESSAY, "utf-8")
        made = released_notebook(write_notebook(solution_notebook(folder / "01_toy" / "toy.py")), "01_toy", "toy")
        (folder / "toy.ipynb").write_text(made, "utf-8")

    found: dict[str, Any] = json.loads((made_once("essay", make) / "toy.ipynb").read_text("utf-8"))
    return found


class Tags(HTMLParser):
    """The elements of a page with their attributes; without what colours code, which depends on the code."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, Any]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag != "span" or [name for name, _ in attrs] not in ([], ["class"]):
            self.found.append((tag, attrs))


def formgrader_page(nb: Any) -> str:
    """What the formgrader makes of an autograded notebook, without the server around it."""
    from nbconvert.exporters import HTMLExporter
    from nbgrader.server_extensions.formgrader import handlers

    exporter = HTMLExporter(template_name="formgrade", extra_template_basedirs=[handlers.template_path])
    resources = {"notebook_id": "toy", "index": 0, "total": 1, "base_url": "", "student": "ada", "submission_id": "1",
                 "assignment_id": "01_toy", "notebook_path": "/x"}  # fmt: skip
    return str(exporter.from_notebook_node(nb, resources)[0])


def submission(release: dict[str, Any], texts: dict[str, str]) -> Any:
    """The lab with a text in each of its cells that a student writes, and in cells of their own for each of `texts`."""
    nb = nbformat.reads(json.dumps(release), as_version=4)
    text = "\n".join(texts.values())
    nb.metadata["title"], nb.metadata["widgets"] = text, widgets()
    for cell in nb.cells:
        cell.metadata["more"] = text
        if cell.id == "essay":
            cell.source, cell.attachments = text, {"evil.html": {"text/html": text}}
        if cell.id == "Window":
            cell.source, cell.outputs = text, [new_output("display_data", data={"text/html": text})]
    nb.cells += [cell for name, one in texts.items() for cell in cells_with(one, name)]
    return nb


@pytest.mark.parametrize("name", PAYLOADS)
def test_no_element_of_the_formgraders_page_comes_from_a_student(release: dict[str, Any], name: str) -> None:
    pages = []
    for text in (payload(name), "words"):
        nb = submission(release, {name: text})
        disarm(nb, release)
        nbformat.validate(nb)
        pages.append(formgrader_page(nb))
    assert Tags(pages[0]).found == Tags(pages[1]).found
    assert nb.metadata == nbformat.from_dict(release["metadata"])


def test_the_labs_own_text_stays_as_it_is_and_a_students_is_shown_as_it_was_typed(release: dict[str, Any]) -> None:
    nb = submission(release, {"x": "*a* <b>"})
    disarm(nb, release)
    disarm(nb, release)  # what has been made harmless stays as it is
    by_id = {cell.id: cell for cell in nb.cells}
    assert by_id["intro"].source.startswith("# A toy lab")
    assert by_id["essay"].source == "```\n*a* <b>\n```"
    assert by_id["essay"].metadata["nbgrader"]["points"] == 2
    page = formgrader_page(nb)
    assert "<h1" in page
    assert "*a* &lt;b&gt;" in page


def test_an_answer_that_was_not_changed_keeps_its_checksum(release: dict[str, Any]) -> None:
    """nbgrader gives such an answer no points without asking a person."""
    from nbgrader.utils import compute_checksum

    nb = nbformat.reads(json.dumps(release), as_version=4)
    disarm(nb, release)
    essay = next(cell for cell in nb.cells if cell.id == "essay")
    assert compute_checksum(essay) == essay.metadata.nbgrader["checksum"]


@given(st.text(st.sampled_from("`~\n\r\t <a$") | st.characters(), max_size=60))
def test_a_fence_holds_any_text_and_gives_it_back(text: str) -> None:
    from nbconvert.filters.markdown_mistune import markdown2html_mistune as html

    plain = text.replace("\r\n", "\n").replace("\r", "\n")
    assert unfenced(fenced(text)) in (plain, unfenced(plain))
    assert fenced(fenced(text)) == fenced(text)
    assert {tag for tag, _ in Tags(html(fenced(text))).found} == {"pre", "code"}


class Browser:
    """A tab of a headless Chromium, by its DevTools. Only this machine can be reached from it."""

    def __init__(self, folder: Path) -> None:
        program = next(filter(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
        words = [program, "--headless", "--no-sandbox", "--disable-gpu", "--no-proxy-server", "--window-size=1400,2000",
                 "--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
                 "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]  # fmt: skip
        self._process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        said = next(line for line in self._process.stderr if "DevTools listening on" in line)
        threading.Thread(target=self._process.stderr.read, daemon=True).start()
        address = said.split("ws://")[1].split("/")[0]
        tabs = json.loads(urllib.request.urlopen(f"http://{address}/json", timeout=600).read())
        page = next(tab for tab in tabs if tab["type"] == "page")
        self._socket = websocket.create_connection(page["webSocketDebuggerUrl"], suppress_origin=True, timeout=600)
        self._number = 0

    def call(self, method: str, **params: Any) -> Any:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while (answer := json.loads(self._socket.recv())).get("id") != self._number:
            pass
        return answer["result"]

    def value(self, expression: str) -> Any:
        """What an expression of the page is, once it is no longer a promise."""
        done = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def open(self, url: str, until: str) -> None:
        """Go to a page, and wait until an expression is true there."""
        end = time.monotonic() + 300
        for address, there in (("about:blank", "location.href == 'about:blank'"), (url, until)):
            self.call("Page.navigate", url=address)
            while not self.value(f"document.readyState == 'complete' && !!({there})"):
                assert time.monotonic() < end, self.value("location.href + document.body.innerText")[-3000:]
                time.sleep(0.05)

    def close(self) -> None:
        with contextlib.suppress(OSError, websocket.WebSocketException):
            self.call("Browser.close")
        self._process.wait(600)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    opened = Browser(tmp_path / "profile")
    yield opened
    opened.close()


@pytest.fixture
def hostile_course(course: Path, tmp_path: Path, release: dict[str, Any], grade: Callable[..., str]) -> Path:
    """A class with one student more, whose name and notebook hold every payload."""
    sheet = f'student id,first name,last name\nmallory,"<script>{RUN.replace("NAME", "first")}</script>","{NAME}"\n'
    (tmp_path / "roster.csv").write_text(sheet, "utf-8")
    handed = tmp_path / "handed" / "mallory.ipynb"
    handed.parent.mkdir()
    lab = json.loads((course / "labs" / "01_toy" / "toy.ipynb").read_text("utf-8"))
    handed.write_text(nbformat.writes(submission(lab, {name: payload(name) for name in PAYLOADS})), "utf-8")
    grade("roster", str(tmp_path / "roster.csv"), "--course", str(course))
    grade("collect", "01", str(handed.parent), "--course", str(course))
    grade("run", "01", "--workers", "1", "--course", str(course))
    return course


@pytest.fixture
def server(hostile_course: Path, tmp_path: Path, reserved_port: int) -> Iterator[str]:
    """JupyterLab with nbgrader's formgrader in the course folder, as the guide starts it; its address."""
    words = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", f"--port={reserved_port}",
             "--ip=127.0.0.1", f"--IdentityProvider.token={TOKEN}"]  # fmt: skip
    own = {name: str(tmp_path / name) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")}
    process = subprocess.Popen(words, cwd=hostile_course, env={**os.environ, **own}, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)  # fmt: skip
    url = f"http://127.0.0.1:{reserved_port}"
    while process.poll() is None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/api?token={TOKEN}", timeout=600).read()
            break
        time.sleep(0.1)
    yield url
    process.terminate()
    process.wait(600)


def what_ran(browser: Browser, root: Path) -> list[str]:
    """Marks that payloads left on the page or on the server, after one of our own that does the same has left its."""
    # An image fails after those that were there before; a click and the focus are what a person might do.
    browser.value("document.querySelectorAll('a[href^=\"javascript:\" i]').forEach(link => link.click())")
    browser.value("document.querySelectorAll('[autofocus]').forEach(field => field.focus())")
    browser.value("""new Promise(done => { const image = new Image(); image.src = 'x-not-there';
        image.onerror = () => fetch('/api/contents?' + Math.random()).then(() => setTimeout(done, 0)) })""")
    frames = browser.value("[...document.querySelectorAll('iframe')].map(frame => frame.srcdoc || frame.src)")
    on_page = browser.value("document.documentElement.getAttribute('ran')")
    return [*frames, *([on_page] if on_page else []), *sorted(path.name for path in root.glob("untitled*"))]


@pytest.mark.browser
@pytest.mark.slow
def test_nothing_of_a_student_runs_in_the_formgrader(hostile_course: Path, server: str, browser: Browser) -> None:
    from grader.courses.late import gradebook

    with gradebook(hostile_course, "01_toy") as book:
        number = book.find_submission_notebook("toy", "01_toy", "mallory").id
    pages = {
        f"/formgrader/submissions/{number}/": "document.querySelectorAll('.cell').length > 40",
        "/formgrader/gradebook/01_toy/toy": "document.querySelectorAll('tbody tr').length > 5",
        "/formgrader/manage_students": "document.querySelectorAll('tbody tr').length > 5",
        "/formgrader/manage_students/mallory": "document.querySelectorAll('tbody a').length > 0",
        "/formgrader/manage_submissions/01_toy": "document.querySelectorAll('tbody tr').length > 5",
        "/lab/tree/autograded/mallory/01_toy/toy.ipynb": "document.querySelectorAll('.jp-MarkdownOutput').length > 0",
        "/lab/tree/submitted/mallory/01_toy/toy.ipynb": "document.querySelectorAll('.jp-MarkdownOutput').length > 0",
    }
    browser.open(f"{server}/login?next=/api/status&token={TOKEN}", "document.body.innerText.includes('started')")
    for path, until in pages.items():
        browser.open(f"{server}{path}", until)
        assert what_ran(browser, hostile_course) == [], path
