"""Linear layers whose weights come quantized, brought once, when all are there, into the form of a fast product.

A `Path` is such a form. The first of a method's paths that holds exactly the weight that the checkpoint's codes and
scales stand for is taken, layer by layer; where none does, the layer stays `Stored` and is decoded for each product.
What a product may round beside that (x to bfloat16 on a CPU, activations to the scheme's own format) each path says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reference_impl.interfaces import LinearMethod
from reference_impl.models.quantization.scheme import Fitted, Scheme, decode
from reference_impl.models.quantization.stored import Stored, round_activations
from reference_impl.models.quantization.tensors import fitted_of, in_features_of

PER_PRODUCT = "decoded for each product"


@dataclass(frozen=True)
class Pieces:
    """A part of a layer (q_proj, ...) as it is stored: codes [rows, in], what they are multiplied with, and the tensors
    of the checkpoint, by the last words of their names."""

    codes: Tensor
    fitted: Fitted
    tensors: dict[str, Tensor]


class Path(ABC):
    """A form of a layer's weight and its product.

    name: in `Converted.path`, and of a mark among the layer's parameters. rounds: whether the product rounds its input
    as the scheme says; else that is done before it.
    """

    name: str
    rounds: bool = False

    @abstractmethod
    def prepare(self, parts: Sequence[Pieces], scheme: Scheme, dtype: torch.dtype) -> dict[str, Tensor] | None:
        """The layer's parameters, parts one below the other, but the bias; or None if this form does not hold exactly
        what they stand for. dtype: of the model."""

    @abstractmethod
    def product(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        """x [rows, in] -> [rows, out] in the dtype of x, without the bias."""


class Converted(Stored):
    """`Stored`, and from `finish` on the first of the paths that holds the weight exactly."""

    def __init__(
        self,
        scheme: Scheme,
        dtype: torch.dtype,
        device: torch.device,
        inverse: bool = False,
        *,
        paths: Sequence[Path],
    ):
        super().__init__(scheme, dtype, device, inverse)
        self.paths = tuple(paths)

    def __repr__(self) -> str:
        names = " or ".join((*(path.name for path in self.paths), PER_PRODUCT))
        return f"{type(self).__name__}({self.scheme}, in {self.dtype}: {names})"

    def path(self, params: dict[str, Tensor]) -> Path | None:
        """That of a layer whose weights are there; None where it is decoded for each product."""
        return next((path for path in self.paths if path.name in params), None)

    def finish(self, params: dict[str, Tensor]) -> None:
        if self.scheme.activations is not None and not self.scheme.activations.dynamic:
            return  # each part may have a scale of its own for its input
        prefixes = sorted({name.partition(".")[0] for name in params if name != "bias"}, key=int)
        parts = []
        for prefix in prefixes:
            tensors = {n.removeprefix(f"{prefix}."): t for n, t in params.items() if n.startswith(f"{prefix}.")}
            parts.append(Pieces(*fitted_of(tensors, self.scheme, in_features_of(tensors, self.scheme)), tensors))
        for path in self.paths:
            found = path.prepare(parts, self.scheme, self.dtype)
            if found is not None:
                for name in [name for name in params if name != "bias"]:
                    del params[name]
                params.update(found)
                params[path.name] = torch.empty(0)
                return

    def apply(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        path = self.path(params)
        if path is None:
            return super().apply(params, x)
        if self.scheme.activations is not None and not path.rounds:
            x = round_activations(x, self.scheme.activations)
        y = path.product(params, x)
        return y.add_(params["bias"]) if "bias" in params else y


class Decoded(Path):
    """The weight in the dtype of the model, as a plain layer has it: fast, and as large as if it had not been
    quantized. plain: the method of a plain layer."""

    name = "decoded once"

    def __init__(self, plain: LinearMethod):
        self.plain = plain

    def prepare(self, parts: Sequence[Pieces], scheme: Scheme, dtype: torch.dtype) -> dict[str, Tensor]:
        rows = [len(part.codes) for part in parts]
        params = self.plain.create(parts[0].codes.shape[1], sum(rows), False)
        start = 0
        for part in parts:
            self.plain.load(params, "weight", decode(part.codes, scheme, part.fitted).to(dtype), start)
            start += len(part.codes)
        self.plain.finish(params)
        return params

    def product(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        return self.plain.apply({"weight": params["weight"]}, x)
