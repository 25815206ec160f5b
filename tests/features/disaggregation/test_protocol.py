"""The rules of `protocol.py`, one by one: who owns a slot, when a page is used, attempts (1 to 4)."""

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
    Check,
    CutOff,
    Ended,
    LetGo,
    MemoryFree,
    NoMore,
    PageHere,
    Write,
)
from tests.features.disaggregation.pair import KEYS, Both, kinds


@pytest.fixture
def both() -> Both:
    return Both()


# --- a transfer that goes well ------------------------------------------------------------------------------------


def test_a_transfer_from_its_offer_to_its_end(both: Both) -> None:
    both.act(both.d.claim, "t", "P")
    both.offer(num_pages=2)
    both.deliver()
    (write,) = both.take(Write)
    assert write == Write("D", "t", 1, ((0, 0), (1, 1)))
    assert both.act(both.p.written, "t", 1, [0, 1]) == []
    assert both.to_d == [Pushed("t", 1, ((0, 100), (1, 101)))]
    both.deliver()
    assert both.done == [Check("t", 1, "P", ((0, 0, 100), (1, 1, 101)))]
    both.check()
    here = [PageHere("t", 0, KEYS[0], "P", 0), PageHere("t", 1, KEYS[1], "P", 1)]
    assert both.done == [*here, NoMore("t", "")]
    assert both.to_p == [Done("t", 1)]
    both.done = []
    both.deliver()
    assert both.done == [LetGo("t", (0, 1)), Ended("t", 2, "")]
    assert both.p.num_transfers == 0
    assert both.num_free == 2
    both.act(both.d.release, "t")
    assert both.num_free == 4


def test_pages_are_written_when_they_are_computed_and_have_a_slot(both: Both) -> None:
    both.offer(num_pages=6, is_ready=False)
    both.ready("t", 0, 5)
    assert both.take(Write) == []
    both.deliver()
    assert [write.pages for write in both.take(Write)] == [((0, 0),)]
    both.ready("t", 1, 2)
    assert [write.pages for write in both.take(Write)] == [((1, 1), (2, 2))]


# --- rule 1: two owners -------------------------------------------------------------------------------------------


def test_a_slot_is_free_when_its_writer_and_the_request_have_let_go(both: Both) -> None:
    both.offer(num_pages=2)
    both.deliver()
    both.act(both.d.release, "t")
    assert both.num_free == 2  # the request has let go, the writer has not
    both.deliver()  # Abort
    assert both.num_free == 2
    assert both.to_d == []
    both.act(both.p.written, "t", 1, [0])
    both.deliver()
    assert both.num_free == 3  # the writer has let go of page 0
    both.act(both.p.written, "t", 1, [1])
    both.deliver()
    assert both.num_free == 4


def test_a_page_that_was_pushed_is_held_for_the_request_alone(both: Both) -> None:
    both.offer(num_pages=2)
    both.deliver()
    both.write()
    both.deliver()
    assert both.num_free == 2
    both.act(both.d.release, "t")  # while it is being checked
    assert both.num_free == 4
    both.check()
    assert both.take(PageHere) == []


def test_a_page_that_is_not_here_cannot_be_released_alone(both: Both) -> None:
    both.offer(num_pages=2)
    both.deliver()
    both.act(both.p.written, "t", 1, [0])
    both.deliver()
    both.act(both.d.release, "t", indices=[0, 1, 2])
    assert both.num_free == 2
    both.check()
    both.act(both.d.release, "t", indices=[0, 0, 1])
    assert both.num_free == 3


def test_a_source_is_held_until_its_page_is_acknowledged_and_not_being_written(both: Both) -> None:
    both.offer(num_pages=2)
    both.deliver()
    both.act(both.p.written, "t", 1, [0])
    assert both.take(LetGo) == []
    both.act(both.p.received, "D", Acknowledged("t", 1, (0, 1)))  # page 1: from a peer that lies
    assert both.take(LetGo) == [LetGo("t", (0,))]
    assert both.take(Ended) == []
    both.act(both.p.written, "t", 1, [1])
    assert both.done[-2:] == [LetGo("t", (1,)), Ended("t", 2, "")]


def test_a_source_is_let_go_as_soon_as_its_page_is_acknowledged(both: Both) -> None:
    both.offer(num_pages=3, is_ready=False)
    both.ready("t", 1)
    both.go_on()
    assert both.take(LetGo) == [LetGo("t", (1,))]
    both.act(both.p.received, "D", Acknowledged("t", 1, (0, 7)))  # there is no page 7
    assert both.take(LetGo) == [LetGo("t", (0,))]
    assert both.take(Ended) == []


def test_a_cancelled_request_lets_go_of_what_is_not_being_written_at_once(both: Both) -> None:
    both.offer(num_pages=3, is_ready=False)
    both.ready("t", 1)
    both.deliver()
    both.act(both.p.abort, "t", "cancelled")
    assert both.take(LetGo) == [LetGo("t", (0, 2))]
    both.act(both.p.written, "t", 1, [1])
    assert both.take(LetGo) == [LetGo("t", (1,))]
    assert both.take(Ended) == [Ended("t", 0, "cancelled")]


