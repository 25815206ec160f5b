"""The engine with a cache of 8 or 4 bits: what happens to a block happens to its scales, and texts hardly change."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

from reference_impl.assembly.config import ConfigError, EngineConfig, course_model
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.kv_cache import kv_cache, widths
from reference_impl.assembly.model import load_model
from reference_impl.assembly.parts import Parts
from reference_impl.core.attention import TorchAttention
from reference_impl.interfaces import BlockPair, KVSpec, SamplingParams, Transfers
from tests.engine.conftest import before_writing, make_late

FP8, CPU = torch.float8_e4m3fn, torch.device("cpu")
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def cache(kv_dtype: str, num_blocks: int = 4, num_host_blocks: int = 2) -> Any:
    """Block b holds b everywhere, and scales of 10 b; host blocks 100 more, scales 1000 more."""
    spec = KVSpec(3, 2, 4, 5, **widths(kv_dtype, torch.float32))
    made: Any = kv_cache([spec], num_blocks, torch.float32, CPU, num_host_blocks, kv_dtype)
    numbers, host = torch.arange(num_blocks), 100 + torch.arange(num_host_blocks)
    for tensor, times in ((made.data, 1), (made.scale, 10)):
        by_block = tensor.movedim(2, -1)  # as its last dimension
        by_block.copy_((times * numbers).expand(by_block.shape))
    for tensor, times in zip(made.host.host, (1, 10), strict=True):
        by_block = tensor.movedim(0, -1)
        by_block.copy_((times * host).expand(by_block.shape))
    return made


def blocks(tensor: torch.Tensor, axis: int) -> list[int]:
    """What each block holds; it must be the same in all layers, keys and values, tokens and heads."""
    rows = tensor.movedim(axis, 0).flatten(1)
    assert (rows == rows[:, :1]).all()
    return rows[:, 0].int().tolist()


@pytest.mark.parametrize("kv_dtype", ["fp8", "int4"])
def test_scales_are_copied_and_swapped_with_their_blocks(kv_dtype) -> None:
    c = cache(kv_dtype)
    c.transfer(Transfers((BlockPair(2, 0),), (BlockPair(1, 2), BlockPair(0, 1)), (BlockPair(1, 3),)))
    assert blocks(c.data.float(), 2)[:3] == [0, 0, 1]
    assert blocks(c.data.view(torch.uint8), 2)[3] == 101, "as it lay in the host's memory, byte for byte"
    assert blocks(c.scale, 2) == [0, 0, 10, 1010]
    codes, scale = c.host.host
    assert codes[0].view(c.data.dtype).float().unique().tolist() == [2.0]
    assert blocks(scale, 0) == [20, 1010]


def test_the_price_of_a_block_counts_its_scales() -> None:
    config = EngineConfig(kv_dtype="fp8", kv_cache_bytes=1 << 20)
    spec = KVSpec(num_layers=3, num_kv_heads=2, head_dim=4, block_size=5, bits_per_value=8, bits_per_scale=32)
    assert spec.bytes_per_token == 2 * 3 * 2 * (4 + 4)
    c: Any = kv_cache([spec], 7, torch.float32, CPU, 2, "fp8")
    assert c.data.nbytes + c.scale.nbytes == 7 * spec.bytes_per_block
    assert sum(host.nbytes for host in c.host.host) == 2 * spec.bytes_per_block
    assert config.kv_dtype == "fp8"
    four = KVSpec(3, 2, 4, 5, bits_per_value=4, bits_per_scale=16, bits_per_zero_point=16)
    assert four.bytes_per_token == 2 * 3 * 2 * (2 + 4)
    c = kv_cache([four], 7, torch.float32, CPU, 2, "int4")
    assert c.data.nbytes + c.scale.nbytes == 7 * four.bytes_per_block
    assert sum(host.nbytes for host in c.host.host) == 2 * four.bytes_per_block


def test_a_cache_of_four_bits_says_what_it_cannot_be_of() -> None:
    four = {"bits_per_value": 4, "bits_per_scale": 16, "bits_per_zero_point": 16}
    with pytest.raises(ValueError, match="int4: expected an even head_dim, two numbers in a byte, got 7"):
        kv_cache([KVSpec(1, 2, 7, 4, **four)], 2, torch.float32, CPU, kv_dtype="int4")
    with pytest.raises(ValueError, match="KVSpec with bits_per_zero_point=16, got bits_per_zero_point=0"):
        kv_cache([KVSpec(1, 2, 8, 4, **(four | {"bits_per_zero_point": 0}))], 2, torch.float32, CPU, kv_dtype="int4")
    with pytest.raises(ValueError, match="group_size=None, got 4"):
        kv_cache([KVSpec(1, 2, 8, 4, group_size=4, **four)], 2, torch.float32, CPU, kv_dtype="int4")


def test_the_budget_pays_for_more_blocks(random_model) -> None:
    model, counts = random_model("float32"), {}
    for kv_dtype in ("auto", "fp8", "fp8_e5m2", "int8", "int4"):
        engine = Engine(model, EngineConfig(kv_dtype=kv_dtype, kv_cache_bytes=1 << 20))
        held = engine.kv_cache.data.nbytes + (0 if kv_dtype == "auto" else engine.kv_cache.scale.nbytes)
        assert engine.num_blocks * engine.kv_spec.bytes_per_block == held <= 1 << 20
        counts[kv_dtype] = engine.num_blocks
    # head_dim 8: 12 bytes a head instead of 32
    assert counts["int8"] == counts["fp8"] == counts["fp8_e5m2"] == int(counts["auto"] * 4 * 8 / (8 + 4))
    assert counts["int4"] == int(counts["auto"] * 4 * 8 / (4 + 4)), "4 bytes of codes, and a scale and a zero point"


KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"architecture": "MistralForCausalLM", "sliding_window": 6},
    "soft cap, two groups": {
        "architecture": "Gemma2ForCausalLM", "sliding_window": 6, "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "hidden_activation": "gelu_pytorch_tanh",
    },
}  # fmt: skip
PROMPTS = [[(7 * i + first) % 61 for i in range(n)] for first, n in ((1, 21), (1, 26), (2, 9), (3, 14), (4, 1))]


def served(engine: Engine, n: int = 1, **sampling: Any) -> list[list[int]]:
    """All prompts at once, poisoned: a block that nobody owns holds NaN, in its scales, too."""
    store = engine.kv_cache

    def poison() -> None:
        free = [b for b in range(engine.num_blocks) if engine.block_pool.ref_count(b) == 0]
        store.data.view(torch.uint8)[:, :, free] = 0x7F
        store.scale[:, :, free] = torch.nan
        if engine.num_host_blocks:
            free = [b for b in range(engine.num_host_blocks) if engine.kv.host.pool.ref_count(b) == 0]
            codes, scale = store.host.host
            codes[free] = 0x7F
            scale[free] = torch.nan

    before_writing(engine.kv_cache, engine.attention, poison)
    requests = [
        engine.add(p, SamplingParams(max_tokens=6, n=n, seed=5, **(GREEDY | sampling)), f"r{i}")
        for i, p in enumerate(PROMPTS)
    ]
    every = [member for r in requests for member in (r, *r.children)]
    while engine.has_work():
        engine.step()
    assert engine.kv.num_available == engine.num_blocks
    return [r.output_tokens for r in every]


@functools.cache
def alone(model: Any, kv_dtype: str, n: int = 1, **sampling: Any) -> list[list[int]]:
    """One prompt at a time, at once, nothing shared."""
    found = []
    for i, prompt in enumerate(PROMPTS):
        engine = Engine(model, EngineConfig(kv_dtype=kv_dtype, num_blocks=200, prefix_cache="off"))
        params = SamplingParams(max_tokens=6, n=n, seed=5, **(GREEDY | sampling))
        request = engine.add(prompt, params, f"r{i}")
        members = [request, *request.children]
        while engine.has_work():
            engine.step()
        found += [r.output_tokens for r in members]
    return found


@pytest.mark.parametrize(
    ("kind", "chunk", "kv_dtype"),
    [*((kind, chunk, "fp8") for kind in KINDS for chunk in (5, 64)), *((kind, 5, "int4") for kind in KINDS)],
)
def test_chunks_and_neighbours_do_not_change_a_text(kind, chunk, kv_dtype, random_model) -> None:
    """Keys are read from the cache even by the chunk that wrote them, so codes are the same however a prompt is cut."""
    model = random_model("float64", **KINDS[kind])
    config = EngineConfig(kv_dtype=kv_dtype, block_size=4, num_blocks=60, max_num_batched_tokens=chunk, max_num_seqs=5)
    assert served(Engine(model, config)) == alone(model, kv_dtype)


@pytest.mark.parametrize(
    ("preemption", "late", "kv_dtype"),
    [
        *((preemption, late, "fp8") for preemption in ("swap", "recompute") for late in (None, 3)),
        ("swap", None, "int4"),
        ("recompute", None, "int4"),
    ],
)
def test_too_few_blocks_do_not_change_a_text(preemption, late, kv_dtype, random_model) -> None:
    model = random_model("float64")
    config = EngineConfig(
        kv_dtype=kv_dtype, block_size=4, num_blocks=13, max_num_batched_tokens=9, max_num_seqs=4, preemption=preemption,
        prefix_cache="off", overlap="off" if late is None else "on", swap_bytes=40_000,
    )  # fmt: skip
    engine = Engine(model, config)
    if late is not None:
        make_late(engine, late)
    assert served(engine) == alone(model, kv_dtype)
    steps = engine.trace.steps()
    assert any(step.preempted for step in steps)
    assert (preemption == "swap") == any(step.transfers.swap_in for step in steps)


@pytest.mark.parametrize(("index", "kv_dtype"), [("hash", "fp8"), ("radix", "fp8"), ("hash", "int4")])
def test_a_cached_prefix_is_as_good_as_a_computed_one(index, kv_dtype, random_model) -> None:
    model = random_model("float64")
    engine = Engine(model, EngineConfig(kv_dtype=kv_dtype, block_size=4, num_blocks=60, prefix_cache=index))
    first, second = served(engine), served(engine)
    assert first == second == alone(model, kv_dtype)
    hits = [step.admitted for step in engine.trace.steps() if any(cached for _, cached in step.admitted)]
    assert sum(cached for step in hits for _, cached in step) >= 16


def test_evicted_blocks_take_no_scales_along(random_model) -> None:
    """A crowd that throws each other's prefixes out."""
    model = random_model("float64")
    engine = Engine(model, EngineConfig(kv_dtype="fp8", block_size=2, num_blocks=24, prefix_cache="hash"))
    assert served(engine) == alone(model, "fp8")
    assert served(engine) == alone(model, "fp8")
    assert any(step.transfers.evicted for step in engine.trace.steps())


