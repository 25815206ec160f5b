"""A quantized matrix as the tensors of a compressed-tensors checkpoint: what they must be, to them, and back.

    int2 to int7; int8 alone     weight_packed int32 [out, in bits / 32], weight_shape; zero points packed along outputs
    int8 with rounded inputs     weight int8
    e4m3                         weight float8_e4m3fn
    e2m1                         weight_packed uint8 [out, in / 2]; NVFP4: weight_global_scale, which divides, and
                                 input_global_scale where inputs are rounded, too

Each with weight_scale (float, e4m3 or, of MXFP4, uint8). As compressed-tensors 0.20 writes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

import torch
from torch import Tensor

from reference_impl.interfaces import TensorSpec
from reference_impl.models.quantization.numbers import FORMATS, e8m0_to_scales, scales_to_e8m0
from reference_impl.models.quantization.packing import pack_nibbles, pack_words, unpack_nibbles, unpack_words
from reference_impl.models.quantization.scheme import Fitted, Scheme

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def in_words(scheme: Scheme) -> bool:
    """Whether the codes are packed in words of 32 bits ("pack-quantized"). W8A8 is not: its codes are whole bytes."""
    integers = FORMATS[scheme.numbers].least is not None and scheme.numbers in _HAVE_FORM
    return integers and (scheme.numbers != "int8" or scheme.activations is None)


_HAVE_FORM = ("int2", "int3", "int4", "int5", "int6", "int7", "int8", "e4m3", "e2m1")
_GROUPS = {"float": None, "e4m3": 16, "e8m0": 32}  # of formats whose scales are a byte: NVFP4, MX


def has_form(scheme: Scheme) -> bool:
    """Whether the format has a form for it."""
    size = _GROUPS[scheme.scales]
    return scheme.numbers in _HAVE_FORM and size in (None, scheme.group_size)


def without_form(schemes: Iterable[Scheme]) -> list[str]:
    """The schemes that the format has no form for, in words."""
    return sorted(
        {
            one.numbers + (f" with {one.scales} scales per {one.group_size}" if _GROUPS[one.scales] else "")
            for one in schemes
            if not has_form(one)
        }
    )


def specs_of(scheme: Scheme, in_features: int, out_features: int, packed: bool | None = None) -> dict[str, TensorSpec]:
    """The tensors of a matrix [out, in]. packed: integers in words, or in bytes of their own ("int-quantized",
    "naive-quantized"); None: as `in_words` says. Raises ValueError for a scheme that the format has no form for."""
    words = in_words(scheme) if packed is None else packed and FORMATS[scheme.numbers].least is not None
    shape = scheme.scale_shape((out_features, in_features))
    bits, found = FORMATS[scheme.numbers].bits, {}
    if words:
        found["weight_packed"] = TensorSpec((out_features, ceil(in_features * bits / 32)), (torch.int32,))
        found["weight_shape"] = TensorSpec((2,), (torch.int64, torch.int32))
    elif scheme.numbers == "e2m1":
        found["weight_packed"] = TensorSpec((out_features, in_features // 2), (torch.uint8,))
    elif has_form(scheme):
        found["weight"] = TensorSpec((out_features, in_features), (FORMATS[scheme.numbers].code_dtype,))
    else:
        known = ", ".join(_HAVE_FORM)
        raise ValueError(f"compressed-tensors: expected one of {known}, got {scheme.numbers}: it has no form")
    dtypes = {"float": _FLOATS, "e4m3": (torch.float8_e4m3fn,), "e8m0": (torch.uint8,)}[scheme.scales]
    found["weight_scale"] = TensorSpec((1,) if scheme.per == "tensor" else shape, dtypes)
    if scheme.scales == "e4m3":
        found["weight_global_scale"] = TensorSpec((1,), (torch.float32,))
    if not scheme.symmetric:
        in_rows = TensorSpec((ceil(out_features * bits / 32), shape[1]), (torch.int32,))
        plain = TensorSpec((1,) if scheme.per == "tensor" else shape, (torch.int8,))
        found["weight_zero_point"] = in_rows if words else plain
    if scheme.activations is not None and not scheme.activations.dynamic:
        found["input_scale"] = TensorSpec((1,), _FLOATS)
    if scheme.activations is not None and scheme.activations.scales == "e4m3":
        found["input_global_scale"] = TensorSpec((1,), (torch.float32,))
    return found


def tensors_of(codes: Tensor, scheme: Scheme, fitted: Fitted) -> dict[str, Tensor]:
    """{last word of the name: tensor} of codes [out, in], for a checkpoint; input_scale and input_global_scale, where
    there is one, are not of the weight and left out."""
    specs, bits = specs_of(scheme, codes.shape[1], codes.shape[0]), FORMATS[scheme.numbers].bits
    offset, found = 1 << (bits - 1), {}
    if in_words(scheme):
        found["weight_packed"] = pack_words(codes.view(torch.uint8) + offset, bits)  # modulo 256
        found["weight_shape"] = torch.tensor(codes.shape)
    elif scheme.numbers == "e2m1":
        found["weight_packed"] = pack_nibbles(codes)
    else:
        found["weight"] = codes
    shape = specs["weight_scale"].shape
    if scheme.scales == "e8m0":
        found["weight_scale"] = scales_to_e8m0(fitted.scales)
    else:
        dtype = torch.float8_e4m3fn if scheme.scales == "e4m3" else scheme.scale_dtype
        found["weight_scale"] = fitted.scales.to(dtype).reshape(shape)
    if fitted.tensor_scale is not None:
        found["weight_global_scale"] = (1 / fitted.tensor_scale).reshape(1)
    if fitted.zeros is not None:
        packed = in_words(scheme)
        zeros = pack_words((fitted.zeros.view(torch.uint8) + offset).T, bits).T if packed else fitted.zeros
        found["weight_zero_point"] = zeros.contiguous().reshape(specs["weight_zero_point"].shape)
    return found


def fitted_of(tensors: dict[str, Tensor], scheme: Scheme, in_features: int) -> tuple[Tensor, Fitted]:
    """(codes [out, in], Fitted) from what `specs_of` names."""
    bits, zeros, tensor_scale = FORMATS[scheme.numbers].bits, None, None
    offset, packed = 1 << (bits - 1), tensors.get("weight_packed")
    if packed is None:
        codes = tensors["weight"]
    elif scheme.numbers != "e2m1":
        codes = (unpack_words(packed, bits, in_features) - offset).to(torch.int8)
    else:
        codes = unpack_nibbles(packed)
    shape = scheme.scale_shape((len(codes), in_features))
    scales = tensors["weight_scale"] if "weight_scale" in tensors else tensors["weight_scale_inv"]
    scales = e8m0_to_scales(scales) if scheme.scales == "e8m0" else scales.float().reshape(shape)
    if scheme.scales == "e4m3":
        tensor_scale = (1 / tensors["weight_global_scale"].float()).reshape(())
    if "weight_zero_point" in tensors:
        zeros = tensors["weight_zero_point"]
        if packed is not None:
            zeros = (unpack_words(zeros.T, bits, len(codes)).T - offset).to(torch.int8)
        zeros = zeros.reshape(shape)
    return codes, Fitted(scales, zeros, tensor_scale)
