"""Every family through the whole engine: prompts in chunks, decoding, neighbours, preemption, windows that slide."""

from __future__ import annotations

import random
from itertools import count
from typing import Any

import pytest
import torch

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.model import load_model
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.sampler import sample
from reference_impl.core.decoder import Decoder
from reference_impl.features.windows.groups import longest_sequence
from reference_impl.interfaces import Request, Sampled, SamplingParams

FP32, FP64 = 3e-5, 1e-12  # of the largest logit
PROMPTS = [random.Random(i).choices(range(97), k=n) for i, n in enumerate((40, 3, 61, 1))]
NEW_TOKENS = 26  # so that every window of the variants slides while decoding

# How the engine is set up -> its options. The last cannot hold all requests at once.
SETUPS: dict[str, dict[str, Any]] = {
    "one pass, then decode": {"block_size": 128, "num_blocks": 64},
    "chunks of 7": {"block_size": 4, "num_blocks": 400, "max_num_batched_tokens": 7},
    "blocks of 1": {"block_size": 1, "num_blocks": 1200, "max_num_batched_tokens": 50, "max_num_seqs": 2},
    "preemption": {"block_size": 4, "num_blocks": None, "max_num_batched_tokens": 33},
}


class Recorder:
    """A sampler that keeps the logits it is given: {request: {position: logits}}."""

    def __init__(self) -> None:
        self.logits: dict[str, dict[int, torch.Tensor]] = {}

    def __call__(self, logits: torch.Tensor, requests: list[Request]) -> Sampled:
        for row, request in zip(logits, requests, strict=True):
            self.logits.setdefault(request.id, {})[len(request.tokens) - 1] = row.clone()
        return sample(logits, requests)


def serve(model: Decoder, setup: str) -> tuple[Engine, list[list[int]], list[dict[int, torch.Tensor]]]:
    """(engine, tokens of each request, its logits by position). The cache is full of NaN before it is written."""
    options = dict(SETUPS[setup])
    if options["num_blocks"] is None:  # just enough for the longest request alone
        windows = [spec.window for spec in Engine(model, EngineConfig(num_blocks=1000)).kv_specs]
        longest = max(map(len, PROMPTS)) + NEW_TOKENS
        options["num_blocks"] = next(n for n in count(1) if longest_sequence(n, 4, windows, 33) >= longest)
    recorder = Recorder()
    engine = Engine(model, EngineConfig(**options), Parts(sampler=recorder))
    engine.kv_cache.data.fill_(torch.nan)
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    requests = [engine.add(prompt, sampling) for prompt in PROMPTS]
    while engine.has_work():
        engine.step()
    return engine, [r.tokens for r in requests], [recorder.logits[r.id] for r in requests]


def worst(found: dict[int, torch.Tensor], expected: torch.Tensor) -> float:
    """Largest difference over the positions that were sampled, as a share of the largest logit."""
    assert len(found) == NEW_TOKENS
    rows = torch.stack(list(found.values()))
    assert rows.isfinite().all()
    scale = expected.double().abs().max()
    return float((rows.double() - expected[list(found)].double()).abs().max() / scale)


# The others, for a model of every family, in float64 below; here in `make test-all`. One pass is test_parity's, too.
SOME, OTHERS = ("preemption",), ("one pass, then decode", "chunks of 7", "blocks of 1")


@pytest.mark.parametrize("setups", [SOME, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=", ".join)
def test_served_logits_equal_transformers(variant, setups, save, their_logits) -> None:
    theirs, folder = save(variant)
    model = load_model(folder)
    for setup in setups:
        _, tokens, logits = serve(model, setup)
        for sequence, found in zip(tokens, logits, strict=True):
            assert worst(found, their_logits(theirs, sequence)) <= FP32, setup


EXACT = (
    "llama_biases mistral_window qwen2_window qwen3_window gemma_untied_bias gemma2 gemma3 mixtral qwen3_moe_mixed "
    "olmo2_mha_bias_tied phi3_all stablelm_biases_tied"
).split()


@pytest.mark.parametrize("name", EXACT)
def test_served_logits_in_float64_are_those_of_one_pass(name, save, our_logits) -> None:
    """One pass equals `transformers` to 1e-12 (test_parity); with preemption it is tried above."""
    model = load_model(save(name, torch.float64)[1])
    for setup in ("chunks of 7", "blocks of 1"):
        _, tokens, logits = serve(model, setup)
        for sequence, found in zip(tokens, logits, strict=True):
            assert worst(found, our_logits(model, sequence)[0]) <= FP64, setup


@pytest.mark.parametrize("name", ["llama2_mha", "mistral_window", "gemma3", "mixtral"])
def test_the_set_up_called_preemption_preempts(name, save) -> None:
    engine, *_ = serve(load_model(save(name)[1]), "preemption")
    assert sum(len(event.preempted) for event in engine.trace.steps()) > 0


def test_layers_with_and_without_a_window_are_cached_apart_in_groups_of_equal_size(save) -> None:
    engine = Engine(load_model(save("gemma3")[1]), EngineConfig(num_blocks=100))
    assert sorted((spec.layers, spec.window) for spec in engine.kv_specs) == [
        ((0,), 24), ((1,), 24), ((2,), 24), ((3,), 24), ((4,), 24), ((5,), None),
    ]  # fmt: skip
    engine = Engine(load_model(save("mistral_window")[1]), EngineConfig(num_blocks=100))
    assert [(spec.layers, spec.window) for spec in engine.kv_specs] == [((0, 1, 2), 24)]
