# Position by position and head by head, in plain Python; the pool is a set of free blocks and a dict of counts.

# %% nbgrader={"grade_id": "wasted_slots"}
def wasted_slots(lengths, max_len, block_size):
    contiguous = paged = 0
    for length in lengths:
        contiguous += max_len - length
        while length % block_size:
            length += 1
            paged += 1
    return [contiguous, paged]


# %% nbgrader={"grade_id": "BlockPool"}
class BlockPool:
    def __init__(self, num_blocks):
        self.free = set(range(num_blocks))
        self.used = {}

    @property
    def num_free(self):
        return len(self.free)

    def ref_count(self, block):
        return self.used.get(block, 0)

    def allocate(self, n):
        if len(self.free) < n:
            raise RuntimeError("not enough free blocks")
        taken = sorted(self.free, reverse=True)[:n]
        self.free -= set(taken)
        self.used.update(dict.fromkeys(taken, 1))
        return taken

    def incref(self, ids):
        if not all(block in self.used for block in ids):
            raise ValueError(f"one of {ids} has no reference")
        for block in ids:
            self.used[block] += 1

    def decref(self, ids):
        after = dict(self.used)
        for block in ids:
            if after.get(block, 0) < 1:
                raise ValueError(f"block {block} has too few references")
            after[block] -= 1
        gone = [block for block in after if after[block] == 0]
        self.used = {block: count for block, count in after.items() if count}
        self.free.update(gone)
        return gone


# %% nbgrader={"grade_id": "fork"}
def fork(pool, block_table, num_tokens, block_size):
    child = []
    while len(child) * block_size < num_tokens:
        child.append(block_table[len(child)])
        pool.incref([child[-1]])
    return child


# %% nbgrader={"grade_id": "append_slots"}
def append_slots(pool, block_table, num_tokens, num_new, block_size, copy):
    last = (num_tokens + num_new - 1) // block_size  # the entry that the last new token falls in
    here, offset = divmod(num_tokens, block_size)
    must_copy = here < len(block_table) and pool.ref_count(block_table[here]) >= 2
    grow = last + 1 - len(block_table) if last >= len(block_table) else 0
    if pool.num_free < grow + int(must_copy):
        raise RuntimeError("out of blocks")
    if must_copy:
        [own] = pool.allocate(1)
        copy(block_table[here], own)
        pool.decref([block_table[here]])
        block_table = [*block_table[:here], own, *block_table[here + 1 :]]
    slots = []
    for _ in range(num_new):
        if here == len(block_table):
            block_table = [*block_table, *pool.allocate(1)]
        slots.append(block_table[here] * block_size + offset)
        offset += 1
        if offset == block_size:
            here, offset = here + 1, 0
    return block_table, slots


# %% nbgrader={"grade_id": "slot_mapping"}
import torch


def slot_mapping(block_table, positions, block_size):
    blocks = block_table.tolist()
    return torch.tensor([blocks[p // block_size] * block_size + p % block_size for p in positions.tolist()])


# %% nbgrader={"grade_id": "paged_attention"}
import math


def paged_attention(q, k_cache, v_cache, block_table, seq_lens):
    rows, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1], k_cache.shape[2]
    out = torch.zeros(rows, num_heads, head_dim)
    for r in range(rows):
        places = [(int(block_table[r, p // block_size]), p % block_size) for p in range(int(seq_lens[r]))]
        for h in range(num_heads):
            g = h * num_kv_heads // num_heads
            scores = [float(q[r, h] @ k_cache[b, o, g]) / math.sqrt(head_dim) for b, o in places]
            exps = [math.exp(s - max(scores)) for s in scores]
            for e, (b, o) in zip(exps, places, strict=True):
                out[r, h] += e / sum(exps) * v_cache[b, o, g]
    return out
