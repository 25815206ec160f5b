"""Errata of the KV cache that need a running model: counted on the course model, not computed from a formula.

Every test states the claim in its docstring. Formulas alone are recomputed in test_chapter_02.py.
"""

import json
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from reference_impl import Engine, EngineConfig, SamplingParams, course_model, load_model
from reference_impl.core.decoder import Decoder
from reference_impl.core.linear import Linear
from reference_impl.features.baselines.contiguous_cache import (
    ContiguousAttention,
    ContiguousKVCache,
    generate_contiguous_cache,
)
from reference_impl.features.baselines.no_cache import generate_no_cache
from reference_impl.features.baselines.ragged import ragged_batch
from reference_impl.kernels import reference
from reference_impl.theory import latency, model_shapes

CPU = torch.device("cpu")
PROMPT = [(7 * i) % 997 + 10 for i in range(100)]  # any tokens do: nothing here depends on what the model says


@pytest.fixture(scope="module")
def model() -> Decoder:
    return load_model(course_model("target"), torch.float32, CPU)


@pytest.fixture(scope="module")
def shape() -> model_shapes.ModelShape:
    return model_shapes.from_config(json.loads((course_model("target") / "config.json").read_text("utf-8")))


def greedy(n: int) -> SamplingParams:
    return SamplingParams(max_tokens=n, temperature=0, ignore_eos=True)


class Counter(TorchFunctionMode):
    """Multiplications in the layers' matrices; scores that the mask leaves in; entries of all score matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.scores = self.entries = 0

    def saw_matrix(self, module: object, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.products += inputs[0].numel() * output.shape[-1]

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            queries, n = args[0].shape[:-1], args[1].shape[-2]
            self.entries += queries.numel() * n
            if kwargs.get("is_causal"):
                self.scores += queries[:-1].numel() * n * (n + 1) // 2
            elif kwargs.get("attn_mask") is not None:
                self.scores += int(kwargs["attn_mask"].expand(*queries, n).sum())
            else:
                self.scores += queries.numel() * n
        return func(*args, **kwargs)


def counted(model: Decoder, shape: model_shapes.ModelShape, run: Callable[[], object]) -> tuple[float, float, float]:
    """(tokens through all matrices, query-key pairs, entries of score matrices), the last two per layer and head."""
    with Counter() as counter:
        hooks = [m.register_forward_hook(counter.saw_matrix) for m in model.modules() if isinstance(m, Linear)]
        run()
    for hook in hooks:
        hook.remove()
    per_head = shape.layers * shape.num_heads
    return (
        counter.products / (shape.layers * shape.layer_params),
        counter.scores / per_head,
        counter.entries / per_head,
    )


# ---------------------------------------------------------------- what is in the cache, and when


def test_e01_12_the_cache_is_always_one_token_behind_the_text(model: Decoder) -> None:
    """Claim: after a prompt of three words, step 2 computes key and value of the fourth word and generates it.

    The prompt's pass already generates it; the last sampled token is never in the cache.
    """
    engine = Engine(model, EngineConfig(num_blocks=4))
    request = engine.add(PROMPT[:3], greedy(6))
    for generated in range(1, 7):
        engine.step()
        assert len(request.output_tokens) == generated
        assert request.num_computed_tokens == 3 + generated - 1
        written = engine.kv_cache.layer(0)[0].flatten(0, 1).abs().sum(dim=(1, 2)) > 0
        assert int(written.sum()) == 3 + generated - 1, "slots of layer 0 that hold a key"
    assert not engine.has_work()


def test_e01_12_the_same_holds_when_the_prompt_is_read_in_pieces(model: Decoder) -> None:
    engine = Engine(model, EngineConfig(num_blocks=8, max_num_batched_tokens=7))
    request = engine.add(PROMPT[:40], greedy(5))
    while engine.has_work():
        engine.step()
        if request.output_tokens:
            assert request.num_computed_tokens == 40 + len(request.output_tokens) - 1


def test_earlier_keys_and_values_do_not_change_when_a_token_is_added(model: Decoder) -> None:
    """Why keys and values may be kept in every layer, and why a query, used once, need not be."""

    def cached(tokens: list[int]) -> Tensor:
        cache, attention = ContiguousKVCache(model, 1, len(tokens)), ContiguousAttention(model.config.head_dim**-0.5)
        with torch.inference_mode():
            model(ragged_batch([(tokens, 0)], len(tokens), CPU), cache, attention)
        return cache.data[:, :, 0]

    shorter, longer = cached(PROMPT[:20]), cached(PROMPT[:21])
    torch.testing.assert_close(longer[:, :, :20], shorter, rtol=0, atol=3e-5 * float(shorter.abs().max()))


# ---------------------------------------------------------------- what it saves


@pytest.mark.parametrize(("prompt", "new"), [(1, 1), (1, 9), (16, 1), (12, 10)])
def test_e02_01_counted_operations_equal_the_closed_forms_with_and_without_a_cache(
    model: Decoder, shape: model_shapes.ModelShape, prompt: int, new: int
) -> None:
    """Claim: without a cache the attention of a generation costs O(S T)."""
    tokens, pairs, _ = counted(model, shape, lambda: generate_no_cache(model, PROMPT[:prompt], new))
    assert tokens == latency.uncached_linear_tokens(prompt, new)
    assert pairs == latency.uncached_attention_pairs(prompt, new)
    tokens, pairs, _ = counted(model, shape, lambda: generate_contiguous_cache(model, [PROMPT[:prompt]], new))
    assert tokens == latency.cached_linear_tokens(prompt, new)
    assert pairs == latency.cached_attention_pairs(prompt, new)


def test_e02_13_a_cached_step_projects_one_token_and_still_meets_every_key(
    model: Decoder, shape: model_shapes.ModelShape
) -> None:
    """Claim: the cache avoids recomputing attention. It avoids the projections; attention of the new query stays."""
    engine = Engine(model, EngineConfig(num_blocks=8))
    request = engine.add(PROMPT[:50], greedy(4))
    engine.step()
    while engine.has_work():
        context = request.num_computed_tokens + 1
        tokens, pairs, _ = counted(model, shape, engine.step)
        assert (tokens, pairs) == (1, context)


def test_no_cache_contiguous_cache_and_engine_generate_the_same_tokens(model: Decoder) -> None:
    engine = Engine(model, EngineConfig(num_blocks=8))
    request = engine.add(PROMPT[:12], greedy(16))
    while engine.has_work():
        engine.step()
    assert generate_no_cache(model, PROMPT[:12], 16) == request.output_tokens
    assert generate_contiguous_cache(model, [PROMPT[:12]], 16) == [request.output_tokens]


# ---------------------------------------------------------------- layout and masks


def test_e02_11_a_cache_is_a_buffer_that_does_not_grow_beside_lengths_that_do(model: Decoder) -> None:
    """Claim: the cache's tensors grow with every step. The buffer is reserved once; a count grows."""
    engine = Engine(model, EngineConfig(num_blocks=3, block_size=16))
    c, data = model.config, engine.kv_cache.data  # type: ignore[attr-defined]
    assert data.shape == (c.num_layers, 2, 3, 16, c.num_kv_heads, c.head_dim)
    address = data.data_ptr()
    request = engine.add(PROMPT[:4], greedy(8))
    lengths = []
    while engine.has_work():
        engine.step()
        lengths.append(request.num_computed_tokens)
        assert engine.kv_cache.data.data_ptr() == address  # type: ignore[attr-defined]
    assert lengths == list(range(4, 12))
    key = engine.kv_cache.layer(0)[0].flatten(0, 1)[5]  # one token, all heads
    assert key.is_contiguous(), "positions before heads (NHD): one token is one run of memory"


