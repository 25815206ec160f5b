# %% [markdown] nbgrader={"grade_id": "intro"}
# # Lab 05: flash attention
#
# One head of attention over a prompt of 8,192 tokens, head_dim 128, float16. Q, K, V and O are 8 MiB together. If the
# scores are written to memory, read for the softmax, written again and read again: how many bytes are moved in all? And
# if they never leave the chip? Write both guesses down; a cell below computes them.
#
# You build, in this order: the softmax in one pass, attention tile by tile over a memory that counts, the merge of
# partial results, three small Triton kernels, and the whole kernel. At the end it serves text inside the engine.
#
# - Each part has a text, a cell for your code, and checks. Run a check as often as you like.
# - Grading draws other inputs of the same kinds. A check that passes here for the right reason passes there.
# - Tensors that your functions are given belong to the caller: do not modify them. (A kernel writes to its outputs.)
# - Use `torch`, `triton`, `numpy` and the standard library: nothing else is available when your cells are graded.
#   Neither are the functions of the given cells (`tiles_for`, `whole` and so on).
# - Everything is checked on the CPU: Triton's *interpreter* runs a kernel step by step in NumPy. It is slow, so sizes
#   are small. Triton is available on Linux only; elsewhere do parts 1 to 3 here, and the rest on Colab or in a
#   container.
#
# | name | what it is | shape |
# |---|---|---|
# | q | queries | `[q_len, num_heads, head_dim]` |
# | k, v | keys and values, as many heads or fewer | `[kv_len, num_kv_heads, head_dim]` |
# | o | outputs | that of q |
# | first | the position of query 0: query i attends to the keys j with j <= first + i | int |
# | lse | log-sum-exp: the natural logarithm of the sum of exp(score) over the keys a query sees | `[num_heads, q_len]` |
#
# A score is q·k / sqrt(head_dim). Query head h reads KV head h // (num_heads // num_kv_heads).
#
# 20 points.

# %% nbgrader={"grade_id": "imports"} inferlab={"where": "both"}
import math

import torch

# %% nbgrader={"grade_id": "interpreter"} inferlab={"where": "learner"}
import importlib.util
import os
import sys

# Triton reads this at import and then runs kernels on the CPU.
if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("Triton was imported before this cell. Restart the kernel, then run this cell first.")
os.environ["TRITON_INTERPRET"] = "1"

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

# %% nbgrader={"grade_id": "tools"}
# Given: helpers of the checks. You may read them, but do not change them.
from collections import Counter

import numpy as np

from grader.checks import compiled, launch, rng, unchanging


class Stream:
    """Chunks (scores [n], values [n, head_dim]), one after another, readable once."""

    LEARNER_SEES = ("__iter__", "__next__")

    def __init__(self, chunks):
        self.left = [(scores.clone(), values.clone()) for scores, values in chunks]

    def __iter__(self):
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        return self.left.pop(0)


class HBM:
    """The large slow memory with q, k, v and o, in tiles; it counts the traffic.

    A tile is [rows, head_dim] of one head: block_m rows of q and o, block_n rows of k and v, fewer in the last one.
    """

    LEARNER_SEES = ("load", "store")

    def __init__(self, q, k, v, block_m, block_n):
        self.tensors = {"q": q, "k": k, "v": v, "o": torch.full_like(q, math.nan)}
        self.rows = {"q": block_m, "k": block_n, "v": block_n, "o": block_m}
        self.num_loads, self.num_stores, self.num_bytes = Counter(), Counter(), 0

    def load(self, name, head, i):
        """Tile i of a head of "q", "k" or "v"."""
        if name not in ("q", "k", "v"):
            raise ValueError(f"expected q, k or v, got {name!r}")
        tile = self._tile(name, head, i)
        self.num_loads[name, int(head), int(i)] += 1
        self.num_bytes += tile.numel() * tile.element_size()
        return tile.clone()

    def store(self, name, head, i, tile):
        """Write tile i of a head of "o"."""
        if name != "o":
            raise ValueError(f"expected o, got {name!r}")
        place = self._tile(name, head, i)
        if tuple(tile.shape) != tuple(place.shape):
            raise ValueError(f"tile {i} of o is {tuple(place.shape)}, got {tuple(tile.shape)}")
        self.num_stores[name, int(head), int(i)] += 1
        self.num_bytes += place.numel() * place.element_size()
        place.copy_(tile)

    def _tile(self, name, head, i):
        tensor, rows = self.tensors[name], self.rows[name]
        if not (0 <= head < tensor.shape[1] and 0 <= i < tiles_for(len(tensor), rows)):
            raise IndexError(f"{name} has {tensor.shape[1]} heads of {tiles_for(len(tensor), rows)} tiles each, "
                             f"got head {head}, tile {i}")  # fmt: skip
        return tensor[i * rows : (i + 1) * rows, head]


def tiles_for(num_rows, rows):
    return -(-num_rows // rows)  # rounded up


def power_of_2(number, least=1):
    """The smallest power of 2 that is not below number, nor below least."""
    return max(least, 1 << (number - 1).bit_length())


def whole(q, k, v, first):
    """(o, lse) of attention in one pass, float64; a query without visible keys gets zeros and minus infinity."""
    group = q.shape[1] // k.shape[1]
    keys, values = (t.double().repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q.double(), keys) / math.sqrt(q.shape[2])
    hidden = torch.arange(len(k))[None, :] > first + torch.arange(len(q))[:, None]
    scores = scores.masked_fill(hidden, -math.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1).nan_to_num(), values), scores.logsumexp(-1)


def random_qkv(q_len, kv_len, num_heads, num_kv_heads, head_dim, generator, dtype=torch.float32):
    shapes = (q_len, num_heads, head_dim), (kv_len, num_kv_heads, head_dim), (kv_len, num_kv_heads, head_dim)
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


def shifted(q, k, shift):
    """Every score grows by about `shift`, by the first column of queries and keys; with a shift of 0 none does."""
    if shift:
        q[..., 0], k[..., 0] = abs(shift) ** 0.5, math.copysign(abs(shift) ** 0.5, shift) * math.sqrt(q.shape[-1])
    return q, k


def random_int(low, high, generator):
    """An integer in [low, high]."""
    return int(torch.randint(low, high + 1, (), generator=generator))


def differences(seen, expected):
    """By element, where the larger of 1 and the expected number counts as 1; infinite for NaN, or an infinity in another
    place."""
    seen, expected = seen.double(), expected.double()
    off = (seen - expected).abs() / expected.abs().clamp(min=1.0)
    return off.masked_fill(seen == expected, 0.0).nan_to_num(nan=math.inf)


def difference(seen, expected):
    """The largest of the differences; infinite for another shape."""
    if tuple(seen.shape) != tuple(expected.shape):
        return math.inf
    return float(differences(seen, expected).max()) if seen.numel() else 0.0


def where(seen, expected, names, limit):
    """In words, for a message: how many numbers are off by more than the limit, and which is the worst."""
    if tuple(seen.shape) != tuple(expected.shape):
        return f"; its shape is {tuple(seen.shape)} instead of {tuple(expected.shape)}"
    off = differences(seen, expected)
    at = np.unravel_index(int(off.argmax()), tuple(off.shape))  # the one of torch imports its compiler first
    place = ", ".join(f"{name} {int(i)}" for name, i in zip(names, at, strict=True))
    return (
        f"; {int((off >= limit).sum())} of {off.numel()} numbers are wrong, most at {place}: expected "
        f"{float(expected[at]):.7g}, saw {float(seen[at]):.7g}"
    )


OF_O, OF_LSE = ("query", "head", "column"), ("head", "query")


def from_yours(lse):
    """What your functions call lse, as the natural logarithm [..., num_heads, q_len]."""
    return lse


def to_yours(lse):
    """The other way round."""
    return lse


def pair_of(answer, name, shape):
    """(o, lse) as your function returns it."""
    pair = isinstance(answer, tuple | list) and len(answer) == 2 and all(isinstance(t, torch.Tensor) for t in answer)
    assert pair, f"{name} returns two tensors (o, lse), saw {answer!r:.200}"
    o, lse = answer[0], from_yours(answer[1])
    assert tuple(o.shape) == tuple(shape), f"{name}: expected o of shape {tuple(shape)}, saw {tuple(o.shape)}"
    expected = (shape[1], shape[0])
    assert tuple(lse.shape) == expected, (
        f"{name}: lse has a number for each head and query, saw {tuple(answer[1].shape)}"
    )
    return o, lse


# %% [markdown] nbgrader={"grade_id": "text_online"}
# ## 1. The softmax in one pass
#
# A softmax needs the largest score before the first exp, and the sum before it can divide. Both are known only at the
# end. *Online softmax* (Milakov and Gimelshein 2018) uses the largest score so far, and rescales its sums when a larger
# one comes.
#
# **Build** `online_softmax(stream)`. `stream` can be iterated over once and gives chunks `(scores, values)`: float32
# tensors `[n]` and `[n, head_dim]`, with another n each time, at least one chunk. Return `(largest, total, mean)` over
# all keys of all chunks:
#
# - `largest`: the largest score, a float. `total`: the sum of exp(score - largest), a float.
# - `mean` `[head_dim]`: the sum of exp(score - largest) × value, divided by `total`.
#
# Three values between chunks are enough. A score of minus infinity is a masked key: its weight is 0. With no keys, or
# only masked ones, return minus infinity, 0.0 and zeros.
#
# **Hint:** with m the largest so far and m' the new one, multiply the sums by exp(m - m').
#
# **Trap (old values):** rescale the sum of weights, and the sum of weighted values, too.
#
# **Trap (begin with zero):** a largest score that begins as 0 stays 0 when all scores are negative. At -10,000 every
# exp is then 0.
#
# **Trap (nothing minus nothing):** minus infinity minus minus infinity is NaN.


# %% nbgrader={"grade_id": "online_softmax", "solution": true}
def online_softmax(stream):
    """(largest, total, mean) over all chunks (scores [n], values [n, head_dim]) of the stream."""
    ### BEGIN SOLUTION
    largest, total, acc = -math.inf, 0.0, 0.0
    for scores, values in stream:
        new = max([largest, *scores.tolist()])
        base = new if new > -math.inf else 0.0  # of no key: exp(-inf - 0) = 0
        weights, shrink = torch.exp(scores - base), math.exp(largest - base)
        total = total * shrink + float(weights.sum())
        acc = acc * shrink + weights @ values
        largest = new
    return largest, total, acc / total if total else acc
    ### END SOLUTION


# %% nbgrader={"grade_id": "online_checks"}
# Given: how this part's checks test your result.


def read_online(chunks):
    """What your online_softmax answers: (largest, total, mean), two floats and a tensor."""
    stream = Stream(chunks)
    answer = online_softmax(stream)
    triple = isinstance(answer, tuple | list) and len(answer) == 3
    assert triple, f"online_softmax returns (largest, total, mean), saw {answer!r:.200}"
    largest, total, mean = answer
    right = isinstance(mean, torch.Tensor) and tuple(mean.shape) == tuple(chunks[0][1].shape[1:])
    assert right, f"online_softmax returns (largest, total, mean), saw {answer!r:.200}"
    assert not stream.left, f"{len(stream.left)} chunks were not read"
    return float(largest), float(total), mean


