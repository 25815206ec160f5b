"""Queries and outputs further apart than 32 bits can count."""

from __future__ import annotations

import os
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is defined

from reference_impl.kernels.flash_attention import flash_attention, tile_of
from reference_impl.kernels.launch import architecture
from tests.kernels.paged import DEVICE, make


def far_apart(tokens: torch.Tensor, distance: int, file: Path) -> torch.Tensor:
    """The same numbers, with `distance` from one token to the next."""
    size, start = distance * len(tokens), 0
    if DEVICE.type == "cuda":
        memory = torch.zeros(size, dtype=tokens.dtype, device=DEVICE)
    else:  # a sparse file: only what is touched exists. Before the start, where an overflow leads, are zeros, too
        memory, start = torch.from_file(str(file), shared=True, size=2 * size, dtype=tokens.dtype), size
    found = memory.as_strided(tokens.shape, (distance, *tokens.stride()[1:]), start)
    found.copy_(tokens)
    return found


def test_offsets_of_queries_and_outputs_pass_two_to_the_31(tmp_path, monkeypatch) -> None:
    """31,000 tokens of a model with 128 heads of 512 do so."""
    block_m = tile_of(16, 2, architecture())[0]["BLOCK_M"]
    rows = [(block_m, block_m + 5), (3, 20)]  # the second row's offset is that of its first query
    case = make(rows, 1, 1, 16, torch.float16)
    expected = flash_attention(*case.ragged)
    distance = 2**31 // block_m + 16
    far, out = (
        far_apart(t, distance, tmp_path / name) for name, t in (("q", case.q), ("out", torch.zeros_like(case.q)))
    )
    monkeypatch.setattr(torch, "empty_like", lambda _: out)
    found = flash_attention(far, *case.ragged[1:])
    assert found is out
    assert torch.equal(found, expected)
