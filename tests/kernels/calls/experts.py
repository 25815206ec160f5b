"""Experts with the sizes of a Qwen3-30B-A3B, adapters with those of a Llama-3-8B."""

from __future__ import annotations

import torch
from torch import Tensor

from reference_impl.kernels.grouped_gemm import grouped_gemm
from reference_impl.kernels.lora import lora_expand, lora_shrink
from tests.kernels.calls.meta import Call, empty


def _grouped(tokens: int) -> Call:
    experts, in_features, out_features = 128, 2048, 1536

    def call(dtype: torch.dtype) -> Tensor:
        weights = empty(experts, out_features, in_features, dtype=dtype)
        return grouped_gemm(empty(tokens, in_features, dtype=dtype), weights, empty(experts + 1, dtype=torch.int32))

    return call


def _lora(function: str, tokens: int, rank: int) -> Call:
    features, adapters = 4096, 32

    def call(dtype: torch.dtype) -> Tensor:
        x, index = empty(tokens, features, dtype=dtype), empty(tokens, dtype=torch.int32)
        if function == "shrink":
            return lora_shrink(x, empty(adapters, rank, features, dtype=dtype), index)
        return lora_expand(
            empty(tokens, rank, dtype=dtype), empty(adapters, features, rank, dtype=dtype), index, x
        )  # fmt: skip

    return call


CALLS: dict[str, Call] = {
    "grouped_gemm, decode": _grouped(64 * 8),
    "grouped_gemm, some rows": _grouped(512 * 8),
    "grouped_gemm, prompts": _grouped(8192 * 8),
}
CALLS |= {
    f"lora_{function}, rank {rank}, {name}": _lora(function, tokens, rank)
    for function in ("shrink", "expand")
    for rank in (8, 32, 64)
    for name, tokens in (("decode", 64), ("prompts", 8192))
}
