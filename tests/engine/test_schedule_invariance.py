"""A request's logits and tokens do not depend on how the engine cuts, places, interrupts or groups its work.

One differential property drives all of it. What is compared: the logits of every token of every pass, prompt and
output, first time and again after a preemption, against one pass over the whole sequence alone without a cache.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, example, given, settings
from hypothesis import strategies as st

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.core.decoder import Decoder
from reference_impl.core.ranking import FirstCome
from reference_impl.features.policies import ByPriority, ShortestFirst
from reference_impl.features.windows.groups import kv_specs
from reference_impl.interfaces import Grammar, Pooling, Request, SamplingParams
from tests.engine.conftest import CountingClock, FakeLayeredStore, FakeStore, HostOracle, check_references, draft_of

BOUND = {"float32": 3e-5, "float64": 1e-12}  # of the largest logit
VOCAB = 61


_WRONG = ("short", "flipped", "fewer", "swapped", "empty")
STORES = (("now",), ("now", "late"), ("late", "never"), ("now", "late", "never", "fails", "refuses", "lies", *_WRONG))


@dataclass(frozen=True)
class Some:
    """Rules out a part of the vocabulary that depends on all that was written."""

    def allowed(self, output: Sequence[int]) -> bytes:
        drawn = random.Random(f"{list(output)}")
        return sum(1 << t for t in [*drawn.sample(range(VOCAB), drawn.randint(1, 20))]).to_bytes(8, "little")


@dataclass(frozen=True)
class Asked:
    prompt: tuple[int, ...]
    sampling: SamplingParams
    salt: str | None
    arrival: int  # step
    abort: int | None  # step
    grammar: Grammar | None = None
    pooling: Pooling | None = None


@st.composite
def asked(draw: st.DrawFn) -> Asked:
    seed = draw(st.integers(0, 2**32))
    shared = draw(st.one_of(st.just(0), st.integers(0, 30)))
    length = draw(st.one_of(st.integers(1, 5), st.integers(1, 20)))
    sampling = draw(
        st.sampled_from(
            [
                {"temperature": 0},
                {"temperature": 1.0},
                {"temperature": 1.0, "n": 3},
                {"temperature": 1.0, "prompt_logprobs": 2},
                {"temperature": 1.5, "top_k": 7, "top_p": 0.9},
                {"temperature": 0.8, "min_p": 0.05, "repetition_penalty": 1.3, "n": 2},
                {"temperature": 0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
                {"temperature": 1.0, "logit_bias": {5: 2.5, 6: -100}, "min_tokens": 1, "stop_token_ids": (1, 2, 3, 4)},
            ]
        )
    )
    family = draw(st.sampled_from([1, 1, 1, 2]))
    pooling = draw(st.sampled_from([*[None] * 8, "last", "mean"])) if sampling.get("n", 1) == 1 else None
    return Asked(
        (
            *random.Random(family).choices(range(VOCAB), k=shared),
            *random.Random(seed % 4).choices(range(VOCAB), k=length),
        ),
        SamplingParams(max_tokens=draw(st.integers(1, 9)), seed=seed, **sampling),
        salt=draw(st.sampled_from([None, None, None, "other"])),
        arrival=draw(st.one_of(st.just(0), st.integers(0, 8))),
        abort=draw(st.one_of(st.none(), st.none(), st.integers(0, 14))),
        grammar=None if pooling else draw(st.sampled_from([None, None, None, Some()])),
        pooling=pooling,
    )


@st.composite
def workload(draw: st.DrawFn) -> tuple[list[Asked], dict[str, Any]]:
    requests = draw(st.lists(asked(), min_size=2, max_size=5))
    block_size = draw(st.sampled_from([1, 2, 3, 4, 7, 16, 32]))  # 32: two pages of a store
    longest = max(len(r.prompt) + r.sampling.max_tokens - 1 for r in requests)
    needed = -(-longest // block_size)
    return requests, {
        "block_size": block_size,
        "num_blocks": needed + draw(st.one_of(st.just(0), st.just(1), st.integers(0, 2 * needed))),
        "max_num_seqs": draw(st.one_of(st.just(5), st.integers(1, 4))),
        "max_num_batched_tokens": draw(st.one_of(st.just(100), st.integers(1, 12))),
        "prefix_cache": draw(st.sampled_from(["off", "hash", "radix"])),
        "admission": draw(st.sampled_from(["fill", "fill", "worst_case"])),
        "num_host_blocks": draw(st.sampled_from([0, 0, 1, 30])),
        "policy": draw(st.sampled_from([FirstCome, ShortestFirst, ByPriority])),
        "seed": draw(st.integers(0, 1000)),
        "late": draw(st.one_of(st.none(), st.integers(0, 1000))),  # overlapped steps, delayed by this seed
        "stages": draw(st.sampled_from([None, None, 2, 3, 4])),  # of the executor's; if any, `late` is of no use
        "num_drafts": draw(st.sampled_from([0, 0, 1, 2, 5])),
        "drafts": draw(st.sampled_from(["host", "model", "worker"])),  # where they are made, if that can be
        "store": draw(st.sampled_from([None, None, None, *STORES])),
        "right": draw(st.sampled_from([0.0, 0.5, 1.0])),  # each draft token, with this probability
        "sampling_noise": draw(st.sampled_from(["one-number", "one-number", "gumbel"])),
    }


def engine_options(
    model: Decoder, options: dict[str, Any], texts: dict[str, list[int]], oracle: Any, store: FakeStore | None = None
) -> dict[str, Any]:
    """As many groups of blocks as the model has KV groups; host memory in bytes. texts: what an oracle reads."""
    options = dict(options)
    if options.get("stages") is not None:
        options["late"] = None
    right = options.pop("right", 0.0)
    specs = kv_specs(
        model.config.layer_windows, model.config.num_kv_heads, model.config.head_dim,
        options["block_size"], bits_per_value=8 * model.dtype.itemsize,
    )  # fmt: skip
    options["num_blocks"] *= len(specs)
    if len(specs) > 1 or specs[0].window is not None:
        options["num_blocks"] += len(specs) * (2 + options["max_num_batched_tokens"])
        options["prefix_cache"] = "auto"
    drafts = makes_drafts(model, options, options.pop("drafts", "worker"), texts, right, oracle, store)
    if blocks := options.pop("num_host_blocks"):
        num_caches = 2 if "draft_model" in drafts else 1
        options.update(preemption="swap", swap_bytes=blocks * specs[0].bytes_per_block * num_caches)
    clock = None if store is None else CountingClock()
    options["parts"] = Parts(policy=options.pop("policy")(), page_store=store, clock=clock, **drafts)
    return options | {"texts": texts}


def makes_drafts(
    model: Decoder, options: dict[str, Any], where: str, texts: dict[str, list[int]], right: float, oracle: Any,
    store: FakeStore | None,
) -> dict[str, Any]:  # fmt: skip
    """The part that does: an oracle in the worker or on the host, or the model itself."""
    num_drafts, seed = options.get("num_drafts", 0), options.get("seed", 0)
    if not num_drafts:
        return {}
    if where == "model" and store is None and set(model.config.layer_windows) == {None}:
        return {"draft_model": model}
    if where == "host" and options.get("late") is None:
        return {"host_proposer": HostOracle(texts, right, VOCAB, seed)}
    return {"proposer": oracle(texts, right, VOCAB, seed)}


def serve(engine: Engine, asked: list[Asked], store: Any = None) -> dict[int, list[Request]]:
    """All samples of each request, by its number. store: time passes for it, too."""
    samples: dict[int, list[Request]] = {}
    for step in itertools.count():
        for number, a in enumerate(asked):
            if a.arrival == step:
                first = engine.add(
                    list(a.prompt), a.sampling, f"r{number}", cache_salt=a.salt, priority=number % 2, grammar=a.grammar,
                    pooling=a.pooling,
                )  # fmt: skip
                samples[number] = [first, *first.children]
            if a.abort == step and f"r{number}" in engine.requests:
                engine.abort(f"r{number}")
        engine.step()
        check_references(engine)
        if store is not None:
            store.turn()
        under_way = store is not None and engine.kv.num_transfers
        if len(samples) == len(asked) and not engine.has_work() and not under_way:
            return samples
    raise AssertionError


def check_logits(
    model: Decoder, request: Request, text: list[int], seen: Any, one_shot: Any, all_of_them: bool
) -> None:
    expected = one_shot(model, text)
    scale = expected.abs().max()
    for position, found in seen.items():
        for values in found:
            error = (values - expected[position]).abs().max()
            assert error <= BOUND[str(model.dtype).removeprefix("torch.")] * scale, (request.id, position)
    if request.finish_reason != "abort" and request.pooling is None:
        sampled_from = set(range(request.num_prompt_tokens - 1, request.num_tokens - 1))
        assert sampled_from <= set(seen)
        # Where a text was stopped, its last token may have been a draft token, which was computed before it was kept.
        last = {request.num_tokens - 1} if request.finish_reason == "stop" else set()
        assert not all_of_them or set(seen) - last == set(range(request.num_tokens - 1))


def check_prompt(model: Decoder, request: Request, one_shot: Any) -> None:
    """Its log-probabilities, where they are asked for: each token's once, all of them unless it was aborted."""
    if request.sampling.prompt_logprobs is None:
        return
    expected = one_shot(model, request.tokens[: request.num_prompt_tokens]).log_softmax(dim=-1)
    assert request.finish_reason == "abort" or len(request.prompt_logprobs) == request.num_prompt_tokens - 1
    for position, report in enumerate(request.prompt_logprobs):
        assert report.token == request.tokens[position + 1]
        assert abs(report.logprob - float(expected[position, report.token])) < 1e-4


