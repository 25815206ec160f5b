"""Right functions that are given nothing: each zeroes the tensors and empties the lists and dicts that it gets, in
place, and then does what the lab asks.

    python -m tests.labs.zeroed solutions/02_kv_cache/kv_cache.py

prints, as JSON, per function or method of the lab's solution what each check made of it that called it with a tensor in
which a number was not 0, or with a list or dict that was not empty: one function at a time, the others as they are. A
check that passes computes what it expects from what the learner's code had in its hands.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from grader.checks import secret_seed
from grader.examination.examiner import prepare
from grader.examination.reference import Reference, run_cell
from grader.examination.submission import Submission
from grader.labs.lab import Cell, Lab
from grader.labs.percent_file import percent_lab
from grader.learner_side.peer import LAB_MODULE
from grader.proofs.direct import compute_as_in_a_learners_process, kept_kernels
from grader.proofs.proof import Reached
from tests.labs.shadows import quicken

SECRET = b"zeroed"


def tensors_in(value: Any) -> Iterator[Any]:
    """The tensors among arguments, also in lists, tuples and dicts."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def zeroing(function: Callable[..., Any], saw: Callable[[], None], own: frozenset[str]) -> Callable[..., Any]:
    """`function` after its tensor arguments were zeroed, and its lists and dicts emptied; `saw` is called where there
    was something in one. own: the files of a learner's cells, whose lists are their own to empty."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = list(tensors_in((args, kwargs)))
        emptied = [value for value in (*args, *kwargs.values()) if isinstance(value, list | dict)]
        if not own.isdisjoint(files_that_call(sys._getframe(1))):
            emptied = []
        if any(emptied) or any(bool((tensor != 0).any()) for tensor in given):
            saw()
        for tensor in given:
            with contextlib.suppress(RuntimeError):  # a view in which numbers share their memory
                tensor.zero_()
        for value in emptied:
            value.clear()
        return function(*args, **kwargs)

    return call


def files_that_call(frame: FrameType | None) -> Iterator[str]:
    """The files of a frame and of all that called it."""
    while frame is not None:
        yield frame.f_code.co_filename
        frame = frame.f_back


def functions_of(name: str, found: Any) -> Iterator[tuple[Any, str]]:
    """(object, attribute) of what can be zeroed: a class's methods by their names; a kernel crosses as source, and is
    not called."""
    if isinstance(found, type):
        yield from (
            (found, key) for key, value in vars(found).items() if callable(value) and hasattr(value, "__code__")
        )
    elif hasattr(found, "__code__"):
        yield None, name


def outcomes(lab: Lab) -> dict[str, dict[str, bool]]:
    """Per function the checks that gave it numbers, and whether they passed."""
    reached, solved = Reached(lab), {cell.grade_id: cell.source for cell in lab.of_kind("solution")}
    prepare(lab, SECRET)  # imports what the forks need, once for all
    found: dict[str, dict[str, bool]] = {}
    for cell in lab.of_kind("solution"):
        asked = reached.by(Submission({**solved, cell.grade_id: cell.source + "\n"}))
        found |= in_a_fork(functools.partial(of_one_cell, asked, cell))
    return found


def of_one_cell(lab: Lab, cell: Cell) -> dict[str, dict[str, bool]]:
    """The same for what one solution cell defines."""
    namespace: dict[str, Any] = {"__name__": LAB_MODULE, "reference": Reference(lab)}
    found: dict[str, dict[str, bool]] = {}
    with secret_seed(SECRET), contextlib.redirect_stdout(None):
        for other in lab.cells:
            if other.kind == "solution" or (other.kind == "code" and other.where not in ("notebook", "milestone")):
                run_cell(other.source, other.grade_id, namespace)
        for name in cell.names:
            for owner, key in functions_of(name, namespace[name]):
                what = name if owner is None else f"{name}.{key}"
                found[what] = checked(lab, namespace, owner, key)
    return found


def checked(lab: Lab, namespace: dict[str, Any], owner: Any, key: str) -> dict[str, bool]:
    """The checks that gave numbers to one function, zeroed meanwhile, and whether they passed."""
    given: list[bool] = []
    right = namespace[key] if owner is None else vars(owner)[key]
    own = frozenset(f"<{cell.grade_id}>" for cell in lab.of_kind("solution"))
    wrong, passed = zeroing(right, lambda: given.append(True), own), {}
    for check in lab.of_kind("check"):
        given.clear()
        put(namespace, owner, key, wrong)
        try:
            run_cell(check.source, check.grade_id, namespace)
            status = True
        except Exception:
            status = False
        if given:
            passed[check.grade_id] = status
    put(namespace, owner, key, right)
    return passed


def put(namespace: dict[str, Any], owner: Any, key: str, function: Callable[..., Any]) -> None:
    if owner is None:
        namespace[key] = function
    else:
        setattr(owner, key, function)


def in_a_fork(compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `compute` returns in a child of this process, which keeps nothing of it."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_fd)
        try:
            with os.fdopen(write_fd, "w") as pipe:
                json.dump(compute(), pipe)
        finally:
            os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return dict(json.loads(text))


def main() -> int:
    compute_as_in_a_learners_process()
    lab = percent_lab(Path(sys.argv[1]))
    quicken()
    with kept_kernels():
        print(json.dumps(outcomes(lab)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
