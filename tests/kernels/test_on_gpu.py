"""On a GPU: every kernel against its twin and float64 at real sizes in bfloat16, by the cases that the bench times."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from reference_impl.bench.kernel_cases import CASES, Case
from reference_impl.bench.kernel_work import Place, wrong


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_kernel_at_its_real_size_is_right_and_gives_the_same_bits_again(case: Case) -> None:
    torch.manual_seed(0)
    work = case.make(Place(torch.device("cuda"), torch.bfloat16))
    first = work.part(work.ours()).clone()
    assert wrong(work, work.ours()) is None
    assert torch.equal(work.part(work.ours()), first)


@pytest.mark.gpu
def test_the_bench_times_a_case() -> None:
    command = [sys.executable, "-m", "reference_impl.bench", "kernels", "--only", "decode, B 1", "--no-save"]
    done = subprocess.run([*command, "--seconds", "60"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TB/s" in done.stdout
    assert "with the host's time" not in done.stdout