# --- rule 2: a slot waits for its writer --------------------------------------------------------------------------


def test_an_abort_frees_no_slot_before_its_writer_says_that_it_stopped(both: Both) -> None:
    both.offer(num_pages=2)
    both.deliver()
    both.act(both.p.abort, "t", "cancelled")
    assert kinds(both.to_d) == ["Abort"]  # the receiver is told at once that no more will come
    both.act(both.d.claim, "t", "P")
    both.deliver()
    assert both.take(NoMore) == [NoMore("t", "cancelled")]
    assert both.num_free == 2
    both.act(both.p.written, "t", 1, [0], error="reset")
    both.deliver()
    assert both.num_free == 2
    both.act(both.p.written, "t", 1, [1], error="reset")
    assert both.to_d == [Stopped("t", 1, "cancelled")]
    both.deliver()
    assert both.num_free == 4


def test_a_lease_that_ends_frees_no_slot(both: Both) -> None:
    both.offer(num_pages=2)
    both.deliver()
    both.pass_time(4, only="D")
    assert both.to_p[-1] == Abort("t", 1, "P said nothing for 4 s", is_final=False)
    assert both.num_free == 2
    both.pass_time(4, only="D")
    assert both.num_free == 2
    assert both.take(CutOff) == []


def test_a_writer_that_does_not_stop_is_cut_off_and_only_then_its_slots_are_free(both: Both) -> None:
    both.offer(num_pages=2)
    both.deliver()
    both.act(both.d.release, "t")
    both.pass_time(10, only="D")
    assert both.take(CutOff) == [CutOff("P")]
    assert both.num_free == 2
    assert both.act(both.d.cut_off, "P") == [MemoryFree("P")]


def test_a_write_that_is_late_holds_its_source_and_its_slot(both: Both) -> None:
    both.offer(num_pages=1)
    both.deliver()
    both.act(both.p.written, "t", 1, [0], is_over=False)
    both.deliver()
    assert both.take(LetGo) == []
    assert both.num_free == 3
    assert kinds(both.to_d) == []  # neither Stopped nor the next Offer
    both.act(both.p.written, "t", 1, [0], error="timed out")
    assert kinds(both.to_d) == ["Offer"]
    both.deliver()
    assert [write.attempt for write in both.take(Write)] == [1, 2]


def test_a_write_that_never_ends_is_cut_off(both: Both) -> None:
    both.offer(num_pages=2)
    both.deliver()
    both.act(both.p.written, "t", 1, [1], is_over=False)
    both.pass_time(4, only="P")
    assert both.take(CutOff) == []
    both.pass_time(5, only="P")
    assert both.take(CutOff) == [CutOff("D")]
    assert both.take(Ended) == []
    both.act(both.p.cut_off, "D")
    assert both.done[-2:] == [LetGo("t", (0, 1)), Ended("t", 0, "a write takes too long")]


# --- rule 3: a page is used when it was checked -------------------------------------------------------------------


def test_a_page_that_is_damaged_is_not_used_and_pushed_again_in_another_attempt(both: Both) -> None:
    both.offer(num_pages=3)
    both.deliver()
    both.write()
    both.deliver()
    both.check(wrong=(1,))
    assert [page.index for page in both.take(PageHere)] == [0, 2]
    both.deliver()
    (write,) = both.take(Write)
    assert [index for index, _ in write.pages] == [1]
    assert write.attempt == 2
    both.act(both.p.written, "t", 2, [1])
    both.go_on()
    assert [page.index for page in both.take(PageHere)] == [1]
    assert both.take(Ended) == [Ended("t", 3, "")]


def test_pages_that_arrived_before_a_failure_stay_until_they_are_released(both: Both) -> None:
    both.act(both.d.claim, "t", "P")
    both.offer(num_pages=3, is_ready=False)
    both.ready("t", 0, 1)
    both.go_on()
    assert [page.index for page in both.take(PageHere)] == [0, 1]
    both.act(both.p.abort, "t", "the worker is stopped")
    both.deliver()
    assert both.take(NoMore) == [NoMore("t", "the worker is stopped")]
    both.act(both.d.lost, "P")
    both.act(both.d.cut_off, "P")
    both.pass_time(100, only="D")
    assert both.num_free == 2
    assert both.take(MemoryFree) == []
    both.act(both.d.release, "t")
    assert both.take(MemoryFree) == [MemoryFree("P")]


def test_the_request_is_told_that_no_more_comes_when_nothing_is_being_checked(both: Both) -> None:
    both.act(both.d.claim, "t", "P")
    both.offer(num_pages=2)
    both.deliver()
    both.write()
    both.deliver()
    both.act(both.d.lost, "P")
    assert both.take(NoMore) == []
    both.check()
    assert kinds(both.done[-3:]) == ["PageHere", "PageHere", "NoMore"]


def test_nothing_comes_after_the_request_was_told_so(both: Both) -> None:
    both.act(both.d.claim, "t", "P")
    both.offer(num_pages=1)
    both.deliver()
    both.pass_time(30, only="D")  # long enough for a Pushed that was under way all the time
    both.act(both.d.received, "P", Pushed("t", 1, ((0, 100),)))
    assert both.take(NoMore)
    assert both.take(Check) == []


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
