"""Errata of parallelism and collectives (E12.x) that the cost model decides; chapter 12 shows the exchanges."""

import numpy as np
import pytest

from reference_impl.theory import collectives, kv_cache, latency, pipeline, training
from reference_impl.theory.hardware import device
from reference_impl.theory.links import LINKS, link, transfer_seconds
from reference_impl.theory.model_shapes import model
from reference_impl.theory.units import GB, MB, KiB, MiB, format_bytes

H100, L70 = device("H100"), model("llama-3-70b")


def test_e12_01_a_layer_under_tensor_parallelism_has_two_all_reduces() -> None:
    """Claim: one all-reduce per block. Attention and MLP each end in a partial sum, so 160 for 80 layers.

    Blocks that run attention and MLP side by side (PaLM, Falcon) have one.
    """
    assert collectives.all_reduces_per_token(80) == 160
    assert collectives.all_reduces_per_token(model("palm-540b").layers, parallel_block=True) == 118
    alone = collectives.tensor_parallel_seconds(0, H100.bandwidth, 2, 80, 1.0)
    assert alone == 160


def test_e12_04_a_4096_by_4096_matrix_is_33_6_mb_in_sixteen_bits() -> None:
    """Claim: 64 MB, 16 MB on each of four. That is fp32 in binary; in 16 bits 32 MiB and 8 MiB each."""
    half, single = (4096 * 4096 * size for size in (2, 4))
    assert (format_bytes(half), format_bytes(half, binary=True)) == ("33.6 MB", "32.0 MiB")
    assert (format_bytes(single), format_bytes(single, binary=True)) == ("67.1 MB", "64.0 MiB")
    assert half / 4 / MiB == 8


def test_e12_05_a_share_that_every_all_reduce_takes_cannot_exceed_the_whole_step() -> None:
    """Claim: each all-reduce takes 23 % of decode latency. 160 of them would take 3680 %; together they took 23."""
    assert collectives.all_reduces_per_token(80) * 0.23 == pytest.approx(36.8)
    together = collectives.all_reduces_per_token(80) * collectives.ring_all_reduce(30 * KiB, 8, 2e-6, 450e9)
    step = collectives.tensor_parallel_seconds(140e9, H100.bandwidth, 8, 80, together / 160)
    assert 0.2 < together / step < 0.6


def test_e12_06_a_share_of_23_percent_made_three_times_faster_saves_15_percent() -> None:
    """Claim: a three times faster kernel on a 23 % share gives 27 % end to end. Removing the share would give 23.

    27 % less time needs a share of 40.5 %, and a speed-up of 1.27 one of 32 %.
    """
    assert 1 - collectives.amdahl(0.23, 3) == pytest.approx(0.153, abs=5e-4)
    assert 1 / collectives.amdahl(0.23, 3) == pytest.approx(1.18, abs=0.005)
    assert 1 - collectives.amdahl(0.23, np.inf) == pytest.approx(0.23)
    assert 1 / collectives.amdahl(0.23, np.inf) == pytest.approx(1.30, abs=0.005)
    assert 1 - collectives.amdahl(0.405, 3) == pytest.approx(0.27)
    assert 1 / collectives.amdahl(0.319, 3) == pytest.approx(1.27, abs=0.001)


def test_e12_07_a_70b_in_sixteen_bits_has_room_for_its_caches_on_four_devices_not_on_two() -> None:
    """Claim: TP=2 in two-GPU nodes is standard for a 70B on 80 GB devices. It leaves 9 thousand tokens in all.

    Four leave 448 thousand, eight 1.33 million; two with FP8 weights 224 thousand.
    """
    per_token = kv_cache.bytes_per_token(L70)

    def tokens(n: int, bits: float) -> int:
        return int(kv_cache.tokens_that_fit(n * H100.capacity, kv_cache.weight_bytes(L70, bits), per_token))

    assert tokens(2, 16) == 8827
    assert kv_cache.kv_budget(2 * H100.capacity, kv_cache.weight_bytes(L70)) / GB == pytest.approx(2.9, abs=0.05)
    assert [round(tokens(n, 16) / 1000) for n in (4, 8)] == [448, 1327]
    assert round(tokens(2, 8) / 1000) == 224


def test_e12_08_pcie_spans_a_node_and_infiniband_a_cluster() -> None:
    """Claim: slow cross-node PCIe rules out tensor parallelism between nodes. PCIe does not connect nodes.

    InfiniBand or Ethernet does: 50 GB/s per 400G port against 450 each way of NVLink 4. At decode sizes latency counts
    as much: 160 all-reduces of one token take 4.5 ms at 2 us a message and 13 at 6.
    """
    assert {row.scope for name, row in LINKS.items() if "PCIe" in name or "NVLink" in name} == {"node", "chip"}
    assert {link(name).scope for name in ("InfiniBand NDR 400G", "Ethernet 100G")} == {"cluster"}
    assert link("NVLink 4").per_direction == 9 * link("InfiniBand NDR 400G").per_direction
    message = collectives.all_reduce_message(1, 8192)
    seconds = [
        160 * collectives.ring_all_reduce(message, 8, alpha, link(name).per_direction)
        for name, alpha in (("NVLink 4", 2e-6), ("InfiniBand NDR 400G", 2e-6), ("InfiniBand NDR 400G", 6e-6))
    ]
    assert [t * 1e3 for t in seconds] == pytest.approx([4.5, 4.6, 13.5], abs=0.05)


