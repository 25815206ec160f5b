"""Defects that real engines shipped, as far as this engine can have them. Each test is named after what it catches.

Elsewhere: split UTF-8, prompt text in the output and quadratic decoding (test_text_stream), is_causal aligned with
the start (kernels/test_reference), a cache that never writes (layers/test_attention).
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from reference_impl.assembly.batch import build_batch
from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.interfaces import KVSpec, Request, RequestState, Row, SamplingParams, StepPlan, Transfers
from reference_impl.kernels import reference

PROMPT = random.Random(5).choices(range(61), k=30)


def spec(block_size: int) -> KVSpec:
    return KVSpec(1, 1, 8, block_size, bits_per_value=32)


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
    request = Request("a", PROMPT, 30, SamplingParams(), 0, 0.0, block_tables=[[3, 1, 0, 2]])
    batch = build_batch(StepPlan(1, (Row("a", 8, 8, False),)), {"a": request}, [spec(8)], torch.device("cpu"))
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
    request = Request("a", [1] * 20, 20, SamplingParams(), 0, 0.0, block_tables=[[far, far + 1]])
    batch = build_batch(StepPlan(1, (Row("a", 0, 20, True),)), {"a": request}, [spec(16)], torch.device("cpu"))
    expected = [far * 16 + i for i in range(20)]
    assert batch.slot_mapping.dtype is torch.int64
    assert batch.slot_mapping.tolist() == expected
    assert reference.context_slots(batch.block_table[0], 20, 16).tolist() == expected


def test_the_backend_reads_far_blocks_by_64_bit_slots(random_model: Callable) -> None:
    engine = Engine(random_model("float64"), EngineConfig(block_size=16, num_blocks=4))
    far = 2**31 // 16 + 3
    requests = {
        name: Request(name, [1] * 20, 20, SamplingParams(), 0, 0.0, block_tables=[[far + k, far + k + 5]])
        for k, name in enumerate("ab")
    }
    plan = StepPlan(1, (Row("a", 19, 1, True), Row("b", 18, 1, False)))
    batch = build_batch(plan, requests, engine.kv_specs, torch.device("cpu"))
    engine.attention.plan(batch)
    [plan] = batch.attention_plan
    (group,) = plan.short
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
    engine, logits = tapped_engine(random_model("float64"), block_size=2, num_blocks=20, prefix_cache="off")
    for i in range(6):
        engine.add(PROMPT[i : i + 5], SamplingParams(max_tokens=2 + i, temperature=0))
    finish(engine)
    engine.kv_cache.transfer(Transfers())  # poisons what is free now
    assert all(values.isfinite().all() for seen in logits.values() for found in seen.values() for values in found)
    assert engine.kv_cache.data.isnan().all(), "every block came back"


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_a_prompt_that_is_cached_as_a_whole_still_computes_its_last_token(
    kind: str, random_model, tapped_engine
) -> None:
    """nano-vllm#144: every token was a hit, so none was scheduled, and there were no logits to sample from."""
    model = random_model("float64")
    for length in (8, 16, 17, 23, 24):  # blocks of 8: a whole number of them, and not
        engine, logits = tapped_engine(model, block_size=8, num_blocks=9, prefix_cache=kind)
        params = SamplingParams(max_tokens=3, temperature=0)
        first = engine.add(PROMPT[:length], params, "first")
        finish(engine)
        again = engine.add(PROMPT[:length], params, "again")
        finish(engine)
        assert again.output_tokens == first.output_tokens
        assert again.num_cached_tokens == (length - 1) // 8 * 8
        assert min(logits["again"]) == again.num_cached_tokens
        assert (logits["again"][length - 1][0] - logits["first"][length - 1][0]).abs().max() <= 1e-12


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_a_preempted_request_that_comes_back_on_a_prefix_hit_counts_from_that_hit(kind: str, random_model) -> None:
    """nano-vllm#211, vllm#18957: the count of cached tokens of its first life was used for its second."""
    model = random_model("float64")
    options = {"block_size": 2, "num_blocks": 24, "prefix_cache": kind}
    engine = Engine(model, EngineConfig(**options))  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True)
    requests = [engine.add(PROMPT[i : i + 12], params) for i in (0, 5, 9)]
    finish(engine)
    admitted = [entry for step in engine.trace.steps() for entry in step.admitted]
    twice = {name for name, _ in admitted if [n for n, _ in admitted].count(name) > 1}
    assert any(cached > 0 for name, cached in admitted if name in twice), "nobody came back on a hit"
    for i, request in zip((0, 5, 9), requests, strict=True):
        alone = Engine(model, EngineConfig(block_size=64, num_blocks=1, prefix_cache="off"))
        expected = alone.add(PROMPT[i : i + 12], params)
        finish(alone)
        assert request.output_tokens == expected.output_tokens


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_a_salt_keeps_a_tenants_prefix_to_itself(kind: str, random_model: Callable) -> None:
    """vllm#30931 and others: the key of a prefix left out the adapter or the salt, and one tenant read another's."""
    engine = Engine(random_model("float32"), EngineConfig(block_size=4, num_blocks=40, prefix_cache=kind))  # type: ignore
    params = SamplingParams(max_tokens=1, temperature=0)
    cached = {}
    for salt in (None, "a", "", "b", "a", None):
        request = engine.add(PROMPT, params, cache_salt=salt)
        finish(engine)
        cached.setdefault(salt, []).append(request.num_cached_tokens)
    assert cached == {None: [0, 28], "a": [0, 28], "": [0], "b": [0]}


def test_nobody_is_let_in_and_thrown_out_without_a_token_in_between(random_model: Callable) -> None:
    """vllm-ascend#16315: with frees that came late, requests went in and out, and none of them moved."""
    engine = Engine(random_model("float32"), EngineConfig(block_size=2, num_blocks=16, prefix_cache="off"))
    requests = {}
    for i in range(6):
        request = engine.add(PROMPT[i : i + 6], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
        requests[request.id] = request
    had: dict[str, list[int]] = {name: [] for name in requests}
    while engine.has_work():
        engine.step()
        for name in engine.trace.steps()[-1].preempted:
            had[name].append(len(requests[name].output_tokens))
    assert sum(map(len, had.values())) > 2
    for counts in had.values():
        assert counts == sorted(set(counts)), "thrown out twice with the same tokens"
