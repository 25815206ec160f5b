"""Hidden states of a prompt instead of a sampled token: those of one pass, however it is cut and interrupted."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from reference_impl.assembly.config import EngineConfig, course_model
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.llm import LLM
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.split import split_engine
from reference_impl.core.scheduler import Scheduler
from reference_impl.features.baselines.static_batching import StaticBatching
from reference_impl.interfaces import Request, SamplingParams
from tests.engine.conftest import FakeStore
from tests.engine.test_prompt_logprobs import Ones

VOCAB = 61
PROMPTS = [random.Random(i).choices(range(VOCAB), k=n) for i, n in enumerate((23, 1, 2, 9, 14))]


def finish(engine: Engine) -> None:
    while engine.has_work():
        engine.step()


def check(model: Any, request: Request, pooled_alone: Any) -> None:
    assert request.finish_reason == "stop"
    assert request.output_tokens == []
    expected = pooled_alone(model, request.tokens, request.pooling)
    torch.testing.assert_close(torch.tensor(request.embedding, dtype=expected.dtype), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("late", [None, 3])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"max_num_batched_tokens": 5}, {"num_blocks": 12, "max_num_seqs": 3, "max_num_batched_tokens": 6},
        {"num_blocks": 12, "max_num_seqs": 3, "max_num_batched_tokens": 6, "preemption": "swap", "swap_bytes": 2**20},
    ],
    ids=str,
)  # fmt: skip
def test_they_are_those_of_the_prompt_alone(
    late: int | None, options: dict, random_model, pooled_alone, tapped_engine
) -> None:
    model = random_model("float64")
    engine, _ = tapped_engine(model, late=late, **{"block_size": 2, "num_blocks": 60, **options})
    generating = [engine.add(PROMPTS[i], SamplingParams(max_tokens=9, seed=i)) for i in (4, 3)]
    asked = [engine.add(p, pooling=pooling) for p in PROMPTS for pooling in ("mean", "last")]
    finish(engine)
    for request in asked:
        check(model, request, pooled_alone)
    assert engine.kv.num_available == engine.num_blocks
    clean = Engine(model, EngineConfig(num_blocks=60))
    for request in generating:
        again = clean.add(request.tokens[: request.num_prompt_tokens], SamplingParams(max_tokens=9, seed=request.seed))
        finish(clean)
        assert again.output_tokens == request.output_tokens


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_preempted_while_its_prompt_is_read_it_begins_again(pooling: Any, random_model, pooled_alone) -> None:
    model = random_model("float64")
    config = EngineConfig(block_size=2, num_blocks=9, max_num_batched_tokens=3, prefix_cache="off")
    engine = Engine(model, config)
    engine.add(PROMPTS[2], SamplingParams(max_tokens=15))
    pooled = engine.add(PROMPTS[4], pooling=pooling)
    finish(engine)
    steps = engine.trace.steps()
    assert pooled.id in [name for step in steps for name in step.preempted]
    assert [row.start for step in steps for row in step.rows if row.request_id == pooled.id].count(0) > 1
    check(model, pooled, pooled_alone)


def test_the_last_takes_a_cached_prefix_and_the_mean_does_not(random_model, pooled_alone) -> None:
    model, store = random_model("float64"), FakeStore(("now",))
    engine = Engine(model, EngineConfig(block_size=4, num_blocks=60), Parts(page_store=store))
    for pooling, cached in (("mean", 0), ("mean", 0), ("last", 20)):
        request = engine.add(PROMPTS[0], pooling=pooling)
        finish(engine)
        assert request.num_cached_tokens == cached
        check(model, request, pooled_alone)


def test_beside_scored_prompts_drafts_and_in_another_process(random_model, pooled_alone, oracle, one_shot) -> None:
    model = random_model("float64")
    plain = Engine(model, EngineConfig(num_blocks=60))
    free = plain.add(PROMPTS[0], SamplingParams(max_tokens=12, temperature=0), "a")
    finish(plain)
    config = EngineConfig(num_blocks=60, num_drafts=3, max_num_batched_tokens=9)
    engine = Engine(model, config, Parts(proposer=oracle({"a": free.tokens}, 0.7, VOCAB)))
    drafted = engine.add(PROMPTS[0], SamplingParams(max_tokens=12, temperature=0), "a")
    both = engine.add(PROMPTS[4], SamplingParams(prompt_logprobs=1), pooling="mean")
    for _ in range(5):
        engine.step()
    scored = engine.add(PROMPTS[3], SamplingParams(max_tokens=1, prompt_logprobs=1))
    last = engine.add(PROMPTS[4], pooling="last")
    finish(engine)
    assert drafted.tokens == free.tokens
    for request in (both, last):
        check(model, request, pooled_alone)
    for request in (both, scored):
        expected = one_shot(model, request.tokens[: request.num_prompt_tokens]).log_softmax(dim=-1)
        found = [report.logprob for report in request.prompt_logprobs]
        wanted = [float(expected[i, token]) for i, token in enumerate(request.tokens[1 : request.num_prompt_tokens])]
        assert found == pytest.approx(wanted, abs=1e-5)

    split = split_engine(course_model("draft"), EngineConfig(num_blocks=60, overlap="on"))
    there = split.add(PROMPTS[0], pooling="mean")
    finish(split)
    split.close()
    here = LLM(course_model("draft"), "float32", num_blocks=60)
    (found,) = here.embed([PROMPTS[0]])
    length = math.hypot(*there.embedding)
    assert found.outputs.embedding == pytest.approx([x / length for x in there.embedding], rel=1e-4, abs=1e-6)
    assert here.engine.trace.metrics("0").num_output_tokens == 0


def test_front_door_and_errors(random_model, pooled_alone) -> None:
    llm = LLM(course_model("draft"), "float32", num_blocks=60)
    one, two = (found.outputs.embedding for found in llm.embed(["def add(a, b):", "x"], "last", normalize=False))
    model = llm.engine.model
    expected = pooled_alone(model, llm.encode("def add(a, b):"), "last")
    assert one == pytest.approx(expected.tolist(), rel=1e-3, abs=1e-4)
    [scaled] = llm.embed("def add(a, b):", "last")
    assert scaled.outputs.embedding == pytest.approx([x / math.hypot(*one) for x in one], abs=1e-6)
    assert scaled.prompt_token_ids == llm.encode("def add(a, b):")
    assert len(two) == model.config.hidden_size
    engine = Engine(random_model("float64"), EngineConfig(num_blocks=60))
    with pytest.raises(ValueError, match="pooling: expected one of last, mean, or None, got 'max'"):
        engine.add([1], pooling="max")  # type: ignore[arg-type]
    for wrong in ({"sampling": SamplingParams(n=2)}, {"holds": True}, {"grammar": Ones()}):
        with pytest.raises(ValueError, match="nothing is sampled for such a request, leave out"):
            engine.add([1], pooling="mean", **wrong)
    waiting = engine.add([1, 2, 3], pooling="mean")
    assert waiting.embedding is None
    engine.abort(waiting.id)
    assert waiting.embedding is None
    assert engine.kv.num_available == engine.num_blocks


def test_a_scheduler_that_lets_its_rows_sample_is_refused(random_model) -> None:
    model, config = random_model("float64"), EngineConfig(num_blocks=60, prefix_cache="off")
    engine = Engine(model, config)
    engine.scheduler = StaticBatching(engine.kv, 4)
    with pytest.raises(ValueError, match="pooling needs the engine's own scheduler"):
        engine.add([1, 2], pooling="mean")
    engine = Engine(model, config)
    engine.scheduler = Scheduler(engine.kv, 4, 100)  # the core's: it does not pool
    engine.add([1, 2], pooling="mean", request_id="r")
    with pytest.raises(ValueError, match=r"'r' asks for hidden states \(pooling\), and its row samples"):
        engine.step()
