"""The all-reduce in the ways in which libraries do it, each over `send` and `recv` alone (`Links`).

                        messages one after another    bytes that a rank sends, of N
    one-shot            1                             (n - 1) N
    two-shot            2                             2 (n - 1) / n N
    ring                2 (n - 1)                     2 (n - 1) / n N
    tree                2 log2(n), rounded up         up to log2(n) N at the root, which sends most
    recursive doubling  log2(n)                       log2(n) N
    hierarchical        as inside a node and between  few between nodes: 2 (m - 1) / m N for each of m nodes
    quantized           2                             the same as two-shot, in 8 or 4 bits

All ranks get the same bits. The order of the sum is that of ranks in one-shot and two-shot only, so only there a row's
sum does not depend on its place. Sources: Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication
Operations in MPICH"; NCCL's ring and tree; TensorRT-LLM's one-shot and two-shot kernels; for the quantized one Flash
Communication (Li et al. 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

GROUP = 32  # numbers with one scale, where they are rounded


class Links(Protocol):
    """What each rank of a group can do. A message that was sent waits for its receiver; messages between two ranks stay
    in their order."""

    rank: int
    size: int

    def send(self, x: Tensor, to: int) -> None: ...
    def recv(self, source: int) -> Tensor:
        """The next tensor from that rank. CollectiveError where none comes in time."""
        ...


AllReduce = Callable[[Links, Tensor], Tensor]  # this rank's x -> the sum of all ranks', of the same shape


def one_shot(links: Links, x: Tensor) -> Tensor:
    """Everybody sends everything to all others, and adds by itself."""
    return _sum(_exchange(links, [x] * links.size))


def two_shot(links: Links, x: Tensor) -> Tensor:
    """Each rank adds one part, which all others send it, and sends that sum to all: reduce-scatter, then all-gather."""
    mine = _sum(_exchange(links, _parts(x, links.size)))
    return torch.cat(_exchange(links, [mine] * links.size)).view(x.shape)


def ring(links: Links, x: Tensor) -> Tensor:
    """Parts go round a ring: once to be added, which leaves each rank with one whole sum, and once to be handed on."""
    n, rank = links.size, links.rank
    parts, after, before = [part.clone() for part in _parts(x, n)], (rank + 1) % n, (rank - 1) % n
    for turn in range(n - 1):
        links.send(parts[(rank - turn) % n], after)
        at = (rank - turn - 1) % n
        parts[at] = links.recv(before) + parts[at]
    for turn in range(n - 1):
        links.send(parts[(rank + 1 - turn) % n], after)
        parts[(rank - turn) % n] = links.recv(before)
    return torch.cat(parts).view(x.shape)


def tree(links: Links, x: Tensor) -> Tensor:
    """Ranks hand their sums up a binomial tree to rank 0, and the whole sum comes down the same way."""
    rank, step, total = links.rank, 1, x.clone()
    while step < links.size and rank % (2 * step) == 0:
        if rank + step < links.size:
            total = total + links.recv(rank + step)
        step *= 2
    if rank:  # step: the lowest bit of the rank
        links.send(total, rank - step)
        total = links.recv(rank - step)
    while step > 1:
        step //= 2
        if rank + step < links.size:
            links.send(total, rank + step)
    return total


def recursive_doubling(links: Links, x: Tensor) -> Tensor:
    """Ranks 1, then 2, then 4 apart exchange and add their sums. ValueError unless the size is a power of 2."""
    if links.size & (links.size - 1):
        raise ValueError(f"recursive doubling: expected a power of 2 ranks, got {links.size}: use ring or two_shot")
    total, apart = x.clone(), 1
    while apart < links.size:
        other = links.rank ^ apart
        links.send(total, other)
        total = total + links.recv(other)  # a + b and b + a have the same bits
        apart *= 2
    return total


def hierarchical(per_node: int, between: AllReduce = ring) -> AllReduce:
    """An all-reduce for nodes of `per_node` ranks each, whose links inside are faster: a reduce-scatter in the node, an
    all-reduce of each part between nodes, an all-gather in the node. ValueError where the size is no multiple."""

    def all_reduce(links: Links, x: Tensor) -> Tensor:
        if links.size % per_node:
            raise ValueError(f"hierarchical: expected nodes of {per_node} ranks, got {links.size} ranks in all")
        first = links.rank - links.rank % per_node
        inside = Some(links, range(first, first + per_node))
        across = Some(links, range(links.rank % per_node, links.size, per_node))
        mine = _sum(_exchange(inside, _parts(x, per_node)))
        mine = between(across, mine)
        return torch.cat(_exchange(inside, [mine] * per_node)).view(x.shape)

    return all_reduce


def quantized(bits: int) -> AllReduce:
    """A two-shot all-reduce whose messages have codes of 8 or 4 bits, with a float32 scale for each 32 numbers. Lossy:
    what is added was rounded once, and the sum once more. Sums are taken in float32."""
    if bits not in (4, 8):
        raise ValueError(f"quantized: expected 8 or 4 bits, got {bits}")

    def all_reduce(links: Links, x: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(x.flatten().float(), (0, -x.numel() % (GROUP * links.size)))
        codes = [_packed(part, bits) for part in padded.chunk(links.size)]
        mine = _sum([_unpacked(each, bits) for each in _exchange(links, codes)])
        gathered = _exchange(links, [_packed(mine, bits)] * links.size)
        whole = torch.cat([_unpacked(each, bits) for each in gathered])
        return whole[: x.numel()].view(x.shape).to(x.dtype)

    return all_reduce


class Some:
    """Some ranks of a group as a group: a rank's number is its place among `ranks`."""

    def __init__(self, links: Links, ranks: Sequence[int]):
        self.links, self.ranks = links, ranks
        self.rank, self.size = ranks.index(links.rank), len(ranks)

    def send(self, x: Tensor, to: int) -> None:
        self.links.send(x, self.ranks[to])

    def recv(self, source: int) -> Tensor:
        return self.links.recv(self.ranks[source])


