"""The class at a glance, as local web pages: who has which points in which lab, and the way to the details.

The pages change no grade: they only bring late penalties up to date, as a report does. They answer only this machine,
and only requests with the token of the address; they hold no script, load nothing, and escape whatever a student wrote.
"""

from __future__ import annotations

import functools
import secrets
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response

from grader.course import CourseError, released_labs
from grader.courses.scores import Score
from grader.reports.class_labs import class_labs
from grader.reports.report import make_report
from grader.reports.report_page import report_page
from grader.results.shown_text import shown_line

HOSTS = ("127.0.0.1", "localhost", "[::1]")
COOKIE = "inferlab_class"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
STEPS = (0.9, 0.7, 0.5)  # shares of the points from which a cell has another colour


def class_app(root: Path, token: str) -> FastAPI:
    """The pages of the course at `root`. A request must have `token`, once in the address, then as a cookie."""
    app = FastAPI(openapi_url=None)
    one_at_a_time = threading.Lock()  # the gradebook is one file

    @app.middleware("http")
    async def only_who_may(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        response = _refused(request, token) or await go_on(request)
        response.headers.update(HEADERS)
        return response

    def page(template: str, **values: Any) -> HTMLResponse:
        return HTMLResponse(_template().render(page=template, **values))

    @app.get("/")
    def overview() -> HTMLResponse:
        with one_at_a_time:
            labs = class_labs(root)
        people = {name: one for lab in labs for name, one in lab.scores.items()}
        rows = [(people[name], [(lab.scores.get(name), lab.unusual(name)) for lab in labs]) for name in sorted(people)]
        return page("class", labs=labs, rows=rows, course=root.name)

    @app.get("/labs/{slug}")
    def lab(slug: str) -> HTMLResponse:
        _known(slug, released_labs(root), "lab")
        try:
            with one_at_a_time:
                return HTMLResponse(report_page(make_report(root, slug)))
        except (CourseError, OSError, ValueError) as error:
            raise HTTPException(500, shown_line(str(error))) from None

    @app.get("/students/{student}")
    def one_student(student: str) -> HTMLResponse:
        with one_at_a_time:
            labs = class_labs(root)
        _known(student, [name for lab in labs for name in lab.scores], "student")
        rows = [
            (lab, lab.scores.get(student), lab.recorded.results.get(student), _feedback(root, student, lab.slug))
            for lab in labs
        ]
        person = next(lab.scores[student] for lab in labs if student in lab.scores)
        return page("student", person=person, rows=rows, course=root.name)

    @app.get("/feedback/{student}/{slug}")
    def feedback(student: str, slug: str) -> HTMLResponse:
        found = _feedback(root, student, slug)
        if found is None:
            raise HTTPException(404, f"no page yet; first: inferlab grade feedback {shown_line(slug)}")
        return HTMLResponse(found.read_text("utf-8"))

    @app.exception_handler(HTTPException)
    def problem(_: Request, error: HTTPException) -> PlainTextResponse:
        return PlainTextResponse(f"{error.detail}\n", error.status_code)

    return app


def _refused(request: Request, token: str) -> Response | None:
    """The reason why this request gets no page, or None. Under another host name it comes from a page of another
    site."""
    host = request.headers.get("host", "")
    if (host if host.endswith("]") else host.rsplit(":", 1)[0]) not in HOSTS:
        return PlainTextResponse("these pages are for this machine only: http://127.0.0.1\n", 403)
    given = request.query_params.get("token", "")
    if secrets.compare_digest(given.encode(), token.encode()):
        answer = RedirectResponse(request.url.path, 303)
        answer.set_cookie(COOKIE, token, httponly=True, samesite="strict")
        return answer
    if not secrets.compare_digest(request.cookies.get(COOKIE, "").encode(), token.encode()):
        return PlainTextResponse("expected the address with its token, as `inferlab grade web` printed it\n", 403)
    return None


def _known(name: str, known: list[str], what: str) -> None:
    if name not in known:
        raise HTTPException(404, f"no {what} {shown_line(name)} in this course")


def _feedback(root: Path, student: str, slug: str) -> Path | None:
    """A student's page, found by listing: a name in an address leads nowhere else."""
    for folder in (root / "feedback").glob("*/*"):
        if (folder.parent.name, folder.name) == (student, slug):
            return next(iter(sorted(folder.glob("*.html"))), None)
    return None


def _colour(score: Score | None) -> str:
    """The class of a cell in the table."""
    if score is None or score.total is None:
        return "none"
    share = score.total / score.max_score if score.max_score else 0.0
    return f"step{sum(share < step for step in STEPS)}"


@functools.cache
def _template() -> Any:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"line": shown_line, "points": lambda value: f"{value:.4g}", "colour": _colour}
    return environment.from_string(Path(__file__).with_name("class.html").read_text("utf-8"))


def serve(root: Path, port: int) -> None:
    """Answers until Ctrl-C. port: 0 for a free one. Raises OSError where the port is taken."""
    import socket

    import uvicorn

    token = secrets.token_urlsafe(24)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(("127.0.0.1", port))
        sock.listen()  # clients that come before the server is ready wait
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"port {port} of this machine is taken; another: --port 0") from None
    with sock:
        print(f"The class: http://127.0.0.1:{sock.getsockname()[1]}/?token={token}")
        print("The pages name students. Stop with Ctrl-C.", flush=True)
        config = uvicorn.Config(class_app(root, token), log_level="warning", access_log=False)
        uvicorn.Server(config).run(sockets=[sock])
