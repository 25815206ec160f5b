# %% [markdown] nbgrader={"grade_id": "intro"}
# # Lab 04: paged attention
#
# A model takes up to 32,768 tokens, and a server reserves memory for that many when a request arrives. The request ends
# after 300. What share of its memory did it ever use? And if memory were allocated in blocks of 16 tokens, one after
# another? Write both guesses down; a cell below computes them with your function.
#
# You build, in this order: the count of wasted slots, a pool of numbered blocks, sharing, the growth of a block table
# with copy-on-write, the translation from positions to slots, and attention that reads through the table. At the end
# your parts run inside the engine and serve text.
#
# - Each part has a text, a cell for your code, and checks. Run a check as often as you like.
# - Grading draws other inputs of the same kinds. A check that passes here for the right reason passes there.
# - Lists and tensors that your functions are given belong to the caller: do not modify them. (`append_slots` may change
#   the table that it is given.)
# - Everything is float32 on the CPU. Use `torch`, `numpy` and the standard library: nothing else is available when your
#   cells are graded, neither engine nor grader.
#
# | word | what it is | in an operating system |
# |---|---|---|
# | block | memory for the keys and values of `block_size` tokens, identified by a number | physical page |
# | position | index of a token in its request: 0, 1, 2, ... | virtual address |
# | slot | index of a token in the whole memory: block × `block_size` + offset | physical address |
# | block table | the blocks of one request, in the order of its tokens | page table |
# | block pool | which blocks are free, and how many tables hold each of the others | free list |
#
# 20 points.

# %% nbgrader={"grade_id": "imports"} inferlab={"where": "both"}
import math

import torch

# %% nbgrader={"grade_id": "tools"}
# Given: helpers of the checks. You may read them, but do not change them.

import operator

from grader.checks import rng, unchanging


class Ledger:
    """A stand-in for a pool where a check tests something else: a list with one entry for each reference.

    held: these references exist already. order: free blocks are allocated in this order.
    """

    def __init__(self, order, held=()):
        self.order = list(order)
        self.references = list(held)

    @property
    def num_free(self):
        return sum(block not in self.references for block in self.order)

    def ref_count(self, block):
        return self.references.count(int(block))

    def allocate(self, n):
        free = [block for block in self.order if block not in self.references]
        if n > len(free):
            raise RuntimeError(f"{n} blocks were asked for, {len(free)} are free")
        self.references += free[:n]
        return free[:n]

    def incref(self, ids):
        for block in map(int, ids):
            if block not in self.references:
                raise ValueError(f"incref: block {block} is free")
            self.references.append(block)

    def decref(self, ids):
        for block in map(int, ids):
            if block not in self.references:
                raise ValueError(f"decref: block {block} is free already")
            self.references.remove(block)
        return [block for block in dict.fromkeys(map(int, ids)) if block not in self.references]


class Memory:
    """The contents of the slots, one token each; None where never written. It records copies."""

    def __init__(self, block_size):
        self.block_size = block_size
        self.slots = {}
        self.copies = []  # (source, target)

    def copy(self, src, dst):
        src, dst = int(src), int(dst)
        self.copies.append((src, dst))
        for i in range(self.block_size):
            self.slots[dst * self.block_size + i] = self.slots.get(src * self.block_size + i)

    def write(self, slots, tokens):
        self.slots.update(zip(slots, tokens, strict=True))

    def read(self, block_table, num_tokens):
        """The tokens that a block table refers to."""
        return [self.slots.get(slot) for slot in slots_behind(block_table, range(num_tokens), self.block_size)]


