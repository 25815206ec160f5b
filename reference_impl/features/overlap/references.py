"""Overlapped steps: blocks that are given up while steps run come back when these have been collected.

A step that was submitted, and not collected, may still read and write the blocks of its requests. Where steps take
effect one after another a later one could have them at once; but then what a running step reads could not be checked,
and an executor that copies beside its steps would be wrong.

Extends `BlockReferences.release`; `OverlappedKVManager` is a `DefersReuse`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reference_impl.core.kv_manager import KVManager
from reference_impl.core.references import BlockReferences
from reference_impl.interfaces import NO_BLOCK, BlockId, BlockPool, PrefixIndex


class DeferredReferences(BlockReferences):
    def __init__(self, pool: BlockPool, index: PrefixIndex | None = None):
        super().__init__(pool, index)
        self._in_flight: list[int] = []  # steps that were submitted and not collected
        self.releasing: list[tuple[int, list[BlockId]]] = []  # the step submitted last at that time, and blocks

    def release(self, blocks: Sequence[BlockId]) -> None:
        if self._in_flight:
            self.releasing.append((self._in_flight[-1], list(blocks)))
        else:
            super().release(blocks)

    @property
    def num_releasing(self) -> int:
        return sum(block != NO_BLOCK for _, blocks in self.releasing for block in blocks)

    def step_submitted(self, step_id: int) -> None:
        self._in_flight.append(step_id)

    def step_collected(self, step_id: int) -> None:
        self._in_flight.remove(step_id)
        due = [blocks for after, blocks in self.releasing if after <= step_id]
        self.releasing = [(after, blocks) for after, blocks in self.releasing if after > step_id]
        for blocks in due:
            super().release(blocks)


class OverlappedKVManager(KVManager):
    def __init__(self, pool: BlockPool, block_size: int, **rest: Any):
        super().__init__(pool, block_size, **rest)
        self.references: DeferredReferences = DeferredReferences(pool, self.index)

    @property
    def num_releasing(self) -> int:
        """Freed blocks that wait for running steps, including those that others share and keep."""
        return self.references.num_releasing

    def step_submitted(self, step_id: int) -> None:
        self.references.step_submitted(step_id)

    def step_collected(self, step_id: int) -> None:
        self.references.step_collected(step_id)
