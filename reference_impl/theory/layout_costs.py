"""What one layout of a model costs: bytes on a rank, seconds of a step, and the messages of a step.

A layout has tp ranks in each of pp stages, dp times over. A step of a stage takes
    max(FLOP / (mfu * peak), bytes / (mbu * bandwidth)) + its collectives, none of them overlapped with work
on its busiest rank. Messages are the engine's: an all-reduce after attention and one after the MLP of every layer and
one after the embedding, an all-gather of logits, and from stage to stage the hidden states. With whole experts a layer
has two all-to-alls and an all-gather in the place of its second all-reduce. Activations and logits have 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from reference_impl.theory import schedules
from reference_impl.theory.hardware import Device
from reference_impl.theory.latency import flops_per_pair, step_bound
from reference_impl.theory.links import Topology
from reference_impl.theory.mixtures import Mixture
from reference_impl.theory.model_shapes import ModelShape
from reference_impl.theory.rank_parts import RankPart, rank_parts

ACTIVATION = 2  # bytes of a hidden value on its way
_ALL_REDUCES = ("one-shot", "two-shot", "ring", "hierarchical")


@dataclass(frozen=True)
class Setting:
    """What all layouts share. where: as many GPUs in a node as there are; weight_bits, embedding_bits (default: the
    same), kv_bytes: as stored; weight_bytes: of the whole model, instead of counting, all of them read by each pass;
    all_reduce_seconds: of every all-reduce, instead of the topology's; reserve: bytes of each GPU for all else."""

    shape: ModelShape
    mixture: Mixture | None
    device: Device
    num_devices: int
    where: Topology
    precision: str = "bf16"
    weight_bits: float = 16
    embedding_bits: float | None = None
    kv_bytes: float = 2
    mfu: float = 0.5
    mbu: float = 0.7
    utilization: float = 0.9
    reserve: float = 0.0
    weight_bytes: float | None = None
    all_reduce_seconds: float | None = None

    @property
    def usable(self) -> float:
        """Bytes of one GPU for weights and cache."""
        return self.utilization * self.device.capacity - self.reserve


@dataclass(frozen=True)
class Message:
    """A kind of message in a pass of one stage. payload: bytes of the tensor of one call; calls: in the pass; seconds:
    of one call; inside, between: bytes that the busiest rank sends over each kind of link in one call."""

    what: str
    collective: str
    stage: int
    calls: int
    payload: int
    seconds: float
    inside: int
    between: int