def check_embedding(model: Decoder, request: Request, one_shot: Any) -> None:
    """The head is linear, so what it makes of the mean is the mean of what it makes of each."""
    expected = one_shot(model, request.tokens)
    expected = expected[-1] if request.pooling == "last" else expected.mean(0)
    found = model.logits(torch.tensor([request.embedding], dtype=model.dtype))[0]
    error = (found - expected).abs().max() / expected.abs().max()
    assert error <= BOUND[str(model.dtype).removeprefix("torch.")], (request.id, request.pooling)


def texts_alone(model: Decoder, asked: list[Asked], noise: Any = "one-number") -> dict[str, list[int]]:
    """By request, samples too: prompt and output, where it is alone."""
    return {
        f"r{number}" if i == 0 else f"r{number}/{i}": [*a.prompt, *output]
        for number, a in enumerate(asked)
        for i, output in enumerate(alone(model, a, noise))
    }


def alone(model: Decoder, asked: Asked, noise: Any = "one-number") -> list[list[int]]:
    """The samples of a request that has an engine to itself, block by block, without a prefix cache."""
    blocks = 2 * asked.sampling.n * max(1, len(set(model.config.layer_windows)) * 2)
    options: dict[str, Any] = {"prefix_cache": "off", "sampling_noise": noise}
    engine = Engine(model, EngineConfig(block_size=128, num_blocks=blocks, **options))
    if asked.pooling is not None:
        return [[]]
    first = engine.add(list(asked.prompt), asked.sampling, grammar=asked.grammar)
    samples = [first, *first.children]
    while engine.has_work():
        engine.step()
    return [sample.output_tokens for sample in samples]


