"""The assembled scheduler with every policy, samples, beams and swapping, in any order of events: see `serving.py`."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from reference_impl.assembly.kv import kv_manager
from reference_impl.assembly.scheduler import continuous_batching
from reference_impl.core.ranking import FirstCome
from reference_impl.core.scheduler import Scheduler
from reference_impl.features.policies import ByPriority, EarliestDeadline, FairShare, ShortestFirst
from reference_impl.features.prefix.hash_index import HashIndex
from reference_impl.features.prefix.radix_index import RadixIndex
from tests.examples import examples
from tests.scheduler.serving import END, Serving

POLICIES: dict[str, Any] = {
    "first come": FirstCome,
    "shortest": ShortestFirst,
    "priority": ByPriority,
    "strict priority": lambda: ByPriority(aging=0),
    "deadline": EarliestDeadline,
    "preemptive deadline": lambda: EarliestDeadline(seconds_per_token=0.5, preemptive=True),
    "fair": FairShare,
}


class FullyServing(Serving):
    branches = True

    @initialize(
        num_blocks=st.integers(2, 20),
        block_size=st.integers(1, 4),
        seqs=st.integers(1, 5),
        budget=st.integers(1, 20),
        windows=st.sampled_from([(None,), (None,), (None,), (3,), (None, 2), (5, None, 5)]),
        index=st.sampled_from([None, HashIndex, RadixIndex]),
        num_host_blocks=st.sampled_from([0, 0, 3, 30]),
        policy=st.sampled_from(sorted(POLICIES)),
        admission=st.sampled_from(["fill", "fill", "worst_case"]),
    )
    def start(self, num_blocks, block_size, seqs, budget, windows, index, num_host_blocks, policy, admission) -> None:
        self.preemption: Any = "swap" if num_host_blocks else "recompute"
        self.serve(
            num_blocks, block_size, seqs, budget, windows, index, num_host_blocks, POLICIES[policy](), admission
        )  # fmt: skip

    def make_kv(self) -> Any:
        return kv_manager(self.pool, self.block_size, self.windows, self.index, self.host_pool)

    def make_scheduler(self) -> Scheduler:
        return continuous_batching(self.kv, self.seqs, self.budget, self.policy, self.admission, self.preemption)


TestServing = FullyServing.TestCase
TestServing.settings = settings(
    max_examples=examples(150), stateful_step_count=40, deadline=None, derandomize=True, database=None
)


@settings(max_examples=examples(200), deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32))
def test_a_crowd_in_little_memory(seed: int) -> None:
    """The same with many requests at once, few blocks, often host memory, and policies under which a request comes back
    and goes again in one step: what rules that are drawn one by one hardly ever come to."""
    rng = random.Random(seed)
    serving = FullyServing()
    serving.start(
        num_blocks=rng.randint(4, 14), block_size=rng.randint(1, 3), seqs=rng.randint(2, 6), budget=rng.randint(1, 12),
        windows=rng.choice([(None,), (None,), (None,), (3,), (2, 2), (None, 2)]),
        index=rng.choice([None, HashIndex, RadixIndex]), num_host_blocks=rng.choice([0, 1, 4, 30]),
        policy=rng.choice(sorted(POLICIES)), admission=rng.choice(["fill", "fill", "fill", "worst_case"]),
    )  # fmt: skip
    for _ in range(60):
        what = rng.random()
        if what < 0.35:
            serving.add(
                family=rng.randint(0, 1), shared=rng.choice([0, 0, 6, 20]),
                own=[rng.randint(1, 2) for _ in range(rng.choice([1, 3, 8, 30]))], max_tokens=rng.randint(1, 8),
                n=rng.choice([1, 1, 2, 3]), adapter=rng.choice([None, None, "a"]), priority=rng.randint(0, 1),
                tenant=rng.choice(["", "t"]), deadline=serving.now + rng.choice([3.0, 20.0]),
            )  # fmt: skip
        elif what < 0.42 and not serving.held and serving.seqs >= 2:
            serving.add_beam([rng.randint(1, 2) for _ in range(rng.randint(1, 8))])
        elif what < 0.46 and serving.alive():
            serving.abort(rng.randrange(10))
        elif what < 0.50 and serving.alive():
            serving.abort_while_a_step_runs(rng.randrange(10), rng.choice([1, 2, END]))
        elif what < 0.53 and serving.index is not None:
            serving.pin(rng.randint(1, 20), rng.random() < 0.5)
        else:
            serving.step(rng.choice([1, 1, 2, END]))
        serving.every_reference_is_somebodys()
        serving.who_holds_an_indexed_block_holds_the_path_to_it()
        serving.who_waits_holds_nothing_and_who_runs_has_room()
    serving.teardown()
