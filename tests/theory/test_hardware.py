"""The device table is complete, dated, and adds up: ridges, clocks, sparse peaks, levels of memory."""

import math
import re
from dataclasses import replace
from itertools import pairwise

import pytest

from reference_impl.theory.hardware import DEVICES, device, hierarchy
from reference_impl.theory.links import link
from reference_impl.theory.units import GB, KiB, MiB


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_names_its_sku_its_date_and_its_source(name: str) -> None:
    row = device(name)
    assert row.sku
    assert row.source
    assert re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", row.announced)
    assert 8 * GB <= row.capacity <= 300 * GB
    assert 1e11 < row.bandwidth < 1e13


@pytest.mark.parametrize(
    ("name", "precision", "flop_per_byte"),
    [
        ("H100", "bf16", 295),
        ("H100", "fp8", 591),
        ("A100-80GB", "bf16", 153),
        ("H200", "bf16", 206),
        ("MI300X", "bf16", 247),
        ("B200", "bf16", 281),
    ],
)
def test_ridge_points_follow_from_dense_peaks(name: str, precision: str, flop_per_byte: float) -> None:
    assert device(name).ridge(precision) == pytest.approx(flop_per_byte, rel=0.01)


def test_halving_the_bits_of_the_arithmetic_doubles_the_dense_peak() -> None:
    for row in DEVICES.values():
        if {"fp8", "bf16"} <= row.dense_flops.keys():
            assert row.peak("fp8") == pytest.approx(2 * row.peak("bf16"), rel=0.01)


def test_a_precision_the_device_lacks_is_refused_by_name() -> None:
    with pytest.raises(KeyError, match="expected one of"):
        device("T4").peak("bf16")
    with pytest.raises(KeyError, match="H100"):
        device("H900")


def test_a_row_cannot_be_changed_by_a_reader() -> None:
    with pytest.raises(TypeError):
        device("H100").dense_flops["bf16"] = 1.0  # type: ignore[index]


def test_h200_is_an_h100_with_other_memory() -> None:
    h100, h200 = device("H100"), device("H200")
    assert h200.dense_flops == h100.dense_flops
    assert h200.bandwidth / h100.bandwidth == pytest.approx(1.433, abs=1e-3)


# ---------------------------------------------------------------- what is on the chip


@pytest.mark.parametrize("name", DEVICES)
def test_bandwidth_falls_from_registers_to_the_drive(name: str) -> None:
    levels = hierarchy(device(name))
    assert [levels[0].name, levels[-1].name] == ["registers", "NVMe SSD"]
    for faster, slower in pairwise(levels):
        assert faster.bandwidth[0] > slower.bandwidth[1], f"{faster.name} above {slower.name}"
    for level in levels:
        assert 0 < level.capacity[0] <= level.capacity[1]
        assert level.bandwidth[0] <= level.bandwidth[1]
        assert level.note


@pytest.mark.parametrize("name", DEVICES)
def test_off_chip_levels_grow_and_are_the_device_and_the_path_to_the_host(name: str) -> None:
    part = device(name)
    by_name = {level.name: level for level in hierarchy(part)}
    assert by_name["device memory"].capacity == (part.capacity, part.capacity)
    assert by_name["device memory"].bandwidth == (part.bandwidth, part.bandwidth)
    assert by_name["host memory"].bandwidth[1] <= link(part.host_link).per_direction
    assert part.host_link in by_name["host memory"].note
    assert by_name["NVMe SSD"].capacity[0] > by_name["host memory"].capacity[0] >= 64 * GB
    assert by_name["shared memory"].capacity[0] < by_name["device memory"].capacity[0] / 500


def test_host_memory_that_is_slower_than_its_link_sets_the_rate() -> None:
    """GH200: LPDDR5X at 360 GB/s behind a link of 450."""
    host = next(level for level in hierarchy(device("GH200")) if level.name == "host memory")
    assert (host.bandwidth, host.capacity) == ((360e9, 360e9), (480 * GB, 480 * GB))


# What the data sheet's fp32 peak belongs to, where it is not the clock behind the tensor peaks.
FP32_CLOCK = {"H100": 1.98e9, "H200": 1.98e9, "GH200": 1.98e9, "B200": 1.98e9}


@pytest.mark.parametrize("name", DEVICES)
def test_the_fp32_peak_is_sms_times_lanes_times_two_times_the_clock(name: str) -> None:
    part = device(name)
    clock = FP32_CLOCK.get(name, part.chip.clock)
    assert part.chip.num_sms * part.chip.lanes_per_sm * 2 * clock == pytest.approx(part.peak("fp32"), rel=6e-3)


@pytest.mark.parametrize("name", DEVICES)
def test_the_tensor_peak_is_sms_times_clock_times_a_power_of_two(name: str) -> None:
    part = device(name)
    per_clock = part.peak("fp16") / part.chip.num_sms / part.chip.clock
    assert per_clock == pytest.approx(2 ** round(math.log2(per_clock)), rel=5e-3)


