# Recursion, and torch's own attention over gathered keys; the pool is one array of counts.

# %% nbgrader={"grade_id": "wasted_slots"}
def wasted_slots(lengths, max_len, block_size):
    held = sum(lengths)
    return max_len * len(lengths) - held, block_size * sum(len(range(0, n, block_size)) for n in lengths) - held


# %% nbgrader={"grade_id": "BlockPool"}
import numpy as np


class BlockPool:
    """One array of counts; what is free is looked up where it is needed, from the end."""

    def __init__(self, num_blocks):
        self._counts = np.zeros(num_blocks, dtype=np.int64)

    @property
    def num_free(self):
        return np.count_nonzero(self._counts == 0)

    def ref_count(self, block):
        return self._counts[block]

    def allocate(self, n):
        taken = np.flatnonzero(self._counts == 0)[::-1][:n]
        if len(taken) != n:
            raise RuntimeError("wait")
        self._counts[taken] = 1
        return taken

    def _by_block(self, ids):
        known = np.arange(len(self._counts))
        times = np.array([ids.count(block) for block in known], dtype=np.int64)
        if times.sum() != len(ids):
            raise ValueError(f"{ids}: no such block")
        return times

    def incref(self, ids):
        times = self._by_block(list(ids))
        if (self._counts[times > 0] == 0).any():
            raise ValueError(f"{ids}: free")
        self._counts += times

    def decref(self, ids):
        times = self._by_block(list(ids))
        if (times > self._counts).any():
            raise ValueError(f"{ids}: too many")
        self._counts -= times
        return np.flatnonzero((times > 0) & (self._counts == 0))


# %% nbgrader={"grade_id": "fork"}
def fork(pool, block_table, num_tokens, block_size):
    if num_tokens <= 0:
        return []
    pool.incref(block_table[:1])
    return block_table[:1] + fork(pool, block_table[1:], num_tokens - block_size, block_size)


# %% nbgrader={"grade_id": "append_slots"}
def append_slots(pool, block_table, num_tokens, num_new, block_size, copy):
    first = num_tokens // block_size
    needed = max(0, (num_tokens + num_new + block_size - 1) // block_size - len(block_table))
    if first < len(block_table) and pool.ref_count(block_table[first]) > 1:
        own, *grown = pool.allocate(needed + 1)
        copy(src=block_table[first], dst=own)
        old, block_table[first] = block_table[first], own
        pool.decref([old])
    else:
        grown = pool.allocate(needed)
    block_table += grown

    def slots(position, left):
        if left == 0:
            return []
        here = min(left, block_size - position % block_size)
        start = block_table[position // block_size] * block_size + position % block_size
        return [*range(start, start + here), *slots(position + here, left - here)]

    return block_table, slots(num_tokens, num_new)


# %% nbgrader={"grade_id": "slot_mapping"}
def slot_mapping(block_table, positions, block_size):
    entry = positions // block_size
    return (block_table.double()[entry] * block_size + (positions - entry * block_size)).long()


# %% nbgrader={"grade_id": "paged_attention"}
import torch


def paged_attention(q, k_cache, v_cache, block_table, seq_lens):
    block_size, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]

    def row(r):
        n = int(seq_lens[r])
        blocks = block_table[r, : (n + block_size - 1) // block_size].long()
        keys, values = (c[blocks].flatten(0, 1)[:n].transpose(0, 1) for c in (k_cache, v_cache))
        keys, values = (t.repeat_interleave(group, 0)[None] for t in (keys, values))
        return torch.nn.functional.scaled_dot_product_attention(q[r][None, :, None], keys, values)[0, :, 0]

    return torch.stack([row(r) for r in range(len(q))])