def test_e02_11_positions_before_heads_and_heads_before_positions_give_the_same_attention() -> None:
    torch.manual_seed(0)
    q, nhd_k, nhd_v = torch.randn(3, 8, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 16)
    hnd_k, hnd_v = (t.transpose(0, 1).contiguous() for t in (nhd_k, nhd_v))  # stored heads first
    assert hnd_k.stride() != nhd_k.transpose(0, 1).stride()
    expected = reference.attention_one_row(q, nhd_k, nhd_v, 0.25)
    torch.testing.assert_close(
        reference.attention_one_row(q, hnd_k.transpose(0, 1), hnd_v.transpose(0, 1), 0.25), expected
    )


class UnshiftedCausal(ContiguousAttention):
    """The mistake of E02.12: is_causal=True, whatever the cache already holds."""

    def forward(self, q, k, v, layer, kv_cache, batch):  # type: ignore[no-untyped-def]
        kv_cache.write(layer, k, v, batch)
        keys, values = (t[0, : batch.context_lens[0]].transpose(0, 1)[None] for t in kv_cache.layer(layer))
        several = q.shape[0] > 1
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys, values, is_causal=several, scale=self.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)


@torch.inference_mode()
def last_logits(model: Decoder, chunk: int, attention_class: type[ContiguousAttention]) -> Tensor:
    cache, attention = ContiguousKVCache(model, 1, len(PROMPT)), attention_class(model.config.head_dim**-0.5)
    logits = torch.empty(0)
    for past in range(0, len(PROMPT), chunk):
        logits = model(ragged_batch([(PROMPT[past : past + chunk], past)], len(PROMPT), CPU), cache, attention)
    return logits


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_e02_12_a_prompt_read_in_chunks_gives_the_logits_of_one_read_at_once(model: Decoder, chunk: int) -> None:
    """Claim: there is prefill (T > 1, empty cache) and decode (T = 1), and the library handles the mask."""
    at_once = last_logits(model, len(PROMPT), ContiguousAttention)
    bound = 3e-5 * float(at_once.abs().max())
    torch.testing.assert_close(last_logits(model, chunk, ContiguousAttention), at_once, rtol=0, atol=bound)


