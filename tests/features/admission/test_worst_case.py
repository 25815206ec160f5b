"""Admission for the worst case: none of those that run is preempted."""

from __future__ import annotations

import pytest

from reference_impl.core.block_pool import BlockPool
from reference_impl.core.kv_manager import KVManager
from reference_impl.core.scheduler import Scheduler, known_tokens
from reference_impl.features.admission.worst_case import most_tokens
from tests.scheduler.plans import make_request, output_of


@pytest.mark.parametrize("admission", ["fill", "worst_case"])
def test_worst_case_admission_reserves_all_but_the_last_token_which_is_never_read(admission) -> None:
    """5 tokens of prompt and 17 of output: 21 slots in blocks of 4."""
    requests = [make_request(name, 5, 17) for name in "ab"]
    needed = {"fill": known_tokens, "worst_case": most_tokens}[admission]
    scheduler = Scheduler(KVManager(BlockPool(11), 4), 2, 100, admission=needed)
    for request in requests:
        scheduler.add(request)
    plan = scheduler.schedule(0.0)
    assert [len(request.block_table) for request in requests] == ([2, 2] if admission == "fill" else [6, 0])
    scheduler.update(plan, output_of(plan))
    preempted = []
    while scheduler.has_work():
        plan = scheduler.schedule(0.0)
        preempted += plan.preempted
        scheduler.update(plan, output_of(plan))
    assert bool(preempted) == (admission == "fill")
