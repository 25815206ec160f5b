"""Programs of the bench in forks of a Python that has imported torch, and nothing else that a bench needs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests import warm

# What stands for a fork, and is killed by the signal that the fork was killed by.
_STANDS_FOR_IT = f"""
import json, os, runpy, sys
status = runpy.run_path({warm.__file__!r})["run"](sys.argv[1], json.loads(sys.argv[2]) + sys.argv[3:])
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


@pytest.fixture(scope="session")
def torch_imported() -> Iterator[warm.Warm]:
    made = warm.Warm("torch", "numpy")
    yield made
    made.close()


@pytest.fixture(scope="session")
def forked(torch_imported: warm.Warm) -> Callable[[Sequence[str]], list[str]]:
    """forked(arguments): the command line that does what `python *arguments` does, which begin with -c or -m. What is
    appended to it is appended to them."""

    def command(arguments: Sequence[str]) -> list[str]:
        words = [torch_imported._address, json.dumps(list(arguments))]
        return [sys.executable, "-I", "-S", "-c", _STANDS_FOR_IT, *words]

    return command
