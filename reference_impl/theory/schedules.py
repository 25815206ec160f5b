"""Collectives as schedules: steps of messages (from, to, bytes), and what they cost on a topology.

In a step all messages are sent at once; the next step begins when the last has arrived. A rank sends its messages over
one link one after another, and over `inside` and `between` side by side, so a step takes
    max over ranks and links of (alpha + bytes that the rank sends over the link / bandwidth)
or as long as the largest message takes, where a link gives a single peer less (`Link.per_peer`).
Messages are those of `features/parallel/all_reduce.py`, which sends real tensors. `num_bytes` is the whole tensor of
one rank: for an all-gather the gathered one, for a reduce-scatter the one before it, for an all-to-all what a rank has
for all. A schedule is stepped message by message up to STEPPED ranks; beyond it `closed` has the same steps by formula.
Sources: Thakur, Rabenseifner, Gropp 2005; NCCL's rings and trees; TensorRT-LLM's one-shot and two-shot kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from reference_impl.theory.links import Topology

STEPPED = 1024  # most ranks whose messages are stepped one by one
MOST = 100_000

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Step:
    """Messages that are on their way at the same time: three arrays of one length, or `messages`, a list to draw."""

    source: Integers
    target: Integers
    num_bytes: Integers

    @property
    def messages(self) -> list[tuple[int, int, int]]:
        """(from, to, bytes) of each."""
        return list(zip(self.source.tolist(), self.target.tolist(), self.num_bytes.tolist(), strict=True))


@dataclass(frozen=True)
class Phase:
    """`count` steps alike. largest: bytes of the largest message. inside, between: bytes that the rank which sends most
    over such a link sends in one step; None where none is sent."""

    count: int
    largest: int
    inside: int | None
    between: int | None = None

    def seconds(self, where: Topology) -> float:
        sent = ((where.inside, self.inside), (where.between, self.between))
        times = [link.seconds(size, self.largest) for link, size in sent if size is not None]
        return self.count * max(times, default=0.0)


@dataclass(frozen=True)
class Cost:
    """What a collective costs. inside, between: bytes of the rank that sends most over such links, all steps."""

    name: str
    steps: int
    seconds: float
    inside: int
    between: int


def parts(num_bytes: int, n: int) -> Integers:
    """Bytes of n parts, as equal as they can be, the larger ones first: as `torch.tensor_split` cuts."""
    each, more = divmod(num_bytes, n)
    return each + (np.arange(n) < more).astype(np.int64)


# ---------------------------------------------------------------- schedules, message by message


def one_shot(num_bytes: int, n: int, per_node: int = 0) -> Iterator[Step]:
    """All-reduce: each rank sends everything to all others."""
    yield _exchange(np.arange(n)[None], np.full(n, num_bytes))


def two_shot(num_bytes: int, n: int, per_node: int = 0) -> Iterator[Step]:
    """All-reduce: each rank adds one part, which all others send to it, and sends the sum to all."""
    sizes = parts(num_bytes, n)
    yield _exchange(np.arange(n)[None], sizes)
    yield _exchange(np.arange(n)[None], sizes, of_source=True)


def ring(num_bytes: int, n: int, per_node: int = 0) -> Iterator[Step]:
    """All-reduce: parts go round once to be added, and once more to be handed on."""
    yield from ring_reduce_scatter(num_bytes, n)
    yield from _round(num_bytes, n, first=1)


def ring_reduce_scatter(num_bytes: int, n: int, per_node: int = 0) -> Iterator[Step]:
    """Reduce-scatter round a ring: rank r ends with the sum of part r + 1."""
    yield from _round(num_bytes, n, first=0)


def ring_all_gather(num_bytes: int, n: int, per_node: int = 0) -> Iterator[Step]:
    """All-gather round a ring: rank r begins with part r."""
    yield from _round(num_bytes, n, first=0)


def tree(num_bytes: int, n: int, per_node: int = 0) -> Iterator[Step]:
    """All-reduce: sums go up a binomial tree to rank 0, and the whole sum comes down."""
    up = []
    for apart in _doublings(n):
        child = np.arange(apart, n, 2 * apart)
        up.append((child, child - apart, np.full(len(child), num_bytes)))
        yield Step(*up[-1])
    for child, parent, sizes in reversed(up):
        yield Step(parent, child, sizes)


def recursive_doubling(num_bytes: int, n: int, per_node: int = 0) -> Iterator[Step]:
    """All-reduce: ranks 1, then 2, then 4 apart exchange their sums. ValueError unless n is a power of 2."""
    _require_power_of_two(n)
    for apart in _doublings(n):
        yield Step(np.arange(n), np.arange(n) ^ apart, np.full(n, num_bytes))


def hierarchical(num_bytes: int, n: int, per_node: int = 0) -> Iterator[Step]:
    """All-reduce: a reduce-scatter in each node, a ring between nodes for each part, an all-gather in each node.
    ValueError unless per_node divides n."""
    nodes = _nodes(n, per_node)
    ranks = np.arange(n).reshape(nodes, per_node)
    mine = parts(num_bytes, per_node)
    if per_node > 1:
        yield _exchange(ranks, mine)
    rings = [list(ring(int(size), nodes)) for size in mine]
    for together in zip(*rings, strict=True):
        yield Step(
            np.concatenate([step.source * per_node + place for place, step in enumerate(together)]),
            np.concatenate([step.target * per_node + place for place, step in enumerate(together)]),
            np.concatenate([step.num_bytes for step in together]),
        )
    if per_node > 1:
        yield _exchange(ranks, mine, of_source=True)


def pairwise_all_to_all(num_bytes: int, n: int, per_node: int = 0) -> Iterator[Step]:
    """All-to-all in n - 1 steps: in step k rank r sends to r + k."""
    ranks, sizes = np.arange(n), parts(num_bytes, n)
    for k in range(1, n):
        target = (ranks + k) % n
        yield Step(ranks, target, sizes[target])


def direct_all_to_all(num_bytes: int, n: int, per_node: int = 0) -> Iterator[Step]:
    """All-to-all in one step."""
    yield _exchange(np.arange(n)[None], parts(num_bytes, n))


def _exchange(groups: Integers, sizes: Integers, of_source: bool = False) -> Step:
    """In each row of groups [groups, size] each rank sends to all others: sizes[place of the target] bytes, or, with
    of_source, those of the source."""
    size = groups.shape[1]
    source, target = (places[~np.eye(size, dtype=bool)] for places in np.indices((size, size)))
    sent = sizes[source if of_source else target]
    return Step(groups[:, source].ravel(), groups[:, target].ravel(), np.tile(sent, len(groups)))


def _round(num_bytes: int, n: int, first: int) -> Iterator[Step]:
    ranks, sizes = np.arange(n), parts(num_bytes, n)
    for turn in range(n - 1):
        yield Step(ranks, (ranks + 1) % n, sizes[(ranks + first - turn) % n])


def _doublings(n: int) -> list[int]:
    """1, 2, 4, ... below n."""
    return [1 << k for k in range((n - 1).bit_length())]


def _require_power_of_two(n: int) -> None:
    if n & (n - 1):
        raise ValueError(f"recursive doubling: expected a power of 2 ranks, got {n}: use ring or two-shot")


def _nodes(n: int, per_node: int) -> int:
    if per_node < 1 or n % per_node:
        raise ValueError(f"hierarchical: expected nodes of {per_node} ranks, got {n} ranks in all")
    return n // per_node


# ---------------------------------------------------------------- the same in closed form


def _all_at_once(n: int, g: int, largest: int, inside: int, between: int) -> tuple[Phase, ...]:
    """One step in which each rank sends to all. inside, between: bytes of the busiest rank."""
    return (Phase(1, largest, inside if g > 1 else None, between if n > g else None),)


def _to_all(num_bytes: int, n: int, g: int) -> tuple[Phase, ...]:
    """Each rank sends every other one that one's part. The busiest keeps the smallest part for itself."""
    sizes, ends = parts(num_bytes, n), np.append(np.arange(0, n, g), n)
    held = np.add.reduceat(sizes, ends[:-1])  # by the ranks of each node
    own = np.repeat(held, np.diff(ends))
    return _all_at_once(n, g, int(sizes[0]), int((own - sizes).max()), num_bytes - int(held.min()))


