"""Samples of one prompt, and held requests."""

from __future__ import annotations

from reference_impl.features.beams.scheduling import Branching
from tests.scheduler.plans import make_request, output_of, serve, shape


def test_held_requests_that_wait_for_each_other_do_not_wait_behind_others() -> None:
    """The first beam holds its blocks until the second has been sampled; between them stands one that fits only when
    both are gone."""
    first, between, second = make_request("first", 8, 2), make_request("between", 20, 2), make_request("second", 4, 2)
    first.holds = second.holds = True
    scheduler = serve(6, 4, 4, 100, first, between, make_request("small", 1, 1), second, feature=Branching)
    plan = scheduler.schedule(0.0)
    assert [row.request_id for row in plan.rows] == ["first"], "as long as somebody computes, nobody overtakes"
    scheduler.update(plan, output_of(plan))
    plan = scheduler.schedule(0.0)
    assert shape(plan) == [("second", 0, 4, True)]
    scheduler.update(plan, output_of(plan))
    assert not any(request.num_missing_tokens for request in scheduler.running)
    for name in ("first", "second"):
        scheduler.abort(name)
    assert shape(scheduler.schedule(0.0)) == [("between", 0, 20, True), ("small", 0, 1, True)]


def test_samples_of_one_token_share_their_prompt_too() -> None:
    """The parent ends with the token that its prompt gives; its blocks must be shared before they are free."""
    parent = make_request("a", 9, 1)
    parent.children = [make_request(f"a/{i}", 9, 1) for i in (1, 2)]
    for child in parent.children:
        child.parent_id = "a"
    scheduler = serve(20, 4, 4, 100, parent, feature=Branching)
    rows = []
    while scheduler.has_work():
        plan = scheduler.schedule(0.0)
        rows.append(shape(plan))
        scheduler.update(plan, output_of(plan))
    assert rows == [[("a", 0, 9, True)], [("a/1", 8, 1, True), ("a/2", 8, 1, True)]]
    assert scheduler.kv.num_available == 20
