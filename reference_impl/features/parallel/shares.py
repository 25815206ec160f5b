"""Which heads, columns of the MLP and tokens of the vocabulary each rank has. Integers only."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from reference_impl.core.model_config import ModelConfig


@dataclass(frozen=True)
class Share:
    """A rank's part of `whole` things: `length` of them from `start` on."""

    whole: int
    start: int
    length: int


@dataclass(frozen=True)
class RankShares:
    """What one rank of several has of a model. columns: of an MLP, of each expert's; vocabulary: of its tokens.
    experts: those that it has, whole, where experts are what is divided."""

    queries: Share  # heads
    keys: Share  # heads of keys and values
    columns: Share
    expert_columns: Share | None
    vocabulary: Share
    experts: Share | None = None

    def config_of(self, whole: ModelConfig) -> ModelConfig:
        """The config of the rank's model. Its vocabulary stays whole, as tokens and logits are."""
        experts = whole.experts
        if experts is not None and self.expert_columns is not None:
            experts = replace(experts, intermediate_size=self.expert_columns.length)
        if experts is not None and self.experts is not None:
            experts = replace(experts, own=range(self.experts.start, self.experts.start + self.experts.length))
        return replace(
            whole, num_heads=self.queries.length, num_kv_heads=self.keys.length,
            intermediate_size=self.columns.length, experts=experts, shard_of=whole.whole,
        )  # fmt: skip


def shares_of(c: ModelConfig, size: int, by_expert: bool = False) -> list[RankShares]:
    """The shares of `size` ranks. by_expert: of a mixture each rank has whole experts, and not columns of each.
    ValueError, with the sizes that fit, where one would have no whole KV head, or no expert."""
    heads = head_shares(c.num_heads, c.num_kv_heads, size)
    mlp, tokens = columns(c.intermediate_size, size), divided(c.vocab_size, size)
    shares = [RankShares(*heads[rank], mlp[rank], None, tokens[rank]) for rank in range(size)]
    if by_expert and (c.experts is None or c.experts.num_experts < size):
        has = "no experts" if c.experts is None else f"{c.experts.num_experts} experts"
        raise ValueError(f"enable_expert_parallel: expected a model with at least {size} experts, this has {has}")
    if c.experts is None:
        return shares
    if by_expert:
        own = divided(c.experts.num_experts, size)
        return [replace(share, experts=experts) for share, experts in zip(shares, own, strict=True)]
    of_each = columns(c.experts.intermediate_size, size)
    return [replace(share, expert_columns=each) for share, each in zip(shares, of_each, strict=True)]


def head_shares(num_heads: int, num_kv_heads: int, size: int) -> list[tuple[Share, Share]]:
    """Each rank's query heads and KV heads. A rank has whole groups, a KV head with all its query heads. With more
    ranks than KV heads several keep the same KV head, and divide its query heads. ValueError where neither goes."""
    group = num_heads // num_kv_heads
    if size <= num_kv_heads:
        shares = divided(num_kv_heads, size)
        return [(Share(num_heads, group * s.start, group * s.length), s) for s in shares]
    copies = size // num_kv_heads
    if size % num_kv_heads or copies > group:
        fit = [n for n in range(1, num_heads + 1) if n <= num_kv_heads or n % num_kv_heads == 0]
        raise ValueError(
            f"tensor_parallel_size: expected a number of ranks among which {num_heads} query heads and {num_kv_heads} "
            f"KV heads can be divided ({_listed(fit)}), got {size}"
        )
    of_group = divided(group, copies)
    return [
        (Share(num_heads, group * kv + queries.start, queries.length), Share(num_kv_heads, kv, 1))
        for kv in range(num_kv_heads)
        for queries in of_group
    ]


def divided(whole: int, size: int, unit: int = 1) -> list[Share]:
    """Shares of consecutive things in whole units, as equal as they can be; the first ranks have one more unit."""
    each, more = divmod(whole // unit, size)
    lengths = [unit * (each + (rank < more)) for rank in range(size)]
    return [Share(whole, sum(lengths[:rank]), length) for rank, length in enumerate(lengths)]


def columns(whole: int, size: int) -> list[Share]:
    """Shares of an MLP's columns, in units that groups of weights with one scale divide, where there are enough."""
    unit = next((unit for unit in (128, 64, 32, 16) if whole % unit == 0 and whole // unit >= size), 1)
    if whole < size:
        raise ValueError(f"tensor_parallel_size: expected at most {whole}, the columns of an MLP, got {size}")
    return divided(whole, size, unit)


def stages_of(layers: Sequence[int], head: int, size: int) -> list[range]:
    """The layers of `size` stages, each at least one: of all ways to cut, one whose dearest stage costs least.

    layers, head: bytes of each layer's weights, and of the lm_head's. A stage costs what a step reads and computes,
    which is in proportion to its weights, but for the head in the last one: a decoding step uses it for each of its
    rows, a prompt's for one row, so it counts half. ValueError for more stages than layers.
    """
    if size > len(layers):
        raise ValueError(
            f"pipeline_parallel_size: expected at most {len(layers)}, the layers of this model, got {size}"
        )

    @functools.cache
    def best(first: int, stages: int) -> tuple[float, tuple[int, ...]]:
        """The cost of the dearest of so many stages from layer `first` on, and where each ends."""
        if stages == 1:
            return sum(layers[first:]) + head / 2, (len(layers),)
        found = []
        for end in range(first + 1, len(layers) - stages + 2):
            rest, ends = best(end, stages - 1)
            found.append((max(sum(layers[first:end]), rest), (end, *ends)))
        return min(found)

    _, ends = best(0, size)
    return [range(first, end) for first, end in zip((0, *ends), ends, strict=False)]


def expected(fit: Sequence[int]) -> str:
    """The end of an error: the numbers of ranks that fit."""
    return f"tensor_parallel_size: expected {'one of ' * (len(fit) > 1)}{_listed(fit)}"


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
