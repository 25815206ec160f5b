"""Turns tokens into blocks: block tables that grow, share, are copied when written, cached, and moved to the host.

Paging and copy-on-write are PagedAttention's (Kwon et al. 2023), sharing through an index of prefixes is vLLM's and
SGLang's. Integers only: what must be moved is noted, and the executor moves it before the step writes anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from reference_impl.interfaces import (
    NO_BLOCK,
    BlockId,
    BlockPair,
    BlockPool,
    PrefixIndex,
    Request,
    Transfers,
)
from reference_impl.kv.cache_key import cache_key


class KVManager:
    """Block tables over one pool.

    windows: per KV group its sliding window, or None. index: where computed prefixes can be found again; only for
    models whose layers all see everything. host_pool: blocks of host memory for requests that are swapped out.

    Every holder of a block has a reference to it: each request, and the index for each block in it. So an indexed
    block with one reference is not in use and can be evicted. A request that holds an indexed block holds all
    blocks before it too (see `commit`), so evicting leaf by leaf can free every one of them.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        windows: Sequence[int | None] = (None,),
        index: PrefixIndex | None = None,
        host_pool: BlockPool | None = None,
    ):
        if index is not None and tuple(windows) != (None,):
            raise ValueError(
                f"prefix caching needs a model whose layers all see everything; this one has windows {list(windows)}"
            )
        self.pool, self.block_size, self.windows = pool, block_size, tuple(windows)
        self.index, self.host_pool = index, host_pool
        self._indexed: set[BlockId] = set()
        self._num_evictable = 0  # indexed blocks with one reference
        self._evict_at_once = max(1, pool.num_free // 128)  # looking for the oldest costs more than forgetting a few
        self._on_host: dict[str, list[list[BlockId]]] = {}  # swapped-out requests: a table of host blocks per group
        self._returning: dict[str, list[list[BlockId]]] = {}  # the same, of those that this step's transfers bring back
        self._copies: list[BlockPair] = []
        self._swap_out: list[BlockPair] = []
        self._swap_in: list[BlockPair] = []
        self._evicted: list[BlockId] = []
        self._in_flight: list[int] = []  # steps that were submitted and not collected
        self._releasing: list[_Releasing] = []
        self._has_forked = False  # before the first fork, a block that is written has one holder

    @property
    def num_available(self) -> int:
        return self.pool.num_free + self._num_evictable

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)  # ceiling

    def admit(self, request: Request, num_tokens: int, budget: int) -> bool:
        """Blocks for tokens [0, num_tokens) of a request that has none: cached ones, swapped-out ones, new ones.

        Of a window group only what the first chunk of at most `budget` tokens needs: the rest comes and goes.
        """
        if request.id in self._on_host:
            return self._bring_back(request, num_tokens, budget)
        cached = self._match(request)
        self._hold(cached)
        request.block_tables = [cached, *([] for _ in self.windows[1:])]
        start = len(cached) * self.block_size
        ends = [num_tokens if window is None else min(num_tokens, budget) for window in self.windows]
        blocks = self._take(sum(self.blocks_for(end) - len(cached) for end in ends))
        if blocks is None:
            self._give_back(cached)  # now: unused, so no step to wait for
            request.block_tables = [[] for _ in self.windows]
            return False
        for table, end in zip(request.block_tables, ends, strict=True):
            table += _pop(blocks, self.blocks_for(end) - len(table))
        request.num_computed_tokens = request.num_cached_tokens = start
        return True

    def _match(self, request: Request) -> list[BlockId]:
        """At least the last token is computed, even of a prompt that is cached as a whole: its logits are needed. All
        are where they are scored, or pooled."""
        if self.index is None or request.needs_whole_prompt:
            return []
        longest = (request.num_tokens - 1) // self.block_size * self.block_size
        return list(self.index.match(request.tokens[:longest], cache_key(request)))

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Room for the request's next num_tokens, or False. Blocks behind its windows are freed either way."""
        start = request.num_computed_tokens
        first, end = start // self.block_size, -(-(start + num_tokens) // self.block_size)
        missing, shared = 0, []
        for table, window in zip(request.block_tables, self.windows, strict=True):
            held = len(table)
            if window is not None:
                self._let_go(table, _surely_computed(request) - window + 1)
            if end > held:
                missing += end - held
            # Whether another request reads the block to be written.
            if self._has_forked and first < held and self.pool.ref_count(table[first]) > 1:
                shared.append(table)
        if not missing and not shared:
            return True
        blocks = self._take(missing + len(shared))
        if blocks is None:
            return False
        for table in shared:
            [copy] = _pop(blocks, 1)
            self._copies.append(BlockPair(table[first], copy))
            self._release([table[first]])
            table[first] = copy
        for table in request.block_tables:
            table += _pop(blocks, max(0, end - len(table)))
        return True

    def _let_go(self, table: list[BlockId], first_seen: int) -> None:
        """Frees the blocks that lie wholly before position first_seen, the first that any later query sees."""
        block = min(first_seen // self.block_size, len(table)) - 1
        while block >= 0 and table[block] != NO_BLOCK:
            self._release([table[block]])
            table[block] = NO_BLOCK
            block -= 1

    def commit(self, request: Request) -> None:
        """Index the request's full computed blocks.

        Where the same tokens were computed before, the request takes over that block and gives back its own.
        """
        if self.index is None or not request.block_table:
            return
        table, full = request.block_table, _surely_computed(request) // self.block_size
        if not full or table[full - 1] in self._indexed:
            return
        tokens = request.tokens[: full * self.block_size]
        canonical = self.index.insert(tokens, cache_key(request), table[:full])
        for i, block in enumerate(canonical):
            if block != table[i]:
                self._hold([block])
                self._release([table[i]])
                table[i] = block
            elif block not in self._indexed:
                self.pool.incref([block])  # the index's own reference
                self._indexed.add(block)

    def pin(self, tokens: Sequence[int], key: bytes) -> list[BlockId]:
        """Hold the cached blocks of this prefix, so that they are not evicted until `unpin`; returns them."""
        blocks = [] if self.index is None else list(self.index.match(tokens, key))
        self._hold(blocks)
        return blocks

    def unpin(self, blocks: Sequence[BlockId]) -> None:
        self._release(blocks)

    def fork(self, parent: Request, child: Request) -> None:
        self._has_forked = True
        self.commit(parent)  # so that both hold the same indexed path
        blocks = self.blocks_for(child.num_computed_tokens)
        child.block_tables = [table[:blocks] for table in parent.block_tables]
        for table in child.block_tables:
            self._hold(table)

    def free(self, request: Request) -> None:
        if request.id in self._returning:
            self._stay_on_host(request)
        self.commit(request)
        for table in request.block_tables:
            self._release(table)
        for table in self._on_host.pop(request.id, ()):
            self._release_host(table)
        request.block_tables = [[] for _ in self.windows]

    def swap_out(self, request: Request) -> bool:
        """Blocks with computed tokens go to the host; reserved ones, and those outside every window, are only freed.

        If it had nothing to compute, its last token is computed again when it is back, as `admit` promises.
        """
        if request.id in self._returning:
            self._stay_on_host(request)
            return True
        computed = min(request.num_computed_tokens, request.num_tokens - 1)
        for table, window in zip(request.block_tables, self.windows, strict=True):
            if window is not None:
                self._let_go(table, min(computed, _surely_computed(request)) - window + 1)
        used = self.blocks_for(computed)
        tables = [table[:used] for table in request.block_tables]
        wanted = sum(block != NO_BLOCK for table in tables for block in table)
        if self.host_pool is None or wanted == 0 or wanted > self.host_pool.num_free:
            return False
        host = self.host_pool.allocate(wanted)
        there = [[NO_BLOCK if block == NO_BLOCK else host.pop() for block in table] for table in tables]
        self._swap_out += _pairs(tables, there)
        self.free(request)
        request.num_computed_tokens = computed
        self._on_host[request.id] = there
        return True

    def _bring_back(self, request: Request, num_tokens: int, budget: int) -> bool:
        there = self._on_host[request.id]
        saved = [block for table in there for block in table if block != NO_BLOCK]
        chunk = min(num_tokens, request.num_computed_tokens + budget)
        ends = [self.blocks_for(num_tokens if window is None else chunk) for window in self.windows]
        # Of a request whose drafts turned out to be wrong, more blocks may have been saved than it has tokens for.
        more = [max(0, end - len(table)) for table, end in zip(there, ends, strict=True)]
        blocks = self._take(len(saved) + sum(more))
        if blocks is None:
            return False
        here = [[NO_BLOCK if block == NO_BLOCK else blocks.pop() for block in table] for table in there]
        self._swap_in += _pairs(there, here)
        request.block_tables = [table + _pop(blocks, n) for table, n in zip(here, more, strict=True)]
        self._returning[request.id] = self._on_host.pop(request.id)
        request.num_cached_tokens = 0
        return True

    def _stay_on_host(self, request: Request) -> None:
        """Undoes `_bring_back` in the same step: nothing was moved yet, so its blocks on the device hold nothing."""
        given = {block for table in request.block_tables for block in table}
        self._swap_in = [pair for pair in self._swap_in if pair.dst not in given]
        for table in request.block_tables:
            self._release(table)
        request.block_tables = [[] for _ in self.windows]
        self._on_host[request.id] = self._returning.pop(request.id)

    def _release_host(self, table: list[BlockId]) -> None:
        if self._in_flight:
            self._releasing.append(_Releasing(self._in_flight[-1], list(table), on_host=True))
        else:
            self._give_back_host(table)

    def _give_back_host(self, table: Sequence[BlockId]) -> None:
        assert self.host_pool is not None
        self.host_pool.decref([block for block in table if block != NO_BLOCK])

    def take_transfers(self) -> Transfers:
        if not (self._copies or self._swap_out or self._swap_in or self._evicted):
            return Transfers()
        transfers = Transfers(tuple(self._swap_out), tuple(self._copies), tuple(self._swap_in), tuple(self._evicted))
        self._copies, self._swap_out, self._swap_in, self._evicted = [], [], [], []
        # Only now: what this step swaps out goes to the host first, and must not fall on what it has yet to bring back.
        for tables in self._returning.values():
            for table in tables:
                self._release_host(table)
        self._returning = {}
        return transfers

    def _take(self, num_blocks: int) -> list[BlockId] | None:
        """New blocks, evicting from the index if needed; None, and nothing evicted, if there are too few."""
        short = num_blocks - self.pool.num_free
        if short > self._num_evictable:
            return None
        if short > 0:
            self._evict(max(short, min(self._evict_at_once, self._num_evictable)))
        return self.pool.allocate(num_blocks)

    def _evict(self, num_blocks: int) -> None:
        assert self.index is not None
        blocks = self.index.evict(num_blocks, lambda block: self.pool.ref_count(block) == 1)
        for block in blocks:
            if block not in self._indexed or self.pool.ref_count(block) != 1:
                raise RuntimeError(f"PrefixIndex.evict gave block {block}, which is not indexed or is in use")
            self._indexed.remove(block)
            self._num_evictable -= 1
            self.pool.decref([block])
        self._evicted += blocks
        if len(blocks) != num_blocks:
            raise RuntimeError(
                f"PrefixIndex.evict({num_blocks}) gave {len(blocks)} blocks; {self._num_evictable} more are indexed "
                "and not in use"
            )

    def _hold(self, blocks: Sequence[BlockId]) -> None:
        for block in blocks:
            if block != NO_BLOCK:
                self._num_evictable -= block in self._indexed and self.pool.ref_count(block) == 1
                self.pool.incref([block])

    def _release(self, blocks: Sequence[BlockId]) -> None:
        """While a step runs that may use them, they are only noted: `step_collected` gives them back. Where steps take
        effect one after another a later one could have them at once; but then what a running step reads could not be
        checked, and an executor that copies beside its steps would be wrong."""
        if self._in_flight:
            self._releasing.append(_Releasing(self._in_flight[-1], list(blocks)))
        else:
            self._give_back(blocks)

    def _give_back(self, blocks: Sequence[BlockId]) -> None:
        for block in blocks:
            if block != NO_BLOCK:
                self.pool.decref([block])
                self._num_evictable += block in self._indexed and self.pool.ref_count(block) == 1

    # --- overlapped steps: what a running step uses is not reallocated -----------------------------------------------

    @property
    def num_releasing(self) -> int:
        """Freed blocks that wait for running steps, including those that others share and keep."""
        return sum(block != NO_BLOCK for r in self._releasing if not r.on_host for block in r.blocks)

    def step_submitted(self, step_id: int) -> None:
        self._in_flight.append(step_id)

    def step_collected(self, step_id: int) -> None:
        self._in_flight.remove(step_id)
        due = [r for r in self._releasing if r.after <= step_id]
        self._releasing = [r for r in self._releasing if r.after > step_id]
        for r in due:
            (self._give_back_host if r.on_host else self._give_back)(r.blocks)


class _Releasing(NamedTuple):
    """Freed blocks, and the step submitted last at that time."""

    after: int
    blocks: list[BlockId]
    on_host: bool = False


def _surely_computed(request: Request) -> int:
    """Also if every draft in flight is wrong: what is computed of the tokens that it is known to have."""
    return min(request.num_computed_tokens, len(request.tokens))


def _pop(blocks: list[BlockId], n: int) -> list[BlockId]:
    """Takes the first n off the list."""
    taken, blocks[:] = blocks[:n], blocks[n:]
    return taken


def _pairs(sources: list[list[BlockId]], targets: list[list[BlockId]]) -> list[BlockPair]:
    return [
        BlockPair(src, dst)
        for from_, to in zip(sources, targets, strict=True)
        for src, dst in zip(from_, to, strict=True)
        if src != NO_BLOCK
    ]
