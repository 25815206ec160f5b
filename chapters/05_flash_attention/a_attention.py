# %% [markdown] name="title"
# # 05a · Flash attention: the same sum, without the sheet
#
# About 55 minutes. You need the roofline (chapter 00) and the KV cache (chapter 02); block tables (chapter 04) help.
# Part b is about kernels around attention, part c about tuning, overlap and variants. The lab is [Build flash
# attention](../../labs/05_flash_attention/flash_attention.ipynb).

# %% name="setup"
import importlib.util
import inspect
import math
import os
import re
import time
import warnings
import weakref
from collections import Counter
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton has to know before the first kernel is defined

from chapters import widgets
from chapters.widgets.figure import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, SKY, figure, show, tidy
from reference_impl import LLM, Engine, EngineConfig, SamplingParams, course_model
from reference_impl.assembly.parts import Parts
from reference_impl.kernels import reference
from reference_impl.core.attention import TorchAttention
from reference_impl.features.fusion.kernels import choose_backend
from reference_impl.theory import attention_traffic as traffic
from reference_impl.theory import kv_cache, model_shapes, online_softmax, roofline, warp
from reference_impl.theory.hardware import device
from reference_impl.theory.units import KiB, MiB, format_bytes, format_seconds

torch.set_num_threads(1)
torch.manual_seed(5)
H100, L8, L70 = device("H100"), model_shapes.model("llama-3-8b"), model_shapes.model("llama-3-70b")
on_gpu = torch.cuda.is_available()
DEVICE = torch.device("cuda" if on_gpu else "cpu")
has_triton = importlib.util.find_spec("triton") is not None
if has_triton and on_gpu:  # Triton does not support every GPU
    has_triton = choose_backend("auto", DEVICE, torch.float16) == "triton"
if has_triton:
    import triton
    import triton.language as tl

    from reference_impl.kernels.flash_attention import flash_attention, tile_of
    from reference_impl.kernels.launch import architecture
    from reference_impl.kernels.paged_decode import SPLIT, paged_decode

    print("kernels: ours, in Triton,", "on the GPU" if on_gpu else "in Triton's interpreter, on the CPU")
else:
    flash_attention, paged_decode, SPLIT = reference.flash_attention, reference.paged_decode, 512
    print("kernels: their twins in torch, because this machine has no Triton, or a GPU that it does not serve")

# %% [markdown] name="question"
# ## 1. A question with a number
#
# Llama-3-70B reads one prompt of 8,192 tokens: 80 layers, 64 query heads. Plain attention writes the score of every
# query with every key into device memory, as 16-bit values. Softmax reads them and writes probabilities. The product
# with the values reads those. **How many terabytes are moved for these scores and probabilities, over the whole
# model?**

# %% name="predict"
widgets.predict("05-scores", "How many terabytes travel for scores and probabilities?", "TB")

# %% [markdown] name="idea"
# ## 2. The idea
#
# Picture a small desk, with the files in the cellar. You have to write a report for each of a thousand clients: a
# weighted average over a thousand records, where the weight of a record is its score divided by the sum of all scores.
#
# The plain way: fetch everything, write all million scores on a huge sheet, and carry it down, because it does not fit
# on the desk. Fetch it again to turn scores into shares, carry it down again. Fetch it a third time for the averages.
#
# The other way: take a few clients at a time. Fetch records by the handful, score them, and *keep only three notes per
# client*: the **largest score** so far, the **sum of the weights** so far, and the **weighted sum of records** so far.
# Then put the handful back. At the end divide the third note by the second. The sheet never exists.
#
# Why keep the largest score? The weights are exponentials. They are written relative to the largest one, or they would
# overflow. When a larger one turns up, both sums have to be rescaled to it, by **one factor**. This is *online softmax*
# (Milakov and Gimelshein, 2018). Doing it in tiles, so that the sheet is never carried down, is *FlashAttention* (Dao
# et al., 2022).

# %% [markdown] name="answer-text"
# So the sheet is what the plain way carries up and down: scores written and read, shares written and read. What is your
# guess worth?

# %% name="answer"
one_sheet = kv_cache.score_bytes(1, 8192, 8192)  # of one head in one layer, 16 bits a value
assert (L70.layers, L70.num_heads) == (80, 64)
rows, travelled = [], {}
for shape in (L8, L70):
    travelled[shape.layers] = 4 * one_sheet * shape.num_heads * shape.layers
    seconds = travelled[shape.layers] / H100.bandwidth
    rows.append(
        (shape.name, shape.num_heads, shape.layers, f"{travelled[shape.layers] / 1e12:.2f} TB", f"{seconds:.2f} s")
    )
print(widgets.reveal("05-scores", travelled[L70.layers] / 1e12))
widgets.table(rows, ["8,192 tokens", "query heads", "layers", "moved for S and P", "at an H100's bandwidth"])

# %% [markdown] name="scratch-text"
# ## 3. From scratch
#
# ### Thirty lines that never write the sheet
#
# The desk as a Triton kernel. A *program* has a tile of clients (queries of one head), fetches keys and values by the
# handful, and keeps three notes. You write what one program does, on whole tiles: `tl.load` takes a tile of addresses
# and a mask, `at[:, None] + d[None, :]` are rows and columns as in NumPy. First the heart, the three notes after one more
# handful:

# %% name="scratch-notes"
if has_triton:

    @triton.jit
    def one_more_tile(m, total, acc, scores, values):
        new = tl.maximum(m, tl.max(scores, 1))  # the largest score so far, of each query
        shrink = tl.exp2(m - new)  # one factor rescales the old notes
        weights = tl.exp2(scores - new[:, None])  # powers of 2, because the hardware computes those
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None])
        return new, total, acc

# %% [markdown] name="scratch-kernel-text"
# Around it: which queries are mine, the loop over keys, one division, one store.

# %% name="scratch-kernel"
if has_triton:

    @triton.jit
    def tiny_attention(Q, K, V, Out, n, scale, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
        first, head = tl.program_id(0) * BLOCK_M, tl.program_id(1) * n * D  # where its queries and its head begin
        rows, columns, d = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, D)
        at_q = head + rows[:, None] * D + d[None, :]
        q = tl.load(Q + at_q, mask=rows[:, None] < n, other=0.0)
        m, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, D], tl.float32)
        for start in range(0, first + BLOCK_M, BLOCK_N):  # no query of this tile attends to later keys
            keys = start + columns
            at_k = head + keys[:, None] * D + d[None, :]
            k = tl.load(K + at_k, mask=keys[:, None] < n, other=0.0)
            v = tl.load(V + at_k, mask=keys[:, None] < n, other=0.0)
            scores = tl.dot(q, k.T) * scale
            scores = tl.where(keys[None, :] <= rows[:, None], scores, float("-inf"))
            m, total, acc = one_more_tile(m, total, acc, scores, v)
        tl.store(Out + at_q, (acc / total[:, None]).to(Out.dtype.element_ty), mask=rows[:, None] < n)

# %% [markdown] name="scratch-run-text"
# Before you run it: two heads, 256 tokens, tiles of 64 queries and 64 keys. The mask is causal, so the first program
# needs 64 keys and the last one all 256. How often is a key loaded, on average? (The interpreter executes each load and
# store one by one, so a folded cell can count them.)

# %% name="predict-loads"
widgets.predict("05a-loads", "How many times is each key loaded, on average?", "times")


