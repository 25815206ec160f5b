"""Programs of the bench in forks of a Python that has imported torch, and nothing else that a bench needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from tests import warm


@pytest.fixture(scope="session")
def torch_imported() -> Iterator[warm.Warm]:
    made = warm.Warm("torch", "numpy")
    yield made
    made.close()


@pytest.fixture(scope="session")
def forked(torch_imported: warm.Warm) -> Callable[[Sequence[str]], list[str]]:
    """forked(arguments): the command line that does what `python *arguments` does, which begin with -c or -m. What is
    appended to it is appended to them."""

    return torch_imported.command
