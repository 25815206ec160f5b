"""The forms in which a GPU's kernels, or a CPU's own products, take weights that come quantized. `converted.py` says
what a form is and when it is taken.

Each is given the functions it multiplies with: a Triton kernel, or in a test its twin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd

import torch
from torch import Tensor

from reference_impl.kernels.reference import pack_int4
from reference_impl.kernels.reference.linear import FP4_STEP, GROUP
from reference_impl.models.quantization.converted import Path, Pieces
from reference_impl.models.quantization.cpu import CpuInt4, CpuInt8
from reference_impl.models.quantization.numbers import scales_to_e8m0
from reference_impl.models.quantization.scheme import Scheme

_BF16 = torch.bfloat16
Product = Callable[..., Tensor]
Rounding = Callable[[Tensor], tuple[Tensor, Tensor]]


def group_size_of(scheme: Scheme, in_features: int, most: int) -> int | None:
    """Inputs per scale as a kernel may have them: a power of two from 32 to `most` that divides the scheme's groups, or
    `in` where a row has one scale, which is then repeated. None where there is none."""
    whole = in_features if scheme.per in ("channel", "tensor") else scheme.group_size
    if whole is None or scheme.per == "block":
        return None
    size = gcd(whole, most)
    return size if size >= 32 else None


def by_group(values: Tensor, rows: int, groups: int) -> Tensor:
    """Scales or zeros of `Scheme.scale_shape` -> [groups, rows], contiguous, each repeated as often as needed."""
    spread = values.expand(rows, -1).repeat_interleave(groups // values.shape[1], 1)
    return spread.T.contiguous()


def is_exact(scales: Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(scales.to(dtype).float(), scales)


class FourBitIntegers(Path):
    """int4, symmetric or with zero points, in groups of a multiple of 32 inputs or one scale per row: `gemm_w4a16`,
    which multiplies sums by scales of any dtype. Takes 16-bit models only."""

    name, most = "W4A16", 128

    def __init__(self, gemm_w4a16: Product):
        self.gemm_w4a16 = gemm_w4a16

    def prepare(self, parts: Sequence[Pieces], scheme: Scheme, dtype: torch.dtype) -> dict[str, Tensor] | None:
        in_features = parts[0].codes.shape[1]
        size = group_size_of(scheme, in_features, self.most)
        if scheme.numbers != "int4" or size is None or dtype.itemsize != 2:
            return None
        groups = in_features // size
        packed = [pack_int4(part.codes.int() + 8, size) for part in parts]
        scales = [by_group(part.fitted.scales, len(part.codes), groups) for part in parts]
        found = {"weight": torch.cat(packed), "scales": torch.cat(scales, 1)}
        if is_exact(found["scales"], dtype):
            found["scales"] = found["scales"].to(dtype)
        if not scheme.symmetric:
            zeros = [by_group(zeros_of(part).int() + 8, len(part.codes), groups) for part in parts]
            found["zeros"] = torch.cat(zeros, 1).to(torch.uint8)
        return found

    def product(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        scales = params["scales"]
        return self.gemm_w4a16(x, params["weight"], scales, params.get("zeros"), x.shape[1] // len(scales))


class EightBitIntegers(Path):
    """int8 without zero points in groups of a multiple of 32 inputs, or one scale per row; x in 16 bits:
    `gemm_w8a16`."""

    name = "W8A16"

    def __init__(self, gemm_w8a16: Product):
        self.gemm_w8a16 = gemm_w8a16

    def prepare(self, parts: Sequence[Pieces], scheme: Scheme, dtype: torch.dtype) -> dict[str, Tensor] | None:
        known = scheme.numbers == "int8" and scheme.symmetric and scheme.activations is None
        if not known or scheme.per == "block" or (scheme.group_size or 32) % 32 or dtype.itemsize != 2:
            return None
        scales = [by_group(p.fitted.scales, len(p.codes), p.fitted.scales.shape[1]) for p in parts]
        return {"weight": torch.cat([part.codes for part in parts]), "scales": torch.cat(scales, 1)}

    def product(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        return self.gemm_w8a16(x, params["weight"], params["scales"])


class EightBitsBothSides(Path):
    """int8 or e4m3 with one scale per output, times activations in the same with one per token: `gemm_w8a8` or
    `gemm_fp8`, and the kernel that rounds the activations."""

    rounds = True

    def __init__(self, numbers: str, quantize_rows: Rounding, gemm: Product):
        self.numbers, self.quantize_rows, self.gemm = numbers, quantize_rows, gemm
        self.name = {"int8": "W8A8 int8", "e4m3": "W8A8 fp8"}[numbers]

    def prepare(self, parts: Sequence[Pieces], scheme: Scheme, dtype: torch.dtype) -> dict[str, Tensor] | None:
        inputs = scheme.activations
        if inputs is None or (scheme.numbers, inputs.numbers) != (self.numbers,) * 2:
            return None
        known = scheme.symmetric and inputs.symmetric and inputs.dynamic and inputs.per == "token"
        if not known or scheme.per not in ("channel", "tensor") or scheme.scales != "float":
            return None
        scales = [part.fitted.scales.expand(len(part.codes), 1)[:, 0] for part in parts]
        return {"weight": cat_bytes([part.codes for part in parts]), "scales": torch.cat(scales)}

    def product(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        return self.gemm(*self.quantize_rows(x), params["weight"], params["scales"], x.dtype)


class Fp8Blocks(Path):
    """e4m3 with one scale per 128 x 128 weights, times activations in e4m3 with one per token and 128 inputs:
    `gemm_fp8_blocks`. Of several parts all but the last have a multiple of 128 outputs."""

    name, rounds = "W8A8 fp8 by block", True

    def __init__(self, quantize_groups: Rounding, gemm_fp8_blocks: Product):
        self.quantize_groups, self.gemm = quantize_groups, gemm_fp8_blocks

    def prepare(self, parts: Sequence[Pieces], scheme: Scheme, dtype: torch.dtype) -> dict[str, Tensor] | None:
        inputs = scheme.activations
        known = (
            scheme.numbers == "e4m3"
            and scheme.per == "block"
            and scheme.block == (GROUP, GROUP)
            and inputs is not None
            and inputs.dynamic
        )
        if not known or inputs is None or (inputs.numbers, inputs.per, inputs.group_size) != ("e4m3", "group", GROUP):
            return None
        if any(len(part.codes) % GROUP for part in parts[:-1]):
            return None
        blocks = torch.cat([part.fitted.scales for part in parts])
        return {"weight": cat_bytes([part.codes for part in parts]), "scales": blocks}

    def product(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        return self.gemm(*self.quantize_groups(x), params["weight"], params["scales"], x.dtype)


class FourBitFloats(Path):
    """NVFP4 and MXFP4, x in 16 bits and a multiple of 64 inputs: `gemm_fp4`, which emulates the format on any GPU.
    In float16 also: no weight, before the tensor's scale, beyond the dtype's range."""

    name = "FP4 emulated in 16 bits"

    def __init__(self, gemm_fp4: Product):
        self.gemm_fp4 = gemm_fp4

    def prepare(self, parts: Sequence[Pieces], scheme: Scheme, dtype: torch.dtype) -> dict[str, Tensor] | None:
        form = (scheme.numbers, scheme.per, scheme.group_size, scheme.scales)
        known = form in (("e2m1", "group", 16, "e4m3"), ("e2m1", "group", 32, "e8m0"))
        if not known or dtype.itemsize != 2 or parts[0].codes.shape[1] % FP4_STEP:
            return None
        scales = torch.cat([part.fitted.scales for part in parts])
        if dtype is torch.float16 and not bool(((scales >= 2.0**-23) & (scales <= 65504 / 6)).all()):
            return None
        found = {"weight": torch.cat([pack_int4(part.codes, FP4_STEP) for part in parts])}
        found["scales"] = scales_to_e8m0(scales) if scheme.scales == "e8m0" else scales.to(torch.float8_e4m3fn)
        found["scales"] = found["scales"].view(torch.uint8).contiguous()
        if scheme.scales == "e4m3":
            found["tensor_scale"] = torch.cat([tensor_scale_of(part).expand(len(part.codes)) for part in parts])
        return found

    def product(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        return self.gemm_fp4(x, params["weight"], params["scales"], params.get("tensor_scale"))


class CpuFourBits(FourBitIntegers):
    """`CpuInt4`'s product, whose scales are bfloat16: taken where each scale of the checkpoint is one, exactly. x is
    rounded to bfloat16, and so is y before what zero points add: for them the product has no exact form, so the sums of
    x over each group are multiplied by them in float32."""

    name, most = "int4 of the CPU", 256

    def __init__(self, dtype: torch.dtype):
        self.method = CpuInt4(dtype)
        super().__init__(self.method.product)

    def prepare(self, parts: Sequence[Pieces], scheme: Scheme, dtype: torch.dtype) -> dict[str, Tensor] | None:
        found = super().prepare(parts, scheme, _BF16)
        if found is None or found["scales"].dtype is not _BF16:
            return None
        zeros = found.pop("zeros", None)
        scales = found["scales"].float()
        self.method.finish(found)
        if zeros is not None:
            found["offsets"] = (8 - zeros.float()) * scales  # [groups, out], exact: 8 bits times 4
        return found

    def product(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        y = self.method.product(params, x)
        if "offsets" not in params:
            return y
        sums = x.to(_BF16).float().unflatten(1, (len(params["offsets"]), -1)).sum(2)
        return torch.addmm(y.float(), sums, params["offsets"]).to(x.dtype)


class CpuEightBits(EightBitIntegers):
    """`CpuInt8`'s product, one scale per output, in bfloat16: taken where each scale of the checkpoint is one, exactly.
    Of 16 bits, x is rounded to bfloat16 before, and y after; float32 stays."""

    name = "int8 of the CPU"

    def __init__(self, dtype: torch.dtype):
        self.method = CpuInt8(dtype)
        super().__init__(self.method.product)

    def prepare(self, parts: Sequence[Pieces], scheme: Scheme, dtype: torch.dtype) -> dict[str, Tensor] | None:
        found = super().prepare(parts, scheme, _BF16)
        if found is None or len(found["scales"]) > 1 or not is_exact(found["scales"], _BF16):
            return None
        found["scales"] = found["scales"].to(_BF16)
        return found

    def product(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        return self.method.product(params, x)


def zeros_of(part: Pieces) -> Tensor:
    assert part.fitted.zeros is not None  # the scheme has them
    return part.fitted.zeros


def tensor_scale_of(part: Pieces) -> Tensor:
    assert part.fitted.tensor_scale is not None
    return part.fitted.tensor_scale


def cat_bytes(codes: Sequence[Tensor]) -> Tensor:
    """Tensors of int8 or float8 one below the other, which torch cannot always join."""
    return torch.cat([part.view(torch.uint8) for part in codes]).view(codes[0].dtype)
