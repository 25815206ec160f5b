"""One attack on the sandbox: a learner's process, hostile code in it, and what that code reports."""

from __future__ import annotations

import textwrap
from typing import Any

from grader.isolation.launcher import Launcher, LearnerProcess
from grader.learner_side.peer import Peer

# For every trial: which of several attempts did not end in the operating system's refusal.
COMMON = """
    def possible(tries):
        found = []
        for name, attempt in tries.items():
            try:
                attempt()
                found.append(name)
            except OSError:
                pass
        return found
    def worked(answer):
        if answer == -1:
            raise OSError
"""
CALL_SECONDS = 300.0  # for what hangs; to fill memory takes minutes where a virtual machine gives it out slowly


class Trial:
    """One learner's process in which a piece of hostile code has been run; `ask` calls its functions."""

    def __init__(self, launcher: Launcher, source: str, seconds: float = CALL_SECONDS):
        self.process: LearnerProcess = launcher.fork()
        self.peer = Peer(self.process.connection, strict=True, call_seconds=seconds)
        cells = [[textwrap.dedent(text), "trial"] for text in (COMMON, source)]
        self.peer.request({"m": "cells"}, cells)

    def ask(self, name: str, *args: Any) -> Any:
        """What function `name` returned, or the exception it raised, as text. Raises OSError: the process is gone."""
        try:
            return self.peer.request({"m": "names"}, [name])[name](*args)
        except Exception as error:
            if not hasattr(error, "learner_type"):
                raise  # it was not raised there: the process is gone, or took too long
            return f"{error.learner_type}: {error}"

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.end()
