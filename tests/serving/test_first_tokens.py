"""The parts of a time to first token, as a router adds them up."""

from __future__ import annotations

import pytest

from reference_impl.serving import first_tokens
from reference_impl.serving.first_tokens import PARTS, FirstTokens, parts_of


def test_the_parts_are_what_engines_measured_and_what_lies_between() -> None:
    parts = parts_of(10.0, 13.0, 15.0, prefill=2.5, rest=0.25, first=0.5)
    assert parts == {"queue": 0.5, "prefill": 2.5, "transfer": 1.25, "rest": 0.25, "first_token": 0.5}


@pytest.mark.parametrize(
    ("computed_at", "prefill", "rest", "first", "expected"),
    [
        (13.0, 4.0, 0.0, 0.0, (0, 3, 2, 0, 0)),  # it cannot have begun before it was given away
        (15.5, 1.0, 0.0, 0.0, (4.5, 0.5, 0, 0, 0)),  # said later than the token: nothing is left for the others
        (14.0, 1.0, 0.75, 0.5, (3, 1, 0, 0.5, 0.5)),  # the pages came before the router heard of the prompt
        (13.0, 1.0, 0.0, 9.0, (2, 1, 0, 0, 2)),
    ],
)
def test_parts_that_overlap_still_add_up(
    computed_at: float, prefill: float, rest: float, first: float, expected: tuple[float, ...]
) -> None:
    parts = parts_of(10.0, computed_at, 15.0, prefill=prefill, rest=rest, first=first)
    assert tuple(parts.values()) == expected
    assert sum(expected) == 5.0


def test_of_several_prompts_the_last_one_counts_and_the_wait_begins_once() -> None:
    found = FirstTokens()
    found.begin(5, "cmpl-1", 1.0)
    found.begin(5, "cmpl-1", 2.0)  # its first engine was lost
    found.computed(5, 0.5, 3.0)
    found.computed(5, 0.25, 4.0)
    found.computed(6, 1.0, 4.0)
    found.has(5, 0.125, 0.25, 5.0)
    found.has(5, 9.0, 9.0, 9.0)  # of the next sample
    expected = dict(zip(PARTS, (2.75, 0.25, 0.625, 0.125, 0.25), strict=True))
    for name in ("cmpl-1", "cmpl-1-0", "cmpl-1-0/1", "cmpl-1/1"):
        assert found.of(name) == expected
    assert [found.of(name) for name in ("cmpl-", "cmpl-12", "cmpl-2")] == [None] * 3
    assert (found.summary()["transfer"] or {})["p50"] == 0.625
    assert (found.summary()["ttft"] or {})["mean"] == 4.0
    assert 'inferlab:time_to_first_token_part_seconds_sum{part="queue"} 2.75' in found.text().decode()


def test_a_failed_hand_over_has_no_parts_and_clients_that_go_leave_nothing() -> None:
    found = FirstTokens()
    found.begin(1, "a", 0.0)
    found.has(1, 0.0, 0.5, 1.0)
    found.begin(2, "b", 0.0)
    found.forget(2)
    found.has(2, 0.0, 0.5, 1.0)
    assert (found.of("a"), found.of("b"), found.summary()) == (None, None, dict.fromkeys((*PARTS, "ttft")))
    assert not found._waiting


def test_the_last_answers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_tokens, "LAST", 2)
    found = FirstTokens()
    for number, name in enumerate("abc"):
        found.begin(number, name, 0.0)
        found.computed(number, 0.5, 1.0)
        found.has(number, 0.0, 0.0, 1.0)
    assert [found.of(name) is None for name in "abc"] == [True, False, False]
