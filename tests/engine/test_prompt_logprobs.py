"""Log-probabilities of a prompt's tokens: those of one pass over the prompt, however it is cut and interrupted."""

from __future__ import annotations

import random
from typing import Any

import pytest

from reference_impl.assembly.config import EngineConfig, course_model
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.llm import LLM
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.split import split_engine
from reference_impl.core import scheduler as scheduling
from reference_impl.interfaces import Request, SamplingParams
from tests.engine.conftest import FakeStore, HostOracle

VOCAB = 61
PROMPTS = [random.Random(i).choices(range(VOCAB), k=n) for i, n in enumerate((23, 1, 2, 9, 14))]


def finish(engine: Engine) -> None:
    while engine.has_work():
        engine.step()


def check(model: Any, request: Request, k: int, one_shot: Any) -> None:
    n = request.num_prompt_tokens
    expected = one_shot(model, request.tokens[:n]).log_softmax(dim=-1)
    assert [report.token for report in request.prompt_logprobs] == request.tokens[1:n]
    for position, report in enumerate(request.prompt_logprobs):
        assert report.logprob == pytest.approx(float(expected[position, report.token]), abs=1e-5)
        most = expected[position].topk(k)
        assert [token for token, _ in report.top] == most.indices.tolist()
        assert [value for _, value in report.top] == pytest.approx(most.values.tolist(), abs=1e-5)


@pytest.mark.parametrize("late", [None, 3])
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 5}, {"num_blocks": 12, "max_num_seqs": 3}], ids=str)
def test_they_are_those_of_the_prompt_alone(
    late: int | None, options: dict, random_model, one_shot, tapped_engine
) -> None:
    model = random_model("float64")
    engine, _ = tapped_engine(model, late=late, **{"block_size": 4, "num_blocks": 60, **options})
    plain = SamplingParams(max_tokens=8, temperature=0)
    asked = [
        engine.add(prompt, SamplingParams(max_tokens=8, seed=i, prompt_logprobs=i, n=1 + i % 2))
        for i, prompt in enumerate(PROMPTS)
    ]
    other = engine.add(PROMPTS[0], plain)
    finish(engine)
    for k, request in enumerate(asked):
        check(model, request, k, one_shot)
    assert other.prompt_logprobs == []
    assert engine.kv.num_available == engine.num_blocks
    clean = Engine(model, EngineConfig(num_blocks=60))
    for request in asked:
        again = clean.add(request.tokens[: request.num_prompt_tokens], SamplingParams(max_tokens=8, seed=request.seed))
        finish(clean)
        assert again.output_tokens == request.output_tokens


def test_a_prompt_that_is_cached_is_computed_again_and_found_by_others(random_model, one_shot) -> None:
    model, store = random_model("float64"), FakeStore(("now",))
    engine = Engine(model, EngineConfig(block_size=4, num_blocks=60), Parts(page_store=store))
    for prompt_logprobs, cached in ((None, 0), (2, 0), (None, 20)):
        request = engine.add(PROMPTS[0], SamplingParams(max_tokens=2, prompt_logprobs=prompt_logprobs))
        finish(engine)
        assert request.num_cached_tokens == cached
        if prompt_logprobs is not None:
            check(model, request, 2, one_shot)


def test_a_long_prompt_is_scored_piece_by_piece(random_model, one_shot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "SCORED_AT_ONCE", 6)
    model = random_model("float64")
    engine = Engine(model, EngineConfig(num_blocks=60))
    both = [engine.add(PROMPTS[0], SamplingParams(max_tokens=2, prompt_logprobs=p)) for p in (1, None)]
    finish(engine)
    rows = [row for step in engine.trace.steps() for row in step.rows]
    sizes = [[row.num_tokens for row in rows if row.request_id == request.id] for request in both]
    assert sizes == [[6, 6, 6, 5, 1], [23, 1]]
    check(model, both[0], 1, one_shot)


def test_preempted_while_its_prompt_is_read_a_token_is_reported_once(random_model, one_shot) -> None:
    model = random_model("float64")
    config = EngineConfig(block_size=2, num_blocks=14, max_num_seqs=3, max_num_batched_tokens=6)
    engine = Engine(model, config)
    requests = [
        engine.add(p, SamplingParams(max_tokens=5, prompt_logprobs=1)) for p in (PROMPTS[4], PROMPTS[3], PROMPTS[4])
    ]
    finish(engine)
    assert any(step.preempted for step in engine.trace.steps())
    for request in requests:
        check(model, request, 1, one_shot)


def test_beside_drafts_and_masks_and_in_another_process(random_model, one_shot) -> None:
    model = random_model("float64")
    plain = Engine(model, EngineConfig(num_blocks=60))
    free = plain.add(PROMPTS[0], SamplingParams(max_tokens=12, temperature=0), "a")
    finish(plain)
    wise = HostOracle({"a": free.tokens, "masked": [*PROMPTS[4], 1, 1, 1]}, 0.7, VOCAB)
    config = EngineConfig(num_blocks=60, num_drafts=3, max_num_batched_tokens=7)
    engine = Engine(model, config, Parts(host_proposer=wise))
    drafted = engine.add(PROMPTS[0], SamplingParams(max_tokens=12, temperature=0), "a")
    for _ in range(6):
        engine.step()
    scored = engine.add(PROMPTS[4], SamplingParams(max_tokens=3, prompt_logprobs=2), "masked", grammar=Ones())
    finish(engine)
    assert drafted.tokens == free.tokens
    assert scored.output_tokens == [1, 1, 1]
    check(model, scored, 2, one_shot)

    split = split_engine(course_model("draft"), EngineConfig(num_blocks=60, overlap="on"))
    here = LLM(course_model("draft"), "float32", num_blocks=60)
    asked = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=2)
    there = split.add(PROMPTS[0], asked)
    finish(split)
    split.close()
    [output] = here.generate([PROMPTS[0]], asked)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [r.token for r in output.prompt_logprobs[1:] if r is not None] == PROMPTS[0][1:]
    assert [r.logprob for r in there.prompt_logprobs] == pytest.approx(
        [r.logprob for r in output.prompt_logprobs[1:] if r]
    )


class Ones:
    def allowed(self, output: Any) -> bytes:
        return (2).to_bytes(-(-VOCAB // 8), "little")


def test_a_number_below_0_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"SamplingParams.prompt_logprobs: expected None, -1 \(all\) or 0 to 2,147,483,647, got -2"
    ):
        SamplingParams(prompt_logprobs=-2)