def _ring_phase(count: int, num_bytes: int, n: int, g: int) -> tuple[Phase, ...]:
    part = -(-num_bytes // n)
    return (Phase(count, part, part if g > 1 else None, part if n > g else None),)


def _hierarchical_phases(num_bytes: int, n: int, g: int) -> tuple[Phase, ...]:
    nodes = _nodes(n, g)
    part = -(-num_bytes // g)
    between = Phase(2 * (nodes - 1), -(-part // nodes), None, -(-part // nodes))
    if g == 1:
        return (between,)
    return (*_to_all(num_bytes, g, g), between, Phase(1, part, (g - 1) * part))


def _pairwise_phases(num_bytes: int, n: int, g: int) -> tuple[Phase, ...]:
    part = -(-num_bytes // n)
    if n <= g:
        return (Phase(n - 1, part, part),)
    mixed = min(n - 1, 2 * (g - 1))  # steps in which some targets are in the same node
    return Phase(mixed, part, part, part), Phase(n - 1 - mixed, part, None, part)


def _gathered(num_bytes: int, n: int, g: int) -> tuple[Phase, ...]:
    part = -(-num_bytes // n)
    return _all_at_once(n, g, part, (g - 1) * part, (n - min(g, n % g or g)) * part)


Schedule = Callable[[int, int, int], Iterator[Step]]
Phases = Callable[[int, int, int], tuple[Phase, ...]]

# name -> (its steps, its phases), both of (num_bytes, number of ranks, ranks in a node). None: log2(n) steps are few
# enough to be gone through with any number of ranks.
COLLECTIVES: Mapping[str, tuple[Schedule, Phases | None]] = MappingProxyType(
    {
        "one-shot": (one_shot, lambda size, n, g: _gathered(n * size, n, g)),
        "two-shot": (two_shot, lambda size, n, g: (*_to_all(size, n, g), *_gathered(size, n, g))),
        "ring": (ring, lambda size, n, g: _ring_phase(2 * (n - 1), size, n, g)),
        "tree": (tree, None),
        "recursive doubling": (recursive_doubling, None),
        "hierarchical": (hierarchical, _hierarchical_phases),
        "all-gather": (ring_all_gather, lambda size, n, g: _ring_phase(n - 1, size, n, g)),
        "reduce-scatter": (ring_reduce_scatter, lambda size, n, g: _ring_phase(n - 1, size, n, g)),
        "pairwise all-to-all": (pairwise_all_to_all, _pairwise_phases),
        "direct all-to-all": (direct_all_to_all, _to_all),
    }
)
ALL_REDUCES = ("one-shot", "two-shot", "ring", "tree", "recursive doubling", "hierarchical")


def schedule(name: str, num_bytes: int, n: int, per_node: int | None = None) -> list[Step]:
    """The steps of a collective of COLLECTIVES among n ranks, in nodes of `per_node` (default: all in one).

    ValueError for an unknown name, for more than STEPPED ranks, and where the collective does not go with n.
    """
    if n > STEPPED and COLLECTIVES.get(name, (None, True))[1] is not None:
        raise ValueError(f"{name}: expected at most {STEPPED} ranks to be stepped, got {n}; use `closed`")
    return list(_known(name, num_bytes, n)[0](num_bytes, n, per_node or n)) if n > 1 else []


def stepped(name: str, num_bytes: int, n: int, where: Topology) -> Cost:
    """The cost, message by message. ValueError: see `schedule`."""
    steps = schedule(name, num_bytes, n, where.per_node)
    seconds, totals = 0.0, np.zeros((2, max(n, 1)))
    for step in steps:
        sent, longest = np.zeros((2, n)), []
        crosses = step.source // where.per_node != step.target // where.per_node
        for row, (link, over) in enumerate(((where.inside, ~crosses), (where.between, crosses))):
            if over.any():
                sent[row] = np.bincount(step.source[over], step.num_bytes[over], n)
                longest.append(link.seconds(float(sent[row].max()), float(step.num_bytes[over].max())))
        totals += sent
        seconds += max(longest)
    inside, between = totals.max(1)
    return Cost(name, len(steps), seconds, int(inside), int(between))


def closed(name: str, num_bytes: int, n: int, where: Topology) -> Cost:
    """The cost by formula, to MOST ranks. The same as `stepped` where the bytes divide evenly among ranks; otherwise
    not lower, and higher by at most one byte a message. ValueError: see `schedule`."""
    by_formula, g = _known(name, num_bytes, n)[1], min(where.per_node, n)
    if by_formula is None:
        return stepped(name, num_bytes, n, where)
    phases = [phase for phase in by_formula(num_bytes, n, g) if phase.count] if n > 1 else []
    inside = sum(phase.count * (phase.inside or 0) for phase in phases)
    between = sum(phase.count * (phase.between or 0) for phase in phases)
    if name == "pairwise all-to-all":  # of the steps with both kinds of messages a rank sends one kind in each
        part = -(-num_bytes // n)
        inside, between = (g - 1) * part, (n - min(g, n % g or g)) * part
    steps, seconds = sum(phase.count for phase in phases), sum(phase.seconds(where) for phase in phases)
    return Cost(name, steps, seconds, inside, between)


def cost(name: str, num_bytes: int, n: int, where: Topology) -> Cost:
    """The cost of a collective: message by message to STEPPED ranks, by formula beyond. ValueError: see `schedule`."""
    return (stepped if n <= STEPPED else closed)(name, num_bytes, n, where)


def _known(name: str, num_bytes: int, n: int) -> tuple[Schedule, Phases | None]:
    if name not in COLLECTIVES:
        raise ValueError(f"expected a collective of {', '.join(COLLECTIVES)}, got {name!r}")
    if num_bytes < 0 or not 1 <= n <= MOST:
        raise ValueError(f"{name}: expected bytes of at least 0 and 1 to {MOST} ranks, got {num_bytes} and {n}")
    return COLLECTIVES[name]


def best_all_reduce(num_bytes: int, n: int, where: Topology, names: tuple[str, ...] = ALL_REDUCES) -> Cost:
    """The all-reduce that takes least among those that go with n ranks; the first of `names` where several do."""
    costs = []
    for name in names:
        if name == "recursive doubling" and n & (n - 1):
            continue
        if name == "hierarchical" and (n % min(where.per_node, n) or n <= where.per_node):
            continue
        costs.append(closed(name, num_bytes, n, where))
    return min(costs, key=lambda cost: cost.seconds)