@pytest.mark.parametrize("kv_dtype", ["fp8", "int4"])
def test_samples_that_write_to_a_shared_block_get_a_copy_with_its_scales(kv_dtype, random_model) -> None:
    model, sampling = random_model("float64"), {"temperature": 0.9}
    engine = Engine(model, EngineConfig(kv_dtype=kv_dtype, block_size=4, num_blocks=120, prefix_cache="off"))
    found = served(engine, n=3, **sampling)
    assert found == alone(model, kv_dtype, n=3, **sampling)
    assert len({tuple(tokens) for tokens in found}) > len(PROMPTS), "samples differ"
    assert any(step.transfers.copies for step in engine.trace.steps())


def test_kivi_is_refused_with_what_to_use_in_its_place(random_model) -> None:
    with pytest.raises(ValueError, match=r"kv_dtype: expected 'int4', got 'kivi'.*inferlab eval-kv --fake kivi"):
        Engine(random_model("float32"), EngineConfig(kv_dtype="kivi", num_blocks=4, block_size=4))


@pytest.mark.parametrize("kv_dtype", ["int2", "float8_e4m3fn", ""])
def test_a_format_that_is_not_in_the_table_is_refused_by_name(kv_dtype, random_model) -> None:
    with pytest.raises(
        ValueError, match=f"kv_dtype: expected one of auto, fp8, fp8_e5m2, int8, int4, got {kv_dtype!r}"
    ):
        Engine(random_model("float32"), EngineConfig(kv_dtype=kv_dtype))
    with pytest.raises(ValueError, match="kv_dtype: expected a name, got 8"):
        EngineConfig(kv_dtype=8)  # type: ignore[arg-type]


