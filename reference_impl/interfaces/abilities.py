"""What some parts can do besides, a protocol for each ability: a part has it if it has the members.

It is checked with isinstance when a part is installed, and in every layer on the part's class, many times faster.
A wrapper has the abilities that its class declares: isinstance sees what `__getattr__` forwards in Python 3.11 only,
and a check on the class never does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, runtime_checkable

from reference_impl.interfaces.batch import Batch
from reference_impl.interfaces.blocks import BlockId, TransferEnd
from reference_impl.interfaces.computing import AttentionBackend, KVCache, TensorSpec
from reference_impl.interfaces.plan import StepPlan
from reference_impl.interfaces.request import Request
from reference_impl.interfaces.step import Masks

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


@runtime_checkable
class PlansAhead(Protocol):
    """A scheduler that can plan a step before the results of the one before are known."""

    def advance(self, plan: StepPlan) -> None:
        """Commits what a submitted plan computes. Its samples count as in flight until `update` brings them."""
        ...


@runtime_checkable
class ForksRequests(Protocol):
    """A scheduler for beam search."""

    def fork(self, parent: Request, child: Request) -> None:
        """Adds a request whose tokens begin like the parent's, and which shares what the parent has computed."""
        ...


@runtime_checkable
class KeepsRequests(Protocol):
    """A host proposer that keeps something of each request that it was asked about."""

    def finished(self, request: Request) -> None:
        """Called when a request has its last token, or was aborted; drafts for it need not have been asked for."""
        ...


@runtime_checkable
class PlansStages(PlansAhead, Protocol):
    """A scheduler that can plan for an executor that `RunsStages`: it gives a request no row while a step in flight
    samples a token for it."""

    @property
    def num_stages(self) -> int:
        """How many stages it plans for; 1: one step at a time, or overlapped steps."""
        ...


@runtime_checkable
class DefersReuse(Protocol):
    """A KV manager that does not reuse freed blocks until no running step can use them."""

    @property
    def num_releasing(self) -> int:
        """The number of freed blocks that wait for running steps."""
        ...

    def step_submitted(self, step_id: int) -> None:
        """Called when a step was submitted: blocks freed from now on wait for it."""
        ...

    def step_collected(self, step_id: int) -> None:
        """Called when a step was collected: blocks that waited for it are available again."""
        ...


@runtime_checkable
class SwapsOut(Protocol):
    """A KV manager with host memory for requests that are preempted: `admit` brings them back."""

    def swap_out(self, request: Request) -> bool:
        """Moves the request's computed blocks to host memory; False, and nothing changed, if they do not fit there."""
        ...


@runtime_checkable
class FetchesPages(Protocol):
    """A KV manager that fills its prefix cache from a page store, and the store from its prefix cache."""

    def fetch(self, request: Request, now: float) -> bool:
        """Begins to load those pages of a waiting request that are in the store but not in the prefix cache.

        False: there is nothing to wait for. True: the request is to be set aside until `is_fetching` is false, and
        then admitted like any other; what was loaded is in the prefix cache.
        """
        ...

    def is_fetching(self, request: Request) -> bool: ...

    def cancel_loads(self) -> None:
        """Cancels all loads, since requests that run need their blocks."""
        ...

    def expire(self, now: float) -> None:
        """Cancels transfers of which nothing has moved for longer than the store's timeout."""
        ...

    def transfers_moved(self, layers: Mapping[int, int]) -> None:
        """Restarts the store's timeout of these transfers. layers: {transfer: how many more layers have moved}."""
        ...

    def transfers_ended(self, ends: Sequence[TransferEnd]) -> None:
        """Called with the transfers that ended: their blocks may be used again. Blocks that were loaded with all layers
        are then in the prefix cache."""
        ...

    @property
    def num_unsent(self) -> int:
        """The number of transfers that the next step will begin or cancel."""
        ...

    @property
    def num_transfers(self) -> int:
        """The number of transfers that have not ended."""
        ...


@runtime_checkable
class PinsPrefixes(Protocol):
    """A KV manager that can keep a cached prefix from being evicted."""

    def pin(self, tokens: Sequence[int], key: bytes) -> list[BlockId]:
        """Holds the cached blocks of a prefix, so that they are not evicted, and returns them."""
        ...

    def unpin(self, blocks: Sequence[BlockId]) -> None: ...


@runtime_checkable
class WaitsOnPurpose(Protocol):
    """A scheduler whose plan may be empty while requests wait, until a known time."""

    def next_event(self, now: float) -> float | None:
        """When the wait ends, in seconds on the engine's clock; None: it does not delay on purpose."""
        ...


@runtime_checkable
class ReadsFields(Protocol):
    """An executor that says which of the sampler's fields of SamplingParams its own sampler reads."""

    @property
    def reads(self) -> Collection[str]: ...


@runtime_checkable
class CapturesGraphs(Protocol):
    """An executor that replays steps as CUDA graphs, and can capture them before they are needed."""

    def capture_all(self, longest: int | None = None) -> int:
        """Captures the graphs for contexts of up to `longest` positions (None: of all lengths) and returns how many it
        captured."""
        ...


