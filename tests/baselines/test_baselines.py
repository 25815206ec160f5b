"""The slow ways give the engine's tokens, at the cost that their formulas say."""

from __future__ import annotations

import random

import pytest
import torch

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.features.baselines.contiguous_cache import generate_contiguous_cache
from reference_impl.features.baselines.no_cache import generate_no_cache
from reference_impl.interfaces import SamplingParams
from reference_impl.kernels import reference

PROMPTS = [random.Random(i).choices(range(61), k=k) for i, k in enumerate((1, 17, 5, 30))]


def engine_tokens(model, prompts: list[list[int]], max_tokens: int, **options: int) -> list[list[int]]:
    engine = Engine(model, EngineConfig(**options))
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    requests = [engine.add(p, sampling) for p in prompts]
    while engine.has_work():
        engine.step()
    return [r.output_tokens for r in requests]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_no_cache_a_contiguous_cache_and_the_engine_generate_the_same_tokens(dtype, architecture, random_model) -> None:
    model = random_model(dtype, architecture=architecture)
    expected = [generate_no_cache(model, prompt, 16) for prompt in PROMPTS]
    assert len({tuple(e) for e in expected}) == 4
    assert generate_contiguous_cache(model, PROMPTS, 16) == expected
    assert engine_tokens(model, PROMPTS, 16) == expected
    assert engine_tokens(model, PROMPTS, 16, block_size=3, num_blocks=16, max_num_batched_tokens=11) == expected


@pytest.mark.parametrize("n", [0, 1])
def test_no_token_and_one_token(n: int, random_model) -> None:
    model = random_model("float64")
    assert [len(t) for t in generate_contiguous_cache(model, PROMPTS, n)] == [n] * 4
    assert len(generate_no_cache(model, PROMPTS[1], n)) == n


def test_the_prompts_are_left_as_they_were(random_model) -> None:
    prompts = [list(p) for p in PROMPTS]
    generate_contiguous_cache(random_model("float64"), prompts, 3)
    generate_no_cache(random_model("float64"), prompts[1], 3)
    assert prompts == PROMPTS


class Counter:
    """Counts what one layer of a model is asked: tokens through its linear layers, (query, key) pairs in attention."""

    def __init__(self, model, monkeypatch: pytest.MonkeyPatch):
        self.tokens = self.pairs = 0
        layer, attend = model.layers[0], reference.attention_one_row
        model.layers[0].qkv.register_forward_hook(lambda _, args, __: self.count_tokens(args[0]))
        self.layer = layer

        def counted(q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *options: float | None) -> torch.Tensor:
            num_q, seq_len = q.shape[0], key.shape[0]
            self.pairs += sum(seq_len - num_q + i + 1 for i in range(num_q))
            return attend(q, key, value, *options)

        monkeypatch.setattr(reference, "attention_one_row", counted)

    def count_tokens(self, x: torch.Tensor) -> None:
        self.tokens += x.shape[0]


@pytest.mark.parametrize(("prompt_len", "n"), [(1, 1), (1, 9), (12, 7), (30, 20)])
def test_tokens_and_pairs_are_those_of_the_closed_forms(prompt_len, n, random_model, monkeypatch) -> None:
    """Without a cache step t runs all S + t tokens; with one, each of the S + N - 1 tokens runs once."""
    model, s = random_model("float32", num_hidden_layers=1, intermediate_size=40 + prompt_len + n), prompt_len
    counter = Counter(model, monkeypatch)
    without = generate_no_cache(model, PROMPTS[3][:s], n)
    assert counter.tokens == n * s + n * (n - 1) // 2
    assert counter.pairs == sum((s + t) * (s + t + 1) // 2 for t in range(n))

    counter.tokens = counter.pairs = 0
    (with_cache,) = generate_contiguous_cache(model, [PROMPTS[3][:s]], n)
    assert counter.tokens == s + n - 1
    assert counter.pairs == (s + n - 1) * (s + n) // 2
    assert with_cache == without

    counter.tokens = counter.pairs = 0
    assert engine_tokens(model, [PROMPTS[3][:s]], n) == [without]
    assert counter.tokens == s + n - 1
    assert counter.pairs == (s + n - 1) * (s + n) // 2
