"""The parts of an engine that can be replaced by your own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar, runtime_checkable

from reference_impl.interfaces import (
    AttentionBackend,
    BlockPool,
    Clock,
    Executor,
    HostProposer,
    KVCache,
    KVManager,
    Policy,
    PrefixIndex,
    Proposer,
    Sampler,
    Scheduler,
)
from reference_impl.observe.trace import Trace

if TYPE_CHECKING:
    from reference_impl.core.decoder import Decoder
    from reference_impl.features.process.facts import Facts
    from reference_impl.features.speculative.feature_head import FeatureHead
    from reference_impl.features.speculative.medusa import MedusaHeads
    from reference_impl.interfaces.pages import LayeredPageStore, PageStore

Drafts: TypeAlias = "Decoder | FeatureHead | MedusaHeads"
T = TypeVar("T")


@runtime_checkable
class DraftsFromHidden(Protocol):
    """Of `Drafts` those that read the target's hidden states."""

    @property
    def method(self) -> str:
        """The value of EngineConfig.speculative for it."""
        ...


@runtime_checkable
class ReportsFacts(Protocol):
    """An executor that was made by a worker half elsewhere, with the engine's own options."""

    @property
    def facts(self) -> Facts: ...


@runtime_checkable
class FollowsOptions(Protocol):
    """An executor that says whether it was made elsewhere with the engine's own options, so that none is lost."""

    @property
    def follows_options(self) -> bool: ...


@dataclass
class Parts:
    """What to use instead of the engine's own; None keeps the default."""

    block_pool: BlockPool | None = None
    prefix_index: PrefixIndex | None = None
    kv_manager: KVManager | None = None
    policy: Policy | None = None
    scheduler: Scheduler | None = None
    kv_cache: KVCache | None = None
    attention: AttentionBackend | None = None
    sampler: Sampler | None = None
    proposer: Proposer | None = None
    host_proposer: HostProposer | None = None
    draft_model: Drafts | None = None
    page_store: PageStore | LayeredPageStore | None = None
    executor: Executor | None = None
    clock: Clock | None = None
    trace: Trace | None = None


def part(given: T | None, make: Callable[[], T]) -> T:
    """The part given, or a new one. Not `given or make()`: a part of length 0, such as an empty index, is false."""
    return make() if given is None else given
