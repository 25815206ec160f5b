"""logit_bias, allowed_token_ids and min_tokens: the text is that of a loop over logits of one pass, with what the
parameters say added."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from reference_impl.assembly.config import EngineConfig, course_model
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.llm import LLM
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.sampler import sample
from reference_impl.features.biases.biases import BiasPart, bias_arrays, biased, floor_arrays, floored
from reference_impl.interfaces import Request, SamplingParams
from tests.no_sync import no_sync

VOCAB = 61
PROMPT = [5, 17, 3, 41, 8]
ENDS = tuple(range(0, VOCAB, 2))  # half of the vocabulary ends a text
CASES = {
    "bias": SamplingParams(max_tokens=12, temperature=0, logit_bias={7: 4.0, 8: -3.5, 60: 100.0, 0: -100}),
    "bias and penalties": SamplingParams(
        max_tokens=12, temperature=0, logit_bias={7: 6, 9: 5.5}, repetition_penalty=1.5, presence_penalty=0.5,
        frequency_penalty=0.7,
    ),
    "min_tokens": SamplingParams(max_tokens=12, temperature=0, min_tokens=7, stop_token_ids=ENDS),
    "allowed": SamplingParams(max_tokens=12, temperature=0, allowed_token_ids=[60, 9, 3, 3, 33]),
    "allowed and bias": SamplingParams(
        max_tokens=12, temperature=0, allowed_token_ids=range(5, 40), logit_bias={50: 100.0, 7: 3.0},
        repetition_penalty=1.3,
    ),
    "all": SamplingParams(
        max_tokens=12, temperature=0, min_tokens=4, stop_token_ids=ENDS, logit_bias={2: 100.0, 9: 3.0},
        presence_penalty=2.0, allowed_token_ids=range(1, VOCAB - 3),
    ),
}  # fmt: skip


def serve(engine: Engine, *asked: SamplingParams) -> list[Request]:
    requests = [engine.add(PROMPT, sampling) for sampling in asked]
    while engine.has_work():
        engine.step()
    return requests


def expected(model: Any, one_shot: Any, p: SamplingParams) -> list[int]:
    """Greedy, from the definition: bias, then penalties, then what allowed_token_ids and min_tokens rule out."""
    tokens: list[int] = []
    while len(tokens) < p.max_tokens:
        scores = one_shot(model, PROMPT + tokens)[-1].double().tolist()
        for token, bias in (p.logit_bias or {}).items():
            scores[token] += bias
        for token in set(PROMPT + tokens):
            s = scores[token]
            scores[token] = s / p.repetition_penalty if s > 0 else s * p.repetition_penalty
        for token in set(tokens):
            scores[token] -= p.presence_penalty + p.frequency_penalty * tokens.count(token)
        if p.allowed_token_ids is not None:
            for token in set(range(VOCAB)) - set(p.allowed_token_ids):
                scores[token] = -float("inf")
        if len(tokens) < p.min_tokens:
            for token in p.stop_token_ids:
                scores[token] = -float("inf")
        tokens.append(max(range(VOCAB), key=lambda token: scores[token]))
        if tokens[-1] in p.stop_token_ids:
            break
    return tokens


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("asks", [False, True], ids=["launched", "asked"])
def test_the_text_is_what_the_definition_says(name: str, asks: bool, random_model, one_shot) -> None:
    """asked: by a sampler that is any function, which does what it finds in a request's parameters."""
    model = random_model("float64")
    parts = Parts(sampler=lambda logits, requests: sample(logits, requests)) if asks else None
    engine = Engine(model, EngineConfig(num_blocks=40, block_size=4), parts)
    plain = SamplingParams(max_tokens=12, temperature=0, stop_token_ids=CASES[name].stop_token_ids)
    alone, _, neighbour = serve(engine, CASES[name], dataclasses.replace(plain, temperature=1.0, seed=1), plain)
    assert alone.output_tokens == expected(model, one_shot, CASES[name])
    assert neighbour.output_tokens == expected(model, one_shot, plain)
    assert alone.output_tokens != neighbour.output_tokens


