"""Errata of prefix caching that need a running model: what is shared, what may not be, and that outputs stay.

Every test states the claim in its docstring.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from reference_impl import Engine, EngineConfig, SamplingParams, course_model, load_model
from reference_impl.assembly.parts import Parts
from reference_impl.core.block_pool import BlockPool
from reference_impl.core.decoder import Decoder
from reference_impl.core.kv_manager import KVManager, cache_key
from reference_impl.core.scheduler import Scheduler
from reference_impl.features.prefix.radix_index import RadixIndex
from reference_impl.interfaces import Request, StepPlan
from reference_impl.kernels import reference
from reference_impl.theory import prefix_cache

PROMPT = [(7 * i) % 997 + 10 for i in range(100)]  # any tokens do: nothing here depends on what the model says


@pytest.fixture(scope="module")
def model() -> Decoder:
    return load_model(course_model("target"), torch.float32, torch.device("cpu"))


def engine_with(model: Decoder, kind: str) -> Engine:
    return Engine(model, EngineConfig(num_blocks=64, prefix_cache=kind))  # type: ignore[arg-type]


def serve(engine: Engine, prompt: list[int], max_tokens: int = 1, adapter: str | None = None) -> Request:
    request = engine.add(prompt, SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True))
    request.adapter = adapter
    while engine.has_work():
        engine.step()
    return request


def computed(engine: Engine) -> int:
    return sum(row.num_tokens for step in engine.trace.steps() for row in step.rows)


def copies(engine: Engine) -> int:
    return sum(len(step.transfers.copies) for step in engine.trace.steps())


def cache_of(model: Decoder, prompt: list[int], last: int) -> Tensor:
    """Keys and values of the last tokens of a prompt, [layers, 2, last, kv_heads, head_dim]."""
    engine = engine_with(model, "off")
    engine.add(prompt, SamplingParams(max_tokens=2, temperature=0, ignore_eos=True), request_id="r")
    engine.step()
    slots = reference.context_slots(torch.tensor(engine.requests["r"].block_table), len(prompt), 16)[-last:]
    return engine.kv_cache.data.flatten(2, 3)[:, :, slots].clone()  # type: ignore[attr-defined]


@contextmanager
def adapter(model: Decoder, layer: int, outputs: slice) -> Iterator[None]:
    """A change of rank 4 to some outputs of one layer's projection of queries, keys and values."""
    generator = torch.Generator().manual_seed(layer)
    qkv = model.layers[layer].qkv
    down = torch.randn(qkv.in_features, 4, generator=generator) / 16
    up = torch.zeros(4, qkv.out_features)
    up[:, outputs] = torch.randn(4, up[:, outputs].shape[1], generator=generator)
    hook = qkv.register_forward_hook(lambda module, x, y: y + x[0] @ down @ up)
    try:
        yield
    finally:
        hook.remove()


def parts(model: Decoder) -> tuple[slice, slice]:
    """Which outputs of the projection are queries, and which are keys and values."""
    c = model.config
    queries = c.num_heads * c.head_dim
    return slice(0, queries), slice(queries, queries + 2 * c.num_kv_heads * c.head_dim)


def test_e06_01_the_same_tokens_have_other_keys_and_values_behind_another_prefix(model: Decoder) -> None:
    """Equal in layer 0, where they depend on token and position only; different in every layer above."""
    same = PROMPT[64:80]
    gap = (cache_of(model, PROMPT[:32] + same, 16) - cache_of(model, PROMPT[32:64] + same, 16)).abs()
    per_layer = gap.amax(dim=(1, 2, 3, 4))
    assert per_layer[0] < 1e-4 < per_layer[1:].min()


@pytest.mark.parametrize("kind", ["hash", "radix", "auto"])
def test_e06_02_outputs_are_the_same_with_the_cache_on_and_off_and_only_the_work_differs(model: Decoder, kind) -> None:
    """Whether it is on by default is a matter of versions; it changes prefill tokens and nothing else."""
    prompts = [PROMPT[:70], PROMPT[:70], PROMPT[:40] + PROMPT[80:], PROMPT[1:50], PROMPT[:64]]
    off, on = engine_with(model, "off"), engine_with(model, kind)
    without, with_cache = ([serve(engine, p, 6) for p in prompts] for engine in (off, on))
    assert [r.output_tokens for r in without] == [r.output_tokens for r in with_cache]
    found = sum(r.num_cached_tokens for r in with_cache)
    assert computed(off) - computed(on) == found == 64 + 32 + 48
    assert EngineConfig().prefix_cache != "off"


@pytest.mark.parametrize("kind", ["hash", "radix"])
@pytest.mark.parametrize("length", [31, 32, 33, 48])
def test_e06_03_a_full_hit_still_computes_the_last_token(model: Decoder, kind: str, length: int) -> None:
    """At least one token is computed, because its logits are needed; with whole blocks, up to one block."""
    engine = engine_with(model, kind)
    first = serve(engine, PROMPT[:length], 3)
    again = serve(engine, PROMPT[:length], 3)
    assert again.output_tokens == first.output_tokens
    assert again.num_cached_tokens == prefix_cache.cached_tokens(length, length, 16) <= length - 1


