"""A rank's model: the plain decoder of a config with fewer heads and columns, and four places where ranks meet.

What a rank computes of attention and of an MLP is a sum over its own heads and columns: the outputs of `layer.o` and
`layer.mlp` are added over all ranks, two all-reduces a layer, in every family. They are torch's forward hooks: no
family's file, and no way to store a weight, knows of ranks. The embedding and the logits are divided by vocabulary: a
rank looks its own tokens up, with zeros for the others, and the sum has one row for each token; logits are gathered.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from typing import Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_impl.core.decoder import Decoder, DecoderLayer, Head
from reference_impl.core.linear import Linear
from reference_impl.core.model_config import ModelConfig
from reference_impl.features.parallel.experts import divide_tokens
from reference_impl.features.parallel.loading import cut_table
from reference_impl.features.parallel.meeting import Meeting
from reference_impl.features.parallel.shares import Share, expected, shares_of
from reference_impl.interfaces.collectives import Collectives
from reference_impl.models.loader import Cut, Destination, NoHead
from reference_impl.models.moe import MixtureOfExperts
from reference_impl.models.olmo2 import Olmo2Layer
from reference_impl.models.quantization.head import StoredHead
from reference_impl.models.quantization.methods import Fp8

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


Built: TypeAlias = tuple[Decoder, dict[str, Destination]]


class ModelPart(Protocol):
    """How a part of a model is made: `config_of`, `shrink`, `cut` and `join`, in this order, once."""

    def config_of(self, whole: ModelConfig) -> ModelConfig:
        """The config of this part, with fewer heads and columns, or with fewer layers."""
        ...

    def refusal(self, wrong: ValueError, built: Callable[[ModelConfig], Built]) -> Exception:
        """What to raise where the part cannot be built. built: makes a model without memory, and its destinations."""
        ...

    def shrink(self, model: Decoder) -> None:
        """Gives up the room for what others have of the embedding and the lm_head of a model without weights."""
        ...

    def leaves(self, name: str) -> bool:
        """Whether a tensor of the checkpoint is of other parts alone."""
        ...

    def cut(self, model: Decoder, table: dict[str, Destination]) -> tuple[dict[str, Destination], dict[str, Cut]]:
        """The destinations of this part, and what is read of each tensor: see `cut_table`."""
        ...

    def join(self, model: Decoder) -> None:
        """Connects the part with the others. The model has its weights."""
        ...


class RankModel:
    """A part of each layer: a `ModelPart`. by_expert: see `shares_of`.

    ValueError where the model's heads, its columns or groups of its weights cannot be divided.
    """

    def __init__(self, collectives: Meeting, by_expert: bool = False):
        self.collectives, self.by_expert = collectives, by_expert

    def config_of(self, whole: ModelConfig) -> ModelConfig:
        self.whole, self.everyone = whole, shares_of(whole, self.collectives.size, self.by_expert)
        self.shares = self.everyone[self.collectives.rank]
        return self.shares.config_of(whole)

    def refusal(self, wrong: ValueError, built: Callable[[ModelConfig], Built]) -> Exception:
        """Names the numbers of ranks that can be built, if it is the sizes of its part that are wrong."""
        fit = []
        for size in range(1, self.collectives.size + 1):
            with suppress(ValueError):
                for rank, shares in enumerate(shares_of(self.whole, size, self.by_expert)):
                    model, table = built(shares.config_of(self.whole))
                    cut_table(model, shares, rank, table)
                fit.append(size)
        if not fit or self.collectives.size in fit:
            return wrong
        return ValueError(f"{wrong}. This is a rank's part; {expected(fit)}")

    def shrink(self, model: Decoder) -> None:
        if isinstance(model.head, StoredHead):
            raise ValueError("an lm_head that comes quantized is not divided among ranks: use tensor_parallel_size=1")
        model.embedding = model.embedding.new_empty(self.shares.vocabulary.length, model.config.hidden_size)
        if model.lm_head is not None:
            model.lm_head = torch.empty_like(model.embedding)

    def leaves(self, name: str) -> bool:
        """Where experts are divided, those of other ranks are not read."""
        found, own = _EXPERT.search(name), self.shares.experts
        return found is not None and own is not None and int(found[1]) - own.start not in range(own.length)

    def cut(self, model: Decoder, table: dict[str, Destination]) -> tuple[dict[str, Destination], dict[str, Cut]]:
        return cut_table(model, self.shares, self.collectives.rank, table)

    def join(self, model: Decoder) -> None:
        """Has the ranks meet wherever each has only a part."""
        meets = self.collectives
        model.lookup = RankLookup(self.shares.vocabulary, meets)
        if not isinstance(model.head, NoHead):
            matrix = model.embedding if model.lm_head is None else model.lm_head
            model.head = RankHead(model.head, matrix, self.shares.vocabulary, meets)
        for layer in model.layers:
            assert isinstance(layer, DecoderLayer)
            layer.o.register_forward_hook(Summed(meets))
            if isinstance(layer.mlp, MixtureOfExperts) and self.by_expert:
                divide_tokens(layer.mlp, [each.experts for each in self.everyone if each.experts is not None], meets)
            else:
                layer.mlp.register_forward_hook(Summed(meets))
            for linear in layer.modules():
                kind = linear.name.rpartition(".")[2] if isinstance(linear, Linear) else ""
                if self.by_expert and isinstance(linear, Linear) and ".experts." in linear.name:
                    continue  # whole, with all of a row's inputs
                if kind in ("o_proj", "down_proj") and isinstance(linear.method, Fp8):
                    linear.method = copy(linear.method)  # others keep theirs
                    linear.method.quantize_rows = RankScales(linear.method.quantize_rows, meets)
            if isinstance(layer, Olmo2Layer):
                queries = sum(each.queries.length for each in self.everyone)
                keys = sum(each.keys.length for each in self.everyone)
                norm = RankNorm(meets, model.config, layer.wide_q_norm, queries, keys)
                layer.normalize_heads = norm  # type: ignore[method-assign]


class Summed:
    """A forward hook: the ranks' partial sums, added."""

    def __init__(self, collectives: Collectives):
        self.collectives = collectives

    def __call__(self, module: Any, inputs: Any, output: Tensor) -> Tensor:
        return self.collectives.all_reduce(output)


