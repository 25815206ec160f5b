"""What both ends of transfers count, over the protocol itself: so each way in which one ends has its class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from reference_impl.features.disaggregation.protocol import Action
from reference_impl.features.disaggregation.tally import PUSHED, RECEIVED, PeerTally, Tally, outcome, peer_of
from tests.features.disaggregation.pair import KEYS, TIMES, Both


class Counted(Both):
    """Both ends, each with a tally whose clock is theirs."""

    def __init__(self, num_slots: int = 4):
        super().__init__(num_slots)
        self.of_p, self.of_d = (Tally(lambda: self.now) for _ in "PD")

    def act(self, event: Callable[..., list[Action]], *args: Any, **fields: Any) -> list[Action]:
        tally = self.of_p if getattr(event, "__self__", None) is self.p else self.of_d

        def counted(*args: Any, **fields: Any) -> list[Action]:
            actions = event(*args, **fields)
            for action in actions:
                tally.saw(action)
            return actions

        return super().act(counted, *args, **fields)

    def expect(self, name: str) -> None:
        self.of_d.expected(name, "P")
        self.act(self.d.claim, name, "P")

    def ends(self) -> tuple[dict[tuple[str, str], int], dict[tuple[str, str], int]]:
        return self.of_p.by_peer()["D"].ended, self.of_d.by_peer()["P"].ended


def test_a_transfer_that_came_whole() -> None:
    both = Counted()
    both.offer(num_pages=3)
    both.expect("t")
    assert both.of_p.by_peer()["D"].num_open == {PUSHED: 1}
    both.now = 2.0
    both.go_on()
    whole = {(PUSHED, "whole"): 1}, {(RECEIVED, "whole"): 1}
    assert both.ends() == whole
    both.of_d.released("t")
    both.act(both.d.release, "t")
    assert both.ends() == whole, "what is over is released without an end of its own"
    p, d = both.of_p.by_peer()["D"], both.of_d.by_peer()["P"]
    assert (p.pages, d.pages, d.num_damaged) == ({PUSHED: 3}, {RECEIVED: 3}, 0)
    assert (p.num_open, d.num_open) == ({PUSHED: 0}, {RECEIVED: 0})
    [pushed], [received] = both.of_p.last(), both.of_d.last()
    assert (pushed.transfer, pushed.peer, pushed.num_pages, pushed.error) == ("t", "D", 3, "")
    assert (pushed.started_at, pushed.first_page_at, pushed.ended_at) == (0.0, 2.0, 2.0)
    assert (received.started_at, received.first_page_at, received.ended_at) == (0.0, 2.0, 2.0)
    assert (received.direction, received.num_pages) == (RECEIVED, 3)


def no_slot(both: Counted) -> None:
    both.offer("a", num_pages=4)
    both.offer("t", num_pages=4)
    both.pass_time(TIMES.credit + 1, deliver=True)


def silent(both: Counted) -> None:
    both.pass_time(TIMES.lease + 1)


def too_long(both: Counted) -> None:
    both.offer(is_ready=False)
    both.pass_time(TIMES.limit + 1, deliver=True)


def lost(both: Counted) -> None:
    both.offer(is_ready=False)
    both.deliver()
    both.act(both.d.lost, "P")
    both.act(both.d.cut_off, "P")
    both.act(both.p.lost, "D")


def cancelled(both: Counted) -> None:
    both.offer(is_ready=False)
    both.deliver()
    both.of_d.released("t")
    both.act(both.d.release, "t")
    both.deliver()


def cancelled_by_its_sender(both: Counted) -> None:
    both.offer(is_ready=False)
    both.deliver()
    both.act(both.p.abort, "t", "the prompt was not computed to its end")
    both.deliver()


@pytest.mark.parametrize(
    ("run", "classes"),
    [
        (no_slot, ("no_slot", "no_slot")), (silent, ("", "silent")), (too_long, ("too_long", "too_long")),
        (lost, ("peer_lost", "peer_lost")), (cancelled, ("cancelled", "cancelled")),
        (cancelled_by_its_sender, ("cancelled", "cancelled")),
    ],
)  # fmt: skip
def test_each_early_end_has_a_class(run: Callable[[Counted], None], classes: tuple[str, str]) -> None:
    both = Counted()
    both.expect("t")
    run(both)
    of_p, of_d = (tally.by_peer().get(peer, PeerTally()).ended for tally, peer in ((both.of_p, "D"), (both.of_d, "P")))
    assert all(transfer != "t" for tally in (both.of_p, both.of_d) for _, transfer in [*tally._first, *tally._open])
    assert (of_p, of_d) == (Counter({(PUSHED, classes[0]): 1} if classes[0] else {}), {(RECEIVED, classes[1]): 1})


def test_damaged_pages_are_counted_by_the_shell_and_a_transfer_that_never_gets_well_is_damaged() -> None:
    tally = Tally()
    tally.checked("P~1", {0: True, 1: False, 2: False})
    assert tally.by_peer()["P"].num_damaged == 2
    assert outcome("page 0 was damaged on the way, and no further attempt came") == "damaged"


def test_pages_that_nobody_claims() -> None:
    both = Counted()
    both.offer()
    both.go_on()
    both.pass_time(TIMES.unclaimed + 1)
    assert both.ends() == ({(PUSHED, "whole"): 1}, {(RECEIVED, "unclaimed"): 1})


def test_meetings_with_a_peer_are_one_peer_and_what_no_class_is_about_is_other() -> None:
    assert (peer_of("name~2"), peer_of("name")) == ("name", "name")
    assert outcome("the kernel is out of sockets") == "other"


def test_of_transfers_that_are_over_the_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reference_impl.features.disaggregation.tally.LAST", 3)
    both = Counted(num_slots=40)
    for number in range(5):
        both.offer(f"t{number}", num_pages=len(KEYS[:2]))
        both.go_on()
    assert [moved.transfer for moved in both.of_p.last()] == ["t2", "t3", "t4"]