class OwnCache:
    """A learner's, from before there were scales."""

    def __init__(self, engine: Engine):
        self.inner = engine.kv_cache

    def layer(self, layer: int) -> Any:
        return self.inner.layer(layer)

    def write(self, *arguments: Any) -> None:
        self.inner.write(*arguments)

    def transfer(self, transfers: Transfers) -> None:
        self.inner.transfer(transfers)


class OwnAttention(TorchAttention):
    reads_scales = False


def test_a_cache_of_ones_own_needs_no_scales_unless_it_shall_have_eight_bits(random_model) -> None:
    model, texts = random_model("float32"), []
    options: dict[str, Any] = {"block_size": 4, "num_blocks": 60}
    for own in (False, True):
        parts = Parts(kv_cache=OwnCache(Engine(model, EngineConfig(**options)))) if own else None
        engine = Engine(model, EngineConfig(**options), parts)
        request = engine.add(PROMPTS[0], SamplingParams(max_tokens=5, **GREEDY))
        while engine.has_work():
            engine.step()
        texts.append(request.output_tokens)
    assert texts[0] == texts[1]
    fp8 = EngineConfig(kv_dtype="fp8", **options)
    with pytest.raises(ConfigError, match=r"needs a cache with scales\(layer\).*OwnCache, has none.*kv_dtype='auto'"):
        Engine(model, fp8, Parts(kv_cache=OwnCache(Engine(model, EngineConfig(**options)))))
    with pytest.raises(ConfigError, match=r"needs an attention backend .*OwnAttention, does not.*kv_dtype='auto'"):
        Engine(model, fp8, Parts(attention=OwnAttention(1.0, torch.float32)))
    int4, eight_only = EngineConfig(kv_dtype="int4", **options), OwnAttention(1.0, torch.float32)
    eight_only.reads_scales = True
    with pytest.raises(ConfigError, match=r"'int4' needs .*two codes out of a byte.*OwnAttention, does not.*'int8'"):
        Engine(model, int4, Parts(attention=eight_only))