def test_e12_09_stages_of_inference_idle_for_too_few_batches_and_do_not_shorten_a_token() -> None:
    """Claim: stages pass activations forward and gradients back. Inference goes forward only.

    What idles is (p - 1)/(m + p - 1) where stages are filled once, and 1 - m/p while m batches decode; one stream takes
    the sum of its stages, however many there are.
    """
    once = pipeline.schedule([1.0] * 4, 4)
    assert all(a.end <= b.start for a in once for b in once if a.batch == b.batch and a.stage < b.stage)
    assert pipeline.idle_share(once) == pytest.approx(3 / 7)
    assert [pipeline.serving_idle_share([1.0] * 4, m) for m in (1, 2, 4, 8)] == pytest.approx([0.75, 0.5, 0, 0])
    assert all(pipeline.token_seconds([24 / p] * p, 1) == pytest.approx(24) for p in (1, 2, 4, 8))


def test_e12_11_fsdp_divides_what_ddp_replicates() -> None:
    """Claim: DP/FSDP replicates the model and shards optimizer states. That mixes DDP, ZeRO-1 and FSDP.

    On 64 ranks an 8B keeps 16.1 GB of weights on each with DDP and ZeRO-1, 251 MB with FSDP; its optimizer 96.4 GB with
    DDP, 1.5 with the others.
    """
    ddp, first, second, third = (training.state(model("llama-3-8b").num_params, 64, zero) for zero in range(4))
    assert [s.weights / GB for s in (ddp, first, second)] == pytest.approx([16.1] * 3, abs=0.05)
    assert third.weights / MB == pytest.approx(251, abs=0.5)
    assert ddp.optimizer / GB == pytest.approx(96.4, abs=0.05)
    assert [s.optimizer / GB for s in (first, second, third)] == pytest.approx([1.5] * 3, abs=0.05)
    assert (first.gradients, second.gradients) == (ddp.gradients, third.gradients)


def test_e12_12_one_shot_wins_below_about_two_megabytes_and_the_ring_above() -> None:
    """Claim: one-shot and compressed all-reduces are faster. At 16 KB one-shot is, 2.25 us against 28; at 16 MB not.

    Eight devices, 2 us, 450 GB/s: they meet at 2.2 MB. Compression shortens the part that bytes take, which a small
    message does not have.
    """
    args = (8, 2e-6, 450e9)
    sizes = np.array([16 * KiB, 16 * MiB])
    assert collectives.ring_all_reduce(sizes, *args) * 1e6 == pytest.approx([28, 93], abs=0.5)
    assert collectives.one_shot_all_reduce(sizes, *args) * 1e6 == pytest.approx([2.25, 263], abs=0.5)
    # In decimal megabytes, as the list of numbers has it: 90 and 251 us.
    assert collectives.ring_all_reduce(16 * MB, *args) * 1e6 == pytest.approx(90, abs=0.5)
    assert collectives.one_shot_all_reduce(16 * MB, *args) * 1e6 == pytest.approx(251, abs=0.5)
    meeting = collectives.all_reduce_break_even(*args)
    assert meeting / MB == pytest.approx(2.2, abs=0.05)
    # The largest decode batch of a 70B for which one-shot still wins.
    assert meeting / collectives.all_reduce_message(1, L70.hidden_size) == pytest.approx(136, abs=0.5)
    small, large = (
        collectives.ring_all_reduce(size, *args) / collectives.ring_all_reduce(size / 4, *args) for size in sizes
    )
    assert small < 1.01
    assert large > 2


def test_e12_13_weights_in_host_memory_are_read_at_the_rate_of_that_memory() -> None:
    """Claim: with a coherent CPU link, models larger than HBM just work. At a quarter of the speed.

    140 GB with 50 of them in LPDDR5X: 139 ms a token overlapped, 161 not, against 35 from HBM. The link's own 450 GB/s
    would give 111 and 134, but the memory behind it is slower.
    """
    gh200 = device("GH200")
    assert gh200.host_memory is not None
    rate = gh200.host_memory[1]
    parts = [(90e9, gh200.bandwidth), (50e9, rate)]
    seconds = [latency.tiered_read_seconds(parts, overlapped) * 1e3 for overlapped in (True, False)]
    assert seconds == pytest.approx([139, 161], abs=0.5)
    all_in_hbm = transfer_seconds(140e9, gh200.bandwidth) * 1e3
    assert all_in_hbm == pytest.approx(35)
    assert [s / all_in_hbm for s in seconds] == pytest.approx([4.0, 4.6], abs=0.05)
    at_link = [(90e9, gh200.bandwidth), (50e9, link(gh200.host_link).per_direction)]
    seconds = [latency.tiered_read_seconds(at_link, overlapped) * 1e3 for overlapped in (True, False)]
    assert seconds == pytest.approx([111, 134], abs=0.5)


def test_e12_14_between_nodes_tensor_parallelism_pays_for_every_layer_and_a_pipeline_once() -> None:
    """Claim: GPUDirect RDMA makes tensor parallelism over nodes the thing to do. Its cost can be computed.

    A prompt of 8192 tokens through a 70B: 160 all-reduces over 16 devices at the 50 GB/s of a NIC take 829 ms (5 us a
    message assumed), more than the arithmetic at half the peak; over eight on NVLink 88 ms, and handing the activations
    to a second stage 2.7.
    """
    message = collectives.all_reduce_message(8192, L70.hidden_size)
    nic = link("InfiniBand NDR 400G").per_direction
    across = 160 * collectives.ring_all_reduce(message, 16, 5e-6, nic)
    inside = 160 * collectives.ring_all_reduce(message, 8, 2e-6, H100.link_per_direction)
    hand_over = transfer_seconds(message, nic, 5e-6)
    assert [t * 1e3 for t in (across, inside, hand_over)] == pytest.approx([829, 88, 2.7], abs=0.5)
    arithmetic = latency.prefill_flops(L70, 8192) / (16 * 0.5 * H100.peak())
    assert across > arithmetic > inside
