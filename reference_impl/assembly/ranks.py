"""An engine whose model is divided among ranks (tensor parallelism): processes of this machine, or threads of this one.

Each rank is a worker half like any other, with its part of the model; the planner half is here.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.split import check_split, load_worker
from reference_impl.features.parallel.group import RankExecutor, RankProcesses, RankThreads
from reference_impl.features.parallel.model import RankModel
from reference_impl.features.parallel.shared_memory import Board, SharedMemoryRank, supported
from reference_impl.features.parallel.threads import ThreadGroup
from reference_impl.features.process.facts import Facts
from reference_impl.interfaces import Executor

if TYPE_CHECKING:
    from reference_impl.assembly.linear_methods import Quantizations
    from reference_impl.features.parallel.meeting import Meeting

MOST_SECONDS = 30  # between two collectives


def ranked_engine(
    folder: Path, config: EngineConfig, *, dtype: str = "float32", device: str = "cpu", parts: Parts | None = None,
    make_parts: Callable[[], Parts] | None = None, quantization: Quantizations = "none",
    ranks: Literal["processes", "threads"] = "processes",
) -> Engine:  # fmt: skip
    """An engine with config.tensor_parallel_size ranks. Other arguments: see `split_engine`.

    ValueError for what is not divided among ranks yet, and where heads or groups of weights cannot be.
    """
    parts, size = parts or Parts(), config.tensor_parallel_size
    check_split(config, parts, make_parts)
    _check_divided(config, parts, device)
    config = dataclasses.replace(config, attention="torch", graphs="off")
    seconds = min(config.step_seconds, MOST_SECONDS)
    load = partial(load_worker, folder, dtype, device, config, make_parts, quantization)
    if ranks == "threads":
        group = ThreadGroup(size, seconds)
        executor: RankProcesses | RankThreads = RankThreads(
            [partial(_rank, load, group.rank(rank)) for rank in range(size)], group
        )
    else:
        if not supported():
            raise ValueError(
                f"tensor_parallel_size={size} on {platform.system()} {platform.machine()}: expected Linux on x86-64, "
                "whose cores see what another core wrote in its order: worker='threads' has ranks in this process"
            )
        board = Board(size)
        makes = [partial(_rank_process, load, rank, size, board.path, seconds) for rank in range(size)]
        executor = RankProcesses(makes, board, seconds)
    try:
        return Engine(executor.facts.model, config, dataclasses.replace(parts, executor=executor))
    except BaseException:
        executor.close()
        raise


def _rank_process(
    load: Callable[..., tuple[Executor, Facts]], rank: int, size: int, board: Path, seconds: float
) -> tuple[Executor, Facts]:
    import torch

    torch.set_num_threads(max(1, torch.get_num_threads() // size))
    # The planner ends all ranks first, with a better message: it knows them all.
    return _rank(load, SharedMemoryRank(rank, Board(size, board), 2 * seconds))


def _rank(load: Callable[..., tuple[Executor, Facts]], collectives: Meeting) -> tuple[Executor, Facts]:
    executor, facts = load(rank=RankModel(collectives))
    return RankExecutor(executor, collectives), facts


def _check_divided(config: EngineConfig, parts: Parts, device: str) -> None:
    """Raises ValueError, by name, for options that do not go with ranks."""
    size, store = config.tensor_parallel_size, type(parts.page_store).__name__
    wrong = [
        (config.attention in ("triton", "compiled"), f"attention={config.attention!r}", "its products are joined"),
        (config.overlap == "on", "overlap='on'", "ranks do one step after the other"),
        (config.graphs == "on", "graphs='on'", "CUDA graphs of collectives are not captured"),
        (device != "cpu", f"device={device!r}", "there is no transport between GPUs; device='cpu' has ranks on CPUs"),
        (parts.page_store is not None, f"Parts.page_store, {store}", "its pages would hold the heads of one rank"),
    ]
    for is_asked, what, why in wrong:
        if is_asked:
            raise ValueError(f"tensor_parallel_size={size} with {what}: {why}. Leave one of the two out")
