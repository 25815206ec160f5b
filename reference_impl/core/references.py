"""References to blocks: which are free, in use, or cached and in no use, so that they can be evicted.

Every holder of a block has a reference to it: each request, and the prefix index for each block in it. So an indexed
block with one reference is cached and in no use. A request that holds an indexed block holds all blocks before it, too
(see `KVManager.commit`), so evicting leaf by leaf can free every block that is in no use.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from reference_impl.interfaces import NO_BLOCK, BlockId, BlockPool, PrefixIndex


class BlockReferences:
    """Counts the references to the blocks of `pool`, and evicts from `index` when too few are free.

    A NO_BLOCK in a block table is a place without a block: holding and releasing pass over it.
    """

    def __init__(self, pool: BlockPool, index: PrefixIndex | None = None):
        self.pool, self.index = pool, index
        self.indexed: set[BlockId] = set()  # to these the index has a reference
        self.num_evictable = 0  # of these, how many have no other
        self.evicted: list[BlockId] = []  # since `take_evicted`
        self._in_flight: list[int] = []  # steps that were submitted and not collected
        self.releasing: list[tuple[int, list[BlockId]]] = []  # the step submitted last at that time, and blocks
        self._evict_at_once = max(1, pool.num_free // 128)  # looking for the oldest costs more than forgetting a few

    def take(self, num_blocks: int, shared: Sequence[BlockId] = ()) -> list[BlockId] | None:
        """Takes num_blocks new blocks, and a reference to each shared one, so that it is not evicted.

        None, and nothing evicted or held, if there are too few.
        """
        self.hold(shared)
        short = num_blocks - self.pool.num_free
        if short > self.num_evictable:
            self._drop(shared)
            return None
        if short > 0:
            self._evict(max(short, min(self._evict_at_once, self.num_evictable)))
        return self.pool.allocate(num_blocks)

    def hold(self, blocks: Sequence[BlockId]) -> None:
        for block in blocks:
            if block != NO_BLOCK:
                if block in self.indexed and self.pool.ref_count(block) == 1:  # only the index held it
                    self.num_evictable -= 1
                self.pool.incref([block])

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Drops references. Steps in flight may still read and write the blocks, so the references are kept until these
        are collected. Where steps take effect one after another, a later one could use the blocks at once; but then
        what a running step reads could not be checked, and an executor that copies beside its steps would be wrong."""
        if self._in_flight:
            self.releasing.append((self._in_flight[-1], list(blocks)))
        else:
            self._drop(blocks)

    @property
    def num_releasing(self) -> int:
        """The number of blocks that wait for running steps, including those that others share and keep."""
        return sum(block != NO_BLOCK for _, blocks in self.releasing for block in blocks)

    def step_submitted(self, step_id: int) -> None:
        self._in_flight.append(step_id)

    def step_collected(self, step_id: int) -> None:
        self._in_flight.remove(step_id)
        due = [blocks for after, blocks in self.releasing if after <= step_id]
        self.releasing = [(after, blocks) for after, blocks in self.releasing if after > step_id]
        for blocks in due:
            self._drop(blocks)

    def _drop(self, blocks: Sequence[BlockId]) -> None:
        for block in blocks:
            if block != NO_BLOCK:
                self.pool.decref([block])
                if block in self.indexed and self.pool.ref_count(block) == 1:
                    self.num_evictable += 1

    def add_indexed(self, blocks: Sequence[BlockId]) -> list[BlockId]:
        """Adds the index's own reference to those of these blocks that are new in it, and returns them. Each is held by
        a request."""
        new = [block for block in blocks if block not in self.indexed]
        self.pool.incref(new)
        self.indexed.update(new)
        return new

    def take_evicted(self) -> tuple[BlockId, ...]:
        evicted, self.evicted = tuple(self.evicted), []
        return evicted

    def forget(self, blocks: Collection[BlockId]) -> None:
        """Removes these blocks from the index, also those in use, and all others that are in no use. A block that is in
        use and is not one of these stays, with all before it."""
        if self.index is None:
            return
        found = self.index.evict(len(self.indexed), lambda block: block in blocks or self.pool.ref_count(block) == 1)
        for block in found:
            self.indexed.remove(block)
            self.num_evictable -= self.pool.ref_count(block) == 1
            self.pool.decref([block])
        self.evicted += found

    def _evict(self, num_blocks: int) -> None:
        assert self.index is not None
        blocks = self.index.evict(num_blocks, lambda block: self.pool.ref_count(block) == 1)
        for block in blocks:
            if block not in self.indexed or self.pool.ref_count(block) != 1:
                raise RuntimeError(f"PrefixIndex.evict gave block {block}, which is not indexed or is in use")
            self.indexed.remove(block)
            self.num_evictable -= 1
            self.pool.decref([block])
        self.evicted += blocks
        if len(blocks) != num_blocks:
            raise RuntimeError(
                f"PrefixIndex.evict({num_blocks}) gave {len(blocks)} blocks; {self.num_evictable} more are indexed "
                "and not in use"
            )
