"""The rules of `protocol.py`, one by one: who cannot start says so, and lives of peers (8, 9)."""

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
    MemoryFree,
    NoMore,
    Write,
)
from tests.features.disaggregation.pair import KEYS, Both


@pytest.fixture
def both() -> Both:
    return Both()


# --- rule 8: who cannot start says so -------------------------------------------------------------------------------


def test_a_request_that_the_sender_refuses_is_told(both: Both) -> None:
    both.act(both.d.claim, "t", "P")
    (send,) = both.p.cannot_start("t", "D", "the queue is full")
    both.act(both.d.received, "P", send.message)
    assert both.take(NoMore) == [NoMore("t", "the queue is full")]
    both.offer("u")
    with pytest.raises(ValueError, match="abort"):
        both.p.cannot_start("u", "D", "it is too late")


def test_a_request_that_claims_what_was_refused_before_is_told(both: Both) -> None:
    (send,) = both.p.cannot_start("t", "D", "the queue is full")
    both.act(both.d.received, "P", send.message)
    assert both.act(both.d.claim, "t", "P") == [NoMore("t", "the queue is full")]
    assert both.act(both.d.claim, "u", "Q") == [NoMore("u", "Q is not connected")]


def test_a_receiver_that_leaves_refuses(both: Both) -> None:
    both.act(both.d.claim, "t", "P")
    both.d.refusal = "the worker leaves"
    both.offer()
    both.deliver()
    assert both.take(Ended) == [Ended("t", 0, "the worker leaves")]
    assert both.take(NoMore) == [NoMore("t", "the worker leaves")]
    assert both.num_free == 4


def test_what_a_cancelled_request_would_get_is_refused(both: Both) -> None:
    both.act(both.d.release, "t")
    both.offer()
    both.deliver()
    assert both.take(Ended) == [Ended("t", 0, "the request let go")]
    assert both.num_free == 4


def test_a_cancelled_request_stays_cancelled_when_its_transfer_is_tried_again(both: Both) -> None:
    both.offer()
    both.deliver()
    both.act(both.d.release, "t")
    both.to_p.clear()
    both.act(both.p.written, "t", 1, [0, 1], error="reset")
    both.deliver()
    assert [ended.error for ended in both.take(Ended)] == ["the request let go"]
    assert both.num_free == 4


def test_more_transfers_than_a_peer_may_have_are_refused() -> None:
    both = Both()
    both.d.max_transfers = 2
    for name in ("a", "b", "c"):
        both.offer(name, num_pages=1)
    both.deliver()
    assert both.take(Ended) == [Ended("c", 0, "P has 2 transfers here already")]
    both.act(both.d.received, "P", Stopped("d", 9, ""))
    assert both.d.num_transfers == 2


def test_other_keys_under_the_name_of_a_transfer_are_refused(both: Both) -> None:
    both.act(both.d.claim, "t", "P")
    both.offer(num_pages=2)
    both.deliver()
    both.act(both.d.received, "P", Offer("t", 9, tuple(KEYS[5:7])))
    assert both.to_p == [Refused("t", 9, "it was offered with other keys before")]
    assert both.num_free == 4  # attempt 9 says that attempt 1 stopped
    assert both.take(NoMore) == [NoMore("t", "it was offered with other keys before")]


def test_another_peer_cannot_have_a_transfer_of_the_same_name(both: Both) -> None:
    both.offer(num_pages=2)
    both.deliver()
    both.d.join("Q", 4)
    for message in (Stopped("t", 1, ""), Abort("t", 1, "", True), Pushed("t", 1, ((0, 1),)), Offer("t", 9, (KEYS[0],))):
        both.act(both.d.received, "Q", message)
    assert both.take(Check) == []
    assert both.to_p == [Refused("t", 9, "another peer has a transfer of this name")]
    assert both.num_free == 2
    assert [action.error for action in both.act(both.d.claim, "t", "Q")] == ["it comes from P, not from Q"]


def test_a_push_that_is_not_known_is_aborted(both: Both) -> None:
    both.act(both.d.received, "P", Pushed("t", 3, ((0, 100),)))
    assert both.to_p == [Abort("t", 3, "it is not known", is_final=True)]