def test_e04_02_prefix_hits_copy_nothing_and_forks_copy_the_block_they_write(model: Decoder) -> None:
    """A prompt of 40 tokens ends inside a block: four samples of it copy three times, four requests never."""
    engine = engine_with(model, "hash")
    for i in range(4):
        serve(engine, PROMPT[:40] + [i + 1] * 9, 4)
    assert copies(engine) == 0
    samples = engine_with(model, "hash")
    samples.add(PROMPT[:40], SamplingParams(max_tokens=3, n=4, seed=1, ignore_eos=True))
    while samples.has_work():
        samples.step()
    assert copies(samples) == 3


def test_e06_04_requests_that_come_together_all_miss_a_cold_cache(model: Decoder) -> None:
    """A block is found after it was computed: eight at once compute the prefix eight times, one before them helps."""
    prompts = [[*PROMPT[:64], i + 1] for i in range(8)]
    counted = {}
    for warm in (False, True):
        engine = engine_with(model, "radix")
        if warm:
            serve(engine, PROMPT[:65])
        before = computed(engine)
        for prompt in prompts:
            engine.add(prompt, SamplingParams(max_tokens=1, temperature=0))
        while engine.has_work():
            engine.step()
        counted[warm] = computed(engine) - before
    assert counted == {False: 8 * 65, True: 8}


def test_e06_06_sharing_across_adapters_gives_wrong_outputs_and_the_key_prevents_it(model: Decoder) -> None:
    """The same prompt with and without an adapter: no sharing when the key has it, and outputs as without a cache."""
    _, keys_values = parts(model)
    with adapter(model, 2, keys_values):
        alone = serve(engine_with(model, "off"), PROMPT[:64], 12).output_tokens
    for kind in ("hash", "radix"):
        for name, found, right in ((None, 48, False), ("poet", 0, True)):
            engine = engine_with(model, kind)
            serve(engine, PROMPT[:64], 12)
            with adapter(model, 2, keys_values):
                request = serve(engine, PROMPT[:64], 12, adapter=name)
            assert request.num_cached_tokens == found
            assert (request.output_tokens == alone) == right


def test_e06_06_an_adapter_changes_the_cache_of_its_layer_or_of_those_above(model: Decoder) -> None:
    """On keys and values: its own layer and all above. On queries: all above. On the last layer's queries: none."""
    queries, keys_values = parts(model)
    last = len(model.layers) - 1
    plain = cache_of(model, PROMPT[:48], 48)
    for layer, outputs, first in ((2, keys_values, 2), (2, queries, 3), (last, queries, last + 1)):
        with adapter(model, layer, outputs):
            changed = (cache_of(model, PROMPT[:48], 48) - plain).abs().amax(dim=(1, 2, 3, 4)) > 1e-4
        assert changed.nonzero().flatten().tolist() == list(range(first, last + 1))


class LongestMatchFirst(Scheduler):
    """SGLang's lpm, as in the chapter: before each step, what finds most in the cache is next."""

    def schedule(self, now: float) -> StepPlan:
        for request in list(self.waiting):
            match = self.kv.index.match_length(request.tokens, cache_key(request))
            _, arrived = self.ranks[request.id]
            self.waiting.remove(request.id)
            self.ranks[request.id] = (-match, arrived)
            self.waiting.push(request, self.ranks[request.id])
        return super().schedule(now)


def test_longest_match_first_computes_each_text_once_in_a_small_cache_and_serves_the_odd_one_last(
    model: Decoder,
) -> None:
    """Templates by turns evict one another in order of arrival. Longest match first computes every different token
    once, which no order can undercut, and what matches nothing waits to the end."""
    templates = [[10 * i + 1] * 64 for i in range(4)]
    queue = [templates[i % 4] + [100 + i] * 16 for i in range(12)]
    queue.insert(4, [200] * 80)  # behind the first of each template
    computed_by, odd_one = {}, {}
    for kind in (Scheduler, LongestMatchFirst):
        kv = KVManager(BlockPool(9), 16, RadixIndex(16))
        scheduler = kind(kv, max_num_seqs=1, max_num_batched_tokens=2048)
        config = EngineConfig(num_blocks=9)
        engine = Engine(model, config, Parts(kv_manager=kv, scheduler=scheduler))
        for i, prompt in enumerate(queue):
            engine.add(prompt, SamplingParams(max_tokens=1, temperature=0), request_id=f"{i}")
        while engine.has_work():
            engine.step()
        order = [name for step in engine.trace.steps() for name, _ in step.admitted]
        computed_by[kind], odd_one[kind] = computed(engine), order.index("4")
    assert computed_by[LongestMatchFirst] == 4 * 64 + 12 * 16 + 80 < computed_by[Scheduler]
    assert odd_one == {Scheduler: 4, LongestMatchFirst: 12}