class RankLookup:
    """The rows of all tokens, of which each rank has some: ids [n] -> [n, hidden_size]."""

    def __init__(self, share: Share, collectives: Collectives):
        self.share, self.collectives = share, collectives

    def __call__(self, ids: Tensor, embedding: Tensor) -> Tensor:
        mine = ids - self.share.start
        others = (mine < 0) | (mine >= self.share.length)
        found = F.embedding(mine.masked_fill(others, 0), embedding)
        return self.collectives.all_reduce(found.masked_fill(others[:, None], 0))


class RankHead:
    """The logits of all tokens, of which each rank computes some: x [rows, hidden_size] -> [rows, vocab_size]."""

    def __init__(self, head: Head, matrix: Tensor, share: Share, collectives: Collectives):
        self.head, self.matrix, self.collectives = head, matrix, collectives
        self.lookup = RankLookup(share, collectives)

    def rows(self, tokens: Tensor) -> Tensor:
        """The weights of these tokens, [len(tokens), hidden_size], from all ranks."""
        return self.lookup(tokens, self.matrix)

    def __call__(self, x: Tensor, lm_head: Tensor) -> Tensor:
        return torch.cat(self.collectives.all_gather(self.head(x, lm_head)), dim=1)


class RankScales:
    """Rounds x [rows, a rank's inputs] as if all inputs were here: with the scale of the largest of a whole row."""

    def __init__(self, quantize_rows: Callable[[Tensor], tuple[Tensor, Tensor]], collectives: Collectives):
        self.quantize_rows, self.collectives = quantize_rows, collectives

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.collectives.all_gather(x.abs().amax(1, keepdim=True))
        largest = torch.cat(found, 1).amax(1, keepdim=True)
        codes, scales = self.quantize_rows(torch.cat((x, largest), 1))  # it sets the scale, and goes again
        return codes[:, :-1].contiguous(), scales


class RankNorm:
    """OLMo-2's norm over all heads, of which each rank has some: it needs the mean square of all of them.

    queries, keys: heads that all ranks have together; a KV head that several ranks keep counts each time.
    """

    def __init__(self, collectives: Collectives, config: ModelConfig, q_norm: Tensor, queries: int, keys: int):
        self.collectives, self.eps, self.q_norm = collectives, config.norm_eps, q_norm
        self.widths = queries * config.head_dim, keys * config.head_dim

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = self.collectives.all_reduce(wide.square().sum(-1, keepdim=True))
        mean = squares / self.widths[weight is not self.q_norm]
        return (wide * torch.rsqrt(mean + self.eps) * weight).to(x.dtype)