def test_a_step_without_them_is_the_cores_own_run(random_model) -> None:
    engine = Engine(random_model("float64"), EngineConfig(num_blocks=40))
    executor: Any = engine.executor
    parts, submit = [], executor.submit
    executor.submit = lambda step: parts.append((run := submit(step)).parts) or run  # type: ignore[func-returns-value]
    serve(engine, SamplingParams(max_tokens=3, temperature=0, seed=1))
    assert not any(parts)
    serve(engine, CASES["bias"])
    assert [type(part) for part in parts[-1]] == [BiasPart]
    serve(engine, SamplingParams(max_tokens=3, temperature=0))
    assert parts[-1] == []


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_100_is_the_only_choice_and_less_100_none(temperature: float, random_model) -> None:
    engine = Engine(random_model("float32"), EngineConfig(num_blocks=40))
    p = SamplingParams(max_tokens=20, temperature=temperature, seed=3, ignore_eos=True)
    free, only, none = serve(
        engine,
        p,
        dataclasses.replace(p, logit_bias={11: 100}),
        dataclasses.replace(p, logit_bias=dict.fromkeys(range(1, VOCAB), -100)),
    )
    assert set(free.output_tokens) != {11}
    assert (set(only.output_tokens), set(none.output_tokens)) == ({11}, {0})


@pytest.mark.parametrize("seed", range(6))
def test_no_text_ends_before_min_tokens_and_some_end_at_once_behind_them(seed: int, random_model) -> None:
    ends = random_model("float64", eos_token_id=0)
    engine = Engine(ends, EngineConfig(num_blocks=40, block_size=4))
    p = SamplingParams(max_tokens=30, seed=seed, stop_token_ids=ENDS[1:])
    for least in (1, 2, 9, 30):
        [request] = serve(engine, dataclasses.replace(p, min_tokens=least))
        assert len(request.output_tokens) >= least
        assert not set(request.output_tokens[:least]) & set(ENDS)
    [longest] = serve(engine, dataclasses.replace(p, min_tokens=2, ignore_eos=True))
    assert set(longest.output_tokens[:2]) & set(ENDS[1:]) == set()  # an end token is none for it


@pytest.mark.parametrize("right", [0.5, 1.0])
def test_a_right_draft_at_the_end_is_kept_where_it_may_end_and_not_before(right: float, random_model, oracle) -> None:
    """Each of a row's positions is held against min_tokens by itself."""
    model = random_model("float64")
    asked = [SamplingParams(max_tokens=30, seed=i, min_tokens=9 + i, stop_token_ids=ENDS) for i in range(6)]
    plain = serve(Engine(model, EngineConfig(num_blocks=60, block_size=4)), *asked)
    assert sum(r.finish_reason == "stop" for r in plain) > 3
    wise = oracle({str(i): r.tokens for i, r in enumerate(plain)}, right, VOCAB)
    engine = Engine(model, EngineConfig(num_blocks=60, block_size=4, num_drafts=4, overlap="off"), Parts(proposer=wise))
    assert [r.tokens for r in serve(engine, *asked)] == [r.tokens for r in plain]
    tempting = oracle({}, 1.0, VOCAB)  # it drafts an end token everywhere
    tempting.propose = lambda slots, lengths, tokens, k: torch.zeros(len(slots), k, dtype=torch.int64)
    engine = Engine(model, EngineConfig(num_blocks=60, block_size=4, num_drafts=2), Parts(proposer=tempting))
    assert [r.tokens for r in serve(engine, *asked)] == [r.tokens for r in plain]


def test_log_probabilities_are_of_the_models_own_distribution(random_model) -> None:
    engine = Engine(random_model("float64"), EngineConfig(num_blocks=40))
    p = SamplingParams(max_tokens=1, temperature=0, logprobs=2)
    own, moved = serve(engine, p, dataclasses.replace(p, logit_bias={11: 100}))
    assert moved.logprobs[0].token == 11
    assert moved.logprobs[0].top == own.logprobs[0].top


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"logit_bias": {VOCAB: 1}}, r"logit_bias: 61 is outside the vocabulary \[0, 61\)"),
        ({"allowed_token_ids": [3, VOCAB]}, r"allowed_token_ids: 61 is outside the vocabulary \[0, 61\)"),
        ({"allowed_token_ids": [3], "min_tokens": 1, "stop_token_ids": (3,)}, "allowed_token_ids has no other"),
        ({"min_tokens": 1, "stop_token_ids": (99,)}, r"stop_token_ids: 99 is outside the vocabulary \[0, 61\)"),
    ],
)
def test_tokens_that_the_model_does_not_have_are_refused(params: dict[str, Any], said: str, random_model) -> None:
    engine = Engine(random_model("float64"), EngineConfig(num_blocks=4))
    with pytest.raises(ValueError, match=said):
        engine.add(PROMPT, SamplingParams(**params))
    assert not engine.has_work()


