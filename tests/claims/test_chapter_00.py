"""What study materials say about rooflines, memory and units, and what comes out when it is computed (errata E00.x).

Every test states the claim in its docstring and recomputes the right value with its condition.
"""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from reference_impl import Engine, EngineConfig, SamplingParams
from reference_impl.core.decoder import Decoder
from reference_impl.theory import collectives, roofline
from reference_impl.theory.hardware import DEVICES, Level, device, hierarchy
from reference_impl.theory.latency import prefill_seconds
from reference_impl.theory.links import LINKS, link
from reference_impl.theory.model_shapes import model
from reference_impl.theory.units import (
    MB,
    TB,
    BytesPerSecond,
    FlopPerByte,
    FlopPerSecond,
    KiB,
    MiB,
    UnitError,
    compute_utilization_ceiling,
)

H100, L70, L8 = device("H100"), model("llama-3-70b"), model("llama-3-8b")


# ---------------------------------------------------------------- intensity


def test_e00_01_the_ridge_of_an_h100_in_dense_bf16_is_295_flop_per_byte() -> None:
    """Claim: about 500 FLOP per byte. No pair of its data-sheet lines gives that; sparse bf16 or dense fp8 give 591."""
    assert H100.ridge("bf16") == pytest.approx(295, abs=0.5)
    assert H100.ridge("fp8") == pytest.approx(591, abs=0.5)
    assert H100.ridge("bf16", sparse=True) == pytest.approx(591, abs=0.5)
    every_line = [H100.ridge(name, sparse) for sparse in (False, True) for name in H100.dense_flops if name != "fp32"]
    assert all(abs(ridge - 500) > 50 for ridge in every_line)
    assert device("GH200").ridge("bf16", sparse=True) == pytest.approx(495, abs=0.5)  # the nearest: another part


def test_e00_02_a_bf16_weight_gives_one_flop_per_byte_at_batch_one() -> None:
    """Claim: two FLOP per weight byte at batch 1 and 256 at batch 128. That is true of one-byte weights.

    A 16-bit weight is two bytes: 1 per token of the batch. Narrower weights raise it, with the ridge of bf16 unmoved.
    """
    assert [roofline.weight_intensity(1, bits) for bits in (16, 8, 4)] == [1, 2, 4]
    assert roofline.weight_intensity(128) == 128
    assert roofline.weight_intensity(128, 8) == 256  # the claimed figure
    assert H100.ridge("bf16") / roofline.weight_intensity(1) == pytest.approx(295, abs=0.5)
    # fp8 arithmetic moves the ridge with the intensity, so the distance stays.
    assert H100.ridge("fp8") / roofline.weight_intensity(1, 8) == pytest.approx(295, abs=0.5)


def test_e00_03_no_batch_makes_long_context_decode_compute_bound() -> None:
    """Claim: intensity grows with the batch, so a batch of 128 to 295 makes decode compute-bound.

    Only the weights are shared. Each sequence reads its own cache at 8 FLOP per byte (70B, bf16), so at a context of
    8192 the whole step ends at 60 however large the batch, and at 131,072 at 11.
    """
    batches = np.array([1, 8, 32, 128, 512])
    whole_step = roofline.step_intensity(L70, batches, 8191)
    assert whole_step == pytest.approx([1.1, 8.0, 22.8, 42.6, 54.3], abs=0.05)
    assert roofline.max_decode_intensity(L70, 8192) == pytest.approx(60, abs=0.5)
    assert roofline.max_decode_intensity(L70, 131_072) == pytest.approx(11.3, abs=0.1)
    assert roofline.batch_for_ridge(L70, 8192, H100.ridge()) == np.inf
    # At a short context the claim holds, a little above the ridge's own number.
    assert roofline.batch_for_ridge(L70, 1, H100.ridge()) == pytest.approx(295.5, abs=0.1)
    # Where the claim ends: about 1.5 thousand tokens for the 70B, about 400 for the 8B.
    assert roofline.batch_for_ridge(L70, 1450, H100.ridge()) < np.inf
    assert roofline.batch_for_ridge(L70, 1500, H100.ridge()) == np.inf
    assert roofline.batch_for_ridge(L8, 380, H100.ridge()) < np.inf
    assert roofline.batch_for_ridge(L8, 430, H100.ridge()) == np.inf
    # What moves the limit is fewer cached bytes.
    assert roofline.max_decode_intensity(L70, 8192, kv_bytes=1) == pytest.approx(2 * 59.8, abs=0.1)


