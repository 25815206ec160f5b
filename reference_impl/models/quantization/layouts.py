"""How the matrix of a linear layer lies in a checkpoint: the tensors that there are, and the weight they stand for.

Each format has its own file with a `Layout`: `auto_gptq.py`, `auto_awq.py`, `gguf_blocks.py`, `torchao.py`. Here are
those of compressed-tensors and FP8, which a `Scheme` says, and of a matrix that is not quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from reference_impl.interfaces import TensorSpec
from reference_impl.models.quantization.numbers import FORMATS
from reference_impl.models.quantization.scheme import Activations, Fitted, Scheme, decode
from reference_impl.models.quantization.tensors import fitted_of, specs_of

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class Coded:
    """A matrix as a `Scheme` has it: codes [out, in], and what they are multiplied with."""

    scheme: Scheme
    codes: Tensor
    fitted: Fitted

    def weight(self) -> Tensor:
        """The weight, float32 [out, in]."""
        return decode(self.codes, self.scheme, self.fitted)


class Layout(Protocol):
    """How a matrix [out, in] is stored. It is hashable, and equal to others that store alike."""

    @property
    def scheme(self) -> Scheme | None:
        """The scheme of what `coded` gives for each matrix; None: that depends on the matrix, or there is none."""
        ...

    @property
    def activations(self) -> Activations | None:
        """How a product rounds its input; None: it does not."""
        ...

    def specs(self, in_features: int, out_features: int) -> dict[str, TensorSpec]:
        """{last word of a tensor's name: what it must be}. ValueError for a matrix that the format has no room for."""
        ...

    def check(self, name: str, tensor: Tensor) -> None:
        """Raises ValueError for a tensor, of the right shape and dtype, with numbers in it that cannot be."""
        ...

    def weight(self, tensors: Mapping[str, Tensor], in_features: int) -> Tensor:
        """The weight, float32 [out, in], from the tensors that `specs` names."""
        ...

    def coded(self, tensors: Mapping[str, Tensor], in_features: int) -> Coded | None:
        """The same matrix, exactly, for the products that take codes (`paths.py`); None where no scheme has it."""
        ...


LayoutOf = Callable[[str], Layout | None]  # from a matrix's name in the checkpoint; None: it is not quantized


@dataclass(frozen=True)
class OfScheme:
    """A `Layout`: codes and scales as compressed-tensors stores them. packed: see `specs_of`."""

    scheme: Scheme
    packed: bool | None = None

    @property
    def activations(self) -> Activations | None:
        return self.scheme.activations

    def specs(self, in_features: int, out_features: int) -> dict[str, TensorSpec]:
        return specs_of(self.scheme, in_features, out_features, self.packed)

    def check(self, name: str, tensor: Tensor) -> None:
        if "scale" in name and not (name == "weight_scale" and FORMATS[self.scheme.numbers].least is not None):
            check_scales(tensor)
        elif name == "weight":
            check_codes(tensor)

    def weight(self, tensors: Mapping[str, Tensor], in_features: int) -> Tensor:
        return self.coded(tensors, in_features).weight()

    def coded(self, tensors: Mapping[str, Tensor], in_features: int) -> Coded:
        return Coded(self.scheme, *fitted_of(dict(tensors), self.scheme, in_features))


@dataclass(frozen=True)
class OfAnyGroups:
    """A `Layout`: codes and scales as compressed-tensors stores them after GPTQ with act-order "group". weight_g_idx
    [in] says the group of each input; -1 everywhere: groups are of inputs side by side."""

    base: OfScheme
    scheme: None = None  # whether its groups are of neighbours only the tensors say: see `coded`

    @property
    def activations(self) -> Activations | None:
        return self.base.activations

    def specs(self, in_features: int, out_features: int) -> dict[str, TensorSpec]:
        own = {"weight_g_idx": TensorSpec((in_features,), (torch.int32, torch.int64))}
        return self.base.specs(in_features, out_features) | own

    def check(self, name: str, tensor: Tensor) -> None:
        if name != "weight_g_idx":
            self.base.check(name, tensor)
            return
        size = self.base.scheme.group_size or len(tensor)
        if not bool((tensor == -1).all()) and not torch.equal(tensor.sort()[0], self._in_order(tensor)):
            raise ValueError(
                f"expected each group {size} times, from 0 to {len(tensor) // size - 1}, or -1 everywhere, found "
                f"{int(tensor.min())} to {int(tensor.max())}: the file is damaged, or group_size is another's"
            )

    def _in_order(self, groups: Tensor) -> Tensor:
        size = self.base.scheme.group_size or len(groups)
        return torch.arange(len(groups), device=groups.device, dtype=groups.dtype) // size

    def weight(self, tensors: Mapping[str, Tensor], in_features: int) -> Tensor:
        groups = tensors["weight_g_idx"]
        plain = self.base.coded(tensors, in_features)
        if bool((groups == -1).all()):
            return plain.weight()
        values, zeros = plain.codes.float(), plain.fitted.zeros
        if zeros is not None:
            values = values - zeros[:, groups.long()]
        return values * plain.fitted.scales[:, groups.long()]

    def coded(self, tensors: Mapping[str, Tensor], in_features: int) -> Coded | None:
        groups = tensors["weight_g_idx"]
        side_by_side = bool((groups == -1).all()) or torch.equal(groups, self._in_order(groups))
        return self.base.coded(tensors, in_features) if side_by_side else None


@dataclass(frozen=True)
class Dense:
    """A `Layout`: a matrix that is not quantized, beside others of the same layer that are."""

    scheme: None = None
    activations: Activations | None = None

    def specs(self, in_features: int, out_features: int) -> dict[str, TensorSpec]:
        return {"weight": TensorSpec((out_features, in_features), FLOATS)}

    def check(self, name: str, tensor: Tensor) -> None:
        pass

    def weight(self, tensors: Mapping[str, Tensor], in_features: int) -> Tensor:
        return tensors["weight"].float()

    def coded(self, tensors: Mapping[str, Tensor], in_features: int) -> None:
        return None


def check_codes(codes: Tensor) -> None:
    """Raises ValueError for floats of 8 bits that are not finite. All others stand for numbers."""
    if codes.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        return
    least = 0x7F if codes.dtype is torch.float8_e4m3fn else 0x7C  # from here on bits are NaN or infinity
    if wrong := int(((codes.view(torch.uint8) & 0x7F) >= least).sum()):
        raise ValueError(
            f"expected finite floats of 8 bits, found {wrong} of {codes.numel()} that are NaN or infinity: the file is "
            "damaged, or its codes are of another format (FNUZ, integers)"
        )


def check_scales(scales: Tensor) -> None:
    """Raises ValueError unless all are positive and finite, for scales of inputs and of weights whose codes are floats.
    For integers any finite number will do: auto-round chooses the sign with which a group's largest is -8."""
    numbers = scales.int() != 255 if scales.dtype is torch.uint8 else scales.float().isfinite() & (scales.float() > 0)
    if not bool(numbers.all()):
        raise ValueError(
            f"expected positive, finite scales, found {int((~numbers).sum())} of {scales.numel()} that are zero, "
            "negative, infinite or NaN: the file is damaged, or was written by a tool that failed; quantize it again"
        )
