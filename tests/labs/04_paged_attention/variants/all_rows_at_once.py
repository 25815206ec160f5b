# Attention of all rows at once, padded to the longest: the padding reads a slot of the row itself. The pool is a tensor
# of counts and looks for zeros in it; slots come from divmod.

# %% nbgrader={"grade_id": "wasted_slots"}
import torch


def wasted_slots(lengths, max_len, block_size):
    lengths = torch.tensor(lengths)
    return int((max_len - lengths).sum()), int((-lengths % block_size).sum())


# %% nbgrader={"grade_id": "BlockPool"}
class BlockPool:
    def __init__(self, num_blocks):
        self.counts = torch.zeros(num_blocks, dtype=torch.int64)

    @property
    def num_free(self):
        return int((self.counts == 0).sum())

    def ref_count(self, block):
        return int(self.counts[block])

    def allocate(self, n):
        free = (self.counts == 0).nonzero().flatten()
        if len(free) < n:
            raise RuntimeError(f"only {len(free)} blocks are free")
        self.counts[free[:n]] = 1
        return free[:n].tolist()

    def _changed(self, ids, change):
        ids = torch.tensor(ids, dtype=torch.int64)
        if len(ids) and (ids.min() < 0 or ids.max() >= len(self.counts)):
            raise ValueError("no such block")
        return self.counts.index_add(0, ids, torch.full_like(ids, change))

    def incref(self, ids):
        changed = self._changed(ids, 1)
        if any(self.counts[block] == 0 for block in ids):
            raise ValueError("a free block cannot be shared")
        self.counts = changed

    def decref(self, ids):
        changed = self._changed(ids, -1)
        if (changed < 0).any():
            raise ValueError("freed twice")
        freed = ((changed == 0) & (self.counts > 0)).nonzero().flatten().tolist()
        self.counts = changed
        return freed


# %% nbgrader={"grade_id": "append_slots"}
def append_slots(pool, block_table, num_tokens, num_new, block_size, copy):
    first, last = num_tokens // block_size, (num_tokens + num_new - 1) // block_size
    touched = block_table[first : first + 1]
    sharing = [block for block in touched if pool.ref_count(block) > 1]
    new = pool.allocate(len(sharing) + len(range(len(block_table), last + 1)))
    for block in sharing:
        copy(block, new[0])
        pool.decref(sharing)
    table = block_table[:first] + (new[:1] if sharing else touched) + block_table[first + 1 :] + new[len(sharing) :]
    places = (divmod(p, block_size) for p in range(num_tokens, num_tokens + num_new))
    return table, [table[entry] * block_size + offset for entry, offset in places]


# %% nbgrader={"grade_id": "slot_mapping"}
def slot_mapping(block_table, positions, block_size):
    table = block_table.long() * block_size
    return table.index_select(0, positions.div(block_size, rounding_mode="floor")) + positions.remainder(block_size)


# %% nbgrader={"grade_id": "paged_attention"}
def paged_attention(q, k_cache, v_cache, block_table, seq_lens):
    rows, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    position = torch.arange(int(seq_lens.max()))
    hidden = position >= seq_lens[:, None]  # [rows, longest]
    position = torch.where(hidden, 0, position)  # the row's own first token instead of somebody else's
    slots = block_table.long().gather(1, position // block_size) * block_size + position % block_size
    keys, values = (cache.flatten(0, 1)[slots].transpose(1, 2) for cache in (k_cache, v_cache))
    grouped = q.view(rows, num_kv_heads, -1, head_dim)  # the query heads of a group read the same keys
    scores = grouped @ keys.transpose(2, 3) * head_dim**-0.5
    weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1)
    return (weights @ values).reshape(rows, num_heads, head_dim)