# %% name="counted" jupyter={"source_hidden": true}
@contextmanager
def counted_bytes():
    """Bytes that kernels read and write, masked lanes left out. Needs Triton's interpreter."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    load, store, asked = Builder.create_masked_load, Builder.create_masked_store, Counter()

    def size(pointers, mask):
        return int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8

    def counting_load(self, pointers, mask, *rest):
        asked["read"] += size(pointers, mask)
        return load(self, pointers, mask, *rest)

    def counting_store(self, pointers, value, mask, *rest):
        asked["written"] += size(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    Builder.create_masked_load, Builder.create_masked_store = counting_load, counting_store
    try:
        yield asked
    finally:
        Builder.create_masked_load, Builder.create_masked_store = load, store


# %% name="scratch-run"
n, d, tile, dtype = 256, 64, 64, torch.float16 if on_gpu else torch.float32
q, k, v = torch.randn(3, 2, n, d, device=DEVICE, dtype=dtype)
plainly = F.scaled_dot_product_attention(q, k, v, is_causal=True)
tiles_seen = sum(range(1, n // tile + 1))  # 1 + 2 + 3 + 4 tiles of keys
if has_triton:
    out = torch.empty_like(q)
    launched = (tiny_attention[(n // tile, 2)], (q, k, v, out, n, math.log2(math.e) / d**0.5))
    with nullcontext() if on_gpu else counted_bytes() as asked:
        launched[0](*launched[1], D=d, BLOCK_M=tile, BLOCK_N=tile)
    torch.testing.assert_close(out, plainly, rtol=1e-3, atol=1e-3)
    print("the output of PyTorch's attention, from 30 lines")
    if asked:
        whole = 2 * n * d * 4  # bytes of one of the tensors
        print(f"read {asked['read']:,} bytes, written {asked['written']:,}: O once, and no score at all")
        assert asked["written"] == whole
        assert asked["read"] == whole + 2 * whole * tiles_seen * tile / n  # Q once, K and V as often as tiles saw them
widgets.reveal("05a-loads", tiles_seen * tile / n)

# %% [markdown] name="scratch-reading"
# That is FlashAttention. The rest of this part explains why it is exact, counts what it saves, and shows what the
# engine adds to these lines: block tables, ragged batches, windows, 8-bit caches.

# %% [markdown] name="hierarchy-text"
# ### Desk and cellar: where each tensor of attention is stored
#
# Shared memory and registers are the desk, device memory (HBM) is the cellar. The L2 cache is between them: the hardware
# fills it, and a programmer steers it, by the order of the programs, by hints on loads (keep this, drop that first) and
# by a window of addresses that persists. The cell lists the capacity and bandwidth of each level of an H100.

# %% name="hierarchy"
chip = H100.chip
levels = (
    ("registers", chip.register_bytes, chip.register_bandwidth),
    ("shared memory", chip.shared_bytes, chip.shared_bandwidth),
    ("L2 cache", chip.l2_bytes, chip.l2_bandwidth[0]),
    ("device memory", H100.capacity, H100.bandwidth),
)
widgets.table(
    [
        (name, format_bytes(size, binary=name in ("registers", "shared memory")), f"{bandwidth / 1e12:.2f} TB/s")
        for name, size, bandwidth in levels
    ],
    ["level", "all SMs together", "bandwidth"],
)

# %% [markdown] name="lives-text"
# And what *one program* of the engine's kernel keeps on its SM: a tile of 128 queries, iterating over keys in tiles of 64,
# with head_dim 128.

# %% name="lives"
M, N, D, STAGES = 128, 64, 128, 2
LIVES = {
    "Q": ("device to shared, once", M * D * 2, "shared"),
    "K, V tiles": (f"device or L2 to shared, {STAGES} in flight", STAGES * 2 * N * D * 2, "shared"),
    "scores, weights": ("registers only", M * N * 4, "registers"),
    "m and l": ("registers only", 2 * M * 4, "registers"),
    "accumulator": ("registers, until the end", M * D * 4, "registers"),
}
use = {level: sum(size for _, size, where in LIVES.values() if where == level) for level in ("shared", "registers")}
assert use["shared"] <= chip.shared_bytes_per_sm
assert use["registers"] <= chip.register_bytes_per_sm
print(f"shared {use['shared'] / KiB:.0f} of {chip.shared_bytes_per_sm / KiB:.0f} KiB")
print(f"registers {use['registers'] / KiB:.0f} of {chip.register_bytes_per_sm / KiB:.0f} KiB")
print(f"the sheet of one head, 8,192 tokens: {format_bytes(8192 * 8192 * 2, binary=True)}")
widgets.table(
    [(name, format_bytes(size, binary=True), where) for name, (where, size, _) in LIVES.items()]
    + [("O", "", "written to device memory once"), ("block table", "", "read from device memory, 4 bytes a block")],
    ["tensor", "on the SM", "where"],
)

# %% name="hierarchy-figure" jupyter={"source_hidden": true}
from matplotlib.patches import Rectangle

fig = figure(7.8, 3.0)
ax = fig.subplots()
homes = {"registers": "scores, weights, m, l, accumulator", "shared memory": "the Q tile; K and V tiles, two in flight",
         "L2 cache": "K and V that other programs use too", "device memory": "Q, K, V, O, block table"}  # fmt: skip
for i, ((name, size, bandwidth), colour) in enumerate(zip(levels, (ORANGE, SKY, GREEN, GREY), strict=True)):
    half = 2.4 + 0.75 * i
    ax.add_patch(Rectangle((5 - half, -i), 2 * half, 0.8, facecolor=colour, alpha=0.45, edgecolor=INK))
    ax.text(
        5, 0.52 - i, f"{name}: {format_bytes(size)}, {bandwidth / 1e12:.3g} TB/s", ha="center", va="center", fontsize=9
    )
    ax.text(5, 0.22 - i, homes[name], ha="center", va="center", fontsize=8, color=INK)
ax.text(10.0, 0.5, "the sheet of scores:\nnowhere", fontsize=9, color=RED, ha="left", va="center")
ax.set_xlim(0, 12.4)
ax.set_ylim(-3.1, 0.95)
ax.axis("off")
show(
    fig,
    "Four levels of memory of an H100, small and fast above, large and slow below. Registers hold scores, weights, maxima, "
    "sums and the accumulator; shared memory holds tiles of Q, K and V; the L2 cache holds keys and values that several "
    "programs read; device memory holds Q, K, V, O and the block table. The matrix of scores lives nowhere.",
)

# %% [markdown] name="words"
# **Words you need here.** An H100 has 132 *streaming multiprocessors* (SMs). A kernel is a grid of *programs* (CUDA
# says *thread blocks*). A program stays on one SM. It has threads, and 32 threads form a *warp*, which runs in
# lockstep: where they branch differently, the branches run one after the other (*divergence*). Warps of a program wait
# for each other at *barriers* and exchange data through shared memory, which has 32 *banks* of 4 bytes: if threads of a
# warp access different words of one bank, the accesses are serialized (*bank conflict*). *Occupancy* is how many warps
# an SM holds at once, relative to its maximum, limited by registers and shared memory. Triton lets you write a whole
# program as operations on tiles, and handles threads, banks and barriers itself; part b shows what it decides for you.
# <!-- printed: splits -->

# %% name="banks"
ROW = 64  # words of 4 bytes in a row of a tile in shared memory
accesses = {
    "a row, side by side": range(32),
    "all the same word": [7] * 32,
    "a column": [thread * ROW for thread in range(32)],
    "a column, rows padded by one word": [thread * (ROW + 1) for thread in range(32)],
}
print(f"3 threads of a warp take one side of a branch, 29 the other: {warp.branch_passes([0] * 3 + [1] * 29)} passes")
widgets.table([(what, warp.bank_passes(words)) for what, words in accesses.items()], ["one warp reads", "passes"])

# %% [markdown] name="memory-text"
# ### A memory that counts
#
# To compare orders of loops, plain Python is enough. First, attention as three kernels, each of which reads its input
# from memory and writes its output there. Those are the **three round trips**: S, P, and the operands.


# %% name="scratch-memory"
class Memory:
    """Device memory: tensors by name, and how many values of each were read and written."""

    def __init__(self, **tensors):
        self.tensors, self.read, self.written = tensors, Counter(), Counter()

    def load(self, name, rows=slice(None)):
        part = self.tensors[name][rows].clone()
        self.read[name] += part.numel()
        return part

    def store(self, name, rows, part):
        self.tensors[name][rows] = part
        self.written[name] += part.numel()

    @property
    def moved(self):
        return self.read.total() + self.written.total()


# %% [markdown] name="scratch-plain-text"
# Three lines are three kernels: products, softmax, products.


# %% name="scratch-plain"
def fresh(n, d):
    names = {"Q": d, "K": d, "V": d, "O": d, "S": n, "P": n, "m": 1, "l": 1}
    data = torch.Generator().manual_seed(n + d)
    return Memory(**{name: torch.randn(n, width, generator=data, dtype=torch.float64) for name, width in names.items()})


EVERY = slice(None)


def plain(memory):
    d = memory.tensors["Q"].shape[1]
    memory.store("S", EVERY, memory.load("Q") @ memory.load("K").T / d**0.5)
    memory.store("P", EVERY, memory.load("S").softmax(-1))
    memory.store("O", EVERY, memory.load("P") @ memory.load("V"))


n, d = 512, 64
memory = fresh(n, d)
plain(memory)
share = traffic.score_values(n) / memory.moved
print(f"together {memory.moved:,} values, of them {share:.0%} scores and probabilities")
assert memory.moved == traffic.unfused_values(n, d)
widgets.table(
    [(name, memory.read[name], memory.written[name]) for name in "QKVSPO"], ["tensor", "values read", "written"]
)

# %% [markdown] name="online-text"
# ### Online softmax
#
# Softmax seems to need all scores first: `exp(s_j) / sum_i exp(s_i)`. Without a maximum it overflows. With one, it
# takes three passes: the maximum, the sum, the quotients. Here is the update of the three notes for one more tile:


# %% name="online"
def update(m, total, acc, scores, values):
    """Notes of some queries after one more tile. scores [queries, keys], values [keys, d]; m and total [queries, 1]."""
    new = torch.maximum(m, scores.amax(1, keepdim=True))
    shrink = (m - new).exp()  # rescales the old notes to the new maximum
    weights = (scores - new).exp()
    return new, total * shrink + weights.sum(1, keepdim=True), acc * shrink + weights @ values


def nothing_yet(rows, d):
    return torch.full((rows, 1), -math.inf).double(), torch.zeros(rows, 1).double(), torch.zeros(rows, d).double()


# %% [markdown] name="online-check-text"
# The notes have a definition each, over everything seen so far. Check it after every tile; tiles may differ in size:

# %% name="online-check"
scores, values = 300 * torch.randn(4, 40).double(), torch.randn(40, 3).double()
bare = scores.float().exp()
print("without a maximum some shares are NaN:", (bare / bare.sum(1, keepdim=True)).isnan().any().item())
notes, seen = nothing_yet(4, 3), 0
for size in (7, 1, 16, 3, 13):
    tile = slice(seen, seen + size)
    notes, seen = update(*notes, scores[:, tile], values[tile]), seen + size
    m, total, acc = notes
    torch.testing.assert_close(m, scores[:, :seen].amax(1, keepdim=True))
    torch.testing.assert_close(total, (scores[:, :seen] - m).exp().sum(1, keepdim=True))
    torch.testing.assert_close(acc, (scores[:, :seen] - m).exp() @ values[:seen])
torch.testing.assert_close(acc / total, scores.softmax(1) @ values)
print("after every tile the three notes are what their definitions say; at the end acc / total is the softmax average")

# %% [markdown] name="proof"
# **Why this is exact, and not an approximation.** Let `m` be the largest score seen, `l = Σ exp(s_j − m)` (total) and
# `acc = Σ exp(s_j − m) v_j`, over all keys `j` seen. With one more tile, the largest score becomes `m'`. Then
#
# `Σ_old exp(s_j − m') = Σ_old exp(s_j − m) · exp(m − m') = l · exp(m − m')`,
#
# because the factor is the same for every `j`. So `l' = l · exp(m − m') + Σ_new exp(s_j − m')`, and the same equation
# with `v_j` after each term gives `acc'`. The invariant holds before the first tile (`m = −∞`, two empty sums), each
# tile keeps it, and after the last one `acc / l = Σ exp(s_j − m) v_j / Σ exp(s_j − m)`, where `exp(−m)` cancels. That
# is softmax. In floating point it rounds differently, like any other order of summation.
#
# The proof does not depend on the size of a tile or on the order of the tiles. So a tile may be as large as the desk.

# %% [markdown] name="tiled-text"
# ### Tiles, in two orders
#
# Two loops, over tiles of queries and over tiles of keys. Which is the outer one? **In FlashAttention (2022) it was the
# keys**: a tile of keys stays on the desk, and all queries pass over it. Then the notes of each query go down to the
# cellar and come up again for every tile of keys. **In FlashAttention-2 (2023) it is the queries**: their notes stay on
# the desk to the end, and the keys pass by. Pseudo-code "of FlashAttention" is nearly always this second one.


# %% name="tiled"
def tiles(n, rows):
    return [slice(at, min(at + rows, n)) for at in range(0, n, rows)]


def flash1(memory, query_rows, key_rows):
    n, d = memory.tensors["Q"].shape
    for name, note in zip(("m", "l", "O"), nothing_yet(n, d), strict=True):
        memory.store(name, EVERY, note)
    for at_k in tiles(n, key_rows):
        k, v = memory.load("K", at_k), memory.load("V", at_k)
        for at_q in tiles(n, query_rows):
            m, total, o = (memory.load(name, at_q) for name in ("m", "l", "O"))
            m, total, acc = update(m, total, o * total, memory.load("Q", at_q) @ k.T / d**0.5, v)
            for name, note in (("m", m), ("l", total), ("O", acc / total)):  # O is stored normalized, as in the paper
                memory.store(name, at_q, note)


# %% [markdown] name="tiled-second-text"
# The second order is shorter, because nothing has to be put away:


# %% name="tiled-second"
def flash2(memory, query_rows, key_rows):
    n, d = memory.tensors["Q"].shape
    for at_q in tiles(n, query_rows):  # each a separate program: they never interact
        q, notes = memory.load("Q", at_q), nothing_yet(at_q.stop - at_q.start, d)
        for at_k in tiles(n, key_rows):
            notes = update(*notes, q @ memory.load("K", at_k).T / d**0.5, memory.load("V", at_k))
        _, total, acc = notes
        memory.store("O", at_q, acc / total)  # stored once, divided once


# %% [markdown] name="tiled-count-text"
# 512 tokens, tiles of 128 queries and 64 keys: 8 tiles of keys, 4 of queries. How often does the first order write each
# value of O?

# %% name="predict-output"
widgets.predict("05a-output", "How many times does the first order write each value of O?", "times")

# %% name="tiled-count"
counted = {"three kernels": memory}
for name, order in (("FlashAttention 1", flash1), ("FlashAttention 2", flash2)):
    counted[name] = fresh(n, d)
    order(counted[name], 128, 64)
    torch.testing.assert_close(counted[name].tensors["O"], memory.tensors["O"])
assert counted["FlashAttention 1"].moved == traffic.flash1_moves(n, d, 64).total
assert counted["FlashAttention 2"].moved == traffic.flash2_moves(n, d, 128).total
print(widgets.reveal("05a-output", counted["FlashAttention 1"].written["O"] / (n * d)))
each = n * d
widgets.table(
    [
        (
            name,
            m.moved,
            m.read["K"] // each,
            m.read["O"] // each,
            m.written["O"] // each,
            m.written["S"] + m.written["P"],
        )
        for name, m in counted.items()
    ],
    ["", "values moved", "K read (times)", "O read", "O written", "S and P written (values)"],
)

# %% [markdown] name="tiled-reading"
# All three give the same output. With 8 tiles of keys, the first order reads O eight times, and writes it nine times
# (once as zeros). The second never reads it. The price is on the other side: K and V are read once for each tile of
# queries.

# %% [markdown] name="engine-text"
# ## 4. The same thing inside the engine
#
# The engine's Triton kernel uses the second order, as the thirty lines did. Here is its inner loop, from the file,
# without the parts for windows, trees, quantized caches and skipped tiles (`needed` is for those).

# %% name="engine-kernel"
if has_triton:
    module = inspect.getsource(inspect.getmodule(flash_attention))
    begin = module.index("        for n in range(start, stop, BLOCK_N)")
    loop = module[begin : module.index("\n\n", begin)]
    hidden = re.compile(r"\n +if (QUANTIZED|SOFTCAP|WINDOW|TREE|SKIP)\b[^\n]*:[^\n]*\n( +).*?(?=\n(?!\2))", re.DOTALL)
    print(hidden.sub("", "\n" + loop).strip("\n"))

# %% [markdown] name="engine-reading"
# `largest`, `total` and `acc` are m, l and acc. Two things are new. Keys are found through the **block table**, so the
# same kernel reads prompts, chunks of prompts and cached prefixes. And tiles that every query attends to in full
# (`phase 1`) skip the mask.
#
# Does it compute the same? Rows of a real step: a whole prompt, a chunk after a prefix, a decoding token. The cache is
# filled with NaN wherever no token was written. The rule for "the same": its error against float64 may be at most twice
# the error of plain torch in the same precision, plus the last bit.


# %% name="paged-rows"
def paged(rows, heads, kv_heads, d, dtype=torch.float16, block_size=16, seed=0):
    """(q, keys, values, block_table, query_start_loc, seq_lens, scale) of rows (queries, context), blocks anywhere."""
    data = torch.Generator().manual_seed(seed)
    needed = [-(-context // block_size) for _, context in rows]
    ids = torch.randperm(sum(needed) + 3, generator=data)
    table = torch.zeros(len(rows), max(needed), dtype=torch.int32)
    keys, values = torch.full((2, len(ids), block_size, kv_heads, d), math.nan, dtype=dtype)
    for row, blocks in enumerate(ids[: sum(needed)].split(needed)):
        table[row, : len(blocks)] = blocks
        slots = reference.context_slots(table[row], rows[row][1], block_size)
        for cache in (keys, values):
            cache.flatten(0, 1)[slots] = torch.randn(len(slots), kv_heads, d, generator=data).to(dtype)
    starts = torch.tensor([0, *(queries for queries, _ in rows)]).cumsum(0).int()
    q = torch.randn(int(starts[-1]), heads, d, generator=data).to(dtype)
    lens = torch.tensor([context for _, context in rows]).int()
    return *(t.to(DEVICE) for t in (q, keys, values, table, starts, lens)), d**-0.5


# %% [markdown] name="engine-check-text"
# The rule needs two runs of the plain twin: one in float64, one in the precision of the kernel.


# %% name="engine-check"
def doubled(arguments):
    return [a.double() if torch.is_tensor(a) and a.dtype in (torch.float16, torch.float32) else a for a in arguments]


def errors(found, twin, arguments, **options):
    """(error of the result, error the rule allows) against float64."""
    exact, same = twin(*doubled(arguments), **options), twin(*arguments, **options)
    allowed = 2 * (same - exact).abs().max() + 2 * torch.finfo(found.dtype).eps * exact.abs().max()
    return float((found - exact).abs().max()), float(allowed)


case = paged([(65, 65), (40, 150), (1, 90)], heads=4, kv_heads=2, d=64)
q, keys, values, table, _, lens, scale = paged([(1, length) for length in (5, 700, 1300)], 8, 2, 64)
decode_case = (q, keys, values, table, lens, int(lens.max()), scale)
checked = {
    "flash attention, ragged rows over a paged cache": (flash_attention, reference.flash_attention, case),
    "paged decode, contexts of 5, 700 and 1,300": (paged_decode, reference.paged_decode, decode_case),
}
for what, (kernel, twin, arguments) in checked.items():
    error, allowed = errors(kernel(*arguments), twin, arguments)
    print(f"{what}: error {error:.1e}, allowed {allowed:.1e}")
    assert error <= allowed

# %% [markdown] name="paths-text"
# ### Which attention kernel ran?
#
# In PyTorch attention is one call, `scaled_dot_product_attention`, with several kernels behind it: FlashAttention,
# cuDNN, a memory-efficient one, and *math*, which is the three kernels from above. It chooses by device, type, shape,
# mask and strides, **silently**. A fallback to math gives the right numbers, slowly, with the whole score matrix. So
# check.


# %% name="operations" jupyter={"source_hidden": true}
class Operations(TorchDispatchMode):
    """Counts the operations that torch executes. Attention that arrives as one call is decomposed."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is torch.ops.aten.scaled_dot_product_attention.default:
            with self:
                return operation.decompose(*args, **(kwargs or {}))
        self.count[operation.name().removeprefix("aten::")] += 1
        return operation(*args, **(kwargs or {}))


