"""Requests without a seed, verified by rejection: in an engine, too, their texts are distributed as the target's.

The expected distribution is computed from its definition, over the logits of one pass, for every text there can be; the
engine's is counted. Requests with a seed, and greedy ones, write in the same steps what they write without drafts.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.sampler import sample
from reference_impl.core.sampler import draw
from reference_impl.features.speculative import chain
from reference_impl.interfaces import Request, SamplingParams
from reference_impl.observe.trace import DraftUse
from tests.engine.conftest import some
from tests.engine.test_draft_model import is_right_always
from tests.engine.test_drafts import ASKED, serve
from tests.engine.test_feature_head import random_head
from tests.engine.test_medusa import random_heads
from tests.executor.dense import TwinSampler

VOCAB, LENGTH, TEXTS = 7, 4, 1000
PROMPT = [3, 1, 4, 1, 5]
ALPHA = 1e-9  # chance passes it once in 10^9 tests, and the seeds are fixed
CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2, "temperature": 1.2},
    "penalties": {"repetition_penalty": 1.7, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    "biases": {"logit_bias": {2: 2.0, 5: -2.0}, "allowed_token_ids": (0, 2, 4, 5)},
    "stops": {"stop_token_ids": (2, 6), "min_tokens": 2},
}


class Follows:
    """Drafts on the host: what follows from the text, and sometimes fewer than asked for."""

    def propose(self, request: Request, k: int) -> list[int]:
        start = sum(request.tokens) * 3 + len(request.tokens)
        return [(start + i) % VOCAB for i in range(min(k, 1 + start % 3))]


class Always:
    """Drafts in the worker: one token."""

    def __init__(self, token: int):
        self.token = token

    def opened(self, slot: Any) -> None: ...
    def closed(self, slot: int) -> None: ...
    def propose(self, slots: torch.Tensor, lengths: torch.Tensor, tokens: torch.Tensor, k: int) -> torch.Tensor:
        return torch.full((len(slots), k), self.token, device=slots.device)


@pytest.fixture(scope="module")
def target(random_model: Callable) -> Any:
    return random_model("float64", vocab_size=VOCAB)


@pytest.fixture(scope="module")
def drafting(target: Any, random_model: Callable) -> dict[str, Callable[[], Parts]]:
    head = random_head(random_model("float64", vocab_size=VOCAB, num_hidden_layers=1))
    half, broken = copy.deepcopy(target), copy.deepcopy(target)
    half.embedding += 0.15 * torch.randn(half.embedding.shape, generator=torch.Generator().manual_seed(1)).double()
    broken.norm.fill_(torch.nan)
    return {
        "model": lambda: Parts(draft_model=half),
        "itself": lambda: Parts(draft_model=target),
        "broken": lambda: Parts(draft_model=broken),
        "head": lambda: Parts(draft_model=head),
        "heads": lambda: Parts(draft_model=random_heads(vocab_size=VOCAB)),
        "early exit": Parts,
        "host": lambda: Parts(host_proposer=Follows()),
        "worker": lambda: Parts(proposer=Always(1)),
    }


@pytest.fixture(scope="module")
def expected(target: Any, one_shot: Callable) -> Callable[[str], dict[tuple[int, ...], float]]:
    """The probability of each text of a case."""
    known: dict[tuple[int, ...], list[float]] = {}

    def logits(text: tuple[int, ...]) -> list[float]:
        if text not in known:
            known[text] = one_shot(target, PROMPT + list(text))[-1].tolist()
        return known[text]

    def of(name: str) -> dict[tuple[int, ...], float]:
        p = SamplingParams(**CASES[name])
        ended: dict[tuple[int, ...], float] = {}
        growing = {(): 1.0}
        for _ in range(LENGTH):
            longer: dict[tuple[int, ...], float] = {}
            for text, chance in growing.items():
                for token, share in enumerate(by_definition(logits(text), text, p)):
                    if share > 0:
                        (ended if token in p.stop_token_ids else longer)[(*text, token)] = chance * share
            growing = longer
        return ended | growing

    return of


def by_definition(logits: Sequence[float], text: tuple[int, ...], p: SamplingParams) -> np.ndarray:
    scores = np.array([score + (p.logit_bias or {}).get(token, 0.0) for token, score in enumerate(logits)])
    for token in set(PROMPT + list(text)):
        scores[token] *= p.repetition_penalty if scores[token] < 0 else 1 / p.repetition_penalty
    for token, times in Counter(text).items():
        scores[token] -= p.presence_penalty + p.frequency_penalty * times
    for token in range(VOCAB):
        if token not in (p.allowed_token_ids or range(VOCAB)) or (
            len(text) < p.min_tokens and token in p.stop_token_ids
        ):
            scores[token] = -math.inf
    probs = np.exp((scores - scores.max()) / p.temperature)
    order = np.argsort(-probs, kind="stable")
    probs[order[p.top_k or VOCAB :]] = 0
    probs /= probs.sum()
    if p.top_p < 1:
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= p.top_p]] = 0
    probs[probs < p.min_p * probs.max()] = 0
    return probs / probs.sum()


def texts_of(engine: Engine, sampling: SamplingParams) -> list[Request]:
    first = engine.add(PROMPT, sampling)
    members = [first, *first.children]
    while engine.has_work():
        engine.step()
    assert engine.kv.num_available == engine.num_blocks
    return members


def p_value(found: list[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Of the chi-squared statistic; texts that are rare go together with those that begin alike. 0 where one came that
    has no probability."""
    observed, means = Counter(found), {text: chance * len(found) for text, chance in expected.items()}
    if observed.keys() - means.keys():
        return 0.0
    for length in range(max(map(len, means)), 0, -1):
        for text in [text for text, mean in means.items() if len(text) == length and mean < 10]:
            means[text[:-1]] = means.get(text[:-1], 0.0) + means.pop(text)
            observed[text[:-1]] += observed.pop(text, 0)
    if means.get((), 10) < 10:
        rest, rarest = means.pop(()), min(means, key=means.__getitem__)
        means[rarest] += rest
        observed[rarest] += observed[()]
    assert len(means) > 5
    statistic = sum((observed[text] - mean) ** 2 / mean for text, mean in means.items())
    return float(stats.chi2(len(means) - 1).sf(statistic))


