"""Errata of cost and capacity (E16.x): a price and a rate belong to a deployment that exists."""

import numpy as np
import pytest

from reference_impl.theory import cost, kv_cache, latency
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model
from reference_impl.theory.units import GB

H100, L70, L8 = device("H100"), model("llama-3-70b"), model("llama-3-8b")


def test_e16_01_a_price_per_token_needs_weights_that_fit_and_a_utilization() -> None:
    """Claim: $3 per hour at 1000 tokens/s prices a 70B on one H100 at $0.83 per million.

    The division is right, the deployment is not: 140 GB do not fit. In 8 bits they do and leave 1.4 GB; in 4 bits a
    step takes 11 to 12 ms, so 1000 tokens/s need 11 or 12 requests at once. At 10 % utilization it is $8.33.
    """
    price = cost.dollars_per_million_tokens(3, 1000)
    assert price == pytest.approx(0.83, abs=0.005)
    assert cost.dollars_per_million_tokens(3, 1000, utilization=0.1) == pytest.approx(8.33, abs=0.005)
    with pytest.raises(ValueError, match="at least 2 devices"):
        cost.max_throughput(L70, H100, 2048)
    assert kv_cache.kv_budget(H100.capacity, kv_cache.weight_bytes(L70, 8)) / GB == pytest.approx(1.4, abs=0.05)
    assert kv_cache.kv_budget(H100.capacity, 70.6e9) / GB == pytest.approx(1.4, abs=0.01)
    bits = kv_cache.bits_per_weight(4, 128)
    smallest, usual = kv_cache.weight_bytes(L70, bits), kv_cache.weight_bytes(L70, bits, embedding_bits=16)
    assert [weights / GB for weights in (smallest, usual)] == pytest.approx([36.4, 39.5], abs=0.05)
    floors = [float(latency.decode_seconds(L70, 1, H100, weights=weights)) for weights in (smallest, usual)]
    assert [floor * 1e3 for floor in floors] == pytest.approx([10.9, 11.8], abs=0.05)
    assert [int(np.ceil(1000 * floor)) for floor in floors] == [11, 12]


def test_e16_02_a_stream_follows_bandwidth_and_a_deployment_its_capacity() -> None:
    """Claim: bandwidth alone fixes the maximum of tokens/s, so an H200 gives 1.43 times an H100.

    One stream, yes. All streams together are as many as fit: a 70B in 8 bits leaves 1.4 GB on an H100 and 56 on an
    H200, and the throughput at 2048 tokens differs 34 times, that of an 8B 1.6 times.
    """
    h200 = device("H200")
    assert h200.bandwidth / H100.bandwidth == pytest.approx(1.433, abs=5e-4)
    one = [latency.decode_seconds(L8, 2048, part) for part in (H100, h200)]
    assert one[0] / one[1] == pytest.approx(1.433, abs=5e-4)
    weights = kv_cache.weight_bytes(L70, 8)
    room = [kv_cache.kv_budget(part.capacity, weights) / GB for part in (H100, h200)]
    assert room == pytest.approx([1.4, 56], abs=0.4)

    def gain(name: str, bits: float, precision: str) -> float:
        shape = model(name)
        rates = [
            cost.max_throughput(shape, part, 2048, precision=precision, weights=kv_cache.weight_bytes(shape, bits))
            for part in (H100, h200)
        ]
        assert {rate.bound for rate in rates} == {"capacity"}
        return rates[1].tokens_per_second / rates[0].tokens_per_second

    assert gain("llama-3-70b", 8, "fp8") == pytest.approx(34, abs=0.5)
    assert gain("llama-3-8b", 16, "bf16") == pytest.approx(1.6, abs=0.05)


def test_e16_03_hardware_is_compared_by_dense_peak_bandwidth_and_capacity_each_with_a_date() -> None:
    """Claim: B200 is twice an H100; MI300X has better memory and weaker software.

    2.3 times the dense bf16, 2.4 times the bandwidth, and an FP4 that the H100 lacks. The MI300X has 58 % more
    bandwidth, 32 % more peak and 2.4 times the capacity.
    """
    b200, mi300x = device("B200"), device("MI300X")
    assert b200.peak() / H100.peak() == pytest.approx(2.3, abs=0.05)
    assert b200.bandwidth / H100.bandwidth == pytest.approx(2.4, abs=0.05)
    assert b200.peak("fp4") == 2 * b200.peak("fp8")
    with pytest.raises(KeyError, match="fp8"):
        H100.peak("fp4")
    assert mi300x.bandwidth / H100.bandwidth == pytest.approx(1.582, abs=5e-4)
    assert mi300x.peak() / H100.peak() == pytest.approx(1.32, abs=0.005)
    assert mi300x.capacity / H100.capacity == pytest.approx(2.4)
    assert (H100.announced, mi300x.announced, b200.announced) == ("2022-03", "2023-12", "2024-03")
