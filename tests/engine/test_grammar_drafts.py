"""Drafts of the host for requests under a grammar: cut where it forbids one, each position masked by what is allowed
behind the drafts before it, and the text, or its distribution, is that without drafts."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from reference_impl.assembly.config import EngineConfig, course_model
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.model import load_model
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.split import split_engine
from reference_impl.features.grammars.drafts import allowed_drafts
from reference_impl.interfaces import Request, SamplingParams
from reference_impl.observe.trace import DraftUse
from tests.engine.conftest import HostOracle, check_references, some
from tests.engine.test_drafts import kept_of
from tests.engine.test_grammars import Countdown, bits, finish
from tests.engine.test_rejection import ALPHA, PROMPT, by_definition, options_of, p_value

VOCAB = 61


@dataclass(frozen=True)
class Some:
    """A third of the vocabulary, which depends on all that was written; sometimes one token alone."""

    vocab_size: int = VOCAB

    def tokens(self, output: Sequence[int]) -> list[int]:
        drawn = random.Random(f"{list(output)}")
        return drawn.sample(range(self.vocab_size), drawn.choice([1, self.vocab_size // 3, self.vocab_size // 2]))

    def allowed(self, output: Sequence[int]) -> bytes:
        return bits(self.tokens(output), self.vocab_size)


ASKED = {
    "greedy": SamplingParams(max_tokens=25, temperature=0),
    "drawn": SamplingParams(max_tokens=25, seed=1, logprobs=1),
    "filtered": SamplingParams(max_tokens=25, seed=2, top_k=5, min_p=0.05),
    "penalised": SamplingParams(max_tokens=25, temperature=0, repetition_penalty=1.5, frequency_penalty=0.4),
    "ends": SamplingParams(max_tokens=25, seed=4, stop_token_ids=tuple(range(0, VOCAB, 7))),
}


def serve(engine: Engine) -> dict[str, Request]:
    """And beside them one without a grammar."""
    requests = {
        name: engine.add([*PROMPT, len(name)], sampling, name, grammar=Some()) for name, sampling in ASKED.items()
    }
    requests["free"] = engine.add(PROMPT, SamplingParams(max_tokens=25, seed=3), "free")
    while engine.has_work():
        engine.step()
        check_references(engine)
    return requests


@pytest.fixture(scope="module")
def plain(random_model: Callable) -> dict[str, Request]:
    return serve(Engine(random_model("float64"), EngineConfig(num_blocks=64)))


@pytest.mark.parametrize(
    ("right", "k", "num_blocks"),
    some(
        [(1.0, 3, 64), (0.6, 4, 18), (0.0, 2, 64)],
        [(right, k, num_blocks) for right, k in [(1.0, 3), (0.6, 4), (0.0, 2)] for num_blocks in (18, 64)],
    ),
)
def test_the_text_is_that_without_drafts_and_the_right_ones_are_kept(
    random_model, plain, right: float, k: int, num_blocks: int
) -> None:
    texts = {name: request.tokens for name, request in plain.items()}
    wise = HostOracle(texts, right, VOCAB, seed=k)
    config = EngineConfig(num_blocks=num_blocks, block_size=4, num_drafts=k, max_num_batched_tokens=40)
    engine = Engine(random_model("float64"), config, Parts(host_proposer=wise))
    requests = serve(engine)
    for name, request in requests.items():
        assert request.tokens == texts[name], name
        assert [r.token for r in request.logprobs] == [r.token for r in plain[name].logprobs]
    steps, bound = engine.trace.steps(), ASKED.keys()
    assert any(step.preempted for step in steps) == (num_blocks == 18)
    assert engine.kv.num_available == engine.num_blocks
    kept = [pair for step in kept_of(engine) for name, pair in step.items() if name in bound]
    assert (sum(num for num, _ in kept) > 20) == (right > 0)
    assert right < 1 or all(num == drafts for num, drafts in kept)


def test_a_draft_is_cut_where_the_grammar_forbids_it_or_has_no_mask_behind_it() -> None:
    class Word:
        """1, 2, 3, and then nothing."""

        def allowed(self, output: Sequence[int]) -> bytes:
            if list(output) != [1, 2, 3][: len(output)]:
                raise LookupError("not this word")
            return bits([1 + len(output)] if len(output) < 3 else [], 9)

    def drafts(output: list[int], *tokens: int) -> tuple[int, ...]:
        request = Request("r", [7, *output], 1, SamplingParams(), 0, 0.0, grammar=Word())
        return allowed_drafts(request, tokens)

    assert drafts([], 1, 2, 4) == (1, 2)
    assert drafts([], 2, 1) == ()
    assert drafts([], 1, 2, 3, 4) == (1, 2), "behind 3 nothing can be sampled"
    assert drafts([1], 2, 8, 3) == (2,)
    assert drafts([1], 99, 2) == ()
    assert drafts([5], 1) == (), "what is wrong with a text is said when it is sampled"


def test_with_one_token_allowed_at_a_time_drafts_of_it_are_always_kept(random_model) -> None:
    class Square:
        def allowed(self, output: Sequence[int]) -> bytes:
            return bits([len(output) ** 2 % VOCAB], VOCAB)

    class Knows:
        def propose(self, request: Request, k: int) -> list[int]:
            return [(len(request.output_tokens) + i) ** 2 % VOCAB for i in range(k)]

    config = EngineConfig(num_blocks=20, num_drafts=4)
    engine = Engine(random_model("float64"), config, Parts(host_proposer=Knows()))
    request = engine.add(PROMPT, SamplingParams(max_tokens=21), grammar=Square())
    finish(engine)
    assert request.output_tokens == [i**2 % VOCAB for i in range(21)]
    assert [sum(step.num_new_tokens) for step in engine.trace.steps()] == [1, 5, 5, 5, 5]


def test_a_grammar_is_not_asked_about_texts_that_it_forbids(random_model) -> None:
    """It raises where it is: of each three drafts here the second is wrong."""

    class Lies:
        def propose(self, request: Request, k: int) -> list[int]:
            length = len(request.output_tokens)
            return [6 - (length + i + (i == 1)) % 7 for i in range(k)]

    engine = Engine(random_model("float64"), EngineConfig(num_blocks=20, num_drafts=3), Parts(host_proposer=Lies()))
    request = engine.add(PROMPT, SamplingParams(max_tokens=12, ignore_eos=True), grammar=Countdown(VOCAB))
    finish(engine)
    assert request.output_tokens == [6, 5, 4, 3, 2, 1, 0, 6, 5, 4, 3, 2]
    assert [row.num_drafts for step in engine.trace.steps() for row in step.rows] == [0, 1, 1, 1, 1, 1, 0]


@pytest.mark.parametrize(
    "case",
    [pytest.param({"temperature": 0.8}, marks=pytest.mark.slow), {"frequency_penalty": 1.0, "top_p": 0.9}],
    ids=str,
)
def test_texts_without_a_seed_are_distributed_as_the_targets(random_model, one_shot, case: dict[str, Any]) -> None:
    """By the definition, over all texts."""

    @dataclass(frozen=True)
    class Four:
        def tokens(self, output: Sequence[int]) -> list[int]:
            return [t for t in range(7) if (t + sum(output) + len(output)) % 7 < 4]

        def allowed(self, output: Sequence[int]) -> bytes:
            return bits(self.tokens(output), 7)

    class Drafts:
        def propose(self, request: Request, k: int) -> list[int]:
            start = sum(request.tokens)
            return [(start + i) % 7 for i in range(k)]

    target, length, texts = random_model("float64", vocab_size=7), 3, {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for text, chance in texts.items():
            logits = one_shot(target, PROMPT + list(text))[-1].tolist()
            asked = SamplingParams(**case, allowed_token_ids=tuple(Four().tokens(text)))
            for token, share in enumerate(by_definition(logits, text, asked)):
                if share > 0:
                    longer[*text, token] = chance * share
        texts = longer
    engine = Engine(target, EngineConfig(**options_of()), Parts(host_proposer=Drafts()))
    first = engine.add(PROMPT, SamplingParams(n=3000, max_tokens=length, **case), grammar=Four())
    members = [first, *first.children]
    finish(engine)
    assert p_value([tuple(member.output_tokens) for member in members], texts) > ALPHA
    use = DraftUse.of(engine.trace.steps())
    assert 0 < use.num_accepted_tokens < use.num_draft_tokens


def test_in_another_process_too() -> None:
    """With Gumbel noise, which is made there."""

    class Pair:
        def allowed(self, output: Sequence[int]) -> bytes:
            return bits([len(output) % 5, 5 + len(output) % 3], 4096)

    config = EngineConfig(num_blocks=20, overlap="off", sampling_noise="gumbel")
    here = Engine(load_model(course_model("draft"), torch.float32), config)
    there = split_engine(course_model("draft"), dataclasses.replace(config, speculative="ngram"))
    found = []
    for engine in (here, there):
        sampling = [SamplingParams(max_tokens=12, seed=i) for i in range(3)]
        prompt = [i % 5 for i in range(20)]
        requests = [engine.add(prompt, p, grammar=Pair() if i else None) for i, p in enumerate(sampling)]
        finish(engine)
        found.append([request.output_tokens for request in requests])
    assert found[0] == found[1]
    assert any(row.num_drafts for step in there.trace.steps() for row in step.rows)
    there.close()
