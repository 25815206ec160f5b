"""The half of an engine that computes. It is made from a model, the engine's options and its parts that compute, where
the model is: beside the planner, or in a process of its own.

What computes is imported where it is made: a simulated GPU brings its own, and then torch is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from reference_impl.assembly.checks import check_scales
from reference_impl.assembly.config import ConfigError, EngineConfig
from reference_impl.assembly.kv_cache import kv_cache, widths
from reference_impl.assembly.parts import Drafts, Parts, part
from reference_impl.assembly.speculation import EARLY_EXIT, lookahead_of, tree_of
from reference_impl.core.engine import WallClock
from reference_impl.features.beams.planning import ForkingPlanner
from reference_impl.features.process.facts import Facts, ModelFacts
from reference_impl.features.sizing.budget import check_memory, num_blocks_for, num_host_blocks_for
from reference_impl.features.windows.groups import kv_specs, of_stage
from reference_impl.interfaces import (
    AttentionBackend,
    Executor,
    KVCache,
    KVSpec,
    Proposer,
    ReadsFields,
    Request,
    Sampler,
    StepPlan,
    takes_bounds,
)
from reference_impl.models.config_rope import reason_for_limit

if TYPE_CHECKING:
    import torch

    from reference_impl.assembly.worker import LocalExecutor
    from reference_impl.core.decoder import Decoder
    from reference_impl.core.kv_cache import PagedKVCache
    from reference_impl.core.model_config import ModelConfig
    from reference_impl.core.sampler import TorchSampler
    from reference_impl.features.sizing.profile import DeviceMemory
    from reference_impl.features.speculative.feature_head import FeatureHead
    from reference_impl.features.speculative.model_source import Draft
    from reference_impl.interfaces.pages import LayeredPageStore, PageStore


class WorkerHalf:
    """The KV cache, attention and executor of `parts`, or the defaults. facts: what a planner has to know of them.
    config: from `checks.settled`. ValueError or ConfigError where model, parts and options contradict each other.

    bytes_per_block: in the caches of model and draft model together.
    """

    def __init__(self, model: Decoder, config: EngineConfig, parts: Parts):
        self.model, self.config = model, config
        self.max_model_len = max_model_len(model, config)
        check_scales(config, parts.kv_cache, parts.attention)
        self.kv_specs = kv_specs_of(model.config, model.dtype, config, self.max_model_len)
        self.bytes_per_block = self.kv_specs[0].bytes_per_block
        if parts.draft_model is not None or _is_early(config):
            from reference_impl.assembly.draft_model import check_draft_model, draft_spec, exit_layer, has_cache

            check_draft_model(parts, model, self.kv_specs, self.max_model_len, config)
            exit_layer(config, model)  # raises where there is no such layer
            if has_cache(parts.draft_model):
                self.bytes_per_block += draft_spec(parts.draft_model, config).bytes_per_block
        self.clock = part(parts.clock, WallClock)
        self.attention = part(parts.attention, lambda: make_attention(model, config))
        self.num_blocks = size_cache(self, parts)
        self.num_host_blocks = num_host_blocks_for(config, self.bytes_per_block)
        if parts.kv_cache is None:
            check_memory(self.num_blocks, self.num_host_blocks, self.bytes_per_block, model.device)
        self.kv_cache = part(parts.kv_cache, lambda: new_cache(self, self.num_blocks, self.num_host_blocks))
        self.executor = part(parts.executor, lambda: make_executor(self, parts))
        self.facts = self._facts(stores_pages=parts.page_store is not None)

    def _facts(self, stores_pages: bool) -> Facts:
        model, weights = self.model, ""
        if stores_pages:
            from reference_impl.models.identity import weights_of

            weights = weights_of(model)
        reads = frozenset(self.executor.reads if isinstance(self.executor, ReadsFields) else ())
        facts = ModelFacts(model.config.whole, str(model.dtype), model.device.type, weights)
        return Facts(
            facts, self.kv_specs, self.num_blocks,
            self.num_host_blocks, self.config.max_num_seqs, self.max_model_len, stores_pages, reads,
        )  # fmt: skip


# --- how much there is ------------------------------------------------------------------------------------------------


def max_model_len(model: Decoder, config: EngineConfig) -> int:
    limit = min(model.config.max_position, model.rotary.max_position)
    length = config.max_model_len or limit
    if length > limit:
        where = f"the model's {limit} positions{reason_for_limit(model.config)}"
        raise ConfigError(f"max_model_len {length} is above {where}")
    return length


def kv_specs_of(c: ModelConfig, dtype: torch.dtype, config: EngineConfig, max_model_len: int) -> tuple[KVSpec, ...]:
    """The KV groups of a model. dtype: the model's."""
    # A window that is never left hides nothing: such a layer keeps everything, and prefixes can be shared.
    windows = [w if w is not None and w < max_model_len else None for w in c.layer_windows]
    each = widths(config.kv_dtype, dtype)
    specs = kv_specs(windows, c.num_kv_heads, c.head_dim, config.block_size, **each)
    return specs if c.stage is None else of_stage(specs, c.stage)