def test_e00_04_prefill_intensity_follows_the_tokens_and_saturates_and_decode_is_not_always_memory_bound() -> None:
    """Claim: prefill intensity is batch times sequence length, or 700; decode is always memory-bound.

    A product of T rows has about T FLOP per byte while T is small and never more than d_in d_out / (d_in + d_out).
    700 is one point of that curve. Short prompts are as memory-bound as decode, and absorbed latent attention is not.
    """
    rows = np.array([64, 295, 1024, 8192])
    assert roofline.gemm_intensity(rows, 8192, 8192) == pytest.approx([63, 275, 819, 2731], abs=0.5)
    assert roofline.gemm_intensity(1e9, 8192, 8192) == pytest.approx(4096, rel=1e-4)
    assert roofline.gemm_intensity(850, 8192, 8192) == pytest.approx(700, rel=0.01)
    seconds = prefill_seconds(L8, np.array([1, 64, 256, 1024]), H100)
    assert seconds[2] == pytest.approx(seconds[0], rel=0.01)
    assert seconds[3] > 3 * seconds[0]
    latent = roofline.decode_attention_intensity(model("deepseek-v3"))
    assert latent == pytest.approx(242, abs=0.5)
    assert latent < H100.ridge() < 2 * latent  # one token below the ridge, two verified together above it


# ---------------------------------------------------------------- levels of memory


def levels(name: str) -> dict[str, Level]:
    return {level.name: level for level in hierarchy(device(name))}


def test_e00_05_registers_are_larger_and_faster_than_the_shared_memory_below_them() -> None:
    """Claim: 20 KB of registers at 10 TB/s above 200 KB of shared memory at 19 TB/s.

    An H100 has 256 KiB of registers per SM, more than the 228 KiB of shared memory a kernel can use, and they are the
    faster level. 19 TB/s is the shared memory of an A100; that of an H100 has 31, at the clock of its SXM part.
    """
    h100 = levels("H100")
    assert H100.chip.register_bytes_per_sm == 256 * KiB > H100.chip.shared_bytes_per_sm == 228 * KiB
    assert 256 * KiB / 20_000 == pytest.approx(13, abs=0.2)
    assert h100["registers"].capacity[0] / MiB == 33
    assert h100["shared memory"].capacity[0] / MiB == pytest.approx(29.4, abs=0.05)
    assert h100["L2"].capacity[0] / MB == pytest.approx(50, rel=0.05)
    assert h100["shared memory"].bandwidth[0] / TB == pytest.approx(30.9, abs=0.05)
    assert levels("A100-80GB")["shared memory"].bandwidth[0] / TB == pytest.approx(19.5, abs=0.05)
    rates = [level.bandwidth for level in hierarchy(H100)]
    assert all(faster[0] >= slower[1] for faster, slower in pairwise(rates))
    assert h100["registers"].bandwidth[0] > 100 * TB


def test_e00_06_each_level_on_the_chip_is_quoted_by_itself_with_part_and_date() -> None:
    """Claim: L2 at 5 TB/s and shared memory at 19 in one place, 'about 50 MB of SRAM at over 100 TB/s' in another.

    No level that holds 50 MB comes near 100 TB/s; only registers do. HBM has grown too: 8 TB/s and 180 GB on a B200.
    """
    for name in ("H100", "H200", "A100-80GB", "B200"):
        below_registers = [level for level in hierarchy(device(name)) if level.name != "registers"]
        assert max(level.bandwidth[1] for level in below_registers) < 100 * TB
    b200 = device("B200")
    assert (b200.bandwidth / TB, b200.capacity / MB) == (8, 180_000)
    assert all(part.announced and part.source for part in DEVICES.values())