def path(count):
    """What ran as attention. Unfused it is softmax between two products; in inference mode it arrives as "math"."""
    unfused = [name for name in count if "softmax" in name or name.endswith("attention_math")]
    fused = [name for name in count if name.startswith("_scaled_dot_product") and name not in unfused]
    return ", ".join(fused + [f"UNFUSED: {name}" for name in unfused]) or "none"


def which(call):
    with Operations() as asked:
        call()
    return path(asked.count)


# %% name="predict-paths"
widgets.predict("05a-fallbacks", "Six calls follow. How many of them does a CPU compute unfused?", "calls")

# %% name="paths"
dtype = torch.float16 if on_gpu else torch.float32
q = torch.randn(1, 4, 64, 32, device=DEVICE, dtype=dtype)
strided = q.transpose(2, 3).contiguous().transpose(2, 3)  # the same numbers, head_dim not contiguous
causal = torch.ones(64, 64, dtype=torch.bool, device=DEVICE).tril()
attend = F.scaled_dot_product_attention
calls = {
    "causal": lambda: attend(q, q, q, is_causal=True),
    "grouped heads": lambda: attend(q, q[:, :2], q[:, :2], enable_gqa=True),
    "a mask": lambda: attend(q, q, q, attn_mask=causal),
    "values with other strides": lambda: attend(q, q, strided),
    "values with another head_dim": lambda: attend(q, q, q[..., :16]),
    "dropout (only in training)": lambda: attend(q, q, q, dropout_p=0.1),
}
ran = {what: which(call) for what, call in calls.items()}
print(widgets.reveal("05a-fallbacks", sum("UNFUSED" in kernel for kernel in ran.values())))
widgets.table(list(ran.items()), ["the call", "what ran"])

