"""Triton kernels in a learner's process: in the interpreter, imported before the fork. Isolated: test_sandbox.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grader.examination.examiner import examine as run
from grader.examination.submission import Submission
from grader.isolation.launcher import Launcher

# Run in a solution cell: an error in it costs all of the cell's checks.
KERNEL = """
import sys
assert "triton.language" in sys.modules, "a submission pays for the import"
import torch
import triton
import triton.language as tl

@triton.jit
def kernel(x, out, n, N: tl.constexpr):
    i = tl.arange(0, N)
    score = tl.load(x + i, mask=i < n, other=float("-inf"))
    tl.store(out, tl.sum(tl.exp(score - tl.max(score, 0)), 0))

x, out = torch.tensor([1.0, 3.0, 2.0]), torch.zeros(1)
kernel[(1,)](x, out, 3, N=4)
expected = torch.exp(x - 3).sum()
assert torch.allclose(out, expected), (out, expected)
"""


def with_kernel(lab: Any) -> Submission:
    solved = {cell.grade_id: cell.source for cell in lab.of_kind("solution")}
    return Submission({**solved, "Window": KERNEL + solved["Window"]})


def test_a_kernel_runs_in_the_interpreter_of_a_process_that_has_imported_triton(lab: Any, launcher: Launcher) -> None:
    result = run(lab, with_kernel(lab), launcher, secret=b"test")
    assert {check.grade_id: check.message for check in result.checks if check.status != "passed"} == {}


def test_a_kernel_s_result_is_looked_at(
    lab: Any, launcher: Launcher, statuses: Callable[[Any], dict[str, str]]
) -> None:
    submission = with_kernel(lab)
    submission.answers["Window"] = submission.answers["Window"].replace("torch.exp(x - 3)", "torch.exp(x - 2)")
    assert statuses(run(lab, submission, launcher, secret=b"test"))["check_window"] != "passed"
