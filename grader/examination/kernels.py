"""Launches of learners' kernels for check cells: the kernel's source runs in a process with no other code of theirs.

A check calls `launch` (from `grader.checks`) with its own tensors. In a learner's notebook the kernel is a function
there, and its source is found through it; when graded it is a `Kernel`, whose source is found in the submission. Either
way it is limited by the rules of `kernel_source.py` and run by `learner_side/kernel_run.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grader.examination.kernel_source import Find, in_namespace, kernel_source
from grader.learner_side import kernel_run
from grader.learner_side.kernel_run import Traffic

Request = Callable[[str, Any], Any]


@dataclass(frozen=True)
class Kernel:
    """A kernel of a submission. request: asks the process that runs it, one operation and its payload."""

    name: str
    find: Find
    request: Request


@dataclass(frozen=True)
class Compiled:
    """What a kernel needs on one GPU: registers and spilled bytes per thread, bytes of shared memory per program.

    factors: the types that the factors of its tl.dot have ("f16", "f32"); a float32 factor needs no tensor cores.
    tensor_cores: the types that the instructions of its tensor cores multiply and add up in ("f16 into f32", "tf32 into
    f32"), none where it has none. error: the compiler's message; then the rest is 0 or empty.
    """

    registers: int = 0
    spilled: int = 0
    shared: int = 0
    factors: Sequence[str] = ()
    tensor_cores: Sequence[str] = ()
    error: str = field(default="", kw_only=True)


def launch(kernel: Any, grid: Sequence[int], constants: Mapping[str, Any], **arguments: Any) -> Traffic:
    """Run a kernel on tensors, in place, and count what it loads and stores.

    kernel: a graded name of the lab that is a function under `@triton.jit`. grid: programs, up to three numbers.
    arguments: tensors and numbers, then constants: the kernel's parameters must be these, in this order. On a GPU, and
    in any process without TRITON_INTERPRET=1, it is launched as it is and nothing is counted.
    Raises NotAKernel for what may not cross, and what the kernel raises.
    """
    if not isinstance(kernel, Kernel) and os.environ.get("TRITON_INTERPRET") != "1":
        kernel[tuple(grid)](*arguments.values(), **constants)
        return Traffic()
    name, find, request = _of(kernel)
    sources = kernel_source(name, find, list(arguments), list(constants))
    counted = request("launch", [sources, name, list(grid), list(arguments.values()), dict(constants)])
    traffic = Traffic()
    vars(traffic).update(counted)
    return traffic


def compiled(kernel: Any, arguments: Mapping[str, str], constants: Mapping[str, Any], capability: int = 80) -> Compiled:
    """Compile a kernel for a GPU that need not be here; takes seconds.

    arguments: the type of each parameter, as Triton writes it ("*fp16": a pointer to float16, "i32", "fp32").
    capability: of the GPU, 80 for an A100. The types of factors show a product for which float16 is widened, beside
    others for which it is not; those of the tensor cores show a float32 that is rounded. The interpreter computes both
    as if they were not.
    """
    name, find, request = _of(kernel)
    sources = kernel_source(name, find, list(arguments), list(constants))
    return Compiled(**request("compile", [sources, name, dict(arguments), dict(constants), capability]))


def _of(kernel: Any) -> tuple[str, Find, Request]:
    if isinstance(kernel, Kernel):
        return kernel.name, kernel.find, kernel.request
    function = getattr(kernel, "fn", None)
    if function is None:
        raise TypeError(f"expected a kernel, a function under @triton.jit, got {kernel!r:.100}")
    return function.__name__, in_namespace(function.__globals__), _here


def _here(operation: str, payload: Any) -> Any:
    """Runs an operation in this process, which is the learner's own."""
    if operation == "compile":
        return kernel_run.compile_source(*payload)
    sources, name, grid, arguments, constants = payload
    return vars(kernel_run.run_source(sources, name, grid, arguments, constants))