# %% [markdown] name="paths-demanded-text"
# If you *require* a backend, a silent fallback becomes an error, and PyTorch says why:

# %% name="paths-demanded"
with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
    print(f"required: {which(lambda: attend(q, q, q, is_causal=True))}")
    with warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        try:
            attend(q, q, q[..., :16])
        except RuntimeError as refusal:
            print(f"required, and impossible: refused: {str(refusal).strip()}")
    print("the reason:", str(reasons[-1].message).partition("(Triggered")[0].strip())

# %% [markdown] name="engine-path-text"
# And the engine? Each step of its trace records which kernels computed attention. The cell serves two prompts with
# torch, checks what torch ran, and fails on a fallback. Then the same engine runs a prompt on our kernels, and must
# give the same tokens.


# %% name="engine-kept" jupyter={"source_hidden": true}
class Kept(TorchAttention):
    """The engine's attention in torch; records the inputs of the layers in the first step."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.kept = {}

    def forward(self, q, k, v, layer, kv_cache, batch):
        self.kept.setdefault(layer, tuple(t.detach().clone() for t in (q, k, v)))
        return super().forward(q, k, v, layer, kv_cache, batch)


llm = LLM(course_model("target"), dtype="float32", kv_cache_bytes=16 * MiB, prefix_cache="off")
model = llm.engine.model
text = llm.encode(inspect.getsource(Engine))
kept = Kept(model.config.attention_scale, model.dtype)
engine = Engine(
    model, EngineConfig(num_blocks=64, prefix_cache="off", max_num_batched_tokens=1024), Parts(attention=kept)
)


# %% name="engine-path"
def served(engine, *prompts):
    """The outputs, and the attention kernels of each step by the trace."""
    greedy = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    requests = [engine.add(prompt, greedy) for prompt in prompts]
    while engine.has_work():
        engine.step()
    return [request.output_tokens for request in requests], [step.attention for step in engine.trace.steps()]


with Operations() as asked:
    tokens, said = served(engine, text[:512], text[600:640])
print(f"torch: {len(said)} steps, the trace says {set(said)}, torch ran {path(asked.count)}")
if not on_gpu:  # on a GPU torch has no fused kernel for float32 with grouped heads: the engine does not use it there
    assert "UNFUSED" not in path(asked.count), "no layer fell back to three kernels"
if has_triton:
    ours = Engine(model, EngineConfig(num_blocks=64, prefix_cache="off", attention="triton"))
    by_kernels, said = served(ours, text[600:640])
    print(f"ours: {said}")
    assert by_kernels == tokens[1:], "token for token"
    assert said == [("flash_attention",)] + 3 * [("paged_decode",)], "prefill on one kernel, decode on the other"

# %% [markdown] name="measure"
# ## 5. Measure and explain
#
# ### Traffic: the formula with its constants, and counted loads
#
# "O(N²d²/M)" hides the constants. With them, in values, per head:
#
# | order | moves | where it comes from |
# |---|---|---|
# | three kernels | `4N² + 4Nd` | the four `N²` are S and P, written and read |
# | FlashAttention 1 | `12 N²d²/M` | `N·4d/M` tiles of keys, each reads Q, reads O, writes O |
# | FlashAttention 2 | `2N²d/rows + 2Nd` | `N/rows` tiles of queries, each reads K and V |
# | floor | `4Nd` | everything once; reached where the L2 cache serves the repeats |
#
# The next cell counts loads with the code from above, at small sizes, and draws them on the curves.

# %% name="predict-traffic"
widgets.predict(
    "05a-traffic", "1,024 tokens, head_dim 64: how many times fewer values does FlashAttention 2 move?", "times"
)

# %% name="traffic"
points, d, ROWS = {}, 64, 128
sram = 48 * KiB / 2  # values that fit into 48 KiB
key_rows = traffic.flash1_key_rows(d, int(sram))
orders = {
    "three kernels": (plain, lambda n: traffic.unfused_moves(n, d)),
    "FlashAttention 1": (lambda m: flash1(m, ROWS, key_rows), lambda n: traffic.flash1_moves(n, d, key_rows)),
    "FlashAttention 2": (lambda m: flash2(m, ROWS, 64), lambda n: traffic.flash2_moves(n, d, ROWS)),
}
for n in (256, 512, 1024):
    for name, (run, expected) in orders.items():
        memory = fresh(n, d)
        run(memory)
        points[name, n] = memory.moved
        assert memory.moved == expected(n).total
lengths = 2 ** np.arange(8, 16)
curves = {
    "three kernels": traffic.unfused_values(lengths, d),
    "FlashAttention 1": traffic.flash1_values(lengths, d, sram),
    "FlashAttention 2": traffic.flash2_values(lengths, d, ROWS),
    "floor": traffic.fused_floor_values(lengths, d),
}
widgets.reveal("05a-traffic", points["three kernels", 1024] / points["FlashAttention 2", 1024])

# %% name="traffic-table" jupyter={"source_hidden": true}
rows = []
for (name, n), moved in points.items():
    formula = curves[name][list(lengths).index(n)]
    rows.append((name, n, moved, f"{formula:,.0f}", f"{moved / formula:.2f}"))
widgets.table(rows, ["order", "tokens", "values counted", "formula", "counted / formula"])

# %% name="traffic-figure" jupyter={"source_hidden": true}
fig = figure(7.6, 3.2)
ax = fig.subplots()
for (name, curve), (colour, style) in zip(
    curves.items(), ((GREY, "-"), (PURPLE, "--"), (BLUE, "-."), (GREEN, ":")), strict=True
):
    ax.plot(lengths, 2 * curve / 1e6, color=colour, linestyle=style, linewidth=2, label=name)
for (name, n), moved in points.items():
    ax.plot(
        n,
        2 * moved / 1e6,
        {"three kernels": "s", "FlashAttention 1": "^", "FlashAttention 2": "o"}[name],
        color=INK,
        markersize=5,
    )
ax.set_xscale("log", base=2)
ax.set_yscale("log")
ax.set_xticks(lengths, [f"{n:,}" for n in lengths], fontsize=8)
tidy(ax, "tokens of the prompt", "MB moved, one head")
ax.legend(fontsize=8, frameon=False)
show(
    fig,
    "Bytes moved by one head against the length of the prompt, both axes logarithmic. Three kernels move most, the first "
    "and second order of FlashAttention several times less, all three growing with the square. The floor grows linearly. "
    "Counted points at 256, 512 and 1,024 tokens lie on the curves, those of the first order a little above.",
)

# %% [markdown] name="traffic-reading"
# The first order's count lies above its formula where tiles are few: the formula leaves out reading K and V, the zeros
# at the start, and the statistics. All tiled curves still grow with N². Tiling divides the square by a constant: by
# `rows` queries that share a read of the keys. Only the cache makes it linear.
#
# ### Memory
#
# The sheet also takes memory. This cell measures the peak of bytes allocated by torch.


# %% name="alive" jupyter={"source_hidden": true}
class Alive(TorchDispatchMode):
    """Bytes of live tensors created inside, and their maximum."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if torch.is_tensor(tensor) and all(tensor.data_ptr() != a.data_ptr() for a in args if torch.is_tensor(a)):
                self.now += tensor.nbytes
                self.peak = max(self.peak, self.now)
                weakref.finalize(tensor, self.free, tensor.nbytes)
        return out

    def free(self, size):
        self.now -= size


