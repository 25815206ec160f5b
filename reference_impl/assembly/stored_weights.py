"""The linear method of each layer of a checkpoint that is quantized already: by config.json's quantization_config.

What it is multiplied with, in the order of preference; the first that holds the stored weights exactly, layer by layer:

    GPU with Triton     the kernel for the format; decoded once
    CPU, 16-bit model   torch's product for int4 or int8; decoded once
    CPU, float32        decoded once; torch's products, which round x to bfloat16
    CPU, float64; other GPUs    decoded once

"Decoded once" is a plain layer in the model's dtype. It is left out where such a model would take more than half of the
memory that is free. What remains is decoded anew for each product: right, and many times slower. `paths_of` says which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from reference_impl.annexes.cpu.default import default_method
from reference_impl.annexes.fusion.kernels import Kernels
from reference_impl.core.decoder import Decoder
from reference_impl.core.linear import Methods
from reference_impl.interfaces import LinearMethod
from reference_impl.models.config_json import MOST_BYTES
from reference_impl.models.config_reader import ConfigError
from reference_impl.models.json_file import read_object
from reference_impl.models.quantization.compressed_tensors import schemes
from reference_impl.models.quantization.converted import PER_PRODUCT, Converted, Decoded
from reference_impl.models.quantization.converted import Path as Form
from reference_impl.models.quantization.numbers import FORMATS
from reference_impl.models.quantization.paths import (
    CpuEightBits,
    CpuFourBits,
    EightBitIntegers,
    EightBitsBothSides,
    FourBitFloats,
    FourBitIntegers,
    Fp8Blocks,
)
from reference_impl.models.quantization.scheme import Scheme
from reference_impl.models.quantization.stored import Stored

_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def stored_methods(
    folder: Path, dtype: torch.dtype, device: torch.device, kernels: Kernels, free: int | None = None
) -> Methods | None:
    """None where config.json says nothing of quantization. ConfigError for a form that is not read.

    free: bytes of memory; None: enough.
    """
    path = folder / "config.json"
    raw = read_object(path, ConfigError, MOST_BYTES).get("quantization_config") if path.is_file() else None
    if not raw:
        return None
    scheme_of, inverse = schemes(raw, str(path))

    def method(name: str) -> LinearMethod:
        prefix, _, last = name.rpartition(".")
        names = [f"{prefix}.{part}" if prefix else part for part in _PARTS.get(last, (last,))]
        found = {part: scheme_of(part) for part in names}
        scheme = next(iter(found.values()))
        if any(other != scheme for other in found.values()):
            raise ConfigError(
                f"{path}: quantization_config: {name}: expected one scheme for {', '.join(found)}, which are one layer "
                f"here, found {', '.join(f'{part}: {one}' for part, one in found.items())}"
            )
        return _plain(dtype, device, kernels) if scheme is None else made(scheme)

    def made(scheme: Scheme) -> Stored:
        fits = free is None or decoded_bytes(folder, scheme, dtype) <= free // 2
        if kernels.backend == "triton":
            return _with_triton(scheme, dtype, device, inverse, kernels, fits)
        forms = _forms_of_torch(dtype, device, kernels, fits)
        return Converted(scheme, dtype, device, inverse, paths=forms)

    return method


def decoded_bytes(folder: Path, scheme: Scheme, dtype: torch.dtype) -> int:
    """About what the folder's weights take in dtype, if all were of the scheme; no less, as scales count as weights."""
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return stored * 8 * dtype.itemsize // FORMATS[scheme.numbers].bits


def paths_of(model: object) -> Counter[str]:
    """How many of a model's linear layers whose weights came quantized are multiplied in which way. Empty for a model
    that computes in another process: what is here then has no layers."""
    found: Counter[str] = Counter()
    for linear in model.linears() if isinstance(model, Decoder) else ():
        if isinstance(linear.method, Stored):
            form = linear.method.path(linear.params) if isinstance(linear.method, Converted) else None
            found[PER_PRODUCT if form is None else form.name] += 1
    return found


def _plain(dtype: torch.dtype, device: torch.device, kernels: Kernels) -> LinearMethod:
    if kernels.backend == "triton":
        from reference_impl.annexes.fusion.linear import TritonLinear

        return TritonLinear(dtype, device)
    return default_method(dtype, device)


def _forms_of_torch(dtype: torch.dtype, device: torch.device, kernels: Kernels, fits: bool) -> Sequence[Form]:
    decoded: list[Form] = [Decoded(_plain(dtype, device, kernels))] if fits else []
    if device.type != "cpu" or dtype is torch.float64:
        return decoded
    packed: list[Form] = [CpuFourBits(dtype), CpuEightBits(dtype)]
    return packed + decoded if dtype.itemsize == 2 else decoded + packed


def _with_triton(
    scheme: Scheme, dtype: torch.dtype, device: torch.device, inverse: bool, kernels: Kernels, fits: bool
) -> Converted:
    from reference_impl.annexes.fusion.linear import TritonStoredInt4
    from reference_impl.kernels import gemm_fp4, gemm_fp8, gemm_fp8_blocks, gemm_w4a16, gemm_w8a8, gemm_w8a16
    from reference_impl.kernels.launch import architecture
    from reference_impl.kernels.quantize_rows import quantize_groups_fp8, quantize_rows_int8

    four_bits = FourBitIntegers(gemm_w4a16.gemm_w4a16)
    in_groups = scheme.per == "group" and (scheme.group_size or 1) % 32 == 0
    if scheme.numbers == "int4" and in_groups and scheme.activations is None and dtype.itemsize == 2:
        return TritonStoredInt4(scheme, dtype, device, inverse, paths=[four_bits])
    forms: list[Form] = [
        four_bits,
        EightBitIntegers(gemm_w8a16.gemm_w8a16),
        EightBitsBothSides("int8", quantize_rows_int8, gemm_w8a8.gemm_w8a8),
        FourBitFloats(gemm_fp4.gemm_fp4),
    ]
    if architecture().has_fp8:
        forms.append(EightBitsBothSides("e4m3", gemm_fp8.quantize_rows_fp8, gemm_fp8.gemm_fp8))
        forms.append(Fp8Blocks(quantize_groups_fp8, gemm_fp8_blocks.gemm_fp8_blocks))
    if fits:
        forms.append(Decoded(_plain(dtype, device, kernels)))
    return Converted(scheme, dtype, device, inverse, paths=forms)
