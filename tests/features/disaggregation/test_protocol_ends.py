"""The rules of `protocol.py`, one by one: repeats, leases, credit (5 to 7)."""

from __future__ import annotations

import pytest

from reference_impl.features.disaggregation.messages import (
    Abort,
    Acknowledged,
    Done,
    Offer,
    Pushed,
    Reserved,
)
from reference_impl.features.disaggregation.protocol import (
    Check,
    Ended,
    Lapsed,
    NoMore,
    PageHere,
    Times,
    Write,
)
from tests.features.disaggregation.pair import KEYS, Both, kinds


@pytest.fixture
def both() -> Both:
    return Both()


# --- rule 5: repeats ------------------------------------------------------------------------------------------------


def test_every_message_may_come_twice(both: Both) -> None:
    both.act(both.d.claim, "t", "P")
    both.offer(num_pages=2)
    for _ in range(20):
        while both.to_d or both.to_p:
            to_d, to_p, both.to_d, both.to_p = both.to_d, both.to_p, [], []
            for message in to_d:
                both.act(both.d.received, "P", message)
                both.act(both.d.received, "P", message)
            for message in to_p:
                both.act(both.p.received, "D", message)
                both.act(both.p.received, "D", message)
        both.write()
        both.check()
    assert [type(action).__name__ for action in both.done] == ["PageHere", "PageHere", "NoMore", "LetGo", "Ended"]


def test_a_page_that_is_here_is_not_checked_again(both: Both) -> None:
    both.offer(num_pages=2)
    both.deliver()
    both.act(both.p.written, "t", 1, [0])
    again = both.to_d[0]
    both.deliver()
    both.check()
    both.take(PageHere)
    both.to_p.clear()
    both.act(both.d.received, "P", again)
    assert both.take(Check) == []
    assert both.to_p == [Acknowledged("t", 1, (0,))]


def test_a_verdict_that_comes_twice_counts_once(both: Both) -> None:
    both.offer(num_pages=2)
    both.deliver()
    both.act(both.p.written, "t", 1, [0, 1])
    both.deliver()
    both.check(wrong=(0,))
    both.take(PageHere)
    both.deliver()
    both.write()
    both.deliver()
    assert [check.attempt for check in both.take(Check)] == [2]
    for right in (False, True):
        both.act(both.d.checked, "t", 1, {0: right, 1: right})
    assert both.take(PageHere) == []
    assert both.num_free == 2
    both.act(both.d.checked, "t", 2, {0: True})
    assert [page.index for page in both.take(PageHere)] == [0]


def lose(both: Both, kind: type) -> bool:
    """Loses a message of this kind, if there is one."""
    for messages in (both.to_d, both.to_p):
        for message in messages:
            if isinstance(message, kind):
                messages.remove(message)
                return True
    return False


@pytest.mark.parametrize("kind", [Offer, Reserved, Pushed, Acknowledged, Done])
def test_a_message_that_is_lost_comes_again(both: Both, kind: type) -> None:
    both.act(both.d.claim, "t", "P")
    both.offer(num_pages=6)
    is_lost = False
    for _ in range(40):
        is_lost = is_lost or lose(both, kind)
        if both.to_d:
            both.act(both.d.received, "P", both.to_d.pop(0))
        elif both.to_p:
            both.act(both.p.received, "D", both.to_p.pop(0))
        else:
            both.pass_time(0.5)
        both.write()
        both.check()
        for page in both.take(PageHere):
            both.act(both.d.release, "t", indices=[page.index])
    assert is_lost
    assert both.take(NoMore) == [NoMore("t", "")]
    assert both.take(Ended) == [Ended("t", 6, "")]


