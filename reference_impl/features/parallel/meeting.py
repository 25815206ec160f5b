"""Collectives made of one operation, a meeting: each rank shows a tensor, and sees those of all ranks.

What a rank shows is copied once, and read by each of the others: one round for an all-reduce, where a ring takes
2 (n - 1), for n times the bytes. That is right for a few ranks and the small tensors of a decoding step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from reference_impl.interfaces.collectives import CollectiveError

ROUNDED = (torch.float16, torch.bfloat16)  # sums of these are taken in float32, and rounded once


class Meeting(ABC):
    """`Collectives` by way of `meet`, and messages. place: the rank's number among all of an engine's ranks, to which
    messages go; those of `size` places in a row meet, and rank is its number among them. step: of the engine, for
    messages of errors."""

    def __init__(self, place: int, num_places: int, size: int | None = None):
        self.place, self.num_places, self.size = place, num_places, size or num_places
        self.rank = place % self.size
        self.num_calls = self.num_bytes = 0
        self.waited = 0.0  # seconds for other ranks
        self.num_expert_rows = 0  # (token, expert) pairs that this rank's experts computed
        self.step = 0

    @abstractmethod
    def meet(self, call: str, x: Tensor) -> list[Tensor]:
        """Shows x to all ranks; returns what each shows, contiguous and on the device of x, to be read before this rank
        makes its next call. CollectiveError for a call of another name on any rank."""

    @abstractmethod
    def send(self, x: Tensor, to: int) -> None:
        """Leaves a copy for the rank at another place."""

    @abstractmethod
    def recv(self, source: int) -> Tensor:
        """The next tensor from the rank at that place. CollectiveError where none comes in time."""

    @abstractmethod
    def go_on(self) -> None:
        """Counts this rank as at work, for the deadline that the planner keeps."""

    @property
    def met(self) -> range:
        """The places of the ranks that meet here."""
        return range(self.place - self.rank, self.place - self.rank + self.size)

    def all_reduce(self, x: Tensor) -> Tensor:
        found = self._show("all_reduce", x)
        self._check_alike("all_reduce", found)
        return self._sum(found)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return [each.clone() for each in self._show("all_gather", x)]

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Tensor:
        mine = self._parts("reduce_scatter", parts)
        self._check_alike("reduce_scatter", mine)
        return self._sum(mine)

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [part.clone() for part in self._parts("all_to_all", parts)]

    def broadcast(self, x: Tensor | None, source: int) -> Tensor:
        if not 0 <= source < self.size:
            raise ValueError(f"broadcast: source: expected a rank from 0 to {self.size - 1}, got {source}")
        if self.rank == source and x is None:
            raise ValueError(f"broadcast: expected a tensor from rank {source}, the source, got None")
        shown = x if self.rank == source and x is not None else torch.empty(0)
        return self._show(f"broadcast from {source}", shown)[source].clone()

    def barrier(self) -> None:
        self._show("barrier", torch.empty(0))

    def _show(self, call: str, x: Tensor) -> list[Tensor]:
        self.num_calls += 1
        self.num_bytes += x.nbytes
        return [x] if self.size == 1 else self.meet(call, x.contiguous())

    def _parts(self, call: str, parts: Sequence[Tensor]) -> list[Tensor]:
        """What each rank has for this one. Parts go as rows of one tensor; their shapes go before it."""
        if len(parts) != self.size:
            raise ValueError(f"{call}: expected a tensor for each of {self.size} ranks, got {len(parts)}")
        own = parts[self.rank]
        if any(part.dtype != own.dtype or part.dim() != own.dim() for part in parts):
            raise ValueError(f"{call}: expected tensors of one dtype and one number of dimensions")
        shapes = self._show(f"{call} (shapes)", torch.tensor([part.shape for part in parts]).view(self.size, -1))
        sizes = [[torch.Size(row) for row in shape.tolist()] for shape in shapes]
        whole = self._show(call, torch.cat([part.reshape(-1) for part in parts]))
        found = []
        for theirs, flat in zip(sizes, whole, strict=True):
            start = sum(size.numel() for size in theirs[: self.rank])
            mine = theirs[self.rank]
            found.append(flat[start : start + mine.numel()].view(mine))
        return found

    def _check_alike(self, call: str, found: Sequence[Tensor]) -> None:
        if len({(each.shape, each.dtype) for each in found}) > 1:
            shapes = ", ".join(
                f"rank {place} {list(x.shape)} {x.dtype}" for place, x in zip(self.met, found, strict=True)
            )
            raise CollectiveError(f"{call} of step {self.step}: expected one shape and dtype everywhere, got {shapes}")

    def _sum(self, found: Sequence[Tensor]) -> Tensor:
        if len(found) == 1:
            return found[0].clone()
        if (dtype := found[0].dtype) in ROUNDED:
            return reduce(torch.add, (each.float() for each in found)).to(dtype)
        return reduce(torch.add, found)


def check_calls(calls: Mapping[int, str], step: int) -> None:
    """Raises CollectiveError, which names all calls, if ranks made different ones. calls: by place."""
    if len(set(calls.values())) > 1:
        made = ", ".join(f"rank {place} {call}" for place, call in calls.items())
        raise CollectiveError(f"step {step}: the ranks made different calls, so they are not alike any more: {made}")