def test_in_a_process_of_its_own_the_worker_does_the_same() -> None:
    sampling = SamplingParams(max_tokens=9, temperature=0, logit_bias={300: 9.5, 301: -100}, min_tokens=5)
    texts = []
    for worker in ("here", "process"):
        llm = LLM(course_model("draft"), dtype="float32", num_blocks=60, worker=worker)
        texts.append(llm.generate(["def f(x):", "import"], sampling))
        llm.engine.close()
    assert [o.token_ids for o in texts[0]] == [o.token_ids for o in texts[1]]


def test_held_requests_and_samples_have_them_too(random_model) -> None:
    engine = Engine(random_model("float64"), EngineConfig(num_blocks=60, block_size=4))
    p = SamplingParams(max_tokens=8, seed=1, n=3, min_tokens=6, stop_token_ids=ENDS, logit_bias={1: 5.0})
    [first] = serve(engine, p)
    held = engine.add(PROMPT, dataclasses.replace(p, n=1, temperature=0), holds=True)
    told = [engine.step().tokens[held.id][0] for _ in range(1)]
    engine.append(held.id, 4)  # an end token that another chose: it counts as one of the six
    while len(told) < 6:
        told += engine.step().tokens[held.id]
        engine.append(held.id, told[-1])
    assert not set(told) & set(ENDS)
    assert len(first.output_tokens) >= 6


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_nothing_but_the_allowed_is_drawn_and_of_it_everything(temperature: float, random_model) -> None:
    engine = Engine(random_model("float32"), EngineConfig(num_blocks=400))
    p = SamplingParams(max_tokens=60, temperature=temperature, seed=3, ignore_eos=True, top_k=5, top_p=0.99)
    free, few, one = serve(
        engine, p, dataclasses.replace(p, allowed_token_ids=[4, 8, 12]), dataclasses.replace(p, allowed_token_ids=(9,))
    )
    assert len(set(free.output_tokens)) > 1
    assert set(few.output_tokens) <= {4, 8, 12}
    assert temperature == 0 or set(few.output_tokens) == {4, 8, 12}
    assert set(one.output_tokens) == {9}
    assert serve(engine, p)[0].output_tokens == free.output_tokens


def test_bfloat16_logits_take_a_small_bias() -> None:

    logits = torch.full((2, 5), 32.0, dtype=torch.bfloat16)
    arrays = bias_arrays([SamplingParams(), SamplingParams(logit_bias={3: 0.01})])
    assert arrays is not None
    scores = biased(logits, arrays)
    assert (scores.argmax(-1)[1], scores.dtype) == (3, torch.float32)
    assert scores[0].tolist() == [32.0] * 5


def test_neither_waits_for_the_device() -> None:
    params = [SamplingParams(), SamplingParams(logit_bias={3: 1.5, 4: -2}, min_tokens=2, stop_token_ids=(1,))]
    biases, floors = bias_arrays(params), floor_arrays(params, [4, 4], [0])
    assert biases is not None
    assert floors is not None
    logits, positions = torch.zeros(2, 5), torch.tensor([5, 5])
    with no_sync():
        scores = floored(biased(logits, biases), floors, positions)
    inf = float("inf")
    assert scores.tolist() == [[0.0] * 5, [-inf, -inf, 0.0, 1.5, -2.0]]
    assert floored(logits, floors, positions + 1).tolist() == logits.tolist()  # two are generated
    assert logits.tolist() == [[0.0] * 5] * 2
    assert bias_arrays(params[:1]) is None
    assert floor_arrays(params[:1], [4], [0]) is None
