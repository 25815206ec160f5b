"""Computes how many blocks a budget in bytes pays for, and checks whether the machine has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reference_impl.features.sizing.memory import check_free, free_bytes
from reference_impl.models.config_reader import ConfigError

if TYPE_CHECKING:
    import torch

    from reference_impl.assembly.config import EngineConfig


KV_CACHE_BYTES = 256 * 2**20  # where EngineConfig does not say, and no device is to be filled
LESS = "ask for less with kv_cache_bytes (or num_blocks, swap_bytes)"


def num_blocks_for(config: EngineConfig, each: int) -> int:
    """The number of blocks, of `each` bytes, that the budget pays for. ConfigError, with the numbers, if none."""
    budget = KV_CACHE_BYTES if config.kv_cache_bytes is None else config.kv_cache_bytes
    blocks = config.num_blocks if config.num_blocks is not None else budget // each
    if blocks < 1:
        raise ConfigError(
            f"kv_cache_bytes {budget:,} does not pay for one block: {each:,} bytes for "
            f"{config.block_size} tokens. Give at least that, or a smaller block_size"
        )
    return blocks


def num_host_blocks_for(config: EngineConfig, each: int) -> int:
    """The number of blocks in host memory, of `each` bytes, for requests that are swapped out; 0 without swapping.
    ConfigError, with the numbers, if the budget does not pay for one."""
    if config.preemption != "swap":
        return 0
    blocks = config.swap_bytes // each
    if blocks < 1:
        raise ConfigError(
            f"swap_bytes {config.swap_bytes:,} does not pay for one block of {each:,} bytes: give at least that, or a "
            "smaller block_size"
        )
    return blocks


def check_memory(num_blocks: int, num_host_blocks: int, each: int, device: torch.device) -> None:
    """Raises ConfigError, with the numbers, if the machine has less memory than the cache would take, with blocks of
    `each` bytes."""
    import torch

    blocks, free = f"{num_blocks:,} KV blocks of {each:,} bytes", free_bytes(device)
    check_free(num_blocks * each, free, blocks, str(device), LESS)
    wanted, host = num_host_blocks * each, free_bytes(torch.device("cpu"))
    if wanted and device.type == "cuda":
        wanted = 1 << (wanted - 1).bit_length()  # of pinned memory torch takes powers of two
    check_free(wanted, host, f"{num_host_blocks:,} blocks for swapping", "host memory", LESS)