MODELS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"architecture": "MistralForCausalLM", "sliding_window": 6},
    "full and windows": {
        "architecture": "Gemma3ForCausalLM", "sliding_window": 5, "num_hidden_layers": 3, "query_pre_attn_scalar": 8,
        "sliding_window_pattern": 2, "hidden_activation": "gelu_pytorch_tanh",
    },
    "experts": {"architecture": "MixtralForCausalLM", "num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "dtype", "examples"),
    [
        ("full", "float64", 14), ("full", "float32", 6), ("window", "float64", 6),
        ("full and windows", "float64", 9), ("experts", "float64", 4),
        pytest.param("full", "float64", 80, marks=pytest.mark.slow),
        pytest.param("full", "float32", 40, marks=pytest.mark.slow),
        pytest.param("window", "float64", 40, marks=pytest.mark.slow),
        pytest.param("full and windows", "float64", 60, marks=pytest.mark.slow),
        pytest.param("experts", "float64", 20, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_logits_and_tokens_do_not_depend_on_the_schedule(
    kind: str, dtype: str, examples: int, random_model, tapped_engine, one_shot, oracle
) -> None:
    model = random_model(dtype, **MODELS[kind])
    calm = settings(
        max_examples=examples, deadline=None, derandomize=True, database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip

    @calm
    @given(work=workload())
    def schedule_does_not_matter(work: tuple[list[Asked], dict[str, Any]]) -> None:
        check_workload(model, work, tapped_engine, one_shot, oracle)

    schedule_does_not_matter()


def check_workload(
    model: Decoder, work: tuple[list[Asked], dict[str, Any]], tapped_engine, one_shot, oracle=None
) -> None:
    asked, options = work
    dtype = str(model.dtype).removeprefix("torch.")
    # In float32 a near-tie may fall either way, so nobody knows what will be written.
    recorded = texts_alone(model, asked, options.get("sampling_noise", "one-number")) if dtype == "float64" else {}
    options = options if recorded else options | {"num_drafts": 0}
    kinds, options = options.get("store"), {name: value for name, value in options.items() if name != "store"}
    store = None
    if kinds and options["prefix_cache"] != "off" and set(model.config.layer_windows) == {None}:
        # The engine that is looked at finds what another one has saved.
        store = (FakeLayeredStore if options["seed"] % 2 else FakeStore)(kinds, options["seed"])
        serve(tapped_engine(model, **engine_options(model, options, recorded, oracle, store))[0], asked, store)
    engine, logits = tapped_engine(model, **engine_options(model, options, recorded, oracle, store))
    samples = serve(engine, asked, store)
    steps = engine.trace.steps()
    event(f"preempted: {any(s.preempted for s in steps)}")
    event(f"chunked: {any(r.num_tokens > 1 and not r.samples for s in steps for r in s.rows)}")
    event(f"prefix hit: {any(cached for s in steps for _, cached in s.admitted)}")
    event(f"copied: {any(s.transfers.copies for s in steps)}")
    event(f"swapped: {any(s.transfers.swap_in for s in steps)}")
    event(f"overlapped: {options.get('late') is not None}")
    event(f"stages: {options.get('stages')}")
    if options.get("stages") is not None:
        event(f"as many steps as stages in flight: {engine.executor.most_in_flight == options['stages']}")
    event(f"loads begun: {any(s.transfers.loads for s in steps)}")
    event(f"a draft model: {draft_of(engine) is not None}")
    event(f"drafts of the host: {any(r.drafts for s in steps for r in s.rows)}")
    event(f"drafts kept: {any(n > 1 for s in steps for n in s.num_new_tokens)}")
    assert engine.kv.num_available == engine.num_blocks

    for number, a in enumerate(asked):
        for request in samples[number]:
            only_one = a.sampling.n == 1 and options["prefix_cache"] == "off"
            text = recorded.get(request.id, request.tokens)  # one that was aborted may have computed more than it kept
            check_logits(model, request, text, logits[request.id], one_shot, only_one)
        check_prompt(model, samples[number][0], one_shot)
        if a.pooling is not None and samples[number][0].finish_reason != "abort":
            check_embedding(model, samples[number][0], one_shot)
        texts = [r.output_tokens for r in samples[number] if r.finish_reason not in ("abort", "stop")]
        assert all(len(text) == (a.sampling.max_tokens if a.pooling is None else 0) for text in texts)
        for request in samples[number]:
            if dtype == "float64":
                written = recorded[request.id][: request.num_tokens]
                assert request.tokens == written
                assert request.finish_reason == "abort" or request.tokens == recorded[request.id]


@pytest.mark.parametrize("right", [0.5, 1.0])
def test_drafts_of_and_behind_a_text_that_is_stopped_are_no_surprise(
    right: float, random_model, tapped_engine, one_shot, oracle
) -> None:
    """The last token was a right draft token, and others came behind it."""
    sampling = SamplingParams(max_tokens=8, seed=1102951, stop_token_ids=(1, 2, 3, 4), min_tokens=1)
    options = {
        "block_size": 1, "num_blocks": 12, "max_num_seqs": 5, "max_num_batched_tokens": 100, "prefix_cache": "off",
        "admission": "fill", "num_host_blocks": 0, "policy": FirstCome, "num_drafts": 2, "drafts": "host",
        "right": right,
    }  # fmt: skip

    @settings(phases=[Phase.explicit], deadline=None)
    @example(seed=1)
    @given(seed=st.just(None))
    def stops(seed: Any) -> None:
        asked = [Asked((14,), sampling, None, 0, None)]
        check_workload(random_model("float64"), (asked, options | {"seed": seed}), tapped_engine, one_shot, oracle)

    stops()


def test_the_property_meets_preemption_while_decoding_and_while_reading(random_model, tapped_engine) -> None:
    """The workloads above are not tame: with few blocks, requests are thrown out both before and after a token."""
    engine, _ = tapped_engine(
        random_model("float64"), block_size=2, num_blocks=12, max_num_seqs=4, max_num_batched_tokens=9
    )
    requests = [engine.add([i + 1] * 11, SamplingParams(max_tokens=9, seed=i)) for i in range(3)]
    reading, decoding = 0, 0
    while engine.has_work():
        had = {r.id: len(r.output_tokens) for r in requests}
        engine.step()
        for name in engine.trace.steps()[-1].preempted:
            decoding, reading = decoding + (had[name] > 0), reading + (had[name] == 0)
    assert decoding > 0
    assert reading > 0
    assert all(len(r.output_tokens) == 9 for r in requests)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_chunks_of_every_size_give_the_same_logits(
    architecture: str, kv_heads: int, random_model, tapped_engine, one_shot
) -> None:
    model = random_model("float64", architecture=architecture, num_key_value_heads=kv_heads, sliding_window=None)
    prompt = random.Random(1).choices(range(VOCAB), k=23)
    expected = one_shot(model, prompt)
    for budget in (1, 2, 5, 22, 23, 100):
        engine, logits = tapped_engine(model, block_size=4, num_blocks=6, max_num_seqs=1, max_num_batched_tokens=budget)
        request = engine.add(prompt, SamplingParams(max_tokens=1, temperature=0))
        while engine.has_work():
            engine.step()
        assert request.output_tokens == [int(expected[-1].argmax())]
        for position in range(23):
            (found,) = logits[request.id][position]
            assert (found - expected[position]).abs().max() <= 1e-12 * expected.abs().max()
