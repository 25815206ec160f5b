"""Speculation on a simulated GPU: as many tokens per step as the acceptance gives, and no more than a request wants."""

from __future__ import annotations

import pytest

from reference_impl.assembly.config import EngineConfig
from reference_impl.simulation.cost import CalibratedCost
from reference_impl.simulation.executor import SimulatedGPU
from reference_impl.simulation.replica import Replica

from .loads import request

TICK = CalibratedCost(0.125, 0, 0, 0, 0, 0, 0, 4096, 2048)  # seconds of every step, whatever is in it


def simulated(num_drafts: int, acceptance: float, draft_seconds: float = 0.0, num_requests: int = 30) -> Replica:
    config = EngineConfig(num_blocks=4000, max_num_seqs=64, num_drafts=num_drafts)
    replica = Replica(TICK, config, acceptance=acceptance, draft_seconds=draft_seconds)
    for i in range(num_requests):
        replica.offer(request(str(i), 0.0, 10, 400), 0.0)
    replica.run()
    return replica


@pytest.mark.parametrize(("k", "acceptance"), [(0, 0.7), (3, 0.0), (3, 0.7), (5, 0.4), (2, 1.0)])
def test_a_step_gives_the_expected_number_of_tokens(k: int, acceptance: float) -> None:
    """1 + a + ... + a^k, of 30 requests x 400 tokens: within 3 %, of which 1 % are the ends."""
    result = simulated(k, acceptance).result()
    assert result.num_output_tokens == 30 * 400
    expected = sum(acceptance**i for i in range(k + 1))
    assert result.num_output_tokens / result.request_steps == pytest.approx(expected, rel=0.03)


def test_drafts_take_their_time_once_a_step() -> None:
    """A request alone, all guesses right: the prompt gives 1 token, then 399 more, 4 a step."""
    replica = simulated(3, 1.0, draft_seconds=0.01, num_requests=1)
    result = replica.result()
    assert result.num_steps == 1 + 100
    assert replica.gpu.time == pytest.approx(101 * 0.125 + 0.01 * (99 * 3 + 2))  # of the last 3 tokens 2 are guessed


def test_an_end_comes_where_it_was_stated_and_nothing_behind_it() -> None:
    config = EngineConfig(num_blocks=400, num_drafts=4)
    replica = Replica(TICK, config, acceptance=0.9)
    wanted = {str(n): n for n in range(1, 40)}
    lengths: dict[str, int] = {}
    finish = replica.ledger._finish
    replica.ledger._finish = lambda event: (lengths.update({event.request_id: event.num_output_tokens}), finish(event))[
        1
    ]
    for name, n in wanted.items():
        replica.offer(request(name, 0.0, 5, n), 0.0)
    replica.run()
    assert lengths == wanted


def test_an_acceptance_that_is_no_probability_is_refused() -> None:
    with pytest.raises(ValueError, match="acceptance: expected a probability, 0 to 1, got 1.5"):
        SimulatedGPU(TICK, acceptance=1.5)
