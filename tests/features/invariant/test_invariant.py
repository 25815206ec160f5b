"""batch_invariant=True: the same bits, whatever else is in the batch, for every way that weights are stored."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from reference_impl.assembly.config import EngineConfig, course_model
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.llm import LLM
from reference_impl.assembly.model import load_model
from reference_impl.interfaces import SamplingParams

VOCAB = 61
QUIET: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "batch_invariant": True}


def one_by_one(model: Any, prompts: list[list[int]], sampling: list[SamplingParams], **options: Any) -> list[Any]:
    found = []
    for prompt, params in zip(prompts, sampling, strict=True):
        engine = Engine(model, EngineConfig(**QUIET | options))
        found.append(written(engine, [engine.add(prompt, params)])[0])
    return found


def written(engine: Engine, requests: list[Any]) -> list[Any]:
    """Tokens, and the log-probabilities with all their bits."""
    while engine.has_work():
        engine.step()
    assert engine.kv.num_available == engine.num_blocks
    return [(r.output_tokens, [report.logprob for report in r.logprobs]) for r in requests]


def drawn(rng: random.Random, n: int) -> tuple[list[list[int]], list[SamplingParams]]:
    shared = [rng.randrange(VOCAB) for _ in range(9)]
    prompts = [
        shared[: rng.randrange(9)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 14))] for _ in range(n)
    ]
    params = [
        SamplingParams(
            max_tokens=rng.randrange(1, 9), temperature=rng.choice([0.0, 0.8]), seed=i, logprobs=1, ignore_eos=True,
            repetition_penalty=rng.choice([1.0, 1.2]),
        )
        for i in range(n)
    ]  # fmt: skip
    return prompts, params


@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "fp8"])
@settings(max_examples=4, deadline=None, phases=[Phase.generate])
@given(seed=st.integers(0, 2**32))
def test_a_random_schedule_gives_the_bits_of_serial_runs(quantization: str, seed: int, models) -> None:
    rng = random.Random(seed)
    model = models(quantization)
    prompts, params = drawn(rng, 6)
    engine = Engine(
        model,
        EngineConfig(
            **QUIET | {"num_blocks": rng.choice([12, 24, 64])}, max_num_batched_tokens=rng.choice([6, 9, 64]),
            max_num_seqs=rng.choice([2, 6]), overlap=rng.choice(["on", "off"]),
            prefix_cache=rng.choice(["hash", "radix", "off"]), preemption=rng.choice(["recompute", "swap"]),
        ),
    )  # fmt: skip
    requests = []
    for prompt, one in zip(prompts, params, strict=True):
        requests.append(engine.add(prompt, one))
        for _ in range(rng.randrange(3)):
            engine.step()
    assert written(engine, requests) == one_by_one(model, prompts, params)


@pytest.fixture(scope="module")
def models(random_model, tmp_path_factory) -> Any:
    """models(quantization): a small Qwen3; quantized, the weights are wide enough for what CPUs have."""
    from reference_impl.assembly.model import build_model
    from reference_impl.models.config_json import parse_model_config
    from reference_impl.models.loader import destinations, finish

    made: dict[str, Any] = {}

    def make(quantization: str) -> Any:
        if quantization not in made:
            raw = {
                "architectures": ["Qwen3ForCausalLM"], "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96,
                "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
                "max_position_embeddings": 128, "dtype": "float32",
            }  # fmt: skip
            model = build_model(parse_model_config(raw), torch.float32, quantization=quantization)
            numbers = torch.Generator().manual_seed(0)
            for (shape, _), store in destinations(model).values():
                norm = len(shape) == 1
                store(torch.randn(shape, generator=numbers) * (0.3 if norm else 0.15) + norm)
            finish(model)
            made[quantization] = model
        return made[quantization]

    return make


@pytest.mark.parametrize(
    "changes",
    [
        {
            "architecture": "Qwen3MoeForCausalLM",
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
        {"architecture": "Gemma2ForCausalLM", "sliding_window": 5},
    ],
    ids=["experts", "windows"],
)
def test_experts_and_windows(changes, random_model) -> None:
    model = random_model("float32", **changes)
    prompts, params = drawn(random.Random(1), 4)
    engine = Engine(model, EngineConfig(**QUIET, max_num_batched_tokens=7))
    assert written(engine, [engine.add(*each) for each in zip(prompts, params, strict=True)]) == one_by_one(
        model, prompts, params
    )


def test_the_triton_kernels(random_model) -> None:
    model = random_model("float32", kernels="triton", num_hidden_layers=1)
    prompts, params = drawn(random.Random(2), 3)
    prompts = [prompt[:5] for prompt in prompts]
    params = [replace(one, max_tokens=min(one.max_tokens, 2)) for one in params]
    options = {"attention": "triton", "overlap": "off"}
    engine = Engine(model, EngineConfig(**QUIET, **options, max_num_batched_tokens=4))
    assert written(engine, [engine.add(*each) for each in zip(prompts, params, strict=True)]) == one_by_one(
        model, prompts, params, **options
    )


def test_the_front_door_a_process_embeddings_and_scored_prompts() -> None:
    texts = ["def fibonacci(n):", "import os", "class A:\n    def __init__(self"]
    options: dict[str, Any] = {"dtype": "bfloat16", "device": "cpu", "num_blocks": 64, "batch_invariant": True}
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=0, prompt_logprobs=0)
    llm = LLM(course_model("draft"), **options)
    alone = [llm.generate(text, params)[0] for text in texts]
    apart = LLM(course_model("draft"), worker="process", **options)
    try:
        for found in (llm.generate(texts, params), apart.generate(texts, params)):
            for one, other in zip(alone, found, strict=True):
                assert (one.token_ids, one.logprobs, one.prompt_logprobs) == (
                    other.token_ids, other.logprobs, other.prompt_logprobs,
                )  # fmt: skip
    finally:
        apart.engine.close()
    alone = [llm.embed(text)[0].outputs for text in texts]
    assert [found.outputs for found in llm.embed(texts)] == alone


def test_without_it_rounding_depends_on_the_batch() -> None:
    """What it is for: the same model gives other bits in a batch, or the test above would prove nothing."""
    model = load_model(course_model("draft"), torch.float32)
    prompts = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]
    params = [SamplingParams(max_tokens=12, temperature=0, logprobs=0, ignore_eos=True)] * 3
    engine = Engine(model, EngineConfig(**QUIET | {"batch_invariant": False}))
    together = written(engine, [engine.add(*each) for each in zip(prompts, params, strict=True)])
    assert together != one_by_one(model, prompts, params, batch_invariant=False)


def test_what_it_cannot_be_with_is_refused(random_model) -> None:
    with pytest.raises(ValueError, match="batch_invariant computes each token by itself"):
        Engine(random_model("float32"), EngineConfig(**QUIET, graphs="on"))
    with pytest.raises(ValueError, match="batch_invariant: expected True or False, got 1"):
        EngineConfig(batch_invariant=1)  # type: ignore[arg-type]
