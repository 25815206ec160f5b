"""Defects that real engines shipped, as far as this engine can have them. Each test is named after what it catches.

Elsewhere: split UTF-8, prompt text in the output and quadratic decoding (test_text_stream), is_causal aligned with
the start (kernels/test_reference), a cache that never writes (layers/test_attention).
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from reference_impl.config import EngineConfig
from reference_impl.engine import Engine
from reference_impl.executor.batch import build_batch
from reference_impl.interfaces import Request, RequestState, Row, SamplingParams, StepPlan
from reference_impl.kernels import reference

PROMPT = random.Random(5).choices(range(61), k=30)


def finish(engine: Engine) -> None:
    while engine.has_work():
        engine.step()


def test_a_prefill_chunk_attends_to_what_is_there_not_to_the_whole_prompt(
    random_model: Callable, tapped_engine: Callable, one_shot: Callable
) -> None:
    """nano-vllm#213: with the full length as its context, a chunk reads slots that nobody has written (here: NaN)."""
    model = random_model("float64")
    engine, logits = tapped_engine(model, block_size=8, num_blocks=5, max_num_batched_tokens=7)
    request = engine.add(PROMPT, SamplingParams(max_tokens=3, temperature=0))
    finish(engine)
    expected = one_shot(model, request.tokens)
    for position, found in logits[request.id].items():
        assert (found[0] - expected[position]).abs().max() <= 1e-12 * expected.abs().max()


def test_the_seq_lens_of_a_chunk_are_the_length_so_far(random_model: Callable) -> None:
    request = Request("a", PROMPT, 30, SamplingParams(), 0, 0.0, block_table=[3, 1, 0, 2])
    batch = build_batch(StepPlan(1, (Row("a", 8, 8, False),)), {"a": request}, 8, torch.device("cpu"))
    assert batch.seq_lens.tolist() == [16]
    assert batch.context_lens == (16,)
    assert batch.block_table.tolist() == [[3, 1]]
    assert batch.logits_indices.tolist() == []


def test_a_preempted_request_keeps_its_generated_tokens(random_model: Callable) -> None:
    """A simulator's flaw: it threw them away, generated them again and counted them twice."""
    engine = Engine(random_model("float64"), EngineConfig(block_size=2, num_blocks=11))
    requests = [engine.add(PROMPT[:8], SamplingParams(max_tokens=9, seed=i)) for i in range(2)]
    kept: list[int] = []
    while engine.has_work():
        engine.step()
        if (preempted := engine.trace.steps()[-1].preempted) and not kept:
            assert preempted == (requests[1].id,)
            assert requests[1].state is RequestState.WAITING
            kept = list(requests[1].output_tokens)
    assert len(kept) > 0
    assert requests[1].output_tokens[: len(kept)] == kept
    assert len(requests[1].output_tokens) == 9
    assert engine.trace.metrics(requests[1].id).num_output_tokens == 9


def test_a_request_thrown_out_between_its_last_chunks_starts_from_zero(random_model: Callable, run_alone) -> None:
    """nano-vllm#211: a stale count of computed tokens after preemption skips part of the prompt."""
    model = random_model("float64")
    engine = Engine(model, EngineConfig(block_size=2, num_blocks=14, max_num_batched_tokens=9))
    requests = [engine.add(PROMPT[i : i + 12], SamplingParams(max_tokens=12, seed=i)) for i in range(3)]
    finish(engine)
    assert any(s.preempted for s in engine.trace.steps())
    for i, r in enumerate(requests):
        assert r.output_tokens == run_alone(model, PROMPT[i : i + 12], r.sampling)


def test_slots_of_a_large_cache_do_not_overflow_32_bits() -> None:
    """vllm#47671: block index x block size (or stride) passes 2^31 in a large cache; slots are 64 bits wide."""
    far = 2**31 // 16 + 3
    request = Request("a", [1] * 20, 20, SamplingParams(), 0, 0.0, block_table=[far, far + 1])
    batch = build_batch(StepPlan(1, (Row("a", 0, 20, True),)), {"a": request}, 16, torch.device("cpu"))
    expected = [far * 16 + i for i in range(20)]
    assert batch.slot_mapping.dtype is torch.int64
    assert batch.slot_mapping.tolist() == expected
    assert reference.context_slots(batch.block_table[0], 20, 16).tolist() == expected


def test_the_backend_reads_far_blocks_by_64_bit_slots(random_model: Callable) -> None:
    engine = Engine(random_model("float64"), EngineConfig(block_size=16, num_blocks=4))
    far = 2**31 // 16 + 3
    requests = {
        name: Request(name, [1] * 20, 20, SamplingParams(), 0, 0.0, block_table=[far + k, far + k + 5])
        for k, name in enumerate("ab")
    }
    plan = StepPlan(1, (Row("a", 19, 1, True), Row("b", 18, 1, False)))
    batch = build_batch(plan, requests, 16, torch.device("cpu"))
    engine.attention.plan(batch)
    (group,) = batch.attention_plan.decode
    slots = group.slots
    assert slots.dtype is torch.int64
    assert slots[0].tolist() == [far * 16 + i for i in range(16)] + [(far + 5) * 16 + i for i in range(4)]


@pytest.mark.parametrize("neighbours", [1, 3, 7])
def test_neighbours_do_not_change_results(neighbours: int, random_model, tapped_engine, one_shot) -> None:
    """vllm#48271: a block size chosen by the number of tokens made results depend on the batch."""
    model = random_model("float64")
    engine, logits = tapped_engine(model, block_size=4, num_blocks=100)
    request = engine.add(PROMPT[:9], SamplingParams(max_tokens=8, seed=3))
    for i in range(neighbours):
        engine.add(PROMPT[i:], SamplingParams(max_tokens=3 + i, seed=i))
    finish(engine)
    expected = one_shot(model, request.tokens)
    for position, (found,) in logits[request.id].items():
        assert (found - expected[position]).abs().max() <= 1e-12 * expected.abs().max()


def test_a_row_of_one_token_at_the_end_of_a_prompt_samples_and_one_inside_does_not(random_model: Callable) -> None:
    """Rows of one token come first in a batch whether they decode or are a chunk; only the right ones sample."""
    engine = Engine(random_model("float64"), EngineConfig(block_size=4, num_blocks=30, max_num_batched_tokens=4))
    first, second = (engine.add(PROMPT[:n], SamplingParams(max_tokens=6, temperature=0)) for n in (3, 6))
    finish(engine)
    steps = [[(r.request_id, r.num_tokens, r.samples) for r in s.rows] for s in engine.trace.steps()]
    assert steps[0] == [(first.id, 3, True), (second.id, 1, False)]
    assert len(first.output_tokens) == len(second.output_tokens) == 6


def test_a_block_that_was_freed_is_not_read_again(random_model: Callable, tapped_engine: Callable) -> None:
    """sglang#18803: a row is freed and reused while somebody still reads it. Freed blocks hold NaN here."""
    engine, logits = tapped_engine(random_model("float64"), block_size=2, num_blocks=20)
    for i in range(6):
        engine.add(PROMPT[i : i + 5], SamplingParams(max_tokens=2 + i, temperature=0))
    finish(engine)
    assert all(values.isfinite().all() for seen in logits.values() for found in seen.values() for values in found)
    assert engine.kv_cache.data.isnan().all(), "every block came back"
