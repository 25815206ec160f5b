"""All-reduces over send and recv: their sums, the same bits everywhere, and the messages and bytes that they say."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from reference_impl.features.parallel import all_reduce as ways
from reference_impl.features.parallel.threads import ThreadGroup, ThreadRank
from reference_impl.interfaces.collectives import CollectiveError

EXACT = {
    "one-shot": ways.one_shot, "two-shot": ways.two_shot, "ring": ways.ring, "tree": ways.tree,
    "recursive doubling": ways.recursive_doubling,
}  # fmt: skip


def run(way: ways.AllReduce, shown: list[Tensor]) -> tuple[list[Tensor], list[ThreadRank]]:
    group = ThreadGroup(len(shown))
    ranks = [group.rank(rank) for rank in range(len(shown))]
    with ThreadPoolExecutor(len(shown)) as pool:
        return list(pool.map(lambda rank: way(rank, shown[rank.rank]), ranks)), ranks


def numbers(size: int, *shape: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(size)
    return [torch.randn(*shape, generator=random, dtype=torch.float64) for _ in range(size)]


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (4, 32)], ids=str)
def test_sums_are_right_and_the_same_on_all_ranks(name: str, size: int, shape: tuple[int, ...]) -> None:
    if name == "recursive doubling" and size & (size - 1):
        with pytest.raises(ValueError, match=f"expected a power of 2 ranks, got {size}"):
            run(EXACT[name], numbers(size, *shape))
        return
    shown = numbers(size, *shape)
    before = [x.clone() for x in shown]
    found, _ = run(EXACT[name], shown)
    assert all(torch.equal(each, found[0]) for each in found)
    assert found[0].shape == shape
    torch.testing.assert_close(found[0], sum(shown), atol=1e-12, rtol=1e-12)
    assert all(map(torch.equal, shown, before)), "arguments stay as they are"


@pytest.mark.parametrize("name", ["one-shot", "two-shot"])
def test_equal_rows_have_equal_sums_where_it_goes_by_rank(name: str) -> None:
    shown = [x.float().expand(6, 8) for x in numbers(5, 1, 8)]
    found, _ = run(EXACT[name], shown)
    assert all(torch.equal(row, found[0][0]) for row in found[0])


def test_of_a_ring_they_need_not() -> None:
    shown = [torch.tensor([v, v, v]) for v in (1e8, 1.0, -1e8)]  # in float32: 1e8 + 1 is 1e8
    found, _ = run(ways.ring, shown)
    assert len(set(found[0].tolist())) > 1


@pytest.mark.parametrize("size", [2, 4, 8])
def test_messages_and_bytes_are_those_of_the_formulas(size: int) -> None:
    length, log = 64 * size, int(math.log2(size))
    sent = {
        "one-shot": (size - 1, (size - 1) * length), "two-shot": (2 * (size - 1), 2 * (size - 1) * length // size),
        "ring": (2 * (size - 1), 2 * (size - 1) * length // size), "recursive doubling": (log, log * length),
    }  # fmt: skip
    for name, (messages, values) in sent.items():
        _, ranks = run(EXACT[name], numbers(size, length))
        assert {(rank.num_sent, rank.num_bytes) for rank in ranks} == {(messages, 8 * values)}, name
    _, ranks = run(ways.tree, numbers(size, length))
    assert ranks[0].num_sent == log, "the root sends most"
    assert sum(rank.num_bytes for rank in ranks) == 2 * (size - 1) * 8 * length


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (2, 4), (3, 2), (1, 4), (4, 1)])
def test_between_nodes_a_hierarchy_sends_a_part(nodes: int, per_node: int) -> None:
    size, length = nodes * per_node, 48 * per_node * nodes
    shown, between = numbers(size, length), []

    def counted(links: Any, x: Tensor) -> Tensor:
        before = links.links.num_bytes
        found = ways.ring(links, x)
        between.append(links.links.num_bytes - before)
        return found

    found, _ = run(ways.hierarchical(per_node, counted), shown)
    assert all(torch.equal(each, found[0]) for each in found)
    torch.testing.assert_close(found[0], sum(shown), atol=1e-12, rtol=1e-12)
    # Of each node all of its ranks together: what a ring of nodes would send.
    assert sum(between) == nodes * 8 * 2 * (nodes - 1) * length // nodes


def test_ranks_that_make_no_whole_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="hierarchical: expected nodes of 4 ranks, got 6 ranks in all"):
        run(ways.hierarchical(4), numbers(6, 8))


@pytest.mark.parametrize(("bits", "levels"), [(8, 127), (4, 7)])
@pytest.mark.parametrize("shape", [(7, 100), (1,), (4, 32)], ids=str)
def test_rounded_messages_are_off_by_less_than_their_steps(bits: int, levels: int, shape: tuple[int, ...]) -> None:
    shown = [x.float() for x in numbers(4, *shape)]
    found, ranks = run(ways.quantized(bits), shown)
    assert all(torch.equal(each, found[0]) for each in found)
    largest, total = sum(x.abs().max() for x in shown), sum(shown)
    step = largest / levels
    assert float((found[0] - total).abs().max()) <= step / 2 + (total.abs().max() + step / 2) / levels / 2 + 1e-5
    if shape == (4, 32):
        a_number = bits / 8 + 4 / 32
        assert ranks[0].num_bytes == 2 * 3 * 32 * a_number


def test_zeros_stay_zeros_and_other_bits_are_refused() -> None:
    found, _ = run(ways.quantized(4), [torch.zeros(5)] * 2)
    assert not found[0].any()
    with pytest.raises(ValueError, match="quantized: expected 8 or 4 bits, got 2"):
        ways.quantized(2)


def test_who_sends_nothing_is_named() -> None:
    rank = ThreadGroup(3, 0.05).rank(0)
    with pytest.raises(CollectiveError, match="rank 0, recv of step 0: rank 2 sent nothing in 0.05 s") as caught:
        rank.recv(2)
    assert caught.value.waits_for == (2,)
