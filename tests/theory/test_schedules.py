"""Collectives message by message: the messages of the executable ones, and costs that formulas and hands agree on."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from reference_impl.features.parallel import all_reduce as ways
from reference_impl.features.parallel.threads import ThreadGroup, ThreadRank
from reference_impl.theory import schedules
from reference_impl.theory.collectives import all_reduce_break_even, one_shot_all_reduce, ring_all_reduce
from reference_impl.theory.links import TOPOLOGIES, Topology, link, topology
from reference_impl.theory.schedules import COLLECTIVES, Step, closed, schedule, stepped

H100 = topology("DGX H100")
EXECUTABLE = {
    "one-shot": ways.one_shot, "two-shot": ways.two_shot, "ring": ways.ring, "tree": ways.tree,
    "recursive doubling": ways.recursive_doubling, "hierarchical": ways.hierarchical(2),
}  # fmt: skip


class Writes:
    """Links of a rank, with a list of the messages that it sends."""

    def __init__(self, rank: ThreadRank):
        self.inner, self.rank, self.size, self.recv = rank, rank.rank, rank.size, rank.recv
        self.sent: list[tuple[int, int, int]] = []

    def send(self, x: torch.Tensor, to: int) -> None:
        self.sent.append((self.rank, to, x.nbytes))
        self.inner.send(x, to)


def messages(steps: list[Step]) -> Counter[tuple[int, int, int]]:
    return Counter(message for step in steps for message in step.messages)


@pytest.mark.parametrize("name", EXECUTABLE)
@pytest.mark.parametrize("size", [2, 4, 6, 8])
def test_messages_are_those_that_ranks_send(name: str, size: int) -> None:
    if name == "recursive doubling" and size == 6:
        return
    group = ThreadGroup(size)
    ranks = [Writes(group.rank(rank)) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(lambda rank: EXECUTABLE[name](rank, torch.zeros(3 * size + 1, dtype=torch.uint8)), ranks))
    sent = Counter(message for rank in ranks for message in rank.sent)
    assert messages(schedule(name, 3 * size + 1, size, 2)) == sent


def simulate(name: str, n: int, per_node: int) -> list[set[tuple[int, int]]]:
    """What each rank knows at the end: (rank, part) pairs, where every message carries all that its source knows."""
    known = [{(rank, part) for part in range(n)} for rank in range(n)]
    for step in schedule(name, 64 * n, n, per_node):
        before = [set(each) for each in known]
        for source, target, _ in step.messages:
            known[target] |= before[source]
    return known


@pytest.mark.parametrize("name", [*schedules.ALL_REDUCES, "all-gather"])
@pytest.mark.parametrize(("n", "per_node"), [(2, 1), (4, 2), (8, 4), (16, 4)])
def test_all_ranks_hear_of_all_others(name: str, n: int, per_node: int) -> None:
    assert all({rank for rank, _ in known} == set(range(n)) for known in simulate(name, n, per_node))


@pytest.mark.parametrize("name", ["pairwise all-to-all", "direct all-to-all"])
@pytest.mark.parametrize("n", [2, 5, 8])
def test_in_an_all_to_all_each_pair_has_one_message(name: str, n: int) -> None:
    sent = messages(schedule(name, 10 * n, n))
    assert sent == Counter((a, b, 10) for a in range(n) for b in range(n) if a != b)


MI300X = Topology("MI300X", 8, link("Infinity Fabric (MI300X)"), link("RoCE 400G"))
WHERE = [H100, topology("NVL72"), topology("AWS P4d"), MI300X, replace(H100, per_node=1)]


@pytest.mark.parametrize("where", WHERE, ids=lambda where: f"{where.name}-{where.per_node}")
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("n", [1, 2, 8, 16, 64, 144])
def test_messages_one_by_one_and_formulas_agree(name: str, n: int, where: Topology) -> None:
    if (name == "recursive doubling" and n & (n - 1)) or (name == "hierarchical" and n % where.per_node):
        return
    by_step, by_formula = (way(name, 4096 * 9 * n, n, where) for way in (stepped, closed))
    assert by_formula.seconds == pytest.approx(by_step.seconds, rel=1e-12)
    assert replace(by_formula, seconds=0) == replace(by_step, seconds=0)


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize(("n", "size"), [(7, 1000), (12, 5), (20, 99_999), (30, 0)])
def test_uneven_parts_cost_at_most_a_byte_a_message_more_by_formula(name: str, n: int, size: int) -> None:
    where = replace(H100, per_node=4)
    if name == "recursive doubling" or (name == "hierarchical" and n % 4):
        return
    by_step, by_formula = stepped(name, size, n, where), closed(name, size, n, where)
    assert by_step.steps == by_formula.steps
    most = sum(len(step.messages) for step in schedule(name, size, n, 4)) / where.between.per_direction
    assert 0 <= by_formula.seconds - by_step.seconds + 1e-15 <= most + 2e-15
    assert by_formula.inside >= by_step.inside
    assert by_formula.between >= by_step.between


@pytest.mark.parametrize("name", COLLECTIVES)
def test_at_1024_ranks_both_agree(name: str) -> None:
    """The longest are ring and pairwise exchange, 2,046 and 1,023 steps of 1,024 messages."""
    by_step, by_formula = (way(name, 1 << 20, 1024, H100) for way in (stepped, closed))
    assert by_formula.seconds == pytest.approx(by_step.seconds, rel=1e-9)
    assert (by_formula.inside, by_formula.between) == (by_step.inside, by_step.between)


@pytest.mark.parametrize("name", [name for name in COLLECTIVES if name != "recursive doubling"])
def test_a_hundred_thousand_ranks_have_a_cost(name: str) -> None:
    assert schedules.cost(name, 10**8, 100_000, H100).seconds > 0
    assert schedules.cost(name, 10**6, 16, H100) == stepped(name, 10**6, 16, H100)


def test_by_hand_one_mebibyte_on_eight_gpus() -> None:
    """2 us and 450 GB/s a message: one step of 7 MiB, 14 of 1/8 MiB, 2 of 7/8, 6 of 1, 3 of 1."""
    mib, rate, us = 2**20, 450e9, 1e-6
    by_hand = {
        "one-shot": 2 * us + 7 * mib / rate,
        "ring": 14 * (2 * us + mib / 8 / rate),
        "two-shot": 2 * (2 * us + 7 * mib / 8 / rate),
        "tree": 6 * (2 * us + mib / rate),
        "recursive doubling": 3 * (2 * us + mib / rate),
        "all-gather": 7 * (2 * us + mib / 8 / rate),
        "reduce-scatter": 7 * (2 * us + mib / 8 / rate),
        "pairwise all-to-all": 7 * (2 * us + mib / 8 / rate),
        "direct all-to-all": 2 * us + 7 * mib / 8 / rate,
    }
    for name, seconds in by_hand.items():
        assert closed(name, mib, 8, H100).seconds == pytest.approx(seconds), name
    assert by_hand["one-shot"] == pytest.approx(one_shot_all_reduce(mib, 8, 2e-6, 450e9))
    assert by_hand["ring"] == pytest.approx(ring_all_reduce(mib, 8, 2e-6, 450e9))


def test_without_a_switch_a_ring_has_one_link_of_seven() -> None:
    """Eight MI300X: 448 GB/s to all seven peers together, 64 GB/s to one. 7 MiB parts of 56."""
    mib = 2**20
    assert closed("ring", 56 * mib, 8, MI300X).seconds == pytest.approx(14 * (2e-6 + 7 * mib / 64e9))
    assert closed("two-shot", 56 * mib, 8, MI300X).seconds == pytest.approx(2 * (2e-6 + 49 * mib / 448e9))


def test_by_hand_between_two_nodes_of_eight() -> None:
    """16 GPUs, 16 MiB. In a node 2 us and 450 GB/s, between 4 us and 50 GB/s. A flat ring has a slow message in each of
    its 30 steps; a hierarchy sends 2 MiB a rank over the slow link, as 2 steps of 1 MiB."""
    mib = 2**20
    flat = 30 * (4e-6 + mib / 50e9)
    layered = 2 * (2e-6 + 14 * mib / 450e9) + 2 * (4e-6 + mib / 50e9)
    assert closed("ring", 16 * mib, 16, H100).seconds == pytest.approx(flat)
    assert closed("hierarchical", 16 * mib, 16, H100).seconds == pytest.approx(layered)
    assert closed("hierarchical", 16 * mib, 16, H100).between == 2 * mib
    assert schedules.best_all_reduce(16 * mib, 16, H100).name == "hierarchical"


def test_one_shot_and_ring_meet_at_two_megabytes() -> None:
    meeting = int(all_reduce_break_even(8, 2e-6, 450e9))
    assert meeting / 1e6 == pytest.approx(2.2, abs=0.05)
    one, ring = (closed(name, meeting, 8, H100).seconds for name in ("one-shot", "ring"))
    assert one == pytest.approx(ring, rel=1e-4)


def test_of_72_gpus_in_a_rack_none_is_another_node() -> None:
    assert closed("ring", 72 * 4096, 72, topology("NVL72")).between == 0
    assert closed("ring", 72 * 4096, 72, topology("DGX B200")).between > 0
    assert topology("NVL72").link(0, 71).name == "NVLink 5"
    assert topology("NVL72").link(71, 72).name == "InfiniBand NDR 400G"


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_topology_has_two_links_that_connect_gpus(name: str) -> None:
    for row in (TOPOLOGIES[name].inside, TOPOLOGIES[name].between):
        assert row.alpha is not None
        assert row.alpha > 0
        assert row.alpha_source


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="recursive doubling: expected a power of 2 ranks, got 6"):
        schedule("recursive doubling", 64, 6)
    with pytest.raises(ValueError, match="hierarchical: expected nodes of 4 ranks, got 6 ranks in all"):
        closed("hierarchical", 64, 6, replace(H100, per_node=4))
    with pytest.raises(ValueError, match="ring: expected at most 1024 ranks to be stepped, got 1025; use `closed`"):
        schedule("ring", 64, 1025)
    with pytest.raises(ValueError, match="expected a collective of one-shot, .*, got 'star'"):
        closed("star", 64, 2, H100)
    with pytest.raises(ValueError, match="1 to 100000 ranks, got 64 and 100001"):
        closed("ring", 64, 100_001, H100)
    with pytest.raises(ValueError, match="NVMe SSD, PCIe 4 x4 connects no GPUs"):
        Topology("drives", 8, link("NVMe SSD, PCIe 4 x4"), link("RoCE 400G"))
    with pytest.raises(KeyError, match="unknown topology 'ring of eight'.*NVL72"):
        topology("ring of eight")