def test_an_abort_or_a_stopped_that_is_lost_comes_again(both: Both) -> None:
    both.offer(num_pages=2)
    both.deliver()
    both.write()
    both.to_d.clear()
    both.act(both.d.release, "t")
    both.to_p.clear()  # Abort
    both.pass_time(1, only="D")
    assert kinds(both.to_p) == ["Abort"]
    both.act(both.p.received, "D", both.to_p.pop())
    assert kinds(both.to_d) == ["Stopped"]
    both.to_d.clear()
    both.pass_time(1, only="D")
    both.deliver()  # the sender has forgotten the transfer, and says that it has stopped
    assert both.num_free == 4


def test_what_was_acknowledged_is_not_pushed_again(both: Both) -> None:
    both.offer(num_pages=3, is_ready=False)
    both.ready("t", 0, 1)
    both.deliver()
    both.act(both.p.written, "t", 1, [0, 1])
    both.act(both.p.received, "D", Acknowledged("t", 1, (0,)))
    both.to_d.clear()
    both.pass_time(1, only="P")
    assert both.to_d == [Pushed("t", 1, ((1, 101),))]


def test_who_waits_for_pages_to_be_computed_stays_in_touch(both: Both) -> None:
    both.offer(num_pages=2, is_ready=False)
    both.pass_time(25, deliver=True)
    both.ready("t", 0, 1)
    both.go_on()
    assert both.take(Ended) == [Ended("t", 2, "")]


# --- rule 6: leases -------------------------------------------------------------------------------------------------


def test_a_receiver_that_says_nothing_is_given_up(both: Both) -> None:
    both.offer()
    both.pass_time(4)
    assert both.take(Ended) == [Ended("t", 0, "D said nothing for 4 s")]
    assert kinds(both.to_d) == ["Offer", "Offer", "Offer", "Offer", "Stopped"]


def test_a_transfer_has_a_limit_on_either_side_however_much_is_said(both: Both) -> None:
    both.act(both.d.claim, "t", "P")
    both.offer(is_ready=False)
    both.pass_time(29.5, deliver=True)
    assert both.take(Ended) == []
    both.pass_time(1, deliver=True)
    assert both.take(Ended) == [Ended("t", 0, "not over after 30 s")]
    assert both.take(NoMore) == [NoMore("t", "not over after 30 s")]
    both.act(both.d.received, "P", Offer("u", 7, tuple(KEYS[:2])))
    for _ in range(60):
        both.pass_time(0.5, only="D")
        both.act(both.d.received, "P", Pushed("u", 7, ()))
    assert Abort("u", 7, "not over after 30 s", is_final=True) in both.to_p


def test_a_sender_has_a_limit_of_its_own(both: Both) -> None:
    both.offer(is_ready=False)
    for _ in range(59):
        both.pass_time(0.5, only="P")
        both.act(both.p.received, "D", Reserved("t", 1, ()))
    assert both.take(Ended) == []
    both.pass_time(0.5, only="P")
    assert both.take(Ended) == [Ended("t", 0, "not over after 30 s")]


def test_a_request_whose_transfer_is_not_offered_is_told(both: Both) -> None:
    both.act(both.d.claim, "t", "P")
    both.pass_time(4)
    assert both.take(NoMore) == [NoMore("t", "no offer came within 4 s")]


def test_a_request_is_told_when_no_further_attempt_comes(both: Both) -> None:
    both.act(both.d.claim, "t", "P")
    both.offer(num_pages=1)
    both.deliver()
    both.write()
    both.deliver()
    both.check(wrong=(0,))
    both.pass_time(4, only="D")
    assert [action.error for action in both.take(NoMore)] == [
        "page 0 was damaged on the way, and no further attempt came"
    ]


def test_pages_that_nobody_claims_lapse(both: Both) -> None:
    both.offer(num_pages=1)
    both.go_on()
    both.pass_time(19.5, only="D")
    assert both.take(Lapsed) == []
    both.pass_time(1, only="D")
    assert both.take(Lapsed) == [Lapsed("t")]
    assert both.num_free == 4
    assert [type(action) for action in both.act(both.d.claim, "t", "P")] == [NoMore]
    both.pass_time(4, only="D")
    assert both.d.num_transfers == 0


