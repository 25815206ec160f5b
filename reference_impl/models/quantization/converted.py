"""Linear layers whose weights come quantized, brought once, when all are there, into the form of a fast product.

A `Path` is such a form. The first of a method's paths that holds exactly the weight that the checkpoint's codes and
scales stand for is taken, layer by layer; where none does, the layer stays `Stored` and is decoded for each product.
Each path says what a product may round besides (x to bfloat16 on a CPU, activations to the scheme's own format).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from reference_impl.interfaces import LinearMethod
from reference_impl.models.quantization.layouts import Coded, Layout
from reference_impl.models.quantization.scheme import Fitted, Scheme
from reference_impl.models.quantization.stored import Stored, round_activations

PER_PRODUCT = "decoded for each product"


@dataclass
class Pieces:
    """A part of a layer (q_proj, ...) as it is stored: the tensors of the checkpoint, by the last words of their names.
    codes [rows, in], and what they are multiplied with: where a scheme has the matrix."""

    layout: Layout
    tensors: dict[str, Tensor]
    in_features: int

    @property
    def codes(self) -> Tensor:
        return self._known.codes

    @property
    def fitted(self) -> Fitted:
        return self._known.fitted

    @property
    def scheme(self) -> Scheme | None:
        return None if self.coded is None else self.coded.scheme

    @cached_property
    def coded(self) -> Coded | None:
        return self.layout.coded(self.tensors, self.in_features)

    @property
    def _known(self) -> Coded:
        assert self.coded is not None  # a path that asks was given a scheme
        return self.coded

    def weight(self) -> Tensor:
        """The weight, float32 [rows, in]."""
        return self.layout.weight(self.tensors, self.in_features)


class Path(ABC):
    """A form of a layer's weight and its product.

    name: in `Converted.path`, and the name of a mark among the layer's parameters. rounds: whether the product rounds
    its input as the scheme says; else that is done before it.
    """

    name: str
    rounds: bool = False

    @abstractmethod
    def prepare(self, parts: Sequence[Pieces], scheme: Scheme, dtype: torch.dtype) -> dict[str, Tensor] | None:
        """The layer's parameters, parts one below the other, but the bias; or None if this form does not hold exactly
        what they stand for. scheme: of all parts. dtype: of the model."""

    @abstractmethod
    def product(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        """x [rows, in] -> [rows, out] in the dtype of x, without the bias."""


class Converted(Stored):
    """`Stored`, which from `finish` on computes by the first of the paths that holds the weight exactly."""

    def __init__(
        self, layouts: Mapping[str, Layout], dtype: torch.dtype, device: torch.device, *, paths: Sequence[Path]
    ):  # fmt: skip
        super().__init__(layouts, dtype, device)
        self.paths = tuple(paths)

    def __repr__(self) -> str:
        names = " or ".join((*(path.name for path in self.paths), PER_PRODUCT))
        return f"{type(self).__name__}({self.named_layouts()}, in {self.dtype}: {names})"

    def path(self, params: dict[str, Tensor]) -> Path | None:
        """The path of a layer whose weights are there; None where it is decoded for each product."""
        return next((path for path in self.paths if path.name in params), None)

    def finish(self, params: dict[str, Tensor]) -> None:
        first, *others = self.layouts.values()
        if any(other.activations != first.activations for other in others):
            return
        scales = [self.input_scale(params, start) for start in self.starts()]
        if any(s is not None and scales[0] is not None and not torch.equal(s, scales[0]) for s in scales):
            return  # each part rounds its input with a scale of its own
        parts = [
            Pieces(layout, self.tensors_at(params, start), self.in_features)
            for start, layout in zip(self.starts(), self.layouts.values(), strict=True)
        ]
        for path in self.paths:
            if isinstance(path, Decoded):
                found: dict[str, Tensor] | None = path.of_weights([part.weight().to(self.dtype) for part in parts])
            else:
                scheme, same = parts[0].scheme, all(part.scheme == parts[0].scheme for part in parts)
                found = path.prepare(parts, scheme, self.dtype) if scheme is not None and same else None
            if found is not None:
                for name in [name for name in params if name != "bias"]:
                    del params[name]
                params.update(found)
                params[path.name] = torch.empty(0)
                if scales[0] is not None:
                    params["0.input_scale"] = scales[0]
                return

    def apply(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        path = self.path(params)
        if path is None:
            return super().apply(params, x)
        activations = next(iter(self.layouts.values())).activations
        if activations is not None and not path.rounds:
            x = round_activations(x, activations, self.input_scale(params, 0))
        y = path.product(params, x)
        return y.add_(params["bias"]) if "bias" in params else y


class Decoded(Path):
    """The weight in the dtype of the model, like a plain layer's: fast, and as large as if it had not been quantized.
    Any layout will do. plain: the method of a plain layer."""

    name = "decoded once"

    def __init__(self, plain: LinearMethod):
        self.plain = plain

    def prepare(self, parts: Sequence[Pieces], scheme: Scheme, dtype: torch.dtype) -> dict[str, Tensor]:
        return self.of_weights([part.weight().to(dtype) for part in parts])

    def of_weights(self, weights: Sequence[Tensor]) -> dict[str, Tensor]:
        """The plain layer's parameters, from weights [rows, in] of the parts, in the dtype of the model."""
        params = self.plain.create(weights[0].shape[1], sum(map(len, weights)), False)
        start = 0
        for weight in weights:
            self.plain.load(params, "weight", weight, start)
            start += len(weight)
        self.plain.finish(params)
        return params

    def product(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        return self.plain.apply({"weight": params["weight"]}, x)
