"""A hand-over as a message, and what an engine refuses to go on with."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.features.handover.message import from_json, to_json
from reference_impl.features.handover.progress import Handover, Progress, hand_over, new_handover
from reference_impl.interfaces import SamplingParams, TokenLogprobs

REPORTS = (TokenLogprobs(4, -0.1, ((4, -0.1), (9, -2.25))), TokenLogprobs(5, -inf, ((1, -0.0), (7, -inf))))
FULL = Handover(
    (1, 2, 3),
    SamplingParams(
        max_tokens=50, temperature=0.1 + 0.2, top_k=-1, top_p=0.9, min_p=0.1, repetition_penalty=1.1, seed=2**64 - 1,
        presence_penalty=-1, frequency_penalty=0.3, stop=["a", "é\0"], stop_token_ids=[7, 8], logprobs=2, min_tokens=5,
        logit_bias={3: 0.5, 11: -100}, allowed_token_ids=[3, 4, 5], bad_words=["no"], prompt_logprobs=-1,
        include_stop_str_in_output=True, skip_special_tokens=False, ignore_eos=True,
    ),
    Progress(2**64 - 1, (4, 5), 3, 1, has_grammar=True, logprobs=REPORTS, prompt_logprobs=REPORTS),
)  # fmt: skip


@pytest.mark.parametrize(
    "handover", [FULL, new_handover([0], SamplingParams(max_tokens=None, detokenize=False)), replace(FULL, prompt=())]
)
def test_a_message_says_all_of_it(handover: Handover) -> None:
    assert from_json(json.loads(json.dumps(to_json(handover), allow_nan=False))) == handover


JUNK = (None, True, -1, 2**64, 2**31, 0.5, float("nan"), inf, "", "x", [], [1], [[]], [None], [[1, 2, 3]], {}, {"a": 1})


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container within the value, with each key of it."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def read(message: Any) -> Handover | str:
    """The hand-over, or why it is refused."""
    try:
        return from_json(message)
    except ValueError as error:
        return str(error)


def test_what_is_not_a_message_is_refused_and_never_taken_for_another() -> None:
    """Each part of one in turn is replaced by something else, left out, or has a neighbour."""
    refused = taken = 0
    for number, _ in enumerate([*places(to_json(FULL))]):
        for junk in JUNK:
            message = copy.deepcopy(to_json(FULL))
            container, key = [*places(message)][number]
            container[key] = junk
            found = read(message)
            if isinstance(found, str):
                refused += 1
                assert found.startswith(("a hand-over", "SamplingParams."))
            else:
                taken += 1
                assert from_json(to_json(found)) == found
    assert refused > 400
    assert taken > 10  # such as another seed
    for key in to_json(FULL):
        with pytest.raises(ValueError, match="a hand-over: expected an object with prompt, sampling, seed"):
            from_json({name: value for name, value in to_json(FULL).items() if name != key})
    for message in (*JUNK, to_json(FULL) | {"more": 1}):
        with pytest.raises(ValueError, match="a hand-over: expected an object with"):
            from_json(message)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"seed": 2**64}, "seed: expected a whole number from 0 to 18446744073709551615, got 18446744073709551616"),
        ({"tokens": [True]}, "tokens: expected a whole number from 0 to 2147483647, got True"),
        ({"sample_index": 10_000}, "sample_index: expected a whole number from 0 to 9999, got 10000"),
        ({"num_unstreamed": 3}, "num_unstreamed: expected a whole number from 0 to 2, got 3"),
        ({"logprobs": [[4, float("nan"), []]]}, "logprobs: expected a log-probability or null, got nan"),
        ({"logprobs": [[4, -1.0]]}, r"logprobs: expected lists of 3, got \[4, -1.0\]"),
        ({"has_grammar": 0}, "has_grammar: expected true or false, got 0"),
        ({"sampling": {"temperature": -1}}, "SamplingParams.temperature: expected 0"),
        ({"sampling": {"heat": 1}}, "sampling: no such field: .*heat"),
        ({"sampling": {"stop": 0.5}}, "sampling: 'float' object is not iterable"),
        ({"sampling": {"n": 2}}, "expected n=1, got n=2"),
    ],
)
def test_a_refusal_names_the_field_what_was_expected_and_what_came(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        from_json(to_json(FULL) | changes)


class AllowsAll:
    def allowed(self, output: Any) -> bytes:
        return b"\xff" * 8


PLAIN, TOKENS, ONE = SamplingParams(max_tokens=5, seed=3), (10, 11), TokenLogprobs(10, -1.0, ())
OTHER = TokenLogprobs(12, -1.0, ())


@pytest.mark.parametrize(
    ("sampling", "progress", "options", "error"),
    [
        ({}, {}, {"pooling": "last"}, "it is pooled"),
        ({}, {}, {"holds": True}, "is held .beam search."),
        ({"n": 2}, {}, {}, "n=1.*each sample goes on by itself; got 2"),
        ({}, {"seed": 4}, {}, "expected the seed of sampling, 3, got 4"),
        ({}, {"num_unstreamed": 3}, {}, "num_unstreamed: expected a whole number from 0 to 2, got 3"),
        ({}, {"num_unstreamed": -1}, {}, "num_unstreamed: expected a whole number from 0 to 2, got -1"),
        ({}, {"seed": 2**64}, {}, "seed: expected a whole number from 0 to 18446744073709551615, got 1844"),
        ({}, {"sample_index": 10_000}, {}, "sample_index: expected a whole number from 0 to 9999, got 10000"),
        ({}, {"tokens": ("1",)}, {}, "ids of the vocabulary .*got '1'"),
        ({}, {"has_grammar": True}, {}, "had a grammar where it comes from, and was given none here"),
        ({}, {}, {"grammar": AllowsAll()}, "had no grammar where it comes from, and was given one here"),
        ({}, {"tokens": (10, 61)}, {}, r"tokens: expected ids of the vocabulary \[0, 61\), got 61"),
        ({}, {"tokens": (-1,)}, {}, "ids of the vocabulary .*got -1"),
        ({"stop_token_ids": (11,)}, {}, {}, "token 11 ends the answer: nothing is left"),
        ({}, {"tokens": (60, 1)}, {}, "token 60 ends the answer"),  # the model's
        ({}, {"tokens": (1,) * 5}, {}, "3 tokens of prompt and 5 of output, and may have 8 here"),
        ({"max_tokens": 999}, {"tokens": (1,) * 61}, {}, "61 of output, and may have 64 here"),
        ({"logprobs": 0}, {}, {}, "logprobs: expected one for each of 2 tokens, in their order, got 0"),
        ({"logprobs": 0}, {"logprobs": (ONE, OTHER)}, {}, "logprobs: expected one for each of 2 tokens.*got 2"),
        ({"logprobs": 0}, {"logprobs": ("a", "b")}, {}, "logprobs: expected one for each of 2 tokens.*got 2"),
        ({}, {"logprobs": (ONE,)}, {}, "logprobs: expected one for each of 0 tokens"),
        ({"prompt_logprobs": 0}, {"prompt_logprobs": (ONE,)}, {}, "prompt_logprobs: expected one for each of 2 tokens"),
        ({"prompt_logprobs": 0}, {"tokens": (), "prompt_logprobs": (ONE,)}, {}, "each of 0 tokens"),
    ],
)
def test_what_cannot_go_on_is_refused_and_leaves_nothing_behind(
    sampling: dict[str, Any], progress: dict[str, Any], options: dict[str, Any], error: str, random_model
) -> None:
    engine = Engine(
        random_model("float64", eos_token_id=60), EngineConfig(block_size=4, num_blocks=99, max_model_len=64)
    )
    asked = replace(PLAIN, **sampling)
    if "pooling" in options:
        asked = SamplingParams()
    with pytest.raises(ValueError, match=error):
        engine.add([1, 2, 3], asked, resume=Progress(**{"seed": 3, "tokens": TOKENS} | progress), **options)
    assert not engine.has_work()
    assert engine.requests == {}


def test_what_does_not_go_elsewhere_is_not_handed_over(random_model) -> None:
    engine = Engine(random_model("float64"), EngineConfig(block_size=4, num_blocks=64))
    pooled, held = engine.add([1, 2], pooling="mean"), engine.add([1, 2], holds=True)
    done = engine.add([1, 2], SamplingParams(max_tokens=1))
    for request, error in ((pooled, "it is pooled"), (held, "is held")):
        with pytest.raises(ValueError, match=error):
            hand_over(request)
    while done.finish_reason is None:
        engine.step()
    with pytest.raises(ValueError, match=r"is finished \(length\): nothing is left to hand over"):
        hand_over(done)
    with pytest.raises(ValueError, match="expected n=1, got n=2"):
        new_handover([1], SamplingParams(n=2))


def test_what_is_noted_was_shown() -> None:
    assert Progress(1, (2, 3), num_unstreamed=1).after([4]) == Progress(1, (2, 3, 4))


def test_a_prompt_that_is_half_scored_is_scored_anew(random_model) -> None:
    model, sampling = random_model("float64"), SamplingParams(max_tokens=3, prompt_logprobs=1, seed=1)
    prompt = random.Random(1).choices(range(61), k=20)
    engine = Engine(model, EngineConfig(block_size=4, num_blocks=64, max_num_batched_tokens=8))
    request = engine.add(prompt, sampling)
    engine.step()
    assert 0 < len(request.prompt_logprobs) < 19
    handover = hand_over(request)
    there = Engine(model, EngineConfig(block_size=4, num_blocks=64))
    moved = there.add(handover.prompt, handover.sampling, resume=handover.progress)
    for one, of in ((request, engine), (moved, there)):
        while one.finish_reason is None:
            of.step()
    assert [report.token for report in moved.prompt_logprobs] == prompt[1:]
    assert [r.logprob for r in moved.prompt_logprobs] == pytest.approx([r.logprob for r in request.prompt_logprobs])


def test_an_engine_counts_the_tokens_that_it_wrote_and_no_more_cached_ones_than_a_prompt_has(random_model) -> None:
    engine = Engine(random_model("float64"), EngineConfig(block_size=2, num_blocks=64))
    for name in ("a", "b"):
        request = engine.add([1, 2, 3], replace(PLAIN, max_tokens=9), name, resume=Progress(3, (4, 5, 6, 7)))
        while request.finish_reason is None:
            engine.step()
        assert len(request.output_tokens) == 9
        assert engine.trace.metrics(name).num_output_tokens == 5
        assert engine.trace.events[-1].num_output_tokens == 5
    assert request.num_cached_tokens == 6
    assert engine.trace.prefix_cache().cached_tokens == 3


def test_a_prompt_that_is_scored_is_not_computed_again_as_a_whole(random_model) -> None:
    """Where its log-probabilities go along; they need not, since they can be computed."""
    sampling = SamplingParams(max_tokens=6, prompt_logprobs=1, seed=1)
    engine = Engine(random_model("float64"), EngineConfig(block_size=4, num_blocks=64))
    first = engine.add(list(range(20)), sampling)
    while len(first.output_tokens) < 3:
        engine.step()
    handover = hand_over(first)
    others = [handover.progress, replace(handover.progress, prompt_logprobs=())]
    moved = [engine.add(handover.prompt, sampling, resume=progress) for progress in others]
    while engine.has_work():
        engine.step()
    assert [request.num_cached_tokens for request in moved] == [20, 0]
    for request in moved:
        assert request.tokens == first.tokens
        assert [report.token for report in request.prompt_logprobs] == list(range(1, 20))
        for one, other in zip(request.prompt_logprobs, first.prompt_logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