def test_pages_that_were_claimed_stay(both: Both) -> None:
    both.offer(num_pages=1)
    both.go_on()
    both.act(both.d.claim, "t", "P")
    both.pass_time(1000, only="D")
    assert both.take(Lapsed) == []
    assert both.num_free == 3


def test_a_clock_that_jumps_back_makes_no_lease_longer(both: Both) -> None:
    both.offer()
    both.pass_time(2, only="P")
    both.now -= 1e6
    both.pass_time(2.5, only="P")
    assert [ended.error for ended in both.take(Ended)] == ["D said nothing for 4 s"]


def test_times_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="limit must be above 0, not 0"):
        Times(limit=0)
    with pytest.raises(ValueError, match=r"2 intervals of 3 s or more, not 5 s"):
        Times(interval=3, lease=5)


# --- rule 7: credit -------------------------------------------------------------------------------------------------


def test_credit_is_given_in_the_order_of_the_offers(both: Both) -> None:
    for name in ("a", "b", "c"):
        both.offer(name, num_pages=3)
    both.deliver()
    assert [(write.transfer, len(write.pages)) for write in both.take(Write)] == [("a", 3), ("b", 1)]
    both.act(both.p.written, "a", 1, [0, 1, 2])
    both.deliver()
    both.check()
    both.act(both.d.release, "a", indices=[1])
    both.deliver()
    assert [(write.transfer, write.pages) for write in both.take(Write)] == [("b", ((1, 1),))]
    both.act(both.d.release, "a")
    both.deliver()
    assert [(write.transfer, len(write.pages)) for write in both.take(Write)] == [("b", 1), ("c", 1)]


def test_a_transfer_that_is_larger_than_the_memory_goes_through_it_page_by_page(both: Both) -> None:
    both.act(both.d.claim, "t", "P")
    both.offer(num_pages=40)
    came = []
    while both.to_d or both.to_p or both.done:
        both.go_on()
        pages = both.take(PageHere)
        came += [page.index for page in pages]
        both.act(both.d.release, "t", indices=[page.index for page in pages])
        if both.take(NoMore) == [NoMore("t", "")]:
            break
    assert sorted(came) == list(range(40))
    assert both.num_free == 4


def test_a_transfer_that_was_aborted_gets_no_credit(both: Both) -> None:
    for name in ("a", "b", "c"):
        both.offer(name, num_pages=4)
    both.go_on()
    both.act(both.d.release, "b")
    both.deliver()
    both.act(both.d.release, "a", indices=[0])
    assert [(message.transfer, len(message.pages)) for message in both.to_p] == [("c", 1)]


def test_a_transfer_that_gets_no_slot_is_aborted(both: Both) -> None:
    both.act(both.d.claim, "a", "P")
    both.offer("a", num_pages=4)
    both.act(both.d.claim, "b", "P")
    both.offer("b", num_pages=1)
    both.go_on()
    both.pass_time(9, deliver=True)
    assert both.take(Ended) == [Ended("a", 4, "")]
    both.pass_time(2, deliver=True)
    assert both.take(Ended) == [Ended("b", 0, "no slot came free within 10 s")]
    assert NoMore("b", "no slot came free within 10 s") in both.done


def test_a_transfer_that_fills_the_memory_and_that_nobody_empties_is_aborted_and_keeps_what_came(both: Both) -> None:
    both.act(both.d.claim, "t", "P")
    both.offer(num_pages=6, is_ready=False)
    both.ready("t", 0, 1)
    both.pass_time(12, deliver=True)  # it has slots that its sender does not need yet
    both.ready("t", 2, 3, 4, 5)
    both.go_on()
    both.pass_time(9, deliver=True)
    assert both.take(NoMore) == []
    both.pass_time(2, deliver=True)
    assert both.take(NoMore) == [NoMore("t", "no slot came free within 10 s")]
    assert [page.index for page in both.take(PageHere)] == [0, 1, 2, 3]
    assert both.num_free == 0
