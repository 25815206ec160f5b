# Attention goes through a row's blocks one by one with a running maximum and sum, as a kernel does; the pool is a stack
# of free blocks, the block freed last is used first.

# %% nbgrader={"grade_id": "wasted_slots"}
def wasted_slots(lengths, max_len, block_size):
    held = sum(lengths)
    blocks = sum((length + block_size - 1) // block_size for length in lengths)
    return len(lengths) * max_len - held, blocks * block_size - held


# %% nbgrader={"grade_id": "BlockPool"}
class BlockPool:
    def __init__(self, num_blocks):
        self.stack = list(range(num_blocks))[::-1]
        self.holders = dict.fromkeys(range(num_blocks), 0)

    @property
    def num_free(self):
        return len(self.stack)

    def ref_count(self, block):
        return self.holders[block]

    def allocate(self, n):
        if n > len(self.stack):
            raise RuntimeError(f"{n} > {len(self.stack)}")
        taken = self.stack[len(self.stack) - n :]
        del self.stack[len(self.stack) - n :]
        for block in taken:
            self.holders[block] += 1
        return taken

    def incref(self, ids):
        for done, block in enumerate(ids):
            if not self.holders.get(block):
                for other in ids[:done]:  # undo
                    self.holders[other] -= 1
                raise ValueError(block)
            self.holders[block] += 1

    def decref(self, ids):
        freed = []
        for done, block in enumerate(ids):
            if not self.holders.get(block):
                for other in ids[:done]:
                    self.holders[other] += 1
                raise ValueError(block)
            self.holders[block] -= 1
            if not self.holders[block]:
                freed.append(block)
        self.stack += freed
        return tuple(freed)


# %% nbgrader={"grade_id": "fork"}
def fork(pool, block_table, num_tokens, block_size):
    child = [block for i, block in enumerate(block_table) if i * block_size < num_tokens]
    pool.incref(child)
    return child


# %% nbgrader={"grade_id": "append_slots"}
def append_slots(pool, block_table, num_tokens, num_new, block_size, copy):
    table = list(block_table)
    wanted = (num_tokens + num_new + block_size - 1) // block_size
    writes = num_tokens // block_size
    private = writes >= len(table) or pool.ref_count(table[writes]) == 1
    needed = max(wanted - len(table), 0) + (0 if private else 1)
    fresh = iter(pool.allocate(needed))
    if not private:
        old, table[writes] = table[writes], next(fresh)
        pool.decref([old])  # somebody else still holds it
        copy(old, table[writes])
    table.extend(fresh)
    slots = [block * block_size + offset for block in table for offset in range(block_size)]
    return table, slots[num_tokens : num_tokens + num_new]


# %% nbgrader={"grade_id": "slot_mapping"}
import torch


def slot_mapping(block_table, positions, block_size):
    slots = block_table.to(torch.int64)[:, None] * block_size + torch.arange(block_size)
    return slots.flatten()[positions]


# %% nbgrader={"grade_id": "paged_attention"}
def paged_attention(q, k_cache, v_cache, block_table, seq_lens):
    _, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    outs = []
    for r, length in enumerate(seq_lens.tolist()):
        query = q[r].reshape(num_kv_heads, -1, head_dim)
        best = torch.full((*query.shape[:2], 1), float("-inf"))
        total, mixed = torch.zeros_like(best), torch.zeros_like(query)
        for i in range(0, length, block_size):
            block, num_tokens = int(block_table[r, i // block_size]), min(block_size, length - i)
            keys, values = (cache[block, :num_tokens].transpose(0, 1) for cache in (k_cache, v_cache))
            scores = query @ keys.transpose(1, 2) / head_dim**0.5
            higher = torch.maximum(best, scores.amax(-1, keepdim=True))
            weights, shrink = (scores - higher).exp(), (best - higher).exp()
            total, mixed, best = (
                total * shrink + weights.sum(-1, keepdim=True),
                mixed * shrink + weights @ values,
                higher,
            )
        outs.append((mixed / total).reshape(num_heads, head_dim))
    return torch.stack(outs)
