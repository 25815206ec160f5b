"""Says in words how a CPU computes products with weights: `inferlab doctor` prints it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from reference_impl.core.linear import UnquantizedLinear
from reference_impl.features.cpu.default import default_method
from reference_impl.features.cpu.half import FEW_ROWS, SlowHalfLinear
from reference_impl.features.cpu.operators import PackedIfLarge, PackedLinear
from reference_impl.models.quantization.cpu import CpuInt4, CpuInt8, few_rows

_WORDS: dict[type, str] = {
    PackedLinear: "packed for oneDNN",
    PackedIfLarge: "packed for oneDNN where large",
    SlowHalfLinear: f"as stored up to {FEW_ROWS} rows, in float32 beyond",
    UnquantizedLinear: "x @ W, as torch has it",
    CpuInt4: "torch's 4-bit product",
}


def products() -> dict[str, str]:
    """How weights are multiplied on this CPU: {dtype or format: method, in words}."""
    cpu, found = torch.device("cpu"), {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found[str(dtype).removeprefix("torch.")] = how(type(default_method(dtype, cpu)))
    return {**found, "int8": how(CpuInt8), "int4": how(CpuInt4), "one row of attention='compiled'": of_one_row()}


def of_one_row() -> str:
    """How a model's steps of one token are compiled (`features/compiled`), or what is missing for it."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))), None)
    if compiler is None:
        return "cannot be here, for want of a C++ compiler"
    return f"compiled loops over weights as stored, by {Path(compiler).name}; int4 as without"


def how(method: type) -> str:
    """The words for a LinearMethod that models on a CPU have."""
    if method is CpuInt8:
        return f"torch's 8-bit product up to {few_rows()} rows of 16 bits, a wider copy of the weight beyond"
    return _WORDS[method]


def in_words() -> str:
    """`products` on one line."""
    return "; ".join(f"{name}: {words}" for name, words in products().items())
