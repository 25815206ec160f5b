"""An engine whose model is divided among ranks: processes of this machine, or threads of this one.

Each rank is a worker half like any other, with its part of every layer (tensor parallelism), with some of the layers
(pipeline parallelism), or with its part of some; the planner half is here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from reference_impl.assembly.config import ConfigError, EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.split import check_split, load_worker
from reference_impl.features.parallel.group import RankExecutor, RankProcesses, RankThreads
from reference_impl.features.parallel.loading import bytes_of_layers
from reference_impl.features.parallel.meeting import Meeting
from reference_impl.features.parallel.model import ModelPart
from reference_impl.features.parallel.shared_memory import Board, SharedMemoryRank, supported
from reference_impl.features.parallel.shares import stages_of
from reference_impl.features.parallel.stages import Stages, part_of
from reference_impl.features.parallel.threads import ThreadGroup
from reference_impl.features.process.facts import Facts
from reference_impl.interfaces import Executor
from reference_impl.models.checkpoints import is_gguf, read_config

if TYPE_CHECKING:
    from reference_impl.assembly.linear_methods import Quantizations

MOST_SECONDS = 30  # between two collectives
Part: TypeAlias = Callable[[Meeting], ModelPart]
Load: TypeAlias = Callable[..., tuple[Executor, Facts]]


def ranked_engine(
    folder: Path, config: EngineConfig, *, dtype: str = "float32", device: str = "cpu", parts: Parts | None = None,
    make_parts: Callable[[], Parts] | None = None, quantization: Quantizations = "none",
    ranks: Literal["processes", "threads", "gloo"] = "processes",
) -> Engine:  # fmt: skip
    """An engine with config.tensor_parallel_size ranks in each of pipeline_parallel_size stages. ranks: "processes"
    meet in memory that they share, or where that is not supported through "gloo". Other arguments: see `split_engine`.

    ValueError for what is not divided among ranks yet, and where heads, layers or groups of weights cannot be.
    """
    parts = parts or Parts()
    check_split(config, parts, make_parts)
    _check_divided(config, parts, device)
    if is_gguf(folder):
        raise ConfigError(f"{folder}: a GGUF file is not divided among ranks: use one")
    stages, layers = Stages(config.pipeline_parallel_size, config.tensor_parallel_size), None
    if stages.num_stages > 1:
        layers = stages_of(*bytes_of_layers(folder, read_config(folder, quantized=True).num_layers), stages.num_stages)
    part: Part = partial(part_of, layers=layers, by_expert=config.enable_expert_parallel)
    config = dataclasses.replace(config, attention="torch", graphs="off")
    seconds = min(config.step_seconds, MOST_SECONDS)
    load = partial(load_worker, folder, dtype, device, config, make_parts, quantization)
    if ranks == "threads":
        group = ThreadGroup(stages.size, seconds if layers is None else config.step_seconds, stages.width)
        executor: RankProcesses | RankThreads = RankThreads(
            [partial(_rank, load, part, group.rank(rank)) for rank in range(stages.size)], group, stages
        )
    else:
        board = Board(stages.size)
        with TemporaryDirectory(prefix="inferlab-ranks-") as folder_of_ranks:
            store = None if ranks == "processes" and supported() else Path(folder_of_ranks, "addresses")
            place = Place(stages.size, stages.width, board.path, store, seconds, config.step_seconds)
            makes = [partial(_rank_process, load, part, rank, place) for rank in range(stages.size)]
            executor = RankProcesses(makes, board, seconds, stages)
    try:
        return Engine(executor.facts.model, config, dataclasses.replace(parts, executor=executor))
    except BaseException:
        executor.close()
        raise


class Place(NamedTuple):
    """Where ranks that are processes meet. size: of all; width: of those of a stage; board: its path; store: the file
    of gloo's addresses, None where tensors are on the board, too; see `GlooRank`."""

    size: int
    width: int
    board: Path
    store: Path | None
    seconds: float
    message_seconds: float


def _rank_process(load: Load, part: Part, rank: int, place: Place) -> tuple[Executor, Facts]:
    import torch

    torch.set_num_threads(max(1, torch.get_num_threads() // place.size))
    # The planner ends all ranks first, with a better message: it knows them all.
    board, seconds = Board(place.size, place.board), 2 * place.seconds
    if place.store is None:
        return _rank(load, part, SharedMemoryRank(rank, board, seconds, place.width))
    from reference_impl.features.parallel.gloo import GlooRank

    return _rank(load, part, GlooRank(rank, board, place.store, seconds, place.width, 2 * place.message_seconds))


def _rank(load: Load, part: Part, rank: Meeting) -> tuple[Executor, Facts]:
    executor, facts = load(rank=part(rank))
    return RankExecutor(executor, rank), facts


def _asked(config: EngineConfig) -> str:
    sizes = {name: getattr(config, name) for name in ("tensor_parallel_size", "pipeline_parallel_size")}
    return " and ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)


def _check_divided(config: EngineConfig, parts: Parts, device: str) -> None:
    """Raises ValueError, by name, for options that do not go with ranks."""
    asked, store, stages = _asked(config), type(parts.page_store).__name__, config.pipeline_parallel_size > 1
    drafts = parts.host_proposer is not None or config.num_drafts
    drafting, method = "is tried by all stages, and only the last one knows", config.speculative
    wrong = [
        (config.attention in ("triton", "compiled"), f"attention={config.attention!r}", "its products are joined"),
        (config.overlap == "on" and not stages, "overlap='on'", "ranks do one step after the other"),
        (config.graphs == "on", "graphs='on'", "CUDA graphs of collectives are not captured"),
        (device != "cpu", f"device={device!r}", "there is no transport between GPUs; device='cpu' has ranks on CPUs"),
        (parts.page_store is not None, f"Parts.page_store, {store}", "its pages would hold the heads of one rank"),
        (stages and method != "off", f"speculative={method!r}", f"a draft {drafting} which were right"),
        (stages and method == "off" and bool(drafts), "drafts", f"a draft {drafting} which were right"),
    ]
    for is_asked, what, why in wrong:
        if is_asked:
            raise ValueError(f"{asked} with {what}: {why}. Leave one of the two out")
