"""The sampler with the kernel, in the interpreter or on a GPU: the tokens of the sampler in torch."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is defined

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.sampler import CalledSampler, sample
from reference_impl.core.sampler import SETTINGS, settings_of
from reference_impl.core.staging import to_device
from reference_impl.features.gumbel.sampler import GumbelSampler
from reference_impl.features.gumbel.triton import TritonGumbelSampler
from reference_impl.features.penalties.sampler import sampled
from reference_impl.features.triton_sampler.sampler import TritonSampler
from reference_impl.interfaces import Request, SamplingParams
from tests.executor.dense import dense_engine, dense_model
from tests.executor.tape import recorder

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PARAMS = [
    {"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 5}, {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1}, {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.0, "repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 0.8, "logprobs": 3},
]  # fmt: skip


PAIRS = [(sample, TritonSampler()), (GumbelSampler(), TritonGumbelSampler())]


@pytest.mark.parametrize(("in_torch", "with_kernel"), PAIRS, ids=["one number", "noise"])
def test_tokens_and_logprobs_are_those_of_torch(in_torch: Any, with_kernel: Any) -> None:
    """Also with seeds of 64 bits and several samples; every row has its own parameters."""
    chance, requests = random.Random(0), []
    for number in range(3 * len(PARAMS)):
        prompt = chance.choices(range(90), k=chance.randint(1, 30))
        seed = (0, 2**64 - 1, 2**63, chance.getrandbits(64))[number % 4]
        params = SamplingParams(**PARAMS[number % len(PARAMS)])  # type: ignore[arg-type]
        requests.append(Request(str(number), prompt, 1, params, seed, 0.0, sample_index=number % 3))
    logits = 4 * torch.randn(len(requests), 90, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expected, found = sampled(in_torch, logits, requests), sampled(with_kernel, logits, requests)
    assert found.tokens == expected.tokens
    assert found.logprobs == expected.logprobs
    assert len(set(found.tokens)) > 5


def test_the_engine_samples_with_the_kernel_if_it_computes_with_triton(random_model) -> None:
    model = random_model("float32", device=DEVICE)
    for (in_torch, with_kernel), noise in zip(PAIRS, ("one-number", "gumbel"), strict=True):
        for name, expected in (("triton", with_kernel), ("torch", in_torch)):
            config = EngineConfig(attention=name, sampling_noise=noise)  # type: ignore[arg-type]
            assert type(Engine(model, config).executor.sampler) is type(expected)


def test_with_noise_the_kernel_stands_in_a_replay_and_trees_ask_it_for_ranks(random_model) -> None:
    """What it chooses is the first of the ranks."""

    class OfFloat32(CalledSampler, TritonGumbelSampler):  # the kernel takes no float64
        def choose(self, scores: torch.Tensor, t: Any) -> torch.Tensor:
            return super().choose(scores.float(), t)

    sampler = TritonGumbelSampler()
    assert sampler.captures
    model = dense_model(random_model("float64", device=DEVICE, num_hidden_layers=1))
    texts = []
    for graphs in (False, True):
        engine = dense_engine(model, OfFloat32(), block_size=4, num_blocks=40, max_num_seqs=4)
        if graphs:
            engine.executor.use_graphs(recorder(), 4, engine.max_model_len)
        requests = [engine.add([3] * n, SamplingParams(max_tokens=4, seed=n, top_k=20), f"r{n}") for n in (3, 5, 9)]
        while engine.has_work():
            engine.step()
        texts.append([request.output_tokens for request in requests])
        if graphs:
            assert {key.samples for key in engine.executor.graphs._graphs} == {True}
    assert texts[0] == texts[1]
    logits = 3 * torch.randn(6, 40, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    settings = np.array([settings_of(SamplingParams(top_k=9), seed, 0) for seed in range(6)], SETTINGS)
    columns = sampler.columns(settings, np.arange(6))
    t = to_device({**columns, "sample_positions": np.arange(6)}, torch.device(DEVICE))
    ranks = sampler.ranked(logits, t, 3)
    assert ranks[:, 0].tolist() == sampler.choose(logits, t).tolist()
