"""A matrix that is rounded a column at a time: its scales and its codes so far."""

from __future__ import annotations

import torch
from torch import Tensor

from reference_impl.models.quantization.numbers import FORMATS
from reference_impl.models.quantization.scheme import Fitted, Scheme, decode, encode, fit


class Columns:
    """A matrix that is rounded by columns. fitted: the scales, from the weight [out, in] as it is now. codes [out, in]:
    of the columns rounded so far."""

    def __init__(self, weight: Tensor, scheme: Scheme):
        self.scheme, self.fitted = scheme, fit(weight, scheme)
        self.codes = torch.zeros(weight.shape, dtype=FORMATS[scheme.numbers].code_dtype, device=weight.device)
        self._each = {"group": scheme.group_size or 1, "block": scheme.block[1]}.get(scheme.per, weight.shape[1])

    def refit(self, group: Tensor, start: int) -> None:
        """Fits the scales of one group anew, from its weights [out, group_size]; start: its first column."""
        new, place = fit(group, self.scheme, self.fitted.tensor_scale), start // self._each
        self.fitted.scales[:, place : place + 1] = new.scales
        if self.fitted.zeros is not None and new.zeros is not None:
            self.fitted.zeros[:, place : place + 1] = new.zeros

    def round(self, column: Tensor, place: int) -> Tensor:
        """Rounds column [out], with the scale and code of column `place`; returns what stands for it, in its own
        dtype."""
        group = slice(place // self._each, place // self._each + 1)
        zeros = None if self.fitted.zeros is None else self.fitted.zeros[:, group]
        part = Fitted(self.fitted.scales[:, group], zeros, self.fitted.tensor_scale)
        codes = encode(column[:, None], self.scheme, part)
        self.codes[:, place : place + 1] = codes
        return decode(codes, self.scheme, part)[:, 0].to(column.dtype)
