"""Occupancy agrees with NVIDIA's own calculator, and its limits with what a machine can hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.theory import occupancy as theory
from reference_impl.theory.hardware import device
from reference_impl.theory.occupancy import SMS, occupancy

# (architecture, warps per block, registers, shared bytes) -> (blocks, which resource limits them). From NVIDIA's
# cuda_occupancy.h of CUDA 13.0, compiled, with the shared memory carved out as far as it goes; of 53,940 cases in which
# both agreed (2026-11-22), some for each architecture and limit, those at an edge among them.
NVIDIA = [
    ("sm_100", 24, 200, 130000, 0, ""),
    ("sm_100", 1, 31, 1000, 32, "blocks"),
    ("sm_100", 5, 224, 1024, 1, "registers"),
    ("sm_100", 32, 31, 130000, 1, "shared memory"),
    ("sm_100", 32, 8, 16384, 2, "warps"),
    ("sm_75", 32, 24, 101376, 0, ""),
    ("sm_75", 1, 1, 0, 16, "blocks"),
    ("sm_75", 8, 200, 128, 1, "registers"),
    ("sm_75", 2, 254, 40960, 1, "shared memory"),
    ("sm_75", 3, 40, 1000, 10, "warps"),
    ("sm_80", 12, 169, 110000, 0, ""),
    ("sm_80", 8, 144, 50000, 1, "registers"),
    ("sm_80", 5, 8, 101377, 1, "shared memory"),
    ("sm_80", 8, 24, 1000, 8, "warps"),
    ("sm_86", 8, 144, 116736, 0, ""),
    ("sm_86", 2, 32, 4096, 16, "blocks"),
    ("sm_86", 2, 190, 16, 4, "registers"),
    ("sm_86", 4, 56, 33000, 3, "shared memory"),
    ("sm_89", 1, 32, 232449, 0, ""),
    ("sm_89", 1, 31, 128, 24, "blocks"),
    ("sm_89", 5, 80, 16, 4, "registers"),
    ("sm_89", 2, 80, 17000, 5, "shared memory"),
    ("sm_90", 32, 207, 1000, 0, ""),
    ("sm_90", 3, 190, 16384, 2, "registers"),
    ("sm_90", 1, 100, 32768, 6, "shared memory"),
    ("sm_90", 5, 1, 8192, 12, "warps"),
]


@pytest.mark.parametrize(("name", "warps", "registers", "shared", "blocks", "binding"), NVIDIA)
def test_blocks_and_what_limits_them_are_those_of_nvidias_calculator(
    name: str, warps: int, registers: int, shared: int, blocks: int, binding: str
) -> None:
    it = occupancy(name, warps, registers, shared)
    assert it.blocks == blocks
    assert it.binding == (binding,) or blocks == 0
    assert it.share == blocks * warps / SMS[name].max_warps


def test_the_edges_of_each_resource() -> None:
    # 64 registers x 128 threads x 8 blocks are all 65,536; one register more costs a whole block.
    assert [occupancy("sm_80", 4, n, 0).blocks for n in (64, 65, 72, 73)] == [8, 7, 7, 6]
    # The system keeps a KiB of each block: 113 KiB twice fit into 228 KiB, 114 do not.
    assert [occupancy("sm_90", 4, 32, kib * 1024).blocks for kib in (113, 114, 227, 228)] == [2, 1, 1, 0]
    assert occupancy("sm_90", 33, 16, 0).blocks == 0, "a block has at most 1,024 threads"
    assert occupancy("sm_90", 4, 256, 0).blocks == 0, "a thread has at most 255 registers"


def test_a_compute_unit_of_amd_holds_up_to_eight_waves_per_simd_by_registers() -> None:
    """LLVM: 512 registers per lane and SIMD, in eights; 64 KiB of local data share; 16 work-groups with barriers."""
    waves = {64: 8, 65: 7, 72: 7, 80: 6, 96: 5, 128: 4, 168: 3, 256: 2, 257: 1, 512: 1}
    for registers, per_simd in waves.items():
        limits = occupancy("gfx942", 1, registers, 0).limits
        assert limits["registers"] == 4 * per_simd
    assert occupancy("gfx942", 4, 164, 32 * 1024).blocks == 2
    assert occupancy("gfx942", 1, 8, 0).blocks == 32
    assert occupancy("gfx942", 2, 8, 0).blocks == 16
    assert occupancy("gfx942", 4, 8, 65_537).blocks == 0


@given(
    st.sampled_from(sorted(SMS)), st.integers(1, 32), st.integers(0, 260), st.integers(0, 240_000), st.integers(0, 999)
)
def test_a_kernel_that_takes_more_never_leaves_room_for_more(
    name: str, warps: int, registers: int, shared: int, more: int
) -> None:
    it = occupancy(name, warps, registers, shared)
    assert it.blocks <= occupancy(name, warps, max(0, registers - more % 40), max(0, shared - more)).blocks
    assert 0 <= it.share <= 1
    sm, blocks = it.sm, it.blocks
    assert blocks * warps * sm.warp_size * registers <= sm.registers
    assert blocks * (shared + sm.shared_reserved) <= sm.shared_bytes


def test_sizes_are_those_of_the_data_sheets_in_hardware() -> None:
    parts = {"sm_75": "T4", "sm_80": "A100-80GB", "sm_90": "H100", "sm_100": "B200", "gfx942": "MI300X"}
    for name, part in parts.items():
        chip, sm = device(part).chip, SMS[name]
        assert chip.shared_bytes_per_sm == sm.shared_bytes
        assert chip.register_bytes_per_sm == 4 * sm.registers


def test_waves_count_the_rounds_of_a_grid() -> None:
    assert [theory.waves(n, 132, 1) for n in (1, 132, 133, 264)] == [1, 1, 2, 2]
    assert theory.wave_efficiency(133, 132, 1) == pytest.approx(0.504, abs=5e-4)
    assert theory.wave_efficiency(264, 132, 2) == 1


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="expected one of sm_75.*got 'sm_60'"):
        occupancy("sm_60", 4, 32, 0)
    with pytest.raises(ValueError, match="num_warps >= 1"):
        occupancy("sm_90", 0, 32, 0)
