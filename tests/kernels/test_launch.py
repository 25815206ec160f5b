"""Dependent launches are asked for in one place, and refused where there are none; what must exist before a graph."""

from __future__ import annotations

import functools
import json
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is defined

import triton
import triton.language as tl

from reference_impl.kernels import launch as module
from reference_impl.kernels.architectures import ARCHITECTURES
from reference_impl.kernels.launch import dependent_launches, launch, prepare, tickets_of, wait_for_previous
from tests.kernels.paged import DEVICE
from tests.warm import Warm

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


@triton.jit
def _add_one(x, N: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    at = x + tl.arange(0, N)
    tl.store(at, tl.load(at) + 1)


@triton.jit
def _without(x, N: tl.constexpr):
    at = x + tl.arange(0, N)
    tl.store(at, tl.load(at) + 1)


def test_a_kernel_runs_whether_it_declares_pdl_or_not() -> None:
    x = torch.zeros(8, device=DEVICE)
    launch(_add_one, (1,), x, N=8, options={"num_warps": 1})
    launch(_without, (1,), x, N=8, options={"num_warps": 1})
    assert x.tolist() == [2.0] * 8


@interpreted
def test_the_interpreter_has_no_dependent_launches() -> None:
    with pytest.raises(ValueError, match="Hopper or later"), dependent_launches():
        pytest.fail("nothing may be launched here")
    with dependent_launches(False):
        pass


def test_which_gpus_have_them() -> None:
    assert {a.name for a in ARCHITECTURES.values() if a.has_dependent_launch} == {"sm_90", "sm_100"}


def test_the_table_holds_both_ways_and_only_kernels_that_wait_launch_early(warm: Warm) -> None:
    """In a process without the interpreter: what is recorded, and where the wait stands in the code."""
    script = """
import json, torch
from reference_impl.kernels.architectures import ARCHITECTURES
from reference_impl.kernels.calls import CALLS
from reference_impl.kernels.compilation import compile_for
from reference_impl.kernels.compile_table import lines
from reference_impl.kernels.launch import dependent_launches, recording

gpu, found = ARCHITECTURES["sm_90"], {}
for wanted in (True, False):
    with recording(gpu) as launches, dependent_launches(wanted):
        CALLS["paged_decode, head_dim 64"](torch.bfloat16)
        CALLS["rotate_and_write"](torch.bfloat16)
    found[wanted] = [(launch.constants["PDL"], dict(launch.options)) for launch in launches]
    code = compile_for(launches[1], gpu).asm["ptx"]
    waits, first = code.find("griddepcontrol.wait"), min(code.find(word) for word in ("ld.global", "st.global"))
    found[f"code {wanted}"] = [waits, code.find("griddepcontrol.launch_dependents"), first]
try:
    with recording(ARCHITECTURES["sm_89"]), dependent_launches():
        pass
except ValueError as error:
    found["refused"] = str(error)
names = [line.name for line in lines()]
found["names"] = [name for name in names if name.startswith("paged_decode, MHA")]
found["unique"] = len(names) == len(set(names))
print(json.dumps(found))
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = warm.run(("-c", script), environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for declared, options in found["true"]:
        assert declared is True
        assert options["launch_pdl"] is True
    for declared, options in found["false"]:
        assert declared is False
        assert "launch_pdl" not in options
    waits, releases, first = found["code True"]
    assert 0 < waits < releases < first, "memory is touched only after the wait"
    assert found["code False"][:2] == [-1, -1]
    assert "Hopper or later" in found["refused"]
    assert "paged_decode, MHA: paged_decode, sm_90, dependent" in found["names"]
    assert "paged_decode, MHA: paged_decode, sm_89, dependent" not in found["names"]
    assert found["unique"]


def test_tickets_are_made_once_per_device_and_are_zero() -> None:
    prepare(DEVICE)
    device = torch.empty(0, device=DEVICE).device
    assert tickets_of(device) is tickets_of(device)
    assert tickets_of(device).count_nonzero() == 0


def test_tickets_are_not_made_while_a_graph_is_captured(monkeypatch) -> None:
    """Then they would belong to the graph; here with a capture that the CPU pretends, and a cache of this test's own:
    graphs that other tests captured keep their tickets."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: pytest.fail("made during capture"))
    monkeypatch.setattr(module, "tickets_of", functools.cache(tickets_of.__wrapped__))
    with pytest.raises(RuntimeError, match=r"launch.prepare\('cuda:0'\) before a CUDA graph"):
        module.tickets_of(torch.device("cuda:0"))
