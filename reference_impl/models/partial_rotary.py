"""Layers that rotate the first part of each head only: Phi-3's and StableLM's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from reference_impl.core.decoder import DecoderLayer
from reference_impl.core.model_config import ModelConfig
from reference_impl.interfaces import AttentionBackend, Batch, KVCache


class PartialRotaryLayer(DecoderLayer):
    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.order = rotated_first(self.config, self.input_norm.device)

    def attend(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, attention: AttentionBackend, kv_cache: KVCache, batch: Batch
    ) -> Tensor:
        if self.order is not None:
            c = self.config
            qk, v = qkv.split(((c.num_heads + c.num_kv_heads) * c.head_dim, c.num_kv_heads * c.head_dim), dim=1)
            qk = qk.unflatten(1, (-1, c.head_dim)).index_select(-1, self.order)
            qkv = torch.cat((qk.flatten(1), v), dim=1)
        return super().attend(qkv, cos, sin, attention, kv_cache, batch)


def rotated_first(config: ModelConfig, device: torch.device) -> Tensor | None:
    """The order of a head's values in which whole heads can be rotated, [head_dim]; None: they are in it.

    A rotation turns pairs, value i with value i + head_dim / 2. Where only the first n values of a head are rotated,
    value i goes with i + n / 2. So both halves get their share of them, and then of the values that stay as they are,
    whose angle is 0 in `RotaryTable`: of 8 values with n = 4, 0 1 4 5 and 2 3 6 7. Queries and keys are reordered
    alike, so their products are the same, whatever rotates them and writes them to the cache.
    """
    rotated = int(config.head_dim * config.rope.partial)
    if rotated == config.head_dim:
        return None
    first, still = torch.arange(rotated).chunk(2), torch.arange(rotated, config.head_dim).chunk(2)
    return torch.cat((first[0], still[0], first[1], still[1])).to(device)
