"""What a step enters: functions and files of the package, in the order of their calls."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any


def entered(step: Callable[[], Any], package: Path) -> list[tuple[str, str]]:
    """(file, function) of each function of the package that `step` enters, once each; comprehensions do not count.

    Only in this thread: torch's own threads run none of it.
    """
    root, found = f"{package}/", dict[tuple[str, str], None]()

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root):
            name = getattr(code, "co_qualname", code.co_name)  # Python 3.11
            if not name.split(".")[-1].startswith("<") or "lambda" in name:
                found[code.co_filename[len(root) :], name] = None

    assert threading.current_thread() is threading.main_thread()
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(before)
    return list(found)
