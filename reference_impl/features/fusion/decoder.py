"""The decoder with Triton's kernels: the operators between two products are one launch, or part of a product's.

Norm and rotary embedding of queries and keys and the write to the cache are one kernel (`rotate_and_write`), and norms,
gates and the residual stream join products as `Fusion` chooses. The result is the same as that of `Decoder`. This
extends `Decoder.hidden_states` (here) and `DecoderLayer.attend` (layer.py); `fused` does so for any family.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from reference_impl.core.decoder import Decoder, DecoderLayer
from reference_impl.core.linear import Methods
from reference_impl.core.model_config import ModelConfig
from reference_impl.features.fusion.experts import StackedExpertsLayer
from reference_impl.features.fusion.fusion import Fusion
from reference_impl.features.fusion.kernels import Kernels, triton_kernels, writes_and_attends
from reference_impl.features.fusion.layer import FusedLayer
from reference_impl.features.fusion.tuning import seconds_on_gpu, tune
from reference_impl.interfaces import AttentionBackend, Batch, KVCache
from reference_impl.kernels import reference
from reference_impl.models.decoders import Kind
from reference_impl.models.moe import ExpertsLayer


class FusedDecoder(Decoder):
    """`Decoder` in fewer launches. Arguments: see `Decoder`; kernels: None for Triton's."""

    watched = False  # see features/watching: each product then by itself, and no CUDA graphs

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        max_position: int | None = None,
        methods: Methods | None = None,
        layer: Callable[..., DecoderLayer] = FusedLayer,
        kernels: Kernels | None = None,
    ):
        kernels, joins_norms = kernels or triton_kernels(), type(self).normalize is reference.rms_norm
        if not joins_norms:  # the family has norms of another kind
            kernels = kernels.with_norm(type(self).normalize)
        super().__init__(config, dtype, device, max_position, methods, partial(layer, kernels=kernels))
        self.kernels, self.fusion = kernels, Fusion(kernels, config.norm_eps, joins_norms)
        self._times: dict[int, dict[str, dict[str, float]]] = {}  # of ways to compute a step of so many tokens

    def hidden_states(self, batch: Batch, kv_cache: KVCache, attention: AttentionBackend) -> Tensor:
        x = self.embed(batch.input_ids)
        # A kernel that rotates and writes looks a position's cosine up itself.
        whole = writes_and_attends(self.kernels, attention)
        tables = [table.cos_sin for table in self.rotaries]
        ropes = [(t if whole else t.index_select(1, batch.positions)).unbind() for t in tables]
        attention.plan(batch)
        added = None
        for layer in self.fused_layers():
            cos, sin = ropes[layer.rotary]
            x, added = layer.compute(self.fusion, x, added, cos, sin, attention, kv_cache, batch)
        last = batch.logits_indices
        if len(last) < len(x):  # else all tokens, in their order
            x, added = x[last], None if added is None else added[last]
        return self.fusion.norm(x, added, self.norm)[0]

    def fused_layers(self) -> list[FusedLayer]:
        return [layer for layer in self.layers if isinstance(layer, FusedLayer)]

    @torch.inference_mode()
    def tune(self, num_tokens: int) -> None:
        """Measures, on a GPU, which products are faster in one launch with their neighbours in steps of so many tokens,
        and uses that from now on. Call it before a CUDA graph of such a step is captured; it takes some ten
        milliseconds."""
        can = any(self.fusion.can(linear, num_tokens) for linear in self.linears())
        if can and self.device.type == "cuda" and num_tokens not in self._times:
            x = torch.randn(num_tokens, self.config.hidden_size, dtype=self.dtype, device=self.device)
            self._times[num_tokens] = tune(self.fusion, self.fused_layers(), x, seconds_on_gpu)

    def choices(self) -> dict[int, dict[str, Any]]:
        """What `tune` chose: {number of tokens: the fused products, and the microseconds of each way}."""
        chosen = self.fusion.chosen
        return {n: {"fused": sorted(chosen[n]), "microseconds": times} for n, times in sorted(self._times.items())}


@cache
def fused(kind: Kind) -> tuple[type[FusedDecoder], type[FusedLayer]]:
    """The classes of a family's decoder and layers in fewer launches; the family's own methods come first."""
    decoder, layer = kind
    if issubclass(layer, ExpertsLayer):
        layer = StackedExpertsLayer
    return _joined(decoder, FusedDecoder), _joined(layer, FusedLayer)


def _joined(special: type, fusing: type) -> Any:
    return fusing if issubclass(fusing, special) else type(f"Fused{special.__name__}", (special, fusing), {})
