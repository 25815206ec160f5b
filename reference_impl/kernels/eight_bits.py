"""Numbers in 8 bits, int8, float8_e4m3fn or float8_e5m2, with one scale for several: value = code x scale.

The largest magnitude becomes the largest code. A largest magnitude below 2^-64 counts as 2^-64, so that zeros stay
zeros and nothing is divided by zero. With NaN or infinity among them the scale is NaN, so that all of them stay no
numbers: their codes may be any.
"""

import torch
import triton
import triton.language as tl

DTYPES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)  # that `scale_of` and `encoded` know


@triton.jit
def magnitude(x):
    """The bits of |x|, x float32, as a whole number: in the order of the magnitudes, with NaN above infinity. So the
    largest of several shows a NaN, which `tl.max` of floats drops."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(largest, dtype: tl.constexpr):
    """largest: of the `magnitude`s that share the scale."""
    code: tl.constexpr = 127.0 if dtype == tl.int8 else 57344.0 if dtype == tl.float8e5 else 448.0
    return scale_to(largest, code)


@triton.jit
def scale_to(largest, code: tl.constexpr):
    """By which a largest magnitude becomes this code."""
    number = largest.to(tl.float32, bitcast=True)
    scale = tl.div_rn(tl.maximum(number, 5.421010862427522e-20), code)  # 2^-64
    return tl.where(number < float("inf"), scale, float("nan"))


@triton.jit
def finite_or_nan(scale):
    """NaN for a scale that is infinite, float32. A group's sum times infinity would be one of two infinities by its
    sign; the weights that it stands for are both, and NaN where a code is zero, so that no sum of them is a number."""
    return scale + (scale - scale)


@triton.jit
def encoded(x, dtype: tl.constexpr):
    """x, float32, already divided by its scale, to the nearest code; ties to the even one.

    Adding and taking away 1.5 x 2^23 x step leaves a multiple of the step. int8 has step 1. e4m3 has four significant
    bits, so 2^(exponent - 3), and none finer than 2^-9; e5m2 three, and none finer than 2^-16. After that the cast is
    exact: interpreter and GPU agree.
    """
    if dtype == tl.int8:
        return ((x + 12582912.0) - 12582912.0).to(tl.int8)
    smallest: tl.constexpr = 113 if dtype == tl.float8e5 else 121  # 127 is the exponent of 1
    above: tl.constexpr = 21 if dtype == tl.float8e5 else 20
    exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 255, smallest)
    magic = (((exponent + above) << 23) | 0x400000).to(tl.float32, bitcast=True)
    return ((x + magic) - magic).to(dtype)
