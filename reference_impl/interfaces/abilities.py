"""What some parts can do besides, a protocol for each ability: a part has it if it has the members.

Checked with isinstance when a part is installed, and in every layer on the part's class, which is many times faster.
A wrapper has the abilities that its class declares: isinstance sees what `__getattr__` forwards in Python 3.11 only,
and a check on the class never does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, runtime_checkable

from reference_impl.interfaces.batch import Batch
from reference_impl.interfaces.blocks import BlockId
from reference_impl.interfaces.computing import AttentionBackend, KVCache, TensorSpec
from reference_impl.interfaces.plan import StepPlan
from reference_impl.interfaces.request import Request
from reference_impl.interfaces.step import Masks

if TYPE_CHECKING:
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
        """Adds a request whose tokens begin like those of another, and which shares what that one has computed."""
        ...


@runtime_checkable
class KeepsRequests(Protocol):
    """A host proposer that keeps something of each request that it was asked about."""

    def finished(self, request: Request) -> None:
        """The request has its last token, or was aborted; it need not have been asked about."""
        ...


@runtime_checkable
class PlansStages(PlansAhead, Protocol):
    """A scheduler that can plan for an executor that `RunsStages`: it gives no row to a request while a step in flight
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
        """Freed blocks that wait for running steps."""
        ...

    def step_submitted(self, step_id: int) -> None:
        """Blocks freed from now on wait for this step."""
        ...

    def step_collected(self, step_id: int) -> None:
        """Blocks that waited for this step are available again."""
        ...


@runtime_checkable
class SwapsOut(Protocol):
    """A KV manager with host memory for requests that are preempted: `admit` brings them back."""

    def swap_out(self, request: Request) -> bool:
        """Move the request's computed blocks to host memory; False (nothing changed) if they do not fit there."""
        ...


@runtime_checkable
class PinsPrefixes(Protocol):
    """A KV manager that can keep a cached prefix from being evicted."""

    def pin(self, tokens: Sequence[int], key: bytes) -> list[BlockId]:
        """Hold what is cached of a prefix, so that it is not evicted; returns the blocks."""
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
    """An executor that says which fields of SamplingParams its sampler reads, of those that are a sampler's."""

    @property
    def reads(self) -> Collection[str]: ...


@runtime_checkable
class CapturesGraphs(Protocol):
    """An executor that replays steps as CUDA graphs, and can capture them before they are needed."""

    def capture_all(self, longest: int | None = None) -> int:
        """Captures the graphs for contexts of up to `longest` positions, None: all. Returns how many it captured."""
        ...


@runtime_checkable
class RunsStages(Protocol):
    """An executor whose model is cut into stages (pipeline parallelism): while one stage computes a step, the stage
    before it computes the next step.

    Up to num_stages steps may be submitted before the first of them is collected. Each stage takes them in the order of
    submission, so a step's keys and values are written in time for all later ones: the next chunk of a prompt may be
    submitted while the chunk before runs. Sampled tokens are not: a row may compute one, and what follows it,
    only in a step submitted after the sampling step was collected. By then it is in the slot and is not sent, unless
    the slot was closed meanwhile: then it is in the reply alone.
    """

    @property
    def num_stages(self) -> int:
        """At least 1. If more, max_in_flight is 1: callers that ignore this ability then run one step at a time."""
        ...


@runtime_checkable
class TakesMasks(Protocol):
    """An executor that can sample under grammars."""

    def finish(self, ticket: Any, masks: Masks) -> None:
        """Samples what was submitted with takes_masks. Called once for each such step, before the next is submitted."""
        ...


@runtime_checkable
class HasScales(Protocol):
    """A KV cache that can be of 8 or 4 bits: a stored number times the scale of its slot and head is the value; in 4
    bits, where a byte holds numbers i and i + head_dim / 2, with the head's lowest number added."""

    def scales(self, layer: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """(of keys, of values), each [num_blocks, block_size, num_kv_heads] float32; of 4 bits [..., num_kv_heads, 2]
        float16, (scale, lowest); None of a cache of more bits."""
        ...


@runtime_checkable
class MovesScales(Protocol):
    """A `HasScales` whose scales can be moved from slot to slot."""

    scale_of_slots: Tensor  # [layers of a group, 2, num_blocks, block_size, num_kv_heads, ...], a view of them


def has_scales(kv_cache: KVCache) -> TypeGuard[HasScales]:
    """Checked on the class, since every layer calls this."""
    return issubclass(type(kv_cache), HasScales)


def scales_of(kv_cache: KVCache, layer: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """(of keys, of values); None where there are none."""
    return kv_cache.scales(layer) if has_scales(kv_cache) else (None, None)


@runtime_checkable
class ReadsScales(Protocol):
    """An attention backend that says whether it multiplies what it reads by the cache's scales. One that reads a cache
    of 4 bits says so with reads_four_bits = True besides."""

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
        """`forward`, for queries whose keys and values are in the cache."""
        ...


@runtime_checkable
class NamesKernels(Protocol):
    """An attention backend that names the kernels it used, for the trace."""

    @property
    def ran(self) -> Collection[str]:
        """Those of the step planned last."""
        ...


@runtime_checkable
class NamesTensors(Protocol):
    """A LinearMethod for checkpoints with tensors other than weight and bias, such as GPTQ (qweight, qzeros,
    scales, g_idx) and AWQ."""

    def tensors(self, in_features: int, out_features: int, bias: bool) -> Mapping[str, TensorSpec]:
        """{name: what it must be} of one part with so many output features. bias: whether the layer has one.

        Asked for q_proj, the name qweight means the checkpoint's tensor model.layers.0.self_attn.q_proj.qweight. Every
        tensor named must be in the checkpoint; each goes to `load` once, in any order.
        """
        ...


@runtime_checkable
class NamesTensorsOfParts(Protocol):
    """As `NamesTensors`, of a LinearMethod whose parts (q_proj, k_proj, ...) may lie in the checkpoint in different
    ways. A method that has both is asked for this one."""

    def tensors_of(self, part: str, in_features: int, out_features: int, bias: bool) -> Mapping[str, TensorSpec]:
        """`NamesTensors.tensors` of the part that the checkpoint calls so."""
        ...