def peak_of(attention, *qkv):
    with Alive() as alive, torch.no_grad():
        began = time.perf_counter()
        out = attention(*qkv)
        float(out[0, 0, 0, 0])
        return alive.peak, time.perf_counter() - began


# %% name="predict-peak"
widgets.predict(
    "05a-memory", "2,048 tokens, head_dim 64: how many times less memory does the fused kernel take?", "times"
)


# %% name="peak"
def unfused(q, k, v):
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return s.softmax(-1) @ v


peaks, rows = {}, []
for n in (256, 512, 1024, 2048) + (8192, 16384) * on_gpu:
    qkv = torch.randn(3, 1, 2, n, 64, device=DEVICE, dtype=dtype)
    sheet, slow = peak_of(unfused, *qkv)
    tiled, fast = peak_of(F.scaled_dot_product_attention, *qkv)
    peaks[n] = (sheet, tiled)
    times = (format_seconds(slow), format_seconds(fast))
    scores = 2 * n * n * qkv.element_size()
    assert sheet >= scores
    rows.append((n, *map(format_bytes, (scores, sheet, tiled)), *times))
assert 3.9 < peaks[2048][0] / peaks[1024][0] < 4.1, "twice the tokens, four times the memory"
assert 1.9 < peaks[2048][1] / peaks[1024][1] < 2.1, "twice the tokens, twice the memory"
print(widgets.reveal("05a-memory", peaks[2048][0] / peaks[2048][1]))
widgets.table(rows, ["tokens", "one matrix of scores", "peak, unfused", "peak, fused", "time, unfused", "time, fused"])

# %% [markdown] name="peak-reading"
# Quadratic against linear, counted. The seconds are this machine's, now. The "2-4x" that is often quoted was measured
# on GPUs of 2022, at the lengths of that time. The gain depends on the position on the roofline.
#
# ### The roofline: three different kernels

# %% name="predict-roofline"
widgets.predict(
    "05a-decode-intensity",
    "Decode, Llama-3-70B in 16 bits: how many FLOP for each byte of keys and values?",
    "FLOP/byte",
)

# %% name="roofline"
n, d = 8192, 128
flops = traffic.prompt_attention_flops(n, d)
intensity = {
    "three kernels": flops / (2 * traffic.score_values(n)),
    "fused prefill, floor": flops / (2 * traffic.fused_floor_values(n, d)),
    "fused prefill, no L2": flops / (2 * traffic.flash2_values(n, d, 128)),
    "decode, 70B (8 queries a KV head)": roofline.decode_attention_intensity(L70),
}
assert intensity["three kernels"] == d / 2
assert intensity["fused prefill, floor"] == n / 2
l2_ridge = [H100.peak() / bandwidth for bandwidth in chip.l2_bandwidth]
print(f"ridge of an H100 in bf16: {H100.ridge():.0f} FLOP/byte")
print(f"ridge of its L2 cache: {l2_ridge[1]:.0f} to {l2_ridge[0]:.0f} FLOP/byte")
print(widgets.reveal("05a-decode-intensity", intensity["decode, 70B (8 queries a KV head)"]))
rows = []
for name, value in intensity.items():
    reached = roofline.attainable_flops(value, H100)
    bound = "memory" if value < H100.ridge() else "arithmetic"
    rows.append((name, f"{value:,.0f}", f"{reached / 1e12:.0f}", bound))
widgets.table(rows, ["attention", "FLOP/byte", "at most, TFLOP/s", "bound by"])

# %% name="roofline-figure" jupyter={"source_hidden": true}
fig = figure(7.4, 3.0)
ax = fig.subplots()
axis = np.logspace(0, 4, 100)
ax.plot(axis, roofline.attainable_flops(axis, H100) / 1e12, color=INK, linewidth=1.5)
looks = ((GREY, "s", (6, -12)), (GREEN, "o", (-110, -14)), (BLUE, "^", (6, -12)), (ORANGE, "D", (6, -12)))
for (name, value), (colour, marker, offset) in zip(intensity.items(), looks, strict=True):
    height = roofline.attainable_flops(value, H100) / 1e12
    ax.plot(value, height, marker, color=colour, markersize=8)
    ax.annotate(name, (value, height), textcoords="offset points", xytext=offset, fontsize=8)
ax.axvline(H100.ridge(), color=GREY, linestyle=":", linewidth=1)
ax.set_xscale("log")
ax.set_yscale("log")
tidy(ax, "FLOP per byte of device memory", "TFLOP/s")
show(
    fig,
    "Roofline of an H100 with four points. Decode attention with 8 and unfused attention with 64 FLOP per byte lie on the "
    "bandwidth slope; fused prefill lies on the flat compute roof if the L2 cache serves repeated keys, and on the slope "
    "with 126 FLOP per byte if it does not.",
)

# %% [markdown] name="roofline-reading"
# - **Unfused**, attention is bound by memory: the time is proportional to the bytes. Fusion wins by removing them. It
#   saves *no* FLOP.
# - **Fused, in prefill**, it is bound by arithmetic. Fewer bytes would no longer help; FlashAttention-2, 3 and 4
#   improve tensor core utilization instead. Look at the third point: without the L2 cache a tile of 128 queries is
#   still below the ridge. Programs that run concurrently must hit the same keys in the L2, and even the L2 is not
#   infinitely fast.
# - **In decode** there is one query. Its scores are one row. There is no sheet to save, and the keys are read once
#   anyway. (The rows are a few percent at large batch: section 7.) Decode attention stays memory-bound, and
#   FlashAttention does not change that. Its problem is a different one:

# %% [markdown] name="decode-text"
# ### Decode: too few programs
#
# A program per query tile and head fills a GPU with a long prompt. One decoding request has a single query. With one
# program per KV head (so that the group shares one read), Llama-3-8B has 8 programs, for 132 SMs. *Flash-Decoding* (Dao
# et al., 2023) divides the **keys** into splits, each a separate program, and merges the partial results. `wave_share`
# is the average share of busy SMs, if all programs take equally long:
# <!-- printed: splits -->

# %% name="predict-splits"
widgets.predict("05a-busy", "Decode, batch 1, eight KV heads, no splits: what share of the 132 SMs works?", "%")

