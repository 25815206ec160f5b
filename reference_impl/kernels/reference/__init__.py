"""Every kernel in plain torch: the oracle for Triton, and what runs on a CPU."""

from reference_impl.kernels.reference.attention import (
    attention_one_row,
    attention_rows,
    causal_mask,
    context_slots,
    rotate,
    soft_cap,
)
from reference_impl.kernels.reference.experts import grouped_gemm, lora_expand, lora_shrink
from reference_impl.kernels.reference.four_bits import from_four_bits, to_four_bits
from reference_impl.kernels.reference.fused_linear import fused_linear, fused_linear_w4a16
from reference_impl.kernels.reference.linear import (
    gemm,
    gemm_fp8,
    gemm_w4a16,
    gemm_w8a16,
    pack_int4,
    quantize_rows_fp8,
    unpack_int4,
)
from reference_impl.kernels.reference.paged_attention import (
    flash_attention,
    merge_splits,
    paged_decode,
    stored,
    tree_mask,
)
from reference_impl.kernels.reference.rows import (
    GATES,
    Activation,
    add_rms_norm,
    add_rms_norm_fp8,
    gelu_tanh_and_mul,
    rms_norm,
    rotate_and_write,
    silu_and_mul,
    silu_and_mul_fp8,
    to_eight_bits,
)
from reference_impl.kernels.reference.sampling import sample_tokens

__all__ = [
    "GATES",
    "Activation",
    "add_rms_norm",
    "add_rms_norm_fp8",
    "attention_one_row",
    "attention_rows",
    "causal_mask",
    "context_slots",
    "flash_attention",
    "from_four_bits",
    "fused_linear",
    "fused_linear_w4a16",
    "gelu_tanh_and_mul",
    "gemm",
    "gemm_fp8",
    "gemm_w4a16",
    "gemm_w8a16",
    "grouped_gemm",
    "lora_expand",
    "lora_shrink",
    "merge_splits",
    "pack_int4",
    "paged_decode",
    "quantize_rows_fp8",
    "rms_norm",
    "rotate",
    "rotate_and_write",
    "sample_tokens",
    "silu_and_mul",
    "silu_and_mul_fp8",
    "soft_cap",
    "stored",
    "to_eight_bits",
    "to_four_bits",
    "tree_mask",
    "unpack_int4",
]
