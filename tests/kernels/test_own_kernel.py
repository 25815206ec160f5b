"""The compile report of a learner's kernel: of one that fits, of one that does not compile, and of none at all."""

from __future__ import annotations

import linecache
from typing import Any

import pytest
import torch

from reference_impl.kernels.own_kernel import cells_behind, report

HOST = """
def attention(q, k, v, first):
    o = torch.empty_like(q)
    for _ in range(LAUNCHES):
        copy_kernel[(1,)](q, o=o, n=q.shape[2], N=SIZE, num_warps=2)
    return o, o
"""

# A constant stands between other arguments, as a learner may write it.
KERNEL = """
import triton
import triton.language as tl

SIZE = 64

@triton.jit
def copy_kernel(q, N: tl.constexpr, o, n):
    i = tl.arange(0, N)
    tl.store(o + i, tl.load(q + i, mask=i < n, other=0.0), mask=i < n)
"""


def notebook(*cells: str) -> dict[str, Any]:
    """The names of cells that ran one after another, their sources known as IPython would know them."""
    namespace: dict[str, Any] = {"torch": torch}
    for number, source in enumerate(cells):
        name = f"<own kernel {number}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), namespace)
    return namespace


def test_cells_that_a_function_uses_come_along_and_no_others() -> None:
    namespace = notebook("def unused(): pass", KERNEL, "def helper(): return 1", HOST + "\n    helper()")
    assert [source.split()[:3] for source in cells_behind(namespace["attention"])] == [
        ["import", "triton", "import"],
        ["def", "helper():", "return"],
        ["def", "attention(q,", "k,"],
    ]


@pytest.mark.timeout(1800)
def test_a_report_says_what_each_gpu_would_make_of_each_launch() -> None:
    text = report(notebook(KERNEL, HOST.replace("LAUNCHES", "1"))["attention"])
    lines = [line.split() for line in text.splitlines()]
    for head_dim in ("64", "128"):
        for gpu in ("T4", "A100", "H100"):
            [line] = [line for line in lines if line[:2] == [head_dim, gpu]]
            assert 1 <= int(line[2]) <= 255
            assert line[3:5] == ["0", "B"]
            assert line[-2:] == ["none", "fits"], text


@pytest.mark.timeout(1800)
def test_what_the_interpreter_lets_pass_and_the_compiler_does_not_is_named() -> None:
    text = report(notebook(KERNEL.replace("SIZE = 64", "SIZE = 60"), HOST.replace("LAUNCHES", "1"))["attention"])
    assert text.count("does not compile") == 6, text
    assert "power of 2" in text


@pytest.mark.timeout(1800)
def test_a_function_that_launches_nothing_is_named() -> None:
    text = report(notebook(KERNEL, HOST.replace("LAUNCHES", "0"))["attention"])
    assert text.count("no Triton kernel was launched") == 2, text
