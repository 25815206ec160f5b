"""Errata of speculative decoding (E08.x) that the cost of a step decides; chapter 08 shows acceptance."""

import pytest

from reference_impl.theory import kv_cache, latency
from reference_impl.theory.hardware import device
from reference_impl.theory.links import transfer_seconds
from reference_impl.theory.model_shapes import model
from reference_impl.theory.roofline import place

H100, L8 = device("H100"), model("llama-3-8b")


def step(batch: int, tokens_each: int, context: int, mfu: float) -> float:
    """Weights read or matrices computed, whichever is longer, and then the caches read: attention is not overlapped."""
    matrices = latency.step_bound(2 * 8.03e9 * batch * tokens_each, 2 * 8.03e9, H100, mfu=mfu)
    return float(matrices + transfer_seconds(kv_cache.cache_bytes(L8, context, batch), H100.bandwidth))


def test_e08_08_verifying_drafts_in_a_large_batch_costs_a_longer_step_unless_the_context_is_long() -> None:
    """Claim: a fast draft helps at large batches too; or, elsewhere, only at batch 1.

    It depends on what binds. 8B, batch 256, three drafts, 70 % of the peak: the step grows 2.6 times at 500 tokens of
    context and 1.4 times at 4000, where reading caches takes most of it. At batch 1 it does not grow.
    """
    assert step(256, 4, 500, 0.7) / step(256, 1, 500, 0.7) == pytest.approx(2.6, abs=0.05)
    assert step(256, 4, 4000, 0.7) / step(256, 1, 4000, 0.7) == pytest.approx(1.4, abs=0.05)
    assert step(1, 4, 500, 0.7) == step(1, 1, 500, 0.7)
    # If reading caches overlapped perfectly with the products, the long context would hide all of the drafts.
    overlapped = [place(L8, H100, 256, context, new).seconds for context in (500, 4000) for new in (1, 4)]
    assert overlapped[1] / overlapped[0] > 1.5
    assert overlapped[3] / overlapped[2] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_e08_10_a_dense_model_verifies_for_the_price_of_one_token_only_below_the_ridge(batch: int) -> None:
    """Claim: verifying K tokens costs about one decode step. For a dense model whose B (K + 1) tokens stay below 295.

    A mixture of experts reads more experts for more tokens (chapter 11).
    """
    one, six = (place(L8, H100, batch, 1000, new) for new in (1, 6))
    assert six.seconds / one.seconds == pytest.approx(1, abs=0.01)
    many = [place(L8, H100, 256, 100, new) for new in (1, 6)]
    assert many[1].compute_bound
    assert many[1].seconds / many[0].seconds > 3
