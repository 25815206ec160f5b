"""The plainest part of each kind, and an engine of them: one device, torch attention, one paged cache, first come.

`reference_impl.Engine` has the same parts with all features.
"""

from __future__ import annotations

from reference_impl.core.attention import TorchAttention
from reference_impl.core.block_pool import BlockPool
from reference_impl.core.decoder import Decoder
from reference_impl.core.engine import Engine, WallClock
from reference_impl.core.kv_cache import PagedKVCache
from reference_impl.core.kv_manager import KVManager
from reference_impl.core.sampler import TorchSampler
from reference_impl.core.scheduler import Scheduler
from reference_impl.core.worker import Worker
from reference_impl.interfaces import KVSpec, PrefixIndex, TakesEvents


def core_engine(
    model: Decoder,
    *,
    num_blocks: int,
    block_size: int = 16,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 2048,
    index: PrefixIndex | None = None,
    trace: TakesEvents | None = None,
) -> Engine:
    """An engine of the core's parts. num_blocks: blocks in the KV cache, of block_size tokens each. max_num_seqs: how
    many requests may run at a time. max_num_batched_tokens: the most new tokens in a step. index: finds cached
    prefixes; None: none is cached. ValueError for a model whose layers have sliding windows.
    """
    c = model.config
    if any(window is not None for window in c.layer_windows):
        raise ValueError("core_engine: expected layers that see everything; sliding windows need reference_impl.Engine")
    bits = 8 * model.dtype.itemsize
    spec = KVSpec(c.num_layers, c.num_kv_heads, c.head_dim, block_size, bits_per_value=bits)
    max_model_len = min(c.max_position, model.rotary.max_position)
    kv = KVManager(BlockPool(num_blocks), block_size, index=index)
    clock = WallClock()
    worker = Worker(
        model, PagedKVCache([spec], num_blocks, model.dtype, model.device),
        TorchAttention(c.attention_scale, model.dtype, c.attention_softcap), [spec], clock, TorchSampler(),
        max_num_seqs=max_num_seqs, max_len=max_model_len,
    )  # fmt: skip
    return Engine(
        model, Scheduler(kv, max_num_seqs, max_num_batched_tokens), kv, worker, block_size=block_size,
        num_blocks=num_blocks, max_model_len=max_model_len, clock=clock, trace=trace,
    )  # fmt: skip