def options_of(**changes: Any) -> dict[str, Any]:
    return {"num_drafts": 3, "num_blocks": 2000, "block_size": 4, "max_num_seqs": 1000, "seed": 1,
            "max_num_batched_tokens": 5000} | changes  # fmt: skip


# What an engine is told beside its parts.
OPTIONS: dict[str, dict[str, Any]] = {
    "early exit": {"speculative": "early-exit", "exit_layer": 1, "adaptive_drafts": "off"}
}


# The rule is tried with each filter in tests/features/speculative. Here all that changes p and q is tried with drafts
# that are drawn, or with some that are not.
@pytest.mark.parametrize(
    ("name", "kind"),
    some(
        [("top_p", "model"), ("penalties", "model"), ("biases", "model"), ("stops", "model"), ("min_p", "host"),
         ("penalties", "host"), ("top_k", "worker"), ("biases", "worker")],
        list(itertools.product(CASES, ["model", "host", "worker"])),
    ),
)  # fmt: skip
def test_texts_are_distributed_as_the_targets(target, drafting, expected, name: str, kind: str) -> None:
    engine = Engine(target, EngineConfig(**options_of()), drafting[kind]())
    members = texts_of(engine, SamplingParams(n=TEXTS, max_tokens=LENGTH, logprobs=0, **CASES[name]))
    assert p_value([tuple(member.output_tokens) for member in members], expected(name)) > ALPHA
    for member in members:
        assert [r.token for r in member.logprobs] == member.output_tokens
    use = DraftUse.of(engine.trace.steps())
    if (name, kind) == ("biases", "worker"):  # it drafts what they rule out
        assert use.num_accepted_tokens == 0 < use.num_draft_tokens
    else:
        assert 0 < use.num_accepted_tokens < use.num_draft_tokens


