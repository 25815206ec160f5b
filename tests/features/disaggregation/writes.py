"""What tests of transports do over and over."""

from __future__ import annotations

import random
import time
from concurrent.futures import Future

import pytest

from reference_impl.features.disaggregation.transports.interface import (
    Link,
    WriteError,
)

LONG = 120.0  # seconds, for what would hang
KINDS = ["shared_memory", "tcp", pytest.param("nixl", marks=pytest.mark.nixl)]


def soon(seconds: float = LONG) -> float:
    return time.monotonic() + seconds


def page(number: int, length: int) -> memoryview:
    return memoryview(random.Random(number).randbytes(length))


def write(link: Link, pages: list[tuple[memoryview, int]]) -> None:
    link.write(pages, soon()).result(LONG)


def failed(future: Future[None]) -> WriteError:
    error = future.exception(LONG)
    assert isinstance(error, WriteError)
    return error