def test_the_sender_says_that_it_stopped_to_whom_it_offered_before(both: Both) -> None:
    both.offer()
    both.act(both.p.abort, "t", "cancelled")
    both.act(both.p.offer, "t", "E", KEYS[:2])  # messages to E are among those to P here
    both.to_d.clear()
    both.act(both.p.received, "D", Abort("t", 1, "P said nothing", is_final=True))
    assert both.to_d == [Stopped("t", 1, "it has ended")]
    both.act(both.p.received, "D", Abort("t", 2, "a lie", is_final=True))
    assert both.take(Ended) == [Ended("t", 0, "cancelled")]


def test_a_page_that_was_acknowledged_is_not_written_again(both: Both) -> None:
    both.offer(num_pages=2)
    both.act(both.p.received, "D", Acknowledged("t", 1, (0,)))
    both.act(both.p.received, "D", Reserved("t", 1, ((0, 0), (1, 1), (2, 2))))
    assert [write.pages for write in both.take(Write)] == [((1, 1),)]


def test_a_page_that_does_not_exist_is_not_ready(both: Both) -> None:
    both.offer(num_pages=2)
    with pytest.raises(ValueError, match="pages 0 to 1, with digests of 64 bits; page 2 came with 5"):
        both.p.pages_ready("t", {2: 5}, now=0)
    with pytest.raises(ValueError, match="page 1 came with -1"):
        both.p.pages_ready("t", {1: -1}, now=0)
    with pytest.raises(ValueError, match="is going on already"):
        both.p.offer("t", "D", KEYS[:1], now=0)
    with pytest.raises(ValueError, match="1 to 65536 pages"):
        both.p.offer("u", "D", [], now=0)


# --- rule 9: lives --------------------------------------------------------------------------------------------------


def test_a_peer_that_is_lost_is_cut_off_before_its_slots_are_free(both: Both) -> None:
    both.act(both.d.claim, "t", "P")
    both.offer(num_pages=2)
    both.deliver()
    assert both.act(both.d.lost, "P") == [CutOff("P"), NoMore("t", "the connection to P was lost")]
    assert both.act(both.d.lost, "P") == []
    both.act(both.d.received, "P", Stopped("t", 1, "from before"))  # it is not believed any more
    assert both.num_free == 2
    assert both.act(both.d.cut_off, "P") == [MemoryFree("P")]
    assert both.act(both.d.cut_off, "P") == []


def test_a_peer_that_is_dead_is_not_asked_to_be_cut_off(both: Both) -> None:
    both.offer(num_pages=2)
    both.deliver()
    assert both.act(both.d.cut_off, "P") == [MemoryFree("P")]


def test_a_worker_that_starts_again_joins_under_another_name(both: Both) -> None:
    with pytest.raises(ValueError, match="joins under another name"):
        both.d.join("P", 4)
    with pytest.raises(ValueError, match="1 slot or more, not 0"):
        both.d.join("P2", 0)
    both.d.join("P2", 4)


def test_a_receiver_that_is_lost_ends_its_transfers_alone(both: Both) -> None:
    both.offer("t")
    both.offer("w")
    both.act(both.d.received, "P", both.to_d.pop())
    both.deliver()
    both.act(both.p.offer, "u", "E", KEYS[:2])
    both.to_d.clear()
    both.act(both.p.lost, "D")
    assert both.to_d == []  # nothing reaches it
    assert [ended.transfer for ended in both.take(Ended)] == []
    assert both.p.num_transfers == 3  # both are being written
    both.write()
    assert [ended.transfer for ended in both.take(Ended)] == ["w", "t"]
    assert both.p.num_transfers == 1


def test_a_write_to_a_receiver_that_is_lost_and_that_hangs_is_cut_off(both: Both) -> None:
    both.offer("t")
    both.deliver()
    both.act(both.p.lost, "D")
    both.pass_time(5, only="P")
    assert both.take(CutOff) == [CutOff("D")]
    both.act(both.p.cut_off, "D")
    assert both.take(Ended) == [Ended("t", 0, "the connection to D was lost")]


def test_events_of_what_is_not_known_do_nothing(both: Both) -> None:
    for event, *arguments in (
        (both.p.pages_ready, "x", {0: 1}), (both.p.written, "x", 1, [0]), (both.p.abort, "x", "gone"),
        (both.p.lost, "X"), (both.p.cut_off, "X"), (both.d.lost, "X"), (both.d.cut_off, "X"),
        (both.d.checked, "x", 1, {0: True}), (both.d.received, "X", Offer("x", 1, (KEYS[0],))),
        (both.p.received, "X", Done("x", 1)),
    ):  # fmt: skip
        assert both.act(event, *arguments) == []
    assert both.to_d == both.to_p == []