def test_e00_07_compute_and_bandwidth_have_no_gap_without_an_intensity() -> None:
    """Claim: memory and compute differ in bandwidth by 10 to 50 times. Bytes and operations per second do not divide.

    With an intensity they do: at 1 FLOP per byte (batch 1, bf16) the tensor cores are at most 0.34 % busy.
    Two bandwidths do have a ratio: shared memory of an H100 over its HBM is 9.
    """
    compute, bandwidth = FlopPerSecond(H100.peak()), BytesPerSecond(H100.bandwidth)
    with pytest.raises(UnitError, match="arithmetic intensity"):
        compute / bandwidth
    assert compute_utilization_ceiling(FlopPerByte(1.0), compute, bandwidth) == pytest.approx(0.0034, abs=5e-5)
    assert BytesPerSecond(H100.chip.shared_bandwidth) / bandwidth == pytest.approx(9.2, abs=0.05)


def test_e00_08_nvlink_4_moves_900_gigabytes_in_both_directions_and_nvlink_5_twice_that() -> None:
    """Claim: 900 GB/s for the NVLink of Hopper and of Blackwell alike. 18 links of 50 GB/s and of 100 GB/s.

    Both are sums of two directions. A transfer goes one way, so its time takes 450 or 900.
    """
    assert (link("NVLink 4").both_directions, link("NVLink 5").both_directions) == (18 * 50e9, 18 * 100e9)
    assert (H100.link_per_direction, device("B200").link_per_direction) == (450e9, 900e9)
    message, n = 64e6, 8
    by_half, by_total = (
        collectives.ring_all_reduce(message, n, 0, rate)
        for rate in (H100.link_per_direction, LINKS["NVLink 4"].both_directions)
    )
    assert by_half == 2 * by_total  # the printed total promises half the time it takes


# ---------------------------------------------------------------- batching


def steps_to_serve(model: Decoder, lengths: list[int], slots: int, join: bool) -> int:
    """Forward passes for requests that all arrive at once; join: a free slot is filled at once, else per batch."""
    engine = Engine(model, EngineConfig(num_blocks=64, max_num_seqs=slots))
    waiting = list(lengths)
    while waiting or engine.has_work():
        if join or not engine.has_work():
            for n in waiting[: slots - len(engine.requests)]:
                engine.add([1], SamplingParams(max_tokens=n, temperature=0, ignore_eos=True))
                waiting.remove(n)
        engine.step()
    return len(engine.trace.steps())


def test_e00_10_sharing_weight_reads_explains_batching_and_unequal_lengths_explain_continuous_batching(
    random_model: Callable[..., Decoder],
) -> None:
    """Claim: one read of the weights for many tokens is the whole reason for continuous batching.

    A static batch shares that read as well. With equal lengths and one arrival both need the same passes; the gap comes
    from lengths that differ, because a static batch lasts as long as its longest request.
    """
    decoder = random_model()
    equal, unequal = [6] * 8, [2, 10, 2, 10, 2, 10, 2, 10]
    assert sum(equal) == sum(unequal)
    one_by_one = steps_to_serve(decoder, equal, 1, join=False)
    static, continuous = (steps_to_serve(decoder, equal, 2, join) for join in (False, True))
    assert one_by_one == 2 * static == 48, "a static batch of two halves the reads of the weights"
    assert continuous == static
    static, continuous = (steps_to_serve(decoder, unequal, 2, join) for join in (False, True))
    assert static == 4 * 10
    assert continuous < 0.75 * static
    assert continuous >= sum(unequal) / 2
