"""An engine in two processes: one plans, the other has the model. What goes between them are steps and replies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.speculation import BY_ITSELF, BY_MODEL, check_typical_sampler
from reference_impl.features.process.worker import Facts, WorkerProcess, fingerprint
from reference_impl.interfaces import Executor, FetchesPages, ReadsFields, Request
from reference_impl.models.checkpoints import read_config

if TYPE_CHECKING:
    from reference_impl.assembly.linear_methods import Quantizations


def facts_of(engine: Engine) -> Facts:
    """What a planner and a worker, two halves of one engine, must have in common."""
    from reference_impl.models.identity import weights_of

    model, stores = engine.model, isinstance(engine.kv, FetchesPages)
    name = fingerprint(model.config, str(model.dtype).removeprefix("torch."), weights_of(model) if stores else "")
    reads = frozenset(engine.executor.reads if isinstance(engine.executor, ReadsFields) else ())
    return Facts(
        name, tuple(engine.kv_specs), engine.num_blocks, engine.num_host_blocks, engine.config.max_num_seqs,
        engine.max_model_len, stores, reads,
    )  # fmt: skip


def load_worker(
    folder: Path, dtype: str, device: str, config: EngineConfig, make_parts: Callable[[], Parts] | None = None,
    quantization: Quantizations = "none",
) -> tuple[Executor, Facts]:  # fmt: skip
    """The worker of an engine of its own, with the model in `folder`; whatever plans in that engine is not used."""
    import torch

    from reference_impl.assembly.model import load_model
    from reference_impl.features.cpu.processor import use_no_more_threads_than_cores

    parts, typical = Parts() if make_parts is None else make_parts(), config.acceptance == "typical"
    if typical:  # the planner's side does not know the sampler
        check_typical_sampler(parts)
    drafts_itself = parts.proposer is not None or parts.draft_model is not None or config.speculative in BY_ITSELF
    if not drafts_itself:  # drafts, if there are any, come with the steps; open blocks have room for as many
        if config.num_drafts and config.speculative == "off":
            parts = dataclasses.replace(parts, host_proposer=NoDrafts())
        config = dataclasses.replace(config, acceptance="exact")
    if device == "cpu":
        use_no_more_threads_than_cores()
    model = load_model(folder, getattr(torch, dtype), device, config.max_model_len, config.attention, quantization)
    engine: Any = Engine(model, config, parts)
    engine.executor.drafting.typical = typical
    return engine.executor, facts_of(engine)


class NoDrafts:
    """In place of the planner's host proposer, which is in its own process."""

    def propose(self, request: Request, k: int) -> Sequence[int]:
        return ()


# Parts that lie in the worker's process.
COMPUTING = ("kv_cache", "attention", "sampler", "proposer", "draft_model", "executor")


def split_engine(
    folder: Path, config: EngineConfig | None = None, *, dtype: str = "float32", device: str = "cpu",
    parts: Parts | None = None, make_parts: Callable[[], Parts] | None = None, quantization: Quantizations = "none",
) -> Engine:  # fmt: skip
    """An engine that plans here, and whose model, of dtype, computes in another process on `device`.

    parts: those that plan. make_parts: called in the other process, where it is found by name (a function of a module,
    or a partial of one), gives those that compute. A page store is needed in both, over the same pages: one that says
    how it is pickled, as FolderStore does, is sent there; of any other make_parts gives the worker's. ValueError where
    parts are on the wrong side, planner and worker do not belong together, or the folder is broken; WorkerError
    where the worker does not start. `Engine.close` ends the process.
    """
    config, parts = config or EngineConfig(), parts or Parts()
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
    if parts.page_store is not None:
        make_parts = _with_store(parts.page_store, make_parts)
    make = partial(load_worker, folder, dtype, device, config, make_parts, quantization)
    worker = WorkerProcess(make, step_seconds=config.step_seconds)
    worker.follows_options = True
    try:
        planned = _as_there(config, worker.facts)
        elsewhere: Any = _Elsewhere()
        with_worker = dataclasses.replace(parts, executor=worker, kv_cache=elsewhere, attention=elsewhere)
        engine = Engine(outline(folder, dtype, device, quantization), planned, with_worker)
        facts_of(engine).check(worker.facts)
    except BaseException:
        worker.close()
        raise
    return engine


def _with_store(store: Any, make_parts: Callable[[], Parts] | None) -> Callable[[], Parts] | None:
    """Parts of the worker, a store over the same pages among them."""
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


def _as_there(config: EngineConfig, facts: Facts) -> EngineConfig:
    """With as many blocks as the worker has, where a draft model may have taken its share of the bytes."""
    blocks, each = facts.num_host_blocks, facts.kv_specs[0].bytes_per_block
    there = dataclasses.replace(config, num_blocks=facts.num_blocks, kv_cache_bytes=None)
    return dataclasses.replace(there, swap_bytes=blocks * each) if blocks else there


def outline(folder: Path, dtype: str, device: str = "cpu", quantization: Quantizations = "none") -> Any:
    """What planning asks of a model: its configuration, how many bytes a value of its cache has, and from where its
    weights are. None of them is here."""
    import torch

    from reference_impl.assembly.linear_methods import what_is_made
    from reference_impl.models.identity import Checkpoint

    config, kind = read_config(folder, quantized=True), SimpleNamespace(type=torch.device(device).type)
    rotary = SimpleNamespace(max_position=config.max_position)
    checkpoint = Checkpoint(Path(folder), what_is_made(quantization, config))
    return SimpleNamespace(
        config=config, dtype=getattr(torch, dtype), device=kind, rotary=rotary, checkpoint=checkpoint
    )


class _Elsewhere:
    """Cache and attention of an engine that only plans, with what 8 and 4 bits and trees need of them (HasScales,
    ReadsScales, TakesTrees)."""

    reads_scales = reads_four_bits = takes_trees = True

    def scales(self, layer: int) -> Any:
        raise RuntimeError("this engine only plans: its tensors lie in the worker's process")
