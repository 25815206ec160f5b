"""A request's logits and tokens do not depend on how the engine cuts, places, interrupts or groups its work.

One differential property drives all of it. What is compared: the logits of every token of every pass, prompt and
output, first time and again after a preemption, against one pass over the whole sequence alone without a cache.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from reference_impl.interfaces import SamplingParams

BOUND = {"float32": 3e-5, "float64": 1e-12}  # of the largest logit
VOCAB = 61


@dataclass(frozen=True)
class Asked:
    prompt: tuple[int, ...]
    sampling: SamplingParams
    arrival: int  # step
    abort: int | None  # step


@st.composite
def asked(draw: st.DrawFn) -> Asked:
    seed = draw(st.integers(0, 2**32))
    length = draw(st.one_of(st.integers(1, 5), st.integers(1, 40)))
    sampling = draw(
        st.sampled_from(
            [
                {"temperature": 0},
                {"temperature": 1.0},
                {"temperature": 1.5, "top_k": 7, "top_p": 0.9},
                {"temperature": 0.8, "min_p": 0.05, "repetition_penalty": 1.3},
                {"temperature": 0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
            ]
        )
    )
    return Asked(
        tuple(random.Random(seed).choices(range(VOCAB), k=length)),
        SamplingParams(max_tokens=draw(st.integers(1, 9)), seed=seed, **sampling),
        arrival=draw(st.one_of(st.just(0), st.integers(0, 8))),
        abort=draw(st.one_of(st.none(), st.none(), st.integers(0, 14))),
    )


@st.composite
def workload(draw: st.DrawFn) -> tuple[list[Asked], dict[str, int]]:
    requests = draw(st.lists(asked(), min_size=2, max_size=5))
    block_size = draw(st.sampled_from([1, 2, 3, 4, 7, 16]))
    longest = max(len(r.prompt) + r.sampling.max_tokens - 1 for r in requests)
    needed = -(-longest // block_size)
    return requests, {
        "block_size": block_size,
        "num_blocks": needed + draw(st.one_of(st.just(0), st.just(1), st.integers(0, 2 * needed))),
        "max_num_seqs": draw(st.one_of(st.just(5), st.integers(1, 4))),
        "max_num_batched_tokens": draw(st.one_of(st.just(100), st.integers(1, 12))),
        "seed": draw(st.integers(0, 1000)),
    }


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(work=workload())
def test_logits_and_tokens_do_not_depend_on_the_schedule(
    dtype, work, random_model, tapped_engine, one_shot, run_alone
) -> None:
    asked, options = work
    model = random_model(dtype)
    engine, logits = tapped_engine(model, **options)
    requests, preemptions, step = {}, 0, 0
    while len(requests) < len(asked) or engine.has_work():
        for number, a in enumerate(asked):
            if a.arrival == step:
                requests[number] = engine.add(list(a.prompt), a.sampling, f"r{number}")
            if a.abort == step and f"r{number}" in engine.requests:
                engine.abort(f"r{number}")
        engine.step()
        step += 1
    preemptions = sum(len(s.preempted) for s in engine.trace.steps())
    event(f"preempted: {preemptions > 0}")
    event(f"chunked: {any(r.num_tokens > 1 and not r.samples for s in engine.trace.steps() for r in s.rows)}")
    assert engine.block_pool.num_free == options["num_blocks"]

    for number, request in requests.items():
        expected = one_shot(model, request.tokens)
        scale = expected.abs().max()
        seen = logits[request.id]
        for position, found in seen.items():
            for values in found:
                assert (values - expected[position]).abs().max() <= BOUND[dtype] * scale, (number, position)
        if request.finish_reason != "abort":
            assert sorted(seen) == list(range(request.num_tokens - 1))
            assert len(request.output_tokens) == asked[number].sampling.max_tokens
            if dtype == "float64":  # in float32 a near-tie may fall either way
                assert request.output_tokens == run_alone(model, list(asked[number].prompt), asked[number].sampling)


def test_the_property_meets_preemption_while_decoding_and_while_reading(random_model, tapped_engine) -> None:
    """The workloads above are not tame: with few blocks, requests are thrown out both before and after a token."""
    engine, _ = tapped_engine(
        random_model("float64"), block_size=2, num_blocks=12, max_num_seqs=4, max_num_batched_tokens=9
    )
    requests = [engine.add([i + 1] * 11, SamplingParams(max_tokens=9, seed=i)) for i in range(3)]
    reading, decoding = 0, 0
    while engine.has_work():
        had = {r.id: len(r.output_tokens) for r in requests}
        engine.step()
        for name in engine.trace.steps()[-1].preempted:
            decoding, reading = decoding + (had[name] > 0), reading + (had[name] == 0)
    assert decoding > 0
    assert reading > 0
    assert all(len(r.output_tokens) == 9 for r in requests)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_chunks_of_every_size_give_the_same_logits(
    architecture: str, kv_heads: int, random_model, tapped_engine, one_shot
) -> None:
    model = random_model("float64", architecture=architecture, num_key_value_heads=kv_heads, sliding_window=None)
    prompt = random.Random(1).choices(range(VOCAB), k=23)
    expected = one_shot(model, prompt)
    for budget in (1, 2, 5, 22, 23, 100):
        engine, logits = tapped_engine(model, block_size=4, num_blocks=6, max_num_seqs=1, max_num_batched_tokens=budget)
        request = engine.add(prompt, SamplingParams(max_tokens=1, temperature=0))
        while engine.has_work():
            engine.step()
        assert request.output_tokens == [int(expected[-1].argmax())]
        for position in range(23):
            (found,) = logits[request.id][position]
            assert (found - expected[position]).abs().max() <= 1e-12 * expected.abs().max()
