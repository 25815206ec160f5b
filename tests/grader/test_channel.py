"""Networks of the examiner: what is counted, what is delivered, and that faults are as drawn."""

from __future__ import annotations

import functools
import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grader.channel import Faults, Link, Network, copied, corrupted
from grader.checks import Deadlock, together


def drain(link: Link) -> list[Any]:
    found = []
    while link.next_arrival is not None:
        found += link.arrived(link.next_arrival)
    return found


def test_a_good_line_delivers_everything_in_order_and_counts_it() -> None:
    link = Link()
    for number in range(5):
        link.send((number, b"four"), now=float(number))
    assert link.arrived(0.5) == []
    assert [number for number, _ in link.arrived(3.0)] == [0, 1, 2]
    assert [number for number, _ in drain(link)] == [3, 4]
    assert (link.num_messages, link.num_bytes) == (5, 5 * (1 + 8 + 1 + 4))


@given(st.integers(0, 2**32), st.integers(1, 60))
def test_lost_and_repeated_messages_are_as_many_as_the_seed_says(seed: int, count: int) -> None:
    def run() -> list[int]:
        link = Link(Faults(drop=0.4, repeat=0.4, reorder=0.4, delay=(1.0, 9.0)), seed)
        for number in range(count):
            link.send(number, now=0.0)
        assert link.num_messages == count
        return drain(link)

    arrived = run()
    assert arrived == run()
    assert max(Counter(arrived).values(), default=0) <= 2


def test_each_fault_happens_about_as_often_as_it_is_told() -> None:
    link = Link(Faults(drop=0.25, repeat=0.5), seed=3)
    for number in range(4000):
        link.send(number, now=0.0)
    counts = Counter(Counter(drain(link)).values())
    assert abs(4000 - counts[1] - counts[2] - 1000) < 120  # lost: 4.4 standard deviations
    assert abs(counts[2] - 1500) < 140
    assert set(counts) == {1, 2}


def test_reordered_messages_overtake_and_none_is_lost() -> None:
    link = Link(Faults(reorder=0.5), seed=1)
    for number in range(50):
        link.send(number, now=float(number) / 100)
    arrived = drain(link)
    assert arrived != sorted(arrived)
    assert sorted(arrived) == list(range(50))


messages = st.recursive(
    st.binary(min_size=1, max_size=8) | st.integers(0, 999) | st.none() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(messages, st.integers(0, 999))
def test_corruption_changes_one_value_and_no_shape(message: Any, seed: int) -> None:
    def flat(value: Any) -> list[Any]:
        if isinstance(value, (list, tuple)):
            return [type(value), *(leaf for item in value for leaf in flat(item))]
        if isinstance(value, dict):
            return [leaf for key, item in value.items() for leaf in [key, *flat(item)]]
        return [value]

    before, after = flat(message), flat(corrupted(copied(message)[0], random.Random(seed)))
    differ = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert len(differ) == (1 if any(isinstance(leaf, (bytes, int)) for leaf in places(message)) else 0)
    for a, b in differ:
        assert type(a) is type(b)
        assert not isinstance(a, bytes) or sum((x ^ y).bit_count() for x, y in zip(a, b, strict=True)) == 1


def places(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in places(item)]
    return [leaf for item in value.values() for leaf in places(item)] if isinstance(value, dict) else [value]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64, torch.bfloat16])
def test_a_corrupted_tensor_differs_in_one_element(dtype: torch.dtype) -> None:
    x = torch.ones(3, 4).to(dtype)
    y = corrupted(x.clone(), random.Random(5))
    assert (y.dtype, y.shape) == (dtype, x.shape)
    assert int((x.view(torch.uint8) != y.view(torch.uint8)).sum()) == 1


def test_what_is_sent_is_a_copy() -> None:
    a, b = Network(2).ports
    x = torch.zeros(2)
    a.send(1, [x])
    x.fill_(9)
    assert b.recv(0)[0].tolist() == [0, 0]


@pytest.mark.parametrize("message", [object(), lambda: 1, [print], torch.zeros(2, device="meta"), {(1, 2): 3}])
def test_only_data_can_be_sent(message: Any) -> None:
    a, _ = Network(2).ports
    with pytest.raises(TypeError):
        a.send(1, message)
    with pytest.raises(TypeError):
        Link().send(message, 0.0)


@pytest.mark.parametrize("to", [0, 2, -1, "1", True, None, 1.0])
def test_there_is_no_way_to_nobody_and_to_oneself(to: Any) -> None:
    network = Network(2)
    with pytest.raises(ValueError, match="no way from rank 0"):
        network.ports[0].send(to, 1)
    assert network.num_messages == 0


def test_bytes_are_counted_per_rank() -> None:
    network = Network(3)
    network.ports[0].send(1, torch.zeros(4))
    network.ports[0].send(2, (1, "ab", None, {b"key": 2.0}))
    network.ports[2].send(0, [])
    assert network.sent == [(0, 1, 16), (0, 2, 4 + 8 + 2 + 1 + 2 + 3 + 8), (2, 0, 0)]
    assert (network.bytes_sent_by(0), network.num_bytes, network.num_messages, network.num_unread) == (44, 44, 3, 3)


