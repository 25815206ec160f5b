"""Errata of long context (E10.x) that counting pairs and bytes decides."""

import pytest

from reference_impl.theory import collectives, kv_cache, latency
from reference_impl.theory.model_shapes import model
from reference_impl.theory.units import GB

L70 = model("llama-3-70b")


def test_e10_04_contiguous_shards_of_a_causal_prompt_do_unequal_work_and_zigzag_shards_do_not() -> None:
    """Claim: each GPU takes a contiguous slice. Under a causal mask the last of four does 7/16 of the work.

    The ring waits for it: 1.75 times as long as balanced, at most 2. A first and a last eighth together are a quarter.
    """
    n = 2**20

    def work(first: int, last: int) -> float:
        return latency.causal_pairs(last - first, first) / latency.causal_pairs(n)

    contiguous = [work(i * n // 4, (i + 1) * n // 4) for i in range(4)]
    assert contiguous == pytest.approx([1 / 16, 3 / 16, 5 / 16, 7 / 16], abs=1e-5)
    assert 4 * max(contiguous) == pytest.approx(1.75, abs=1e-5)
    assert 64 * work(63 * n // 64, n) < 2
    eighths = [work(i * n // 8, (i + 1) * n // 8) for i in range(8)]
    assert [eighths[i] + eighths[7 - i] for i in range(4)] == pytest.approx([0.25] * 4, abs=1e-5)


def test_e10_06_long_prompts_overflow_by_their_cache_and_sequence_parallelism_names_several_exchanges() -> None:
    """Claim: sequence parallelism shards the quadratic memory of attention. Fused attention has no such memory.

    What a million tokens of a 70B overflow is 328 GB of keys and values. Megatron's sequence parallelism shards
    something else, activations between the products, and exchanges what an all-reduce does in two halves.
    """
    fused, unfused = (
        kv_cache.plan_memory(L70, 80 * GB, 1_000_000, chunk_tokens=8192, fused_attention=f) for f in (True, False)
    )
    assert fused.scores == 0
    assert unfused.scores > 1000 * GB
    assert fused.cache / GB == pytest.approx(328, abs=0.5)
    tensor, n, alpha, rate = 1e8, 8, 2e-6, 450e9
    halves = collectives.reduce_scatter(tensor, n, alpha, rate) + collectives.all_gather(tensor, n, alpha, rate)
    assert halves == pytest.approx(collectives.ring_all_reduce(tensor, n, alpha, rate))
    assert collectives.all_to_all(tensor, n, alpha, rate) < halves  # what heads for sequence (Ulysses) exchanges
