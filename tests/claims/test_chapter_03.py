"""Errata of batching and scheduling (E03.x) that the cost model decides; the simulator of chapter 03 shows the rest."""

import pytest

from reference_impl.theory import latency
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model

H100, L70, L8 = device("H100"), model("llama-3-70b"), model("llama-3-8b")


def step(tokens: float, extra_flops: float = 0.0) -> float:
    """A pass of a 70B over eight H100 at half the peak: 140 GB read, 2 * 70e9 operations per token."""
    return float(latency.step_bound((2 * 70e9 * tokens + extra_flops) / 8, 140e9 / 8, H100, mfu=0.5))


def test_e03_01_a_mixed_step_is_shorter_than_its_parts_and_no_decode_waits_longer() -> None:
    """Claim: mixing prefill into decode halves the throughput of each.

    A step takes the longer of its operations and its bytes, so 64 decodes ride on a prompt of 8,192: 292 ms against 295
    if they wait for its 290 and then run. Without the prompt they take 5.2 ms: a long step stalls them, mixed or not.
    Up to 148 tokens in all change nothing at all.
    """
    decode, prefill, mixed = step(64), step(8192), step(8192 + 64)
    assert [t * 1e3 for t in (decode, prefill, mixed)] == pytest.approx([5.2, 290, 292], abs=0.5)
    assert mixed < decode + prefill == pytest.approx(0.295, abs=5e-4)
    assert mixed / decode == pytest.approx(56, abs=0.5)
    attention = latency.attention_flops(latency.causal_pairs(8192), 80, 64, 128)
    assert step(8192, attention) * 1e3 == pytest.approx(312, abs=0.5)
    assert step(147) == decode
    assert step(149) > decode
    assert latency.flat_prefill_tokens(H100, mfu=0.5) == pytest.approx(147.7, abs=0.05)


def test_e03_05_translation_spends_its_time_in_decode_and_summaries_in_prefill() -> None:
    """Claim: machine translation in batch is mostly prefill. Its output is about as long as its input.

    Per request, 8B on an H100, 64 together and prompts at half the peak: with outputs as long as prompts (256) decode
    takes three quarters of the time. Long documents with short answers, or scores, are the prefill-heavy load.
    """

    def decode_share(prompt: int, output: int, batch: int) -> float:
        prefill = float(latency.prefill_seconds(L8, prompt, H100, mfu=0.5))
        each_step = float(latency.decode_seconds(L8, prompt + output // 2, H100, batch)) / batch
        decode = (output - 1) * each_step
        return decode / (prefill + decode)

    assert decode_share(256, 256, 64) == pytest.approx(0.75, abs=0.01)
    assert decode_share(256, 256, 1) > 0.99
    assert decode_share(8192, 128, 32) < 0.3  # 34 GB of keys and values beside 16 GB of weights
    assert decode_share(1024, 1, 64) == 0  # a score, a class, an embedding: one pass
