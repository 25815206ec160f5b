"""The rules of `protocol.py`, one by one: attempts, and what comes late from them (4)."""

from __future__ import annotations

import pytest

from reference_impl.features.disaggregation.messages import (
    Abort,
    Acknowledged,
    Done,
    Offer,
    Pushed,
    Refused,
    Reserved,
    Stopped,
)
from reference_impl.features.disaggregation.protocol import (
    Ended,
    PageHere,
    Write,
)
from tests.features.disaggregation.pair import KEYS, Both, kinds


@pytest.fixture
def both() -> Both:
    return Both()


# --- rule 4: attempts -----------------------------------------------------------------------------------------------


def begin_again(both: Both) -> None:
    """Attempt 2, whose Offer is delivered and nothing that follows it."""
    both.offer(num_pages=2)
    both.deliver()
    both.take(Write)
    both.act(both.p.written, "t", 1, [0, 1], error="reset")
    assert both.to_d == [Offer("t", 2, tuple(KEYS[:2]))]
    both.act(both.d.received, "P", both.to_d.pop())


def test_an_offer_says_that_the_attempts_before_it_have_stopped(both: Both) -> None:
    begin_again(both)
    assert both.num_free == 2
    assert both.to_p == [Reserved("t", 2, ((0, 1), (1, 0)))]  # free again, and given out the other way round


def test_what_comes_late_from_an_earlier_attempt_is_ignored_by_the_receiver(both: Both) -> None:
    begin_again(both)
    for late in (
        Pushed("t", 1, ((0, 100),)),
        Stopped("t", 1, ""),
        Abort("t", 1, "", True),
        Offer("t", 1, tuple(KEYS[:2])),
    ):
        assert both.act(both.d.received, "P", late) == []
    assert both.num_free == 2
    assert kinds(both.to_p) == ["Reserved"]
    both.act(both.d.checked, "t", 1, {0: True})
    assert both.take(PageHere) == []


def test_what_comes_late_from_an_earlier_attempt_is_ignored_by_the_sender(both: Both) -> None:
    begin_again(both)
    for late in (Reserved("t", 1, ((0, 3),)), Acknowledged("t", 1, (0,)), Done("t", 1), Refused("t", 1, "late")):
        assert both.act(both.p.received, "D", late) == []
    both.act(both.p.received, "D", Abort("t", 1, "late", is_final=True))
    both.act(both.p.written, "t", 1, [0, 1])
    assert both.done == []
    assert kinds(both.to_d) == ["Stopped", "Stopped"]  # of attempt 1, where the receiver waits for it
    both.to_d.clear()
    both.deliver()
    both.act(both.p.written, "t", 1, [0, 1])
    assert both.to_d == []
    both.go_on()
    assert both.take(Ended) == [Ended("t", 2, "")]


def test_what_is_of_an_attempt_to_come_is_not_believed(both: Both) -> None:
    both.offer(num_pages=2)
    for message in (Done("t", 9), Refused("t", 9, "a lie"), Abort("t", 9, "a lie", True), Reserved("t", 9, ((0, 0),))):
        assert both.act(both.p.received, "D", message) == []
    assert kinds(both.to_d) == ["Offer"]


def test_a_page_that_came_and_was_released_is_not_written_again(both: Both) -> None:
    both.offer(num_pages=2)
    both.deliver()
    both.act(both.p.written, "t", 1, [0])
    both.deliver()
    both.check()
    both.act(both.d.release, "t", indices=[0])
    both.take(Write)
    both.act(both.p.written, "t", 1, [1], error="reset")
    both.deliver()
    assert [[index for index, _ in write.pages] for write in both.take(Write)] == [[1]]


def test_what_was_pushed_in_an_earlier_attempt_is_not_pushed_again_before_it_is_written_again(both: Both) -> None:
    both.offer(num_pages=2)
    both.deliver()
    both.take(Write)
    both.act(both.p.written, "t", 1, [0])
    both.to_d.clear()  # lost, so page 0 gets another slot
    both.act(both.p.written, "t", 1, [1], error="reset")
    both.deliver()
    both.pass_time(1, only="P")
    assert both.to_d == [Pushed("t", 2, ())]
    assert len(both.take(Write)[0].pages) == 2


def test_no_number_of_an_attempt_is_used_twice(both: Both) -> None:
    both.offer("a")
    both.offer("b")
    both.act(both.p.abort, "a", "cancelled")
    both.offer("a")
    offers = [message.attempt for message in both.to_d if isinstance(message, Offer)]
    assert len(set(offers)) == 3


def test_a_transfer_is_tried_a_few_times_and_then_ends(both: Both) -> None:
    both.offer(num_pages=1)
    for attempt in (1, 2, 3):
        assert both.take(Ended) == []
        both.deliver()
        assert [write.attempt for write in both.take(Write)] == [attempt]
        both.act(both.p.written, "t", attempt, [0], error="connection reset")
    both.deliver()
    assert both.take(Ended) == [Ended("t", 0, "connection reset")]
    assert both.num_free == 4


def test_a_page_of_an_earlier_attempt_that_is_being_checked_is_not_written_again(both: Both) -> None:
    both.offer(num_pages=2)
    both.deliver()
    both.act(both.p.written, "t", 1, [0])
    both.deliver()
    both.take(Write)
    both.act(both.p.written, "t", 1, [1], error="reset")
    both.deliver()
    (write,) = both.take(Write)
    assert [index for index, _ in write.pages] == [1]
    both.check(wrong=(0,))  # then it must be
    both.deliver()
    assert [(write.attempt, write.pages[0][0]) for write in both.take(Write)] == [(2, 0)]
