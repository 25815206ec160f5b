"""Errata of disaggregation (E13.x) that the cost model decides; chapter 13 simulates the rest."""

import numpy as np
import pytest

from reference_impl.theory import kv_cache
from reference_impl.theory.hardware import device
from reference_impl.theory.links import link, transfer_seconds
from reference_impl.theory.model_shapes import model
from reference_impl.theory.roofline import place
from reference_impl.theory.units import GB

H100, L70, L8 = device("H100"), model("llama-3-70b"), model("llama-3-8b")


def test_e13_01_what_a_hand_over_costs_depends_on_the_link() -> None:
    """Claim: very long prompts, mixed loads, or over ten thousand requests per second gain most.

    The longest prompts also move most: 2.68 GB for 8192 tokens of a 70B, in 6 ms over NVLink, 54 over a 400G port, 215
    over 100G Ethernet, against about 290 ms of prefill. Goodput under both objectives decides.
    """
    cache = kv_cache.cache_bytes(L70, 8192)
    rates = np.array([link(n).per_direction for n in ("NVLink 4", "InfiniBand NDR 400G", "Ethernet 100G")])
    assert transfer_seconds(cache, rates) * 1e3 == pytest.approx([6, 54, 215], abs=0.5)
    prefill = 2 * 70e9 * 8192 / (8 * 0.5 * H100.peak())
    assert prefill * 1e3 == pytest.approx(290, abs=0.5)
    assert transfer_seconds(2 * cache, rates) == pytest.approx(2 * transfer_seconds(cache, rates))


def test_e13_02_prefill_and_decode_use_different_resources_so_together_they_use_both() -> None:
    """Claim: phases that share a GPU compete for resources that each does not need.

    On an 8B, a prompt of 2048 uses all of the arithmetic and 15 % of the bandwidth, 64 decodes all of the bandwidth
    and 11 % of the arithmetic. Utilization speaks for sharing; what sharing costs is time, for whoever waits.
    """
    prefill, decode = place(L8, H100, 1, 0, 2048), place(L8, H100, 64, 2047, 1)

    def share_of_bandwidth(num_bytes: float, seconds: float) -> float:
        return float(num_bytes / seconds / H100.bandwidth)

    assert prefill.compute_bound
    assert not decode.compute_bound
    assert share_of_bandwidth(prefill.num_bytes, prefill.seconds) == pytest.approx(0.15, abs=0.005)
    assert decode.utilization == pytest.approx(0.108, abs=0.001)
    # In one step the weights are read once and the work is summed: shorter than one after the other.
    weights = kv_cache.read_bytes(L8)
    flops, moved = prefill.flops + decode.flops, prefill.num_bytes + decode.num_bytes - weights
    together = max(flops / H100.peak(), moved / H100.bandwidth)
    assert together < 0.85 * (prefill.seconds + decode.seconds)
    assert together > 3 * decode.seconds  # and that is the interference


def test_e13_03_an_a100_has_less_bandwidth_than_an_h100_and_an_mi300x_more_of_everything() -> None:
    """Claim: prefill on H100, decode on MI300X or A100, by what each is good at.

    The A100 is slower in both, so it is a decode machine for its price alone; the MI300X leads in peak, bandwidth and
    capacity. What matches hardware to a phase is a price per unit: at equal prices no phase would choose an A100.
    """
    a100, mi300x = device("A100-80GB"), device("MI300X")
    assert a100.bandwidth < H100.bandwidth < mi300x.bandwidth
    assert a100.peak() < H100.peak() < mi300x.peak()
    # The A100 serves decode more cheaply below 61 % of the H100's price, prefill only below 32 %.
    assert a100.bandwidth / H100.bandwidth == pytest.approx(0.61, abs=0.005)
    assert a100.peak() / H100.peak() == pytest.approx(0.32, abs=0.005)


def test_e13_06_moving_decode_elsewhere_frees_no_memory_for_one_request_that_does_not_fit() -> None:
    """Claim: tensor parallelism, offload or disaggregation when one request exceeds memory.

    The decode side holds the whole cache again. First find the component: here logits, or scores, which chunks and
    fused attention remove; a cache that is too large needs more devices or fewer bits.
    """
    prompt = 131_072
    careless = kv_cache.plan_memory(L8, H100.capacity, prompt, fused_attention=False, logits_for_all_positions=True)
    assert not careless.fits
    assert max(careless.components, key=careless.components.__getitem__) == "scores"
    chunked = kv_cache.plan_memory(L8, H100.capacity, prompt, chunk_tokens=2048)
    assert chunked.fits
    assert chunked.cache == careless.cache  # no chunk and no other machine makes it smaller
    long = kv_cache.plan_memory(L8, H100.capacity, 500_000, chunk_tokens=2048)
    assert not long.fits
    decode_side = long.weights + long.cache
    assert decode_side > long.usable, "the machine that only decodes would need the same"
    assert kv_cache.plan_memory(L8, 2 * H100.capacity, 500_000, chunk_tokens=2048).fits
    assert kv_cache.plan_memory(L8, H100.capacity, 500_000, chunk_tokens=2048, bytes_per_value=1).fits
    assert long.cache / GB == pytest.approx(65.5, abs=0.05)


def test_e13_08_batching_hardly_helps_prefill_and_multiplies_decode() -> None:
    """Claim: prefill batches efficiently, decode does not. It is the other way round for what batching gains.

    8B on an H100, floors: one prompt of 2048 tokens is computed as fast per token as eight; 64 decodes at that context
    give 30 times the tokens of one, until their own caches take over.
    """
    prefill = [batch * 2048 / place(L8, H100, batch, 0, 2048).seconds for batch in (1, 8)]
    assert prefill[1] / prefill[0] == pytest.approx(1, abs=0.001)
    decode = np.array([batch / place(L8, H100, batch, 2047, 1).seconds for batch in (1, 8, 64, 512)])
    assert decode / decode[0] == pytest.approx([1, 7.1, 30.4, 51.3], rel=0.01)
