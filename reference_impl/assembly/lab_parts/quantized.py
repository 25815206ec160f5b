"""A model whose matrices a lab's functions have rounded, and a layer of it that a lab's function multiplies.

Not among the names of the package: lab 07 imports it from here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reference_impl.assembly.llm import LLM
from reference_impl.core.decoder import Decoder
from reference_impl.core.linear import Linear, UnquantizedLinear
from reference_impl.features.baselines.no_cache import RecomputeAttention
from reference_impl.features.baselines.ragged import ragged_batch
from reference_impl.interfaces import LinearMethod


@dataclass(frozen=True)
class Product:
    """What one linear layer asks in one step."""

    name: str  # of the layer
    x: Tensor  # [rows, in]
    expected: Tensor  # [rows, out]: what the layer's own method answers


class _Asking:
    """A LinearMethod around another one: a function answers, and is given the other's answer."""

    def __init__(self, name: str, method: LinearMethod, answer: Callable[[Product], Tensor]):
        self.name, self.method, self.answer = name, method, answer
        self.create, self.load, self.finish = method.create, method.load, method.finish

    def apply(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        expected = self.method.apply(params, x)
        return self.answer(Product(self.name, x.clone(), expected.clone())).to(expected.dtype)


def _linears(model: Decoder) -> dict[str, Linear]:
    return {module.name: module for module in model.modules() if isinstance(module, Linear)}


def _linear(model: Decoder, name: str) -> Linear:
    found = _linears(model)
    if name not in found:
        raise ValueError(f"expected the name of a linear layer ({', '.join(list(found)[:4])}, ...), got {name!r}")
    return found[name]


def matrices_of(model: Decoder) -> dict[str, Tensor]:
    """Copies of the matrices of all linear layers: {layer's name (`core.linear`): [out, in]}. For layers that are not
    quantized."""
    weights = {name: linear.params["weight"] for name, linear in _linears(model).items()}
    return {name: weight.to_dense() if weight.is_mkldnn else weight.t().clone() for name, weight in weights.items()}


def _copy(model: Decoder) -> Decoder:
    """A copy of the model with plain matrices in place of packed ones (`features/cpu`, on a CPU with AVX-512), which
    can be neither copied nor written to."""
    packed = {name: linear for name, linear in _linears(model).items() if linear.params["weight"].is_mkldnn}
    other = copy.deepcopy(model, {id(one.params["weight"]): one.params["weight"].to_dense() for one in packed.values()})
    for name in packed:
        linear = _linear(other, name)
        weight = linear.params["weight"].t().contiguous()
        linear.params["weight"], linear.method = weight, UnquantizedLinear(weight.dtype, weight.device)
    return other


def with_matrices(model: Decoder, matrices: Mapping[str, Tensor]) -> Decoder:
    """A copy of the model with these matrices [out, in] in place of its own, in its dtype.

    ValueError for a name that no linear layer has, or another shape.
    """
    other = _copy(model)
    for name, matrix in matrices.items():
        weight = _linear(other, name).params["weight"].t()
        if matrix.shape != weight.shape:
            raise ValueError(f"{name}: expected a matrix of {list(weight.shape)}, got {list(matrix.shape)}")
        weight.copy_(matrix)
    return other


def multiplied_by(model: Decoder, name: str, answer: Callable[[Product], Tensor]) -> Decoder:
    """A copy of the model whose linear layer `name` returns what answer gives, [rows, out]. ValueError for a name that
    no linear layer has."""
    _linear(model, name)  # or an error, before a copy is made
    other = _copy(model)
    linear = _linear(other, name)
    linear.method = _Asking(name, linear.method, answer)
    return other


def with_model(llm: LLM, model: Decoder) -> LLM:
    """An LLM with the same tokenizer and settings and another model, for `LabEngine`."""
    other = copy.copy(llm)
    other.engine = copy.copy(llm.engine)
    other.engine.model = model
    return other


@torch.inference_mode()
def inputs_of(model: Decoder, windows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """The inputs of each linear layer while the model reads windows of tokens: {layer's name: [tokens, in]}."""
    other, seen = _copy(model), {name: [] for name in _linears(model)}  # type: ignore[var-annotated]

    def watch(asked: Product) -> Tensor:
        seen[asked.name].append(asked.x)
        return asked.expected

    for name, linear in _linears(other).items():
        linear.method = _Asking(name, linear.method, watch)
    c = other.config
    for window in windows:
        batch = ragged_batch([(window, 0)], len(window), other.device, c.layer_windows)
        other(batch, None, RecomputeAttention(c.attention_scale, c.attention_softcap))
    return {name: torch.cat(rows) for name, rows in seen.items()}
