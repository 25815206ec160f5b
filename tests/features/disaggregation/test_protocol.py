"""The rules of `protocol.py`, one by one: who owns a slot, when a page is used (1 to 3)."""

from __future__ import annotations

import pytest

from reference_impl.features.disaggregation.messages import (
    Abort,
    Acknowledged,
    Done,
    Pushed,
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


def test_a_sender_that_stops_begins_no_more_writes(both: Both) -> None:
    both.offer(num_pages=6)
    both.deliver()
    assert len(both.take(Write)) == 1
    both.act(both.p.abort, "t", "cancelled")
    assert both.act(both.p.received, "D", Reserved("t", 1, ((4, 0), (5, 1)))) == []
    assert both.act(both.p.pages_ready, "t", {5: 1}) == []


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
    both.act(both.p.abort, "t", "cancelled")
    both.deliver()
    assert both.take(NoMore) == [NoMore("t", "cancelled")]
    both.write()
    assert kinds(both.to_d) == ["Pushed", "Stopped"]
    both.deliver()
    assert both.take(Check) == []
    assert both.num_free == 4
