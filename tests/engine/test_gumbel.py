"""EngineConfig(sampling_noise="gumbel"): a seeded text depends on its request alone, whoever drafts; texts without a
seed keep their distribution; of seeded requests more drafts are kept. Any schedule: test_schedule_invariance.py."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.sampler import CalledSampler, sample
from reference_impl.features.gumbel.sampler import GumbelSampler
from reference_impl.features.speculative.rejection import is_exact
from reference_impl.features.speculative.tree_growing import Noise
from reference_impl.interfaces import SamplingParams
from reference_impl.observe.trace import DraftUse
from tests.engine.conftest import some
from tests.engine.test_draft_model import check_texts, is_right_always
from tests.engine.test_drafts import ASKED, VOCAB, serve
from tests.engine.test_feature_head import random_head
from tests.engine.test_medusa import random_heads
from tests.engine.test_rejection import ALPHA, CASES, LENGTH, options_of, p_value, texts_of
from tests.engine.test_rejection import drafting as drafting
from tests.engine.test_rejection import expected as expected

GUMBEL: dict[str, Any] = {"sampling_noise": "gumbel"}


class CalledGumbelSampler(CalledSampler, GumbelSampler):
    pass


@pytest.fixture(scope="module")
def large(random_model: Callable) -> Any:
    return random_model("float64", max_position_embeddings=128)


@pytest.fixture(scope="module")
def target(random_model: Callable) -> Any:
    """Of `drafting` and `expected`: few tokens."""
    return random_model("float64", vocab_size=7)


FEW = {
    name: dataclasses.replace(ASKED[name], max_tokens=18, min_tokens=min(ASKED[name].min_tokens, 9))
    for name in ("greedy", "drawn", "filtered", "drawn, penalised", "drawn, all 30")
}


@pytest.fixture(scope="module")
def plain(large: Any) -> dict[str, list[int]]:
    """Each request alone."""
    found = {}
    for name, sampling in FEW.items():
        engine = Engine(large, EngineConfig(num_blocks=32, **GUMBEL))
        found[name] = serve(engine, {name: sampling})[name].tokens
    return found


@pytest.fixture(scope="module")
def half(large: Any) -> Any:
    found = copy.deepcopy(large)
    found.embedding += 0.05 * torch.randn(found.embedding.shape, generator=torch.Generator().manual_seed(1)).double()
    return found


KINDS: dict[str, dict[str, Any]] = {
    "model": {"num_drafts": 4}, "head": {"num_drafts": 3}, "heads": {"num_drafts": 2}, "worker": {"num_drafts": 5},
    "early exit": {"speculative": "early-exit", "adaptive_drafts": "off"}, "lookahead": {"speculative": "lookahead"},
    "tree": {"speculative": "eagle", "draft_tree": (3, 2)},
    "grown": {"speculative": "eagle", "draft_tree": "dynamic,2,3"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "late"),
    some(
        [
            ("model", 2),
            ("head", None),
            ("heads", 1),
            ("worker", 3),
            ("early exit", None),
            ("lookahead", None),
            ("tree", None),
            ("grown", None),
        ],
        [*((kind, None) for kind in KINDS), ("model", 2), ("heads", 1), ("worker", 3), ("grown", 2)],
    ),
)
def test_the_text_is_that_of_plain_decoding_whoever_drafts(
    large, half, plain, random_model, oracle, late_engine, kind: str, late: int | None
) -> None:
    """Also in so few blocks that requests are preempted, and on a device that is late."""
    head = random_head(random_model("float64", max_position_embeddings=128, num_hidden_layers=1))
    drafts = {"model": half, "head": head, "heads": random_heads(), "tree": head, "grown": head}
    parts = Parts(draft_model=drafts.get(kind), proposer=oracle(plain, 0.6, VOCAB) if kind == "worker" else None)
    engine = late_engine(
        large, late, parts, block_size=4, num_blocks=16, max_num_batched_tokens=40,
        preemption="swap" if late else "recompute", **GUMBEL, **KINDS[kind],
    )  # fmt: skip
    check_texts(serve(engine, FEW), plain)
    steps = engine.trace.steps()
    assert any(step.preempted for step in steps)
    use = DraftUse.of(steps)
    assert use.num_draft_tokens > 0
    assert use.num_accepted_tokens > 0 or kind == "grown"
    assert engine.kv.num_available == engine.num_blocks


def test_the_target_as_its_own_draft_is_right_always(large, plain, random_model, drafting, target) -> None:
    engine = Engine(large, EngineConfig(num_blocks=90, num_drafts=3, **GUMBEL), Parts(draft_model=large))
    check_texts(serve(engine, FEW), plain)
    assert is_right_always(engine)
    engine = Engine(target, EngineConfig(**options_of(), **GUMBEL), drafting["itself"]())
    texts_of(engine, SamplingParams(n=50, max_tokens=LENGTH))  # without a seed, by rejection
    assert is_right_always(engine)


@pytest.mark.parametrize(
    ("name", "kind"), [pytest.param("top_p", "model", marks=pytest.mark.slow), ("penalties", "head")]
)
def test_texts_without_a_seed_are_distributed_as_the_targets(target, drafting, expected, name: str, kind: str) -> None:
    engine = Engine(target, EngineConfig(**options_of(), **GUMBEL), drafting[kind]())
    members = texts_of(engine, SamplingParams(n=600, max_tokens=LENGTH, **CASES[name]))
    assert p_value([tuple(member.output_tokens) for member in members], expected(name)) > ALPHA
    use = DraftUse.of(engine.trace.steps())
    assert 0 < use.num_accepted_tokens < use.num_draft_tokens


def test_of_seeded_requests_more_drafts_of_a_model_are_kept_than_with_one_number(large, half) -> None:
    kept = {}
    for noise in ("one-number", "gumbel"):
        config = EngineConfig(num_blocks=200, num_drafts=3, sampling_noise=noise)
        engine = Engine(large, config, Parts(draft_model=half))
        serve(engine, {f"r{i}": SamplingParams(max_tokens=60, seed=i) for i in range(12)})
        kept[noise] = DraftUse.of(engine.trace.steps()).acceptance
    assert kept["gumbel"] > kept["one-number"] + 0.05


@pytest.mark.parametrize("tree", ["dynamic,2,3", "dynamic,3,2"])
def test_a_tree_that_is_grown_by_the_positions_numbers_is_kept_more(
    large, random_model, tree: str, monkeypatch
) -> None:
    """Than one of the head's likeliest tokens; of requests with a seed, whose texts are the same."""
    head = random_head(random_model("float64", max_position_embeddings=128, num_hidden_layers=1))
    asked = {f"r{i}": SamplingParams(max_tokens=40, seed=i, temperature=1.3, top_k=30) for i in range(6)}
    found, kept = [], []
    for by_numbers in (True, False):
        if not by_numbers:
            monkeypatch.setattr(Noise, "of", lambda *_: None)
        config = EngineConfig(num_blocks=200, speculative="eagle", draft_tree=tree, **GUMBEL)
        engine = Engine(large, config, Parts(draft_model=head))
        found.append({name: request.tokens for name, request in serve(engine, asked).items()})
        kept.append(DraftUse.of(engine.trace.steps()).num_accepted_tokens)
    assert found[0] == found[1]
    assert kept[0] > 1.2 * kept[1]


