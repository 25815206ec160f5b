"""How many warps a streaming multiprocessor (SM) holds at once: what a kernel uses against what an SM has.

Source: NVIDIA's `cuda_occupancy.h` (CUDA 13.0), with the CUDA C++ Programming Guide's table of technical specifications
per compute capability for the limits; AMD: LLVM's AMDGPU backend and the CDNA 3 ISA document. Shared memory is assumed
to be carved out of the L1 cache as far as it goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reference_impl.theory.units import KiB


@dataclass(frozen=True)
class SM:
    """What one SM (a compute unit on AMD) has. Registers are 32 bits wide and belong to warps, shared bytes to blocks.

    register_unit: registers are allocated to a warp in multiples of this. shared_reserved: bytes that the system
    reserves per block. max_lone_warps: the limit instead of max_blocks for blocks of one warp, which need no barrier on
    AMD.
    """

    name: str
    parts: str
    max_warps: int
    max_blocks: int
    shared_bytes: int
    shared_unit: int = 128
    shared_reserved: int = 1024
    registers: int = 65_536
    register_unit: int = 256
    max_registers: int = 255  # of a thread
    max_threads: int = 1024  # of a block
    warp_size: int = 32
    partitions: int = 4  # each has a quarter of the registers and a warp scheduler
    max_lone_warps: int | None = None


def _kib(n: int) -> int:
    return int(n * KiB)


SMS: Mapping[str, SM] = {
    sm.name: sm
    for sm in (
        SM("sm_75", "T4", 32, 16, _kib(64), shared_unit=256, shared_reserved=0),
        SM("sm_80", "A100", 64, 32, _kib(164)),
        SM("sm_86", "A10, RTX 30", 48, 16, _kib(100)),
        SM("sm_89", "L4, L40S, RTX 40", 48, 24, _kib(100)),
        SM("sm_90", "H100, H200", 64, 32, _kib(228)),
        SM("sm_100", "B200", 64, 32, _kib(228)),
        SM(
            "gfx942", "MI300X", 32, 16, _kib(64), shared_unit=512, shared_reserved=0, registers=131_072,
            register_unit=512, max_registers=512, warp_size=64, max_lone_warps=32,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Occupancy:
    """Blocks of a kernel that one SM holds. limits: the blocks that each resource alone would allow; resources that the
    kernel does not use are left out.
    """

    sm: SM
    warps_per_block: int
    limits: Mapping[str, int]

    @property
    def blocks(self) -> int:
        return min(self.limits.values())

    @property
    def warps(self) -> int:
        return self.blocks * self.warps_per_block

    @property
    def share(self) -> float:
        """Warps held over warps that the SM could hold: what profilers call theoretical occupancy."""
        return self.warps / self.sm.max_warps

    @property
    def binding(self) -> tuple[str, ...]:
        """The resources that run out first."""
        return tuple(name for name, limit in self.limits.items() if limit == self.blocks)


def occupancy(sm_name: str, num_warps: int, registers: int, shared_bytes: int) -> Occupancy:
    """How many blocks fit. registers: per thread; shared_bytes, num_warps: per block. Zero: it cannot be launched."""
    if sm_name not in SMS:
        raise ValueError(f"expected one of {', '.join(SMS)}, got {sm_name!r}")
    if num_warps < 1 or registers < 0 or shared_bytes < 0:
        raise ValueError(
            f"expected num_warps >= 1, registers and shared_bytes >= 0, got {num_warps}, {registers}, {shared_bytes}"
        )
    sm = SMS[sm_name]
    most_blocks = sm.max_lone_warps if num_warps == 1 and sm.max_lone_warps else sm.max_blocks
    fits_a_block = num_warps * sm.warp_size <= sm.max_threads
    limits = {"warps": sm.max_warps // num_warps if fits_a_block else 0, "blocks": most_blocks}
    if registers:
        limits["registers"] = _by_registers(sm, num_warps, registers)
    if of_a_block := _round_up(shared_bytes + sm.shared_reserved, sm.shared_unit):
        limits["shared memory"] = sm.shared_bytes // of_a_block
    return Occupancy(sm, num_warps, limits)


def _by_registers(sm: SM, num_warps: int, registers: int) -> int:
    """Blocks that registers allow. Whole warps go to a quarter of the SM each; what is left in each quarter is lost."""
    of_a_warp = _round_up(registers * sm.warp_size, sm.register_unit)
    if registers > sm.max_registers:
        return 0
    return sm.registers // sm.partitions // of_a_warp * sm.partitions // num_warps


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def waves(num_blocks: int, num_sms: int, blocks_per_sm: int) -> int:
    """Rounds in which a grid of equal blocks runs: the last may be nearly empty, and takes as long as the others."""
    return -(-num_blocks // (num_sms * blocks_per_sm))


def wave_efficiency(num_blocks: int, num_sms: int, blocks_per_sm: int) -> float:
    """Share of the places that hold a block, over all waves."""
    return num_blocks / (waves(num_blocks, num_sms, blocks_per_sm) * num_sms * blocks_per_sm)


def bytes_in_flight(bandwidth: float, latency: float) -> float:
    """Bytes that must be requested and not yet delivered, to keep memory busy: bandwidth x latency (Little's law)."""
    return bandwidth * latency
