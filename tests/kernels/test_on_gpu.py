"""On a GPU: every kernel against its twin and float64 at real sizes in bfloat16, by the cases that the bench times."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from reference_impl.bench.kernel_cases import CASES
from reference_impl.bench.kernels import Case, Place, wrong
from reference_impl.kernels import reference
from tests.kernels.paged import check, make

if torch.cuda.is_available():  # kernels: without Triton, or without a GPU, these tests are skipped
    from reference_impl.kernels.launch import prepare, tickets_of
    from reference_impl.kernels.paged_decode import paged_decode
    from reference_impl.kernels.rotate_and_write import rotate_and_write


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
    done = subprocess.run([*command, "--seconds", "35"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TB/s" in done.stdout
    assert "with the host's time" not in done.stdout


LONG = [1, 60, 700, 1300, 5000, 33000]


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("options", [{}, {"window": 1000}, {"softcap": 30.0}, {"cache": torch.float8_e4m3fn}])
def test_long_contexts_of_a_llama(options, block_size) -> None:
    given = dict(options)
    cache = given.pop("cache", None)
    case = make([(1, n) for n in LONG], 32, 8, 128, torch.bfloat16, block_size=block_size, cache=cache)
    check(paged_decode, reference.paged_decode, case.decode, **given, **case.options)
    first = paged_decode(*case.decode, **given, **case.options)
    assert all(torch.equal(paged_decode(*case.decode, **given, **case.options), first) for _ in range(20))
    assert tickets_of(first.device).count_nonzero() == 0


@pytest.mark.gpu
def test_a_graph_of_paged_decode_follows_its_inputs() -> None:
    """Captured for contexts up to 65536, with two rows of padding, replayed with other lengths and blocks."""
    prepare("cuda")
    case = make([(1, n) for n in LONG], 32, 8, 128, torch.bfloat16)
    q, keys, values, table, lens, _, scale = case.decode
    for stored in (keys, values):
        stored.nan_to_num_()  # of the replays some read further than the first contexts
    lens[2:4] = 0
    paged_decode(q, keys, values, table, lens, 65536, scale)  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = q
        for _ in range(3):  # a chain: each reads what the one before wrote
            out = paged_decode(out, keys, values, table, lens, 65536, scale)

    def eager() -> torch.Tensor:
        found = q
        for _ in range(3):
            found = paged_decode(found, keys, values, table, lens, 65536, scale)
        return found

    order = torch.tensor([5, 3, 0, 1, 4, 2], device="cuda")
    for new_lens in (lens.clone(), torch.tensor(LONG, device="cuda"), torch.tensor(LONG, device="cuda") // 2):
        table.copy_(table[order])
        lens.copy_(new_lens[: len(lens)])
        lens.copy_(torch.minimum(lens, (table != table[:, -1:]).sum(1).int() * 16))  # blocks that a row has
        graph.replay()
        assert torch.equal(out, eager())
        assert tickets_of(out.device).count_nonzero() == 0


@pytest.mark.gpu
def test_a_graph_changes_no_bit_in_a_chain_that_overwrites_what_it_reads() -> None:
    """Rotation writes the cache that the attention before it read, a hundred times over, one by one and in a graph."""
    prepare("cuda")
    case = make([(1, n) for n in (40, 900, 2000)], 32, 8, 128, torch.bfloat16)
    q, keys, values, table, lens, longest, scale = case.decode
    slots = (table[torch.arange(3, device="cuda"), (lens - 1).long() // 16].long() * 16 + (lens - 1) % 16).long()
    turns = torch.randn(4096, 1, 128, device="cuda")
    positions = (lens - 1).long()
    before = keys.clone(), values.clone()

    def chain() -> torch.Tensor:
        keys.copy_(before[0])
        values.copy_(before[1])
        x = q
        for _ in range(100):
            fresh = rotate_and_write(x, x[:, :8], x[:, 8:16], positions, turns, turns, keys, values, slots)
            x = paged_decode(fresh, keys, values, table, lens, longest, scale)
        return x

    expected = chain()
    assert torch.equal(chain(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(3):
        graph.replay()
        assert torch.equal(out, expected)
