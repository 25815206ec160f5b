"""What a lab's check cells import: randomness that a learner cannot foresee in grading, and can repeat otherwise.

For several roles: `with roles(4) as ranks:` and `together([...])`, see `grader.examination.roles`.

In a learner's notebook the secret is a fixed public default, so a failing check fails again. When graded, the examiner
sets a secret of its own for the run, and writes it into the result so that the run can be repeated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from grader.examination.roles import Deadlock, roles, together

if TYPE_CHECKING:
    import torch

__all__ = ["PUBLIC_SECRET", "Deadlock", "rng", "roles", "secret_seed", "seed", "together"]

PUBLIC_SECRET = b"public"

_secret: ContextVar[bytes] = ContextVar("secret", default=PUBLIC_SECRET)


@contextmanager
def secret_seed(secret: bytes) -> Iterator[None]:
    """While this lasts, `seed` and `rng` derive from `secret`."""
    token = _secret.set(secret)
    try:
        yield
    finally:
        _secret.reset(token)


def seed(name: str) -> int:
    """An integer in [0, 2**63) for the check or purpose `name`."""
    return int.from_bytes(hashlib.sha256(_secret.get() + b"/" + name.encode()).digest()[:8], "big") >> 1


def rng(name: str) -> torch.Generator:
    """A fresh CPU torch.Generator for the check or purpose `name`; the same numbers at every call."""
    import torch

    return torch.Generator().manual_seed(seed(name))