class Layout:
    """tp, pp, dp and ep of a model, in a setting. ep: ranks among which whole experts are divided, 1 where each has
    columns of all; tp, or tp * dp where replicas share the experts. ValueError where the model cannot be divided so."""

    def __init__(self, setting: Setting, tp: int, pp: int, dp: int, ep: int = 1):
        self.setting, self.tp, self.pp, self.dp, self.ep = setting, tp, pp, dp, ep
        self.parts = rank_parts(setting.shape, setting.mixture, tp, pp, ep)

    @property
    def weights(self) -> tuple[float, ...]:
        """Bytes of weights on the busiest rank of each stage."""
        s = self.setting
        if s.weight_bytes is not None:
            return (s.weight_bytes / (self.tp * self.pp),) * self.pp
        return tuple(part.weights(s.weight_bits, s.embedding_bits) for part in self.parts)

    def kv_tokens(self, sequences: int = 0) -> int:
        """Tokens whose keys and values fit beside the weights in one replica, with `sequences` fixed states; may be
        negative, where it is what is missing."""
        s, found = self.setting, []
        for part, weights in zip(self.parts, self.weights, strict=True):
            share = part.layers / s.shape.layers / self.tp
            left = s.usable - weights - sequences * share * s.shape.fixed_state_bytes
            found.append(left / (part.kv_values * s.kv_bytes) if part.kv_values else math.inf)
        return math.floor(min(found))

    def read(self, part: RankPart, stage: int, tokens: int) -> float:
        """Bytes of weights that the busiest rank of a stage reads for a pass of so many tokens."""
        s, hit = self.setting, 1.0
        if s.weight_bytes is not None:
            return self.weights[stage]
        if s.mixture is not None:
            m, group = s.mixture, tokens * max(1, self.ep // self.tp)
            resident = -(-m.num_experts // self.ep)
            # A rank with any of a step's tokens reads one expert at least.
            hit = min(resident, max(1.0, m.hit(group) * resident / m.num_experts)) / resident
        return part.read(s.weight_bits, s.embedding_bits, hit)

    def work_seconds(self, part: RankPart, stage: int, rows: int, new: int, past: float) -> float:
        """Seconds of computing and reading on the busiest rank of a stage: `rows` sequences, each with `new` tokens
        after `past` cached ones."""
        s, tokens, share = self.setting, rows * new, part.layers / self.setting.shape.layers
        linear = (part.matrices + part.vectors) * tokens + part.head * rows
        if s.mixture is not None:
            active = s.mixture.experts_per_token * s.mixture.expert_params(s.shape.hidden_size)
            linear += active * s.mixture.layers * share * tokens / self.tp
        per_new, per_cached = flops_per_pair(s.shape)
        pairs = rows * (per_new * (new * (new + 1) / 2) + per_cached * new * past)
        flops = 2 * linear + pairs * part.query_share * share
        cache = rows * (new + past) * part.kv_values * s.kv_bytes
        cache += 2 * rows * s.shape.fixed_state_bytes * share / self.tp
        moved = self.read(part, stage, tokens) + cache
        return float(step_bound(flops, moved, s.device, s.precision, s.mfu, s.mbu))

    def messages(self, rows: int, new: int) -> list[Message]:
        """All messages of a pass of `rows` sequences with `new` tokens each, through all stages."""
        found: list[Message] = []
        for stage, part in enumerate(self.parts):
            found += self._in_stage(stage, part, rows * new, rows)
            if stage < self.pp - 1:
                found.append(self._hand_over(stage, rows * new))
        return found

    def seconds(self, rows: int, new: int, past: float) -> tuple[float, ...]:
        """Seconds of each stage, its messages included."""
        times = [self.work_seconds(part, stage, rows, new, past) for stage, part in enumerate(self.parts)]
        for message in self.messages(rows, new):
            times[message.stage] += message.calls * message.seconds
        return tuple(times)

    def floor(self) -> float:
        """The textbook's floor of one token of one stream: weights read at the full bandwidth, and the all-reduces of
        the layers; no cache, no embedding, no logits, nothing else."""
        reads = sum(self.read(part, stage, 1) for stage, part in enumerate(self.parts))
        layers = [m for m in self.messages(1, 1) if m.what in ("attention", "MLP", "experts")]
        return reads / self.setting.device.bandwidth + sum(m.calls * m.seconds for m in layers)

    def _in_stage(self, stage: int, part: RankPart, tokens: int, rows: int) -> Iterator[Message]:
        s = self.setting
        hidden, experts = tokens * s.shape.hidden_size * ACTIVATION, 0
        if s.mixture is not None and self.ep > 1:
            experts = round(s.mixture.layers * part.layers / s.shape.layers)
        if self.tp > 1:
            yield self._all_reduce("attention", stage, part.layers, hidden)
            if part.layers > experts:
                yield self._all_reduce("MLP", stage, part.layers - experts, hidden)
        if s.mixture is not None and experts:
            sent = -(-tokens // self.tp) * s.mixture.experts_per_token * s.shape.hidden_size * ACTIVATION
            yield self._fastest(
                "experts", stage, 2 * experts, sent, ("pairwise all-to-all", "direct all-to-all"), self.ep
            )
            if self.tp > 1:
                yield self._fastest("experts", stage, experts, hidden, ("all-gather",), self.tp)
        if self.tp > 1 and stage == 0:
            yield self._all_reduce("embedding", stage, 1, hidden)
        if self.tp > 1 and stage == self.pp - 1:
            logits = rows * s.shape.vocab_size * ACTIVATION
            yield self._fastest("logits", stage, 1, logits, ("all-gather",), self.tp)

    def _all_reduce(self, what: str, stage: int, calls: int, payload: int) -> Message:
        cost = schedules.best_all_reduce(payload, self.tp, self._where(self.tp), _ALL_REDUCES)
        seconds = cost.seconds if self.setting.all_reduce_seconds is None else self.setting.all_reduce_seconds
        name = f"all-reduce, {cost.name}"
        return Message(what, name, stage, calls, payload, seconds, cost.inside, cost.between)

    def _fastest(self, what: str, stage: int, calls: int, payload: int, ways: tuple[str, ...], n: int) -> Message:
        costs = [schedules.closed(way, payload, n, self._where(n)) for way in ways]
        cost = min(costs, key=lambda cost: cost.seconds)
        return Message(what, cost.name, stage, calls, payload, cost.seconds, cost.inside, cost.between)

    def _hand_over(self, stage: int, tokens: int) -> Message:
        size, tp, node = tokens * self.setting.shape.hidden_size * ACTIVATION, self.tp, self.setting.where.per_node
        firsts = (replica * tp * self.pp + stage * tp + rank for replica in range(self.dp) for rank in range(tp))
        crosses = any(rank // node != (rank + tp) // node for rank in firsts)
        link = self.setting.where.between if crosses else self.setting.where.inside
        seconds = link.seconds(size, size)
        return Message("next stage", "send", stage, 1, size, seconds, 0 if crosses else size, size if crosses else 0)

    def _where(self, n: int) -> Topology:
        """The topology for groups of n ranks in a row; where they do not fill nodes, one with smaller nodes."""
        where = self.setting.where
        if self.setting.num_devices <= where.per_node or n % where.per_node == 0 or where.per_node % n == 0:
            return where
        return replace(where, per_node=math.gcd(n, where.per_node))