def slots_behind(block_table, positions, block_size):
    return [block_table[p // block_size] * block_size + p % block_size for p in positions]


def blocks_for(num_tokens, block_size):
    return -(-num_tokens // block_size)  # rounded up


def whole(numbers, what):
    """A list of ints. A tensor's whole number counts as an int, 3.0 does not."""
    try:
        return [operator.index(number) for number in numbers]
    except TypeError:
        raise AssertionError(f"{what}: expected a list of ints, saw {numbers!r}") from None


def pool_of(num_blocks):
    """(a new BlockPool that can allocate so many blocks, the numbers of these blocks in ascending order)."""
    return BlockPool(num_blocks), list(range(num_blocks))


def appended(pool, block_table, num_tokens, num_new, block_size, copy):
    """The result of your append_slots: (block_table, slots), two lists of ints."""
    answer = append_slots(pool, list(block_table), num_tokens, num_new, block_size, copy)
    pair = isinstance(answer, tuple | list) and len(answer) == 2
    assert pair, f"append_slots returns (block_table, slots), saw {answer!r}"
    return whole(answer[0], "append_slots, block_table"), whole(answer[1], "append_slots, slots")


def mapped(block_table, positions, block_size):
    """The result of your slot_mapping, a tensor; a NumPy array counts as one."""
    return torch.as_tensor(unchanging(slot_mapping)(block_table, positions, block_size))


def as_float32(out):
    """The result of your paged_attention; a NumPy array counts as a tensor, and other float types are converted."""
    out = torch.as_tensor(out)
    return out.float() if out.is_floating_point() else out


def attended(q, k_cache, v_cache, block_table, seq_lens, changed=None):
    """The result of your paged_attention; block_table is a list of lists, padded here with block 0.

    changed: a list that gets the names of the arguments, caches aside, that the call has changed.
    """
    width = max(len(table) for table in block_table)
    table = torch.tensor([[*blocks, *[0] * (width - len(blocks))] for blocks in block_table], dtype=torch.int32)
    lengths, query = torch.tensor(seq_lens, dtype=torch.int32), q.clone()
    before = {"q": query.clone(), "block_table": table.clone(), "seq_lens": lengths.clone()}
    out = paged_attention(query, k_cache, v_cache, table, lengths)
    out = as_float32(out)
    after = zip(before.items(), (query, table, lengths), strict=True)
    if changed is not None:
        changed += [name for (name, old), new in after if not torch.equal(old, new)]
    shape = tuple(q.shape)
    assert tuple(out.shape) == shape, f"expected the shape of q {shape}, saw {tuple(out.shape)}"
    return out


def paged(contexts, tables, num_blocks, block_size, unused, generator=None):
    """Caches [num_blocks, block_size, num_kv_heads, head_dim] with contexts[r] = (keys, values) in the blocks of
    tables[r].

    unused: what all other slots hold; None draws random numbers.
    """
    _, num_kv_heads, head_dim = contexts[0][0].shape
    caches = torch.randn(2, num_blocks * block_size, num_kv_heads, head_dim, generator=generator)
    if unused is not None:
        caches.fill_(unused)
    for (keys, values), table in zip(contexts, tables, strict=True):
        slots = slots_behind(table, range(len(keys)), block_size)
        caches[0][slots], caches[1][slots] = keys, values
    return caches.view(2, num_blocks, block_size, num_kv_heads, head_dim).unbind()


def alone(q, keys, values):
    """Attention of one query [num_heads, head_dim] over all keys and values [tokens, num_kv_heads, head_dim]."""
    group = q.shape[0] // keys.shape[1]
    keys, values = (t.double().repeat_interleave(group, dim=1) for t in (keys, values))
    weights = (torch.einsum("hd,thd->ht", q.double(), keys) / math.sqrt(q.shape[1])).softmax(-1)
    return torch.einsum("ht,thd->hd", weights, values).float()


def random_int(low, high, generator):
    """An integer in [low, high]."""
    return int(torch.randint(low, high + 1, (), generator=generator))


def random_order(num_blocks, generator, first=0):
    """The numbers first ... num_blocks - 1, shuffled."""
    return (first + torch.randperm(num_blocks - first, generator=generator)).tolist()


def error_of(function, *args):
    """The exception that function(*args) raises, or None."""
    try:
        function(*args)
    except NotImplementedError:
        raise
    except Exception as error:
        return error
    return None


def difference(seen, expected):
    """Largest absolute difference of two tensors; infinite where shapes differ or a number is not finite."""
    if tuple(seen.shape) != tuple(expected.shape) or not bool(torch.isfinite(seen).all()):
        return math.inf
    return float((seen - expected).abs().max()) if seen.numel() else 0.0


def rounded(numbers):
    """For a message: numbers of a tensor with enough digits to tell a right one from a wrong one."""
    return [float(f"{float(number):.7g}") for number in numbers]


def off_by(off):
    """For a message, what `difference` found."""
    return f"is off by up to {off:.2g}" if off < math.inf else "is not finite, or of another shape"


# %% [markdown] nbgrader={"grade_id": "text_waste"}
# ## 1. Memory that is reserved and never used
#
# **Build** `wasted_slots(lengths, max_len, block_size)`: how many slots are allocated and hold no token, for requests
# of `lengths` tokens (a list of ints, which may be empty), as a pair of whole numbers `(contiguous, paged)`:
#
# - *contiguous*: each request has `max_len` slots in one piece, from its beginning to its end.
# - *paged*: each request has as many blocks of `block_size` slots as its tokens need.
#
# A block belongs to one request here, so two requests never share a block.
#
# "No fragmentation" is not true of paging: part of each request's *last* block is empty, at most `block_size - 1`
# slots, and about half a block on average unless texts are as short as blocks. Paging removes the reservation, and the
# holes between requests that no request fits into. The bytes per token stay the same.
#
# **Hint:** `-(-n // b)` is n / b rounded up, without floating point.
#
# **Trap (exactly full):** a length that is a multiple of `block_size` wastes nothing. `n // b + 1` blocks are one too
# many for it.


# %% nbgrader={"grade_id": "wasted_slots", "solution": true}
def wasted_slots(lengths, max_len, block_size):
    """(contiguous, paged): slots taken by requests of these lengths that hold no token."""
    ### BEGIN SOLUTION
    contiguous = sum(max_len - length for length in lengths)
    paged = sum(-(-length // block_size) * block_size - length for length in lengths)
    return contiguous, paged
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_waste", "grade": true, "points": 1}
# property: contiguous memory wastes max_len - length per request, paged memory what is empty in the last block.
# question: A request of 17 tokens in blocks of 16: how many of its slots hold nothing?
# hint: round each request's own length up to whole blocks, then subtract the length.
# explanation: Lengths 17 and 16, max_len 64, blocks of 16. Contiguous: 47 + 48 = 95 slots wasted. Paged: 17 takes 2
#   blocks, 15 empty; 16 takes 1 block, 0 empty: 15 wasted. Rounding the sum, 33, in place of each length would also
#   give 15 here, but for 8 and 8 it gives 0 and the truth is 16.
def check_wasted(lengths, max_len, block_size):
    answer = unchanging(wasted_slots)(list(lengths), max_len, block_size)
    pair = isinstance(answer, tuple | list) and len(answer) == 2
    assert pair, f"wasted_slots returns (contiguous, paged), saw {answer!r}"
    contiguous, paged = whole(answer, "wasted_slots")
    used = sum(lengths)
    shown = lengths if len(lengths) < 20 else f"of {len(lengths)} requests"
    print(f"lengths {shown}: {used} tokens; wasted {contiguous} of {len(lengths)} x {max_len} contiguous slots, "
          f"{paged} in blocks of {block_size}")  # fmt: skip
    expected = sum(max_len - n for n in lengths)
    assert contiguous == expected, f"contiguous: expected {expected} wasted slots, saw {contiguous}"
    expected = sum(blocks_for(n, block_size) * block_size - n for n in lengths)
    assert paged == expected, f"blocks of {block_size}: expected {expected} wasted slots, saw {paged}"


check_wasted([300, 45], max_len=1024, block_size=16)
check_wasted([16, 32, 1], max_len=64, block_size=16)
check_wasted([], max_len=64, block_size=16)
check_wasted([20, 7], max_len=20, block_size=16)  # one is as long as a request may be
check_wasted([16, 0, 3], max_len=64, block_size=16)  # one has no token yet, and needs no block
draw = rng("check_waste")
for block_size in (1, 8, random_int(2, 30, draw)):
    lengths = [random_int(1, 200, draw) for _ in range(random_int(2, 9, draw))]
    check_wasted([*lengths, block_size, 2 * block_size], random_int(200, 300, draw), block_size)
lengths = [random_int(1, 20_000_000, draw) for _ in range(300)]  # sums beyond 2^31
check_wasted(lengths, 40_000_000 + random_int(1, 99, draw), random_int(1000, 2000, draw))

# %% [markdown] nbgrader={"grade_id": "text_shares"}
# The cell below answers the question from the top, and draws 1,000 requests to compare block sizes. The wasted share
# depends on the lengths: "under 4 %" is right for some and wrong for short ones.

# %% nbgrader={"grade_id": "shares"} inferlab={"where": "notebook"}
contiguous, blocks = wasted_slots([300], 32_768, 16)
print(f"300 tokens: {300 / (300 + contiguous):.1%} of the room is used when reserved, {300 / (300 + blocks):.1%} paged")
draw = rng("lengths")
for mean in (50, 500, 2000):
    lengths = (1 + torch.empty(300).exponential_(1 / mean, generator=draw).long()).tolist()
    shares = []
    for block_size in (8, 16, 128):
        _, blocks = wasted_slots(lengths, max(lengths), block_size)
        shares.append(f"{block_size}: {blocks / (sum(lengths) + blocks):.1%}")
    print(f"about {mean} tokens a request; wasted with blocks of", ", ".join(shares))

# %% [markdown] nbgrader={"grade_id": "text_pool"}
# ## 2. The pool
#
# **Build** the class `BlockPool`: which of the blocks 0, 1, ..., `num_blocks - 1` are free, and how many references
# each of the others has. A reference is a block table with this block in it, or any other user of its contents. The
# pool handles numbers and never sees a tensor.
#
# - `BlockPool(num_blocks)`: all blocks are free. `num_free`: the number of free blocks, a property.
# - `allocate(n)`: a list of `n` different free blocks; each has one reference now. Which of the free blocks it takes is
#   your choice.
# - `incref(ids)`: one more reference for each entry of the list.
# - `decref(ids)`: one reference less for each entry of the list. A block that loses its last reference is free again.
#   Returns the list of the blocks that became free, each once, in any order.
# - `ref_count(block)`: the references to one of the pool's blocks, 0 for a free one.
#
# In both lists a block may stand several times, once for each reference. An empty list changes nothing. A block can have
# thousands of references, and several pools can exist side by side.
#
# A rejected call changes *nothing*:
#
# - `allocate` of more blocks than are free: `RuntimeError`. This is routine: a request has to wait.
# - `incref` or `decref` of a block that is free, or that does not exist, or `decref` of more references than there are:
#   `ValueError`. This is a bug in the caller, so it must not pass silently: a block that is freed twice is allocated to
#   two requests, and each overwrites the other's keys. (The engine's own pool, which the chapter shows, is less strict:
#   it stops at the first bad entry of a list, and the entries before it stay counted.)
#
# **Hint:** a list of counts and a list of free blocks. Check the whole call first, then change something.
#
# **Trap (taken half):** a loop that takes block after block until none is left has taken some when it fails, and these
# are leaked.
#
# **Trap (freed twice):** a free block that is freed again is in the free list twice.
#
# **Trap (minus one):** many engines write -1 where a table has no block, and `counts[-1]` is the last block's.


# %% nbgrader={"grade_id": "BlockPool", "solution": true}
from collections import Counter, deque


class BlockPool:
    """Blocks 0 ... num_blocks - 1 with a count of references each; a block is free when it has none."""

    def __init__(self, num_blocks):
        ### BEGIN SOLUTION
        self.free = deque(range(num_blocks))
        self.counts = [0] * num_blocks
        ### END SOLUTION

    @property
    def num_free(self):
        ### BEGIN SOLUTION
        return len(self.free)
        ### END SOLUTION

    def ref_count(self, block):
        """References to a block; 0 if it is free."""
        ### BEGIN SOLUTION
        return self.counts[block]
        ### END SOLUTION

    def allocate(self, n):
        """n free blocks, with one reference each. RuntimeError, and nothing changed, if fewer are free."""
        ### BEGIN SOLUTION
        if n > len(self.free):
            raise RuntimeError(f"{n} blocks were asked for, {len(self.free)} are free")
        blocks = [self.free.popleft() for _ in range(n)]
        for block in blocks:
            self.counts[block] = 1
        return blocks
        ### END SOLUTION

    def incref(self, ids):
        """One more reference for each entry. ValueError, and nothing changed, if one of them is free."""
        ### BEGIN SOLUTION
        for block in ids:
            if not 0 <= block < len(self.counts) or self.counts[block] == 0:
                raise ValueError(f"incref: block {block} is free, or there is no such block")
        for block in ids:
            self.counts[block] += 1
        ### END SOLUTION

    def decref(self, ids):
        """One reference less per entry -> blocks that became free. ValueError, and nothing changed, if one has none."""
        ### BEGIN SOLUTION
        for block, times in Counter(ids).items():
            if not 0 <= block < len(self.counts) or self.counts[block] < times:
                raise ValueError(f"decref: block {block} does not have {times} references, or there is no such block")
        freed = []
        for block in ids:
            self.counts[block] -= 1
            if self.counts[block] == 0:
                self.free.append(block)
                freed.append(block)
        return freed
        ### END SOLUTION


# %% nbgrader={"grade_id": "check_allocate", "grade": true, "points": 1}
# property: each block goes to one holder, all of them can be allocated, and each has one reference then.
# question: After all blocks were allocated, which of them have two holders?
# hint: an allocated block leaves the free list; its count becomes 1.
# explanation: A pool of 4: allocating 1 and then 3 gives four different blocks, each with one reference, and nothing is
#   free. A block that stays on the free list while it is held goes to a second request, and the two write over each
#   other's tokens.
def check_hands_out(num_blocks, sizes):
    (pool, ids), taken = pool_of(num_blocks), []
    free = pool.num_free
    assert free == num_blocks, f"a new pool: {num_blocks} blocks, {ids[0]}..{ids[-1]}, are free, num_free says {free}"
    for n in sizes:
        blocks = whole(pool.allocate(n), "allocate")
        print(f"allocate({n}) of {num_blocks}: {blocks}, then {pool.num_free} free")
        assert len(blocks) == n, f"expected {n} blocks, saw {len(blocks)}"
        off = [block for block in blocks if block not in ids]
        assert not off, f"the pool has blocks {ids[0]}..{ids[-1]}, saw {off}"
        twice = [block for block in taken if block in blocks]
        once = not twice and len(set(blocks)) == n
        assert once, f"a block went to two holders: {taken} were taken, then {blocks}"
        taken += blocks
        left = num_blocks - len(taken)
        assert pool.num_free == left, f"{left} blocks are left, num_free says {pool.num_free}"
        counts = [pool.ref_count(block) for block in taken]
        assert counts == [1] * len(taken), f"each taken block has one reference, saw {counts}"
    others = [pool.ref_count(block) for block in ids if block not in taken]
    assert not any(others), f"free blocks have no reference, saw {others}"


check_hands_out(8, [3, 1, 4])
check_hands_out(5, [0, 2])
check_hands_out(1, [1])
(pool, _), (other, ids) = pool_of(3), pool_of(3)
pool.allocate(2)
print(f"two pools of 3: 2 blocks were allocated from one, the other has {other.num_free} free")
assert other.num_free == 3, f"another pool's blocks do not count: 3 are free, num_free says {other.num_free}"
counts = [other.ref_count(block) for block in ids]
assert not any(counts), f"another pool's references do not count: expected none, saw {counts}"
draw = rng("check_allocate")
for _ in range(3):
    num_blocks = random_int(5, 30, draw)
    sizes = [random_int(0, 3, draw), random_int(1, 2, draw)]
    check_hands_out(num_blocks, [*sizes, num_blocks - sum(sizes)])


# %% nbgrader={"grade_id": "check_refs", "grade": true, "points": 1}
# property: a block is free when its last reference is dropped, not before, and can be had again then.
# question: Two requests share a block and one of them ends: is the block free?
# hint: decref returns the blocks whose count has become 0, and only these go back to the free list.
# explanation: Allocated: 1 reference. incref: 2. decref: 1, still held, nothing returned. decref: 0, free, and returned
#   as freed; it can be allocated again. Freed at the first decref, it would be given away while the other request still
#   reads it.
def check_life(num_blocks, num_steps, generator):
    """Random calls; `held` is the truth, with one entry for each reference there is."""
    (pool, ids), held = pool_of(num_blocks), []
    for _ in range(num_steps):
        kind, free = random_int(0, 2, generator), [block for block in ids if block not in held]
        pick = [held[i] for i in torch.randperm(len(held), generator=generator).tolist()[: random_int(0, 4, generator)]]
        if kind == 0 and free:
            blocks = whole(pool.allocate(random_int(1, len(free), generator)), "allocate")
            given = [block for block in blocks if block in held or block not in ids]
            where = f"blocks {ids[0]}..{ids[-1]}, of which {sorted(set(held))} are held"
            assert not given, f"{where}: expected free blocks, allocate handed out {blocks}"
            held += blocks
        elif kind == 1:
            pool.incref(list(pick))
            held += pick
        else:
            seen = sorted(whole(pool.decref(list(pick)), "decref"))
            for block in pick:
                held.remove(block)
            gone = sorted({block for block in pick if block not in held})
            assert seen == gone, f"decref({pick}): blocks {gone} became free, saw {seen}; still held: {sorted(held)}"
        counts = [pool.ref_count(block) for block in ids]
        expected = [held.count(block) for block in ids]
        assert counts == expected, f"reference counts: expected {expected}, saw {counts}"
        assert pool.num_free == expected.count(0), f"{expected.count(0)} are free, num_free says {pool.num_free}"
    return counts


pool, _ = pool_of(4)
[a, b] = pool.allocate(2)
pool.incref([a])  # a second request shares it
print(f"decref of a shared and an unshared block frees {pool.decref([a, b])}; then {pool.num_free} of 4 are free")
assert pool.num_free == 3, f"the shared block is still held: 3 of 4 are free, num_free says {pool.num_free}"
assert pool.ref_count(a) == 1, f"the shared block has one reference left, ref_count says {pool.ref_count(a)}"
pool.incref([a, a])  # in one call, for two requests more
pool.incref([])
freed = whole(pool.decref([]), "decref")
assert not freed, f"an empty list frees nothing, saw {freed}"
assert pool.ref_count(a) == 3, f"incref of [{a}, {a}] adds two references: 3 in all, ref_count says {pool.ref_count(a)}"
print("after 40 random calls the counts are", check_life(5, 40, rng("refs")))
draw = rng("check_refs")
for _ in range(3):
    check_life(random_int(2, 7, draw), 60, draw)
pool, [a, b] = pool_of(2)
pool.allocate(2)
pool.incref([a, b])
freed = whole(pool.decref([b, a, b]), "decref")
assert freed == [b], f"decref([{b}, {a}, {b}]) with two references each frees [{b}], saw {freed}"
assert [pool.ref_count(a), pool.ref_count(b)] == [1, 0], "a block that is named twice loses two references"
again = whole(pool.allocate(1), "allocate")
assert again == [b], f"block {b} became free and can be had again, saw {again}"
pool, ids = pool_of(random_int(270, 300, draw))
pool.allocate(len(ids))
for block in (ids[-1], ids[random_int(1, 200, draw)]):
    many = random_int(5000, 9000, draw)
    pool.incref([block] * (many - 1))
    assert pool.ref_count(block) == many, f"a block has {many} references, ref_count says {pool.ref_count(block)}"
    freed = whole(pool.decref([block] * (many - 1)), "decref")
    assert not freed, f"1 of {many} references is left, and the block was freed: {freed}"
    freed = whole(pool.decref([block]), "decref")
    assert freed == [block], f"the last of {many} references was dropped: expected [{block}] to be freed, saw {freed}"
pool, [a, b] = pool_of(2)
pool.allocate(2)
pool.incref([a, a])
freed = sorted(whole(pool.decref([a, b, a, a]), "decref"))
assert freed == [a, b], (
    f"decref([{a}, {b}, {a}, {a}]) drops all references and frees [{a}, {b}], each once, saw {freed}"
)


# %% nbgrader={"grade_id": "check_too_many", "grade": true, "points": 1}
# property: allocate gives all that was asked for, or raises RuntimeError and takes nothing.
# question: 3 blocks are free and 5 are asked for: how many are free after the error?
# hint: compare n with the number of free blocks before you take the first.
# explanation: 3 free, 5 asked: RuntimeError, and still 3 free with 0 references each. A pool that hands out 3 and then
#   raises has lost them: nobody holds them, and nobody can get them.
def check_refused_allocate(num_blocks, taken, wanted):
    pool, ids = pool_of(num_blocks)
    held = whole(pool.allocate(taken), "allocate")
    off = [block for block in held if block not in ids]
    assert not off, f"the pool has blocks {ids[0]}..{ids[-1]}, saw {off}"
    error, free = error_of(pool.allocate, wanted), num_blocks - taken
    print(f"{free} of {num_blocks} are free, allocate({wanted}): {type(error).__name__}: {error}")
    assert isinstance(error, RuntimeError), f"{wanted} > {free}: expected RuntimeError, saw {error!r}"
    assert pool.num_free == free, f"a refused allocate takes nothing: {free} are free, num_free says {pool.num_free}"
    counts, expected = [pool.ref_count(block) for block in ids], [int(block in held) for block in ids]
    assert counts == expected, f"a refused allocate changes no count: expected {expected}, saw {counts}"
    rest = whole(pool.allocate(free), "allocate")
    missing = [block for block in ids if block not in held and block not in rest]
    assert not missing, f"after a refused allocate blocks {missing} cannot be had any more"


check_refused_allocate(num_blocks=6, taken=4, wanted=3)
check_refused_allocate(num_blocks=2, taken=2, wanted=1)
check_refused_allocate(num_blocks=3, taken=1, wanted=4)  # more than the pool has
draw = rng("check_too_many")
for _ in range(3):
    num_blocks = random_int(3, 20, draw)
    taken = random_int(0, num_blocks - 1, draw)
    check_refused_allocate(num_blocks, taken, num_blocks - taken + random_int(1, 3, draw))


# %% nbgrader={"grade_id": "check_refused", "grade": true, "points": 1}
# property: a reference that does not exist cannot be shared or given back: ValueError, and nothing changes.
# question: The second of three entries is bad: what has happened to the first?
# hint: check every entry of the list first: does the block exist, and does it have as many references as go?
# explanation: decref([2, 9, 3]) where block 9 does not exist: ValueError, and block 2 has as many references as before.
#   In one call a block may stand twice: decref([2, 2]) with one reference is one too many, though each alone would be
#   allowed.
def check_bad_ids(num_blocks, name, bad_ids, num_free=1, show=True):
    """bad_ids: a list with a mistake in it; "held" and "free" stand for such a block, "below" and "above" for the numbers
    next to those of the pool's blocks."""
    pool, ids = pool_of(num_blocks)
    held = whole(pool.allocate(num_blocks - num_free), "allocate")
    off = [block for block in held if block not in ids]
    assert not off, f"the pool has blocks {ids[0]}..{ids[-1]}, saw {off}"
    free = [block for block in ids if block not in held]
    names = {"held": held[0], "held too": held[-1], "free": [*free, None][0], "below": ids[0] - 1, "above": ids[-1] + 1}
    entries = [names.get(entry, entry) for entry in bad_ids]
    error = error_of(getattr(pool, name), list(entries))
    if show:
        print(f"{name}({entries}), blocks {held} have one reference each: {type(error).__name__}: {error}")
    assert isinstance(error, ValueError), f"{name}({entries}): expected ValueError, saw {error!r}"
    counts, expected = [pool.ref_count(block) for block in ids], [int(block in held) for block in ids]
    assert counts == expected, f"a refused {name} changes no count: expected {expected}, saw {counts}"
    assert pool.num_free == num_free, f"a refused {name} frees nothing: {num_free} free, num_free says {pool.num_free}"
    error = error_of(pool.decref, list(held))
    assert error is None, f"after a refused {name} the held blocks {held} can be given back as before: {error!r}"


for name in ("incref", "decref"):
    check_bad_ids(4, name, ["free"])
    check_bad_ids(4, name, ["held", "free"])
    check_bad_ids(4, name, [-1])
    check_bad_ids(4, name, ["above"])
    check_bad_ids(4, name, [-1], num_free=0)  # counts[-1] would be a block that is held
    check_bad_ids(4, name, ["below"], num_free=0)
check_bad_ids(4, "decref", ["held", "held"])
pool, _ = pool_of(3)
[block] = pool.allocate(1)
pool.decref([block])
error = error_of(pool.decref, [block])
print(f"block {block} freed a second time: {type(error).__name__}: {error}")
assert isinstance(error, ValueError), f"a block freed twice: expected ValueError, saw {error!r}"
draw = rng("check_refused")
for name in ("incref", "decref"):
    num_blocks = random_int(3, 12, draw)
    check_bad_ids(num_blocks, name, ["free", "held"])
    check_bad_ids(num_blocks, name, ["held", "free", "held too"])
    for num_free in (0, 1):
        for bad in (-1, 1 - num_blocks, -num_blocks, -1 - num_blocks, "below", "above", num_blocks + 3, 2**31):
            check_bad_ids(num_blocks, name, ["held", bad], num_free, show=False)
            check_bad_ids(num_blocks, name, [bad, "held"], num_free, show=False)
check_bad_ids(num_blocks, "decref", ["held", "held too", "held"])
pool, ids = pool_of(num_blocks)
[block, _] = whole(pool.allocate(2), "allocate")
pool.incref([block] * 2)
error = error_of(pool.decref, [block] * 4)
assert isinstance(error, ValueError), f"4 references dropped where 3 are: expected ValueError, saw {error!r}"
assert pool.ref_count(block) == 3, f"a refused decref changes no count: 3 references, saw {pool.ref_count(block)}"

# %% [markdown] nbgrader={"grade_id": "text_fork"}
# ## 3. Sharing
#
# Three samples of one prompt need its keys and values once. A table is a list of numbers, so a second one that begins
# with the same numbers shares these blocks.
#
# **Build** `fork(pool, block_table, num_tokens, block_size)`: the block table of a new request whose first `num_tokens`
# tokens are those of the request that `block_table` belongs to. It holds the blocks that contain these tokens, and no
# others, and has a reference to each of them. Nothing is copied and nothing is allocated.
#
# - `pool` has the methods of your `BlockPool`. The checks pass their own, whose blocks have any numbers, so this part can
#   be right even if an earlier one is not.
# - `block_table` is a list of ints and may have more blocks than `num_tokens` tokens need. Return a list of its own for
#   the new request.
# - `num_tokens` may be 0: then nothing is shared.
#
# **Hint:** two lines.
#
# **Trap (part of a block):** the last of the shared blocks may be half full. It is shared too. The next part handles
# writes into it.


# %% nbgrader={"grade_id": "fork", "solution": true}
def fork(pool, block_table, num_tokens, block_size):
    """A block table that shares the blocks of the first num_tokens tokens, with a reference to each."""
    ### BEGIN SOLUTION
    shared = block_table[: -(-num_tokens // block_size)]
    pool.incref(shared)
    return list(shared)
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_fork", "grade": true, "points": 1}
# property: a fork holds the blocks of its first num_tokens tokens, with one more reference each; nothing is allocated.
# question: How many blocks hold the first 17 tokens, and does a fork need memory of its own?
# hint: round num_tokens up to whole blocks, take as many entries of the table, incref them.
# explanation: A table [5, 2, 8] with blocks of 16, forked at 17 tokens: [5, 2], and both have one reference more; 8 is
#   not shared. The second block holds one token that both see, and is copied when one of them writes into it, not
#   before.
def check_forked(block_table, num_tokens, block_size):
    pool = Ledger(order=range(100), held=block_table)
    child = whole(unchanging(fork)(pool, list(block_table), num_tokens, block_size), "fork")
    shared = block_table[: blocks_for(num_tokens, block_size)]
    print(f"table {block_table}, blocks of {block_size}, {num_tokens} tokens shared: {child}")
    assert child == shared, f"the first {num_tokens} tokens lie in blocks {shared}, saw {child}"
    counts = [pool.ref_count(block) for block in block_table]
    expected = [1 + (block in shared) for block in block_table]
    assert counts == expected, f"references to {block_table}: expected {expected}, saw {counts}"
    others = sorted(set(pool.references) - set(block_table))
    assert not others, f"nothing is allocated by a fork, saw blocks {others} taken"


check_forked([7, 2, 9], num_tokens=9, block_size=4)  # the last block is shared half full
check_forked([7, 2, 9, 4], num_tokens=8, block_size=4)
check_forked([7, 2], num_tokens=0, block_size=4)
draw = rng("check_fork")
for _ in range(4):
    block_size, num_blocks = random_int(2, 9, draw), random_int(3, 8, draw)
    table = random_order(60, draw)[:num_blocks]
    num_tokens = random_int(1, num_blocks * block_size - 1, draw)
    for shared in (num_tokens, blocks_for(num_tokens, block_size) * block_size, block_size, 1, num_blocks * block_size):
        check_forked(table, shared, block_size)
check_forked(table, random_int(1, num_blocks, draw), block_size=1)

# %% [markdown] nbgrader={"grade_id": "text_append"}
# ## 4. New tokens, and copy-on-write
#
# **Build** `append_slots(pool, block_table, num_tokens, num_new, block_size, copy)`: slots for the next `num_new`
# tokens (at least 1) of a request that has `num_tokens` so far. Returns the pair `(block_table, slots)`:
#
# - `block_table`: a list of ints, the table afterwards. It keeps the old blocks in place and grows at its end by
#   exactly the missing blocks. It may have been longer than needed: a scheduler can allocate a prompt's blocks at once
#   and fill them chunk by chunk. Whether it is the given list or a new one is your choice.
# - `slots`: a list of `num_new` ints, where the new tokens go: token number p goes to slot
#   `block_table[p // block_size] * block_size + p % block_size`.
#
# **Copy-on-write.** If the block of token `num_tokens` is already in the table and has another holder, the request must
# not write into it: the other holder would read it. It allocates a new block, copies the contents with `copy(src,
# dst)`, replaces the old block by the new one in its table, and drops its reference to the old one. `copy` is the only
# way to move contents, and is counted.
#
# - This block need not be the last of the table: reserved blocks may follow, which belong to this request alone. Nor need
#   it hold a token yet: a reserved block can be shared, too.
# - A block without another holder is written in place. So of two requests that share a block, the first copies and the
#   second, then the only holder, does not.
# - Full blocks are never written, so they stay shared. A new token after a *full* last block goes to a new block,
#   without a copy. (That is why a prefix cache, which shares only full blocks, never copies.)
# - If there are too few free blocks, `RuntimeError`, and *nothing* has changed: no block taken, no reference moved,
#   nothing copied.
#
# **Hint:** first count the blocks you need in all, for growth and for the copy. Then a single call of `allocate` is
# already all or nothing.
#
# **Trap (boundary):** with 8 tokens in blocks of 4 the next token goes to the third block, which is not allocated yet.
# The last block of the table, `block_table[-1]`, is not the one you write into.
#
# **Trap (lost reference):** a request that replaces a block in its table no longer holds it. Without `decref` it is
# never freed, and the last holder makes a needless copy.
#
# **Trap (direction):** `copy(src, dst)`: from the shared block into the new one.
#
# **Trap (copied, then rejected):** there may be a block for the copy but none for the growth after it.


# %% nbgrader={"grade_id": "append_slots", "solution": true}
def append_slots(pool, block_table, num_tokens, num_new, block_size, copy):
    """(block_table, slots) for num_new more tokens of a request that has num_tokens.

    copy(src, dst): copies the contents of a block. RuntimeError, and nothing changed, if too few blocks are free.
    """
    ### BEGIN SOLUTION
    table = list(block_table)
    first = num_tokens // block_size  # the table entry of the first new token
    missing = max(0, -(-(num_tokens + num_new) // block_size) - len(table))
    shared = first < len(table) and pool.ref_count(table[first]) > 1
    new = pool.allocate(missing + shared)
    if shared:
        source, table[first] = table[first], new.pop()
        copy(source, table[first])
        pool.decref([source])
    table += new
    slots = [table[p // block_size] * block_size + p % block_size for p in range(num_tokens, num_tokens + num_new)]
    return table, slots
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_append", "grade": true, "points": 2}
# property: new tokens go after the old ones; the table grows by the blocks that are missing, and by no more.
# question: 15 tokens are in a block of 16 and 2 come: how many blocks are missing?
# hint: ceil((num_tokens + num_new) / block_size) blocks are needed, the table has len(block_table).
# explanation: Blocks of 4, table [7], 3 tokens, 2 more: 5 tokens need 2 blocks, so one is allocated: [7, b]. The new
#   tokens are at position 3, in block 7, and position 4, first in b. With 4 tokens and 1 more a block is needed; with 3
#   and 1 more none is.
def check_growth(order, block_size, sizes, reserved=()):
    """One request alone, which grows by these sizes; reserved: blocks that its table has from the start."""
    pool, memory, table, tokens = Ledger(order, held=reserved), Memory(block_size), list(reserved), []
    for size in sizes:
        before, start = list(table), len(tokens)
        table, slots = appended(pool, table, start, size, block_size, memory.copy)
        print(f"{start} tokens in {before}, {size} more: table {table}, slots {slots}")
        needed = max(len(reserved), blocks_for(start + size, block_size))
        assert len(table) == needed, (
            f"{start + size} tokens in blocks of {block_size} need {needed} blocks, saw {table}"
        )
        assert table[: len(before)] == before, f"old blocks keep their places: {before} became {table}"
        counts = [pool.ref_count(block) for block in table]
        assert counts == [1] * needed, f"each block of the table has one reference, saw {counts} for {table}"
        lost = sorted(set(pool.references) - set(table))
        assert not lost, f"blocks {lost} were taken and are in no table"
        expected = slots_behind(table, range(start, start + size), block_size)
        assert slots == expected, f"the new tokens go to slots {expected}, saw {slots}"
        new = [f"token {start + i}" for i in range(size)]
        memory.write(slots, new)
        tokens += new
        seen = memory.read(table, len(tokens))
        wrong = [p for p in range(len(tokens)) if seen[p] != tokens[p]]
        assert not wrong, f"positions {wrong} do not hold their tokens any more"
    assert not memory.copies, f"a request alone copies nothing, saw {memory.copies}"


check_growth([7, 2, 9, 5, 0, 3], 4, [5, 1, 2, 1, 7])  # 5 and 6 in the second block; 8 fill it; 9 is in the third
check_growth([5, 0, 3], 4, [3, 3, 3], reserved=[7, 2])
draw = rng("check_append")
for case in range(5):
    block_size, order = random_int(2, 7, draw), random_order(60, draw)
    sizes = [random_int(1, 2 * block_size, draw) for _ in range(4)]
    fill = -sum(sizes) % block_size or block_size  # up to the end of a block, then one more, then a whole block
    reserved = order[: random_int(1, 4, draw)] if case % 2 else ()
    check_growth(order, block_size, [*sizes, fill, 1, block_size], reserved)
check_growth(random_order(60, draw), 1, [1, 2, 3], random_order(60, draw)[: random_int(0, 4, draw)])


# %% nbgrader={"grade_id": "check_copy_on_write", "grade": true, "points": 2}
# property: a write into a shared block copies it first, once; the others keep what they had; the last writes in place.
# question: Which block do the new tokens begin in, and who else holds it?
# hint: ref_count of the block that token num_tokens falls in; new block, copy(old, new), decref([old]), table entry.
# explanation: Blocks of 4, tables a = [7, 2] and b = [7, 2] with 6 tokens each. a appends: position 6 is in block 2,
#   which has two references. A new block 5 gets a copy of block 2; a drops its reference to 2; a = [7, 5]. b appends
#   next: block 2 has one holder now, and is written in place. Block 7 is full, nobody writes into it, and it stays
#   shared.
def check_sharers(num_sharers, num_tokens, num_new, block_size, order, num_reserved=0, ahead=False, show=True):
    """Requests with common blocks write one after another.

    num_reserved: so many blocks of its own each of them has behind the common ones. ahead: the block of the next token is
    common, too, where the last one is full.
    """
    memory, first = Memory(block_size), num_tokens // block_size
    common = order[: first + 1 if ahead else blocks_for(num_tokens, block_size)]
    own = [order[len(common) + r * num_reserved :][:num_reserved] for r in range(num_sharers)]
    pool = Ledger(order, held=common * num_sharers + [block for reserved in own for block in reserved])
    prompt = [f"prompt {p}" for p in range(num_tokens)]
    memory.write(slots_behind(common, range(num_tokens), block_size), prompt)
    tables, texts = [common + reserved for reserved in own], [prompt] * num_sharers
    for r in range(num_sharers):
        memory.copies.clear()
        before, held = tables[r], set(pool.references)
        tables[r], slots = appended(pool, before, num_tokens, num_new, block_size, memory.copy)
        if show:
            print(f"request {r}, {num_tokens} tokens in {before}, {num_new} more: table {tables[r]}, slots {slots}, "
                  f"copies {memory.copies}")  # fmt: skip
        expected = int(first < len(common) and r < num_sharers - 1)
        assert len(memory.copies) == expected, f"request {r}: expected {expected} copies, saw {memory.copies}"
        needed = max(len(before), blocks_for(num_tokens + num_new, block_size))
        assert len(tables[r]) == needed, f"request {r}: its table has {needed} blocks then, saw {tables[r]}"
        moved = [i for i, block in enumerate(before) if tables[r][i] != block and not (expected and i == first)]
        assert not moved, f"request {r}: entries {moved} of {before} stay as they are, saw {tables[r]}"
        if expected:
            src, dst = memory.copies[0]
            right = src == before[first] and dst == tables[r][first] and dst not in held
            assert right, f"request {r}: copy from block {before[first]} to a new one in its table, saw {src} -> {dst}"
        texts[r] = prompt + [f"request {r}, {i}" for i in range(num_new)]
        memory.write(slots, texts[r][num_tokens:])
        for other in range(num_sharers):
            seen = memory.read(tables[other], len(texts[other]))
            wrong = [p for p, token in enumerate(texts[other]) if seen[p] != token]
            assert not wrong, f"request {r} wrote; request {other} does not find its tokens at positions {wrong}"
        entries = sorted(block for table in tables for block in table)
        assert sorted(pool.references) == entries, (
            f"after request {r}: one reference for each entry of a table: expected {entries}, "
            f"saw {sorted(pool.references)}"
        )


order = [7, 2, 9, 5, 0, 3]
check_sharers(2, num_tokens=6, num_new=1, block_size=4, order=order)
check_sharers(2, num_tokens=6, num_new=1, block_size=4, order=[7, 0, 9, 5])  # block 0 is a block like any other
check_sharers(2, num_tokens=8, num_new=1, block_size=4, order=order)  # full: nothing is copied
check_sharers(2, num_tokens=6, num_new=3, block_size=4, order=order, num_reserved=1)  # reserved blocks behind it
check_sharers(2, num_tokens=4, num_new=1, block_size=4, order=order, ahead=True)  # shared, and empty as yet
draw = rng("check_copy_on_write")
for case in range(6):
    block_size, num_sharers = random_int(2, 6, draw), random_int(2, 4, draw)
    full = random_int(0, 3, draw) * block_size
    num_tokens = full + random_int(1, block_size - 1, draw) if case % 3 else full + block_size
    order = random_order(60, draw)
    if case % 2:  # the block that is written is block 0
        order.remove(0)
        order.insert(num_tokens // block_size, 0)
    check_sharers(num_sharers, num_tokens, random_int(1, 2 * block_size, draw), block_size, order)
for num_reserved in (1, random_int(2, 4, draw)):
    block_size, num_sharers = random_int(2, 6, draw), random_int(2, 4, draw)
    for num_tokens, ahead in ((block_size + 1, False), (2 * block_size, False), (2 * block_size, True)):
        for num_new in (1, random_int(block_size, 3 * block_size, draw)):
            order = random_order(60, draw)
            check_sharers(num_sharers, num_tokens, num_new, block_size, order, num_reserved, ahead, show=False)
check_sharers(3, random_int(1, 5, draw), random_int(2, 3, draw), 1, random_order(60, draw), 1, ahead=True)


# %% nbgrader={"grade_id": "check_append_refused", "grade": true, "points": 1}
# property: if the blocks do not suffice, append_slots raises RuntimeError and nothing has changed.
# question: How many blocks does a step need in all: those for growth, and what else?
# hint: one call of allocate for growth and copy together, before anything else happens.
# explanation: The table's last block is shared and full enough that 1 new block is needed for growth and 1 for the
#   copy; 1 is free. RuntimeError, and table, pool and cache are as before. If growth takes its block first and the copy
#   then fails, the table has a block more and the tokens were never written.
def check_room(num_sharers, num_tokens, num_new, block_size, num_free, order, reserved=0, ahead=False):
    """One of several holders appends; reserved: so many blocks of its own it has behind the common ones. ahead: the block
    of the next token is common, too, where the last one is full."""
    memory, first = Memory(block_size), num_tokens // block_size
    common = order[: first + 1 if ahead else blocks_for(num_tokens, block_size)]
    table = order[: len(common) + reserved]
    pool = Ledger(order[: len(table) + num_free], held=common * num_sharers + table[len(common) :])
    needed = max(0, blocks_for(num_tokens + num_new, block_size) - len(table))
    needed += num_sharers > 1 and first < len(common)
    before = sorted(pool.references)
    error = error_of(append_slots, pool, list(table), num_tokens, num_new, block_size, memory.copy)
    print(f"{num_sharers} holders, {num_tokens} tokens in {table}, {num_new} more, {num_free} free blocks of {block_size}: "
          f"{type(error).__name__}: {error}")  # fmt: skip
    if needed <= num_free:
        assert error is None, f"{needed} blocks are needed and {num_free} are free: expected no error, saw {error!r}"
        return
    assert isinstance(error, RuntimeError), f"the blocks do not suffice: expected RuntimeError, saw {error!r}"
    after = sorted(pool.references)
    assert after == before, f"a refused call changes no reference: they were {before}, now {after}"
    assert not memory.copies, f"a refused call copies nothing, saw {memory.copies}"


order = [7, 2, 9, 5, 0, 3]
check_room(1, num_tokens=0, num_new=1, block_size=4, num_free=1, order=order)  # the last free block is enough
check_room(1, num_tokens=6, num_new=7, block_size=4, num_free=1, order=order)  # needs two
check_room(2, num_tokens=6, num_new=1, block_size=4, num_free=0, order=order)  # needs one to copy into
check_room(2, num_tokens=6, num_new=4, block_size=4, num_free=1, order=order)  # one for the copy, one to grow
check_room(2, num_tokens=6, num_new=4, block_size=4, num_free=0, order=order, reserved=1)  # room, and none for the copy
check_room(
    2, num_tokens=6, num_new=7, block_size=4, num_free=1, order=order, reserved=1
)  # one for the copy, one to grow
draw = rng("check_append_refused")
for num_sharers in (1, 2, 3):
    block_size = random_int(2, 6, draw)
    num_tokens = random_int(0, 3, draw) * block_size + random_int(1, block_size - 1, draw)
    grow = random_int(1, 3, draw)  # whole blocks in addition to the partial one
    for num_free in (grow + (num_sharers > 1) - 1, grow + (num_sharers > 1)):
        check_room(num_sharers, num_tokens, grow * block_size, block_size, num_free, random_order(60, draw, first=1))
for num_new in (1, block_size - 1, 2 * block_size - 1):
    for num_free in (0, 1):
        check_room(2, block_size + 1, num_new, block_size, num_free, order, reserved=1)
for num_reserved, ahead in ((1, False), (2, False), (0, True), (1, True)):
    num_tokens = random_int(0, 3, draw) * block_size + (0 if ahead else random_int(1, block_size - 1, draw))
    room = (num_tokens // block_size + 1 + num_reserved) * block_size - num_tokens
    num_new, order = room + random_int(1, block_size, draw), random_order(60, draw, first=1)
    for num_free in (0, 1, 2):  # two are needed, for the copy and to grow
        check_room(random_int(2, 3, draw), num_tokens, num_new, block_size, num_free, order, num_reserved, ahead)

# %% [markdown] nbgrader={"grade_id": "text_slots"}
# ## 5. From positions to slots
#
# What you just did with lists, a kernel does with tensors: it gets a row of a block table and must find the slots.
#
# **Build** `slot_mapping(block_table, positions, block_size)`: the slots of tokens of one request, int64.
#
# - `block_table` int32 `[max_blocks]`, the request's blocks in order, followed by padding.
# - `positions` `[n]`, int64, in any order. Returns `[n]`, int64, in the same order. The inputs are not modified.
#
# **Hint:** `positions // block_size` is the table entry, `positions % block_size` the offset in the block.
#
# **Trap (int32):** block tables are int32 to save memory, and `block × block_size` has the type of the table. A slot,
# or worse a slot times the numbers per slot, exceeds 2,147,483,647 sooner than one might think; then it becomes
# negative without an error, and you read another request's memory. Convert before you multiply.


# %% nbgrader={"grade_id": "slot_mapping", "solution": true}
def slot_mapping(block_table, positions, block_size):
    """block_table int32 [max_blocks], positions int64 [n] -> slots int64 [n]."""
    ### BEGIN SOLUTION
    blocks = block_table[positions // block_size].long()
    return blocks * block_size + positions % block_size
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_slot_mapping", "grade": true, "points": 1}
# property: position p is in slot block_table[p // block_size] * block_size + p % block_size.
# question: Position 9 with blocks of 4: which entry of the table, and which place in that block?
# hint: index the table with all entries at once; blocks need be neither adjacent nor sorted.
# explanation: Blocks of 4, table [7, 2, 5]. Position 9 is in entry 9 // 4 = 2, block 5, at offset 9 % 4 = 1: slot 5 × 4
#   + 1 = 21. Position 3 is slot 31, position 4 is slot 8: neighbours in the text need not be neighbours in memory.
def check_slots(block_table, positions, block_size):
    given = torch.tensor(block_table, dtype=torch.int32), torch.tensor(positions)
    before = [tensor.clone() for tensor in given]
    slots = mapped(*given, block_size)
    same = all(torch.equal(old, new) for old, new in zip(before, given, strict=True))
    assert same, (
        f"slot_mapping changed what it was given: {[t.tolist() for t in before]} to {[t.tolist() for t in given]}"
    )
    expected = slots_behind(block_table, positions, block_size)
    print(f"table {block_table}, blocks of {block_size}, positions {positions}: slots {slots.tolist()}")
    assert slots.dtype == torch.int64, f"expected int64, saw {slots.dtype}"
    assert slots.tolist() == expected, f"expected slots {expected}, saw {slots.tolist()}"


check_slots([7, 2, 9], list(range(10)), block_size=4)
check_slots([5, 4, 0, 0], [7, 0, 3], block_size=4)
check_slots([0, 5, 4], [7, 0, 9], block_size=4)  # block 0 is a block like any other
draw = rng("check_slot_mapping")
for block_size in (1, 16, random_int(2, 9, draw)):
    table = random_order(50, draw)[:6]
    table[random_int(0, 4, draw)] = 0
    check_slots(table, [*random_order(6 * block_size, draw)[: random_int(1, 20, draw)], 6 * block_size - 1], block_size)


# %% nbgrader={"grade_id": "check_large_ids", "grade": true, "points": 1}
# property: slots are right for every block number that int32 can hold, also beyond 2^31.
# question: What is the largest product that int32 can hold?
# hint: the type of a product is that of its factors: convert the blocks to int64, then multiply.
# explanation: Block 200,000,000 with blocks of 16 has its first slot at 3,200,000,000, beyond 2^31 = 2,147,483,648. As
#   a product of two int32 numbers it wraps around to a negative slot; converting the product afterwards is too late.
for blocks, block_size in (([40_000, 3], 16), ([134_217_727, 134_217_728], 16), ([2_147_483_647, 20_000_000], 128)):
    positions = torch.tensor([0, block_size - 1, block_size, 2 * block_size - 1])
    expected = slots_behind(blocks, positions.tolist(), block_size)
    slots = mapped(torch.tensor(blocks, dtype=torch.int32), positions, block_size).tolist()
    print(f"blocks {blocks} of {block_size} tokens: slots {slots}")
    assert slots == expected, f"expected slots {expected}, saw {slots}"
draw = rng("check_large_ids")
for bits in (15, 16, 27, 30):
    blocks = [random_int(2**bits, 2**bits + 2**bits // 2, draw) for _ in range(4)]
    positions = torch.randint(4 * 32, (20,), generator=draw)
    expected = slots_behind(blocks, positions.tolist(), 32)
    slots = mapped(torch.tensor(blocks, dtype=torch.int32), positions, 32).tolist()
    assert slots == expected, f"blocks {blocks} of 32 tokens: expected slots {expected}, saw {slots}"

# %% [markdown] nbgrader={"grade_id": "text_attention"}
# ## 6. Attention through the table
#
# **Build** `paged_attention(q, k_cache, v_cache, block_table, seq_lens)`: one query per row, each over its own context.
#
# - `q` `[rows, num_heads, head_dim]`: row r's newest token.
# - `k_cache`, `v_cache` `[num_blocks, block_size, num_kv_heads, head_dim]`: one layer's memory, for all requests. The
#   new tokens' keys and values are already in it.
# - `block_table` int32 `[rows, max_blocks]`, `seq_lens` int32 `[rows]`: row r's tokens are the first `seq_lens[r]` of
#   its table, including the newest, so a length is at least 1. Reserved blocks may follow, with no token yet, and then
#   zeros as padding. Such a zero means nothing: block 0 is in the memory like any other, and what it holds is not row r's.
# - Row r's query attends to all of its tokens, with weights softmax(q·k / sqrt(head_dim)). No mask is needed: it is the
#   last. A score can be some hundreds, and exp(89) is infinite in float32: `torch.softmax` subtracts the maximum first.
# - Query head h reads KV head `h // (num_heads // num_kv_heads)`.
# - Returns `[rows, num_heads, head_dim]`, of any float type. The inputs are not modified: a copy of the whole cache would be as
#   expensive as reserving it, and you must not write other requests' blocks.
#
# A chunk of a prompt is not a special case: its tokens are rows with the same block table and lengths that grow by one.
# That *is* the causal mask, and the last section uses it. (Kernels compute a chunk's rows together, to read each block
# once.)
#
# Blocks may be anywhere, in any order, and may be shared by rows. The location of a request's blocks must not change
# its output.
#
# **Hint:** a loop over rows is fine. For one row, `k_cache[blocks, offsets]` with two index tensors of `seq_lens[r]`
# numbers gathers exactly its keys, `[seq_lens[r], num_kv_heads, head_dim]`.
#
# **Trap (tail):** the last block is seldom full. The slots after the row's tokens were never written, or were written
# by an earlier owner: they may be NaN. A mask gives them weight 0, and 0 × NaN is NaN.
#
# **Trap (round-robin heads):** adjacent query heads share a KV head; `h % num_kv_heads` is a different one.
#
# **Trap (fresh memory):** on a device, memory that was never written and memory that was freed look alike. Zeroing the
# cache first hides the bug from your tests but not from your users.


# %% nbgrader={"grade_id": "paged_attention", "solution": true}
def paged_attention(q, k_cache, v_cache, block_table, seq_lens):
    """One query per row over its own paged context.

    q [rows, num_heads, head_dim]; k_cache, v_cache [num_blocks, block_size, num_kv_heads, head_dim];
    block_table int32 [rows, max_blocks]; seq_lens int32 [rows] -> like q.
    """
    ### BEGIN SOLUTION
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    group = q.shape[1] // num_kv_heads
    out = torch.empty_like(q)
    for row in range(len(q)):
        position = torch.arange(int(seq_lens[row]))
        blocks, offsets = block_table[row].long()[position // block_size], position % block_size
        keys = k_cache[blocks, offsets].repeat_interleave(group, dim=1)  # [seq_len, num_heads, head_dim]
        values = v_cache[blocks, offsets].repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,thd->ht", q[row], keys) / math.sqrt(head_dim)
        out[row] = torch.einsum("ht,thd->hd", scores.softmax(dim=-1), values)
    return out
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_weights", "grade": true, "points": 1}
# property: weights are softmax(q.k / sqrt(head_dim)) over the row's keys.
# question: Over which axis do the weights of a query sum to 1?
# hint: scale the scores before the softmax, and take it over the tokens.
# explanation: head_dim 4, one query [2, 0, 0, 0], keys [2, 0, 0, 0] and [0, 0, 0, 0]: scores 4 and 0, divided by
#   sqrt(4) 2 and 0, weights 0.88 and 0.12. Unscaled they would be 0.98 and 0.02.
def weights_of(q, keys):
    """The weights of the query, in one full block: with one-hot values the output is the weights."""
    num_tokens, head_dim = keys.shape
    values = torch.eye(num_tokens, head_dim)
    out = attended(q[None, None], keys[None, :, None].clone(), values[None, :, None].clone(), [[0]], [num_tokens])
    return out[0, 0, :num_tokens]


for more in (0, 200, -200):  # added to all scores, which changes no weight
    q, keys = torch.zeros(4), torch.zeros(3, 4)
    q[:2], keys[:, 0], keys[:, 1] = torch.tensor([2.0, 2.0]), torch.tensor([0.0, 1.0, 2.0]), more
    seen, expected = weights_of(q, keys), torch.tensor([0.0, 1.0, 2.0]).softmax(0)
    print(f"head_dim 4, scores {more}, {more + 1}, {more + 2}: weights", [round(float(w), 4) for w in seen])
    assert difference(seen, expected) < 1e-5, f"expected weights {rounded(expected)}, saw {rounded(seen)}"
q, keys, values = torch.zeros(1, 2, 4), torch.zeros(1, 3, 2, 4), torch.eye(3, 4)[None, :, None].repeat(1, 1, 2, 1)
q[0, :, 0], keys[..., 0] = torch.tensor([2.0, 600.0]), torch.tensor([0.0, 1.0, 2.0])[:, None]
seen, expected = attended(q, keys, values, [[0]], [3])[0, 0, :3], torch.tensor([0.0, 1.0, 2.0]).softmax(0)
heads = "head 0 has the scores [0, 1, 2], head 1 scores up to 600"
assert difference(seen, expected) < 1e-5, f"{heads}: expected weights {rounded(expected)}, saw {rounded(seen)}"
draw = rng("check_weights")
for apart in (0, 0, 0, 100, 100, 100):  # scores of several hundreds of both signs, three of them near the largest
    num_tokens, head_dim = random_int(5, 7, draw), random_int(9, 40, draw)
    q, keys = 2 * torch.randn(head_dim, generator=draw), torch.randn(num_tokens, head_dim, generator=draw)
    if apart:
        far = torch.tensor([random_int(-6, 5, draw) for _ in range(num_tokens - 3)] + [6] * 3)
        q[0], keys[:, 0] = math.sqrt(head_dim), apart * far[random_order(num_tokens, draw)]
    scores = keys.double() @ q.double() / math.sqrt(head_dim)
    seen, expected = weights_of(q, keys), scores.softmax(0).float()
    assert difference(seen, expected) < 1e-5 * (1 + 2 * apart), (
        f"head_dim {head_dim}, scores {rounded(scores)}: expected weights {rounded(expected)}, saw {rounded(seen)}"
    )


# %% nbgrader={"grade_id": "check_heads", "grade": true, "points": 1}
# property: query head h reads KV head h // (num_heads // num_kv_heads).
# question: With 6 query heads and 2 KV heads, which query heads share the first KV head?
# hint: with 6 query and 2 KV heads, query heads 0, 1, 2 read KV head 0 and 3, 4, 5 read KV head 1.
# explanation: 6 query heads over 2 KV heads: groups of 3. Heads 0, 1, 2 read KV head 0, and 3, 4, 5 read KV head 1.
#   Repeating the KV heads as a whole gives 0, 1, 0, 1, 0, 1 in place of 0, 0, 0, 1, 1, 1.
def check_heads_read(num_heads, num_kv_heads, block_size):
    """Whose values each query head reads, then whose keys, in one block of more tokens than there are KV heads."""
    heads, q = torch.arange(num_kv_heads), torch.ones(1, num_heads, 8)
    expected = torch.arange(num_heads) // (num_heads // num_kv_heads)
    keys, values = torch.zeros(2, 1, block_size, num_kv_heads, 8).unbind()
    values[:] = heads[:, None]  # all values of KV head g are g, so every weighted mean of them is g
    seen = {"values": attended(q, keys.clone(), values.clone(), [[0]], [block_size])}
    keys[0, heads, heads] = 20.0  # KV head g has its one large key at token g, and token g's values are g
    values[0] = torch.arange(block_size)[:, None, None]
    seen["keys"] = attended(q, keys, values, [[0]], [block_size])
    for what, out in seen.items():
        read = out[0, :, 0]
        print(f"{num_heads} query heads, {num_kv_heads} KV heads: {what} of", [round(float(g), 2) for g in read])
        off = difference(read, expected.float())
        assert off < 1e-4, f"{what}: expected KV heads {expected.tolist()}, saw {read.tolist()}"


for num_heads, num_kv_heads in ((6, 2), (4, 4), (4, 1)):  # GQA, MHA, MQA
    check_heads_read(num_heads, num_kv_heads, block_size=5)
draw = rng("check_heads")
for group in (1, 2, 3, 4):
    num_kv_heads = random_int(2, 4, draw)
    check_heads_read(num_kv_heads * group, num_kv_heads, random_int(5, 7, draw))


# %% nbgrader={"grade_id": "check_tables", "grade": true, "points": 2}
# property: each row gets what it would get alone and in one piece, wherever its blocks lie and whoever shares them.
# question: Which token of a row is at offset 0 of the second block in its table?
# hint: position p of row r is at block_table[r, p // block_size], offset p % block_size, for p < seq_lens[r].
# explanation: Blocks of 4, table [7, 2], length 6: the row's keys are the 4 of block 7 and then the first 2 of block 2.
#   In another place, in another order of blocks, or with a block shared with another row, the same 6 keys come in the
#   same order, and the result is the same.
def check_rows(lengths, tables, num_blocks, block_size, generator, num_kv_heads=1, group=2, head_dim=5, prefix=0):
    """prefix: so many first tokens are the same in all rows, in the same blocks."""
    contexts = [torch.randn(2, n, num_kv_heads, head_dim, generator=generator) for n in lengths]
    contexts = [torch.cat((contexts[0][:, :prefix], context[:, prefix:]), dim=1) for context in contexts]
    q = torch.randn(len(lengths), num_kv_heads * group, head_dim, generator=generator)
    k_cache, v_cache = paged(contexts, tables, num_blocks, block_size, None, generator)
    out = attended(q.clone(), k_cache, v_cache, tables, lengths)
    for r, (keys, values) in enumerate(contexts):
        off = difference(out[r], alone(q[r], keys, values))
        print(f"row {r}, {lengths[r]} tokens in blocks {tables[r]} of {block_size}: off by {off:.1e}")
        assert off < 1e-5, (
            f"row {r} of lengths {lengths}, blocks {tables[r]} of {block_size}: the output is not what the row gets alone, "
            f"it {off_by(off)}"
        )


def check_chunk(num_tokens, table, num_blocks, block_size, generator):
    """All tokens of a prompt as rows over one table."""
    k, v = torch.randn(2, num_tokens, 2, 5, generator=generator)
    q = torch.randn(num_tokens, 4, 5, generator=generator)
    caches = paged([(k, v)], [table], num_blocks, block_size, None, generator)
    out = attended(q.clone(), *caches, [table] * num_tokens, list(range(1, num_tokens + 1)))
    off = difference(out, torch.stack([alone(q[i], k[: i + 1], v[: i + 1]) for i in range(num_tokens)]))
    print(f"a prompt of {num_tokens} tokens as rows over {table}: off by {off:.1e}")
    assert off < 1e-5, (
        f"rows that share a table, with lengths 1..{num_tokens}, must be causal: the output {off_by(off)}"
    )


check_rows([3, 9], [[6], [5, 2, 7]], num_blocks=8, block_size=4, generator=rng("rows"))
check_rows([8, 1, 4], [[1, 6], [4], [3]], num_blocks=8, block_size=4, generator=rng("rows"))  # full blocks, one token
check_rows([7, 5, 9], [[6, 2], [6, 4], [6, 1, 3]], 8, 4, rng("rows"), num_kv_heads=2, prefix=4)  # they share block 6
check_chunk(7, [5, 0, 2], num_blocks=6, block_size=3, generator=rng("chunk"))
draw = rng("check_tables")
for _ in range(3):
    block_size, free = random_int(2, 7, draw), random_order(60, draw)
    lengths = [random_int(1, 5 * block_size, draw) for _ in range(random_int(2, 4, draw))]
    lengths += [1, block_size, 3 * block_size - 1]
    tables = []
    for n in lengths:
        tables.append(free[: blocks_for(n, block_size)])
        free = free[len(tables[-1]) :]
    heads = random_int(1, 3, draw)
    check_rows(lengths, tables, 60, block_size, draw, heads, random_int(1, 3, draw), 4 + heads)
    check_chunk(random_int(4, 12, draw), random_order(12, draw), 12, block_size, draw)
block_size, order = random_int(2, 7, draw), random_order(20, draw)
lengths = [2 * block_size + random_int(1, block_size, draw) for _ in range(3)]
tables = [[*order[:2], block] for block in order[2:5]]
check_rows(lengths, tables, 20, block_size, draw, num_kv_heads=2, group=3, prefix=2 * block_size)
check_rows([random_int(100, 300, draw)] * 2, [order, order], 20, 16, draw, prefix=300)  # long, and two rows alike
check_rows([3, 4], [[39_999, 32_768], [33_333, 1]], 40_000, 2, draw, head_dim=3)


# %% nbgrader={"grade_id": "check_unused", "grade": true, "points": 1}
# property: nothing but the rows' own tokens is read, and nothing is written: everything else may be NaN.
# question: The last block of a row is half full: what is in its other half?
# hint: gather seq_lens[r] positions and no more; do not clean the cache, it is not yours.
# explanation: Length 6 in blocks of 4: 2 slots of the second block are not the row's, and may be NaN. The table may
#   have entries beyond the 2 blocks that the row needs; they point anywhere. A weight of 0 does not help, since 0 × NaN
#   is NaN; and a cleaned cache loses other rows' tokens.
def check_poisoned(lengths, tables, num_blocks, block_size, generator):
    """All slots without the rows' tokens are NaN; block 0, with which tables are padded, is unused."""
    contexts = [torch.randn(2, n, 1, 5, generator=generator) for n in lengths]
    for keys, _ in contexts:
        keys[:] = keys[0].clone()  # all keys of a row are alike, so all its tokens have equal weight
    q, changed = torch.randn(len(lengths), 2, 5, generator=generator), []
    k_cache, v_cache = paged(contexts, tables, num_blocks, block_size, math.nan)
    before = torch.stack((k_cache, v_cache))
    out = attended(q, k_cache, v_cache, tables, lengths, changed)
    nan = [int(row.isnan().sum()) for row in out]
    print(f"lengths {lengths} in blocks {tables} of {block_size}: {nan} NaN in the rows' outputs")
    assert not any(nan), f"NaN from unused slots reached rows {[r for r, n in enumerate(nan) if n]}"
    after = torch.stack((k_cache, v_cache))
    same = torch.equal(before.isnan(), after.isnan()) and torch.equal(before.nan_to_num(), after.nan_to_num())
    assert same, "paged_attention changed the cache, which belongs to everybody"
    assert not changed, f"paged_attention changed what it was given: {', '.join(changed)}"
    for r, (_, values) in enumerate(contexts):
        off = difference(out[r], values.mean(0).expand(2, -1))
        assert off < 1e-5, f"row {r}: its keys are all alike, so the output is the mean of its values; it {off_by(off)}"


check_poisoned([4, 8], [[6], [5, 2]], num_blocks=8, block_size=4, generator=rng("poison"))  # only tables are padded
check_poisoned([3, 9], [[6], [5, 2, 7]], num_blocks=8, block_size=4, generator=rng("poison"))  # and tails are empty
check_poisoned([3, 4], [[6, 1], [5, 2, 7]], num_blocks=8, block_size=4, generator=rng("poison"))  # and blocks reserved
draw = rng("check_unused")
for _ in range(3):
    block_size, free = random_int(2, 7, draw), random_order(60, draw, first=1)
    lengths = [1, *(random_int(1, 4 * block_size, draw) for _ in range(3))]
    reserved = random_int(0, 2, draw)
    tables = [[free.pop() for _ in range(blocks_for(n, block_size) + reserved)] for n in lengths]
    check_poisoned(lengths, tables, 60, block_size, draw)

# %% [markdown] nbgrader={"grade_id": "text_engine"}
# ## 7. Inside the engine
#
# First your pool alone: the engine takes `Parts(block_pool=...)` and uses its own KV manager, prefix cache and
# scheduler with it. There is too little memory for all requests at once, so some are preempted and resume later.
#
# Then all parts. `BlocksByTable` is a small KV manager over your pool, `append_slots` and `fork`; three samples of one
# prompt share its blocks, and copy when they diverge. `AttentionByTable` gets slots from your `slot_mapping` and
# attention from your `paged_attention`, with a chunk of a prompt as rows over one table. The engine's memory is NaN
# where it was never written.
#
# Each cell compares at every call and tells you at the first difference which property failed. The tokens must be
# those that the engine generates by itself.


# %% nbgrader={"grade_id": "engine_parts"}
from reference_impl.assembly.lab_parts import AttentionByTable, BlocksByTable, LabEngine, course_llm


class YourPool:
    """Your BlockPool as the engine sees it, with a second count that names the first error.

    A block gets another number when it is allocated for the first time, so that nothing depends on the order in which
    you allocate them: the first is 0, the others are shuffled.
    """

    def __init__(self, num_blocks):
        self.pool, ids = pool_of(num_blocks)
        self.ids, self.unnamed = set(ids), [*random_order(num_blocks, rng("numbers"), first=1), 0]
        self.outside, self.inside = {}, {}  # the engine's number of your block, and back
        self.counts = [0] * num_blocks
        self.num_calls = 0

    @property
    def num_free(self):
        seen, expected = self.pool.num_free, self.counts.count(0)
        assert seen == expected, f"BlockPool: {expected} blocks are free, num_free says {seen}"
        return seen

    def ref_count(self, block):
        seen, expected = self.pool.ref_count(self.inside[block]), self.counts[block]
        assert seen == expected, f"BlockPool: a block has {expected} references, ref_count says {seen}"
        return seen

    def allocate(self, n):
        if n > self.counts.count(0):
            raise RuntimeError(f"{n} blocks were asked for, {self.counts.count(0)} are free")
        blocks = whole(self.pool.allocate(n), "BlockPool.allocate")
        right = len(blocks) == n == len(set(blocks) & self.ids)
        assert right, f"BlockPool.allocate({n}): {n} different blocks of {len(self.counts)}, saw {blocks}"
        for block in blocks:
            if block not in self.outside:
                self.outside[block] = self.unnamed.pop()
                self.inside[self.outside[block]] = block
        blocks = [self.outside[block] for block in blocks]
        assert not any(self.counts[block] for block in blocks), (
            "BlockPool.allocate: a block that is held went to another"
        )
        self._count(blocks, 1)
        return blocks

    def incref(self, ids):
        self.pool.incref([self.inside[block] for block in ids])
        self._count(ids, 1)

    def decref(self, ids):
        freed = whole(self.pool.decref([self.inside[block] for block in ids]), "BlockPool.decref")
        self._count(ids, -1)
        expected = sorted({self.inside[block] for block in ids if not self.counts[block]})
        assert sorted(freed) == expected, f"BlockPool.decref: blocks {expected} became free, saw {freed}"
        return [self.outside[block] for block in freed]

    def _count(self, ids, change):
        self.num_calls += 1
        for block in ids:
            self.counts[block] += change


def your_blocks(num_blocks, block_size):
    """A KV manager over your pool, append_slots and fork, each result compared."""
    pool = YourPool(num_blocks)

    def append(table, start, num_new, copy):
        copied, first, end = [], start // block_size, blocks_for(start + num_new, block_size)
        shared = first < len(table) and pool.counts[table[first]] > 1

        def copy_block(src, dst):
            copied.append((src, dst))
            copy(int(src), int(dst))

        grown, slots = appended(pool, table, start, num_new, block_size, copy_block)
        right = len(grown) == max(end, len(table)) and slots == slots_behind(
            grown, range(start, start + num_new), block_size
        )
        assert right, f"append_slots: {start} tokens in {table}, {num_new} more: saw {grown} and slots {slots}"
        assert len(copied) == shared, f"append_slots: expected {int(shared)} copies, saw {len(copied)}"
        alone = pool.counts[grown[first]] == 1
        assert alone, f"append_slots: block {grown[first]} is written and has other holders"
        return grown

    def share(table, num_tokens):
        shared = whole(fork(pool, list(table), num_tokens, block_size), "fork")
        expected = table[: blocks_for(num_tokens, block_size)]
        right = shared == expected and all(pool.counts[block] > 1 for block in shared)
        assert right, (
            f"fork: {num_tokens} tokens of {table} are in {expected}, shared with a reference each; saw {shared}"
        )
        return shared

    return BlocksByTable(pool, block_size, append, share)


def check_your_slots(table, positions, block_size, expected):
    slots = mapped(table, positions, block_size)
    right = torch.equal(slots, expected)
    assert right, f"slot_mapping of {positions.tolist()} in {table.tolist()}: expected {expected}, saw {slots}"


def your_attention(asked):
    """The result of your paged_attention for a step's queries in a layer; a prompt's chunk is rows over one table."""
    seen = paged_attention(asked.q, asked.key_cache, asked.value_cache, asked.block_tables, asked.seq_lens)
    seen = as_float32(seen)
    off = difference(seen, asked.expected)
    assert off < 1e-4, f"paged_attention, layer {asked.layer}, lengths {asked.context_lens}: the output {off_by(off)}"
    return seen


def serve(prompts, samples, num_new_tokens, num_blocks, block_size, parts=None):
    """(tokens that the course model generates, by request; number of preemptions); samples[i] of prompt i.

    Memory that was never written is NaN.
    """
    options = {"num_blocks": num_blocks, "block_size": block_size, "max_num_batched_tokens": 12}
    engine = LabEngine(course_llm(), options, unwritten=math.nan, **(parts or {}))
    for i, (prompt, n) in enumerate(zip(prompts, samples, strict=True)):
        engine.add(prompt, num_new_tokens, **({} if n == 1 else {"temperature": 1.0, "n": n, "seed": i}))
    return engine.run(max_steps=500), engine.num_preemptions


# %% nbgrader={"grade_id": "check_engine_pool", "grade": true, "points": 1}
# property: with your pool the engine serves the same tokens as with its own, also when blocks run out.
# question: Which method does the message name, and what did the engine's own pool answer there?
# hint: the message names the first property that failed; make that part's own checks pass first.
# explanation: The engine asks your pool for every block of every request, frees them when requests end, and preempts
#   when none is left. The first answer that differs is named. If the single checks pass, look at what only a long run
#   shows: a block freed and given out many times, and one shared by several.
def check_pool_serves(prompts, num_new_tokens, num_blocks, block_size):
    yours = YourPool(num_blocks)
    seen, thrown_out = serve(prompts, [1] * len(prompts), num_new_tokens, num_blocks, block_size, {"block_pool": yours})
    expected, _ = serve(prompts, [1] * len(prompts), num_new_tokens, num_blocks, block_size)
    print(f"prompts of {[len(p) for p in prompts]} tokens in {num_blocks} blocks: {yours.num_calls} calls of your pool, "
          f"a request was thrown out {thrown_out} times")  # fmt: skip
    assert seen == expected, f"the engine generates {expected}, with your pool it generated {seen}"
    return seen


texts = ["def add(a, b):\n", "class Reader:\n    def __init__(self, path):\n        self.path =", "def add(a, b):\n"]
prompts = [course_llm().encode(text) for text in texts]  # the third hits a block of the first in the prefix cache
for text, tokens in zip(texts, check_pool_serves(prompts, 6, num_blocks=8, block_size=4).values(), strict=True):
    print(repr(text), "->", repr(course_llm().tokenizer.decode(tokens)))
### BEGIN HIDDEN TESTS
draw = rng("check_engine_pool")
prompts = [torch.randint(100, 4000, (random_int(4, 14, draw),), generator=draw).tolist() for _ in range(3)]
check_pool_serves([*prompts, prompts[0]], 6, num_blocks=random_int(8, 10, draw), block_size=4)
### END HIDDEN TESTS


# %% nbgrader={"grade_id": "check_engine", "grade": true, "points": 1}
# property: with all your pieces the engine generates the same tokens, shares a prompt's blocks, and copies when they part.
# question: Which piece does the message name first, and does its own check pass?
# hint: the message names the first property that failed; make that part's own checks pass first.
# explanation: Two requests with the same prompt share its full blocks; when they generate different tokens, the one
#   that writes into a shared block gets a copy. So the pool, the growth and the attention must agree on where token p
#   is. The named property was the first to fail; what comes after it follows from it.
def check_served(prompts, samples, num_new_tokens, num_blocks, block_size):
    """Serves with and without your parts, and compares; returns the tokens by request."""
    blocks = your_blocks(num_blocks, block_size)
    attention = AttentionByTable(course_llm().engine.attention, check_your_slots, your_attention)
    parts = {"block_pool": blocks.pool, "kv_manager": blocks, "attention": attention}
    seen, _ = serve(prompts, samples, num_new_tokens, num_blocks, block_size, parts)
    expected, _ = serve(prompts, samples, num_new_tokens, num_blocks, block_size)
    print(f"prompts of {[len(p) for p in prompts]} tokens, samples {samples}, blocks of {block_size}: "
          f"{blocks.num_forks} forks, {blocks.num_copies} blocks copied")  # fmt: skip
    assert seen == expected, f"the engine generates {expected}, with your pieces it generated {seen}"
    held = [block for block, count in enumerate(blocks.pool.counts) if count]
    assert not held, f"all requests are finished, and blocks {held} are still held"
    return seen


texts = ["def add(a, b):\n", "class Reader:\n    def __init__(self,"]
prompts = [course_llm().encode(text) for text in texts]
for name, tokens in check_served(prompts, [2, 3], 5, num_blocks=32, block_size=3).items():
    print(f"request {name}: {course_llm().tokenizer.decode(tokens)!r}")
### BEGIN HIDDEN TESTS
draw = rng("check_engine")
for block_size in (3, 8):
    prompts = [torch.randint(100, 4000, (random_int(5, 16, draw),), generator=draw).tolist() for _ in range(2)]
    check_served(prompts, [random_int(2, 3, draw), 1], 4, num_blocks=96 // block_size, block_size=block_size)
for length, samples in ((2, 3), (14, 1)):  # most of the shared block is not the prompt's; one row alone
    prompt = torch.randint(100, 4000, (length,), generator=draw).tolist()
    check_served([prompt], [samples], 6, num_blocks=12, block_size=8)
### END HIDDEN TESTS

# %% [markdown] nbgrader={"grade_id": "text_saving"}
# ## 8. The savings
#
# The cell below fills a memory of 4,096 slots with requests, one after another, until the next one does not fit: once
# with 512 slots reserved for each, once in blocks. Then three samples of each prompt, with the prompt's full blocks
# shared. Stored tokens take the same bytes in all cases: paging does not make the cache smaller, it leaves less of it
# empty. A server's gain is that of more concurrent requests.

# %% nbgrader={"grade_id": "saving"} inferlab={"where": "notebook"}
slots, max_len, block_size, draw = 4096, 512, 16, rng("saving")
prompt_lens = torch.randint(20, 200, (400,), generator=draw).tolist()
output_lens = torch.randint(20, 200, (400,), generator=draw).tolist()


def fit(taken):
    """The number of requests that fit, if request i takes taken[i] slots."""
    total = 0
    for number, size in enumerate(taken):
        total += size
        if total > slots:
            return number
    return len(taken)


lengths = [p + n for p, n in zip(prompt_lens, output_lens, strict=True)]
in_blocks = [blocks_for(n, block_size) * block_size for n in lengths]
print(f"{slots} slots: {fit([max_len] * 400)} requests reserve {max_len} each, {fit(in_blocks)} fit in blocks")
whole = [3 * size for size in in_blocks]
full = [p // block_size * block_size for p in prompt_lens]  # the part of each prompt in full blocks
shared = [size - 2 * prompt for size, prompt in zip(whole, full, strict=True)]
print(f"with three answers each: {fit(whole)} requests apart, {fit(shared)} that share their prompts' full blocks")

# %% [markdown] nbgrader={"grade_id": "text_milestone"}
# ## 9. Your blocks serves a text
#
# Your `BlockPool` and `append_slots` place every key and value of this text, and your `paged_attention` reads them. With all
# checks passed, `inferlab lab check` shows this, too.

# %% nbgrader={"grade_id": "milestone"} inferlab={"where": "milestone"}
from reference_impl.assembly.lab_parts import DEMO_PROMPT, show_served

blocks = your_blocks(32, 4)
attention = AttentionByTable(course_llm().engine.attention, check_your_slots, your_attention)
parts = {"block_pool": blocks.pool, "kv_manager": blocks, "attention": attention}
engine = LabEngine(course_llm(), {"num_blocks": 32, "block_size": 4}, unwritten=math.nan, **parts)
engine.add(course_llm().encode(DEMO_PROMPT), 19)
engine.run()
show_served("Your blocks just served this text", engine, course_llm())
print(f"Your pool was called {blocks.pool.num_calls} times and holds no block any more.")

# %% [markdown] nbgrader={"grade_id": "extensions"}
# ## Further (not graded)
#
# Add cells below and try one. Several are the subject of other labs.
#
# - **Blocks that outlive their request.** Keep a block with no reference until it is needed, and give it to the next
#   request whose prompt begins with the same tokens. By what key do you look it up? (Lab 06.)
# - **One read per block.** Your `paged_attention` repeats keys for every query head. Let all query heads of a KV head
#   use one read of a block, then go through the blocks one by one with a running maximum and sum. (Lab 05.)
# - **A window.** A layer attends only to the last 1,024 tokens. Which blocks of a table can be freed, and when?
# - **Out of blocks.** Your pool raises. Which request is preempted: the newest, the longest, the one with most tokens
#   left? (Lab 03.)
