"""An engine's parts, made in the order in which they need each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reference_impl.assembly import checks, defaults, sizes
from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.draft_model import check_draft_model, draft_spec, exit_layer, has_cache
from reference_impl.assembly.parts import Parts, part
from reference_impl.assembly.speculation import with_proposer
from reference_impl.core.block_pool import BlockPool
from reference_impl.core.engine import WallClock
from reference_impl.features.overlap.depth import depth_for, stages_for
from reference_impl.features.sizing.budget import check_memory, num_host_blocks_for
from reference_impl.observe.trace import Trace

if TYPE_CHECKING:
    from reference_impl.core.decoder import Decoder


class Made:
    """An engine's parts: those of `parts`, and the defaults for all others, made in the order in which they need each
    other. ValueError or ConfigError where parts and options contradict each other.

    depth: how many steps may be in flight. bytes_per_block: in the caches of model and draft model together.
    """

    def __init__(self, model: Decoder, config: EngineConfig, parts: Parts):
        checks.check_parts(parts)
        config, parts = with_proposer(config, parts)
        checks.check_members(parts)
        checks.check_options(config, parts)
        checks.check_scheduler(config, parts.scheduler)
        checks.check_drafts(config, parts)
        self.model, self.config = model, config
        self.max_model_len = sizes.max_model_len(model, config)
        checks.check_scales(config, parts.kv_cache, parts.attention)
        self.kv_specs = sizes.make_kv_specs(self)
        check_draft_model(parts, model, self.kv_specs, self.max_model_len, config)
        exit_layer(config, model)  # raises where there is no such layer
        self.bytes_per_block = self.kv_specs[0].bytes_per_block
        if has_cache(parts.draft_model):
            self.bytes_per_block += draft_spec(parts.draft_model, config).bytes_per_block
        self.clock, self.trace = part(parts.clock, WallClock), part(parts.trace, Trace)
        self.attention = part(parts.attention, lambda: defaults.make_attention(model, config))
        self.num_blocks = sizes.size_cache(self, parts)
        self.num_host_blocks = num_host_blocks_for(config, self.bytes_per_block)
        if parts.kv_cache is None:  # asked before there are lists as long
            check_memory(self.num_blocks, self.num_host_blocks, self.bytes_per_block, model.device)
        self.block_pool = part(parts.block_pool, lambda: BlockPool(self.num_blocks))
        checks.check_pool(self.block_pool, self.num_blocks)
        self.kv = part(parts.kv_manager, lambda: defaults.make_kv_manager(self, parts))
        checks.check_blocks(self.kv, self.num_blocks)
        self.kv_cache = part(parts.kv_cache, lambda: defaults.make_cache(self))
        self.executor = part(parts.executor, lambda: defaults.make_executor(self, parts))
        stages = stages_for(config.overlap, self.kv, self.executor)
        self.scheduler = part(parts.scheduler, lambda: defaults.make_scheduler(self, parts, stages))
        # A host proposer reads tokens that would not be known; between stages they are, of requests that are planned.
        overlap = config.overlap if parts.host_proposer is None or stages > 1 else "off"
        self.depth = depth_for(overlap, model.device.type, self.scheduler, self.kv, self.executor)
