"""A field of one line in which Enter does something with what stands in it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from ipywidgets import Layout, Text

_TOGETHER = 1.0  # seconds between two messages of one key press


def one_line(label: str, enter: Callable[[], None], **options: Any) -> Text:
    """A field whose Enter key calls `enter`, with the whole of what was typed as its value.

    A front end sends the key and the text as two messages, in either order. A field that sends each letter would not
    do: while the kernel is busy letters wait, the key overtakes them, and half a number would be taken for the answer.
    """
    layout = Layout(width="36em", max_width="98%")
    field = Text(
        description=label,
        continuous_update=False,
        style={"description_width": "initial"},
        **({"layout": layout} | options),
    )
    waiting, changed = False, -math.inf

    def on_text(change: Any) -> None:
        nonlocal waiting, changed
        changed = time.monotonic()
        if waiting:
            waiting = False
            enter()

    def on_key(widget: Text, content: Any, buffers: Any) -> None:
        nonlocal waiting
        if content.get("event") != "submit":
            return
        waiting = time.monotonic() - changed > _TOGETHER
        if not waiting:
            enter()

    field.observe(on_text, "value")
    field.on_msg(on_key)
    return field
