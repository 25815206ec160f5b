"""The core's scheduler in any order of events: see `serving.py`."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from reference_impl.features.prefix.hash_index import HashIndex
from reference_impl.interfaces import Request, SamplingParams
from tests.examples import examples
from tests.scheduler.serving import PlayedMemory, Serving


class CoreServing(Serving):
    @initialize(
        num_blocks=st.integers(2, 20),
        block_size=st.integers(1, 4),
        seqs=st.integers(1, 5),
        budget=st.integers(1, 20),
        index=st.sampled_from([None, HashIndex]),
    )
    def start(self, num_blocks, block_size, seqs, budget, index) -> None:
        self.serve(num_blocks, block_size, seqs, budget, index=index)


TestServing = CoreServing.TestCase
TestServing.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None, derandomize=True, database=None
)


@pytest.mark.parametrize("adapters", [(None, "a"), ("a", "b")])
def test_a_played_memory_notices_what_must_not_be_shared(adapters: tuple[str | None, str | None]) -> None:
    """The test's own test: another adapter's block under a request is found out."""
    memory = PlayedMemory(1, 0, 2)
    first, second = (
        Request(str(i), [1, 2, 3], 3, SamplingParams(), 0, 0.0, block_tables=[[0, 0]], adapter=adapter)
        for i, adapter in enumerate(adapters)
    )
    memory.compute(first, 0, 2, (None,))
    with pytest.raises(AssertionError):
        memory.compute(second, 2, 1, (None,))
