"""What some parts can do besides, a protocol for each ability: a part has it if it has the members.

Asked with isinstance where a part is taken in, and of the part's class, which is many times as fast, in every layer. A
wrapper has the abilities that its class declares: what `__getattr__` passes on is found by isinstance in Python 3.11
only, and in a class never.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, runtime_checkable

from reference_impl.interfaces.batch import Batch
from reference_impl.interfaces.computing import AttentionBackend, KVCache, TensorSpec
from reference_impl.interfaces.plan import StepPlan
from reference_impl.interfaces.step import Masks

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class PlansAhead(Protocol):
    """A scheduler that can plan a step before the results of the one before are known."""

    def advance(self, plan: StepPlan) -> None:
        """Books what a submitted plan computes. What it samples counts as in flight until `update` brings it."""
        ...


@runtime_checkable
class PlansStages(PlansAhead, Protocol):
    """A scheduler that can plan for an executor that `RunsStages`: it gives no row to a request while a step in flight
    samples a token for it."""

    @property
    def num_stages(self) -> int:
        """For how many it plans; 1: for one step at a time, or for overlapped ones."""
        ...


@runtime_checkable
class DefersReuse(Protocol):
    """A KV manager that keeps blocks which were given up until no running step can use them any more."""

    @property
    def num_releasing(self) -> int:
        """Blocks that were given up and wait for running steps."""
        ...

    def step_submitted(self, step_id: int) -> None:
        """What is given up from now on waits for this step."""
        ...

    def step_collected(self, step_id: int) -> None:
        """What waited for this step can be had again."""
        ...


@runtime_checkable
class WaitsOnPurpose(Protocol):
    """A scheduler whose plan may be empty although requests wait, until a time that it can name."""

    def next_event(self, now: float) -> float | None:
        """Until when, in seconds on the engine's clock; None: it is not waiting on purpose."""
        ...


@runtime_checkable
class CapturesGraphs(Protocol):
    """An executor that replays steps as CUDA graphs, and can capture them before they are needed."""

    def capture_all(self, longest: int | None = None) -> int:
        """Captures those for contexts of up to `longest` positions, None: of all. Returns how many it captured."""
        ...


@runtime_checkable
class RunsStages(Protocol):
    """An executor whose model is cut into stages (pipeline parallelism): while one stage computes a step, the stage
    before it computes the next step.

    Up to num_stages steps may be submitted before the first of them is collected. Each stage takes them in the order of
    submission, so keys and values of a step are there in time for all later ones: the next chunk of a prompt may be
    submitted while the chunk before runs. What a step samples is not: a row may compute it, and what comes behind it,
    only in a step that is submitted after the one that samples it was collected. By then its slot has it, nothing is
    sent; unless the slot was closed meanwhile, when it is in the reply alone.
    """

    @property
    def num_stages(self) -> int:
        """At least 1. Where it is more, max_in_flight is 1: without this ability, one step at a time is right."""
        ...


@runtime_checkable
class TakesMasks(Protocol):
    """An executor that can sample under grammars."""

    def finish(self, ticket: Any, masks: Masks) -> None:
        """Samples what was submitted with takes_masks. Called once for each such step, before the next is submitted."""
        ...


@runtime_checkable
class HasScales(Protocol):
    """A KV cache that can be of 8 bits: a stored number times the scale of its slot and head is the value."""

    def scales(self, layer: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """(of keys, of values), each [num_blocks, block_size, num_kv_heads] float32; None unless of 8 bits."""
        ...


def has_scales(kv_cache: KVCache) -> TypeGuard[HasScales]:
    """By its class: this is asked in every layer."""
    return issubclass(type(kv_cache), HasScales)


@runtime_checkable
class ReadsScales(Protocol):
    """An attention backend that says whether it multiplies what it reads by the cache's scales."""

    @property
    def reads_scales(self) -> bool: ...


@runtime_checkable
class TakesBounds(Protocol):
    """An attention backend that reads lengths on the device, in batch.seq_lens, so that batch.context_lens may be more
    than they are: in CUDA graphs, and in a step that is submitted before it turned out how many drafts of the step
    before were right."""

    @property
    def takes_bounds(self) -> bool: ...


def takes_bounds(attention: AttentionBackend) -> bool:
    return isinstance(attention, TakesBounds) and attention.takes_bounds


@runtime_checkable
class AttendsToCache(Protocol):
    """An attention backend that can do without keys and values of its own: a fused kernel has written them."""

    def attend(self, q: Tensor, layer: int, kv_cache: KVCache, batch: Batch) -> Tensor:
        """`forward`, of queries whose keys and values are in the cache."""
        ...


@runtime_checkable
class NamesKernels(Protocol):
    """An attention backend that names what computed it, for the trace."""

    @property
    def ran(self) -> Collection[str]:
        """In the step that was planned last."""
        ...


@runtime_checkable
class NamesTensors(Protocol):
    """A LinearMethod for checkpoints that have other tensors than weight and bias, as those of GPTQ (qweight, qzeros,
    scales, g_idx) and AWQ have."""

    def tensors(self, in_features: int, out_features: int, bias: bool) -> Mapping[str, TensorSpec]:
        """{name: what it must be} of one part with so many output features. bias: whether the layer has one.

        Asked for q_proj, the name qweight means the checkpoint's tensor model.layers.0.self_attn.q_proj.qweight. Every
        tensor named must be in the checkpoint; each goes to `load` once, in any order.
        """
        ...