@pytest.mark.parametrize(("chunk", "fails"), [(1, False), (7, True), (64, True), (100, False)])
def test_e02_12_an_unshifted_causal_mask_fails_that_test_unless_chunks_are_1_or_everything(
    model: Decoder, chunk: int, fails: bool
) -> None:
    at_once = last_logits(model, len(PROMPT), ContiguousAttention)
    error = float((last_logits(model, chunk, UnshiftedCausal) - at_once).abs().max())
    assert (error > 1e-2 * float(at_once.abs().max())) == fails


# ---------------------------------------------------------------- several requests


def test_e03_04_a_ragged_batch_computes_38_scores_where_one_masked_matrix_computes_100(
    model: Decoder, shape: model_shapes.ModelShape
) -> None:
    """Claim: continuous batching works by a mask that keeps sequences apart."""
    engine = Engine(model, EngineConfig(num_blocks=8))
    for n in (3, 5, 2):
        engine.add(PROMPT[:n], greedy(1))
    tokens, pairs, entries = counted(model, shape, engine.step)
    assert tokens == 10, "no padding in the matrices"
    assert pairs == 6 + 15 + 3
    assert entries == 3**2 + 5**2 + 2**2 == 38
    assert 10**2 == 100


def test_e03_04_attention_row_by_row_equals_one_packed_matrix_with_a_mask() -> None:
    torch.manual_seed(0)
    lens = [3, 5, 2]
    q, k, v = torch.randn(10, 4, 16), torch.randn(10, 2, 16), torch.randn(10, 2, 16)
    owner = torch.repeat_interleave(torch.arange(3), torch.tensor(lens))
    mask = (owner[:, None] == owner) & torch.ones(10, 10).tril().bool()
    heads = [t.transpose(0, 1)[None] for t in (q, k, v)]
    packed = F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=0.25, enable_gqa=True)[0].transpose(0, 1)
    rows = zip(q.split(lens), k.split(lens), v.split(lens), strict=True)
    torch.testing.assert_close(torch.cat([reference.attention_one_row(*row, 0.25) for row in rows]), packed)


def test_rows_of_unequal_length_see_neither_each_other_nor_unwritten_memory(model: Decoder) -> None:
    """Padding, positions and masks of a contiguous batch: unwritten slots hold NaN, and nothing of it comes through."""
    attention = ContiguousAttention(model.config.head_dim**-0.5)

    @torch.inference_mode()
    def decode(prompts: list[list[int]]) -> Tensor:
        cache = ContiguousKVCache(model, len(prompts), 32)
        cache.data.fill_(float("nan"))
        model(ragged_batch([(p, 0) for p in prompts], 32, CPU), cache, attention)
        logits: Tensor = model(ragged_batch([([5], len(p)) for p in prompts], 32, CPU), cache, attention)
        return logits

    together = decode([PROMPT[:20], PROMPT[50:53]])
    alone = torch.cat([decode([PROMPT[:20]]), decode([PROMPT[50:53]])])
    torch.testing.assert_close(together, alone, rtol=0, atol=3e-5 * float(alone.abs().max()))


def test_requests_wait_or_are_preempted_when_blocks_run_out_and_all_finish_with_the_same_text(model: Decoder) -> None:
    """Context length is a budget: short of blocks, requests queue; nobody's text changes."""

    def texts(num_blocks: int) -> tuple[list[list[int]], int, int]:
        engine = Engine(model, EngineConfig(num_blocks=num_blocks, block_size=4))
        requests = [engine.add(PROMPT[10 * i : 10 * i + 6], greedy(10)) for i in range(4)]
        while engine.has_work():
            engine.step()
        steps = engine.trace.steps()
        return (
            [r.output_tokens for r in requests],
            max(s.num_waiting for s in steps),
            sum(len(s.preempted) for s in steps),
        )

    roomy, waiting, preempted = texts(16)
    assert (waiting, preempted) == (0, 0)
    tight, waiting, preempted = texts(5)
    assert waiting > 0
    assert preempted > 0
    assert tight == roomy
