"""An lm_head or an embedding that comes quantized. The first is a linear layer of its own, in place of the decoder's
matrix; the second is decoded once, since its rows are looked up."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from reference_impl.core.decoder import Decoder
from reference_impl.core.linear import Linear
from reference_impl.interfaces import TensorSpec

if TYPE_CHECKING:  # a model whose weights come as they are needs none of these
    from reference_impl.models.quantization.layouts import Layout
    from reference_impl.models.quantization.stored import Stored


@runtime_checkable
class GivesRows(Protocol):
    """A head that has the weights of single tokens otherwise than as a matrix, lm_head."""

    def rows(self, tokens: Tensor) -> Tensor:
        """The weights of these tokens, as products have them: [len(tokens), hidden_size]."""
        ...


class StoredHead:
    """An lm_head: (x [rows, hidden_size], anything) -> logits [rows, vocab_size]. linear: has the weights."""

    def __init__(self, linear: Linear, dtype: torch.dtype, device: torch.device):
        self.linear, self.dtype, self.device = linear, dtype, device

    def __call__(self, x: Tensor, lm_head: Tensor) -> Tensor:
        found: Tensor = self.linear(x)
        return found

    def rows(self, tokens: Tensor) -> Tensor:
        """The weights of these tokens, as products have them: [len(tokens), hidden_size]."""
        one = torch.eye(self.linear.in_features, dtype=self.dtype, device=self.device)
        return self.linear(one).index_select(1, tokens).T.contiguous()


def use_stored_head(model: Decoder, method: Stored) -> None:
    """Makes the model's lm_head one that is filled with tensors that the method names, and multiplied by it. The matrix
    that stood there keeps its shape and has no memory. For a model whose lm_head is not tied."""
    assert model.lm_head is not None
    vocabulary, hidden = model.lm_head.shape
    linear = Linear(method, hidden, {"lm_head": vocabulary}, name="lm_head")
    model.head = StoredHead(linear, method.dtype, method.device)
    model.lm_head = torch.empty_like(model.lm_head, device="meta")


def all_linears(model: Decoder) -> list[Linear]:
    """All linear layers of a model, its lm_head included where that is one."""
    return model.linears() + ([model.head.linear] if isinstance(model.head, StoredHead) else [])


def decoded_embedding(layout: Layout, embedding: Tensor) -> dict[str, tuple[TensorSpec, Callable[[Tensor], object]]]:
    """{last word of a tensor's name: (what it must be, where it goes)}. When the last of them has come, the embedding
    [vocab_size, hidden_size] is filled. Raises ValueError for sizes that the layout has no room for."""
    vocabulary, hidden = embedding.shape
    specs, found = layout.specs(hidden, vocabulary), dict[str, Tensor]()

    def put(name: str, tensor: Tensor) -> None:
        layout.check(name, tensor)
        found[name] = tensor
        if len(found) == len(specs):
            embedding.copy_(layout.weight(found, hidden))

    return {name: (spec, partial(put, name)) for name, spec in specs.items()}