@pytest.mark.parametrize(
    ("message", "information"),
    [
        ([None] * 800, 800 // 8),  # as long as a number wants
        ([True, False] * 400, 800 // 8),
        ([[]] * 800, 800 // 8),
        (["", b""] * 400, 800 // 8),
        (3**6000, (3**6000).bit_length() // 8),
        (-(2**11000), 11000 // 8),
        (dict.fromkeys(range(100)), 100 * 8),
    ],
)
def test_no_data_travels_in_fewer_bytes_than_it_needs(message: Any, information: int) -> None:
    network = Network(2)
    network.ports[0].send(1, message)
    assert network.num_bytes >= information


def test_a_send_may_wait_for_its_receiver() -> None:
    """As gloo's: a ring in which everybody sends first stands still; if the first rank receives first, it goes."""

    def ring(network: Network, first_receives: bool) -> list[Any]:
        def step(rank: int) -> Any:
            port, size = network.ports[rank], len(network.ports)
            if rank == 0 and first_receives:
                got = port.recv(size - 1)
                port.send(1, rank)
                return got
            port.send((rank + 1) % size, rank)
            return port.recv((rank - 1) % size)

        return together([functools.partial(step, rank) for rank in range(len(network.ports))])

    assert ring(Network(3), False) == [2, 0, 1]
    assert ring(Network(3, sends_wait=True), True) == [2, 0, 1]
    with pytest.raises(Deadlock, match="rank 0 waits for rank 1 to receive its message; rank 1 waits for rank 2"):
        ring(Network(3, sends_wait=True), False)
    with pytest.raises(Deadlock, match="no other role is running"):
        Network(2, sends_wait=True).ports[0].send(1, "nobody runs")
    with pytest.raises(ValueError, match="sends_wait: expected a network without faults"):
        Network(2, Faults(drop=0.1), sends_wait=True)


def test_an_exchange_sends_and_receives_at_once_where_sends_wait() -> None:
    """So a ring in which all exchange goes on; and an exchange that nobody answers says which rank waits for which."""
    network = Network(3, sends_wait=True)

    def step(rank: int) -> Any:
        after, before = (rank + 1) % 3, (rank - 1) % 3
        return network.ports[rank].exchange({after: torch.tensor([rank])}, [before])[before].item()

    assert together([functools.partial(step, rank) for rank in range(3)]) == [2, 0, 1]
    assert network.num_unread == 0
    a, b = Network(2, sends_wait=True).ports
    with pytest.raises(Deadlock, match="rank 0 waits for rank 1 to receive its message"):
        together([lambda: a.exchange({1: 5}, []), lambda: b.rank])
    with pytest.raises(ValueError, match="no way from rank 2 to rank 0"):
        a.exchange({1: 5}, [2])


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_time_is_that_of_the_formulas_of_ring_and_one_shot(num_ranks: int) -> None:
    n, size, alpha, beta = num_ranks, 240, 3.0, 0.5

    def seconds(hops: list[list[int]], size: int) -> float:
        network, part = Network(n, alpha=alpha, beta=beta), torch.zeros(size, dtype=torch.uint8)
        for turn in hops:  # one thread is enough: sends do not wait
            for rank in range(n):
                for hop in turn:
                    network.ports[rank].send((rank + hop) % n, part)
            for rank in range(n):
                for hop in turn:
                    network.ports[rank].recv((rank - hop) % n)
        return max(network.times)

    turns = 2 * (n - 1)
    assert seconds([[1]] * turns, size // n) == pytest.approx(turns * (alpha + size / n * beta))
    assert seconds([list(range(1, n))], size) == pytest.approx(alpha + (n - 1) * size * beta)


def test_a_rank_that_waits_for_nothing_is_done_when_its_messages_have_left() -> None:
    network = Network(2, alpha=10.0, beta=1.0)
    network.ports[0].send(1, b"four")
    assert network.times == [4.0, 0.0]
    network.ports[1].recv(0)
    assert network.times == [4.0, 14.0]


def test_the_shape_of_an_empty_tensor_is_not_free() -> None:
    network = Network(2)
    network.ports[0].send(1, torch.zeros(0, 70_000, 3))
    assert network.num_bytes == 3 * 8


def test_a_network_with_faults_loses_the_same_messages_whoever_is_faster() -> None:
    def lost(order: list[int]) -> list[list[int]]:
        network = Network(3, Faults(drop=0.5), seed=4)
        for rank in order:
            for number in range(20):
                network.ports[rank].send(2, number)
        return [[message for message, *_ in network._inboxes[rank, 2]] for rank in (0, 1)]

    assert lost([0, 1]) == lost([1, 0])
    assert 0 < len(lost([0, 1])[0]) < 20
