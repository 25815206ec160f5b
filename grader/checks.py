"""What a lab's check cells import: randomness that a learner cannot foresee in grading, and can repeat otherwise.

For Triton kernels: `launch(kernel, grid, constants, x=x, ...)` and `compiled(...)`, see `grader.examination.kernels`.
For inputs that are drawn, in a notebook and in grading alike: `with drawn("check_append") as draw:`.
For memory that is only lent to the learner's code: `lent(cache.append)(k, v)`.
For arguments that the learner's code must not change: `unchanging(attend)(q, k, v)`.
For what must hold with any text that the learner's code may use as a mark: `texts_of("root_key")`.
For several roles: `with roles(4) as ranks:` and `together([...])`, see `grader.examination.roles`.

In a learner's notebook the secret is a fixed public default, so a failing check fails again. When graded, the examiner
sets a secret of its own for the run, and writes it into the result so that the run can be repeated.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from grader.examination.kernels import compiled, launch
from grader.examination.roles import Deadlock, roles, texts_of, together

if TYPE_CHECKING:
    import torch

__all__ = [
    "PUBLIC_SECRET", "Deadlock", "compiled", "drawn", "launch", "lent", "rng", "roles", "secret_seed", "seed",
    "texts_of", "together", "unchanging",
]  # fmt: skip

PUBLIC_SECRET = b"public"

_secret: ContextVar[bytes] = ContextVar("secret", default=PUBLIC_SECRET)


@contextmanager
def secret_seed(secret: bytes) -> Iterator[None]:
    """Lets `seed` and `rng` derive from `secret` inside the block."""
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


@contextmanager
def drawn(name: str) -> Iterator[torch.Generator]:
    """The part of a check whose inputs are drawn, from `rng(name)`. If it fails, the end of what it printed is
    shown."""
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            yield rng(name)
    except BaseException:
        print(*said.getvalue().splitlines()[-20:], sep="\n")
        raise
    print("... and the same for inputs that were drawn")


def lent(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, called with memory that is only lent, as by an engine that computes into the same memory each step.

    Each tensor among the arguments, also in a list, tuple or dict, becomes a copy of its own, which is overwritten when
    the call has returned or raised: with NaN, or with the smallest value of an integer's type. What the call returns is
    read before that, and what it changed in place in a copy is changed in the caller's tensor.
    """
    import torch

    from grader.learner_side.stand_ins import marked, overwrite

    def call(*args: Any, **kwargs: Any) -> Any:
        copies: dict[int, tuple[torch.Tensor, ...]] = {}  # by id: the tensor, its numbers, their copy, what is lent

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in copies:
                was = tensor.detach().clone(memory_format=torch.contiguous_format)
                copy = was.clone()
                copies[id(tensor)] = (tensor, was, copy, copy.detach())  # the function may give its own other memory
            return copies[id(tensor)][3]

        lent_args, lent_kwargs = _with_tensors((args, kwargs), copied)
        away = marked(function, "lent")
        try:
            if away is not None:  # the memory is in the learner's process, and so is what overwrites it
                return away(*lent_args, **lent_kwargs)
            return _with_tensors(function(*lent_args, **lent_kwargs), lambda tensor: tensor.detach().clone())
        finally:
            for tensor, was, copy, _ in copies.values():
                if not torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (was, copy))):
                    tensor.detach().copy_(copy)
                overwrite(copy)

    return call


def unchanging(function: Callable[..., Any], but: Sequence[int] = ()) -> Callable[..., Any]:
    """`function`, which must not change its arguments, except those at the positions `but`.

    AssertionError: a tensor, list, dict or set among the arguments, or in one, is not as it was when the call returns;
    the message names the argument. When graded the learner's process compares, since lists and dicts there are copies.
    """
    from grader.learner_side.stand_ins import answer_unchanging, marked

    away = marked(function, "unchanging", but)
    return away or (lambda *args, **kwargs: answer_unchanging(function, args, kwargs, but))


def _with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with its tensors changed, also inside lists, tuples and dicts; of these the built-in kind is made."""
    import torch

    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        items = [_with_tensors(item, change) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return {key: _with_tensors(item, change) for key, item in value.items()} if isinstance(value, dict) else value