def check_chunks(scores, values, sizes, limit=1e-5):
    chunks = list(zip(scores.split(sizes), values.split(sizes), strict=True))
    largest, total, mean = read_online(chunks)
    top = float(scores.max()) if len(scores) else -math.inf
    weights = torch.exp(scores.double() - (top if top > -math.inf else 0.0))
    expected = float(weights.sum())
    print(f"chunks of {sizes}: largest {largest:g}, total {total:.6g}, mean {[round(x, 4) for x in mean.tolist()]}")
    assert largest == top, f"chunks of {sizes}: the largest score is {top}, saw {largest}"
    off = abs(total - expected)
    assert off < limit, f"chunks of {sizes}: expected total {expected:.8g}, saw {total:.8g}"
    right = weights @ values.double() / max(expected, 1.0)
    off = difference(mean, right)
    assert off < limit, (
        f"chunks of {sizes}: the weighted mean is off by {off:.2g}{where(mean, right, ['column'], limit)}"
    )


# %% nbgrader={"grade_id": "check_online", "grade": true, "points": 1}
# property: largest score, sum of exp(score - largest) and weighted mean, however the keys are cut into chunks.
# question: When a larger score comes, by which factor is everything before it too large?
# hint: weights of a chunk are exp(scores - new largest); what you had shrinks by exp(old largest - new largest).
# explanation: Scores [1, 3], one after the other. After 1: largest 1, sum 1. Then 3: what there was shrinks by exp(1 -
#   3) = 0.135, the new one counts exp(0) = 1: sum 1.135. At once: exp(1 - 3) + exp(3 - 3) = 1.135. The weighted values
#   shrink by the same factor, and the mean is theirs over the sum.
draw = rng("online")
scores, values = 2 * torch.randn(12, generator=draw), torch.randn(12, 4, generator=draw)
for sizes in ([12], [5, 7], [1] * 12, [3, 4, 3, 2]):
    check_chunks(scores, values, sizes)
draw = rng("check_online")
for _ in range(4):
    sizes = [random_int(1, 9, draw) for _ in range(random_int(2, 6, draw))]
    values = torch.randn(sum(sizes), random_int(1, 9, draw), generator=draw)
    check_chunks(2 + torch.randn(sum(sizes), generator=draw), values, sizes)
for _ in range(6):  # of so many, a sum in float16 would have steps of 0.25, and not be right by chance each time
    many = 2500 + random_int(0, 500, draw)
    check_chunks(torch.randn(many, generator=draw), torch.randn(many, 2, generator=draw), [many - 300, 300], limit=1e-2)


