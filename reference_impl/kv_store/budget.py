"""How many blocks a budget in bytes pays for, and whether the machine has them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from reference_impl.config import ConfigError, EngineConfig
from reference_impl.interfaces import KVSpec

if TYPE_CHECKING:
    import torch


def num_blocks_for(config: EngineConfig, specs: Sequence[KVSpec]) -> int:
    """Blocks that the budget pays for. ConfigError with the numbers if it is not one."""
    each = specs[0].bytes_per_block
    blocks = config.num_blocks if config.num_blocks is not None else config.kv_cache_bytes // each
    if blocks < 1:
        raise ConfigError(
            f"kv_cache_bytes {config.kv_cache_bytes:,} does not pay for one block: {each:,} bytes for "
            f"{config.block_size} tokens. Give at least that, or a smaller block_size"
        )
    return blocks


def num_host_blocks_for(config: EngineConfig, specs: Sequence[KVSpec]) -> int:
    """Blocks in host memory for requests that are swapped out; 0 unless they are."""
    if config.preemption != "swap":
        return 0
    each = specs[0].bytes_per_block
    blocks = config.swap_bytes // each
    if blocks < 1:
        raise ConfigError(f"swap_bytes {config.swap_bytes:,} does not pay for one block of {each:,} bytes")
    return blocks


def check_memory(num_blocks: int, num_host_blocks: int, spec: KVSpec, device: torch.device) -> None:
    """ConfigError with the numbers if the machine has less than the cache would take."""
    import torch

    each = spec.bytes_per_block
    check_free(num_blocks * each, free_bytes(device), f"{num_blocks:,} KV blocks of {each:,} bytes", str(device))
    host = free_bytes(torch.device("cpu"))
    check_free(num_host_blocks * each, host, f"{num_host_blocks:,} blocks for swapping", "host memory")


def free_bytes(device: torch.device) -> int | None:
    """Memory that could be had now; None where the system does not say."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as lines:
            return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) << 10
    except (OSError, StopIteration, ValueError):
        try:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError):
            return None


def check_free(wanted: int, free: int | None, what: str, where: str) -> None:
    if free is not None and wanted > free:
        raise ConfigError(
            f"{what} need {wanted / 2**30:.2f} GiB, and {where} has {free / 2**30:.2f} GiB free: "
            "ask for less with kv_cache_bytes (or num_blocks, swap_bytes)"
        )
