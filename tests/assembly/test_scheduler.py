"""Which features a scheduler is made of: those that its options need."""

from __future__ import annotations

from typing import Any

import pytest

from reference_impl.assembly.kv import kv_manager, stored_kv_manager
from reference_impl.assembly.scheduler import continuous_batching
from reference_impl.core.block_pool import BlockPool
from reference_impl.core.scheduler import Scheduler, known_tokens
from reference_impl.features.admission.worst_case import most_tokens
from reference_impl.features.beams.scheduling import Branching
from reference_impl.features.overlap.scheduling import WaitsForBlocks
from reference_impl.features.policies import ByPriority, FairShare
from reference_impl.features.pooling.scheduling import PoolsPrompts
from reference_impl.features.prefix.hash_index import HashIndex
from reference_impl.features.speculative.scheduling import Drafting
from reference_impl.features.stages.scheduling import Staged
from reference_impl.features.swap.scheduling import Swapping
from reference_impl.features.transfer.scheduling import LoadsPages
from reference_impl.interfaces import ForksRequests, PlansAhead, PlansStages
from tests.engine.conftest import FakeStore
from tests.engine.test_abilities import PlainKV

ALWAYS = {Branching, PoolsPrompts}


def plain() -> Any:
    return PlainKV(kv_manager(BlockPool(9), 4))


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({}, set()),
        ({"policy": FairShare()}, set()),
        ({"policy": ByPriority()}, set()),
        ({"policy": ByPriority(preemptive=False)}, set()),
        ({"admission": "worst_case"}, set()),
        ({"preemption": "swap", "num_drafts": 3}, {Swapping}),
        ({"num_stages": 2}, {Staged}),
        ({"kv": kv_manager(BlockPool(9), 4)}, {WaitsForBlocks}),
        (
            {"kv": stored_kv_manager(BlockPool(9), 4, HashIndex(4), FakeStore(("now",)), b"")},
            {WaitsForBlocks, LoadsPages},
        ),
    ],
)
def test_an_option_that_is_off_adds_no_feature(options: dict[str, Any], needed: set[type]) -> None:
    scheduler = continuous_batching(**{"kv": plain(), "max_num_seqs": 4, "max_num_batched_tokens": 64} | options)
    assert {type(feature) for feature in scheduler.hooks.features} == needed | ALWAYS
    assert type(scheduler) is (Drafting if "num_drafts" in options else Scheduler)
    assert scheduler.admission is (most_tokens if "admission" in options else known_tokens)
    assert scheduler.num_stages == options.get("num_stages", 1)
    assert isinstance(scheduler, ForksRequests)
    assert isinstance(scheduler, PlansAhead)
    assert isinstance(scheduler, PlansStages)
    per_step = {name for name in ("begin", "able", "sets_aside") if scheduler.hooks[name]}
    assert per_step == ({"begin", "sets_aside"} if LoadsPages in needed else {"able"} if Staged in needed else set())


@pytest.mark.parametrize(("feature", "ability"), [(WaitsForBlocks, "DefersReuse"), (LoadsPages, "FetchesPages")])
def test_a_feature_that_needs_an_ability_of_the_kv_manager_says_so(feature: Any, ability: str) -> None:
    with pytest.raises(TypeError, match=rf"{ability}\), got .*PlainKV"):
        feature(Scheduler(plain(), 4, 64))
