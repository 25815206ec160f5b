"""Typical acceptance: the option that is lossy, and says so."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from reference_impl.assembly.config import EngineConfig, course_model
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.llm import LLM
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.split import load_worker
from reference_impl.core.sampler import TorchSampler
from reference_impl.features.speculative.candidates import typical
from reference_impl.interfaces import SamplingParams
from reference_impl.observe.trace import DraftUse
from tests.engine.test_drafts import ASKED, serve
from tests.engine.test_rejection import ALPHA, LENGTH, PROMPT, VOCAB, by_definition, p_value, texts_of


@pytest.fixture(scope="module")
def other(target: Any) -> Any:
    found = copy.deepcopy(target)
    found.embedding += 0.05 * torch.randn(found.embedding.shape, generator=torch.Generator().manual_seed(1)).double()
    return found


def test_a_draft_is_kept_where_it_is_typical_or_is_what_was_sampled(target, other, one_shot) -> None:
    """Checked over the text itself: what plain decoding would draw there, or typical by its definition."""
    sampling = SamplingParams(max_tokens=40, temperature=0.8, seed=3)
    config = EngineConfig(num_blocks=64, num_drafts=4, acceptance="typical")
    engine = Engine(target, config, Parts(draft_model=other))
    tokens = serve(engine, {"drawn": sampling})["drawn"].tokens
    plain = Engine(target, EngineConfig(num_blocks=64))
    differs = 0
    for at in range(len(tokens) - 40, len(tokens)):
        request = plain.add(tokens[:at], SamplingParams(max_tokens=1, temperature=0.8, seed=3))
        while plain.has_work():
            plain.step()
        p = (one_shot(target, tokens[:at])[-1] / 0.8).softmax(-1)[None]
        plausible = bool(typical(p, torch.tensor([tokens[at]])))
        assert request.tokens[-1] == tokens[at] or plausible, at
        differs += request.tokens[-1] != tokens[at]
    assert differs > 0, "it is lossy"
    use = DraftUse.of(engine.trace.steps())
    assert use.num_lossy == use.num_drafts > 0


def test_more_drafts_are_kept_and_greedy_texts_stay(target, other) -> None:
    found, texts = {}, {}
    for acceptance in ("exact", "typical"):
        config = EngineConfig(num_blocks=64, num_drafts=4, acceptance=acceptance)
        engine = Engine(target, config, Parts(draft_model=other))
        texts[acceptance] = serve(engine, {"greedy": ASKED["greedy"]})["greedy"].tokens
        serve(engine, {f"r{i}": SamplingParams(max_tokens=40, temperature=1, seed=i) for i in range(4)})
        use = DraftUse.of(engine.trace.steps())
        found[acceptance] = use.num_accepted_tokens / use.num_draft_tokens
        assert (use.num_lossy > 0) == (acceptance == "typical")
    assert texts["exact"] == texts["typical"]
    assert found["typical"] > found["exact"]


def test_texts_are_no_longer_distributed_as_the_targets(random_model, one_shot) -> None:
    small = random_model("float64", vocab_size=VOCAB)
    expected, asked = {(): 1.0}, SamplingParams(temperature=0.6)
    for _ in range(LENGTH):
        expected = {
            (*text, token): chance * share
            for text, chance in expected.items()
            for token, share in enumerate(by_definition(one_shot(small, PROMPT + list(text))[-1].tolist(), text, asked))
        }
    options = {"num_blocks": 9000, "block_size": 4, "max_num_seqs": 1000, "seed": 1, "max_num_batched_tokens": 20000}
    config = EngineConfig(**options, num_drafts=2, acceptance="typical")
    engine = Engine(small, config, Parts(draft_model=random_model("float64", vocab_size=VOCAB, num_hidden_layers=1)))
    members = texts_of(engine, SamplingParams(n=1500, max_tokens=LENGTH, temperature=0.6))
    assert p_value([tuple(member.output_tokens) for member in members], expected) < ALPHA


@pytest.mark.parametrize("worker", ["here", "process"])
def test_by_name_in_this_process_and_in_another(worker: Any) -> None:
    llm = LLM(
        course_model("draft"), dtype="float32", num_blocks=64, speculative="ngram", acceptance="typical", worker=worker,
        adaptive_drafts="off",
    )  # fmt: skip
    try:
        asked = SamplingParams(max_tokens=30, temperature=1.0, seed=1)
        ids = llm.generate([[5, 6, 7, 8] * 6], asked)[0].outputs[0].token_ids
        plain = LLM(course_model("draft"), dtype="float32", num_blocks=64).generate([[5, 6, 7, 8] * 6], asked)
        assert DraftUse.of(llm.engine.trace.steps()).num_lossy > 0
        assert ids != plain[0].outputs[0].token_ids
    finally:
        llm.engine.close()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"speculative": "off"}, "is for drafts, and there are none"),
        ({"speculative": "lookahead"}, "is for drafts in a chain"),
        ({"acceptance": "lenient"}, "expected one of exact, typical, got 'lenient'"),
    ],
)
def test_what_cannot_be_is_refused(target, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Engine(target, EngineConfig(**{"num_blocks": 8, "acceptance": "typical", "speculative": "ngram", **options}))


def test_a_sampler_that_is_asked_is_refused(target) -> None:
    def asked(logits: Any, requests: Any) -> Any:
        pytest.fail("refused, and asked all the same")

    class Own(TorchSampler):
        def choose(self, logits: Any, t: Any) -> Any:
            pytest.fail("refused, and asked all the same")

    for sampler, name in ((asked, "function"), (Own(), "Own")):
        with pytest.raises(ValueError, match=f"a TorchSampler, .*, and Parts.sampler, {name}, is given"):
            Engine(
                target, EngineConfig(num_blocks=8, speculative="ngram", acceptance="typical"), Parts(sampler=sampler)
            )


def test_a_worker_refuses_a_sampler_that_is_asked_also_where_drafts_come_with_the_steps() -> None:
    config = EngineConfig(num_blocks=8, speculative="ngram", acceptance="typical")
    with pytest.raises(ValueError, match="acceptance='typical' needs a sampler .*Parts.sampler, function, is given"):
        load_worker(course_model("target"), "float32", "cpu", config, lambda: Parts(sampler=greedy))


def greedy(logits: Any, requests: Any) -> Any:
    return logits.argmax(-1)
