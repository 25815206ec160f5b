"""The parts that an engine uses where `Parts` names none: chosen once, by the model, its device and the config.

What computes is imported where it is made: a simulated GPU brings its own, and then torch stays out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from reference_impl.annexes.kv_formats.formats import kv_format
from reference_impl.annexes.prefix.hash_index import HashIndex
from reference_impl.annexes.prefix.radix_index import RadixIndex
from reference_impl.annexes.sizing.budget import check_memory, num_blocks_for, num_host_blocks_for
from reference_impl.annexes.sizing.profile import CudaMemory, DeviceMemory, profiled_blocks, worst_steps
from reference_impl.annexes.windows.groups import kv_specs
from reference_impl.assembly.kv import kv_manager, stored_kv_manager
from reference_impl.assembly.kv_cache import bits_per_value_and_scale, kv_cache
from reference_impl.config import ConfigError, EngineConfig
from reference_impl.executor.process import fingerprint
from reference_impl.interfaces import (
    AttentionBackend,
    BlockPool,
    Clock,
    Executor,
    HostProposer,
    KVCache,
    KVManager,
    KVSpec,
    LayeredPageStore,
    PageStore,
    Policy,
    PrefixIndex,
    Proposer,
    ReadsScales,
    Request,
    RunsStages,
    Sampler,
    Scheduler,
    StepPlan,
    has_scales,
    takes_bounds,
)
from reference_impl.kv.block_pool import BlockPool as BlockCounts
from reference_impl.parts import Parts, WallClock, part
from reference_impl.pipeline import depth_for, stages_for
from reference_impl.planner import Planner
from reference_impl.scheduler.scheduler import Scheduler as ContinuousBatching
from reference_impl.trace import Trace

if TYPE_CHECKING:
    import torch

    from reference_impl.executor.local import LocalExecutor
    from reference_impl.kv_store.cache import PagedKVCache
    from reference_impl.models.decoder import Decoder


class Assembly:
    """An engine's parts: those of `parts`, and the defaults for all others, made in the order in which they need each
    other. ValueError or ConfigError where parts and options contradict each other.

    depth: how many steps may be in flight.
    """

    def __init__(self, model: Decoder, config: EngineConfig, parts: Parts):
        kv_format(config.kv_dtype)  # raises ValueError for an unknown name
        check_parts(parts)
        check_members(parts)
        check_drafts(config, parts)
        self.model, self.config = model, config
        self.max_model_len = max_model_len(model, config)
        check_scales(config, parts.kv_cache, parts.attention)
        self.kv_specs = make_kv_specs(self)
        self.clock, self.trace = part(parts.clock, WallClock), part(parts.trace, Trace)
        self.attention = part(parts.attention, lambda: make_attention(self))
        self.num_blocks = size_cache(self, parts)
        self.num_host_blocks = num_host_blocks_for(config, self.kv_specs)
        if parts.kv_cache is None:  # asked before there are lists as long
            check_memory(self.num_blocks, self.num_host_blocks, self.kv_specs[0], model.device)
        self.block_pool = part(parts.block_pool, lambda: BlockCounts(self.num_blocks))
        check_pool(self.block_pool, self.num_blocks)
        self.kv = part(parts.kv_manager, lambda: make_kv_manager(self, parts))
        check_blocks(self.kv, self.num_blocks)
        self.kv_cache = part(parts.kv_cache, lambda: make_cache(self))
        self.executor = part(parts.executor, lambda: make_executor(self, parts))
        stages = stages_for(config.overlap, self.kv, self.executor)
        self.scheduler = part(parts.scheduler, lambda: make_scheduler(self, parts, stages))
        # A host proposer reads tokens that would not be known; between stages they are, of requests that are planned.
        overlap = config.overlap if parts.host_proposer is None or stages > 1 else "off"
        self.depth = depth_for(overlap, model.device.type, self.scheduler, self.kv, self.executor)


# (a part, the part that uses it): the second, if custom, was made without the first.
_BELONGS = (
    ("policy", "scheduler"), ("prefix_index", "kv_manager"), ("sampler", "executor"), ("proposer", "executor"),
    ("page_store", "kv_manager"), ("host_proposer", "scheduler"),
)  # fmt: skip


_PROTOCOLS: dict[str, Any] = {
    "block_pool": BlockPool, "prefix_index": PrefixIndex, "kv_manager": KVManager, "policy": Policy,
    "scheduler": Scheduler, "kv_cache": KVCache, "attention": AttentionBackend, "sampler": Sampler,
    "proposer": Proposer, "host_proposer": HostProposer, "executor": Executor, "clock": Clock,
}  # fmt: skip


_OF_THE_WORKER = ("kv_cache", "attention")  # another executor has its own, and may give what stands for them


def check_members(parts: Parts) -> None:
    """ConfigError where a part lacks what the engine calls, or is a class and no object of it."""
    for name, protocol in _PROTOCOLS.items():
        given = getattr(parts, name)
        if given is None or (parts.executor is not None and name in _OF_THE_WORKER):
            continue
        if isinstance(given, type):
            raise ConfigError(f"Parts.{name}, {given.__name__}, is a class: expected an object of it")
        members = {*vars(protocol), *protocol.__annotations__}
        public = [m for m in members if not m.startswith("_") or m in ("__len__", "__call__")]
        missing = sorted(m for m in public if not hasattr(given, m))
        if missing:
            raise ConfigError(
                f"Parts.{name}, {type(given).__name__}, has no {', '.join(missing)}: the engine calls them, see "
                f"{protocol.__name__} in reference_impl/interfaces. If it is a cell of an older lab notebook, "
                "`inferlab learn --update` lays the lab's present version beside yours; take the cell from there"
            )


def check_parts(parts: Parts) -> None:
    """ValueError where a part would never be used, because the one that would call it is custom."""
    for name, owner in _BELONGS:
        mine = getattr(parts, owner)
        if getattr(parts, name) is not None and mine is not None:
            raise ValueError(
                f"Parts.{name} is for the engine's own {owner}, and Parts.{owner} is given, too: the {name} "
                f"would never be asked. Hand it to your {type(mine).__name__}, or leave one of the two out"
            )


def check_drafts(config: EngineConfig, parts: Parts) -> None:
    """ValueError where drafts would never be made, or never be used."""
    given = [name for name in ("proposer", "host_proposer") if getattr(parts, name) is not None]
    if len(given) == 2:
        raise ValueError(
            "Parts.proposer and Parts.host_proposer are given: only one can make the drafts, leave one out"
        )
    if config.num_drafts and not given and parts.executor is None:
        raise ValueError(
            f"num_drafts={config.num_drafts} needs a proposer: pass Parts(proposer=...) or "
            "Parts(host_proposer=...), or num_drafts=0"
        )
    stages = parts.executor.num_stages if isinstance(parts.executor, RunsStages) else 1
    if parts.host_proposer is not None and config.overlap == "on" and stages == 1:
        raise ValueError(
            "Parts.host_proposer reads a request's text, which with overlap='on' is not known when a step is planned: "
            "use overlap='off' or 'auto', or a proposer of the worker, Parts.proposer"
        )
    if config.num_drafts and parts.scheduler is not None:
        raise ValueError(
            f"num_drafts={config.num_drafts} is for the engine's own scheduler, and Parts.scheduler is given, too: "
            f"none would be planned. Hand them to your {type(parts.scheduler).__name__}, or leave one of the two out"
        )
    if given and not config.num_drafts and parts.scheduler is None:
        raise ValueError(
            f"Parts.{given[0]} is given, and num_drafts is 0: it would never be asked. Say how many, or leave it out"
        )


def check_page_store(store: PageStore | LayeredPageStore) -> None:
    """ConfigError unless it has the members of a `PageStore`, or of a `LayeredPageStore`."""
    given = f"Parts.page_store, {store.__name__ if isinstance(store, type) else type(store).__name__}"
    if isinstance(store, type):
        raise ConfigError(f"{given}, is a class: expected an object of it")
    by_layer = hasattr(store, "load_layer") or hasattr(store, "save_layer")
    names = ("num_stored", "load_layer", "save_layer") if by_layer else ("num_stored", "load", "save")
    missing = [name for name in names if not callable(getattr(store, name, None))]
    if missing:
        raise ConfigError(f"{given}, has no {', '.join(missing)}: a page store needs them, see interfaces/pages.py")
    timeout = getattr(store, "timeout", None)
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not 0 <= timeout < float("inf"):
        raise ConfigError(f"{given}: expected timeout in seconds, a finite number of at least 0, got {timeout!r}")


def make_kv_manager(made: Assembly, parts: Parts) -> KVManager:
    """ConfigError if there is a page store and no prefix cache."""
    config, specs, pool = made.config, made.kv_specs, made.block_pool
    index = make_prefix_index(config, specs) if parts.prefix_index is None else parts.prefix_index
    host_pool = BlockCounts(made.num_host_blocks) if made.num_host_blocks else None
    if parts.page_store is None:
        return kv_manager(pool, config.block_size, [spec.window for spec in specs], index, host_pool)
    check_page_store(parts.page_store)
    if index is None:
        why = "it is off" if config.prefix_cache == "off" else "a model with sliding windows has none"
        raise ConfigError(f"Parts.page_store fills the prefix cache, and {why}: leave the store out")
    model = fingerprint(made.model.config, made.model.dtype)
    # Pages of another model or format have other keys. By layer: the order of a page's bytes.
    root = f"by layer {model} {config.kv_dtype} {specs!r}".encode()
    return stored_kv_manager(pool, config.block_size, index, parts.page_store, root, host_pool)


def make_kv_specs(made: Assembly) -> tuple[KVSpec, ...]:
    c = made.model.config
    # A window that is never left hides nothing: such a layer keeps everything, and prefixes can be shared.
    windows = [w if w is not None and w < made.max_model_len else None for w in c.layer_windows]
    value, scale = bits_per_value_and_scale(made.config.kv_dtype, made.model.dtype)
    size = made.config.block_size
    return kv_specs(windows, c.num_kv_heads, c.head_dim, size, bits_per_value=value, bits_per_scale=scale)


def make_scheduler(made: Assembly, parts: Parts, num_stages: int) -> Scheduler:
    c = made.config
    return ContinuousBatching(
        made.kv, c.max_num_seqs, c.max_num_batched_tokens, parts.policy, c.admission, c.preemption, c.num_drafts,
        parts.host_proposer, num_stages,
    )  # fmt: skip


def check_pool(pool: BlockPool, num_blocks: int) -> None:
    """ValueError unless it has as many blocks as the cache."""
    if pool.num_free != num_blocks:
        raise ValueError(
            f"Parts.block_pool has {pool.num_free} free blocks; the KV cache has {num_blocks}: "
            f"pass num_blocks={pool.num_free}, or a pool of that size"
        )


def check_blocks(kv_manager: KVManager, num_blocks: int) -> None:
    """ValueError where a custom manager would allocate blocks that the cache does not have."""
    if kv_manager.num_available > num_blocks:
        raise ValueError(
            f"Parts.kv_manager has {kv_manager.num_available} blocks to give; the KV cache has {num_blocks}: "
            f"pass num_blocks={kv_manager.num_available}, or a manager of that many"
        )


def max_model_len(model: Decoder, config: EngineConfig) -> int:
    limit = min(model.config.max_position, model.rotary.cos.shape[0])
    length = config.max_model_len or limit
    if length > limit:
        where = f"the model's {limit} positions{model.config.reason_for_limit}"
        raise ConfigError(f"max_model_len {length} is above {where}")
    return length


def make_prefix_index(config: EngineConfig, specs: Sequence[KVSpec]) -> PrefixIndex | None:
    windows = [spec.window for spec in specs if spec.window is not None]
    if config.prefix_cache == "off" or (config.prefix_cache == "auto" and windows):
        return None
    if windows:
        raise ConfigError(
            f"prefix_cache {config.prefix_cache!r} is not supported for layers with a sliding window ({windows[0]}): "
            "they give up the blocks that a later prompt would need. Use prefix_cache='off'"
        )
    return RadixIndex(config.block_size) if config.prefix_cache == "radix" else HashIndex(config.block_size)


def check_scales(config: EngineConfig, kv_cache: KVCache | None, attention: AttentionBackend | None) -> None:
    """ConfigError where the cache is to be of 8 bits and a custom part does not apply scales."""
    if kv_format(config.kv_dtype) is None:
        return
    asked = f"kv_dtype={config.kv_dtype!r} needs"
    if kv_cache is not None and not has_scales(kv_cache):
        raise ConfigError(
            f"{asked} a cache with scales(layer), as EightBitKVCache has; "
            f"Parts.kv_cache, {type(kv_cache).__name__}, has none: add it, or use kv_dtype='auto'"
        )
    if attention is not None and not (isinstance(attention, ReadsScales) and attention.reads_scales):
        raise ConfigError(
            f"{asked} an attention backend that multiplies what it reads by the cache's scales(layer) and "
            f"says so with reads_scales = True; Parts.attention, {type(attention).__name__}, does not: "
            "change it, or use kv_dtype='auto'"
        )


def size_cache(made: Assembly, parts: Parts) -> int:
    """KV blocks. A device with its own memory is measured, unless the config sets the size, or a custom part keeps the
    tensors."""
    config, specs = made.config, made.kv_specs
    asked = config.num_blocks is not None or config.kv_cache_bytes is not None
    if asked or parts.kv_cache is not None or parts.executor is not None:
        return num_blocks_for(config, specs)
    memory = device_memory(made.model.device)
    if memory is None:
        return num_blocks_for(config, specs)
    room = memory.total // specs[0].bytes_per_block * config.block_size // len(specs)
    steps = worst_steps(config, specs, made.max_model_len, made.model.config.vocab_size, room)
    sampler = part(parts.sampler, lambda: make_sampler(made))
    measured = memory.measure([partial(run_alone, made, sampler, *step) for step in steps])
    graphs = config.graphs != "off" and why_not_graphs(made) is None
    return profiled_blocks(measured, config, specs, made.max_model_len, graphs)


def device_memory(device: torch.device) -> DeviceMemory | None:
    return CudaMemory(device) if device.type == "cuda" else None


def run_alone(made: Assembly, sampler: Sampler, plan: StepPlan, requests: Mapping[str, Request]) -> None:
    """One step with a cache of one block."""
    executor = _worker(made, new_cache(made, 1, 0), sampler)
    executor.collect(executor.submit(Planner(made.config.block_size).step(plan, requests)))


def _worker(
    made: Assembly,
    cache: KVCache,
    sampler: Sampler,
    proposer: Proposer | None = None,
    store: PageStore | LayeredPageStore | None = None,
) -> LocalExecutor:
    from reference_impl.executor.local import LocalExecutor

    return LocalExecutor(
        made.model, cache, made.attention, made.kv_specs, made.clock, sampler,
        max_num_seqs=made.config.max_num_seqs, max_len=made.max_model_len, proposer=proposer,
        page_store=store,
    )  # fmt: skip


def make_cache(made: Assembly) -> KVCache:
    return new_cache(made, made.num_blocks, made.num_host_blocks)


def new_cache(made: Assembly, num_blocks: int, num_host_blocks: int) -> PagedKVCache:
    model = made.model
    return kv_cache(made.kv_specs, num_blocks, model.dtype, model.device, num_host_blocks, made.config.kv_dtype)


def make_attention(made: Assembly) -> AttentionBackend:
    c = made.model.config
    if computes_with_triton(made):
        from reference_impl.layers.triton_attention import TritonAttention

        return TritonAttention(c.attention_scale, c.attention_softcap)
    from reference_impl.layers.attention import TorchAttention

    return TorchAttention(c.attention_scale, made.model.dtype, c.attention_softcap)


def make_executor(made: Assembly, parts: Parts) -> Executor:
    sampler = part(parts.sampler, lambda: make_sampler(made))
    executor = _worker(made, made.kv_cache, sampler, parts.proposer, parts.page_store)
    reason = why_not_graphs(made)
    if reason is None and made.config.graphs != "off":
        from reference_impl.executor.graphs import CudaRecorder

        recorder = CudaRecorder(made.model.device, made.config.dependent_launches == "on")
        executor.use_graphs(recorder, made.config.max_num_seqs, made.max_model_len, made.config.num_drafts)
    elif reason is not None and made.config.graphs == "on":
        raise ValueError(f"graphs='on' cannot be: {reason}. Use graphs='off', or 'auto'")
    elif made.config.dependent_launches == "on":
        why = "graphs are off" if reason is None else reason
        raise ValueError(f"dependent_launches='on' is for CUDA graphs: {why}. Use dependent_launches='off'")
    return executor


def why_not_graphs(made: Assembly) -> str | None:
    """None: CUDA graphs are possible."""
    from reference_impl.layers.backend import writes_and_attends

    if made.model.device.type != "cuda":
        return f"the model is on {made.model.device}, and only a GPU has them"
    if writes_and_attends(made.model.kernels, made.attention) is None:
        return (
            "rows that pad a batch must not be written to the cache, which only our fused kernel takes care of: it "
            "needs attention='triton' and a model with kernels='triton'"
        )
    if not takes_bounds(made.attention):
        return f"{type(made.attention).__name__} reads lengths on the host, which a replay does not change"
    return None


def make_sampler(made: Assembly) -> Sampler:
    if computes_with_triton(made):
        from reference_impl.sampling.triton_sampler import sample_with_triton

        return sample_with_triton
    from reference_impl.sampling.sampler import sample

    return sample


def computes_with_triton(made: Assembly) -> bool:
    """Chosen once, here; a kernel that then fails is an error, and nothing else steps in."""
    from reference_impl.layers.backend import choose_backend

    model = made.model
    return choose_backend(made.config.attention, model.device, model.dtype) == "triton"