def size_cache(half: WorkerHalf, parts: Parts) -> int:
    """The number of KV blocks. The memory of a GPU is measured, unless the config sets the size or a custom part holds
    the tensors."""
    config = half.config
    asked = config.num_blocks is not None or config.kv_cache_bytes is not None
    own = parts.kv_cache is not None or parts.executor is not None
    memory = None if asked or own else device_memory(half.model.device)
    return num_blocks_for(config, half.bytes_per_block) if memory is None else measured_blocks(half, parts, memory)


def device_memory(device: torch.device) -> DeviceMemory | None:
    if device.type != "cuda":
        return None
    from reference_impl.features.sizing.profile import CudaMemory

    return CudaMemory(device)


def measured_blocks(half: WorkerHalf, parts: Parts, memory: DeviceMemory) -> int:
    from reference_impl.features.sizing.profile import bytes_of_graphs, profiled_blocks, worst_steps

    config, specs = half.config, half.kv_specs
    room = memory.total // half.bytes_per_block * config.block_size // len(specs)
    by_model = parts.draft_model is not None
    steps = worst_steps(config, specs, half.max_model_len, half.model.config.vocab_size, room, by_model)
    sampler = make_sampler(half) if parts.sampler is None else parts.sampler
    measured = memory.measure([partial(run_alone, half, sampler, parts.draft_model, *step) for step in steps])
    of_graphs = 0
    if config.graphs != "off" and why_not_graphs(half, parts.draft_model) is None:
        from reference_impl.features.graphs.graphs import WIDEST_TREES

        trees = bool(config.draft_tree) or config.speculative == "lookahead"
        of_graphs = bytes_of_graphs(measured, steps, WIDEST_TREES if trees else None)
    return profiled_blocks(measured, config, half.bytes_per_block, len(specs), half.max_model_len, of_graphs)


def run_alone(
    half: WorkerHalf,
    sampler: Sampler | TorchSampler,
    draft: Drafts | None,
    plan: StepPlan,
    requests: Mapping[str, Request],
) -> None:
    """Runs one step with a cache of one block, to measure the memory that a step takes besides the blocks."""
    cache = new_cache(half, 1, 0)
    executor = new_worker(half, cache, sampler, draft=make_draft(half, draft, cache, 1, 0))
    executor.collect(executor.submit(ForkingPlanner(half.config.block_size).step(plan, requests)))


# --- what computes ----------------------------------------------------------------------------------------------------


def new_cache(half: WorkerHalf, num_blocks: int, num_host_blocks: int) -> PagedKVCache:
    model = half.model
    return kv_cache(half.kv_specs, num_blocks, model.dtype, model.device, num_host_blocks, half.config.kv_dtype)


def _is_early(config: EngineConfig) -> bool:
    """Whether the model's own first layers draft."""
    return bool(config.exit_layer) or config.speculative == EARLY_EXIT


def make_draft(
    half: WorkerHalf, draft: Drafts | None, target_cache: KVCache, num_blocks: int, num_host_blocks: int
) -> Draft | None:
    """What drafts in the worker; None: there is no draft model. One that needs a KV cache of its own gets it, of so
    many blocks, and its own attention."""
    if draft is None and not _is_early(half.config):
        return None
    import torch

    from reference_impl.assembly.draft_model import draft_spec, exit_layer
    from reference_impl.features.speculative.draft_model import DraftModel
    from reference_impl.features.speculative.early_exit import EarlyExit, first_layers
    from reference_impl.features.speculative.feature_head import FeatureDraft, FeatureHead
    from reference_impl.features.speculative.medusa import MedusaDraft, MedusaHeads

    new = half.model.dtype
    if draft is None:
        early = first_layers(half.model, exit_layer(half.config, half.model))
        return EarlyExit(early, target_cache, half.attention, half.kv_specs, new)
    size = half.config.max_num_seqs + 1, draft.config.hidden_size
    if isinstance(draft, MedusaHeads):
        return MedusaDraft(draft, new, torch.zeros(size, dtype=draft.dtype, device=draft.device))
    spec = draft_spec(draft, half.config)
    cache = kv_cache([spec], num_blocks, draft.dtype, draft.device, num_host_blocks, half.config.kv_dtype)
    attention = make_attention(draft, half.config)
    if not isinstance(draft, FeatureHead):
        return DraftModel(draft, cache, attention, [spec], new)
    ahead = torch.zeros(size, dtype=draft.dtype, device=draft.device)
    return FeatureDraft(draft, cache, attention, spec, new, ahead)


