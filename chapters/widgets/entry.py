"""A field of one line in which Enter does something with what stands in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ipywidgets import Layout, Text

TOGETHER = 0.5  # seconds that the text may come after its Enter key


def one_line(label: str, enter: Callable[[], None], **options: Any) -> Text:
    """A field whose Enter key calls `enter`, with the whole of what was typed as its value.

    A front end sends the key first, and then the text, if it differs from what was sent last: a field that was left
    and entered again sends the key alone. So a key waits for a text, and after `TOGETHER` takes what stands in the
    field. A field that sends each letter would not do: while the kernel is busy letters wait, the key overtakes them,
    and half a number would be taken for the answer.

    The key is a message of the kernel's event loop, and must come while that loop runs.
    """
    layout = Layout(width="36em", max_width="98%")
    field = Text(
        description=label,
        continuous_update=False,
        style={"description_width": "initial"},
        **({"layout": layout} | options),
    )
    waiting: asyncio.TimerHandle | None = None

    def take(change: Any = None) -> None:
        nonlocal waiting
        if waiting is not None:
            waiting.cancel()
            waiting = None
            enter()

    def on_key(widget: Text, content: Any, buffers: Any) -> None:
        nonlocal waiting
        if content.get("event") == "submit" and waiting is None:
            waiting = asyncio.get_running_loop().call_later(TOGETHER, take)

    field.observe(take, "value")
    field.on_msg(on_key)
    return field
