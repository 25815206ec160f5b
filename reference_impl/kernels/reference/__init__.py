"""Every kernel in plain torch: the oracle for Triton, and what runs on a CPU. Each file is imported when one of its
names is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reference_impl.kernels.reference.attention import *  # noqa: F403
    from reference_impl.kernels.reference.experts import *  # noqa: F403
    from reference_impl.kernels.reference.four_bits import *  # noqa: F403
    from reference_impl.kernels.reference.linear import *  # noqa: F403
    from reference_impl.kernels.reference.paged_attention import *  # noqa: F403
    from reference_impl.kernels.reference.rows import *  # noqa: F403
    from reference_impl.kernels.reference.sampling import *  # noqa: F403

_FILES = {
    "attention": "attention_one_row attention_rows causal_mask context_slots rotate soft_cap",
    "experts": "grouped_gemm lora_expand lora_shrink",
    "four_bits": "channels_from_four_bits channels_to_four_bits from_four_bits to_four_bits",
    "linear": "fused_linear fused_linear_w4a16 gemm gemm_fp4 gemm_fp8 gemm_fp8_blocks gemm_w4a16 gemm_w8a8 "
    "gemm_w8a16 gemm_widened pack_int4 quantize_groups_fp8 quantize_rows_fp8 quantize_rows_int8 unpack_int4",
    "paged_attention": "flash_attention merge_splits paged_decode stored tree_mask",
    "rows": "GATES Activation add_rms_norm add_rms_norm_fp8 gelu_tanh_and_mul rms_norm rotate_and_write "
    "silu_and_mul silu_and_mul_fp8 to_eight_bits",
    "sampling": "sample_tokens",
}
_HOMES = {name: file for file, names in _FILES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return found
