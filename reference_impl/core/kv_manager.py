"""Turns tokens into blocks: block tables that grow, share blocks, copy them before they are written, and cache them.

Paging and copy-on-write are PagedAttention's (Kwon et al. 2023), sharing through an index of prefixes is vLLM's and
SGLang's. Integers only: what must be copied is noted, and the executor copies it before the step writes anything.

    admit      blocks for a prompt: those of its cached prefix, and new ones
    reserve    blocks for the tokens of the next step; of a shared block that they fall in, a copy
    commit     full blocks of computed tokens go into the prefix index
    fork       another request shares the blocks
    free       commits once more, then drops all references; indexed blocks stay cached until they are evicted
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from reference_impl.core.references import BlockReferences
from reference_impl.interfaces import BlockId, BlockPair, BlockPool, PrefixIndex, Request, Transfers


class KVManager:
    """Block tables over one pool.

    index: finds the blocks of computed prefixes; None: there is no prefix cache. num_groups: KV groups, each with a
    block table of its own. ValueError for an index and more than one group.
    """

    def __init__(self, pool: BlockPool, block_size: int, index: PrefixIndex | None = None, num_groups: int = 1):
        if index is not None and num_groups > 1:
            raise ValueError(f"prefix caching needs a model with one KV group; this one has {num_groups}")
        self.pool, self.block_size, self.index, self.num_groups = pool, block_size, index, num_groups
        self.references = BlockReferences(pool, index)
        self._copies: list[BlockPair] = []
        self._has_forked = False  # before the first fork, a block that is written has one holder

    @property
    def num_available(self) -> int:
        """The number of blocks that can be allocated: free ones, and cached ones that are not in use."""
        return self.pool.num_free + self.references.num_evictable

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)  # ceiling

    def admit(self, request: Request, num_tokens: int, budget: int) -> bool:
        """Gives a request without blocks those for its tokens [0, num_tokens); False if too few are available. At most
        `budget` tokens are computed in its first step."""
        cached = self._match(request)
        start = len(cached) * self.block_size
        tables = [cached, *([] for _ in range(1, self.num_groups))]
        lengths = self.lengths_of(num_tokens, start + budget)
        missing = [length - len(table) for table, length in zip(tables, lengths, strict=True)]
        blocks = self.references.take(sum(missing), shared=cached)
        if blocks is None:
            return False
        extend(tables, missing, iter(blocks))
        request.block_tables = tables
        request.num_computed_tokens = request.num_cached_tokens = start
        return True

    def _match(self, request: Request) -> list[BlockId]:
        """The cached blocks of the request's longest prefix without its last token, which is always computed: its
        logits are needed. None where the whole prompt must be computed, to be scored or pooled."""
        if self.index is None or request.needs_whole_prompt:
            return []
        longest = (request.num_tokens - 1) // self.block_size * self.block_size
        return list(self.index.match(request.tokens[:longest], cache_key(request)))

    def lengths_of(self, num_tokens: int, first_end: int) -> list[int]:
        """The length of each group's block table when a request is admitted. Its first step ends at first_end at the
        latest."""
        return [self.blocks_for(num_tokens)] * self.num_groups

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Makes room for the request's next num_tokens; False, and nothing changed, if too few blocks are available."""
        start = request.num_computed_tokens
        first, end = start // self.block_size, -(-(start + num_tokens) // self.block_size)
        missing, shared = 0, []
        for table in request.block_tables:
            held = len(table)
            if end > held:
                missing += end - held
            # Whether another request reads the block to be written.
            if self._has_forked and first < held and self.pool.ref_count(table[first]) > 1:
                shared.append(table)
        if not missing and not shared:
            return True
        blocks = self.references.take(missing + len(shared))
        if blocks is None:
            return False
        new = iter(blocks)
        for table in shared:
            copy = next(new)
            self._copies.append(BlockPair(table[first], copy))
            self.references.release([table[first]])
            table[first] = copy
        extend(request.block_tables, [max(0, end - len(table)) for table in request.block_tables], new)
        return True

    def commit(self, request: Request) -> None:
        """Indexes the request's full computed blocks.

        Where the same tokens were computed before, the request takes over that block and gives back its own.
        """
        if self.index is None or not request.block_table:
            return
        table, full = request.block_table, surely_computed(request) // self.block_size
        if not full or table[full - 1] in self.references.indexed:
            return
        tokens = request.tokens[: full * self.block_size]
        canonical = self.index.insert(tokens, cache_key(request), table[:full])
        for i, block in enumerate(canonical):
            if block != table[i]:
                self.references.hold([block])
                self.references.release([table[i]])
                table[i] = block
        self.references.add_indexed(canonical)

    def fork(self, parent: Request, child: Request) -> None:
        """The child shares the blocks of its first num_computed_tokens with the parent."""
        self._has_forked = True
        self.commit(parent)  # so that both hold the same indexed path
        blocks = self.blocks_for(child.num_computed_tokens)
        child.block_tables = [table[:blocks] for table in parent.block_tables]
        for table in child.block_tables:
            self.references.hold(table)

    def free(self, request: Request) -> None:
        self.commit(request)
        for table in request.block_tables:
            self.references.release(table)
        request.block_tables = [[] for _ in range(self.num_groups)]

    def pin(self, tokens: Sequence[int], key: bytes) -> list[BlockId]:
        """Holds the cached blocks of this prefix as a request holds its own, so that they are not evicted until
        `unpin`; returns them."""
        blocks = [] if self.index is None else list(self.index.match(tokens, key))
        self.references.hold(blocks)
        return blocks

    def unpin(self, blocks: Sequence[BlockId]) -> None:
        self.references.release(blocks)

    @property
    def num_releasing(self) -> int:
        """The number of freed blocks that wait for running steps."""
        return self.references.num_releasing

    def step_submitted(self, step_id: int) -> None:
        """Called when a step was submitted: blocks freed from now on wait for it."""
        self.references.step_submitted(step_id)

    def step_collected(self, step_id: int) -> None:
        """Called when a step was collected: blocks that waited for it are available again."""
        self.references.step_collected(step_id)

    def take_transfers(self) -> Transfers:
        """The copies that the next step must make first, and the blocks evicted, since the last call."""
        if not self._copies and not self.references.evicted:
            return NOTHING
        copies, self._copies = tuple(self._copies), []
        return Transfers(copies=copies, evicted=self.references.take_evicted())


NOTHING = Transfers()


def extend(tables: Sequence[list[BlockId]], missing: Sequence[int], new: Iterator[BlockId]) -> None:
    """Appends to each table as many of the new blocks as it misses."""
    for table, n in zip(tables, missing, strict=True):
        table += islice(new, n)


def surely_computed(request: Request) -> int:
    """The number of known tokens that are computed, even if every draft in flight turns out to be wrong."""
    return min(request.num_computed_tokens, len(request.tokens))


def cache_key(request: Request) -> bytes:
    """The key of the prefixes that the request may share: see `prefix_key`."""
    return prefix_key(request.adapter, request.cache_salt)


def prefix_key(adapter: str | None, cache_salt: str | None) -> bytes:
    """Bytes that differ whenever adapter or salt differ: another adapter's keys and values differ, and
    another tenant's cache must not show, not even in how fast an answer comes.

    Every part is tagged and prefixed with its length, so that ("ab", "c") is not ("a", "bc") and None is not "".
    """
    parts = []
    for tag, value in ((b"adapter", adapter), (b"salt", cache_salt)):
        if value is not None:
            text = value.encode("utf-8", "surrogatepass")
            parts.append(tag + len(text).to_bytes(8, "little") + text)
    return b"".join(parts)