@runtime_checkable
class RunsStages(Protocol):
    """An executor whose model is cut into stages (pipeline parallelism): while one stage computes a step, the stage
    before it computes the next step.

    Up to num_stages steps may be submitted before the first of them is collected. Each stage takes them in the order of
    submission, so a step's keys and values are written in time for all later ones: the next chunk of a prompt may be
    submitted while the chunk before runs. Sampled tokens come later: a row may compute one, and what follows it, only
    in a step submitted after the sampling step was collected. By then the token is in the slot and is not sent; if the
    slot was closed meanwhile, only the reply has it.
    """

    @property
    def num_stages(self) -> int:
        """The number of stages, at least 1. With more than 1, max_in_flight is 1, so callers that ignore this ability
        run one step at a time."""
        ...


@runtime_checkable
class UpdatesWeights(Protocol):
    """An executor that can replace the weights of its model; both are called while no step is in flight."""

    def load_weights(self, folder: Path) -> None:
        """Loads another checkpoint of the same model, beside the weights in use. ValueError if that cannot be."""
        ...

    def use_weights(self) -> None:
        """Puts what was loaded in their place."""
        ...


@runtime_checkable
class TakesMasks(Protocol):
    """An executor that can sample under grammars."""

    def finish(self, ticket: Any, masks: Masks) -> None:
        """Samples what was submitted with takes_masks. Called once for each such step, before the next is submitted."""
        ...


@runtime_checkable
class HasScales(Protocol):
    """A KV cache that may have 8 or 4 bits per value: a value is the stored number times the scale of its slot and
    head. With 4 bits the head's lowest value is added, and a byte holds the numbers i and i + head_dim / 2."""

    def scales(self, layer: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """The scales (of keys, of values) of a layer, each [num_blocks, block_size, num_kv_heads] float32; with 4 bits
        [..., num_kv_heads, 2] float16, (scale, lowest); (None, None) with more than 8 bits."""
        ...


@runtime_checkable
class MovesScales(Protocol):
    """A `HasScales` whose scales can be moved from slot to slot."""

    scale_of_slots: Tensor  # [layers of a group, 2, num_blocks, block_size, num_kv_heads, ...], a view of them


def has_scales(kv_cache: KVCache) -> TypeGuard[HasScales]:
    """Whether the cache `HasScales`; checked on its class, since every layer calls this."""
    return issubclass(type(kv_cache), HasScales)


def scales_of(kv_cache: KVCache, layer: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """The scales (of keys, of values) of a layer; (None, None) where the cache has none."""
    return kv_cache.scales(layer) if has_scales(kv_cache) else (None, None)


@runtime_checkable
class ReadsScales(Protocol):
    """An attention backend that says whether it multiplies what it reads by the cache's scales."""

    @property
    def reads_scales(self) -> bool: ...


@runtime_checkable
class ReadsFourBits(Protocol):
    """A `ReadsScales` that says whether it also takes two codes out of a byte."""

    @property
    def reads_four_bits(self) -> bool: ...


@runtime_checkable
class TakesBounds(Protocol):
    """An attention backend that reads lengths on the device, in batch.seq_lens, so that batch.context_lens may be upper
    bounds: in CUDA graphs, and in a step that is submitted before it is known how many drafts of the step before were
    right."""

    @property
    def takes_bounds(self) -> bool: ...


def takes_bounds(attention: AttentionBackend) -> bool:
    return isinstance(attention, TakesBounds) and attention.takes_bounds


@runtime_checkable
class TakesTrees(Protocol):
    """An attention backend that reads `Batch.ancestors`."""

    @property
    def takes_trees(self) -> bool: ...


def takes_trees(attention: AttentionBackend) -> bool:
    return isinstance(attention, TakesTrees) and attention.takes_trees


@runtime_checkable
class AttendsToCache(Protocol):
    """An attention backend that can skip writing keys and values: a fused kernel has written them."""

    def attend(self, q: Tensor, layer: int, kv_cache: KVCache, batch: Batch) -> Tensor:
        """`AttentionBackend.forward` for queries q [num_tokens, num_heads, head_dim] whose keys and values are in the
        cache already; returns the same shape."""
        ...


@runtime_checkable
class NamesKernels(Protocol):
    """An attention backend that names the kernels it used, for the trace."""

    @property
    def ran(self) -> Collection[str]:
        """The names of the kernels that ran in the step planned last."""
        ...


@runtime_checkable
class NamesTensors(Protocol):
    """A LinearMethod for checkpoints with tensors other than weight and bias, such as GPTQ (qweight, qzeros,
    scales, g_idx) and AWQ."""

    def tensors(self, in_features: int, out_features: int, bias: bool) -> Mapping[str, TensorSpec]:
        """The tensors of one part with so many output features: {name: what it must be}. bias: whether the layer has
        one.

        For q_proj, the name qweight means the checkpoint's tensor model.layers.0.self_attn.q_proj.qweight. Every tensor
        named must be in the checkpoint; each goes to `load` once, in any order.
        """
        ...


@runtime_checkable
class NamesTensorsOfParts(Protocol):
    """A LinearMethod like `NamesTensors`, but its parts (q_proj, k_proj, ...) may be stored in the checkpoint in
    different ways. Where a method has both abilities, this one is used."""

    def tensors_of(self, part: str, in_features: int, out_features: int, bias: bool) -> Mapping[str, TensorSpec]:
        """The tensors of the part with this name in the checkpoint; the rest like `NamesTensors.tensors`."""
        ...
