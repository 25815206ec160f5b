"""What is refused, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}; which status: see app.py."""

from __future__ import annotations

from typing import Any

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException

from reference_impl.models.json_file import shown
from reference_impl.serving import answers
from reference_impl.serving.protocol import NOT_IMPLEMENTED, OF_A_FIELD, ErrorAnswer

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": text}
    for status, text in (
        (400, "Bad JSON, a wrong field, or a prompt that the engine refuses"),
        (401, "API key missing or wrong"), (404, "No such model or request"),
        (408, "The body did not come"), (413, "The body is too long"), (415, "Not JSON"),
        (429, "Too many unfinished requests"), (500, "The model gave numbers that are not finite"),
        (503, "The engine does not serve"),
    )
}  # fmt: skip


def refusal(
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    """An error in OpenAI's shape."""
    kind = "server_error" if status >= 500 else _KINDS.get(status, "invalid_request_error")
    return JSONResponse(answers.error(message, kind, param, code), status, headers)


class Refused(Exception):
    def __init__(self, status: int, message: str, **details: Any):
        self.status, self.message, self.details = status, message, details


def check_characters(text: str, place: str) -> None:
    r"""Raises Refused for half a character ("\ud83d"), which JSON can hold and no tokenizer can encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{place}: half a surrogate pair at character {error.start}, which is no character"
        raise Refused(400, message, param=place, code="invalid_value") from None


async def _refused(request: Request, error: Refused) -> Response:
    return refusal(error.status, error.message, **error.details)


async def _http_error(request: Request, error: HTTPException) -> Response:
    if error.status_code == 400:  # what FastAPI raises for a body that json cannot read
        cause = error.__cause__
        why = "brackets too deep" if isinstance(cause, RecursionError) else str(cause)
        return refusal(400, f"body: not JSON: {why}", param="body")
    return refusal(error.status_code, str(error.detail), headers=dict(error.headers or {}))


async def _wrong_field(request: Request, error: RequestValidationError) -> Response:
    """A refusal that says where the first mistake is, what was expected there, what came, and how many more there
    are."""
    first, *others = error.errors()
    place = [str(part) for part in first["loc"][1:]] or ["body"]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        why = first.get("ctx", {}).get("error", message).removesuffix(" at")
        place, message = ["body"], f"the body is not JSON: {why} at character {place[0]}"
    elif first["type"] in (NOT_IMPLEMENTED, OF_A_FIELD):
        place = [first["ctx"]["field"]]
    elif first["type"] not in ("missing", "extra_forbidden"):
        message += f", got {shown(first['input'])}"
    more = f" ({len(others)} more)" if others else ""
    return refusal(400, f"{'.'.join(place)}: {message}{more}", param=".".join(place), code=_code(first["type"]))


def _code(kind: str) -> str:
    """OpenAI's word for one of pydantic's kinds of error."""
    if kind.endswith("_type"):
        return "invalid_type"
    return {
        "missing": "missing_required_parameter", "extra_forbidden": "unknown_parameter",
        NOT_IMPLEMENTED: "unsupported_parameter", "json_invalid": "invalid_json",
    }.get(kind, "invalid_value")  # fmt: skip


HANDLERS = ((RequestValidationError, _wrong_field), (StarletteHTTPException, _http_error), (Refused, _refused))
