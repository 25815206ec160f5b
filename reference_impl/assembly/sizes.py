"""How much an engine has: positions of a request, blocks of the KV cache and what one holds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from reference_impl.assembly.config import ConfigError, EngineConfig
from reference_impl.assembly.defaults import make_draft, make_sampler, new_cache, new_worker, why_not_graphs
from reference_impl.assembly.kv_cache import widths
from reference_impl.assembly.parts import Drafts, Parts, part
from reference_impl.features.beams.planning import ForkingPlanner
from reference_impl.features.sizing.budget import num_blocks_for
from reference_impl.features.sizing.profile import (
    CudaMemory,
    DeviceMemory,
    bytes_of_graphs,
    profiled_blocks,
    worst_steps,
)
from reference_impl.features.windows.groups import kv_specs
from reference_impl.interfaces import KVSpec, Request, Sampler, StepPlan
from reference_impl.models.config_rope import reason_for_limit

if TYPE_CHECKING:
    import torch

    from reference_impl.assembly.made import Made
    from reference_impl.core.decoder import Decoder


def max_model_len(model: Decoder, config: EngineConfig) -> int:
    limit = min(model.config.max_position, model.rotary.max_position)
    length = config.max_model_len or limit
    if length > limit:
        where = f"the model's {limit} positions{reason_for_limit(model.config)}"
        raise ConfigError(f"max_model_len {length} is above {where}")
    return length


def make_kv_specs(made: Made) -> tuple[KVSpec, ...]:
    c = made.model.config
    # A window that is never left hides nothing: such a layer keeps everything, and prefixes can be shared.
    windows = [w if w is not None and w < made.max_model_len else None for w in c.layer_windows]
    each = widths(made.config.kv_dtype, made.model.dtype)
    return kv_specs(windows, c.num_kv_heads, c.head_dim, made.config.block_size, **each)


def size_cache(made: Made, parts: Parts) -> int:
    """KV blocks. A device with its own memory is measured, unless the config sets the size, or a custom part keeps the
    tensors."""
    config, specs = made.config, made.kv_specs
    asked = config.num_blocks is not None or config.kv_cache_bytes is not None
    if asked or parts.kv_cache is not None or parts.executor is not None:
        return num_blocks_for(config, made.bytes_per_block)
    memory = device_memory(made.model.device)
    if memory is None:
        return num_blocks_for(config, made.bytes_per_block)
    room = memory.total // made.bytes_per_block * config.block_size // len(specs)
    by_model = parts.draft_model is not None
    steps = worst_steps(config, specs, made.max_model_len, made.model.config.vocab_size, room, by_model)
    sampler = part(parts.sampler, lambda: make_sampler(made))
    measured = memory.measure([partial(run_alone, made, sampler, parts.draft_model, *step) for step in steps])
    of_graphs = 0
    if config.graphs != "off" and why_not_graphs(made, parts.draft_model) is None:
        from reference_impl.features.graphs.graphs import WIDEST_TREES  # it needs torch, which a simulation does not

        trees = bool(config.draft_tree) or config.speculative == "lookahead"
        of_graphs = bytes_of_graphs(measured, steps, WIDEST_TREES if trees else None)
    return profiled_blocks(measured, config, made.bytes_per_block, len(specs), made.max_model_len, of_graphs)


def device_memory(device: torch.device) -> DeviceMemory | None:
    return CudaMemory(device) if device.type == "cuda" else None


def run_alone(
    made: Made, sampler: Sampler, draft: Drafts | None, plan: StepPlan, requests: Mapping[str, Request]
) -> None:
    """One step with a cache of one block, and all that is beside the blocks."""
    cache = new_cache(made, 1, 0)
    executor = new_worker(made, cache, sampler, draft=make_draft(made, draft, cache, 1, 0))
    executor.collect(executor.submit(ForkingPlanner(made.config.block_size).step(plan, requests)))
