"""The sampler with the kernel, in the interpreter or on a GPU: the tokens of the sampler in torch."""

from __future__ import annotations

import os
import random

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is defined

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.sampler import sample
from reference_impl.assembly.triton_sampler import sample_with_triton
from reference_impl.interfaces import Request, SamplingParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PARAMS = [
    {"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 5}, {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1}, {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.0, "repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 0.8, "logprobs": 3},
]  # fmt: skip


def test_tokens_and_logprobs_are_those_of_torch() -> None:
    """Also with seeds of 64 bits and several samples; every row has its own parameters."""
    chance, requests = random.Random(0), []
    for number in range(3 * len(PARAMS)):
        prompt = chance.choices(range(90), k=chance.randint(1, 30))
        seed = (0, 2**64 - 1, 2**63, chance.getrandbits(64))[number % 4]
        params = SamplingParams(**PARAMS[number % len(PARAMS)])  # type: ignore[arg-type]
        requests.append(Request(str(number), prompt, 1, params, seed, 0.0, sample_index=number % 3))
    logits = 4 * torch.randn(len(requests), 90, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expected, found = sample(logits, requests), sample_with_triton(logits, requests)
    assert found.tokens == expected.tokens
    assert found.logprobs == expected.logprobs
    assert len(set(found.tokens)) > 5


def test_the_engine_samples_with_the_kernel_if_it_computes_with_triton(random_model) -> None:
    model = random_model("float32", device=DEVICE)
    for name, expected in (("triton", sample_with_triton), ("torch", sample)):
        assert Engine(model, EngineConfig(attention=name)).executor.sampler is expected  # type: ignore[arg-type]
