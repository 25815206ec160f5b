"""The parts that an engine uses where `Parts` names none: chosen once, by the model, its device and the config.

What computes is imported where it is made: a simulated GPU brings its own, and then torch stays out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from reference_impl.assembly.checks import check_page_store
from reference_impl.assembly.config import ConfigError, EngineConfig
from reference_impl.assembly.draft_model import draft_spec, exit_layer, must_follow
from reference_impl.assembly.kv import kv_manager, stored_kv_manager
from reference_impl.assembly.kv_cache import kv_cache
from reference_impl.assembly.parts import Drafts, Parts, part
from reference_impl.assembly.scheduler import continuous_batching
from reference_impl.assembly.speculation import lookahead_of, tree_of
from reference_impl.core.block_pool import BlockPool
from reference_impl.features.beams.planning import ForkingPlanner
from reference_impl.features.grammars.drafts import ShowsDrafts
from reference_impl.interfaces import (
    AttentionBackend,
    Executor,
    KVCache,
    KVManager,
    KVSpec,
    LayeredPageStore,
    PageStore,
    PrefixIndex,
    Proposer,
    Sampler,
    Scheduler,
    takes_bounds,
)

if TYPE_CHECKING:
    from reference_impl.assembly.made import Made
    from reference_impl.assembly.worker import LocalExecutor
    from reference_impl.core.decoder import Decoder
    from reference_impl.core.kv_cache import PagedKVCache
    from reference_impl.features.speculative.feature_head import FeatureHead
    from reference_impl.features.speculative.model_source import Draft


def planner_for(made: Made) -> ForkingPlanner:
    return ForkingPlanner(made.config.block_size)


def make_kv_manager(made: Made, parts: Parts) -> KVManager:
    """ConfigError if there is a page store and no prefix cache."""
    config, specs, pool = made.config, made.kv_specs, made.block_pool
    index = make_prefix_index(config, specs) if parts.prefix_index is None else parts.prefix_index
    host_pool = BlockPool(made.num_host_blocks) if made.num_host_blocks else None
    if parts.page_store is None:
        return kv_manager(pool, config.block_size, [spec.window for spec in specs], index, host_pool)
    check_page_store(parts.page_store)
    if index is None:
        why = "it is off" if config.prefix_cache == "off" else "a model with sliding windows has none"
        raise ConfigError(f"Parts.page_store fills the prefix cache, and {why}: leave the store out")
    from reference_impl.features.process.worker import fingerprint
    from reference_impl.models.identity import weights_of

    model = fingerprint(made.model.config, made.model.dtype, weights_of(made.model))
    # Pages of another model or format have other keys. By layer 2: the order of a page's bytes.
    root = f"by layer 2 {model} {config.kv_dtype} {specs!r}".encode()
    return stored_kv_manager(pool, config.block_size, index, parts.page_store, root, host_pool)


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


def make_scheduler(made: Made, parts: Parts, num_stages: int) -> Scheduler:
    c = made.config
    return continuous_batching(
        made.kv, c.max_num_seqs, c.max_num_batched_tokens, parts.policy, c.admission, c.preemption, c.num_drafts,
        parts.host_proposer, c.adaptive_drafts == "on", num_stages, tree_of(c), made.max_model_len,
        must_follow(c, parts.draft_model), isinstance(made.executor, ShowsDrafts),
    )  # fmt: skip


def make_cache(made: Made) -> KVCache:
    return new_cache(made, made.num_blocks, made.num_host_blocks)


def new_cache(made: Made, num_blocks: int, num_host_blocks: int) -> PagedKVCache:
    model = made.model
    return kv_cache(made.kv_specs, num_blocks, model.dtype, model.device, num_host_blocks, made.config.kv_dtype)


def make_draft(
    made: Made, draft: Drafts | None, target_cache: KVCache, num_blocks: int, num_host_blocks: int
) -> Draft | None:
    """What needs a cache of its own gets one, of these blocks, and its own attention. None: there is no draft model."""
    early_layers = exit_layer(made.config, made.model)
    if draft is None and not early_layers:
        return None
    import torch

    from reference_impl.features.speculative.draft_model import DraftModel
    from reference_impl.features.speculative.early_exit import EarlyExit, first_layers
    from reference_impl.features.speculative.feature_head import FeatureDraft, FeatureHead
    from reference_impl.features.speculative.medusa import MedusaDraft, MedusaHeads

    new = made.model.dtype
    if draft is None:
        early = first_layers(made.model, early_layers)
        return EarlyExit(early, target_cache, made.attention, made.kv_specs, new)
    size = made.config.max_num_seqs + 1, draft.config.hidden_size
    if isinstance(draft, MedusaHeads):
        return MedusaDraft(draft, new, torch.zeros(size, dtype=draft.dtype, device=draft.device))
    spec = draft_spec(draft, made.config)
    cache = kv_cache([spec], num_blocks, draft.dtype, draft.device, num_host_blocks, made.config.kv_dtype)
    attention = make_attention(draft, made.config)
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
    from reference_impl.features.kv_formats.attention import ScaledTorchAttention

    kind = TorchAttention if config.kv_dtype == "auto" else ScaledTorchAttention
    if tree_of(config) is not None:
        from reference_impl.features.speculative.tree_attention import TreeTorchAttention

        kind = TreeTorchAttention
    return kind(c.attention_scale, model.dtype, c.attention_softcap)


def make_executor(made: Made, parts: Parts) -> Executor:
    sampler = part(parts.sampler, lambda: make_sampler(made))
    draft = make_draft(made, parts.draft_model, made.kv_cache, made.num_blocks, made.num_host_blocks)
    executor = new_worker(made, made.kv_cache, sampler, parts.proposer, parts.page_store, draft)
    reason = why_not_graphs(made, parts.draft_model)
    if reason is None and made.config.graphs != "off":
        from reference_impl.features.graphs.graphs import CudaRecorder

        recorder = CudaRecorder(made.model.device)
        executor.use_graphs(recorder, made.config.max_num_seqs, made.max_model_len, made.config.num_drafts)
    elif reason is not None and made.config.graphs == "on":
        raise ValueError(f"graphs='on' cannot be: {reason}. Use graphs='off', or 'auto'")
    return executor


def new_worker(
    made: Made,
    cache: KVCache,
    sampler: Sampler,
    proposer: Proposer | None = None,
    store: PageStore | LayeredPageStore | None = None,
    draft: Draft | None = None,
) -> LocalExecutor:
    from reference_impl.assembly.worker import LocalExecutor

    model: Any = made.model
    if made.config.batch_invariant:
        from reference_impl.features.invariant.model import TokenByToken

        model = TokenByToken(model)
    lookahead = lookahead_of(made.config)
    return LocalExecutor(
        model, cache, made.attention, made.kv_specs, made.clock, sampler,
        max_num_seqs=made.config.max_num_seqs, max_len=made.max_model_len, proposer=proposer,
        page_store=store, draft=draft, tree=None if lookahead else tree_of(made.config), lookahead=lookahead,
        typical=made.config.acceptance == "typical",
    )  # fmt: skip


def why_not_graphs(made: Made, draft: Drafts | None = None) -> str | None:
    """None: CUDA graphs are possible. draft: the draft model, if there is one."""
    if made.config.batch_invariant:
        return "batch_invariant computes each token by itself"
    if made.model.device.type != "cuda":
        return f"the model is on {made.model.device}, and only a GPU has them"
    from reference_impl.features.fusion.decoder import FusedDecoder
    from reference_impl.features.fusion.kernels import writes_and_attends

    model = made.model
    skips = getattr(made.attention, "skips_padding", False)
    if not isinstance(model, FusedDecoder) or not (skips or writes_and_attends(model.kernels, made.attention)):
        return (
            "rows that pad a batch must not be written to the cache, which only our kernels take care of: they need "
            "attention='triton' and a model with kernels='triton'"
        )
    if not takes_bounds(made.attention):
        return f"{type(made.attention).__name__} reads lengths on the host, which a replay does not change"
    return None


def make_sampler(made: Made) -> Sampler:
    triton = computes_with_triton(made.model, made.config)
    if made.config.sampling_noise == "gumbel" and triton:
        from reference_impl.assembly.triton_gumbel_sampler import sample_with_triton_and_gumbel

        return sample_with_triton_and_gumbel
    if made.config.sampling_noise == "gumbel":
        from reference_impl.assembly.gumbel_sampler import sample_with_gumbel

        return sample_with_gumbel
    if triton:
        from reference_impl.assembly.triton_sampler import sample_with_triton

        return sample_with_triton
    from reference_impl.assembly.sampler import sample

    return sample


def computes_with_triton(model: Decoder | FeatureHead, config: EngineConfig) -> bool:
    """Chosen once, here; a kernel that then fails is an error, and nothing else steps in."""
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