@pytest.mark.parametrize(
    ("kind", "name"),
    some(
        [("broken", "temperature"), ("itself", "temperature"), ("head", "penalties"), ("heads", "penalties"),
         ("early exit", "temperature")],
        list(itertools.product(["broken", "itself", "head", "heads", "early exit"], ["temperature", "penalties"])),
    ),
)  # fmt: skip
def test_a_draft_that_is_always_right_or_none_at_all_heads_and_the_first_layers(
    target, drafting, expected, name: str, kind: str
) -> None:
    engine = Engine(target, EngineConfig(**options_of(**OPTIONS.get(kind, {}))), drafting[kind]())
    members = texts_of(engine, SamplingParams(n=TEXTS, max_tokens=LENGTH, **CASES[name]))
    assert p_value([tuple(member.output_tokens) for member in members], expected(name)) > ALPHA
    if (name, kind) == ("temperature", "itself"):
        assert is_right_always(engine)
    use = DraftUse.of(engine.trace.steps())
    assert kind in ("broken", "itself") or 0 < use.num_accepted_tokens < use.num_draft_tokens


@pytest.mark.parametrize(
    ("kind", "late", "preemption"),
    some(
        [("model", None, "swap"), ("model", 3, "recompute"), ("heads", 3, "swap"), ("worker", 2, "swap"),
         ("host", None, "recompute")],
        [(kind, late, preemption)
         for kind, late in [("model", None), ("model", 3), ("heads", 3), ("worker", 2), ("host", None)]
         for preemption in ("recompute", "swap")],
    ),
)  # fmt: skip
def test_preempted_and_overlapped_they_still_are(
    target, drafting, expected, tapped_engine, kind: str, late: int | None, preemption: str
) -> None:
    """Texts go on behind what is counted, so that there is something to preempt."""
    options = options_of(num_blocks=80, max_num_seqs=40, preemption=preemption, prefix_cache="hash")
    engine, _ = tapped_engine(target, parts=drafting[kind](), late=late, **options)
    members = texts_of(engine, SamplingParams(n=300, max_tokens=LENGTH + 6, temperature=0.6))
    assert any(step.preempted for step in engine.trace.steps())
    assert p_value([tuple(member.output_tokens[:LENGTH]) for member in members], expected("temperature")) > ALPHA


def test_where_tokens_are_drawn_on_the_device_they_still_are(target, drafting, expected) -> None:
    parts = drafting["model"]()
    parts.sampler = TwinSampler()
    engine = Engine(target, EngineConfig(**options_of()), parts)
    members = texts_of(engine, SamplingParams(n=TEXTS, max_tokens=LENGTH, **CASES["top_p"]))
    assert p_value([tuple(member.output_tokens) for member in members], expected("top_p")) > ALPHA