def make_attention(model: Decoder | FeatureHead, config: EngineConfig) -> AttentionBackend:
    c = model.config
    if computes_with_triton(model, config):
        from reference_impl.features.fusion.attention import TritonAttention

        return TritonAttention(c.attention_scale, c.attention_softcap)
    from reference_impl.core.attention import TorchAttention

    kind = TorchAttention
    if config.kv_dtype != "auto":
        from reference_impl.features.kv_formats.attention import ScaledTorchAttention

        kind = ScaledTorchAttention
    if tree_of(config) is not None:
        from reference_impl.features.speculative.tree_attention import TreeTorchAttention

        kind = TreeTorchAttention
    return kind(c.attention_scale, model.dtype, c.attention_softcap)


def make_executor(half: WorkerHalf, parts: Parts) -> Executor:
    sampler = make_sampler(half) if parts.sampler is None else parts.sampler
    draft = make_draft(half, parts.draft_model, half.kv_cache, half.num_blocks, half.num_host_blocks)
    executor = new_worker(half, half.kv_cache, sampler, parts.proposer, parts.page_store, draft)
    reason = why_not_graphs(half, parts.draft_model)
    if reason is None and half.config.graphs != "off":
        from reference_impl.features.graphs.graphs import CudaRecorder

        recorder = CudaRecorder(half.model.device)
        executor.use_graphs(recorder, half.config.max_num_seqs, half.max_model_len, half.config.num_drafts)
    elif reason is not None and half.config.graphs == "on":
        raise ValueError(f"graphs='on' cannot be: {reason}. Use graphs='off', or 'auto'")
    return executor


def new_worker(
    half: WorkerHalf,
    cache: KVCache,
    sampler: Sampler | TorchSampler,
    proposer: Proposer | None = None,
    store: PageStore | LayeredPageStore | None = None,
    draft: Draft | None = None,
) -> LocalExecutor:
    from reference_impl.assembly.worker import LocalExecutor

    model: Any = half.model
    if half.config.batch_invariant:
        from reference_impl.features.invariant.model import TokenByToken

        model = TokenByToken(model)
    lookahead = lookahead_of(half.config)
    executor = LocalExecutor(
        model, cache, half.attention, half.kv_specs, half.clock, sampler,
        max_num_seqs=half.config.max_num_seqs, max_len=half.max_model_len, proposer=proposer,
        page_store=store, draft=draft, tree=None if lookahead else tree_of(half.config), lookahead=lookahead,
        typical=half.config.acceptance == "typical",
    )  # fmt: skip
    executor.decoder = half.model
    return executor


def why_not_graphs(half: WorkerHalf, draft: Drafts | None = None) -> str | None:
    """Why CUDA graphs are not possible; None: they are. draft: the draft model, if there is one."""
    if half.config.batch_invariant:
        return "batch_invariant computes each token by itself"
    if half.model.device.type != "cuda":
        return f"the model is on {half.model.device}, and only a GPU has them"
    from reference_impl.features.fusion.decoder import FusedDecoder
    from reference_impl.features.fusion.kernels import writes_and_attends

    model = half.model
    if not isinstance(model, FusedDecoder) or not writes_and_attends(model.kernels, half.attention):
        return (
            "rows that pad a batch must not be written to the cache, which only our kernels take care of: they need "
            "attention='triton' and a model with kernels='triton'"
        )
    if not takes_bounds(half.attention):
        return f"{type(half.attention).__name__} reads lengths on the host, which a replay does not change"
    return None


def make_sampler(half: WorkerHalf) -> Sampler | TorchSampler:
    from reference_impl.assembly.sampler import sample

    triton = computes_with_triton(half.model, half.config)
    if half.config.sampling_noise == "gumbel" and triton:
        from reference_impl.features.gumbel.triton import TritonGumbelSampler

        return TritonGumbelSampler()
    if half.config.sampling_noise == "gumbel":
        from reference_impl.features.gumbel.sampler import GumbelSampler

        return GumbelSampler()
    if triton:
        from reference_impl.features.triton_sampler.sampler import TritonSampler

        return TritonSampler()
    return sample


def computes_with_triton(model: Decoder | FeatureHead, config: EngineConfig) -> bool:
    """Whether Triton's kernels compute. It is decided once, here: a kernel that fails later is an error, and nothing
    takes its place. ValueError for attention="compiled" and a model that was not compiled."""
    from reference_impl.core.decoder import Decoder
    from reference_impl.features.fusion.kernels import choose_backend

    if config.attention == "compiled" and isinstance(model, Decoder):
        from reference_impl.features.compiled.decoder import CompiledDecoder

        if not isinstance(model, CompiledDecoder):
            raise ValueError(
                "EngineConfig.attention: expected a model that was loaded with kernels='compiled', got one that was "
                "not: load_model(..., kernels='compiled'), or attention='auto'"
            )
    return choose_backend(config.attention, model.device, model.dtype) == "triton"