@pytest.mark.parametrize(
    ("name", "sms", "registers_kib", "shared_kib", "l2_mib"),
    [
        ("T4", 40, 256, 64, 4), ("A100-80GB", 108, 256, 164, 40), ("H100", 132, 256, 228, 50),
        ("H200", 132, 256, 228, 50), ("GH200", 132, 256, 228, 50), ("RTX4090", 128, 256, 100, 72),
        ("L4", 58, 256, 100, 48), ("MI300X", 304, 512, 64, 32), ("B200", 148, 256, 228, 126),
    ],
)  # fmt: skip
def test_sizes_on_the_chip_are_those_of_the_white_papers(
    name: str, sms: int, registers_kib: int, shared_kib: int, l2_mib: int
) -> None:
    chip = device(name).chip
    assert chip.num_sms == sms
    assert chip.register_bytes == sms * registers_kib * KiB
    assert chip.shared_bytes == sms * shared_kib * KiB
    assert chip.l2_bytes == l2_mib * MiB


def test_shared_memory_moves_128_bytes_a_clock_and_half_of_that_on_turing() -> None:
    for name, part in DEVICES.items():
        per_clock = part.chip.shared_bandwidth / part.chip.num_sms / part.chip.clock
        assert per_clock == pytest.approx(64 if name == "T4" else 128)
        assert part.chip.register_bandwidth == pytest.approx(
            part.chip.num_sms * part.chip.clock * part.chip.lanes_per_sm * 3 * 4
        )


# ---------------------------------------------------------------- peaks


@pytest.mark.parametrize(
    ("name", "teraflops", "terabytes", "gigabytes"),
    [
        ("T4", 65, 0.32, 16), ("A100-80GB", 312, 2.039, 80), ("H100", 989.4, 3.35, 80), ("H200", 989.4, 4.8, 141),
        ("GH200", 989.4, 4.0, 96), ("RTX4090", 165.2, 1.008, 24), ("L4", 121, 0.3, 24), ("MI300X", 1307.4, 5.3, 192),
        ("B200", 2250, 8.0, 180),
    ],
)  # fmt: skip
def test_dense_fp16_bandwidth_and_capacity_are_those_of_the_data_sheets(
    name: str, teraflops: float, terabytes: float, gigabytes: float
) -> None:
    part = device(name)
    assert part.peak("fp16") == teraflops * 1e12
    assert (part.bandwidth, part.capacity) == (pytest.approx(terabytes * 1e12), gigabytes * GB)


@pytest.mark.parametrize("name", DEVICES)
def test_sparsity_doubles_the_tensor_formats_and_no_other(name: str) -> None:
    part = device(name)
    for precision, peak in part.sparse_flops.items():
        assert peak == pytest.approx(2 * part.peak(precision))
        assert part.ridge(precision, sparse=True) == pytest.approx(2 * part.ridge(precision))
    assert "fp32" not in part.sparse_flops
    if part.sparse_flops:
        assert set(part.sparse_flops) == {*part.dense_flops} - {"fp32"}


@pytest.mark.parametrize("name", DEVICES)
def test_formats_are_ordered_by_their_bits(name: str) -> None:
    peaks = device(name).dense_flops
    order = [p for p in ("fp32", "tf32", "fp16", "fp8", "fp4") if p in peaks]
    assert [peaks[p] for p in order] == sorted(peaks[p] for p in order)
    assert peaks.get("bf16", peaks["fp16"]) == peaks["fp16"]
    if "tf32" in peaks:
        assert peaks["fp16"] == pytest.approx(2 * peaks["tf32"], rel=0.01)


def test_a_sparse_peak_where_there_is_none_is_refused() -> None:
    with pytest.raises(KeyError, match="no sparse peak for 'fp16'"):
        device("T4").peak("fp16", sparse=True)
    with pytest.raises(KeyError, match="no sparse peak for 'fp32'"):
        device("H100").ridge("fp32", sparse=True)


# ---------------------------------------------------------------- links of a device


def test_peers_are_reached_in_one_direction_over_nvlink_or_the_host_link() -> None:
    assert device("H100").link_per_direction == 450e9
    assert device("B200").link_per_direction == 900e9
    assert device("L4").link_per_direction == link("PCIe 4 x16").per_direction  # no link of its own
    for part in DEVICES.values():
        assert part.link is None or link(part.link).scope == "node"


def test_a_device_that_cannot_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"H100: expected bandwidth > 0, got 0"):
        replace(device("H100"), bandwidth=0)
    with pytest.raises(ValueError, match=r"H100: expected capacity > 0, got -1"):
        replace(device("H100"), capacity=-1)
    with pytest.raises(ValueError, match=r"expected a link of .*NVLink 4.*, got 'carrier pigeon'"):
        replace(device("H100"), link="carrier pigeon")
    with pytest.raises(ValueError, match="got 'string'"):
        replace(device("H100"), host_link="string")
