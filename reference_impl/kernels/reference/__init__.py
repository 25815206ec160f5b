"""Every kernel in plain torch: the oracle for Triton, and what runs on a CPU."""

from reference_impl.kernels.reference.attention import (
    attention_decode_rows,
    attention_one_row,
    causal_mask,
    context_slots,
    flash_attention,
    merge_splits,
    paged_decode,
    tree_mask,
)
from reference_impl.kernels.reference.rows import gelu_tanh_and_mul, rms_norm, rotate, silu_and_mul, soft_cap

__all__ = [
    "attention_decode_rows",
    "attention_one_row",
    "causal_mask",
    "context_slots",
    "flash_attention",
    "gelu_tanh_and_mul",
    "merge_splits",
    "paged_decode",
    "rms_norm",
    "rotate",
    "silu_and_mul",
    "soft_cap",
    "tree_mask",
]
