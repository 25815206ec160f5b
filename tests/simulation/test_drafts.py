"""Speculation on a simulated GPU: as many tokens per step as the acceptance gives, and no more than a request wants."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.core.decoder import Decoder
from reference_impl.interfaces import Opened, SamplingParams
from reference_impl.simulation.cost import CalibratedCost
from reference_impl.simulation.executor import SimulatedGPU, hollow_model
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
    """A request alone, all drafts right: the prompt gives 1 token, then 399 more, 4 a step."""
    replica = simulated(3, 1.0, draft_seconds=0.01, num_requests=1)
    result = replica.result()
    assert result.num_steps == 1 + 100
    assert replica.gpu.time == pytest.approx(101 * 0.125 + 0.01 * (99 * 3 + 2))  # of the last 3 tokens 2 are drafted


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


class Scripted:
    """Drafts that are right as often in a row as the script says, row by row of each request.

    texts: what each request will write, prompt included."""

    def __init__(self, texts: dict[str, list[int]], script: dict[str, deque[int]]):
        self.texts, self.script = texts, script
        self.names: dict[int, str] = {}  # by slot

    def opened(self, slot: Opened) -> None:
        self.names[slot.slot] = slot.request_id

    def closed(self, slot: int) -> None:
        del self.names[slot]

    def propose(self, slots: torch.Tensor, lengths: torch.Tensor, tokens: torch.Tensor, k: int) -> torch.Tensor:
        drafts = []
        for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
            name = self.names[slot]
            truth, right = (self.texts[name][length : length + k] + [0] * k)[:k], self.script[name].popleft()
            drafts.append([token if at < right else (token + 1) % 61 for at, token in enumerate(truth)])
        return torch.tensor(drafts)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
def test_its_steps_are_the_engines_where_as_many_drafts_are_right(
    random_model: Callable[..., Decoder], acceptance: float, preemption: Any
) -> None:
    model, nothing = random_model(max_position_embeddings=512), object()
    c = model.config
    per_token = 2 * c.num_layers * c.num_kv_heads * c.head_dim * model.dtype.itemsize
    config = EngineConfig(
        block_size=4, num_blocks=22, max_num_seqs=6, max_num_batched_tokens=20, num_drafts=3, preemption=preemption,
        prefix_cache="off", overlap="off",
    )  # fmt: skip
    gpu = SimulatedGPU(TICK, block_size=4, acceptance=acceptance, seed=3)
    parts = Parts(executor=gpu, clock=gpu, kv_cache=nothing, attention=nothing)  # type: ignore[arg-type]
    simulated = Engine(hollow_model(c.vocab_size, 512, per_token), config, parts)
    wanted = {str(n): ([n + 1] * (5 + 3 * n), 3 + 7 * n % 30) for n in range(9)}

    def serve(engine: Engine) -> list[tuple[Any, ...]]:
        for name, (prompt, length) in wanted.items():
            engine.add(prompt, SamplingParams(max_tokens=length, temperature=0, ignore_eos=True), name)
            gpu.time += 0.001  # as on a real clock, nobody arrives at once with another
        while engine.has_work():
            engine.step()
        return [(s.rows, s.num_new_tokens, s.admitted, s.preempted) for s in engine.trace.steps()]

    expected = serve(simulated)
    script: dict[str, deque[int]] = defaultdict(deque)
    for rows, new, _, _ in expected:
        for row, num in zip(rows, new, strict=True):
            if row.num_drafts:
                script[row.request_id].append(num - 1)
    plain = Engine(model, EngineConfig(num_blocks=200, block_size=4))
    requests = {
        name: plain.add(prompt, SamplingParams(max_tokens=length, temperature=0, ignore_eos=True), name)
        for name, (prompt, length) in wanted.items()
    }
    while plain.has_work():
        plain.step()
    texts = {name: request.tokens for name, request in requests.items()}
    real = serve(Engine(model, config, Parts(proposer=Scripted(texts, script))))
    assert real == expected
    assert any(preempted for *_, preempted in real)
    assert not any(script.values())