def test_requests_without_a_seed_are_verified_by_rejection_unless_a_choose_is_ones_own() -> None:
    class Likeliest(CalledSampler, GumbelSampler):
        def choose(self, scores: torch.Tensor, t: Any) -> torch.Tensor:
            return scores.argmax(-1)

    assert is_exact(GumbelSampler())
    assert not is_exact(Likeliest())


def test_samples_of_a_prompt_are_those_that_each_would_be_alone(large, half) -> None:
    texts = []
    for parts, drafts in ((None, 0), (Parts(draft_model=half), 3)):
        engine = Engine(large, EngineConfig(num_blocks=64, block_size=4, num_drafts=drafts, **GUMBEL), parts)
        first = engine.add([3, 1, 4], SamplingParams(max_tokens=20, seed=5, n=3, top_p=0.9))
        members = [first, *first.children]
        while engine.has_work():
            engine.step()
        texts.append([member.tokens for member in members])
    assert texts[0] == texts[1]
    assert len(set(map(tuple, texts[0]))) == 3


def test_the_option_chooses_the_engines_own_sampler_and_no_other(large) -> None:
    assert type(Engine(large, EngineConfig(**GUMBEL)).executor.sampler) is GumbelSampler  # type: ignore[attr-defined]
    assert Engine(large, EngineConfig()).executor.sampler is sample  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="Parts.sampler, CalledGumbelSampler, is given: leave one of the two out"):
        Engine(large, EngineConfig(**GUMBEL), Parts(sampler=CalledGumbelSampler()))
    with pytest.raises(ValueError, match="sampling_noise: expected one of one-number, gumbel, got 'white'"):
        EngineConfig(sampling_noise="white")  # type: ignore[arg-type]
