"""An lm_head that comes quantized: a linear layer of its own, in the place of the decoder's matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from reference_impl.core.decoder import Decoder
from reference_impl.core.linear import Linear
from reference_impl.models.quantization.stored import Stored


class StoredHead:
    """(x [rows, hidden_size], anything) -> logits [rows, vocab_size]. linear: has the weights, as "lm_head"."""

    def __init__(self, linear: Linear):
        self.linear = linear

    def __call__(self, x: Tensor, lm_head: Tensor) -> Tensor:
        found: Tensor = self.linear(x)
        return found

    def rows(self, tokens: Tensor) -> Tensor:
        """[len(tokens), hidden_size]: the weights of these tokens, as products have them."""
        method = self.linear.method
        assert isinstance(method, Stored)
        one = torch.eye(self.linear.in_features, dtype=method.dtype, device=method.device)
        return self.linear(one).index_select(1, tokens).T.contiguous()


def use_stored_head(model: Decoder, method: Stored) -> None:
    """The model's lm_head is to be filled with tensors that the method names, and multiplied as it does. What stood
    there keeps its shape and has no memory. Of a model whose lm_head is not tied."""
    assert model.lm_head is not None
    vocabulary, hidden = model.lm_head.shape
    model.head = StoredHead(Linear(method, hidden, {"lm_head": vocabulary}, name="lm_head"))
    model.lm_head = torch.empty_like(model.lm_head, device="meta")


def all_linears(model: Decoder) -> list[Linear]:
    """Also the lm_head, where it is one."""
    return model.linears() + ([model.head.linear] if isinstance(model.head, StoredHead) else [])
