"""What must exist before a graph is captured, and that each line of the compile table has a name of its own."""

from __future__ import annotations

import functools
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is defined

from reference_impl.kernels import launch as module
from reference_impl.kernels.launch import prepare, tickets_of
from tests.kernels.paged import DEVICE
from tests.warm import Warm


def test_each_line_of_the_table_has_a_name_of_its_own(warm: Warm) -> None:
    script = """
from tests.kernels.compile_table import lines
names = [line.name for line in lines()]
assert len(names) == len(set(names)) > 900
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = warm.run(("-c", script), environment)
    assert done.returncode == 0, done.stderr


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
