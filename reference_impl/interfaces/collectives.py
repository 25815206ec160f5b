"""What ranks say to each other. `Tensor` is torch.Tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Collectives(Protocol):
    """The operations of a group of ranks. All ranks make the same calls in the same order, and each waits for all.

    A result has the same bits on all ranks: sums are taken in the order of ranks, so a row's sum does not depend on its
    place in a tensor either. Every call returns a tensor of its own, and leaves its arguments as they are.

    Where a rank makes another call than the others, or does not come in time, the others get a `CollectiveError`.
    """

    rank: int
    size: int
    num_calls: int
    num_bytes: int  # of tensors that this rank gave away

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, which have one shape. Numbers of 16 bits are added in 32."""
        ...

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """The x of each rank, of any shapes."""
        ...

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum of what all ranks have at this rank's place: parts[r] is for rank r."""
        ...

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """What each rank has for this one: parts[r] is for rank r, and may be empty."""
        ...

    def broadcast(self, x: Tensor | None, source: int) -> Tensor:
        """The x of rank `source`; that of the others is not looked at."""
        ...

    def barrier(self) -> None:
        """Waits for all ranks."""
        ...


class Messages(Protocol):
    """Tensors from one rank to another. Those between two ranks come in the order in which they were sent."""

    rank: int
    size: int

    @property
    def step(self) -> int:
        """The engine's step, for messages of errors."""
        ...

    def send(self, x: Tensor, to: int) -> None:
        """Leaves a copy for rank `to`."""
        ...

    def recv(self, source: int) -> Tensor:
        """The next tensor from rank `source`. CollectiveError where none comes in time."""
        ...

    def go_on(self) -> None:
        """Counts this rank as at work, for the deadline that the planner keeps."""
        ...


class RankTime(NamedTuple):
    """When a rank did a step, in seconds on the engine's clock, and for how many of them it waited for other ranks."""

    started_at: float
    finished_at: float
    waited: float


class CollectiveError(RuntimeError):
    """A call that not all ranks made, or not in time. waits_for: the ranks that did not come."""

    def __init__(self, text: str, waits_for: Sequence[int] = ()):
        super().__init__(text)
        self.waits_for = tuple(waits_for)
