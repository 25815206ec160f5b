"""Contiguous reservation of KV memory, counted to the slot: what paging replaces (Kwon et al. 2023, section 3).

A request's keys and values lie in one run of slots (one slot holds one token), reserved when it starts and as long as
it may get. That costs memory in three ways, and the three are not the same:

    later      reserved, empty now, and written before the request ends (reservation)
    never      reserved, and empty to the end (internal fragmentation: the output was shorter than it might have been)
    stranded   free, but in holes too small for the next request (external fragmentation)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Fit = Literal["first", "best"]


@dataclass(frozen=True)
class MemoryUse:
    """Where the slots are at one moment; all five add up to the memory's size."""

    used: int
    later: int
    never: int
    stranded: int  # in holes that are too small
    usable: int  # in holes that are large enough

    @property
    def total(self) -> int:
        return self.used + self.later + self.never + self.stranded + self.usable


class ContiguousAllocator:
    """Runs of slots in a memory of num_slots. fit: "first" takes the first hole that is large enough, "best" the
    smallest such hole, and of equal ones the first."""

    def __init__(self, num_slots: int, fit: Fit = "first"):
        if num_slots < 1:
            raise ValueError(f"num_slots: expected at least 1, got {num_slots}")
        if fit not in ("first", "best"):
            raise ValueError(f'fit: expected "first" or "best", got {fit!r}')
        self.num_slots, self.fit = num_slots, fit
        self.holes = [(0, num_slots)]  # (start, length) of free runs, in order; no two touch
        self.runs: dict[str, tuple[int, int]] = {}  # (start, length) reserved for each request
        self._used: dict[str, int] = {}

    def allocate(self, request_id: str, max_len: int) -> int | None:
        """Reserves max_len adjacent slots and returns the first; None, and nothing changed, if no hole is as large."""
        if max_len < 1 or request_id in self.runs:
            raise ValueError(f"request {request_id!r}: expected a new request and at least 1 slot, got {max_len}")
        fitting = [(length if self.fit == "best" else 0, start) for start, length in self.holes if length >= max_len]
        if not fitting:
            return None
        start = min(fitting)[1]
        index = bisect_left(self.holes, (start, 0))
        left = self.holes[index][1] - max_len
        self.holes[index : index + 1] = [(start + max_len, left)] if left else []
        self.runs[request_id], self._used[request_id] = (start, max_len), 0
        return start

    def write(self, request_id: str, num_tokens: int) -> None:
        """Notes that the request has num_tokens in memory now, of those reserved for it."""
        reserved = self.runs[request_id][1]
        if not 0 <= num_tokens <= reserved:
            raise ValueError(f"request {request_id!r}: {num_tokens} tokens do not fit the {reserved} slots reserved")
        self._used[request_id] = num_tokens

    def free(self, request_id: str) -> None:
        """Makes the run a hole again, joined with the holes beside it. KeyError if there is no such request."""
        start, length = self.runs.pop(request_id)
        del self._used[request_id]
        index = bisect_left(self.holes, (start, 0))
        if index < len(self.holes) and self.holes[index][0] == start + length:
            length += self.holes.pop(index)[1]
        if index > 0 and sum(self.holes[index - 1]) == start:
            index -= 1
            start, before = self.holes.pop(index)
            length += before
        self.holes.insert(index, (start, length))

    def memory(self, final: Mapping[str, int], wanted: int) -> MemoryUse:
        """How every slot is used now. final: how many tokens each request will have at its end, known in hindsight.

        wanted: the length of the run that the next request needs; smaller holes are of no use to it.
        """
        for request_id, (_, length) in self.runs.items():
            if not self._used[request_id] <= final[request_id] <= length:
                raise ValueError(
                    f"request {request_id!r}: has {self._used[request_id]} tokens in {length} slots, "
                    f"and cannot end with {final[request_id]}"
                )
        used = sum(self._used.values())
        reserved = sum(length for _, length in self.runs.values())
        later = sum(final[request_id] for request_id in self.runs) - used
        stranded = sum(length for _, length in self.holes if length < wanted)
        free = self.num_slots - reserved
        return MemoryUse(used, later, reserved - used - later, stranded, free - stranded)
