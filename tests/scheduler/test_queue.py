"""The queue keeps its requests in order, whatever comes and goes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_impl.core.ranking import RankedQueue
from reference_impl.interfaces import Request, SamplingParams
from tests.examples import examples


def make_request(name: str) -> Request:
    return Request(name, [1], 1, SamplingParams(), seed=0, arrival=0.0)


@settings(max_examples=examples(150), deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(st.sampled_from(["push", "push", "pop", "remove", "push again"]), st.integers(0, 5))))
def test_the_queue_is_a_stably_sorted_list(events: list[tuple[str, int]]) -> None:
    queue, model = RankedQueue(), []  # the model: (rank, request) in order
    for number, (event, value) in enumerate(events):
        if event.startswith("push") or not model:
            request = make_request(str(number))
            queue.push(request, value)
            model.append((value, request))
            model.sort(key=lambda entry: entry[0])
        elif event == "pop":
            assert queue.first() is model[0][1]
            assert queue.pop() is model.pop(0)[1]
        else:
            _, request = model.pop(value % len(model))
            assert queue.remove(request.id) is request
            assert request.id not in queue
        assert list(queue) == [request for _, request in model]
        assert len(queue) == len(model)
        assert all(request.id in queue for request in queue)


def test_a_preempted_request_has_its_old_place_again_also_among_equals() -> None:
    queue = RankedQueue()
    for number, name in enumerate("abcd"):
        queue.push(make_request(name), (0, number))  # the policy's rank, the order of arrival
    b = (queue.pop(), queue.pop())[1]
    queue.push(b, (0, 1))
    assert [request.id for request in queue] == ["b", "c", "d"]


def test_ten_thousand_waiting_requests_cost_some_comparisons_each() -> None:
    comparisons = 0

    class Rank:
        def __init__(self, value: float):
            self.value = value

        def __eq__(self, other: object) -> bool:
            nonlocal comparisons
            comparisons += 1
            return isinstance(other, Rank) and self.value == other.value

        def __lt__(self, other: Rank) -> bool:
            return self.value < other.value

    queue, ranks = RankedQueue(), random.Random(0)
    for i in range(10_000):
        queue.push(make_request(str(i)), Rank(ranks.random()))
    comparisons = 0
    for i in range(100):
        queue.push(make_request(f"new {i}"), Rank(ranks.random()))
        queue.remove(f"new {i}")
        queue.pop()
    assert comparisons <= 100 * 2 * 16, "log2 of 10,000 is 13.3"


def test_the_queue_refuses_what_it_could_not_find_again() -> None:
    queue = RankedQueue()
    queue.push(make_request("a"), 1.0)
    with pytest.raises(ValueError, match="'a' waits already"):
        queue.push(make_request("a"), 2.0)
    with pytest.raises(KeyError, match="nobody"):
        queue.remove("nobody")
    assert queue.pop().id == "a"
    for look in (queue.first, queue.pop):
        with pytest.raises(IndexError):
            look()
