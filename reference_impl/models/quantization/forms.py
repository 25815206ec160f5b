"""The forms in which quantized matrices are written: packed, as compressed-tensors has them, or dense."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from reference_impl.models.quantization.compressed_tensors import config_of_layers
from reference_impl.models.quantization.one_layer import Part
from reference_impl.models.quantization.scheme import Scheme, decode
from reference_impl.models.quantization.tensors import has_form, tensors_of


class Form(Protocol):
    """A format of checkpoints: what is written of a matrix, by the last words of the tensors' names, and config.json
    with what says how it is stored. name: which form it is, for reports. ignored: matrices that are not quantized."""

    name: str

    def tensors(self, part: Part) -> dict[str, Tensor]: ...

    def config(self, raw: dict[str, Any], schemes: Mapping[str, Scheme], ignored: Sequence[str]) -> dict[str, Any]: ...


class Packed:
    """Codes and scales as compressed-tensors stores them: `load_model` reads it."""

    name = "compressed-tensors"

    def tensors(self, part: Part) -> dict[str, Tensor]:
        return tensors_of(part.codes, part.scheme, part.fitted) | part.inputs

    def config(self, raw: dict[str, Any], schemes: Mapping[str, Scheme], ignored: Sequence[str]) -> dict[str, Any]:
        return raw | {"quantization_config": config_of_layers(schemes, ignored)}


class Dense:
    """What the codes stand for, in float32, like a model that is not quantized. It saves no memory: it is for numbers
    that no checkpoint's format has, and to compare a quantized checkpoint with."""

    name = "dense"

    def tensors(self, part: Part) -> dict[str, Tensor]:
        return {"weight": decode(part.codes, part.scheme, part.fitted)}

    def config(self, raw: dict[str, Any], schemes: Mapping[str, Scheme], ignored: Sequence[str]) -> dict[str, Any]:
        return {name: value for name, value in raw.items() if name != "dtype"} | {"torch_dtype": "float32"}


def form_for(schemes: Mapping[str, Scheme]) -> Form:
    """The form for these schemes: packed where the format has all of them, since a model is not packed in part."""
    return Packed() if all(map(has_form, schemes.values())) else Dense()