# %% name="splits"
sms = chip.num_sms
cases = {
    "prefill of 8,192 tokens, 32 heads, FA-1's schedule: batch x heads": 32,
    "the same, FA-2: query tiles of 128 as well": 32 * 64,
    "decode, batch 1, 8 KV heads, no splits": 8,
    f"decode, batch 1, context 32,768, splits of {SPLIT}": 8 * 32768 // SPLIT,
    "decode, batch 64, no splits": 64 * 8,
}
overhead = traffic.split_overhead(SPLIT, 4, 128)
print(f"a split of {SPLIT} writes and reads {overhead:.1%} beside its keys and values (groups of 4)")
print(widgets.reveal("05a-busy", 100 * traffic.wave_share(8, sms)))
widgets.table(
    [(what, programs, f"{traffic.wave_share(programs, sms):.1%}") for what, programs in cases.items()],
    ["what", "programs", f"of {sms} SMs"],
)

# %% [markdown] name="merge-text"
# How do you merge? A split returns its weighted **mean** `o` and its **log-sum-exp** `lse = m + log l`, the log of its
# total weight. The result is the mean of the means, weighted by `exp(lse)`. It is the proof of section 3 again, with
# splits instead of tiles. Here is the engine's merge (base 2, like the kernel), which also handles *empty* splits:

# %% name="merge"
print(inspect.getsource(reference.merge_splits))


def part(q, k, v):
    """(mean, lse) of queries [n, d] over some keys; lse in base 2, -inf for no keys at all."""
    s = q @ k.T / q.shape[-1] ** 0.5 * math.log2(math.e)
    lse = torch.logsumexp(s * math.log(2), -1) / math.log(2)
    return s.mul(math.log(2)).softmax(-1) @ v, lse


def merged(parts):
    means, lses = zip(*parts, strict=True)
    return reference.merge_splits(torch.stack(means), torch.stack(lses))


q, k, v = torch.randn(1, 64).double(), *torch.randn(2, 1000, 64).double()
whole = part(q, k, v)[0]
for sizes in ([1000], [500, 500], [1, 998, 1], [0, 700, 0, 300]):
    found = merged([part(q, *both) for both in zip(k.split(sizes), v.split(sizes), strict=True)])
    torch.testing.assert_close(found, whole)
    print(f"splits of {sizes}: largest difference {float((found - whole).abs().max()):.0e}")
naive = torch.stack([part(q, *both)[0] for both in zip(k.split([700, 300]), v.split([700, 300]), strict=True)]).mean(0)
print(f"a plain mean of the means instead: off by {float((naive - whole).abs().max()):.2f}")

# %% [markdown] name="merge-reading"
# Our `paged_decode` does exactly that, with splits of a fixed number of keys. Why not as many splits as fill the GPU?
# That number would depend on the other requests in the batch, and a sum in another order rounds differently: a
# request's output would depend on the rest of the batch (chapter 02). Part c uses the same merge for shared prefixes
# and for contexts that are spread over devices.
#
# ### Two problems to work
#
# One deployment: Llama-3-70B in BF16 on four H100 with 80 GB, tensor parallelism over all four. Take a pencil first;
# the formulas are in this section. <!-- tested: tests/claims/test_chapter_05.py::test_worked_problems_of_part_a -->
#
# **Problem 1.** One prompt of 8,192 tokens, causal. On each GPU, at the tensor cores' peak: how long do the products of
# attention take, what share of the arithmetic of this prefill are they, and what would three kernels add at the full
# bandwidth of the memory?
#
# <details><summary>Answer</summary>
#
# A GPU has 16 of the 64 heads. The products are 4 · 8,192² · 128 / 2 FLOP for a head and layer, half because of the
# mask; times 16 heads and 80 layers 22 TFLOP, or 22 ms. The linear layers need 2 FLOP per weight and token: 280 TFLOP on
# each GPU, 283 ms. So attention is 7 % of the arithmetic at 8k. Three kernels move the sheet, 4 · 2 · 8,192² bytes for a
# head and layer if they ignore the mask: 687 GB on each GPU, 205 ms. Attention as a whole would take ten times as long,
# and this prefill two thirds longer. <!-- tested: tests/claims/test_chapter_05.py::test_worked_problems_of_part_a -->
#
# </details>
#
# **Problem 2.** 32 requests decode at a context of 8,192. On each GPU and step: how many bytes of cache beside how many
# of weights? How many programs has attention with one for each request and KV head, and with splits of 512 keys? And what
# share of the bytes would unfused attention add with its rows of scores?
#
# <details><summary>Answer</summary>
#
# A GPU has 2 of the 8 KV heads: 81,920 bytes for a token (two tensors, 2 heads, 128 values, 2 bytes, 80 layers). Times 32
# requests and 8,192 tokens that is 21.5 GB, beside 35.3 GB of weights, so a step takes at least 17 ms. Without splits
# there are 64 programs in a layer, on 132 SMs: 48 % work. Splits of 512 make 1,024, and 97 % work. The rows: 16 heads,
# written and read as scores and as probabilities, are 2.7 GB, 4.7 % of those bytes.
# <!-- tested: tests/claims/test_chapter_05.py::test_worked_problems_of_part_a -->
#
# </details>

# %% [markdown] name="explore"
# ## 6. Explore
#
# The tile stepper, over scores of the course model: eight queries of a head in the middle layer, 40 keys, tiles of 8.
# Watch `m`, `l` and `acc`. Where does `m` jump, and how does that change `l`? Which tiles change the mean at all?

# %% name="real-keys" jupyter={"source_hidden": true}
layer = model.config.num_layers // 2
q, k, v = (t[:512].to(DEVICE) for t in kept.kept[layer])  # [tokens, heads, head_dim] of the course model
heads, kv_heads, d = q.shape[1], k.shape[1], q.shape[2]
table = torch.arange(32, device=DEVICE).int()[None]
starts, lens = torch.tensor([0, 512], device=DEVICE).int(), torch.tensor([512], device=DEVICE).int()
paged_kv = [t.view(32, 16, kv_heads, d) for t in (k, v)]
all_queries = (q, *paged_kv, table, starts, lens, d**-0.5)
exact = reference.flash_attention(*doubled(all_queries)).cpu()


def relative(found):
    return float((found.double() - exact).norm() / exact.norm())


# %% name="explore-steps"
head, kv_head = 1, 1 // (heads // kv_heads)
some_q, some_k, some_v = q[32:40, head], k[:40, kv_head], v[:40, kv_head, :6]
real_scores = (some_q @ some_k.T * d**-0.5).masked_fill(~reference.causal_mask(8, 40, DEVICE), -math.inf)
steps = online_softmax.record(real_scores.cpu().double(), some_v.cpu().double(), 8)
plainly = (real_scores.softmax(1) @ some_v).cpu().double()
torch.testing.assert_close(torch.tensor(steps[-1].mean), plainly, rtol=1e-4, atol=1e-4)
widgets.tile_stepper(steps, step=2, query=5)

# %% [markdown] name="explore-traffic-text"
# And the traffic counter. Try: (1) head_dim from 64 to 256 under the first order. When does it move *more* than three
# kernels? (2) Double the queries of a tile. Which part of which bar halves? (3) Which bars depend on the size of shared
# memory?

# %% name="explore-traffic"
widgets.attention_traffic()

# %% [markdown] name="errata"
# ## 7. What the cheat sheets get wrong
#
# **"The 8,192 x 8,192 matrix is 512 MB", or 268, or 256.** (E05.1) Three sources, three sizes. Say values, type, unit, and
# that it is *per head, layer and sequence*.

# %% name="errata-size"
count = kv_cache.score_bytes(1, 8192, 8192, 1)
rows = []
for what, num_heads in (("one head", 1), ("a layer of the 70B, 64 heads", 64)):
    for kind, size in (("fp16", 2), ("fp32", 4)):
        stored = num_heads * size * count
        rows.append((what, kind, f"{num_heads * count:,}", format_bytes(stored), format_bytes(stored, binary=True)))
print(f"512 MiB in fp16 is {math.isqrt(512 * MiB // 2):,} tokens")
print("written and read for S and P in one pass:", ", ".join(f"{moved / 1e12:.2f} TB" for moved in travelled.values()))
widgets.table(rows, ["8,192 tokens", "type", "values", "bytes", "binary"])

# %% [markdown] name="errata-savings"
# **"FlashAttention reads 5-20 times (or about 10 times) less."** (E05.2) Less than what, for which `d`, with how much
# shared memory, in which order? At 8,192 tokens, compared with three kernels:

# %% name="errata-savings-cell"
rows = []
for head_dim in (64, 128):
    base = traffic.unfused_values(8192, head_dim)
    ways = {f"FA-1, {kib} KiB": traffic.flash1_values(8192, head_dim, kib * KiB / 2) for kib in (100, 192)}
    ways |= {
        "FA-2, tiles of 128, no L2": traffic.flash2_values(8192, head_dim, 128),
        "floor": traffic.fused_floor_values(8192, head_dim),
    }
    rows.append((head_dim, *(f"{base / moved:.1f}x" for moved in ways.values())))
