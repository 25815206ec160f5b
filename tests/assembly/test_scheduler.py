"""Which features a scheduler is made of: those that its options need."""

from __future__ import annotations

from typing import Any

import pytest

from reference_impl.assembly.kv import kv_manager, stored_kv_manager
from reference_impl.assembly.scheduler import continuous_batching
from reference_impl.core.block_pool import BlockPool
from reference_impl.core.scheduler import Scheduler
from reference_impl.features.admission.worst_case import WorstCaseAdmission
from reference_impl.features.overlap.scheduling import WaitsForBlocks
from reference_impl.features.policies import ByPriority, FairShare
from reference_impl.features.policies.overtaking import Overtaking
from reference_impl.features.prefix.hash_index import HashIndex
from reference_impl.features.speculative.scheduling import Drafting
from reference_impl.features.stages.scheduling import Staged
from reference_impl.features.swap.scheduling import Swapping
from reference_impl.features.transfer.scheduling import LoadsPages
from reference_impl.interfaces import ForksRequests, PlansAhead, PlansStages
from tests.engine.conftest import FakeStore
from tests.engine.test_abilities import PlainKV

ON_DEMAND = {Drafting, LoadsPages, Overtaking, Staged, Swapping, WaitsForBlocks, WorstCaseAdmission}


def plain() -> Any:
    return PlainKV(kv_manager(BlockPool(9), 4))


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({}, set()),
        ({"policy": FairShare()}, set()),
        ({"policy": ByPriority()}, {Overtaking}),
        ({"policy": ByPriority(preemptive=False)}, set()),
        ({"admission": "worst_case"}, {WorstCaseAdmission}),
        ({"preemption": "swap", "num_drafts": 3}, {Swapping, Drafting}),
        ({"num_stages": 2}, {Staged}),
        ({"kv": kv_manager(BlockPool(9), 4)}, {WaitsForBlocks}),
        (
            {"kv": stored_kv_manager(BlockPool(9), 4, HashIndex(4), FakeStore(("now",)), b"")},
            {WaitsForBlocks, LoadsPages},
        ),
    ],
)
def test_an_option_that_is_off_adds_no_class(options: dict[str, Any], needed: set[type]) -> None:
    scheduler = continuous_batching(**{"kv": plain(), "max_num_seqs": 4, "max_num_batched_tokens": 64} | options)
    assert ON_DEMAND & set(type(scheduler).__mro__) == needed
    assert isinstance(scheduler, ForksRequests)
    assert isinstance(scheduler, PlansAhead)
    assert isinstance(scheduler, PlansStages) == (Staged in needed)
    if not needed & {Drafting, LoadsPages, Overtaking, Staged}:  # a decoding step enters the core alone
        for name in ("schedule", "_shares", "_continue", "advance", "update", "_append"):
            assert getattr(type(scheduler), name) is getattr(Scheduler, name)


@pytest.mark.parametrize(("feature", "ability"), [(WaitsForBlocks, "DefersReuse"), (LoadsPages, "FetchesPages")])
def test_an_feature_that_needs_an_ability_of_the_kv_manager_says_so(feature: Any, ability: str) -> None:
    with pytest.raises(TypeError, match=rf"{ability}\), got .*PlainKV"):
        feature(plain(), 4, 64)