def _exchange(links: Links, parts: Sequence[Tensor]) -> list[Tensor]:
    """Sends parts[r] to rank r; returns what each rank sent to this one."""
    others = [rank for rank in range(links.size) if rank != links.rank]
    for rank in others:
        links.send(parts[rank], rank)
    return [parts[rank] if rank == links.rank else links.recv(rank) for rank in range(links.size)]


def _parts(x: Tensor, size: int) -> list[Tensor]:
    """Flat parts of x, as equal as can be; some are empty where x has fewer numbers than there are parts."""
    return list(x.flatten().tensor_split(size))


def _sum(parts: Sequence[Tensor]) -> Tensor:
    return reduce(torch.add, parts) if len(parts) > 1 else parts[0].clone()


def _packed(x: Tensor, bits: int) -> Tensor:
    """Codes and scales of x [n] as bytes: n / 32 scales, then n codes, of 4 bits two in a byte."""
    groups = x.view(-1, GROUP)
    most = 2 ** (bits - 1) - 1
    scales = groups.abs().amax(1, keepdim=True) / most
    codes = (groups / scales.clamp_min(torch.finfo(torch.float32).tiny)).round().to(torch.int8).flatten()
    if bits == 4:
        low, high = (codes.view(-1, 2) + 8).to(torch.uint8).unbind(1)
        codes = low | high << 4
    return torch.cat((scales.flatten().view(torch.uint8), codes.view(torch.uint8)))


def _unpacked(data: Tensor, bits: int) -> Tensor:
    num_groups = len(data) // (4 + GROUP * bits // 8)
    scales, codes = data[: 4 * num_groups].clone().view(torch.float32), data[4 * num_groups :]
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), 1).flatten().to(torch.int8) - 8
    return (codes.view(torch.int8).view(-1, GROUP).float() * scales[:, None]).flatten()
