"""New weights for an engine that runs, as in reinforcement learning, where a model writes with weights that are trained
meanwhile (in-flight weight updates: PipelineRL, Piche et al. 2025).

    pause     collect the steps in flight
    load      another checkpoint of the same model, beside the weights in use; if anything is wrong, nothing has changed
    use       copy it into their place: CUDA graphs, draft models and all else that reads them stay as they are
    forget    keys and values of the old weights: the prefix cache, and what unfinished requests have computed

Requests go on. What they have written stays, and its keys and values are computed again, so each token is drawn from
the model that is in use when it is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from reference_impl.assembly.engine import Engine
from reference_impl.core.decoder import Decoder
from reference_impl.core.kv_manager import KVManager
from reference_impl.core.linear import Linear
from reference_impl.core.model_config import ModelConfig
from reference_impl.core.scheduler import Scheduler
from reference_impl.features.compiled.decoder import CompiledDecoder
from reference_impl.features.cpu.operators import HeadCopy
from reference_impl.features.parallel.model import RankHead
from reference_impl.interfaces import UpdatesWeights
from reference_impl.models.checkpoints import is_gguf, read_config
from reference_impl.models.identity import tensors_of
from reference_impl.models.quantization.head import all_linears
from reference_impl.models.quantization.layouts import Layout
from reference_impl.models.quantization.stored import Stored

if TYPE_CHECKING:
    from reference_impl.core.llm import LLM


def update_weights(llm: LLM, folder: Path) -> None:
    """See `LLM.update_weights`."""
    engine = llm.engine
    assert isinstance(engine, Engine)
    executor, scheduler, kv = _checked(engine, folder)
    while engine.in_flight:
        llm.step(submit=False)
    executor.load_weights(folder)
    try:
        executor.use_weights()
    except BaseException as error:  # some weights may be new, and some old
        engine.lost = error
        raise
    for request in engine.requests.values():
        if request.block_table or request.num_computed_tokens:
            scheduler.restart(request)
            engine.planner.close(request.id)
    kv.references.forget(kv.references.indexed)


def _checked(engine: Engine, folder: Path) -> tuple[UpdatesWeights, Scheduler, KVManager]:
    """The parts that an update needs. ValueError where they are others, or the checkpoint is of another model."""
    engine.check_not_lost()
    wrong = [
        (engine.moves_pages, "a page store", "its pages were computed with the old weights"),
        (
            any(r.holds for r in engine.requests.values()),
            "a beam search under way",
            "its branches share what is computed",
        ),
        (is_gguf(folder), f"{folder}", "of a GGUF file only a new engine is made"),
    ]
    for is_so, what, why in wrong:
        if is_so:
            raise ValueError(f"update_weights with {what}: {why}. Make a new engine")
    executor, scheduler, kv = engine.executor, engine.scheduler, engine.kv
    if not (isinstance(executor, UpdatesWeights) and isinstance(scheduler, Scheduler) and isinstance(kv, KVManager)):
        names = ", ".join(type(part).__name__ for part in (executor, scheduler, kv))
        raise ValueError(f"update_weights: expected the engine's own executor, scheduler and KV manager, got {names}")
    mine, new = engine.model.config.whole, read_config(folder, quantized=True)
    if differ := [field.name for field in fields(ModelConfig) if getattr(mine, field.name) != getattr(new, field.name)]:
        found = ", ".join(f"{name} {getattr(new, name)!r} in place of {getattr(mine, name)!r}" for name in differ)
        raise ValueError(f"{folder}: expected weights for the model in use, got another model's: {found}")
    return executor, scheduler, kv


# --- in the worker ----------------------------------------------------------------------------------------------------


def loaded(model: Decoder, folder: Path) -> Decoder:
    """Another checkpoint, loaded as the model was. ValueError for a model that cannot take one."""
    if model.load_again is None:
        raise ValueError("update_weights: expected a model that was loaded from a folder of safetensors")
    if isinstance(model, CompiledDecoder):
        raise ValueError("update_weights with attention='compiled': its code has packed weights. Make a new engine")
    new = model.load_again(folder)
    for mine, other in zip_longest(map(_stored_as, all_linears(model)), map(_stored_as, all_linears(new))):
        if mine != other:
            raise ValueError(
                f"{folder}: expected weights that are stored as those in use, or plain as they are, got others: "
                f"{_named(other)} in place of {_named(mine)}. Make a new engine"
            )
    for (name, old), (_, tensor) in zip(tensors_of(model), tensors_of(new), strict=True):
        if (old.shape, old.dtype) != (tensor.shape, tensor.dtype):
            raise ValueError(
                f"{folder}: {name}: expected {list(old.shape)}, {old.dtype}, as in the model in use, got "
                f"{list(tensor.shape)}, {tensor.dtype}"
            )
    return new


def _stored_as(linear: Linear) -> tuple[type, Mapping[str, Layout] | None]:
    """How a layer's weights are stored: codes of one shape may stand for other weights."""
    return type(linear.method), linear.method.layouts if isinstance(linear.method, Stored) else None


def _named(stored: tuple[type, Mapping[str, Layout] | None] | None) -> str:
    if stored is None:
        return "no layer"
    kind, layouts = stored
    return kind.__name__ if layouts is None else ", ".join(map(str, dict.fromkeys(layouts.values())))


def take_weights(model: Decoder, new: Decoder) -> None:
    """Puts the weights of a model that `loaded` gave in the place of these."""
    for linear, other in zip(all_linears(model), all_linears(new), strict=True):
        for name, tensor in linear.params.items():
            if tensor.is_mkldnn:  # packed: nothing else reads it, and it is not written to
                linear.params[name] = other.params[name]
    _copy((tensor for _, tensor in tensors_of(new)), (tensor for _, tensor in tensors_of(model)))
    model.checkpoint = new.checkpoint
    head = model.head.head if isinstance(model.head, RankHead) else model.head
    if isinstance(head, HeadCopy):
        head.params = {}  # it is made again from lm_head


def _copy(new: Iterable[Tensor], old: Iterable[Tensor]) -> None:
    for tensor, target in zip(new, old, strict=True):
        if not tensor.is_mkldnn:
            target.copy_(tensor)
