"""An engine in two processes: one plans, the other has the model. They exchange steps and replies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reference_impl.assembly.checks import settled
from reference_impl.assembly.config import EngineConfig, ModelConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.speculation import BY_MODEL
from reference_impl.assembly.worker_half import WorkerHalf, kv_specs_of
from reference_impl.features.process.facts import PROTOCOL, Facts, combined
from reference_impl.features.process.worker import WorkerProcess
from reference_impl.interfaces import Executor
from reference_impl.models.checkpoints import read_config

if TYPE_CHECKING:
    from reference_impl.assembly.linear_methods import Quantizations
    from reference_impl.features.parallel.model import ModelPart


def load_worker(
    folder: Path, dtype: str, device: str, config: EngineConfig, make_parts: Callable[[], Parts] | None = None,
    quantization: Quantizations = "none", rank: ModelPart | None = None,
) -> tuple[Executor, Facts]:  # fmt: skip
    """Loads the model in `folder`, or a rank's part of it, into a worker half; returns its executor and its facts."""
    import torch

    from reference_impl.assembly.model import load_model
    from reference_impl.features.cpu.processor import use_no_more_threads_than_cores

    parts = Parts() if make_parts is None else make_parts()
    config = settled(config, parts)
    if device == "cpu":
        use_no_more_threads_than_cores()
    options = getattr(torch, dtype), device, config.max_model_len, config.attention, quantization
    model = load_model(folder, *options, rank=rank)
    half = WorkerHalf(model, config, parts)
    return half.executor, half.facts


# Parts that lie in the worker's process.
COMPUTING = ("kv_cache", "attention", "sampler", "proposer", "draft_model", "executor")


def split_engine(
    folder: Path, config: EngineConfig | None = None, *, dtype: str = "float32", device: str = "cpu",
    parts: Parts | None = None, make_parts: Callable[[], Parts] | None = None, quantization: Quantizations = "none",
) -> Engine:  # fmt: skip
    """An engine that plans here, and whose model, in dtype, computes in another process on `device`.

    parts: those that plan. make_parts: gives those that compute; called in the other process, where it is found by name
    (a function of a module, or a partial of one). A page store is needed in both, over the same pages: one that says
    how it is pickled, such as FolderStore, is sent there; for any other, make_parts gives the worker's. ValueError
    where parts are on the wrong side, planner and worker do not belong together, or the folder is broken; WorkerError
    where the worker does not start. `Engine.close` ends the process.
    """
    config, parts = config or EngineConfig(), parts or Parts()
    check_split(config, parts, make_parts)
    if parts.page_store is not None:
        make_parts = _with_store(parts.page_store, make_parts)
    make = partial(load_worker, folder, dtype, device, config, make_parts, quantization)
    worker = WorkerProcess(make, step_seconds=config.step_seconds)
    try:
        expected = _as_planned(worker.facts, read_config(folder, quantized=True), dtype, config, parts)
        worker.facts = combined([expected, worker.facts])
        return Engine(worker.facts.model, config, dataclasses.replace(parts, executor=worker))
    except BaseException:
        worker.close()
        raise


def check_split(config: EngineConfig, parts: Parts, make_parts: Callable[[], Parts] | None) -> None:
    """Raises ValueError where parts are on the wrong side: they compute, and the model is elsewhere."""
    theirs = [name for name in COMPUTING if getattr(parts, name) is not None]
    if theirs:
        raise ValueError(
            f"split_engine: these parts would be in the other process: {', '.join(theirs)}; give them by make_parts"
        )
    asks = config.speculative in BY_MODEL or (config.num_drafts and config.speculative == "off")
    if asks and parts.host_proposer is None and make_parts is None:
        raise ValueError(
            f"split_engine: num_drafts={config.num_drafts} needs a proposer: Parts(host_proposer=...), or make_parts, "
            "which gives Parts(proposer=...) or Parts(draft_model=...)"
        )


def _as_planned(worker: Facts, model: ModelConfig, dtype: str, config: EngineConfig, parts: Parts) -> Facts:
    """The worker's facts, with the planner's own in place of those that it knows by itself."""
    import torch

    return dataclasses.replace(
        worker, model=dataclasses.replace(worker.model, config=model, dtype=f"torch.{dtype}"),
        kv_specs=kv_specs_of(model, getattr(torch, dtype), config, worker.max_model_len),
        max_num_seqs=config.max_num_seqs, page_store=parts.page_store is not None, protocol=PROTOCOL,
    )  # fmt: skip


def _with_store(store: Any, make_parts: Callable[[], Parts] | None) -> Callable[[], Parts] | None:
    """A function that makes the worker's parts, with a store over the same pages. ValueError where the store does not
    say how it is pickled and there is no make_parts."""
    if any("__reduce__" in vars(kind) for kind in type(store).__mro__ if kind is not object):
        return partial(_and_store, store, make_parts)
    if make_parts is None:
        raise ValueError(
            f"split_engine: Parts.page_store, {type(store).__name__}, does not say how it is pickled (__reduce__), and "
            "a copy would have other pages: give make_parts, which opens one over the same pages in the other process, "
            "or use FolderStore"
        )
    return make_parts


def _and_store(store: Any, make_parts: Callable[[], Parts] | None) -> Parts:
    parts = Parts() if make_parts is None else make_parts()
    return parts if parts.page_store is not None else dataclasses.replace(parts, page_store=store)