@pytest.mark.parametrize(
    "kind", some(["model", "heads", "worker"], ["model", "head", "heads", "early exit", "host", "worker"])
)
def test_a_rule_that_is_nearly_right_is_seen_here_too(target, drafting, expected, kind: str, monkeypatch) -> None:
    def match_or_resample(p: Any, q: Any, drafts: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        at_q = 1.0 if q is None else q.gather(1, drafts[:, None])[:, 0]
        return torch.where(u[0] * at_q < p.gather(1, drafts[:, None])[:, 0], drafts, draw(p, u[1]))

    monkeypatch.setattr(chain, "verified", match_or_resample)
    engine = Engine(target, EngineConfig(**options_of(**OPTIONS.get(kind, {}))), drafting[kind]())
    n = 3 * TEXTS if kind == "host" else TEXTS  # whose drafts are rarely right: less of the text is drawn by the rule
    members = texts_of(engine, SamplingParams(n=n, max_tokens=LENGTH, temperature=0.6))
    assert p_value([tuple(member.output_tokens) for member in members], expected("temperature")) < ALPHA


# --- whom it is for -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def usual(random_model: Callable) -> Any:
    return random_model("float64", max_position_embeddings=128)


@pytest.fixture(scope="module")
def plain(usual: Any) -> dict[str, Request]:
    found: dict[str, Request] = {}
    for name, sampling in ASKED.items():
        found |= serve(Engine(usual, EngineConfig(num_blocks=32)), {name: sampling})
    return found


@pytest.mark.parametrize(
    ("kind", "late"),
    some(
        [("model", 1), ("worker", None), ("host", None)],
        [("model", None), ("model", 1), ("worker", None), ("worker", 1), ("host", None)],
    ),
)
def test_beside_them_greedy_and_seeded_requests_write_what_they_write_alone(
    usual, plain, tapped_engine, kind: str, late: int | None
) -> None:
    half = copy.deepcopy(usual)
    half.embedding += 0.05 * torch.randn(half.embedding.shape, generator=torch.Generator().manual_seed(1)).double()
    parts = {
        "model": Parts(draft_model=half),
        "worker": Parts(proposer=Always(1)),
        "host": Parts(host_proposer=Follows()),
    }
    engine, _ = tapped_engine(
        usual, parts=parts[kind], late=late, num_drafts=3, num_blocks=150, block_size=4, max_num_seqs=16
    )
    free = {f"free {i}": SamplingParams(max_tokens=30, temperature=0.5 + i / 4, top_k=9 * i) for i in range(4)}
    mixed = itertools.chain.from_iterable(itertools.zip_longest(free.items(), ASKED.items()))
    requests = serve(engine, dict(item for item in mixed if item))
    for name, request in plain.items():
        assert requests[name].tokens == request.tokens, name
    assert all(len(requests[name].output_tokens) == 30 for name in free)


@pytest.mark.parametrize("kind", ["model", "worker", "host"])
def test_under_a_sampler_that_is_asked_a_draft_is_kept_where_it_is_what_comes_without(
    target, drafting, kind: str
) -> None:
    def mine(logits: torch.Tensor, requests: Any) -> Any:
        return sample(logits, requests)

    asked, texts = SamplingParams(n=20, max_tokens=12), []
    for with_drafts in (False, True):
        parts = drafting[kind]() if with_drafts else Parts()
        parts.sampler = mine
        options = options_of(num_drafts=3 if with_drafts else 0)
        texts.append([r.tokens for r in texts_of(Engine(target, EngineConfig(**options), parts), asked)])
    assert texts[0] == texts[1]
    launched = texts_of(Engine(target, EngineConfig(**options_of()), drafting[kind]()), asked)
    assert [r.tokens for r in launched] != texts[0], "ours verifies them by rejection"


def test_a_draft_model_drafts_with_numbers_of_its_own(target, drafting) -> None:
    """With those of the target's tokens, drafts that are all right would be what plain decoding draws."""
    asked, drafted = (
        SamplingParams(n=20, max_tokens=12),
        Engine(target, EngineConfig(**options_of()), drafting["itself"]()),
    )
    texts = [member.tokens for member in texts_of(drafted, asked)]
    assert is_right_always(drafted)
    plain = texts_of(Engine(target, EngineConfig(**options_of(num_drafts=0))), asked)
    assert texts != [member.tokens for member in plain]


def test_more_drafts_are_kept_than_of_requests_with_a_seed(target, drafting) -> None:
    kept = {}
    for seed in (None, 1):
        engine = Engine(target, EngineConfig(**options_of()), drafting["model"]())
        texts_of(engine, SamplingParams(n=60, max_tokens=30, seed=seed))
        kept[seed] = DraftUse.of(engine.trace.steps()).acceptance
    assert kept[None] > kept[1]
