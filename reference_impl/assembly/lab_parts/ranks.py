"""Ranks of an engine whose sums, and whose parts of the model, are a lab's.

Each rank is an engine of its own over its part of the model: all make the same plan, since they get the same requests
and choose the same tokens. They run at the same time, one thread each, and meet over ports that the lab gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from reference_impl.assembly.config import EngineConfig, course_model
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.lab_parts.serving import LabEngine
from reference_impl.assembly.model import load_model
from reference_impl.core.model_config import ModelConfig
from reference_impl.features.parallel.meeting import Meeting
from reference_impl.features.parallel.model import RankModel
from reference_impl.features.parallel.shares import RankShares, Share
from reference_impl.models.checkpoints import read_config

LabSum = Callable[[Tensor, Tensor], Tensor]  # (a rank's x, the engine's own sum over ranks) -> the lab's sum
Cut = Sequence[int]  # start, end
LabPart = tuple[Sequence[int], Cut, Cut]  # (query heads and KV heads, four ints), columns of an MLP, tokens


class Port(Protocol):
    """What a rank needs to meet the others."""

    rank: int
    num_ranks: int

    def exchange(self, messages: dict[int, Tensor], sources: Sequence[int]) -> Mapping[int, Tensor]:
        """Sends each rank its tensor, and returns what each of the sources sent."""
        ...

    def send(self, to: int, message: Tensor) -> None: ...
    def recv(self, source: int) -> Tensor: ...


class LabRank(Meeting):
    """Collectives over a port; `add` takes the sum."""

    def __init__(self, port: Port, add: LabSum):
        super().__init__(port.rank, port.num_ranks)
        self.port, self.add = port, add

    def meet(self, call: str, x: Tensor) -> list[Tensor]:
        others = [rank for rank in range(self.size) if rank != self.rank]
        found = self.port.exchange(dict.fromkeys(others, x), others)
        return [x if rank == self.rank else found[rank] for rank in range(self.size)]

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.add(x, super().all_reduce(x))

    def send(self, x: Tensor, to: int) -> None:
        self.port.send(to, x)

    def recv(self, source: int) -> Tensor:
        return self.port.recv(source)

    def go_on(self) -> None:
        """No planner waits."""


class LabModel(RankModel):
    """A rank's part of the model as a lab divides it. parts: by rank."""

    def __init__(self, collectives: Meeting, parts: Sequence[LabPart]):
        super().__init__(collectives)
        self.parts = parts

    def config_of(self, whole: ModelConfig) -> ModelConfig:
        self.whole, self.everyone = whole, [_shares(whole, *part) for part in self.parts]
        self.shares = self.everyone[self.collectives.rank]
        return self.shares.config_of(whole)


def _shares(c: ModelConfig, heads: Sequence[int], columns: Cut, tokens: Cut) -> RankShares:
    def share(whole: int, start: int, end: int) -> Share:
        return Share(whole, start, end - start)

    queries, keys = share(c.num_heads, *heads[:2]), share(c.num_kv_heads, *heads[2:])
    return RankShares(queries, keys, share(c.intermediate_size, *columns), None, share(c.vocab_size, *tokens))


def sizes_to_divide(name: str = "draft") -> tuple[int, int, int, int]:
    """(query heads, KV heads, columns of an MLP, tokens of the vocabulary) of a course model."""
    c = read_config(course_model(name))
    return c.num_heads, c.num_kv_heads, c.intermediate_size, c.vocab_size


class RankLabEngine(LabEngine):
    """A `LabEngine` over one rank's part of a course model, in float32. All ranks have to run at the same time, and get
    the same requests; errors of `add` go through."""

    def __init__(self, port: Port, add: LabSum, parts: Sequence[LabPart], name: str = "draft"):
        model = load_model(course_model(name), torch.float32, rank=LabModel(LabRank(port, add), parts))
        self.engine = Engine(model, EngineConfig(num_blocks=16, attention="torch", graphs="off"))
        self.requests, self.num_steps = [], 0
