"""A cache of 4 bits ("int4") with much of the engine on at once, against an engine of the same format that serves each
request alone, step by step.

What a token reads depends on its text alone, so texts and log-probabilities are the same, to float64's last digits:
with Medusa heads or a feature head that drafts, pages on a disk, samples, prefixes found again, chunks and too few
blocks; and where another process computes.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from reference_impl.assembly.config import EngineConfig, course_model
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.model import load_model
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.split import split_engine
from reference_impl.core.decoder import Decoder
from reference_impl.features.transfer.folder import FolderStore
from reference_impl.interfaces import Request, SamplingParams
from tests.engine.test_feature_head import random_head
from tests.engine.test_medusa import random_heads

Asked = tuple[list[int], SamplingParams]


def drawn(seed: int, vocab_size: int = 61) -> list[Asked]:
    """Prompts of which some begin as others do, greedy and sampled, some of them several times."""
    draw, shared = random.Random(seed), random.Random(0).choices(range(5, vocab_size), k=17)
    asked = []
    for i in range(6):
        own = draw.choices(range(5, vocab_size), k=draw.randint(1, 5))
        prompt = shared[: draw.choice([0, 8, 17])] + own * 2  # which n-grams go on with
        how = draw.choice([{"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 0.8, "n": 3}])
        sampling = SamplingParams(max_tokens=draw.randint(4, 11), seed=i, logprobs=1, ignore_eos=True, **how)
        asked.append((prompt, sampling))
    return asked


def serve(engine: Engine, asked: list[Asked], arrivals: list[int]) -> list[Request]:
    """All samples of all requests, in the order in which they are asked."""
    samples: dict[int, list[Request]] = {}
    step = 0
    while len(samples) < len(asked) or engine.has_work() or getattr(engine.kv, "num_transfers", 0):
        for i, (prompt, sampling) in enumerate(asked):
            if arrivals[i] == step:
                first = engine.add(prompt, sampling, f"r{i}", priority=i % 2)
                samples[i] = [first, *first.children]
        engine.step()
        step += 1
    assert engine.kv.num_available == engine.num_blocks
    return [request for i in sorted(samples) for request in samples[i]]


@pytest.fixture(scope="module")
def wanted(random_model: Callable[..., Any]) -> Callable[[int], list[Request]]:
    model = random_model("float64", max_position_embeddings=128)
    return functools.cache(lambda seed: alone(model, drawn(seed)))


def alone(model: Decoder, asked: list[Asked]) -> list[Request]:
    """Each request has an engine to itself, whose prompt is one chunk."""
    config = EngineConfig(kv_dtype="int4", block_size=4, num_blocks=60, prefix_cache="off", overlap="off")
    return [request for one in asked for request in serve(Engine(model, config), [one], [0])]


def same(found: list[Request], wanted: list[Request]) -> None:
    assert [r.output_tokens for r in found] == [r.output_tokens for r in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        pairs = zip(ours.logprobs, theirs.logprobs, strict=True)
        assert max(abs(a.logprob - b.logprob) for a, b in pairs) < 1e-9, ours.id


CROWDED: dict[str, Any] = {
    "block_size": 4, "num_blocks": 12, "max_num_seqs": 4, "max_num_batched_tokens": 13, "prefix_cache": "hash",
    "preemption": "swap", "swap_bytes": 1 << 18, "admission": "fill",
}  # fmt: skip


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 14), marks=pytest.mark.slow)])
@pytest.mark.parametrize("drafts", ["medusa", "eagle", "eagle, tree", "lookahead", "ngram"])
def test_texts_and_scores_are_those_of_a_request_alone(
    drafts: str, seeds: range, random_model: Callable[..., Any], wanted: Callable[[int], list[Request]], tmp_path: Path
) -> None:
    """A second engine finds the first one's pages on the disk; with a feature head there is no store."""
    model, parts, steps = random_model("float64", max_position_embeddings=128), dict[str, Any](), list[Any]()
    how: dict[str, Any] = {"num_drafts": 3, "adaptive_drafts": "off"}
    how |= {"speculative": "ngram"} if drafts == "ngram" else {}
    if drafts == "lookahead":
        how = {"speculative": "lookahead", "lookahead": (2, 3, 2)}
    if drafts == "eagle, tree":
        how = {"speculative": "eagle", "draft_tree": (3, 1, 1)}
    config = EngineConfig(kv_dtype="int4", **how, **CROWDED)
    if drafts == "medusa":
        parts["draft_model"] = random_heads(3)
    if head := drafts.startswith("eagle"):
        one_layer = random_model("float64", max_position_embeddings=128, num_hidden_layers=1)
        parts["draft_model"] = random_head(one_layer)
    for seed in seeds:
        asked = drawn(seed)
        arrivals = [random.Random(seed + 100).choice([0, 0, 2, 5]) * (i % 3) for i in range(len(asked))]
        for _ in range(1 if head else 2):
            store = None if head else FolderStore(tmp_path)
            engine = Engine(model, config, Parts(**parts, page_store=store))
            same(serve(engine, asked, arrivals), wanted(seed))
            steps += engine.trace.steps()
            if store is not None:
                store.close()
    assert any(row.num_drafts for step in steps for row in step.rows)
    assert any(cached for step in steps for _, cached in step.admitted)
    assert head or any(step.transfers.loads for step in steps)
    assert any(step.preempted for step in steps)
    assert any(step.transfers.swap_in for step in steps)


def test_another_process_computes_the_same(tmp_path: Path) -> None:
    """With samples, swapping, prefixes and drafts of the host."""
    folder = course_model("draft")
    model, asked = load_model(folder, dtype=torch.float64), drawn(3, 900)
    config = EngineConfig(kv_dtype="int4", speculative="ngram", num_drafts=3, **CROWDED)
    wanted = alone(model, asked)
    engine = split_engine(folder, config, dtype="float64")
    try:
        found = serve(engine, asked, [0, 0, 1, 2, 3, 5])
        assert [r.output_tokens for r in found] == [r.output_tokens for r in wanted]
        same(found, wanted)
        assert any(step.preempted for step in engine.trace.steps())
    finally:
        engine.close()
