"""How an answer goes out: as one body, or as server-sent events; and what is sent where the engine does not answer."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from starlette.types import Send

from reference_impl.serving import answers
from reference_impl.serving.answers import Shape
from reference_impl.serving.connection import EVENTS, send_json
from reference_impl.serving.refusals import Refused
from reference_impl.serving.runner import Failed, Restarting, Stream, Unavailable

logger = logging.getLogger("inferlab.serving")
RESTART_SECONDS = 5


def retry_header(again: bool) -> dict[str, str] | None:
    """The header that says when to send a request again, if the engine's restart ended it or refused it; else None."""
    return {"Retry-After": str(RESTART_SECONDS)} if again else None


def unavailable(error: Unavailable) -> Refused:
    return Refused(503, str(error), headers=retry_header(isinstance(error, Restarting)))


def as_events(shape: Shape, stream: Stream) -> Callable[[Send], Coroutine[Any, Any, None]]:
    async def respond(send: Send) -> None:
        await send(EVENTS)

        async def write(body: bytes, more: bool = True) -> None:
            if body or not more:
                await send({"type": "http.response.body", "body": body, "more_body": more})

        await write(shape.start_events(stream.num_samples))
        try:
            async for pieces in stream:
                await write(shape.events(pieces))
        except Unavailable as reason:
            await write(answers.event(answers.error(str(reason), "server_error")), more=False)
        except OSError:  # the client has gone
            raise
        except Exception as error:
            await write(answers.event(_not_written(error)), more=False)
        else:
            await write(shape.end_events(stream.usage), more=False)

    return respond


def _not_written(error: Exception) -> dict[str, Any]:
    """The error that a client gets when its answer cannot be written; other requests go on."""
    logger.error("an answer cannot be written", exc_info=error)
    return answers.error(f"the answer cannot be written: {type(error).__name__}: {error}", "server_error")


def as_a_whole(whole: Callable[[], Awaitable[dict[str, Any]]]) -> Callable[[Send], Coroutine[Any, Any, None]]:
    async def respond(send: Send) -> None:
        try:
            content = await whole()
        except Unavailable as error:
            status, retry = 500 if isinstance(error, Failed) else 503, retry_header(isinstance(error, Restarting))
            await send_json(send, answers.error(str(error), "server_error"), status, retry)
        except Exception as error:
            await send_json(send, _not_written(error), 500)
        else:
            await send_json(send, content)

    return respond