# %% nbgrader={"grade_id": "check_online_huge", "grade": true, "points": 1}
# property: scores may grow, fall, and be as large or as small as they like.
# question: What is the largest number that exp gets in your code?
# hint: every exp is of a score minus the largest so far, which begins as minus infinity: it never overflows.
# explanation: Scores [1000, 2000]: exp(1000) is infinite in float32. Relative to the largest so far: first exp(0) = 1;
#   then the old sum shrinks by exp(-1000) = 0 and the new counts 1. Scores that fall, [2000, 1000], add exp(-1000) = 0.
#   No exponent is above 0, whatever the order.
def check_huge(scores, num_chunks):
    scores = torch.tensor(scores)
    values = torch.arange(2.0 * len(scores)).view(-1, 2)
    check_chunks(scores, values, [len(scores) // num_chunks] * num_chunks, limit=0.02)  # 30,000 has steps of 0.002


check_huge([0.0, 1.0, 2.0, 3.0], 4)  # the largest comes last
check_huge([20_000.0, 19_999.0, 0.0, -20_000.0], 2)
check_huge([-20_000.0, -20_001.0, -20_003.0, -20_002.0], 2)  # all far below zero
check_huge([-200_000.0, -200_001.0], 2)
check_huge([-1e20], 1)  # far below what often stands for minus infinity; beside it float32 has room for no second key
draw = rng("check_online_huge")
for sign in (1, -1):
    far = [sign * random_int(500, 30_000, draw) + float(random_int(-2, 2, draw)) for _ in range(6)]
    check_huge(far, 3)
    check_huge(sorted(far), 6)
    check_huge(sorted(far, reverse=True), 6)
    grow = sign * 1000.0 * random_int(6, 30, draw) + torch.tensor([0.0, 1.0, 3.0])
    check_chunks(grow, torch.randn(3, 2, generator=draw), [1, 1, 1], limit=0.02)


# %% nbgrader={"grade_id": "check_online_empty", "grade": true, "points": 1}
# property: chunks without keys and masked keys change nothing; with no key at all: minus infinity, 0, zeros.
# question: What is (minus infinity) - (minus infinity)?
# hint: a chunk of no keys has no largest score; while the largest is minus infinity, subtract 0 instead of it; mean is a
#   tensor [head_dim] in any case.
# explanation: A chunk whose keys are all masked comes first: its scores are all -inf, and so is the largest. Score
#   minus largest is -inf - (-inf) = NaN, and NaN stays. With 0 in place of an infinite largest it is exp(-inf) = 0: the
#   chunk counts nothing. If no key ever comes, the sum is 0, and 0 / 0 must not be computed.
def check_masked(scores, sizes):
    scores = torch.tensor(scores)
    check_chunks(scores, 1.0 + torch.arange(3.0 * len(scores)).view(-1, 3), sizes)


none = -math.inf
check_masked([1.0, 2.0, 0.5], [0, 2, 0, 1, 0])
check_masked([none, none, 1.0, none, 2.0, none], [2, 2, 2])  # the first chunk is masked as a whole
check_masked([none, none, none], [2, 1])
check_masked([], [0])
draw = rng("check_online_empty")
for _ in range(3):
    sizes = [random_int(0, 3, draw) for _ in range(6)]
    some = [float(random_int(-9, 9, draw)) if random_int(0, 1, draw) else none for _ in range(sum(sizes))]
    check_masked([none, none, *some], [0, 2, *sizes])
    check_masked([none] * sum(sizes), sizes)

# %% [markdown] nbgrader={"grade_id": "text_tiled"}
# ## 2. Attention tile by tile
#
# On-chip memory is fast and holds a few tiles; `hbm` is large, slow, and counts traffic. **Build**
# `tiled_attention(hbm, q_len, kv_len, num_heads, num_kv_heads, block_m, block_n, first)`, causal attention as in
# FlashAttention-2 (Dao 2023):
#
# - `hbm.load("q", head, i)` returns tile i of a query head, rows from i × `block_m`: `[rows, head_dim]`, float32.
#   `hbm.load("k", kv_head, j)` and `hbm.load("v", kv_head, j)` return tile j of `block_n` rows. The last tile has the
#   remaining rows.
# - `hbm.store("o", head, i, tile)` writes a tile of the output. It returns nothing, and so does your function.
#
# Allowed traffic: each tile of q is loaded once, and each tile of o is stored once. For each tile of *queries*, a
# tile of k or v is loaded once for *all* query heads that share its KV head, and not at all if no query of the tile
# attends to one of its keys. The next tile of queries loads them again. `first` >= 0, and kv_len >= 1 may be more or
# less than first + q_len.
#
# **Hint:** three loops: KV heads, tiles of queries, tiles of keys. Between tiles of keys you keep, per query head and
# query, the three values of `online_softmax`.
#
# **Trap (once for a group):** in a loop over query heads, every head loads the same keys again.
#
# **Trap (diagonal):** a query attends to only part of the tile that contains its own key. The tiles after it are not
# loaded.
#
# **Trap (last tile):** key number c of tile j is key j × `block_n` + c. `len(tile)` is smaller in the last tile.


# %% nbgrader={"grade_id": "tiled_attention", "solution": true}
def tiled_attention(hbm, q_len, kv_len, num_heads, num_kv_heads, block_m, block_n, first):
    """Causal attention of tiles loaded from hbm; the output is stored there. Query 0 is at position `first`."""
    ### BEGIN SOLUTION
    group = num_heads // num_kv_heads
    for kv_head in range(num_kv_heads):
        heads = range(kv_head * group, (kv_head + 1) * group)
        for i in range(-(-q_len // block_m)):
            query = torch.stack([hbm.load("q", head, i) for head in heads])  # [group, rows, head_dim]
            position = first + i * block_m + torch.arange(query.shape[1])
            largest = torch.full(query.shape[:2], -math.inf)
            total, acc = torch.zeros(query.shape[:2]), torch.zeros_like(query)
            seen = min(kv_len, int(position[-1]) + 1)  # keys visible to the last query, and so to any
            for j in range(-(-seen // block_n)):
                key, value = hbm.load("k", kv_head, j), hbm.load("v", kv_head, j)
                score = query @ key.T / math.sqrt(query.shape[2])
                visible = j * block_n + torch.arange(len(key)) <= position[:, None]
                score = score.masked_fill(~visible, -math.inf)
                new = torch.maximum(largest, score.amax(-1))  # the first tile has a key for every query: it is finite
                weight, shrink = torch.exp(score - new[..., None]), torch.exp(largest - new)
                total = total * shrink + weight.sum(-1)
                acc = acc * shrink[..., None] + weight @ value
                largest = new
            for number, head in enumerate(heads):
                hbm.store("o", head, i, acc[number] / total[number][:, None])
    ### END SOLUTION


# %% nbgrader={"grade_id": "tiled_checks"}
# Given: how this part's checks test your result.


def run_tiled(
    q_len, kv_len, num_heads, num_kv_heads, head_dim, block_m, block_n, first, generator, factor=1, shift=0, limit=1e-4
):
    """Runs your function on a new memory; returns the memory, the error of o, and where it is."""
    q, k, v = random_qkv(q_len, kv_len, num_heads, num_kv_heads, head_dim, generator)
    q, k = shifted(factor * q, k, shift)
    hbm = HBM(q, k, v, block_m, block_n)
    tiled_attention(hbm, q_len, kv_len, num_heads, num_kv_heads, block_m, block_n, first)
    expected = whole(q, k, v, first)[0]
    return hbm, difference(hbm.tensors["o"], expected), where(hbm.tensors["o"], expected, OF_O, limit)


# %% nbgrader={"grade_id": "check_tiled", "grade": true, "points": 2}
# property: however large or small scores are, o is causal attention, for all lengths, tiles, positions and groups of heads.
# question: Row 2 of the second tile of queries: which query is it, and at which position?
# hint: query i × block_m + r of a tile is at position first + i × block_m + r; key c of tile j is key j × block_n + c.
# explanation: Tiles of 4 queries and 3 keys, first = 5. Row 2 of tile 1 is query 6 at position 11; key 1 of tile 2 is
#   key 7. 7 <= 11, so it is seen. At the ends rows and keys that do not exist fill the tile; they must have no effect.
#   Each query head reads the KV head of its group.
def check_tiles(*shape, generator, factor=1, shift=0, limit=1e-4):
    q_len, kv_len, num_heads, num_kv_heads, _, block_m, block_n, first = shape
    _, off, place = run_tiled(*shape, generator, factor, shift, limit)
    print(f"{q_len} queries from position {first} in tiles of {block_m}, {kv_len} keys in tiles of {block_n}, "
          f"{num_heads}/{num_kv_heads} heads: off by {off:.1e}")  # fmt: skip
    scores = f"queries times {factor}, scores around {shift}, " if factor != 1 or shift else ""
    assert off < limit, (
        f"{q_len} queries from position {first} in tiles of {block_m}, {kv_len} keys in tiles of {block_n}, {scores}"
        f"{num_heads} query and {num_kv_heads} KV heads: o is off by {off:.2g}{place}"
    )


check_tiles(8, 8, 1, 1, 4, 4, 4, 0, generator=rng("tiled"))  # a whole prompt
check_tiles(7, 7, 4, 2, 5, 4, 3, 0, generator=rng("tiled"))  # no size divides another
check_tiles(5, 16, 2, 1, 4, 2, 4, 11, generator=rng("tiled"))  # the last chunk of a prompt
check_tiles(1, 9, 6, 2, 4, 4, 4, 8, generator=rng("tiled"))  # one new token
check_tiles(6, 20, 2, 1, 4, 4, 4, 3, generator=rng("tiled"))  # keys that no query sees
check_tiles(8, 12, 1, 1, 4, 4, 4, 4, generator=rng("tiled"), factor=300, limit=5e-3)  # huge scores
check_tiles(8, 8, 1, 1, 4, 4, 4, 0, generator=rng("tiled"), shift=-20_000, limit=5e-2)  # all far below zero
draw = rng("check_tiled")
check_tiles(random_int(5, 9, draw), 30, 4, 2, 4, 4, 3, random_int(1, 9, draw), generator=draw)
check_tiles(9, random_int(1, 6, draw), 4, 2, 4, 4, 3, random_int(7, 20, draw), generator=draw)
check_tiles(12, 12, 2, 1, 4, 4, 3, 0, generator=draw, factor=random_int(200, 500, draw), limit=5e-3)
check_tiles(6, 9, 2, 1, 4, 4, 3, 3, generator=draw, factor=0, shift=-200_000, limit=0.1)
check_tiles(3, 3, 2, 1, 4, 4, 3, 0, generator=draw, factor=0, shift=-1e20, limit=0.1)
check_tiles(
    12, 12, 2, 1, 4, 4, 3, 0, generator=draw, factor=300_000, limit=0.1
)  # hidden scores are far above visible ones
for _ in range(5):
    q_len, block_m, block_n = random_int(1, 14, draw), random_int(2, 6, draw), random_int(2, 6, draw)
    first, num_kv_heads, group = random_int(0, 9, draw), random_int(1, 2, draw), random_int(1, 3, draw)
    shape = q_len, first + q_len, num_kv_heads * group, num_kv_heads, 3 + group, block_m, block_n, first
    check_tiles(*shape, generator=draw)


# %% nbgrader={"grade_id": "check_traffic", "grade": true, "points": 1}
# property: q is loaded once and o stored once; a tile of k or v once for each tile of queries that sees it.
# question: How often is a tile of keys loaded if 4 query heads share it?
# hint: load k and v for all query heads of a KV head at once, for the tiles up to the last query's own key, and no others.
# explanation: 8 queries from position 0 in tiles of 4, keys in tiles of 4: the first tile of queries needs key tile 0,
#   the second needs 0 and 1. That is 3 loads of k and 3 of v for each KV head, whether it has 1 or 4 query heads, and
#   each tile of q is loaded once. Loading key tile 1 for the first queries, masked, is a load for nothing.
def check_moves(*shape, generator):
    q_len, kv_len, num_heads, num_kv_heads, _, block_m, block_n, first = shape
    hbm, _, _ = run_tiled(*shape, generator)
    expected, q_tiles = Counter(), tiles_for(q_len, block_m)
    expected.update(("q", head, i) for head in range(num_heads) for i in range(q_tiles))
    for i in range(q_tiles):
        last = first + min((i + 1) * block_m, q_len) - 1  # position of the tile's last query
        seen = tiles_for(min(kv_len, last + 1), block_n)
        expected.update((name, g, j) for name in "kv" for g in range(num_kv_heads) for j in range(seen))
    print(f"{q_len} queries from position {first} in tiles of {block_m}, {kv_len} keys in tiles of {block_n}, "
          f"{num_heads}/{num_kv_heads} heads: {sum(hbm.num_loads.values())} loads, {sum(hbm.num_stores.values())} stores, "
          f"{hbm.num_bytes} bytes")  # fmt: skip
    for name, head, i in sorted(expected | hbm.num_loads):
        seen, right = hbm.num_loads[name, head, i], expected[name, head, i]
        assert seen == right, f"tile {i} of {name}, head {head}: expected {right} loads, saw {seen}"
    for head in range(num_heads):
        for i in range(q_tiles):
            seen = hbm.num_stores["o", head, i]
            assert seen == 1, f"tile {i} of o, head {head}: expected 1 store, saw {seen}"


check_moves(8, 8, 1, 1, 4, 4, 4, 0, generator=rng("moves"))
check_moves(6, 10, 4, 2, 4, 2, 4, 4, generator=rng("moves"))
check_moves(6, 20, 2, 1, 4, 4, 4, 3, generator=rng("moves"))
draw = rng("check_traffic")
check_moves(random_int(5, 9, draw), 30, 4, 2, 4, 4, 3, random_int(1, 9, draw), generator=draw)
check_moves(9, random_int(1, 6, draw), 4, 2, 4, 4, 3, random_int(7, 20, draw), generator=draw)
for _ in range(3):
    q_len, block_m, block_n = random_int(5, 14, draw), random_int(2, 4, draw), random_int(2, 4, draw)
    first, num_kv_heads = random_int(0, 9, draw), random_int(1, 2, draw)
    shape = q_len, first + q_len, 2 * num_kv_heads, num_kv_heads, 3, block_m, block_n, first
    check_moves(*shape, generator=draw)
check_moves(5, 9, 2 * random_int(4, 6, draw), 2, 3, 4, 4, 4, generator=draw)

# %% [markdown] nbgrader={"grade_id": "text_bytes"}
# The cell below counts the traffic of your function for one head of 256 tokens, with three tile sizes. Then the
# formulas for the question from the top. A causal prompt moves about half of that. And concurrent programs hit each
# other's keys in the L2 cache, so traffic to device memory is less, down to the 8 MiB of Q, K, V and O.

# %% nbgrader={"grade_id": "bytes"} inferlab={"where": "notebook"}
from reference_impl.theory.attention_traffic import flash2_values, unfused_values

for block in (16, 32, 64):
    hbm, _, _ = run_tiled(256, 256, 1, 1, 32, block, block, 0, rng("bytes"))
    print(f"256 tokens, tiles of {block}: {hbm.num_bytes / 1024:.0f} KiB moved, "
          f"of which q, k, v, o once are {4 * 256 * 32 * 4 / 1024:.0f} KiB")  # fmt: skip
n, d = 8192, 128
print(f"{n} tokens, head_dim {d}, float16: {2 * unfused_values(n, d) / 2**20:.0f} MiB with the scores in memory, "
      f"{2 * flash2_values(n, d, 128) / 2**20:.0f} MiB in tiles of 128 queries, nothing masked")  # fmt: skip

# %% [markdown] nbgrader={"grade_id": "text_merge"}
# ## 3. Merging partial results
#
# One new token over a long context is one query: one program, and most of a GPU's hundred SMs are idle.
# *Flash-Decoding* (Dao et al. 2023) divides the keys into splits that are computed concurrently, then merges. Each
# split returns its weighted mean and its lse.
#
# **Build** `merge_splits(means, lse)`: float32 tensors `means` `[num_splits, q_len, num_heads, head_dim]` and `lse`
# `[num_splits, num_heads, q_len]`. Return `(o, lse)` over all keys: `[q_len, num_heads, head_dim]` and
# `[num_heads, q_len]`.
#
# A split without a key for a query has lse minus infinity, and *anything* as its mean: it was never written. A query
# without any key gets zeros and minus infinity.
#
# **Hint:** the weight of split s is exp(lse[s]) / sum of exp(lse); subtract the largest lse first.
#
# **Trap (nothing times NaN):** uninitialized memory may hold NaN, and 0 × NaN is NaN.
#
# **Trap (all splits empty):** where all splits are empty, the largest lse is minus infinity and the sum is 0.


# %% nbgrader={"grade_id": "merge_splits", "solution": true}
def merge_splits(means, lse):
    """(o, lse) of splits with means [num_splits, q_len, num_heads, head_dim] and lse [num_splits, num_heads, q_len]."""
    ### BEGIN SOLUTION
    largest = lse.amax(0)
    base = largest.masked_fill(largest == -math.inf, 0.0)
    weight = torch.exp(lse - base)  # [num_splits, num_heads, q_len]
    total = weight.sum(0)
    share = weight / total.masked_fill(total == 0, 1.0)
    share = share.transpose(1, 2)[..., None]  # [num_splits, q_len, num_heads, 1]
    o = torch.where(share > 0, share * means, 0.0).sum(0)
    return o, base + torch.log(total)
    ### END SOLUTION


# %% nbgrader={"grade_id": "merge_checks"}
# Given: how this part's checks test your result.


def split_means(q, k, v, sizes):
    """(means, lse) of splits of these sizes, float32, all keys visible; the means of an empty split are NaN."""
    parts = [whole(q, keys, values, len(k)) for keys, values in zip(k.split(sizes), v.split(sizes), strict=True)]
    means = torch.stack(
        [o if size else torch.full_like(o, math.nan) for (o, _), size in zip(parts, sizes, strict=True)]
    )
    return means.float(), torch.stack([lse for _, lse in parts]).float()


def merged(means, lse):
    """What your merge_splits makes of them, as float32: computing in float64 is fine."""
    o, total = pair_of(unchanging(merge_splits)(means.clone(), to_yours(lse.clone())), "merge_splits", means.shape[1:])
    return o.float(), total.float()


def check_merged(q, k, v, sizes, nothing=math.nan, shift=0.0):
    """nothing: what stands in the means of empty splits. shift: added to every lse, and so to the result's."""
    means, lse = split_means(q, k, v, sizes)
    lse += shift
    means[torch.tensor(sizes) == 0] = nothing
    o, total = merged(means, lse)
    expected = whole(q, k, v, len(k))
    off = difference(o, expected[0]), difference(total, expected[1] + shift)
    print(f"{len(k)} keys in splits of {sizes}: o is off by {off[0]:.1e}, lse by {off[1]:.1e}")
    assert off[0] < 1e-4, f"splits of {sizes}: o is off by {off[0]:.2g}{where(o, expected[0], OF_O, 1e-4)}"
    assert off[1] < 1e-5, f"splits of {sizes}: lse is off by {off[1]:.2g}{where(total, expected[1], OF_LSE, 1e-5)}"
    if len(sizes) > 2:
        some, rest = merged(means[:2], lse[:2]), merged(means[2:], lse[2:])
        o, total = merged(*(torch.stack(parts) for parts in zip(some, rest, strict=True)))
        off = max(difference(o, expected[0]), difference(total, expected[1] + shift))
        assert off < 1e-4, f"splits of {sizes}, the first two merged before: off by {off:.2g}"


# %% nbgrader={"grade_id": "check_merge", "grade": true, "points": 1}
# property: merged splits give what all keys together give, o and lse, also for huge scores, and merging can be nested.
# question: Two splits have means 1 and 3: what decides how much each counts?
# hint: weights exp(lse - largest lse); the new lse is largest lse + log(sum of weights).
# explanation: Split a: sum of exps 3, mean 1; b: sum 1, mean 3. Together (3 × 1 + 1 × 3) / 4 = 1.5, and the sum is 4.
#   Of each sum only the logarithm is given, so weights are taken relative to the larger one: 1 and 1/3. Huge values
#   cancel before the exponential; the result is again a mean and an lse, so it can be merged again.
q, k, v = random_qkv(2, 12, 4, 2, 5, rng("merge"))
for sizes in ([12], [5, 7], [1, 3, 6, 2]):
    check_merged(q, k, v, sizes)
check_merged(1000 * q, k, v, [4, 4, 4])  # scores in the thousands
check_merged(q, k, v, [0, 5, 7], shift=-1000.0)  # or below -1000
draw = rng("check_merge")
for factor in (1, 3, 2000):
    sizes = [random_int(1, 8, draw) for _ in range(random_int(2, 5, draw))]
    q, k, v = random_qkv(random_int(1, 3, draw), sum(sizes), 6, random_int(1, 2, draw), random_int(2, 6, draw), draw)
    check_merged(factor * q, k, v, sizes)
q, k, v = random_qkv(1, 70, 2, 1, 3, draw)
check_merged(q, k, v, [1] * 70)
check_merged(0 * q, k, v, [35, 35], shift=-32_768.0)
check_merged(0 * q, k, v, [70, 0], shift=-1e20)


# %% nbgrader={"grade_id": "check_merge_empty", "grade": true, "points": 1}
# property: an empty split changes nothing, whatever its mean; a query without any key gets zeros and minus infinity.
# question: How much does a split with a sum of 0 count, and what is 0 × NaN?
# hint: replace the means of weight 0 before you add; divide by 1 where the sum is 0.
# explanation: A split without keys has an lse of minus infinity, weight 0, and a mean that may be anything. 0 × NaN is
#   NaN, so its mean must be replaced and not only weighted. If all splits are empty, the largest lse is minus infinity
#   too, and the difference of the two is NaN unless it is handled.
q, k, v = random_qkv(2, 6, 2, 1, 3, rng("empty"))
check_merged(q, k, v, [3, 0, 3])
check_merged(q, k, v, [0, 6])
check_merged(q, k, v, [2, 0, 4], nothing=math.inf)


def check_one_without(num_splits, generator):
    """Of two queries the second has no key in any split."""
    means, lse = torch.randn(num_splits, 2, 3, 4, generator=generator), torch.zeros(num_splits, 3, 2)
    means[:, 1], lse[:, :, 1] = math.nan, -math.inf
    o, total = merged(means, lse)
    print(f"{num_splits} splits, nothing in any of them for query 1: o {o[1, 0].tolist()}, lse {total[0].tolist()}")
    off = difference(o[0], means[:, 0].mean(0))
    place = where(o[0], means[:, 0].mean(0), ("head", "column"), 1e-5)
    assert off < 1e-5, (
        f"query 0 has {num_splits} splits of equal weight, and so their mean: o is off by {off:.2g}{place}"
    )
    assert difference(o[1], torch.zeros(3, 4)) == 0, f"a query without keys: expected zeros, saw {o[1].tolist()}"
    assert bool((total[:, 1] == -math.inf).all()), (
        f"a query without keys: expected lse -inf, saw {total[:, 1].tolist()}"
    )


check_one_without(2, rng("empty"))
check_one_without(1, rng("empty"))
draw = rng("check_merge_empty")
for _ in range(3):
    q, k, v = random_qkv(2, 7, 4, 2, 3, draw)
    sizes = [0, random_int(1, 6, draw), 0, 0]
    sizes[2] = 7 - sizes[1]
    check_merged(q, k, v, sizes, nothing=(math.nan, math.inf, 1e30)[sizes[1] % 3])
    check_one_without(random_int(1, 4, draw), draw)

# %% [markdown] nbgrader={"grade_id": "text_kernels"}
# ## 4. Three small kernels
#
# A Triton *kernel* is a function under `@triton.jit`. The GPU runs it many times at once, as *programs*;
# `tl.program_id(0)` is the number of the program that runs. It computes tiles of numbers that it loads from addresses and
# stores to addresses. This one doubles a matrix, tile by tile:
#
# ```python
# @triton.jit
# def double(x, out, rows, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
#     r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # rows of this program
#     c = tl.arange(0, WIDE)  # WIDE is a power of 2, COLUMNS need not be
#     at = r[:, None] * COLUMNS + c[None, :]  # [BLOCK, WIDE]: where in memory, counted from x in numbers
#     there = (r < rows)[:, None] & (c < COLUMNS)[None, :]
#     tile = tl.load(x + at, mask=there, other=0.0)  # 0 where the mask is false; without `other`, anything
#     tl.store(out + at, 2 * tile, mask=there)
# ```
#
# You write kernels; the checks launch them, with a grid and tile sizes that the lab fixes, so a kernel's parameters stay
# as they are. In grading a kernel's text runs in a process of its own, without your other code. It may use `tl`,
# arithmetic, `if`, loops, numbers that you define beside it, and other functions of yours under `@triton.jit`.
#
# You need `tl.load`, `tl.store`, `tl.arange`, `tl.zeros`, `tl.full`, `tl.where`, `tl.maximum`, `tl.max`, `tl.sum`,
# `tl.exp`, `tl.log`, and later `tl.dot`, `tl.trans` and `tile.to(dtype)`. `tl.max(x, 0)` of a tile `[BLOCK]` is one
# number, `tl.max(x, 1)` of `[M, N]` is `[M]`. Sizes of `tl.arange` are powers of 2. A value that a loop changes keeps
# its type: begin with `tl.full([1], float("-inf"), tl.float32)` and not with a Python number.
#
# The checks make the interpreter strict. They reject addresses outside of all tensors of the launch, a tile of 65,536
# numbers or more (as many as a GPU's multiprocessor has registers), and a `tl.dot` over fewer than 16 columns; masked
# elements of a load without `other` are NaN. The message names the line of your kernel. They also count what is loaded
# and stored: each number of a result is stored once, by one program, since a GPU runs programs in any order.
#
# **Build** `softmax_kernel(scores, lengths, out, num_columns, BLOCK)`: the softmax of the rows of a matrix. `scores` and
# `out` are `[num_rows, num_columns]`, contiguous, float32, and program r computes row r. Of row r only the first
# `lengths[r]` columns (int32, 0 to num_columns) are visible: the others get weight 0, whatever their score is, even NaN.
# A row of length 0 gets zeros. BLOCK is a power of 2, at least num_columns.
#
# **Trap (masked score):** a masked column that is loaded as 0 has score 0, not weight 0.


# %% nbgrader={"grade_id": "softmax_kernel", "solution": true}
@triton.jit
def softmax_kernel(scores, lengths, out, num_columns, BLOCK: tl.constexpr):
    """The softmax of row program_id(0) of scores [num_rows, num_columns] over its first lengths[row] columns."""
    ### BEGIN SOLUTION
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    length = tl.load(lengths + row)
    at = row * num_columns + columns
    score = tl.load(scores + at, mask=columns < length, other=float("-inf"))
    base = tl.where(length > 0, tl.max(score, 0), 0.0)  # of no column: exp(-inf - 0) = 0
    weight = tl.exp(score - base)
    total = tl.where(length > 0, tl.sum(weight, 0), 1.0)
    tl.store(out + at, weight / total, mask=columns < num_columns)
    ### END SOLUTION


# %% nbgrader={"grade_id": "small_checks"}
# Given: how the first small kernel is launched.


def stored_once(traffic, *names):
    """Where programs store the same number twice, the result depends on their order, or on luck."""
    for name in names:
        times = traffic.most_stores[name]
        assert times <= 1, f"each number of {name} is stored once, by one program: saw one stored {times} times"


def check_rows(lengths, num_columns, generator, factor=1.0, shift=0.0):
    scores = shift + factor * torch.randn(len(lengths), num_columns, generator=generator)
    for row, length in enumerate(lengths):
        scores[row, length:] = 1e30 if row % 2 else math.nan
    out, counts = torch.full_like(scores, math.nan), torch.tensor(lengths, dtype=torch.int32)
    constants = {"BLOCK": power_of_2(num_columns)}
    traffic = launch(softmax_kernel, (len(lengths),), constants, scores=scores.clone(), lengths=counts, out=out,
                     num_columns=num_columns)  # fmt: skip
    expected = torch.zeros(scores.shape, dtype=torch.float64)
    for row, length in enumerate(lengths):
        expected[row, :length] = scores[row, :length].double().softmax(-1)
    off, limit = (
        difference(out, expected),
        1e-5 + 1e-6 * min(abs(shift) + factor, 1e5),
    )  # large float32 scores are coarse
    print(f"{num_columns} columns, lengths {lengths}, scores {shift:g} ± {factor:g}: off by {off:.1e}")
    place = where(out, expected, ("row", "column"), limit)
    assert off < limit, f"{num_columns} columns, lengths {lengths}: off by {off:.2g}{place}"
    stored_once(traffic, "out")


# %% nbgrader={"grade_id": "check_softmax_kernel", "grade": true, "points": 1}
# property: each row's softmax over its first lengths[row] columns, 0 elsewhere, zeros for a row of length 0; scores may be
#   far above or below 0, and num_columns need not be a power of 2.
# question: What is the largest score of a row in which no column is visible?
# hint: load with mask=columns < length and other=-inf; subtract 0 instead of the largest where length is 0, and divide by
#   1 there; store all num_columns columns.
# explanation: Length 3 of 5 columns, BLOCK 8: columns 3 and 4 are stored as 0, columns 5 to 7 belong to the next row and
#   are not stored. Loaded as -inf, a masked score gives exp(-inf - largest) = 0. With length 0 the largest is -inf, and
#   -inf - (-inf) is NaN.
check_rows([5, 3, 1], 5, rng("softmax"))
check_rows([8, 0, 4, 8], 8, rng("softmax"), factor=30.0)
check_rows([3, 2], 3, rng("softmax"), shift=-20_000.0)  # all far below zero
check_rows([3, 2], 3, rng("softmax"), factor=0.0, shift=-200_000.0)
draw = rng("check_softmax_kernel")
for shift in (0.0, 300.0, -300.0, -30_000.0):
    num_columns = random_int(2, 70, draw)
    check_rows([0, 1, num_columns, random_int(0, num_columns, draw)], num_columns, draw, 5.0, shift)
check_rows([random_int(20, 30, draw)] * 3, 30, draw, 300.0)  # scores far from one another
check_rows([3, 2], 5, draw, 0.0, -1e20)
check_rows([1, 0], 1, draw)
check_rows([64, 63, 33, 32], 64, draw)

# %% [markdown] nbgrader={"grade_id": "text_lse_kernel"}
# A row may be longer than a tile. **Build** `lse_kernel(scores, out, num_columns, BLOCK)`: `out[r]` is the log-sum-exp of
# row r of `scores` `[num_rows, num_columns]`. Program r goes through its row in tiles of BLOCK columns and loads every
# score once. Scores of minus infinity count nothing; a row that has no other gets minus infinity.
#
# **Hint:** it is `online_softmax` without values: a largest score and a sum, and the sum shrinks when the largest grows.


# %% nbgrader={"grade_id": "lse_kernel", "solution": true}
@triton.jit
def lse_kernel(scores, out, num_columns, BLOCK: tl.constexpr):
    """The log-sum-exp of row program_id(0) of scores [num_rows, num_columns], in tiles of BLOCK columns."""
    ### BEGIN SOLUTION
    row, lane = tl.program_id(0), tl.arange(0, 1)
    largest, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        score = tl.load(scores + row * num_columns + columns, mask=columns < num_columns, other=float("-inf"))
        new = tl.maximum(largest, tl.max(score, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(score - base), 0)
        largest = new
    tl.store(out + row + lane, largest + tl.log(total))
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_lse_kernel", "grade": true, "points": 1}
# property: the log-sum-exp of each row, however many tiles it has; every score is loaded once; minus infinity counts
#   nothing.
# question: What must be carried from one tile to the next, and what happens to it when a larger score comes?
# hint: begin with minus infinity and 0; total = total * exp(old - new) + sum(exp(score - new)), with 0 for new while it is
#   minus infinity; the last tile's columns end at num_columns.
# explanation: Scores [1, 3] in tiles of one: after the first tile largest 1 and sum 1; then the sum shrinks by exp(1 - 3) =
#   0.135 and the new score adds 1: 1.135, and the result is 3 + log(1.135) = 3.127. A second pass over the row would
#   load every score twice.
def check_lse(scores, block):
    out = torch.full((len(scores),), math.nan)
    traffic = launch(lse_kernel, (len(scores),), {"BLOCK": block}, scores=scores.clone(), out=out,
                     num_columns=scores.shape[1])  # fmt: skip
    expected = scores.double().logsumexp(-1)
    off, times = difference(out, expected), traffic.most_loads["scores"]
    what = f"{len(scores)} rows of {scores.shape[1]} scores in tiles of {block}"
    print(f"{what}: off by {off:.1e}, {traffic.loads['scores']} scores loaded, one at most {times} times")
    assert off < 1e-5, f"{what}: off by {off:.2g}{where(out, expected, ('row',), 1e-5)}"
    assert times <= 1, f"{what}: every score is loaded once, a program loaded one {times} times"
    stored_once(traffic, "out")


def random_scores(num_rows, num_columns, generator, factor=1.0, shift=0.0):
    return shift + factor * torch.randn(num_rows, num_columns, generator=generator)


check_lse(random_scores(3, 40, rng("lse")), 16)
check_lse(random_scores(2, 32, rng("lse"), shift=-20_000.0), 16)
check_lse(random_scores(2, 20, rng("lse"), factor=0.0, shift=-200_000.0), 16)
check_lse(torch.tensor([[-math.inf] * 16 + [1.0, -math.inf], [-math.inf] * 18]), 16)
draw = rng("check_lse_kernel")
for block in (1, 16, 64):
    check_lse(random_scores(2, random_int(2, 5, draw) * block + random_int(0, block - 1, draw), draw, 30.0), block)
check_lse(random_scores(2, 33, draw), 16)  # one column in the last tile
check_lse(random_scores(2, 140, draw), 2)
check_lse(random_scores(2, 20, draw, 0.0, -1e20), 16)
check_lse(random_scores(2, 40, draw, 1.0, 20_000.0), 8)
check_lse(random_scores(2, random_int(1, 15, draw), draw), 16)
ordered = torch.arange(50.0)[None] * random_int(2, 9, draw)
check_lse(torch.cat([ordered, ordered.flip(1)]), 8)
masked = random_scores(4, 30, draw)
masked[0, :17], masked[1, :26], masked[2, 9:], masked[3] = [-math.inf] * 4
check_lse(masked, 8)

# %% [markdown] nbgrader={"grade_id": "text_tile_kernel"}
# **Build** `tile_kernel(q, k, v, o, q_len, kv_len, first, scale, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D)`: attention of one
# head in one program, all queries in one tile `[BLOCK_M, BLOCK_D]` and all keys in another `[BLOCK_N, BLOCK_D]`.
# `q`, `o` `[q_len, HEAD_DIM]` and `k`, `v` `[kv_len, HEAD_DIM]` are contiguous, float32. Query i is at position first + i
# and sees the keys j <= first + i; `first` >= 0, so that each sees one. A score is q·k × scale. 1 <= q_len <= BLOCK_M,
# 1 <= kv_len <= BLOCK_N, HEAD_DIM <= BLOCK_D; the blocks are powers of 2, at least 16.
#
# `tl.dot(a, b)` multiplies `[M, K]` by `[K, N]`. On a GPU it rounds float32 to 11 bits, which `input_precision="ieee"`
# prevents, and `check_compiles` expects. Of `tl.sum(a[:, :, None] * b[None, :, :], 1)` the compiler makes the same
# product, rounded. `tl.trans(tile)` transposes.
#
# **Trap (out of bounds):** a tile's last rows may be beyond the end of the tensor. Reading and writing there hits other
# memory.


# %% nbgrader={"grade_id": "tile_kernel", "solution": true}
@triton.jit
def tile_kernel(
    q, k, v, o,  # pointers
    q_len, kv_len, first, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Causal attention of one head: all queries in one tile, all keys in one tile, one program."""
    ### BEGIN SOLUTION
    m, n, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    at_q, at_kv = m[:, None] * HEAD_DIM + d[None, :], n[:, None] * HEAD_DIM + d[None, :]
    in_q = (m < q_len)[:, None] & (d < HEAD_DIM)[None, :]
    in_kv = (n < kv_len)[:, None] & (d < HEAD_DIM)[None, :]
    query = tl.load(q + at_q, mask=in_q, other=0.0)
    key, value = tl.load(k + at_kv, mask=in_kv, other=0.0), tl.load(v + at_kv, mask=in_kv, other=0.0)
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    visible = (n < kv_len)[None, :] & (n[None, :] <= first + m[:, None])
    score = tl.where(visible, score, float("-inf"))
    weight = tl.exp(score - tl.max(score, 1)[:, None])
    out = tl.dot(weight, value, input_precision="ieee") / tl.sum(weight, 1)[:, None]
    tl.store(o + at_q, out, mask=in_q)
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_tile_kernel", "grade": true, "points": 1}
# property: causal attention of one head, for any q_len, kv_len and HEAD_DIM that fit in the tiles, any first >= 0, and
#   however large or small scores are.
# question: Row 9 of a tile of 16 queries, when there are 7: what does it load, and what does it store?
# hint: three masks: queries < q_len, keys < kv_len, columns < HEAD_DIM, in loads and the store; a key is visible if it is
#   below kv_len and <= first + query.
# explanation: 7 queries from position 3 over 10 keys, tiles of 16: keys 10 to 15 do not exist, so their scores are -inf,
#   and query 0 sees keys 0 to 3. Queries 7 to 15 are computed and not stored. Columns from HEAD_DIM to BLOCK_D are the next
#   row's memory.
def check_tile(
    q_len, kv_len, head_dim, first, generator, block_m=16, block_n=16, factor=1, shift=0, limit=1e-4, scale=1.0
):  # fmt: skip
    """scale: that of the launch, where 1 is 1 / sqrt(head_dim)."""
    q, k, v = random_qkv(q_len, kv_len, 1, 1, head_dim, generator)
    q, k = shifted(factor * q, k, shift)
    o = torch.full_like(q, math.nan)
    constants = {"HEAD_DIM": head_dim, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": power_of_2(head_dim, 16)}
    traffic = launch(tile_kernel, (1,), constants, q=q.clone(), k=k.clone(), v=v.clone(), o=o, q_len=q_len, kv_len=kv_len,
           first=first, scale=scale / math.sqrt(head_dim))  # fmt: skip
    expected = whole(scale * q, k, v, first)[0]
    off = difference(o, expected)
    what = f"{q_len} queries from position {first}, {kv_len} keys, head_dim {head_dim}"
    what += f", a scale of {scale:g} / sqrt({head_dim})" if scale != 1 else ""
    what += f", queries times {factor}, scores around {shift}" if factor != 1 or shift else ""
    print(f"{what}: off by {off:.1e}")
    assert off < limit, f"{what}: off by {off:.2g}{where(o, expected, OF_O, limit)}"
    stored_once(traffic, "o")


check_tile(16, 16, 16, 0, rng("tile"))
check_tile(7, 10, 5, 3, rng("tile"))
check_tile(3, 16, 16, 2, rng("tile"))  # keys that no query sees
check_tile(9, 5, 16, 3, rng("tile"))  # positions of keys that do not exist
check_tile(16, 16, 16, 0, rng("tile"), factor=300, limit=5e-3)  # huge scores
draw = rng("check_tile_kernel")
check_tile(1, 1, 1, 0, draw)
check_tile(16, 16, 16, 0, draw, scale=random_int(2, 4, draw) / 8)  # the scale is what the launch says
check_tile(random_int(9, 16, draw), 8, 16, 0, draw)
check_tile(5, 3, 16, 4, draw)
check_tile(10, 20, 16, 12, draw, 16, 32)
check_tile(20, 10, 16, 0, draw, 32, 16)
check_tile(16, 16, 16, 0, draw, shift=-20_000, limit=5e-2)
check_tile(9, 9, 16, 0, draw, factor=0, shift=-200_000)
check_tile(9, 9, 16, 0, draw, factor=0, shift=-1e20)
check_tile(16, 16, 16, 0, draw, factor=300_000, limit=0.1)  # hidden scores are far above visible ones
check_tile(random_int(1, 16, draw), 16, random_int(17, 40, draw), random_int(0, 20, draw), draw)
check_tile(16, random_int(17, 31, draw), 16, random_int(0, 9, draw), draw, 16, 32)
check_tile(random_int(17, 31, draw), random_int(1, 15, draw), 16, 0, draw, 32, 16, factor=200)

# %% [markdown] nbgrader={"grade_id": "text_kernel"}
# ## 5. The whole kernel
#
# **Build** `flash_kernel`: the small kernels together, for all heads and any number of keys. Program (t, h) computes the
# BLOCK_M queries from t × BLOCK_M on of query head h, with the loop over tiles of BLOCK_N keys from part 2. The given
# function `attention(q, k, v, first)` launches it:
#
# - q, k, v as in the table at the top, of one dtype, float32 or float16, each contiguous; `q_stride` and `kv_stride` are
#   the numbers from one token to the next. GROUP is num_heads // num_kv_heads.
# - `o` has the dtype of q, `lse` `[num_heads, q_len]` is float32. Scores, sums and the weighted sum of values are float32
#   in any case. float32 is not rounded before it is multiplied, and float16 is not widened: each `tl.dot` multiplies
#   two tiles of the dtype of q, so weights are rounded to it.
# - Any q_len >= 1, kv_len >= 0, head_dim >= 1, and any `first`, even negative. A query without visible keys gets zeros,
#   and minus infinity for its lse.
# - BLOCK_M and BLOCK_N are powers of 2, at least 16, and need not be equal. BLOCK_D is a power of 2, at least 16 and at
#   least HEAD_DIM.
# - No program loads a number of q, k or v twice, nor a tile of keys that none of its queries sees, and each number of o
#   and lse is stored once, by one program.
#
# Chapter 05b, section 3, has two kernels to learn from, and chapter 05a, section 4, the loop of the engine's own.
#
# **Hint:** first all keys in one tile; then the loop; then the heads.
#
# **Trap (masked keys):** a key that the mask filled with zeros has score 0, not weight 0.
#
# **Trap (tile for head_dim):** BLOCK_D is a power of 2 and head_dim may be 40. The memory has rows of 40.
#
# **Trap (float16 overflow):** float16 ends at 65,504. Sums of values soon exceed it.
#
# **Trap (no visible keys):** with `first` = -2, queries 0 and 1 have no visible key, and their sum is 0.


# %% nbgrader={"grade_id": "flash_kernel", "solution": true}
@triton.jit
def flash_kernel(
    q, k, v, o, lse,  # pointers
    q_len, kv_len, first, scale,
    q_stride, kv_stride,  # from one token to the next
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_M queries of one head: program (tile of queries, head)."""
    ### BEGIN SOLUTION
    start, head = tl.program_id(0) * BLOCK_M, tl.program_id(1)
    m, d = start + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    at_q = m[:, None] * q_stride + head * HEAD_DIM + d[None, :]
    in_q = (m < q_len)[:, None] & (d < HEAD_DIM)[None, :]
    query = tl.load(q + at_q, mask=in_q, other=0.0)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    end = tl.minimum(kv_len, first + tl.minimum(q_len, start + BLOCK_M))  # no query of the tile sees a later key
    for n_start in range(0, end, BLOCK_N):
        n = n_start + tl.arange(0, BLOCK_N)
        at_kv = n[:, None] * kv_stride + head // GROUP * HEAD_DIM + d[None, :]
        in_kv = (n < kv_len)[:, None] & (d < HEAD_DIM)[None, :]
        key = tl.load(k + at_kv, mask=in_kv, other=0.0)
        value = tl.load(v + at_kv, mask=in_kv, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale  # [BLOCK_M, BLOCK_N]
        visible = (n < kv_len)[None, :] & (n[None, :] <= first + m[:, None])
        score = tl.where(visible, score, float("-inf"))
        new = tl.maximum(largest, tl.max(score, 1))
        base = tl.where(new == float("-inf"), 0.0, new)  # nothing seen yet: exp(-inf - 0) = 0
        weight, shrink = tl.exp(score - base[:, None]), tl.exp(largest - base)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        largest = new
    divisor = tl.where(total > 0, total, 1.0)
    tl.store(o + at_q, (acc / divisor[:, None]).to(o.dtype.element_ty), mask=in_q)
    at_lse = head * q_len + m  # of the natural logarithm
    tl.store(lse + at_lse, largest + tl.log(divisor), mask=m < q_len)
    ### END SOLUTION


# %% nbgrader={"grade_id": "attention"}
# Given: what launches your kernel.


def attention(q, k, v, first, block_m=64, block_n=64, traffic=None):
    """(o, lse) of causal attention by your kernel; query 0 is at position `first`. TypeError for other dtypes.

    q [q_len, num_heads, head_dim], k and v [kv_len, num_kv_heads, head_dim], float32 or float16; o like q. traffic: a
    list, to which what the launch loaded and stored is added.
    """
    if q.dtype not in (torch.float32, torch.float16):
        raise TypeError(f"expected float32 or float16, got {q.dtype}: the interpreter computes bfloat16 wrongly")
    (q_len, num_heads, head_dim), (kv_len, num_kv_heads, _) = q.shape, k.shape
    o = torch.full_like(q, math.nan)
    lse = torch.full((num_heads, q_len), math.nan, device=q.device)
    constants = {
        "GROUP": num_heads // num_kv_heads, "HEAD_DIM": head_dim, "BLOCK_M": block_m, "BLOCK_N": block_n,
        "BLOCK_D": power_of_2(head_dim, 16),
    }  # fmt: skip
    counted = launch(
        flash_kernel, (tiles_for(q_len, block_m), num_heads), constants, q=q, k=k, v=v, o=o, lse=lse, q_len=q_len,
        kv_len=kv_len, first=first, scale=1 / math.sqrt(head_dim), q_stride=num_heads * head_dim,
        kv_stride=num_kv_heads * head_dim,
    )  # fmt: skip
    if traffic is not None:
        traffic.append(counted)
    return o, lse


# %% nbgrader={"grade_id": "kernel_checks"}
# Given: how this part's checks test your result.


def check_attention(
    q_len, kv_len, num_heads, num_kv_heads, head_dim, first, generator, dtype=torch.float32, factor=1, limit=1e-4,
    blocks=(64, 64), shift=0.0,
):  # fmt: skip
    """first: None lets every query attend to all keys. factor: scales queries, and so scores. shift: added to every
    score, by one more column."""
    q, k, v = random_qkv(q_len, kv_len, num_heads, num_kv_heads, head_dim, generator, dtype)
    (q, k), at = shifted(factor * q, k, shift), kv_len if first is None else first
    traffic, expected = [], whole(q, k, v, at)
    o, lse = pair_of(attention(q.clone(), k.clone(), v.clone(), at, *blocks, traffic), "attention", q.shape)
    off = difference(o, expected[0]), difference(lse, expected[1])
    what = (
        f"{q_len} queries{'' if first is None else f' from position {first}'}, {kv_len} keys, "
        f"{num_heads}/{num_kv_heads} heads of {head_dim}{'' if factor == 1 else f', queries times {factor}'}"
        f"{'' if not shift else f', scores around {shift:g}'}, tiles of {blocks[0]} and {blocks[1]}"
    )
    print(f"{what}: o is off by {off[0]:.1e}, lse by {off[1]:.1e}")
    assert off[0] < limit, f"{what}: o is off by {off[0]:.2g}{where(o, expected[0], OF_O, limit)}"
    assert off[1] < limit, f"{what}: lse is off by {off[1]:.2g}{where(lse, expected[1], OF_LSE, limit)}"
    stored_once(traffic[0], "o", "lse")


# %% nbgrader={"grade_id": "check_kernel", "grade": true, "points": 2}
# property: o and lse are those of attention over all keys, however many, for every head and any tiles, however large or
#   small scores are.
# question: What must be carried from one tile of keys to the next?
# hint: scale scores by 1 / sqrt(head_dim); head h reads KV head h // GROUP; shrink sum and acc when the largest grows; the
#   keys of a long context are many tiles; BLOCK_M and BLOCK_N are what the launch says.
# explanation: A context of several tiles: after each the largest may grow, and then sum and accumulated values shrink
#   by the same factor, exp(old - new). Scores [1] in tile 0 and [3] in tile 1: sum 1 × 0.135 + 1 = 1.135. A code that
#   keeps the old factor has 1 + 7.389 relative to the old largest, which is the same number until exp overflows. With 6
#   query and 2 KV heads, head 4 reads KV head 1.
check_attention(64, 64, 1, 1, 16, None, rng("kernel"))
check_attention(64, 128, 4, 2, 16, None, rng("kernel"))
check_attention(64, 128, 1, 1, 16, None, rng("kernel"), factor=300, limit=5e-3)
check_attention(64, 2112, 1, 1, 16, None, rng("kernel"))  # too many keys for one tile
check_attention(32, 64, 6, 2, 16, None, rng("kernel"), blocks=(16, 32))
check_attention(16, 32, 1, 1, 16, None, rng("kernel"), shift=-20_000.0, limit=5e-2)  # all far below zero
draw = rng("check_kernel")
check_attention(64, 64 * random_int(2, 3, draw), 2, 1, 32, None, draw)
check_attention(64, 192, 2, 2, 16, None, draw, factor=random_int(50, 500, draw), limit=5e-3)
check_attention(64, 64, 2 * random_int(2, 3, draw), 2, 128, None, draw, blocks=(32, 16))
check_attention(16, 96, 3, 3, 16, None, draw, blocks=(16, 16), shift=-30_000.0, limit=5e-2)
check_attention(16, 96, 1, 1, 16, None, draw, blocks=(16, 32), shift=300.0, limit=5e-3)
check_attention(16, 32, 1, 1, 16, None, draw, blocks=(16, 16), factor=0, shift=-200_000.0, limit=5e-2)
check_attention(16, 48, 16, 2, 16, None, draw, blocks=(16, 16))
check_attention(16, 1056 + random_int(0, 15, draw), 1, 1, 16, None, draw, blocks=(16, 16))
q, k, v = torch.ones(1, 1, 16), torch.zeros(3000, 1, 16), torch.full((3000, 1, 16), 100.0)
k[17], v[17] = 2.5, 0.0  # one score of 10, and many of 0 that weigh something together
seen, mean = attention(q, k, v, 3000)[0], 2999 * 100 / (2999 + math.exp(10))
off = difference(seen, q * 0 + mean)
assert off < 1e-4, f"one score of 10 and 2,999 of 0: the mean is {mean:.4f}, saw {float(seen[0, 0, 0]):.4f}"


# %% nbgrader={"grade_id": "check_ragged", "grade": true, "points": 2}
# property: lengths and head_dim are what they are: no multiple of a tile, no power of 2, down to 1; with several tiles of
#   queries, too.
# question: A tile has 16 rows and 5 are left: what do the other 11 load, and what do they store?
# hint: each load and store of q and o needs query < q_len and column < HEAD_DIM, each load of k and v needs key < kv_len
#   and column < HEAD_DIM, and a key >= kv_len has score -inf. Give `other=0.0` to the loads: what a mask leaves out is
#   anything, and 0 × NaN is NaN.
# explanation: head_dim 5 in a tile of 16 columns: columns 5 to 15 lie in the next rows' memory. Loaded unmasked they enter
#   every score; stored unmasked they overwrite the neighbour's output. The same holds for queries behind q_len and keys
#   behind kv_len. A masked load needs a value to stand in, or what is there is arbitrary, and 0 × NaN is NaN.
check_attention(3, 70, 2, 1, 24, None, rng("ragged"))
check_attention(70, 5, 1, 1, 40, None, rng("ragged"))
check_attention(1, 1, 2, 2, 5, None, rng("ragged"))
check_attention(21, 37, 2, 1, 5, None, rng("ragged"), blocks=(16, 32))
draw = rng("check_ragged")
check_attention(random_int(65, 100, draw), random_int(130, 190, draw), 1, 1, random_int(17, 31, draw), None, draw)
check_attention(random_int(1, 15, draw), random_int(1, 31, draw), 4, 2, random_int(1, 15, draw), None, draw)
check_attention(1, random_int(100, 127, draw), 2, 1, random_int(65, 120, draw), None, draw)
check_attention(16 + random_int(1, 15, draw), 32 + random_int(1, 31, draw), 2, 2, 3, None, draw, blocks=(16, 32))
check_attention(33, 17, 1, 1, 129, None, draw, blocks=(32, 16))
check_attention(4, 8, 2, 2, 1, None, draw, blocks=(16, 16))


# %% nbgrader={"grade_id": "check_causal", "grade": true, "points": 1}
# property: query i sees the keys up to first + i, in every tile, also where there are more keys, or fewer, and however
#   large or small scores are; one that sees
#   none gets zeros and minus infinity.
# question: Which keys does query 0 see if first is -2?
# hint: key number <= first + query number; where the sum is 0, divide by 1.
# explanation: first = 3: query 0 sees keys 0-3, query 1 sees 0-4. first = -2: queries 0 and 1 see no key, query 2 sees
#   key 0. For a query without any key the sum is 0 and the largest minus infinity: 0 / 0 is NaN, and the result must be
#   zeros and minus infinity.
check_attention(40, 40, 2, 1, 16, 0, rng("causal"))  # a whole prompt
check_attention(7, 77, 2, 1, 16, 70, rng("causal"))  # its last chunk
check_attention(130, 300, 1, 1, 16, 1, rng("causal"))  # several tiles, and keys that nothing sees
check_attention(1, 40, 1, 1, 16, 7, rng("causal"))
check_attention(64, 64, 1, 1, 16, 0, rng("causal"), blocks=(64, 16))
check_attention(16, 16, 1, 1, 16, 0, rng("causal"), factor=300, limit=5e-3, blocks=(16, 16))
check_attention(6, 4, 1, 1, 8, -2, rng("causal"))  # queries 0 and 1 see nothing
check_attention(2, 0, 1, 1, 8, 5, rng("causal"))  # there are no keys
draw = rng("check_causal")
q_len, first = random_int(65, 90, draw), random_int(1, 40, draw)
check_attention(q_len, q_len + first, 1, 1, random_int(9, 20, draw), first, draw)
check_attention(random_int(129, 150, draw), random_int(257, 300, draw), 1, 1, 16, random_int(1, 60, draw), draw)
check_attention(
    random_int(33, 60, draw), random_int(70, 99, draw), 2, 1, 8, random_int(1, 9, draw), draw, blocks=(16, 32)
)
check_attention(random_int(20, 40, draw), random_int(3, 9, draw), 2, 2, 6, -random_int(1, 12, draw), draw)
check_attention(40, 60, 2, 1, 6, -random_int(17, 30, draw), draw, blocks=(16, 16))  # tiles that see nothing
check_attention(3, random_int(1, 9, draw), 2, 1, 4, -random_int(3, 90, draw), draw)  # no visible keys
check_attention(20, 30, 1, 1, 16, random_int(31, 99, draw), draw)  # fewer keys than positions
check_attention(20, 20, 1, 1, 16, 0, draw, blocks=(16, 16), shift=-20_000.0, limit=5e-2)
check_attention(16, 16, 1, 1, 16, 0, draw, blocks=(16, 16), factor=0, shift=-1e20, limit=5e-2)
check_attention(20, 20, 1, 1, 16, 0, draw, blocks=(16, 16), factor=300_000, limit=0.1)  # hidden scores far above
check_attention(20, 20, 1, 1, 16, 0, draw, blocks=(16, 16), factor=random_int(200, 500, draw), limit=5e-3)


# %% nbgrader={"grade_id": "check_half", "grade": true, "points": 1}
# property: float16 goes in and out, float32 in between: scores, sums and the weighted sum of values.
# question: In float16, what is 300 × 300?
# hint: scores, acc and sums are tl.float32, so scale the scores and not q; weights become float16 only to be multiplied.
# explanation: float16 ends at 65,504, so a score of 90,000 is infinite in it; and a sum of 4,096 ones stops at 2,048,
#   because 2,048 + 1 rounds back. Scores, sums and the accumulator are therefore float32, and only what goes out is
#   float16.
def check_sum(num_keys, size, blocks=(64, 64)):
    """All keys have equal weight, and all values are `size`: so is their mean, while their sum exceeds float16."""
    q, k, v = torch.zeros(1, 1, 16), torch.zeros(num_keys, 1, 16), torch.full((num_keys, 1, 16), float(size))
    o, lse = pair_of(attention(*(t.half() for t in (q, k, v)), num_keys, *blocks), "attention", q.shape)
    print(f"{num_keys} values of {size}: their mean is {float(o[0, 0, 0]):g}, lse {float(lse[0, 0]):.5f}")
    assert difference(o, q + size) < 2e-3, f"the mean of {num_keys} values {size}: saw {float(o[0, 0, 0])}"
    off = abs(float(lse[0, 0]) - math.log(num_keys))
    assert off < 5e-5, f"{num_keys} scores of 0: lse is {math.log(num_keys):.5f}, saw {float(lse[0, 0]):.5f}"


def check_fine(num_keys, head_dim=16):
    """Scores from 256 in steps of 1/64, which float16 cannot represent; the value is the key's number / 64."""
    steps = torch.arange(num_keys) / 64
    q, k = torch.full((1, 1, head_dim), 256 / math.sqrt(head_dim)), torch.ones(num_keys, 1, head_dim)
    k[:, 0, 0] += steps * head_dim / 256
    q, k, v = q.half(), k.half(), steps.half()[:, None, None].expand(-1, 1, head_dim).contiguous()
    o, lse = pair_of(attention(q, k, v, num_keys), "attention", q.shape)
    scores = (k[:, 0].double() @ q[0, 0].double()) / math.sqrt(head_dim)
    mean, top = float(scores.softmax(0) @ v[:, 0, 0].double()), float(scores.logsumexp(0))
    print(
        f"scores from 256 to {256 + float(steps[-1]):g}: the mean is {float(o[0, 0, 0]):.4f}, lse {float(lse[0, 0]):.4f}"
    )
    assert difference(o, q * 0 + mean) < 2e-3, (
        f"{num_keys} scores from 256 in steps of 1/64: the mean is {mean:.4f}, saw {float(o[0, 0, 0]):.4f}"
    )
    assert abs(float(lse[0, 0]) - top) < 1e-3, (
        f"{num_keys} scores from 256 in steps of 1/64: lse is {top:.4f}, saw {float(lse[0, 0]):.4f}"
    )


check_attention(20, 70, 2, 1, 32, 50, rng("half"), dtype=torch.float16, limit=2e-3)
check_sum(64, 3000)
check_sum(3001, 1)  # a long sum
check_fine(64)
draw = rng("check_half")
check_attention(9, 33, 1, 1, 20, None, draw, dtype=torch.float16, factor=20, limit=2e-3)
check_attention(33, 40, 1, 1, 128, 7, draw, dtype=torch.float16, limit=2e-3, blocks=(16, 32))
check_sum(random_int(40, 60, draw), random_int(2500, 3500, draw))
check_sum(2 * random_int(1500, 2000, draw) + 1, random_int(20, 40, draw))
check_attention(16, 32, 1, 1, 16, None, draw, dtype=torch.float16, shift=100_000.0, limit=5e-2, blocks=(16, 16))
steps = torch.ones(4096, 1, 16).half()
steps[2048:] = 1.01  # small steps of a mean
seen = attention(torch.zeros(1, 1, 16).half(), torch.zeros(4096, 1, 16).half(), steps, 4096)[0]
mean = float(steps.double().mean())
off = difference(seen, torch.full((1, 1, 16), mean))
assert off < 2e-3, f"the mean of 4,096 values is {mean:.5f}, saw {float(seen[0, 0, 0]):.5f}"
check_fine(random_int(50, 100, draw))
check_fine(random_int(50, 100, draw), random_int(65, 120, draw))
check_sum(2 * random_int(1100, 1400, draw) + 1, 20, blocks=(16, 32))


# %% nbgrader={"grade_id": "check_loads", "grade": true, "points": 1}
# property: no program loads a number of q, k or v twice, nor a tile of keys that none of its queries sees; o and lse are
#   right.
# question: How many tiles of keys does the first tile of queries of a long prompt see?
# hint: the loop over keys ends at the smaller of kv_len and first + the tile's last query + 1; k and v are loaded in it,
#   once each, and q before it.
# explanation: 32 queries from position 0 in tiles of 16, keys in tiles of 16: program 0 loads tile 0 of k and v, program 1
#   loads tiles 0 and 1. A kernel that loops over all keys and masks them gives the same numbers and loads more, and one
#   that goes twice over the keys, first for the largest score, loads each key twice.
def check_loads(q_len, kv_len, first, blocks, generator, head_dim=16):
    q, k, v = random_qkv(q_len, kv_len, 2, 1, head_dim, generator)
    traffic, expected = [], whole(q, k, v, first)
    o, lse = pair_of(attention(q.clone(), k.clone(), v.clone(), first, *blocks, traffic), "attention", q.shape)
    what = (
        f"{q_len} queries from position {first}, {kv_len} keys, 2/1 heads of {head_dim}, tiles of {blocks[0]} and "
        f"{blocks[1]}"
    )
    off = difference(o, expected[0]), difference(lse, expected[1])
    assert off[0] < 1e-4, f"{what}: o is off by {off[0]:.2g}{where(o, expected[0], OF_O, 1e-4)}"
    assert off[1] < 1e-4, f"{what}: lse is off by {off[1]:.2g}{where(lse, expected[1], OF_LSE, 1e-4)}"
    allowed = 0
    for start in range(0, q_len, blocks[0]):
        seen = max(0, min(kv_len, first + min(q_len, start + blocks[0])))  # keys that the tile's last query sees
        allowed += 2 * head_dim * min(kv_len, tiles_for(seen, blocks[1]) * blocks[1])
    counted = traffic[0]
    print(f"{what}: {counted.loads['k']} numbers of k loaded, {counted.loads['v']} of v; allowed {allowed} each")
    for name in "qkv":
        times = counted.most_loads[name]
        assert times <= 1, f"{what}: a program loaded the same number of {name} {times} times, expected once"
    for name in "kv":
        seen = counted.loads[name]
        assert seen <= allowed, (
            f"{what}: {seen} numbers of {name} were loaded, at most {allowed} are in tiles that are seen"
        )


check_loads(64, 64, 0, (16, 16), rng("loads"))
check_loads(20, 50, 10, (16, 16), rng("loads"))
draw = rng("check_loads")
check_loads(48, 48 + random_int(0, 40, draw), 0, (16, 16), draw)
check_loads(random_int(33, 48, draw), 99, random_int(1, 40, draw), (16, 32), draw)
check_loads(random_int(33, 48, draw), 64, 0, (32, 16), draw)
check_loads(40, 40, -20, (16, 16), draw)
check_loads(20, 40, 20, (16, 16), draw, head_dim=32)


# %% nbgrader={"grade_id": "check_compiles", "grade": true, "points": 1}
# property: a kernel whose o is right compiles for an A100, which need not be here, in float16 with heads of 64, which its
#   tensor cores multiply, and in float32, which it does not round before it multiplies; neither does tile_kernel.
# question: What does the compiler say, and in which line? What does tl.dot do to float32 on a GPU, and what to float16?
# hint: the interpreter accepts more than the compiler does. A value that a loop changes keeps its type and shape, both
#   sides of an `if` give a name the same type, there is no `break`, and a number beside the kernel is a tl.constexpr.
#   Each tl.dot has input_precision="ieee", and factors of the dtype of q: weights become that, values stay it.
# explanation: `largest = float("-inf")` before a loop is a Python number, and a tile of BLOCK_M numbers after its first
#   turn: the compiler needs one type for both, the interpreter does not. `tl.full([BLOCK_M], float("-inf"), tl.float32)`
#   has it from the start. Tensor cores multiply float16 as it is. Both factors of a float32 product they round to 11 bits
#   (TF32), unless "ieee" keeps it out of them; so float16 that is widened first does without them, too.
TYPES = {"fp16": torch.float16, "fp32": torch.float32}


def check_compiled(dtype, head_dim, tile):
    q, k, v = random_qkv(tile, tile, 2, 1, head_dim, rng("check_compiles"), TYPES[dtype])
    o, expected = attention(q.clone(), k.clone(), v.clone(), 0, tile, tile)[0], whole(q, k, v, 0)[0]
    off = difference(o, expected)
    assert off < 5e-3, f"{dtype}, head_dim {head_dim}: o is off by {off:.2g}{where(o, expected, OF_O, 5e-3)}"
    types = dict.fromkeys(("q", "k", "v", "o"), f"*{dtype}") | {"lse": "*fp32"}
    types |= {"q_len": "i32", "kv_len": "i32", "first": "i32", "scale": "fp32", "q_stride": "i32", "kv_stride": "i32"}
    constants = {"GROUP": 4, "HEAD_DIM": head_dim, "BLOCK_M": tile, "BLOCK_N": tile, "BLOCK_D": head_dim}
    found = compiled_for_a100(flash_kernel, types, constants, f"{dtype}, head_dim {head_dim}")
    if dtype == "fp16":
        seen = " and ".join(found.factors) or "nothing"
        assert list(found.factors) == ["f16"], (
            f"fp16: tl.dot multiplies {seen}, tensor cores only float16. Do both factors of each have the dtype of q?"
        )


def compiled_for_a100(kernel, types, constants, what):
    found = compiled(kernel, types, constants, capability=80)
    assert not found.error, f"{what}: it does not compile for an A100. {found.error}"
    print(f"{what}: {found.registers} registers per thread, {found.spilled} bytes spilled, "
          f"{found.shared / 1024:.0f} KiB of shared memory")  # fmt: skip
    rounded = [kind for kind in found.tensor_cores if "tf32" in kind]
    assert not rounded, (
        f'{what}: tensor cores multiply {rounded[0]}, 11 bits a factor. Has each tl.dot input_precision="ieee"?'
    )
    return found


check_compiled("fp16", 64, 64)
check_compiled("fp32", 32, 32)
types = (
    dict.fromkeys(("q", "k", "v", "o"), "*fp32")
    | dict.fromkeys(("q_len", "kv_len", "first"), "i32")
    | {"scale": "fp32"}
)
constants = {"HEAD_DIM": 16, "BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_D": 16}
compiled_for_a100(tile_kernel, types, constants, "tile_kernel, fp32, head_dim 16")

# %% [markdown] nbgrader={"grade_id": "text_compiled"}
# ## 6. Your kernel compiled for GPUs
#
# Nothing here is graded. The cell below compiles *your* kernel for GPUs that you need not have, in another process
# without the interpreter, and reads the machine code: registers per thread (at most 255 on NVIDIA), bytes *spilled*
# from registers to slow memory (should be 0), shared memory of a program (more than the GPU has: it cannot be
# launched), tensor core instructions (none: slow). On a CUDA GPU, it is also timed and compared with PyTorch's own
# attention (SDPA).
#
# On a T4, Triton computes `tl.dot` without tensor cores and runs out of registers, so the kernel is not compiled for
# it. Code that the interpreter accepts and the compiler rejects is also reported. It takes a minute or more. Then try
# other tiles, and `num_warps=8` or `num_stages=3` after your kernel's arguments.

# %% nbgrader={"grade_id": "compiled"} inferlab={"where": "notebook"}
from reference_impl.kernels.own_kernel import report

print(report(attention))

# %% [markdown] nbgrader={"grade_id": "text_engine"}
# ## 7. Inside the engine
#
# `AttentionByRequest` gathers each request's keys and values from the paged cache, and `YourSplits` uses your parts: it
# divides them into splits, calls `attention` for each split and `merge_splits` for all. Every request of a step gets as
# many splits as the longest needs, so some are empty: as on a GPU, where one grid serves all requests. The `first` of a
# split is the query's position minus the split's first key, and may be negative.
#
# It compares at every call and tells you at the first difference which part failed. The tokens must be those that the
# engine generates by itself.


# %% nbgrader={"grade_id": "engine_parts"}
from reference_impl.assembly.lab_parts import AttentionByRequest, LabEngine, course_llm


class YourSplits:
    """Attention of one request at a time: your attention of each split, compared, then your merge_splits."""

    def __init__(self, split):
        self.split = split
        self.num_calls = self.num_empty = 0

    def __call__(self, asked):
        means, lse = [], []
        for begin in range(0, tiles_for(asked.longest, self.split) * self.split, self.split):
            part = [t[begin : begin + self.split].contiguous() for t in (asked.keys, asked.values)]
            o, seen = self.one(asked.q, *part, asked.num_before - begin)
            means.append(o.masked_fill((seen == -math.inf).T[..., None], math.nan))  # anything, where there is no key
            lse.append(seen)
        seen = merged(torch.stack(means), torch.stack(lse))[0]
        off = difference(seen, asked.expected.double())
        lengths = f"{len(asked.q)} queries, {asked.num_tokens} keys"
        assert off < 1e-4, f"merged splits, layer {asked.layer}, {lengths}: o is off by {off:.2g}"
        return seen

    def one(self, q, keys, values, first):
        o, seen = pair_of(attention(q, keys, values, first), "attention", q.shape)
        self.num_calls += 1
        self.num_empty += len(keys) == 0
        expected = whole(q, keys, values, first)
        off = max(difference(o, expected[0]), difference(seen, expected[1]))
        assert off < 1e-4, f"attention of {len(q)} queries from position {first}, {len(keys)} keys: off by {off:.2g}"
        return o, seen


def serve(prompts, num_new_tokens, attention_backend=None):
    """The tokens that the smaller course model generates, by request."""
    options = {"num_blocks": 32, "block_size": 4, "max_num_batched_tokens": 16}
    engine = LabEngine(course_llm("draft"), options, attention=attention_backend)
    for prompt in prompts:
        engine.add(prompt, num_new_tokens)
    return engine.run(max_steps=50)


# %% nbgrader={"grade_id": "check_engine", "grade": true, "points": 1}
# property: with your attention and merge, the engine generates the tokens that it generates with its own.
# question: Which part failed first, and with which lengths?
# hint: the message names the part that failed first; make that part's own checks pass first.
# explanation: The engine calls your attention with chunks of prompts and with single tokens, over contexts of every
#   length, and merges splits of long ones. A first = 0 that is assumed, a length that fills its tiles, or a split that
#   may not be empty shows here first.
def check_served(prompts, num_new_tokens, split):
    yours = YourSplits(split)
    seen = serve(prompts, num_new_tokens, AttentionByRequest(course_llm("draft").engine.attention, yours))
    expected = serve(prompts, num_new_tokens)
    print(f"prompts of {[len(p) for p in prompts]} tokens, splits of {split}: {yours.num_calls} calls of attention, "
          f"{yours.num_empty} of them without a key")  # fmt: skip
    assert seen == expected, f"the engine generates {expected}, with your pieces it generated {seen}"
    return seen


texts = ["def add(a, b):\n", "import"]
prompts = [course_llm("draft").encode(text) for text in texts]
for text, tokens in zip(texts, check_served(prompts, 2, split=5).values(), strict=True):
    print(repr(text), "->", repr(course_llm("draft").tokenizer.decode(tokens)))
### BEGIN HIDDEN TESTS
draw = rng("check_engine")
prompts = [torch.randint(100, 4000, (n,), generator=draw).tolist() for n in (random_int(9, 12, draw), 3)]
check_served(prompts, 1, split=random_int(6, 8, draw))
### END HIDDEN TESTS

# %% [markdown] nbgrader={"grade_id": "text_milestone"}
# ## 8. Your kernel serves a text
#
# Your Triton kernel computes all attention of this text, in splits of eight keys, and your `merge_splits` combines them. The
# smaller course model writes, and only a few tokens, because a kernel is slow without a GPU. With all checks passed,
# `inferlab lab check` shows this, too.

# %% nbgrader={"grade_id": "milestone"} inferlab={"where": "milestone"}
from reference_impl.assembly.lab_parts import show_served

yours = YourSplits(split=8)
backend = AttentionByRequest(course_llm("draft").engine.attention, yours)
engine = LabEngine(course_llm("draft"), {"num_blocks": 32, "block_size": 4}, attention=backend)
engine.add(course_llm("draft").encode("def close(self"), 3)
engine.run()
show_served("Your kernel just served this text", engine, course_llm("draft"))
print(f"Your attention was called {yours.num_calls} times.")

# %% [markdown] nbgrader={"grade_id": "extensions"}
# ## Further (not graded)
#
# Add cells below and try one.
#
# - **One read for a group.** In decoding, let the query heads of a group be the rows of one tile, as in part 2. How
#   many fewer bytes are read? (The engine's `reference_impl/kernels/paged_decode.py` does it.)
# - **Powers of 2.** A GPU computes e^x as 2^x with an extra multiplication. Put log2(e) into the scale, and use
#   `tl.exp2`.
# - **A window.** A query attends only to the last 1,024 keys. Where does the loop over keys begin?
# - **Through a block table.** Pass the paged cache itself to the kernel, so that nothing has to be gathered.
#   (`reference_impl/kernels/flash_attention.py`.)
