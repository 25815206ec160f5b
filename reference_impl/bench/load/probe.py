"""What is found out before a load: connections, which model there is, and which form of request the server accepts."""

from __future__ import annotations

import asyncio

import httpx

from reference_impl.bench.load.client import Client, Form, words
from reference_impl.simulation.workloads import WorkloadRequest

# Idle connections are closed before the server closes them (uvicorn: after 5 s) under a new request.
IDLE_SECONDS = 2.0


class ServerError(Exception):
    """The server cannot be used for a load; the message says why."""


def connect(api_key: str | None = None) -> httpx.AsyncClient:
    """A client with a connection for every request, and no proxy: a pool that is full would queue in the client."""
    return httpx.AsyncClient(
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_SECONDS),
        timeout=None,
        trust_env=False,
        headers={"accept-encoding": "identity"} | ({"authorization": f"Bearer {api_key}"} if api_key else {}),
    )


async def first_model(http: httpx.AsyncClient, base_url: str) -> str:
    """The id of the first model that the server lists. Raises ServerError where it lists none."""
    try:
        response = await http.get(f"{base_url}/v1/models", timeout=30.0)
    except (httpx.RequestError, httpx.InvalidURL) as error:
        kind = "not connected" if isinstance(error, httpx.ConnectError) else "request failed"
        raise ServerError(_hinted(f"no answer from {base_url}/v1/models ({words(error)})", kind)) from None
    said = f"HTTP {response.status_code}: {response.text[:200]}"
    try:
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPStatusError, ValueError, LookupError, TypeError):
        kind = f"HTTP {response.status_code}"
        what = f"{base_url}/v1/models did not name a model ({said})"
        raise ServerError(_hinted(what, kind) if kind in HINTS else f"{what}: give --model") from None


async def choose_form(client: Client, forms: list[Form]) -> list[str]:
    """Sets client.form to the first that the server accepts; returns its answers to those it refused.

    Refused is an answer 400, 404, 415 or, of other servers, 422. ServerError for any other failure, and where all
    are refused.
    """
    refused: list[str] = []
    answers: set[str] = set()
    for form in forms:
        client.form = form
        request = WorkloadRequest("probe", 0.0, 8, 1, ())
        outcome = await client.send(request, client.body(request), asyncio.get_running_loop().time())
        if outcome.error is None or outcome.error == "no tokens":
            return refused
        if outcome.error not in ("HTTP 400", "HTTP 404", "HTTP 415", "HTTP 422"):
            what = f"a first small request failed: {outcome.error}: {outcome.detail}"
            raise ServerError(_hinted(what, outcome.error))
        answers.add(f"{outcome.error}: {outcome.detail}")
        refused.append(f"{form}: {outcome.error}: {outcome.detail}")
    what = "the server accepts none of the known forms of request"
    if len(answers) > 1:
        raise ServerError(f"{what}:\n" + "\n".join(refused))
    raise ServerError(_hinted(f"{what}; its answer to each is {answers.pop()}", outcome.error))


HINTS = {
    "not connected": "start a server there, or give another --base-url",
    "HTTP 401": "give its key with --api-key",
    "HTTP 403": "give a key that may do this with --api-key",
    "HTTP 404": "give the model that it serves with --model, and --chat if it has chat completions only",
}


def _hinted(what: str, kind: str | None) -> str:
    return f"{what}: {HINTS[kind]}" if kind in HINTS else what


def forms(chat: bool, text: bool) -> list[Form]:
    """The forms to try, from the most telling to one that the plainest server accepts."""
    every = [Form(chat, ids, eos, usage) for usage in (True, False) for eos in (True, False) for ids in (True, False)]
    return [form for form in every if not (form.token_ids and (chat or text))]
