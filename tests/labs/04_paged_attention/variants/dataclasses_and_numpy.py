# Dataclasses, slots and generators: the pool keeps a record for each block and a heap of free ones; attention is NumPy
# in float64; results are tuples, sets and arrays.

# %% nbgrader={"grade_id": "wasted_slots"}
import numpy as np


def wasted_slots(lengths, max_len, block_size):
    lengths = np.asarray(lengths, dtype=np.int64)
    return np.array([np.sum(max_len - lengths), np.sum(-lengths % block_size)]).tolist()


# %% nbgrader={"grade_id": "BlockPool"}
import heapq
from dataclasses import dataclass


@dataclass(slots=True)
class Block:
    number: int
    holders: int = 0


class BlockPool:
    __slots__ = ("_blocks", "_heap")

    def __init__(self, num_blocks):
        self._blocks = {number: Block(number) for number in range(num_blocks)}
        self._heap = [*self._blocks]

    num_free = property(lambda self: len(self._heap))

    def ref_count(self, block):
        return self._blocks[block].holders

    def allocate(self, n):
        if len(self._heap) < n:
            raise RuntimeError(f"asked for {n}")
        return tuple(self._hold(heapq.heappop(self._heap)) for _ in range(n))

    def _hold(self, number):
        self._blocks[number].holders = 1
        return number

    def _held(self, ids):
        found = [self._blocks.get(number, Block(-1)) for number in ids]
        if any(block.holders < 1 for block in found):
            raise ValueError(f"not all of {ids} are held")
        return found

    def incref(self, ids):
        for block in self._held(ids):
            block.holders += 1

    def decref(self, ids):
        found = self._held(ids)
        for block in found:
            block.holders -= 1
        if any(block.holders < 0 for block in found):
            for block in found:
                block.holders += 1
            raise ValueError(f"{ids}: more references than there are")
        freed = {block.number for block in found if block.holders == 0}
        for number in freed:
            heapq.heappush(self._heap, number)
        return freed


# %% nbgrader={"grade_id": "fork"}
from itertools import islice


def fork(pool, block_table, num_tokens, block_size):
    shared = tuple(islice(block_table, (num_tokens + block_size - 1) // block_size))
    pool.incref(list(shared))
    return shared


# %% nbgrader={"grade_id": "append_slots"}
def append_slots(pool, block_table, num_tokens, num_new, block_size, copy):
    def entries():
        """The table's blocks, with the copy in its place, and then the new ones."""
        for i, block in enumerate(block_table):
            yield own if i == first and shared else block
        yield from grown

    first = num_tokens // block_size
    shared = any(pool.ref_count(block) > 1 for block in block_table[first : first + 1])
    own, *grown = pool.allocate(shared + max((num_tokens + num_new - 1) // block_size + 1 - len(block_table), 0)) or [
        None
    ]
    if shared:
        copy(block_table[first], own)
        pool.decref([block_table[first]])
    elif own is not None:
        grown = [own, *grown]
    table = tuple(entries())
    return [
        table,
        tuple(table[p // block_size] * block_size + p % block_size for p in range(num_tokens, num_tokens + num_new)),
    ]


# %% nbgrader={"grade_id": "slot_mapping"}
def slot_mapping(block_table, positions, block_size):
    entry, offset = np.divmod(positions.numpy(), block_size)
    return block_table.numpy().astype(np.int64)[entry] * block_size + offset


# %% nbgrader={"grade_id": "paged_attention"}
import torch


def paged_attention(q, k_cache, v_cache, block_table, seq_lens):
    q, k, v, table = (t.numpy() for t in (q, k_cache, v_cache, block_table))
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = k.shape[1:3]
    out = np.empty(q.shape, dtype=np.float64)
    for r, length in enumerate(seq_lens.numpy()):
        blocks = table[r, : -(-length // block_size)]
        keys, values = (c[blocks].reshape(-1, num_kv_heads, head_dim)[:length].astype(np.float64) for c in (k, v))
        for h in range(num_heads):
            g = h // (num_heads // num_kv_heads)
            scores = keys[:, g] @ q[r, h].astype(np.float64) / np.sqrt(head_dim)
            weights = np.exp(scores - scores.max())
            out[r, h] = weights @ values[:, g] / weights.sum()
    return torch.from_numpy(out).float()