widgets.table(rows, ["head_dim", *ways])

# %% [markdown] name="errata-savings-reading"
# From 1.1 to 129 times.
# <!-- printed: errata-savings-cell -->
#
# The paper's own measurement (40.3 GB to 4.4 GB) is one configuration: GPT-2 medium, d = 64, 1,024 tokens, forward *and
# backward* pass, on an A100. Its baseline also made passes for masks, dropout and casts, and stored P for the backward
# pass, which inference does not have. Derive the factor, or measure bytes with a profiler.
# <!-- source: FlashAttention, Dao et al., 2022, figure 2 -->
#
# **"FlashAttention: outer loop over Q, inner loop over K and V."** (E05.3) That is FlashAttention-2. You counted both:
# the first order read O once per tile of keys. The update in such pseudo-code (rescale, add, divide once at the end)
# is FlashAttention-2's as well.
#
# **"FlashAttention-2 has fewer operations thanks to fewer synchronizations", "… better partitioning across SMs".**
# (E05.4) It made three changes, each for a different bottleneck. Count each:


# %% name="errata-changes-count" jupyter={"source_hidden": true}
class Elementwise(TorchDispatchMode):
    """Results of operations other than matrix products, copies and views: the work of the slow units."""

    FREE = ("mm", "t.", "view", "clone", "slice", "copy_", "detach", "zeros", "full", "transpose", "_to_copy", "select")
    results = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        name = operation.name().removeprefix("aten::")
        if torch.is_tensor(out) and not any((name + ".").startswith(free) for free in self.FREE):
            self.results += out.numel()
        return out


# %% name="errata-changes"
work = {}
for name, order in (("FA-1", flash1), ("FA-2", flash2)):
    memory = fresh(512, 64)
    with Elementwise() as elementwise:
        order(memory, 128, 64)
    work[name] = elementwise.results
assert work["FA-2"] < work["FA-1"]
print(f"(1) divide once at the end: {work['FA-1']:,} results outside of matrix products become {work['FA-2']:,}")
print(f"    tensor cores against other units, FLOP/s of an H100: {H100.peak() / H100.peak('fp32'):.0f} times")
for batch in (1, 16):
    before, after = (traffic.wave_share(batch * 32 * t, sms) for t in (1, 64))
    print(
        f"(2) a program per query tile, too: batch {batch}, 32 heads, 8,192 tokens fill {before:.0%} of the SMs before"
    )
    print(f"    and {after:.0%} after")
q4, k4, v4 = torch.randn(64, 64).double(), *torch.randn(2, 64, 64).double()
# Four warps: each all queries and 16 keys, or each 16 queries and all keys.
by_keys = [part(q4, k, v) for k, v in zip(k4.split(16), v4.split(16), strict=True)]
by_queries = [part(q, k4, v4)[0] for q in q4.split(16)]
torch.testing.assert_close(merged(by_keys), torch.cat(by_queries))
exchanged = sum(mean.numel() + lse.numel() for mean, lse in by_keys)
print(f"(3) four warps split the queries, not the keys: {exchanged:,} values through shared memory become 0")

# %% [markdown] name="errata-changes-reading"
# (1) relieves the slow units, (2) fills the GPU at small batch, (3) removes an exchange inside a program. (1) matters
# more than it seems, since tensor cores do a FLOP that many times faster than the other units.
#
# **"Attention is bandwidth-bound: halve the traffic, halve the time."** (E05.5) True for three kernels and for decode.
# Fused prefill is under the flat roof of section 5.

# %% name="errata-bound"
for name, value in (("three kernels", 64), ("decode, 70B", 8), ("fused prefill, 8,192", 4096)):
    gain = roofline.attainable_flops(2 * value, H100) / roofline.attainable_flops(value, H100)
    print(f"{name:22s} half of the bytes make it {gain:.1f} times faster")
row, cache = kv_cache.score_bytes(64, 1, 8192), kv_cache.cache_bytes(L70, 8192) / L70.layers
print(
    f"decode, 70B at 8,192: the rows of scores are {format_bytes(row)} in a layer, keys and values {format_bytes(cache)}"
)

# %% [markdown] name="errata-skip"
# **"Skip Softmax: a quick check skips a block of near-zero scores entirely. 1.4 times faster, drop-in."** (E05.7) The
# check needs the scores, so Q·Kᵀ is always computed first. It compares the block's maximum with the *running* maximum,
# not with a fixed threshold. It skips the exponentials, P·V, and the load of V. The result is **approximate**, and the
# feature is off by default where it exists. Real queries and keys again; our kernel has it as `skip_threshold`.


# %% name="errata-skip-loop"
def skipping(threshold, query_rows, key_rows):
    """(output, share of tiles skipped) of one causal pass in float64; a tile is skipped as in the kernel."""
    out, skipped, tiles_seen = torch.zeros(q.shape).double(), 0, 0
    for head in range(heads):
        kv = head // (heads // kv_heads)
        keys, values = k[:, kv].cpu().double(), v[:, kv].cpu().double()
        for at_q in tiles(512, query_rows):
            notes = nothing_yet(at_q.stop - at_q.start, d)
            for at_k in tiles(at_q.stop, key_rows):
                s = q[at_q, head].cpu().double() @ keys[at_k].T * d**-0.5
                s = s.masked_fill(torch.arange(512)[at_k][None] > torch.arange(512)[at_q][:, None], -math.inf)
                tiles_seen += 1
                if threshold and float((s.amax(1, keepdim=True) - notes[0]).max()) < math.log(threshold):
                    skipped += 1
                    continue
                notes = update(*notes, s, values[at_k])
            out[at_q, head] = notes[2] / notes[1]
    return out, skipped / tiles_seen


# %% name="predict-skip"
widgets.predict("05a-skipped", "Threshold 0.3, tiles of 16 x 16: what share of the tiles can be skipped?", "%")

# %% name="errata-skip-cell"
skips, rows = [], []
for threshold in (0.0, 1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3, 0.6):
    found, share = skipping(threshold, 16, 16)
    error = relative(found)
    skips.append((threshold, share, error))
    bound = 2 * 512 * threshold * float(v.abs().max())
    assert float((found - exact).abs().max()) <= bound + 1e-4
    rows.append((f"{threshold:g}", f"{share:.1%}", f"{error:.1e}", f"{traffic.skip_speedup(share):.2f} times"))
if has_triton:
    here, _ = tile_of(d, q.element_size(), architecture())
    kernel = flash_attention(*all_queries, skip_threshold=0.1).cpu()
    same, share = skipping(0.1, here["BLOCK_M"], here["BLOCK_N"])
    torch.testing.assert_close(kernel.double(), same, rtol=1e-3, atol=1e-3)
    print(f"our kernel at 0.1, tiles of {here['BLOCK_M']} x {here['BLOCK_N']}: the same output, {share:.1%} skipped")
print(f"1.4 times in attention needs {traffic.skip_share(1.4):.0%} of the tiles skipped; two times is the ceiling")
print(widgets.reveal("05a-skipped", 100 * skips[6][1]))
widgets.table(rows, ["threshold", "tiles skipped", "relative error", "attention at most faster"])

# %% name="errata-skip-figure" jupyter={"source_hidden": true}
fig = figure(6.6, 2.8)
ax = fig.subplots()
shares, errs = [s for _, s, _ in skips[1:]], [max(e, 1e-9) for _, _, e in skips[1:]]
ax.plot([100 * s for s in shares], errs, "o-", color=BLUE)
for threshold, s, e in skips[1:]:
    ax.annotate(f"{threshold:g}", (100 * s, max(e, 1e-9)), textcoords="offset points", xytext=(5, -10), fontsize=8)
ax.axvline(100 * traffic.skip_share(1.4), color=GREY, linestyle=":", linewidth=1.2)
ax.text(100 * traffic.skip_share(1.4) - 1, min(errs), "1.4 times at best", fontsize=8, ha="right")
ax.set_yscale("log")
tidy(ax, "tiles skipped, %", "relative error of the output")
show(
    fig,
    "Relative error of attention's output against the share of tiles skipped, for thresholds from 0.0001 to 0.6 on 512 tokens "
    "of the course model. The error grows with every step of the threshold. A dotted line marks the 57 percent "
    "that a gain of 1.4 would need.",
)

