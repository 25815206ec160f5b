"""The half of an engine that plans. It is made from the engine's options, its parts that plan, and the facts of the
worker that it plans for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reference_impl.assembly.config import ConfigError, EngineConfig
from reference_impl.assembly.kv import kv_manager, stored_kv_manager
from reference_impl.assembly.parts import Parts, part
from reference_impl.assembly.scheduler import continuous_batching
from reference_impl.assembly.speculation import BY_HOST, host_proposer, tree_of
from reference_impl.core.block_pool import BlockPool
from reference_impl.core.engine import WallClock
from reference_impl.features.beams.planning import ForkingPlanner
from reference_impl.features.overlap.depth import depth_for, stages_for
from reference_impl.features.process.facts import Facts
from reference_impl.interfaces import BlockPool as AnyBlockPool
from reference_impl.interfaces import Executor, HostProposer, KVManager, KVSpec, PrefixIndex, Scheduler
from reference_impl.observe.trace import Trace

if TYPE_CHECKING:
    from reference_impl.features.disaggregation.layouts import PageFormat


class PlannerHalf:
    """Blocks, KV manager, scheduler, planner, clock and trace: those of `parts`, or the defaults. executor: the one
    that the steps will go to, or a stand-in. config: from `checks.settled`. ValueError or ConfigError where worker,
    parts and options contradict each other.

    depth: how many steps may be in flight.
    """

    def __init__(self, config: EngineConfig, parts: Parts, worker: Facts, executor: Executor):
        self.config, self.worker = config, worker
        self.clock, self.trace = part(parts.clock, WallClock), part(parts.trace, Trace)
        self.block_pool = part(parts.block_pool, lambda: BlockPool(worker.num_blocks))
        self.kv = part(parts.kv_manager, lambda: make_kv_manager(config, parts, worker, self.block_pool))
        if parts != Parts():
            from reference_impl.assembly.own_parts import check_blocks

            check_blocks(self.block_pool, self.kv, worker.num_blocks)
        self.planner = ForkingPlanner(config.block_size)
        stages = stages_for(config.overlap, self.kv, executor)
        proposer = host_proposer(config.speculative) if config.speculative in BY_HOST else parts.host_proposer

        def scheduler() -> Scheduler:
            return make_scheduler(config, parts, worker, self.kv, proposer, stages, executor)

        self.scheduler = part(parts.scheduler, scheduler)
        # A host proposer reads tokens that would not be known; between stages they are, of requests that are planned.
        overlap = config.overlap if proposer is None or stages > 1 else "off"
        self.depth = depth_for(overlap, worker.model.device, self.scheduler, self.kv, executor)


def make_kv_manager(config: EngineConfig, parts: Parts, worker: Facts, pool: AnyBlockPool) -> KVManager:
    """The KV manager for these options. ConfigError if there is a page store and no prefix cache."""
    specs = worker.kv_specs
    index = make_prefix_index(config, specs) if parts.prefix_index is None else parts.prefix_index
    host_pool = BlockPool(worker.num_host_blocks) if worker.num_host_blocks else None
    if parts.page_store is None:
        return kv_manager(pool, config.block_size, [spec.window for spec in specs], index, host_pool)
    if index is None:
        why = "it is off" if config.prefix_cache == "off" else "a model with sliding windows has none"
        raise ConfigError(f"Parts.page_store fills the prefix cache, and {why}: leave the store out")
    root = pages_of(config, worker).root()
    return stored_kv_manager(pool, config.block_size, index, parts.page_store, root, host_pool)


def pages_of(config: EngineConfig, worker: Facts) -> PageFormat:
    """What the pages of an engine with these options are, to compare with those of another engine. ValueError for a
    model whose cache is not keys and values of all tokens."""
    from reference_impl.features.disaggregation.layouts import page_format

    model = worker.model
    return page_format(
        worker.kv_specs[0], model.config.num_layers, model.config.num_kv_heads, fingerprint=model.fingerprint,
        kv_format=config.kv_dtype, dtype=model.dtype,
    )  # fmt: skip


def make_prefix_index(config: EngineConfig, specs: Sequence[KVSpec]) -> PrefixIndex | None:
    windows = [spec.window for spec in specs if spec.window is not None]
    if config.prefix_cache == "off" or (config.prefix_cache == "auto" and windows):
        return None
    if windows:
        raise ConfigError(
            f"prefix_cache {config.prefix_cache!r} is not supported for layers with a sliding window ({windows[0]}): "
            "they give up the blocks that a later prompt would need. Use prefix_cache='off'"
        )
    if config.prefix_cache == "radix":
        from reference_impl.features.prefix.radix_index import RadixIndex

        return RadixIndex(config.block_size)
    from reference_impl.features.prefix.hash_index import HashIndex

    return HashIndex(config.block_size)


def make_scheduler(
    c: EngineConfig, parts: Parts, worker: Facts, kv: KVManager, proposer: HostProposer | None, num_stages: int,
    executor: Executor,
) -> Scheduler:  # fmt: skip
    shows_drafts = follows = False
    if c.num_drafts:
        from reference_impl.assembly.draft_model import must_follow
        from reference_impl.features.grammars.drafts import ShowsDrafts

        shows_drafts, follows = isinstance(executor, ShowsDrafts), must_follow(c, parts.draft_model)
    return continuous_batching(
        kv, c.max_num_seqs, c.max_num_batched_tokens, parts.policy, c.admission, c.preemption, c.num_drafts,
        proposer, c.adaptive_drafts == "on", num_stages, tree_of(c), worker.max_model_len,
        follows, shows_drafts,
    )  # fmt: skip
