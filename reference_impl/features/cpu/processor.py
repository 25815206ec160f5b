"""What this CPU can do: whether it computes in bf16, and how many threads it has room for."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path

import torch

from reference_impl.features.cpu.default import default_method

_THREADS_ARE_SET_BY = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@functools.cache
def cpu_has_bf16() -> bool:
    """Whether bf16 pays: the CPU says that it multiplies it (AVX512-BF16 or AMX), and it is seen to be as fast as
    float32. Without the first no measurement could help; without the second a hypervisor, or ONEDNN_MAX_CPU_ISA, takes
    away what the flag promises. Measured once, on linear layers of the engine: about 15 ms.
    """
    if not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        return False
    bf16, fp32 = _seconds_of_products((torch.bfloat16, torch.float32))
    return bf16 < 1.25 * fp32  # as fast will do: it takes half the memory. Seen: 0.6, and 2.5 without the instructions


@torch.inference_mode()
def _seconds_of_products(dtypes: tuple[torch.dtype, ...], size: int = 768, rounds: int = 5) -> list[float]:
    """The seconds that products of 1 and 16 rows with one weight [size, size] take in each dtype: processor time of one
    thread, the least of some rounds, so that whatever else the machine does has little influence."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    best = []
    for dtype in dtypes:
        method = default_method(dtype, torch.device("cpu"))
        params = method.create(size, size, False)
        method.load(params, "weight", torch.ones(size, size, dtype=dtype), 0)
        method.finish(params)
        inputs, seconds = [torch.ones(rows, size, dtype=dtype) for rows in (1, 16)], []
        for _ in range(rounds + 1):  # the first prepares
            start = time.thread_time()
            for x in inputs:
                method.apply(params, x)
            seconds.append(time.thread_time() - start)
        best.append(min(seconds[1:]))
    torch.set_num_threads(threads)
    return best


def use_no_more_threads_than_cores() -> None:
    """Lowers torch's number of threads to the cores that are usable. torch counts the machine's cores; a container's
    share may be smaller, and threads beyond it wait for each other in every product. Never raises the number, and
    changes nothing where OMP_NUM_THREADS or MKL_NUM_THREADS is set."""
    if not any(os.environ.get(name) for name in _THREADS_ARE_SET_BY) and usable_cores() < torch.get_num_threads():
        torch.set_num_threads(usable_cores())


def usable_cores(system: Path = Path("/sys"), process: Path = Path("/proc/self")) -> int:
    """The number of physical cores that this process may use, at least 1: by its affinity, then by the CPU quota of its
    cgroup (version 2), rounded up. What a system does not tell does not limit it."""
    if not hasattr(os, "sched_getaffinity"):  # macOS, Windows
        return os.cpu_count() or 1
    cpus = os.sched_getaffinity(0)
    siblings = (system / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list" for cpu in cpus)
    cores = len({_read(path) or str(path) for path in siblings})
    groups = [line.removeprefix("0::/") for line in _read(process / "cgroup").splitlines() if line.startswith("0::/")]
    for group in groups:
        for folder in (Path(group), *Path(group).parents):
            quota, _, period = _read(system / "fs/cgroup" / folder / "cpu.max").partition(" ")
            if quota.isdigit():
                cores = min(cores, -(-int(quota) // int(period)))
    return max(cores, 1)


def _read(path: Path) -> str:
    """The text of a file without the line's end; "" if it cannot be read."""
    try:
        return path.read_text("utf-8").strip()
    except OSError:
        return ""
