"""Checks whether the machine has the memory asked for, since otherwise the system would kill the process."""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING

from reference_impl.models.config_reader import ConfigError

if TYPE_CHECKING:
    import torch


def free_bytes(device: torch.device) -> int | None:
    """The bytes of memory available now; None if the system does not say."""
    if device.type == "cuda":
        import torch

        give_back(device)
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as lines:
            return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) << 10
    except (OSError, StopIteration, ValueError):
        try:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError):
            return None


def give_back(device: torch.device) -> None:
    """Frees unused GPU memory: first what only Python's collector finds, such as an earlier engine, then what torch
    caches."""
    if device.type == "cuda":
        import torch

        gc.collect()
        torch.cuda.empty_cache()


def check_free(wanted: int, free: int | None, what: str, where: str, remedy: str) -> None:
    """Raises ConfigError, with the numbers, if `wanted` bytes are more than `free`; None: enough."""
    if free is not None and wanted > free:
        raise ConfigError(
            f"{what} need {wanted / 2**30:.2f} GiB, and {where} has {free / 2**30:.2f} GiB free: {remedy}"
        )
