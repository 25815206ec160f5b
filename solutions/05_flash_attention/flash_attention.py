# %% [markdown] nbgrader={"grade_id": "intro"}
# # Lab 05: flash attention
#
# One head of attention over a prompt of 8,192 tokens, head_dim 128, float16. Q, K, V and O are 8 MiB together. If the
# scores are written to memory, read for the softmax, written again and read again: how many bytes are moved in all? And
# if they never leave the chip? Write both guesses down; a cell below computes them.
#
# You build, in this order: the softmax in one pass, attention tile by tile over a memory that counts, the merge of
# partial results, and then the same as a Triton kernel. At the end it serves text inside the engine.
#
# - Each part has a text, a cell for your code, and checks. Run a check as often as you like.
# - Hidden checks test the same properties on other inputs. A check that passes here for the right reason passes there.
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


def watch_kernels():
    """Make the interpreter reject what would go wrong on a GPU.

    By itself it reads and writes behind the end of a tensor, which gives wrong numbers or ends the process; what a load
    without `other` leaves out is 0; and tiles may have any size.
    """
    import numpy as np
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle, interpreter_builder

    if hasattr(GridExecutor, "watched"):
        return
    wanted = ("create_masked_load", "create_masked_store", "create_dot")
    if not hasattr(GridExecutor, "_init_args_hst") or not all(hasattr(InterpreterBuilder, name) for name in wanted):
        print("This version of Triton has another interpreter: it is not watched, so mind your masks.")
        return
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    dot = InterpreterBuilder.create_dot
    GridExecutor.watched, copied, places, gap = True, GridExecutor._init_args_hst, [], 1 << 20

    def spaced(self, args, kwargs):
        """A launch's tensors, each with a gap before and after it, so that no tensor begins where another one ends."""
        args, kwargs = copied(self, args, kwargs)
        places.clear()
        moved = {}
        for name, tensor in [*zip(self.arg_names, args, strict=False), *kwargs.items()]:
            tensor = getattr(tensor, "base", tensor)  # of a TensorDescriptor
            if not isinstance(tensor, torch.Tensor) or not tensor.numel():
                continue
            old, at = tensor.untyped_storage(), (tensor.storage_offset(), tensor.shape, tensor.stride())
            if old.data_ptr() not in moved:
                room = np.empty(len(old) + 2 * gap, np.uint8)
                moved[old.data_ptr()] = torch.frombuffer(
                    room, dtype=torch.uint8, offset=gap, count=len(old)
                ).untyped_storage()
                moved[old.data_ptr()].copy_(old)
            tensor.set_(moved[old.data_ptr()], *at)
            size, begin = tensor.element_size(), tensor.data_ptr()
            last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
            places.append((begin, begin + (last + 1) * size, size, name))
        return args, kwargs

    def small(what, shape):
        if math.prod(shape) >= 65_536:
            raise ValueError(f"{what} of a tile of {list(shape)}: a multiprocessor has 65,536 registers for everything")

    def look(what, pointers, mask):
        small(what, pointers.data.shape)
        mask = mask.data if isinstance(mask, TensorHandle) else mask  # of a block pointer: an array
        at = pointers.data[np.broadcast_to(np.asarray(mask, bool), pointers.data.shape)].astype(np.int64)
        outside = np.ones(at.shape, bool)
        for begin, end, _, _ in places:
            outside &= (at < begin) | (at >= end)
        if not outside.any():
            return
        one = int(at[outside][0])
        near = min(places, key=lambda place: max(place[0] - one, one - place[1]), default=(0, 0, 1, "nothing"))
        begin, end, size, name = near
        where = (
            f"{(one - end) // size + 1} behind the last" if one >= end else f"{(begin - one) // size} before the first"
        )
        raise IndexError(
            f"program {interpreter_builder.grid_idx}: {what} of {at.size} numbers, {int(outside.sum())} of them outside of "
            f"every tensor, one of these {where} of {name}. Is the mask missing, or an offset wrong?"
        )

    def watched_load(self, pointers, mask, other, *rest):
        look("a tl.load", pointers, mask)
        if other is None and pointers.get_element_ty().is_floating():  # on a GPU: anything
            kind = {16: np.float16, 32: np.float32, 64: np.float64}.get(pointers.get_element_ty().primitive_bitwidth)
            if kind and "bf16" not in str(pointers.get_element_ty()):
                other = TensorHandle(np.full(pointers.data.shape, np.nan, kind), pointers.get_element_ty())
        return load(self, pointers, mask, other, *rest)

    def watched_store(self, pointers, value, mask, *rest):
        look("a tl.store", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def watched_dot(self, a, b, *rest):
        if a.data.shape[-1] < 16:
            shapes = f"{list(a.data.shape)} and {list(b.data.shape)}"
            raise ValueError(f"tl.dot of {shapes}: a GPU wants at least 16 columns in the first")
        small("a tl.dot", (a.data.shape[-2], b.data.shape[-1]))
        return dot(self, a, b, *rest)

    GridExecutor._init_args_hst = spaced
    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = watched_load, watched_store
    InterpreterBuilder.create_dot = watched_dot


if importlib.util.find_spec("triton") is not None:
    watch_kernels()

# %% nbgrader={"grade_id": "tools"}
# Given: helpers of the checks. You may read them, but do not change them.
from collections import Counter

from grader.checks import rng


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
    at = torch.unravel_index(off.argmax(), off.shape)
    place = ", ".join(f"{name} {int(i)}" for name, i in zip(names, at, strict=True))
    return (
        f"; {int((off >= limit).sum())} of {off.numel()} numbers are wrong, most at {place}: expected "
        f"{float(expected[at]):.4g}, saw {float(seen[at]):.4g}"
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
# Keep three values between chunks, and no chunk. A score of minus infinity is a masked key: its weight is 0. With no
# keys, or only masked ones, return minus infinity, 0.0 and zeros.
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


def check_chunks(scores, values, sizes, limit=1e-4):
    chunks = list(zip(scores.split(sizes), values.split(sizes), strict=True))
    largest, total, mean = read_online(chunks)
    top = float(scores.max()) if len(scores) else -math.inf
    weights = torch.exp(scores.double() - (top if top > -math.inf else 0.0))
    expected = float(weights.sum())
    print(f"chunks of {sizes}: largest {largest:g}, total {total:.6g}, mean {[round(x, 4) for x in mean.tolist()]}")
    assert largest == top, f"chunks of {sizes}: the largest score is {top}, saw {largest}"
    off = abs(total - expected)
    assert off < limit, f"chunks of {sizes}: expected total {expected:.6g}, saw {total:.6g}"
    off = difference(mean, weights @ values.double() / max(expected, 1.0))
    assert off < limit, f"chunks of {sizes}: the weighted mean is off by {off:.2g}"


# %% nbgrader={"grade_id": "check_online", "grade": true, "points": 2}
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
### BEGIN HIDDEN TESTS
draw = rng("check_online")
for _ in range(4):
    sizes = [random_int(1, 9, draw) for _ in range(random_int(2, 6, draw))]
    values = torch.randn(sum(sizes), random_int(1, 9, draw), generator=draw)
    check_chunks(2 + torch.randn(sum(sizes), generator=draw), values, sizes)
### END HIDDEN TESTS


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
### BEGIN HIDDEN TESTS
draw = rng("check_online_huge")
for sign in (1, -1):
    far = [sign * random_int(500, 30_000, draw) + float(random_int(-2, 2, draw)) for _ in range(6)]
    check_huge(far, 3)
    check_huge(sorted(far), 6)
    check_huge(sorted(far, reverse=True), 6)
### END HIDDEN TESTS


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
### BEGIN HIDDEN TESTS
draw = rng("check_online_empty")
for _ in range(3):
    sizes = [random_int(0, 3, draw) for _ in range(6)]
    some = [float(random_int(-9, 9, draw)) if random_int(0, 1, draw) else none for _ in range(sum(sizes))]
    check_masked([none, none, *some], [0, 2, *sizes])
    check_masked([none] * sum(sizes), sizes)
### END HIDDEN TESTS

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
# attends to one of its keys. Only one tile of k and v fits at a time, so the next tile of queries loads them again.
# `first` >= 0.
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


def run_tiled(q_len, kv_len, num_heads, num_kv_heads, head_dim, block_m, block_n, first, generator):
    """Runs your function on a new memory; returns the memory, the error of o, and where it is."""
    q, k, v = random_qkv(q_len, kv_len, num_heads, num_kv_heads, head_dim, generator)
    hbm = HBM(q, k, v, block_m, block_n)
    tiled_attention(hbm, q_len, kv_len, num_heads, num_kv_heads, block_m, block_n, first)
    expected = whole(q, k, v, first)[0]
    return hbm, difference(hbm.tensors["o"], expected), where(hbm.tensors["o"], expected, OF_O, 1e-4)


# %% nbgrader={"grade_id": "check_tiled", "grade": true, "points": 2}
# property: o is causal attention, for all lengths, tiles, positions and groups of heads.
# question: Row 2 of the second tile of queries: which query is it, and at which position?
# hint: query i × block_m + r of a tile is at position first + i × block_m + r; key c of tile j is key j × block_n + c.
# explanation: Tiles of 4 queries and 3 keys, first = 5. Row 2 of tile 1 is query 6 at position 11; key 1 of tile 2 is
#   key 7. 7 <= 11, so it is seen. At the ends rows and keys that do not exist fill the tile; they must have no effect.
#   Each query head reads the KV head of its group.
def check_tiles(*shape, generator):
    q_len, kv_len, num_heads, num_kv_heads, _, block_m, block_n, first = shape
    _, off, place = run_tiled(*shape, generator)
    print(f"{q_len} queries from position {first} in tiles of {block_m}, {kv_len} keys in tiles of {block_n}, "
          f"{num_heads}/{num_kv_heads} heads: off by {off:.1e}")  # fmt: skip
    assert off < 1e-4, (
        f"{q_len} queries from position {first} in tiles of {block_m}, {kv_len} keys in tiles of {block_n}, "
        f"{num_heads} query and {num_kv_heads} KV heads: o is off by {off:.2g}{place}"
    )


check_tiles(8, 8, 1, 1, 4, 4, 4, 0, generator=rng("tiled"))  # a whole prompt
check_tiles(7, 7, 4, 2, 5, 4, 3, 0, generator=rng("tiled"))  # no size divides another
check_tiles(5, 16, 2, 1, 4, 2, 4, 11, generator=rng("tiled"))  # the last chunk of a prompt
check_tiles(1, 9, 6, 2, 4, 4, 4, 8, generator=rng("tiled"))  # one new token
### BEGIN HIDDEN TESTS
draw = rng("check_tiled")
for _ in range(5):
    q_len, block_m, block_n = random_int(1, 14, draw), random_int(2, 6, draw), random_int(2, 6, draw)
    first, num_kv_heads, group = random_int(0, 9, draw), random_int(1, 2, draw), random_int(1, 3, draw)
    shape = q_len, first + q_len, num_kv_heads * group, num_kv_heads, 3 + group, block_m, block_n, first
    check_tiles(*shape, generator=draw)
### END HIDDEN TESTS


# %% nbgrader={"grade_id": "check_traffic", "grade": true, "points": 2}
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
### BEGIN HIDDEN TESTS
draw = rng("check_traffic")
for _ in range(3):
    q_len, block_m, block_n = random_int(5, 14, draw), random_int(2, 4, draw), random_int(2, 4, draw)
    first, num_kv_heads = random_int(0, 9, draw), random_int(1, 2, draw)
    shape = q_len, first + q_len, 2 * num_kv_heads, num_kv_heads, 3, block_m, block_n, first
    check_moves(*shape, generator=draw)
### END HIDDEN TESTS

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
    return pair_of(merge_splits(means.clone(), to_yours(lse.clone())), "merge_splits", means.shape[1:])


def check_merged(q, k, v, sizes):
    means, lse = split_means(q, k, v, sizes)
    o, total = merged(means, lse)
    expected = whole(q, k, v, len(k))
    off = difference(o, expected[0]), difference(total, expected[1])
    print(f"{len(k)} keys in splits of {sizes}: o is off by {off[0]:.1e}, lse by {off[1]:.1e}")
    assert off[0] < 1e-4, f"splits of {sizes}: o is off by {off[0]:.2g}{where(o, expected[0], OF_O, 1e-4)}"
    assert off[1] < 1e-5, f"splits of {sizes}: lse is off by {off[1]:.2g}{where(total, expected[1], OF_LSE, 1e-5)}"
    if len(sizes) > 2:
        some, rest = merged(means[:2], lse[:2]), merged(means[2:], lse[2:])
        o, total = merged(*(torch.stack(parts) for parts in zip(some, rest, strict=True)))
        off = max(difference(o, expected[0]), difference(total, expected[1]))
        assert off < 1e-4, f"splits of {sizes}, the first two merged before: off by {off:.2g}"


# %% nbgrader={"grade_id": "check_merge", "grade": true, "points": 2}
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
### BEGIN HIDDEN TESTS
draw = rng("check_merge")
for factor in (1, 3, 2000):
    sizes = [random_int(1, 8, draw) for _ in range(random_int(2, 5, draw))]
    q, k, v = random_qkv(random_int(1, 3, draw), sum(sizes), 6, random_int(1, 2, draw), random_int(2, 6, draw), draw)
    check_merged(factor * q, k, v, sizes)
### END HIDDEN TESTS


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


def check_one_without(num_splits, generator):
    """Of two queries the second has no key in any split."""
    means, lse = torch.randn(num_splits, 2, 3, 4, generator=generator), torch.zeros(num_splits, 3, 2)
    means[:, 1], lse[:, :, 1] = math.nan, -math.inf
    o, total = merged(means, lse)
    print(f"{num_splits} splits, nothing in any of them for query 1: o {o[1, 0].tolist()}, lse {total[0].tolist()}")
    off = difference(o[0], means[:, 0].mean(0))
    assert off < 1e-5, f"query 0 has {num_splits} splits of equal weight: their mean, saw it off by {off:.2g}"
    assert difference(o[1], torch.zeros(3, 4)) == 0, f"a query without keys: expected zeros, saw {o[1].tolist()}"
    assert bool((total[:, 1] == -math.inf).all()), (
        f"a query without keys: expected lse -inf, saw {total[:, 1].tolist()}"
    )


check_one_without(2, rng("empty"))
### BEGIN HIDDEN TESTS
draw = rng("check_merge_empty")
for _ in range(3):
    q, k, v = random_qkv(2, 7, 4, 2, 3, draw)
    sizes = [0, random_int(1, 6, draw), 0, 0]
    sizes[2] = 7 - sizes[1]
    check_merged(q, k, v, sizes)
    check_one_without(random_int(1, 4, draw), draw)
### END HIDDEN TESTS

# %% [markdown] nbgrader={"grade_id": "text_kernel"}
# ## 4. The kernel
#
# **Build** `attention(q, k, v, first)`: it launches a Triton kernel of yours and returns `(o, lse)`.
#
# - q, k, v as in the table at the top, of one dtype, float32 or float16, each contiguous. Any other dtype: `TypeError`.
#   (The interpreter would silently compute bfloat16 wrongly.)
# - `o` has the dtype of q, `lse` is float32. Scores, sums and the weighted sum of values are float32 in any case.
# - Any q_len >= 1, kv_len >= 0, head_dim >= 1, and any `first`, even negative. A query without visible keys gets zeros,
#   and minus infinity for its lse.
#
# The stub suggests the kernel's arguments; you may change them. A *program* computes BLOCK_M queries of one head, with
# the loop over keys from part 2. `kernel[grid](...)` runs `grid` programs, `tl.program_id(0)` is the index of the
# program. Chapter 05b, section 3, has two kernels to learn from, and chapter 05a, section 4, the loop of the engine's
# own. This one doubles a matrix, tile by tile:
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
#
# double[(triton.cdiv(rows, 16),)](x, out, rows, COLUMNS=40, BLOCK=16, WIDE=64)
# ```
#
# You also need: `tl.zeros`, `tl.full`, `tl.dot`, `tl.trans`, `tl.where`, `tl.maximum`, `tl.max`, `tl.sum`, `tl.exp`,
# `tl.log`, `tile.to(other.dtype)`, `triton.next_power_of_2`. The sizes of `tl.arange` and `tl.dot` are powers of 2, and
# at least 16 for `tl.dot`. On a GPU `tl.dot` rounds float32 to 11 bits; `input_precision="ieee"` prevents that.
# `triton.autotune` measures on a GPU, so it does not run here.
#
# The cell at the top makes the interpreter strict. It rejects addresses outside of all tensors of the launch, a tile of
# 65,536 numbers or more (as many as a GPU's multiprocessor has registers), and a `tl.dot` over fewer than 16 columns;
# masked elements of a load without `other` are NaN. The message names the line of your kernel.
#
# **Hint:** first one program with all keys in one tile; then the loop; then masks for everything out of bounds.
#
# **Trap (out of bounds):** a tile's last rows may be beyond the end of the tensor. Reading and writing there hits other
# memory.
#
# **Trap (masked keys):** a key that the mask filled with zeros has score 0, not weight 0.
#
# **Trap (tile for head_dim):** BLOCK_D is a power of 2 and head_dim may be 40. The memory has rows of 40.
#
# **Trap (float16 overflow):** float16 ends at 65,504. Sums of values soon exceed it.
#
# **Trap (no visible keys):** with `first` = -2, queries 0 and 1 have no visible key, and their sum is 0.


# %% nbgrader={"grade_id": "attention", "solution": true}
import triton
import triton.language as tl


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
    end = tl.minimum(kv_len, first + start + BLOCK_M)  # later keys are visible to no query of the tile
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
    tl.store(lse + head * q_len + m, largest + tl.log(divisor), mask=m < q_len)
    ### END SOLUTION


def attention(q, k, v, first):
    """(o, lse) of causal attention by a Triton kernel; query 0 is at position `first`. TypeError for other dtypes.

    q [q_len, num_heads, head_dim], k and v [kv_len, num_kv_heads, head_dim], float32 or float16; o like q,
    lse [num_heads, q_len] float32.
    """
    ### BEGIN SOLUTION
    if q.dtype not in (torch.float32, torch.float16):
        raise TypeError(f"expected float32 or float16, got {q.dtype}")
    (q_len, num_heads, head_dim), (kv_len, num_kv_heads, _) = q.shape, k.shape
    o, lse = torch.empty_like(q), torch.empty(num_heads, q_len, device=q.device)
    flash_kernel[(triton.cdiv(q_len, 64), num_heads)](
        q, k, v, o, lse, q_len, kv_len, first, 1 / math.sqrt(head_dim), num_heads * head_dim, num_kv_heads * head_dim,
        GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, BLOCK_M=64, BLOCK_N=64,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
    )  # fmt: skip
    return o, lse
    ### END SOLUTION


# %% nbgrader={"grade_id": "kernel_checks"}
# Given: how this part's checks test your result.


def check_attention(
    q_len, kv_len, num_heads, num_kv_heads, head_dim, first, generator, dtype=torch.float32, factor=1, limit=1e-4
):
    """first: None lets every query attend to all keys. factor: scales queries, and so scores."""
    q, k, v = random_qkv(q_len, kv_len, num_heads, num_kv_heads, head_dim, generator, dtype)
    q, at = factor * q, kv_len if first is None else first
    expected = whole(q, k, v, at)
    o, lse = pair_of(attention(q.clone(), k.clone(), v.clone(), at), "attention", q.shape)
    off = difference(o, expected[0]), difference(lse, expected[1])
    what = (
        f"{q_len} queries{'' if first is None else f' from position {first}'}, {kv_len} keys, "
        f"{num_heads}/{num_kv_heads} heads of {head_dim}{'' if factor == 1 else f', queries times {factor}'}"
    )
    print(f"{what}: o is off by {off[0]:.1e}, lse by {off[1]:.1e}")
    kinds = (o.dtype, lse.dtype)
    assert kinds == (dtype, torch.float32), f"expected o of {dtype} and lse of torch.float32, saw {kinds}"
    assert off[0] < limit, f"{what}: o is off by {off[0]:.2g}{where(o, expected[0], OF_O, limit)}"
    assert off[1] < limit, f"{what}: lse is off by {off[1]:.2g}{where(lse, expected[1], OF_LSE, limit)}"


# %% nbgrader={"grade_id": "check_kernel", "grade": true, "points": 2}
# property: o and lse are those of attention over all keys, however many, for every head, however large scores are.
# question: What must be carried from one tile of keys to the next?
# hint: scale scores by 1 / sqrt(head_dim); head h reads KV head h // GROUP; shrink sum and acc when the largest grows; the
#   keys of a long context are many tiles.
# explanation: A context of several tiles: after each the largest may grow, and then sum and accumulated values shrink
#   by the same factor, exp(old - new). Scores [1] in tile 0 and [3] in tile 1: sum 1 × 0.135 + 1 = 1.135. A code that
#   keeps the old factor has 1 + 7.389 relative to the old largest, which is the same number until exp overflows. With 6
#   query and 2 KV heads, head 4 reads KV head 1.
check_attention(64, 64, 1, 1, 16, None, rng("kernel"))
check_attention(64, 128, 4, 2, 16, None, rng("kernel"))
check_attention(64, 128, 1, 1, 16, None, rng("kernel"), factor=300, limit=5e-3)
check_attention(64, 2112, 1, 1, 16, None, rng("kernel"))  # too many keys for one tile
### BEGIN HIDDEN TESTS
draw = rng("check_kernel")
check_attention(64, 64 * random_int(2, 3, draw), 2, 1, 32, None, draw)
check_attention(64, 192, 2, 2, 16, None, draw, factor=random_int(50, 500, draw), limit=5e-3)
### END HIDDEN TESTS


# %% nbgrader={"grade_id": "check_ragged", "grade": true, "points": 2}
# property: lengths and head_dim are what they are: no multiple of a tile, no power of 2, down to 1.
# question: A tile has 16 rows and 5 are left: what do the other 11 load, and what do they store?
# hint: mask three things, in each load and store: queries >= q_len, keys >= kv_len, and the columns from head_dim to
#   BLOCK_D. Where o is NaN: what a load without `other` leaves out is anything, and 0 × NaN is NaN.
# explanation: head_dim 5 in a tile of 8 columns: columns 5-7 lie in the next row's memory. Loaded unmasked they enter
#   every score; stored unmasked they overwrite the neighbour's output. The same holds for queries behind q_len and keys
#   behind kv_len. A masked load needs a value to stand in, or what is there is arbitrary, and 0 × NaN is NaN.
check_attention(3, 70, 2, 1, 24, None, rng("ragged"))
check_attention(70, 5, 1, 1, 40, None, rng("ragged"))
check_attention(1, 1, 2, 2, 5, None, rng("ragged"))
### BEGIN HIDDEN TESTS
draw = rng("check_ragged")
check_attention(random_int(65, 100, draw), random_int(130, 190, draw), 1, 1, random_int(17, 31, draw), None, draw)
check_attention(random_int(1, 15, draw), random_int(1, 31, draw), 4, 2, random_int(1, 15, draw), None, draw)
check_attention(1, random_int(100, 127, draw), 2, 1, random_int(65, 120, draw), None, draw)
### END HIDDEN TESTS


# %% nbgrader={"grade_id": "check_causal", "grade": true, "points": 2}
# property: query i sees the keys up to first + i; one that sees none gets zeros and minus infinity.
# question: Which keys does query 0 see if first is -2?
# hint: key number <= first + query number; where the sum is 0, divide by 1.
# explanation: first = 3: query 0 sees keys 0-3, query 1 sees 0-4. first = -2: queries 0 and 1 see no key, query 2 sees
#   key 0. For a query without any key the sum is 0 and the largest minus infinity: 0 / 0 is NaN, and the result must be
#   zeros and minus infinity.
check_attention(40, 40, 2, 1, 16, 0, rng("causal"))  # a whole prompt
check_attention(7, 77, 2, 1, 16, 70, rng("causal"))  # its last chunk
check_attention(6, 4, 1, 1, 8, -2, rng("causal"))  # queries 0 and 1 see nothing
check_attention(2, 0, 1, 1, 8, 5, rng("causal"))  # there are no keys
### BEGIN HIDDEN TESTS
draw = rng("check_causal")
q_len, first = random_int(65, 90, draw), random_int(1, 40, draw)
check_attention(q_len, q_len + first, 1, 1, random_int(9, 20, draw), first, draw)
check_attention(random_int(20, 40, draw), random_int(3, 9, draw), 2, 2, 6, -random_int(1, 12, draw), draw)
check_attention(3, random_int(1, 9, draw), 2, 1, 4, -random_int(3, 90, draw), draw)  # no visible keys
### END HIDDEN TESTS


# %% nbgrader={"grade_id": "check_half", "grade": true, "points": 1}
# property: float16 goes in and out, float32 in between; bfloat16 is refused with TypeError.
# question: In float16, what is 300 × 300?
# hint: scores, acc and sums are tl.float32, so scale the scores and not q; weights become float16 only to be multiplied;
#   look at q.dtype before the launch.
# explanation: float16 ends at 65,504, so a score of 90,000 is infinite in it; and a sum of 4,096 ones stops at 2,048,
#   because 2,048 + 1 rounds back. Scores, sums and the accumulator are therefore float32, and only what goes out is
#   float16. bfloat16 would be computed wrongly here, so it is refused before anything is launched.
def check_sum(num_keys, size):
    """All keys have equal weight, and all values are `size`: so is their mean, while their sum exceeds float16."""
    q, k, v = torch.zeros(1, 1, 16), torch.zeros(num_keys, 1, 16), torch.full((num_keys, 1, 16), float(size))
    o, lse = pair_of(attention(*(t.half() for t in (q, k, v)), num_keys), "attention", q.shape)
    print(f"{num_keys} values of {size}: their mean is {float(o[0, 0, 0]):g}, lse {float(lse[0, 0]):.5f}")
    assert difference(o, q + size) < 2e-3, f"the mean of {num_keys} values {size}: saw {float(o[0, 0, 0])}"


def check_fine(num_keys):
    """Scores from 256 in steps of 1/64, which float16 cannot represent; the value is the key's number / 64."""
    steps = torch.arange(num_keys) / 64
    q, k, v = torch.full((1, 1, 16), 64.0), torch.ones(num_keys, 1, 16), steps[:, None, None].expand(-1, 1, 16)
    k[:, 0, 0] += steps / 16
    o, lse = pair_of(attention(*(t.half().contiguous() for t in (q, k, v)), num_keys), "attention", q.shape)
    mean, top = float(steps.double().softmax(0) @ steps.double()), 256 + float(steps.double().logsumexp(0))
    print(
        f"scores from 256 to {256 + float(steps[-1]):g}: the mean is {float(o[0, 0, 0]):.4f}, lse {float(lse[0, 0]):.4f}"
    )
    assert difference(o, q * 0 + mean) < 2e-3, (
        f"{num_keys} scores from 256 in steps of 1/64: the mean is {mean:.4f}, saw {float(o[0, 0, 0]):.4f}"
    )
    assert difference(lse, torch.full((1, 1), top)) < 2e-3, (
        f"{num_keys} scores from 256 in steps of 1/64: lse is {top:.4f}, saw {float(lse[0, 0]):.4f}"
    )


def check_refusal(dtype):
    tensors = random_qkv(2, 3, 1, 1, 16, rng("refusal"), dtype)
    try:
        answer = attention(*tensors, 3)
    except TypeError as error:
        print(f"{dtype}: {error}")
        return
    raise AssertionError(f"{dtype}: expected TypeError, saw {answer!r:.100}")


check_attention(20, 70, 2, 1, 32, 50, rng("half"), dtype=torch.float16, limit=2e-3)
check_sum(64, 3000)
check_fine(64)
check_refusal(torch.bfloat16)
### BEGIN HIDDEN TESTS
draw = rng("check_half")
check_attention(9, 33, 1, 1, 20, None, draw, dtype=torch.float16, factor=20, limit=2e-3)
check_sum(random_int(40, 60, draw), random_int(2500, 3500, draw))
check_fine(random_int(50, 100, draw))
check_refusal(torch.float64)
### END HIDDEN TESTS

# %% [markdown] nbgrader={"grade_id": "text_compiled"}
# ## 5. Your kernel compiled for GPUs
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
# ## 6. Inside the engine
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


# %% nbgrader={"grade_id": "check_engine", "grade": true, "points": 2}
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
# ## 7. Your kernel serves a text
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