@functools.cache
def course_cache(kv_dtype: str) -> Any:
    """Of the course's model, in 16 bits, behind a text that makes sense."""
    from reference_impl.assembly.llm import LLM

    llm = LLM(course_model("draft"), device="cpu", dtype="bfloat16", num_blocks=16, kv_dtype=kv_dtype)
    [found] = llm.generate("def add(a, b):\n", SamplingParams(max_tokens=8, **GREEDY))
    assert len(found.token_ids) == 8
    assert found.text.strip()
    return llm.engine.kv_cache


@pytest.mark.parametrize("kv_dtype", ["fp8", "fp8_e5m2", "int8", "int4"])
def test_a_text_comes_out_of_half_the_memory(kv_dtype) -> None:
    """Of keys and values in 16 bits, the course model's, or of a quarter; scales, 4 bytes for each head of 64 values,
    come to it."""
    held = {name: course_cache(name) for name in ("auto", kv_dtype)}
    share = 4 if kv_dtype == "int4" else 2
    assert held[kv_dtype].data.nbytes * share == held["auto"].data.nbytes
    head_dim = held["auto"].layer(0)[0].shape[-1]
    assert held[kv_dtype].scale.nbytes * head_dim * 2 == held["auto"].data.nbytes * 4


def log_likelihoods(model: Any, text: list[int], kv_dtype: str) -> torch.Tensor:
    """Natural log-probability of each token after those before it, read from the cache."""
    engine = Engine(model, EngineConfig(kv_dtype=kv_dtype, kv_cache_bytes=16 << 20, max_num_batched_tokens=len(text)))
    logits: list[torch.Tensor] = []
    forward = model.forward

    def tapped(batch: Any, *rest: Any) -> torch.Tensor:
        batch.logits_indices = torch.arange(batch.num_tokens)
        logits.append(forward(batch, *rest))
        return logits[-1][-1:]

    model.forward = tapped  # the instance's, in front of the class's; a model that tests share must lose it again
    try:
        engine.add(text, SamplingParams(max_tokens=1, **GREEDY))
        engine.step()
    finally:
        del model.forward
    return logits[0].float().log_softmax(-1)[:-1].gather(1, torch.tensor(text[1:])[:, None])[:, 0]


@pytest.fixture(scope="module")
def course_text() -> tuple[Any, list[int], torch.Tensor]:
    """The course's model, a text of its own kind, and what `log_likelihoods` are with a cache in 32 bits."""
    from reference_impl.assembly.llm import LLM

    folder = course_model("target")
    text = LLM(folder, dtype="float32", kv_cache_bytes=8 << 20).encode(
        "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n\n\n"
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
        "        self.items.append(item)\n\n    def pop(self):\n        return self.items.pop()\n\n"
        "    def __len__(self):\n        return len(self.items)\n"
    )
    model = load_model(folder, torch.float32)
    return model, text, log_likelihoods(model, text, "auto")


@pytest.mark.parametrize("kv_dtype", ["fp8", "fp8_e5m2", "int8", "int4"])
def test_the_perplexity_of_the_course_model_hardly_changes(kv_dtype, course_text) -> None:
    """At most 2 % from the perplexity with a cache in 32 bits."""
    model, text, exact = course_text
    eight = log_likelihoods(model, text, kv_dtype)
    assert len(exact) > 80
    assert not torch.equal(exact, eight), "there was no cache of 8 bits"
    ratio = math.exp(float(exact.mean() - eight.mean()))
    assert 0.98 < ratio < 1.02, f"perplexity {ratio:.4f} times that of the cache in 32 bits"
