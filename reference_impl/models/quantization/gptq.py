"""GPTQ (Frantar et al. 2023): a matrix is rounded column by column, and each column's error is made up for by the
columns that are still to come.

The error that counts is that of the layer's output over calibration rows x: with D = W - Q, |x D^T|^2 = tr(D H D^T)
where H = sum x^T x, the Hessian but for a factor 2. When column i is rounded, what the others best change by has a
closed form (Optimal Brain Surgeon): -(w_i - q_i) / [H^-1]_ii x row i of H^-1, over the columns not yet rounded.
Removing a rounded column from H^-1 is a step of Gaussian elimination, so all these rows together are the upper Cholesky
factor of H^-1: it is computed once. Changes to far columns are added up and made a block at a time, as one product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reference_impl.models.quantization.columns import Columns
from reference_impl.models.quantization.scheme import Fitted, Scheme

BLOCK = 128  # columns between two products with the rest of the matrix
ROWS = 512  # of a matrix whose error is computed at once


@dataclass
class Rounded:
    """A matrix that was rounded. codes [out, in]: as `encode` makes them; with fitted, and columns in their own order,
    `decode` takes them.

    order: None, or [in] int64: then the groups are of columns in this order, so that codes[:, order] is what `decode`
    takes, and what it gives has to be put back (`in_own_order`).
    """

    codes: Tensor
    fitted: Fitted
    order: Tensor | None = None


def gptq(
    weight: Tensor, gram: Tensor, scheme: Scheme, damping: float = 0.01, act_order: bool = False,
    static_groups: bool = True, block: int = BLOCK,
) -> Rounded:  # fmt: skip
    """Rounds weight [out, in]. gram [in, in] = sum over calibration rows of x^T x, any factor. Computed in the dtype of
    gram.

    damping: this share of the diagonal's mean is added to it, so that H has an inverse. act_order: columns with the
    largest diagonal first, while there are most others to make up for them. static_groups: scales come from the weight
    as it was; else each group's scales come from what the columns before have made of it, and with act_order a group is
    of columns that follow each other in that order. Raises ValueError for shapes that do not fit, and for a gram
    without a Cholesky factor.
    """
    _check(weight, gram, scheme)
    dead = gram.diagonal() == 0
    order = gram.diagonal().argsort(descending=True, stable=True) if act_order else None
    factor = inverse_factor(gram.clone() if order is None else gram[order[:, None], order], damping)
    # An input that was always 0 says nothing, so its weights become 0.
    weight = weight.to(gram.dtype).masked_fill(dead, 0)
    moving = not static_groups and scheme.per == "group"
    columns = Columns(weight if order is None or not moving else weight[:, order], scheme)
    if order is not None:
        weight = weight[:, order]
    places = None if order is None or moving else order
    block = (scheme.group_size or block) if moving else block
    for start in range(0, weight.shape[1], block):
        end = min(start + block, weight.shape[1])
        if moving:
            columns.refit(weight[:, start:end], start)
        errors = _round_block(weight, columns, factor, start, end, places)
        weight[:, end:] -= errors @ factor[start:end, end:]
    if order is None or not moving:
        return Rounded(columns.codes, columns.fitted)
    codes = in_own_order(columns.codes.view(torch.uint8), order).view(columns.codes.dtype)
    return Rounded(codes, columns.fitted, order)


def _round_block(
    weight: Tensor, columns: Columns, factor: Tensor, start: int, end: int, places: Tensor | None
) -> Tensor:
    """Rounds weight[:, start:end] and returns each column's error over its diagonal element, [out, end - start].
    places: where a column's scale and code are, if not at its own number."""
    errors = weight.new_empty(len(weight), end - start)
    for i in range(start, end):
        rounded = columns.round(weight[:, i], i if places is None else int(places[i]))
        error = (weight[:, i] - rounded) / factor[i, i]
        weight[:, i:end] -= torch.outer(error, factor[i, i:end])
        errors[:, i - start] = error
    return errors


def inverse_factor(gram: Tensor, damping: float) -> Tensor:
    """Upper triangular U with U^T U = (gram + damping x mean diagonal)^-1. An input with 0 on the diagonal gets the
    mean there. It is computed in place: the returned tensor is gram."""
    if damping < 0:
        raise ValueError(f"damping: expected 0 or more, got {damping}")
    diagonal, mean = gram.diagonal(), float(gram.diagonal().mean()) or 1.0
    diagonal.masked_fill_(diagonal == 0, mean).add_(damping * mean)
    failed = torch.empty((), dtype=torch.int32, device=gram.device)
    torch.linalg.cholesky_ex(gram, out=(gram, failed))
    if not int(failed):
        torch.cholesky_inverse(gram, out=gram)
        torch.linalg.cholesky_ex(gram, upper=True, out=(gram, failed))
    if int(failed):
        raise ValueError(
            f"gptq: expected calibration rows whose Gram matrix has a Cholesky factor, found none at column "
            f"{int(failed)} with damping {damping}: use more rows, or a larger damping"
        )
    return gram


def in_own_order(decoded: Tensor, order: Tensor | None) -> Tensor:
    """Columns back in their own order: decoded [out, in] has them in `order`."""
    return decoded if order is None else torch.empty_like(decoded).index_copy_(1, order, decoded)


def output_error(weight: Tensor, other: Tensor, gram: Tensor) -> float:
    """The error sum |x (weight - other)^T|^2 over the calibration rows: tr(D gram D^T), with some rows of D at a
    time."""
    total, other = 0.0, other.expand_as(weight)
    for rows in range(0, len(weight), ROWS):
        difference = (weight[rows : rows + ROWS] - other[rows : rows + ROWS]).to(gram.dtype)
        total += float(torch.linalg.vecdot(difference @ gram, difference).sum())
    return total


def _check(weight: Tensor, gram: Tensor, scheme: Scheme) -> None:
    if weight.dim() != 2 or gram.shape != (weight.shape[1], weight.shape[1]):
        raise ValueError(
            f"gptq: expected weight [out, in] and gram [in, in], got {list(weight.shape)} and {list(gram.shape)}"
        )
    if not bool(torch.isfinite(gram).all()):
        raise ValueError("gptq: expected a finite gram, got infinities or NaN: a calibration row overflowed")