# %% [markdown] name="errata-skip-reading"
# On 512 tokens of this small model hardly anything can be skipped without a noticeable error. It is meant for long
# contexts, where most tiles have little weight, with a threshold calibrated for the model. No retraining is needed, but
# it is lossy.
#
# **"FlashAttention-3 is 1.5 times faster."** (E05.6) The paper (July 2024) says 1.5 to 2.0 times over FlashAttention-2, for
# FP16, forward, on an H100. Without precision, direction and head_dim such a number says little; section 8 has the table,
# and part c draws where the gain comes from.
#
# **"FlashInfer is NVIDIA's library."** (E05.8) It began at the University of Washington, Carnegie Mellon and OctoAI, which
# NVIDIA bought later. It is a community project, and NVIDIA is a main contributor today. The MLSys 2025 best-paper award
# is right.
#
# **"Use FlashAttention when attention dominates."** (E05.13) It is not an option for long contexts. It is the default
# of every engine at every length. Check for the *fallback*, as section 4 did. And a fusion of "scale, mask, softmax and
# dropout" is for training: inference has no dropout. What does the shortest prompt gain?

# %% name="errata-default"
rows = []
for n in (16, 64, 256):
    base, floor = traffic.unfused_values(n, 128), traffic.fused_floor_values(n, 128)
    rows.append((n, f"{base / floor:.2f}", 3, 1))
widgets.table(rows, ["tokens", "three kernels move, times the floor", "launches, unfused", "fused"])

# %% [markdown] name="errata-decode"
# **"FlashAttention and PagedAttention cut the bytes that decode must read."** (E05.14) Weights, keys and values are the
# bytes of decode, and neither changes them. What changes them, for an 8B at context 8,192, per generated token:

# %% name="errata-decode-cell"
levers = {
    "as it is": (1, {}),
    "8-bit cache": (1, {"kv_bytes": 1}),
    "4-bit weights, groups of 128": (1, {"weights": kv_cache.read_bytes(L8, kv_cache.bits_per_weight(4, 128))}),
    "batch of 16": (16, {}),
}
rows = []
for name, (batch, change) in levers.items():
    ledger = roofline.bytes_per_generated_token(L8, batch, 8192, **change)
    rows.append((name, format_bytes(ledger.weights), format_bytes(ledger.cache_read)))
widgets.table(rows, ["8B, context 8,192", "weights", "cache"])

# %% [markdown] name="errata-decode-rows"
# What FlashAttention does save in decode are the *rows* of scores, one for each query head. Are they nothing? That
# depends on the batch, because the weights are shared and the rows are not:


# %% name="errata-decode-share"
def row_share(shape, batch, context):
    """Rows of scores and probabilities, written and read, as a share of the bytes of a decoded token."""
    rows = 4 * kv_cache.score_bytes(shape.num_heads, 1, context) * shape.layers
    return rows / roofline.bytes_per_generated_token(shape, batch, context).total


rows = [
    (shape.name, context, *(f"{row_share(shape, batch, context):.1%}" for batch in (1, 64)))
    for shape in (L8, L70)
    for context in (8192, 32768)
]
widgets.table(rows, ["model", "context", "batch 1", "batch 64"])

# %% [markdown] name="errata-decode-reading"
# Well under one percent at batch 1 and 8k. At batch 64 it is 5 to 10 percent, and the limit for long contexts is 4 rows of
# 2 bytes over the keys and values of their group: 6.25 % for groups of four with head_dim 128, 12.5 % for groups of
# eight. Worth having, and still no answer to decode's bandwidth.
# <!-- tested: tests/claims/test_chapter_05.py::test_rows_of_scores_are_a_small_share_of_decode_that_grows_with_the_batch -->

# %% [markdown] name="production"
# ## 8. In production
#
# As of November 2026, from papers, documentation and repositories. Speeds are the authors' own, each with its condition.
#
# | | what it added | claimed |
# |---|---|---|
# | **Online softmax**, Milakov and Gimelshein, 2018 (arXiv 1805.02867) | maximum and sum in one pass, so softmax reads its input twice, not three times | up to 1.3x softmax (V100) |
# | **FlashAttention**, Dao et al., 2022 (2205.14135) | tiling, no S or P in memory; recomputed in the backward pass | 40.3 → 4.4 GB moved: GPT-2 medium, 1,024 tokens, forward and backward, A100 |
# | **FlashAttention-2**, Dao, 2023 (2307.08691) | queries outside; the three changes of section 7 | about 2x over 1; up to 230 TFLOP/s, A100 |
# | **Flash-Decoding**, Dao, Haziza, Massa, Sizov, October 2023 | splits of the keys, merged | up to 8x a decode step at very long context |
# | **FlashAttention-3**, Shah et al., July 2024 (2407.08608) | Hopper: TMA, specialized warps, exponentials overlapped with products, FP8 | 1.5-2.0x over 2, FP16 forward, up to 740 TFLOP/s; FP8 near 1.2 PFLOP/s, H100 |
# | **FlashAttention-4**, Zadouri et al., March 2026 (2603.05451) | Blackwell: exponentials partly in software, fewer rescales; written in CuTe DSL (Python), runs on Hopper too | up to 1.3x cuDNN 9.13, 2.7x Triton, up to 1613 TFLOP/s, BF16, B200 |
#
# **vLLM** picks an attention backend from a priority list by GPU, head size, type and cache format, and prints its choice;
# `--attention-backend` sets it. FlashAttention and FlashInfer are the usual ones on NVIDIA, AITER or Triton on AMD.
#
# **SGLang** does the same (`--attention-backend`): FA3 on Hopper, TensorRT-LLM's kernels on Blackwell, FlashInfer or Triton
# elsewhere.
#
# **TensorRT-LLM** has kernels of its own, and Skip Softmax as an option (`SkipSoftmaxAttentionConfig`, with a threshold or
# a target sparsity; off unless configured). The algorithm is BLASST (arXiv 2512.12087). "Up to 1.4x" in TTFT and TPOT is
# NVIDIA's figure.
#
# **FlashInfer** (Ye et al., 2025, arXiv 2501.01005) describes every cache layout as one block-sparse matrix, as part c
# does. Kernels are compiled at first use for the type, head size and variant; a *plan* step on the host balances the
# splits; *composable* attention is the cascade.
#
# **PyTorch**: `scaled_dot_product_attention` dispatches (section 4); `sdpa_kernel` requires a backend. FlexAttention
# compiles a mask or score function that you write in Python into a fused kernel. `torch.nn.attention.varlen` takes
# ragged batches.

# %% [markdown] name="quiz-text"
# ## 9. Quiz
#
# Traffic and rooflines first:

# %% name="quiz"
from grader.quiz import load_quiz

widgets.quiz(load_quiz("05_flash_attention").draw(seed=1, tag="traffic"))

# %% [markdown] name="quiz-softmax-text"
# The algorithm:

# %% name="quiz-softmax"
widgets.quiz(load_quiz("05_flash_attention").draw(seed=1, tag="softmax"))

# %% [markdown] name="quiz-decode-text"
# Decode, FlashAttention's generations, and what to check. Then build it: [lab
# 05](../../labs/05_flash_attention/flash_attention.ipynb).

# %% name="quiz-decode"
widgets.quiz(load_quiz("05_flash_attention").draw(seed=1, tag="decode"))

# %% name="quiz-variants"
widgets.quiz(load_quiz("05_flash_attention").draw(seed=1, tag="variants"))

# %% [markdown] name="card"
# ## 10. Card
#
# - Three kernels move `4N² + 4Nd` values per head; the sheet is `N²` per head and layer. 70B at 8k: 2.75 TB.
#   <!-- printed: errata-size -->
# - Online softmax keeps `m`, `l`, `acc` per query. New maximum `m'`: multiply `l` and `acc` by `exp(m − m')`. At the
#   end `acc / l`. Exact, for any size and order of tiles.
# - FA-1: keys in the outer loop, O read and written per tile of keys, `12N²d²/M`. FA-2: queries in the outer loop, O
#   written once, `2N²d/rows + 2Nd`. Floor `4Nd`, with the L2 cache. Derive the saving; do not quote it.
# - FA-2's three changes: divide once; programs over query tiles; warps split queries. FA-3: overlap and FP8. FA-4:
#   exponentials (part c: how much depends on head_dim).
# - FLOP per byte at d = 128: unfused 64 (memory), fused prefill N/2 (compute), decode = heads per KV head (memory).
# - Decode has too few programs: split the keys, return mean and lse, merge with weights `exp(lse)`. The same merge
#   gives cascade and ring. Empty split: lse = −∞, weight 0.
# - Skip Softmax computes all scores and is approximate; `1 / (1 − skipped / 2)` at best.
# - FlashAttention is the default. Check which path ran. Require it, so that a fallback is an error.
# - FlashAttention saves the sheet (in decode a row: 0.4 % of an 8B's bytes at batch 1 and 8k, at most 6.25 % with groups
#   of four), paging saves capacity. Decode's bytes are weights, keys and values: bits, KV heads and batch save those.
#   <!-- tested: tests/claims/test_chapter_05.py::test_rows_of_scores_are_a_small_share_of_decode_that_grows_with_the_batch -->
