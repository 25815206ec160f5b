"""Attention over a prompt whose tokens are divided among ranks (context parallelism): keys and values go round a ring.

Each rank has the queries, keys and values of its own tokens. In each of `size` turns it hands the keys and values that
it holds to the next rank and attends to them; what the turns found is merged by its log-sum-exp, which is exact. No
rank ever holds more than two parts of the keys.

Attention is causal, so a rank computes nothing of keys that all come after its queries. With contiguous parts the last
rank has something to do in every turn, and the first one in its own only. In zig-zag order each rank has an early part
and a late one, and all compute as much. Sources: Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise
Transformers"; the order: Brandon et al. 2023, "Striped Attention", and Zhu 2024, ring-flash-attention.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from reference_impl.features.parallel.all_reduce import Links
from reference_impl.features.parallel.shares import divided


def contiguous(num_tokens: int, size: int) -> list[Tensor]:
    """The positions of each rank's tokens, int64: one part of the prompt."""
    return [torch.arange(s.start, s.start + s.length) for s in divided(num_tokens, size)]


def zigzag(num_tokens: int, size: int) -> list[Tensor]:
    """The positions of each rank's tokens, int64: of 2 size parts the rank's own, and the one as far from the end."""
    parts = contiguous(num_tokens, 2 * size)
    return [torch.cat((parts[rank], parts[-1 - rank])) for rank in range(size)]


def pairs(positions: Sequence[Tensor]) -> Tensor:
    """How many (query, key) pairs each rank computes in each turn, int64 [turns, ranks]."""
    size = len(positions)
    found = torch.zeros(size, size, dtype=torch.int64)
    for turn, rank in itertools.product(range(size), repeat=2):
        found[turn, rank] = (positions[rank][:, None] >= positions[(rank - turn) % size]).sum()
    return found


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, sees: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to some of the keys: outputs [queries, num_heads, head_dim] and the log-sum-exp of the scores [queries,
    num_heads], both in float32, or float64 where q is. q [queries, num_heads, head_dim]; k, v [keys, num_kv_heads,
    head_dim]; sees [queries, keys], bool. A query that sees no key has zeros, and a log-sum-exp of -inf."""
    wide = torch.promote_types(q.dtype, torch.float32)
    queries = q.to(wide).unflatten(1, (k.shape[1], -1))  # [queries, num_kv_heads, group, head_dim]
    scores = torch.einsum("qhgd,khd->qhgk", queries, k.to(wide)) * scale
    scores = scores.masked_fill(~sees[:, None, None, :], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    return torch.einsum("qhgk,khd->qhgd", weights, v.to(wide)).flatten(1, 2), lse.flatten(1, 2)


def merge(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """What attention to both sets of keys gives, from what it gave for each: see `attend`."""
    lse = torch.logaddexp(lse1, lse2)
    at = lse.masked_fill(lse == -torch.inf, 0)  # -inf minus -inf is no number: these rows have seen nothing
    return o1 * (lse1 - at).exp()[..., None] + o2 * (lse2 - at).exp()[..., None], lse


def ring_attention(links: Links, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Causal attention of this rank's tokens over those of all ranks, [tokens, num_heads, head_dim] in q's dtype.

    q [tokens, num_heads, head_dim], k and v [tokens, num_kv_heads, head_dim]: this rank's, after the rotary embedding;
    there may be none. positions [tokens], int64. CollectiveError where a neighbour sends nothing in time.
    """
    after, before = (links.rank + 1) % links.size, (links.rank - 1) % links.size
    out: tuple[Tensor, Tensor] | None = None
    theirs = positions
    for turn in range(links.size):
        if turn < links.size - 1:  # on their way while this rank computes
            for x in (k, v, theirs):
                links.send(x, after)
        found = attend(q, k, v, scale, positions[:, None] >= theirs)
        out = found if out is None else merge(*out, *found)
        if turn < links.size - 1:
            k, v, theirs = links.recv(before), links.recv(before), links.recv(before)
    assert out is not None
    return out[0].to(q.dtype)
