# %% [markdown] name="title"
# # 05c · Tuning, overlap and variants: the last factor of two
#
# About 60 minutes, all of it optional for the chapters that follow. You need parts a and b. One kernel, the thirty lines
# of part a, climbs a ladder here: tiles, copies in the background, tensor descriptors, tuned sizes. Then come the
# variants: FP8, shared prefixes, one index for all cache layouts, and what to check before a kernel is exchanged. The lab
# is [Build flash attention](../../labs/05_flash_attention/flash_attention.ipynb).

# %% name="setup"
import importlib.util
import inspect
import json
import math
import os
import subprocess
import sys
import tempfile
import textwrap
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from IPython.display import display

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton has to know before the first kernel is defined

import reference_impl
from chapters import widgets
from chapters.widgets.figure import BLUE, INK, ORANGE, figure, show, tidy
from chapters.widgets.occupancy import table as compile_table
from reference_impl import LLM, Engine, EngineConfig, SamplingParams, course_model
from reference_impl.features.fusion.kernels import choose_backend
from reference_impl.assembly.parts import Parts
from reference_impl.core.attention import TorchAttention
from reference_impl.kernels import reference
from reference_impl.theory import attention_traffic as traffic
from reference_impl.theory import model_shapes, roofline
from reference_impl.theory.hardware import device
from reference_impl.theory.occupancy import occupancy, waves
from reference_impl.theory.units import KiB, MiB, format_bytes

torch.set_num_threads(1)
torch.manual_seed(5)
H100, L8 = device("H100"), model_shapes.model("llama-3-8b")
chip, sms = H100.chip, H100.chip.num_sms
on_gpu = torch.cuda.is_available()
DEVICE = torch.device("cuda" if on_gpu else "cpu")
has_triton = importlib.util.find_spec("triton") is not None
if has_triton and on_gpu:  # Triton does not support every GPU
    has_triton = choose_backend("auto", DEVICE, torch.float16) == "triton"
if has_triton:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    from reference_impl.kernels.flash_attention import flash_attention

    print("kernels: in Triton,", "on the GPU" if on_gpu else "in Triton's interpreter, on the CPU")
else:
    flash_attention = reference.flash_attention
    print("kernels: their twins in torch, because this machine has no Triton, or a GPU that it does not serve")

# %% [markdown] name="question"
# ## 1. A question with a number
#
# Attention alternates: products on the tensor cores, exponentials on other units, products again. An SM of an H100 does
# 4,096 FLOP a clock on its tensor cores (16 bits), and 16 exponentials a clock. Each score is one exponential and, with
# head_dim 128, 512 FLOP. Suppose the two never overlap. **What share of the time are the tensor cores idle?**
# <!-- printed: rates -->

# %% name="predict"
widgets.predict("05c-idle", "What share of the time are the tensor cores idle, without overlap?", "%")

# %% [markdown] name="idea"
# ## 2. The idea
#
# Picture a kitchen with one oven and one mixer. A cake needs the oven, then the mixer, then the oven again. A cook alone
# keeps one of the two idle at any time. Two cooks with a cake each do better: while one mixes, the other bakes. Nothing is
# baked less or mixed less. The day is shorter because the oven never waits.
#
# - The oven is the tensor cores, the mixer the units that compute exponentials, the cooks are groups of four warps. This
#   is FlashAttention-3's *ping-pong*.
# - Food arrives while the cooks work, because a helper carries it in: copies in the background, in *stages* (part b). On
#   Hopper the helper is a machine of its own, the *Tensor Memory Accelerator* (TMA): one instruction of one thread orders
#   a whole tile, by its place in a tensor that was described once.
# - How large a tile, how many cooks, how many trays in flight: there is no formula for the best choice. One rules out
#   what does not fit, and tries the rest. That is *tuning*.

# %% [markdown] name="scratch-text"
# ## 3. From scratch
#
# ### Two units, two rates
#
# First the rates: clocks of an SM for a tile of 64 queries and 128 keys. The tensor cores come from data sheets, 16
# exponentials a clock are those of an SM from A100 to B200.
# <!-- source: FlashAttention-4, Zadouri et al., 2026: special-function units per SM -->

# %% name="scratch-rates"
ROWS, KEYS = 64, 128  # queries of one group of warps, keys of a tile


def clocks_of(gpu, head_dim):
    """Clocks of one SM for the scores, the exponentials and the weighted values of a tile."""
    this = device(gpu)
    flops_per_clock = this.peak() / this.chip.num_sms / this.chip.clock
    products = 2 * ROWS * KEYS * head_dim / flops_per_clock
    return {"scores": products, "exp": ROWS * KEYS / 16, "values": products}


h100 = clocks_of("H100", 128)
print(f"H100, head_dim 128: exponentials take {h100['exp'] / (2 * h100['scores']):.0%} of the time of the products")
widgets.reveal("05c-idle", 100 * h100["exp"] / sum(h100.values()))

# %% [markdown] name="rates-text"
# A third of the time. Does that hold for every GPU and model? It depends on two numbers, so here are both. Exponentials as
# a share of the time of the products:

# %% name="predict-b200"
widgets.predict("05c-b200", "B200, head_dim 256: exponentials as a share of the products' time?", "%")

# %% name="rates"
shares, rows = {}, []
for gpu in ("A100-80GB", "H100", "B200"):
    for head_dim in (64, 128, 256):
        clocks = clocks_of(gpu, head_dim)
        shares[gpu, head_dim] = clocks["exp"] / (2 * clocks["scores"])
    per_clock = device(gpu).peak() / device(gpu).chip.num_sms / device(gpu).chip.clock
    rows.append((gpu, f"{per_clock:,.0f}", *(f"{shares[gpu, head_dim]:.0%}" for head_dim in (64, 128, 256))))
    assert math.isclose(shares[gpu, 128], traffic.exp_share(128, per_clock))
print(widgets.reveal("05c-b200", 100 * shares["B200", 256]))
widgets.table(rows, ["GPU", "FLOP a clock and SM", "head_dim 64", "head_dim 128", "head_dim 256"])

# %% [markdown] name="rates-reading"
# From A100 to B200 tensor core throughput doubles with each generation; that of the exponential units does not
# (Blackwell Ultra, after them, doubles it), and a smaller head_dim has fewer products for each exponential. So
# "exponentials are the bottleneck on Blackwell" needs its condition: on a B200 they take twice as long as the products
# at head_dim 64, as long at 128, half as long at 256. That is why FlashAttention-3 overlaps them with products, and
# FlashAttention-4 computes part of them with ordinary multiply-adds.
# <!-- printed: rates -->
# <!-- source: NVIDIA, Making Softmax More Efficient with NVIDIA Blackwell Ultra, February 2026 -->
#
# ### A timeline of the overlap
#
# The work of one group on one tile are three pieces, each on one unit, each after another one. With `ahead`, a group
# issues the scores of its next tile before it needs them (FlashAttention-3 does this, too).

# %% name="scratch-pieces"
UNIT = {"scores": "tensor cores", "exp": "exponentials", "values": "tensor cores"}


def pieces(group, tile, ahead):
    """The pieces of work of one group on one tile, each with those that have to be done before it."""
    scores, exp, values = ((group, tile, kind) for kind in UNIT)
    one_ahead = [(group, tile - 1, "scores"), (group, tile - 2, "values")]
    return {scores: one_ahead if ahead else [(group, tile - 1, "values")], exp: [scores], values: [exp]}


# %% [markdown] name="scratch-timeline-text"
# Each unit does one piece at a time. The next piece is always the one that can start first, the older tile if two can:


# %% name="scratch-timeline"
def timeline(clocks, groups, tiles, ahead=False):
    """{piece: (start, end)} in clocks. groups: of four warps, which share the units of one SM."""
    waiting = {}
    for group, tile in product(range(groups), range(tiles)):
        waiting |= pieces(group, tile, ahead)
    done, free = {}, dict.fromkeys(UNIT.values(), 0.0)

    def start(piece):
        before = waiting[piece]
        if any(other in waiting for other in before):
            return math.inf
        return max(free[UNIT[piece[2]]], *(done[other][1] for other in before if other in done), 0.0)

    while waiting:
        piece = min(waiting, key=lambda p: (start(p), p[1], p[0]))
        began = start(piece)
        del waiting[piece]
        done[piece] = (began, began + clocks[piece[2]])
        free[UNIT[piece[2]]] = done[piece][1]
    return done


def last(done):
    return max(end for _, end in done.values())


# %% [markdown] name="timeline-text"
# Eight tiles of keys for each of two groups: alone one after the other, one tile ahead, and as a pair. How many times
# faster is the pair on an H100, with head_dim 128?

# %% name="predict-pingpong"
widgets.predict("05c-pingpong", "How many times faster are two groups in ping-pong than one after the other?", "times")

# %% name="timeline"
ways = {
    "one group, in order": lambda clocks: (timeline(clocks, 1, 8), 2),
    "one group, a tile ahead": lambda clocks: (timeline(clocks, 1, 8, ahead=True), 2),
    "two groups, ping-pong": lambda clocks: (timeline(clocks, 2, 8), 1),
}
rows, taken = [], {}
for gpu, head_dim in (("H100", 64), ("H100", 128), ("H100", 256), ("B200", 64), ("B200", 128)):
    clocks = clocks_of(gpu, head_dim)
    for name, way in ways.items():
        done, times = way(clocks)
        taken[gpu, head_dim, name] = times * last(done)
    base = taken[gpu, head_dim, "one group, in order"]
    products = 2 * 8 * 2 * clocks["scores"]  # what the tensor cores have to do: no order is faster
    assert min(taken[gpu, head_dim, name] for name in ways) >= products * (1 - 1e-9)
    gains = (f"{base / taken[gpu, head_dim, name]:.2f}x" for name in list(ways)[1:])
    rows.append((f"{gpu}, {head_dim}", round(base), *gains, f"{base / max(products, 2 * 8 * clocks['exp']):.2f}x"))
gain = taken["H100", 128, "one group, in order"] / taken["H100", 128, "two groups, ping-pong"]
print(widgets.reveal("05c-pingpong", gain))
widgets.table(rows, ["GPU, head_dim", "clocks, in order", "a tile ahead", "ping-pong", "at most, by the busier unit"])


# %% name="timeline-figure" jupyter={"source_hidden": true}
def draw(gpu, head_dim, tiles=3):
    """The three ways as bars over clocks, for two groups and a few tiles."""
    clocks = clocks_of(gpu, head_dim)
    fig = figure(7.8, 3.4)
    ax = fig.subplots()
    alone = timeline(clocks, 1, tiles)
    both = {(1, *piece[1:]): (a + last(alone), b + last(alone)) for piece, (a, b) in alone.items()}
    ahead = timeline(clocks, 1, tiles, ahead=True)
    second = {(1, *piece[1:]): (a + last(ahead), b + last(ahead)) for piece, (a, b) in ahead.items()}
    drawn = {"in order": alone | both, "a tile ahead": ahead | second, "ping-pong": timeline(clocks, 2, tiles)}
    labels = []
    for i, (name, done) in enumerate(drawn.items()):
        for (group, tile, kind), (begin, end) in done.items():
            y = -(2.6 * i + (UNIT[kind] == "exponentials"))
            ax.barh(
                y,
                end - begin,
                0.8,
                begin,
                color=(BLUE, ORANGE)[group],
                alpha=1.0 if kind != "values" else 0.6,
                edgecolor="white",
            )
            ax.text(
                (begin + end) / 2,
                y,
                {"scores": "S", "exp": "exp", "values": "PV"}[kind] + str(tile),
                ha="center",
                va="center",
                fontsize=7,
                color="white" if group == 0 else INK,
            )
        labels += [(-2.6 * i, f"{name}: tensor cores"), (-2.6 * i - 1, "exponentials")]
        ax.plot([last(done)] * 2, [-2.6 * i - 1.45, -2.6 * i + 0.45], color=INK, linewidth=1.5)
    ax.set_yticks([y for y, _ in labels], [text for _, text in labels], fontsize=8)
    tidy(ax, f"clocks of one SM ({gpu}, head_dim {head_dim}, 64 queries a group, tiles of 128 keys)")
    return fig, {name: last(done) for name, done in drawn.items()}


fig, ends = draw("H100", 128)
show(
    fig,
    "Timeline of the tensor cores and of the exponential units of one SM of an H100, for two groups of warps and three tiles "
    "each. In order, the units take turns and each is idle while the other works. One tile ahead, the scores of the next "
    "tile are computed beside the exponentials. In ping-pong, the products of one group run beside the exponentials of the "
    "other. Ends in clocks: " + ", ".join(f"{name} {end:,.0f}" for name, end in ends.items()) + ".",
)

# %% [markdown] name="timeline-reading"
# In ping-pong the oven of the picture hardly waits: what remains are the two ends. The gain is limited by the busier
# unit, and so it depends on head_dim. On an H100 it is at most 1.50x at 128, 2.00x at 64, where both units have the
# same work, and 1.25x at 256. On a B200 at head_dim 64 the exponentials are the busier unit, and no order of work helps
# any further: there, fewer exponentials on those units do. These are ceilings from rates, without latencies, barriers
# and loads; FlashAttention-3 reports 1.5 to 2.0 times over its predecessor on an H100, of which this is one part.
# <!-- printed: timeline -->
# <!-- source: FlashAttention-3, Shah et al., July 2024 -->
#
# ### Overlapping copies with arithmetic
#
# The same argument for the helper who carries in the food. A tile of 64 keys for 128 queries, at the rates of an H100's
# data sheet and L2:

# %% name="predict-pipeline"
widgets.predict("05c-stages", "8,192 keys: how many times faster if copies run beside the products?", "times")

# %% name="pipeline"
M, N, D = 128, 64, 128
load = 2 * N * D * 2 / (chip.l2_bandwidth[0] / sms)
compute = 4 * M * N * D / (H100.peak() / sms)
serial, overlapped = (traffic.pipelined_seconds(8192 // N, load, compute, stages) for stages in (1, 2))
print(f"a tile: load {load * 1e9:.0f} ns from L2, products {compute * 1e9:.0f} ns")
print(f"8,192 keys: {serial * 1e6:.0f} us one after the other, {overlapped * 1e6:.0f} us overlapped")
widgets.reveal("05c-stages", serial / overlapped)

# %% [markdown] name="pipeline-reading"
# This also shows why tiles should be large: at the lowest published L2 bandwidth, loading a tile for 128 queries takes
# longer than computing with it.

# %% [markdown] name="engine-text"
# ## 4. The same thing inside the engine
#
# ### The kernel with tensor descriptors
#
# The thirty lines of part a compute an address for each value. With a *tensor descriptor* the host says once where a
# tensor lies, its shape and the shape of a tile; the kernel names the tile by its first row. What is outside of the tensor
# is filled with zeros. (Sequences have to be multiples of the tile here, or a tile would read the next head.)

# %% name="again" jupyter={"source_hidden": true}
# The kernel of part a, again: each notebook is a process of its own.
if has_triton:

    @triton.jit
    def one_more_tile(m, total, acc, scores, values):
        new = tl.maximum(m, tl.max(scores, 1))  # the largest score so far, of each query
        shrink = tl.exp2(m - new)  # one factor rescales the old notes
        weights = tl.exp2(scores - new[:, None])  # powers of 2, because the hardware computes those
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None])
        return new, total, acc

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


# %% name="scratch-descriptors"
if has_triton:

    @triton.jit
    def described_attention(Q, K, V, Out, n, scale, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
        first, head = tl.program_id(0) * BLOCK_M, tl.program_id(1) * n  # rows of the tensors [heads x n, D]
        rows, columns = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
        q = Q.load([head + first, 0])  # a whole tile, by its first row and column
        m, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, D], tl.float32)
        for start in range(0, first + BLOCK_M, BLOCK_N):
            scores = tl.dot(q, K.load([head + start, 0]).T) * scale
            scores = tl.where((start + columns)[None, :] <= rows[:, None], scores, float("-inf"))
            m, total, acc = one_more_tile(m, total, acc, scores, V.load([head + start, 0]))
        Out.store([head + first, 0], (acc / total[:, None]).to(q.dtype))

# %% [markdown] name="descriptors-text"
# No addresses, no masks for loads. Does it compute the same?

# %% name="descriptors-run"
if has_triton:
    heads, n, d, dtype = 2, 256, 64, torch.float16 if on_gpu else torch.float32
    q, k, v = torch.randn(3, heads, n, d, device=DEVICE, dtype=dtype)
    out = torch.empty_like(q)

    def described(tensor, rows):
        return TensorDescriptor.from_tensor(tensor.view(heads * n, d), [rows, d])

    given = (described(q, 64), described(k, 32), described(v, 32), described(out, 64))
    described_attention[(n // 64, heads)](*given, n, math.log2(math.e) / d**0.5, D=d, BLOCK_M=64, BLOCK_N=32)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)
    print(f"the output of PyTorch's attention; largest difference {float((out - expected).abs().max()):.0e}")

# %% name="compiler" jupyter={"source_hidden": true}
CHILD = """
import json, re, sys, time
from collections import Counter
from dataclasses import asdict
import learned
from reference_impl.kernels.architectures import ARCHITECTURES
from reference_impl.kernels.compilation import compile_for, key, resources
from reference_impl.kernels.launch import Launch

gpu, found = ARCHITECTURES["sm_90"], []
for kernel, types, constants, aligned, options in json.load(sys.stdin):
    launch = Launch(getattr(learned, kernel), types, constants, tuple(aligned), options)
    seconds = []
    for _ in range(2):  # the second time it comes from the cache on disk
        started = time.perf_counter()
        compiled = compile_for(launch, gpu)
        seconds.append(time.perf_counter() - started)
    it = resources(launch, gpu)
    copies = Counter(re.findall(r"ld\\.global|cp\\.async\\.c[ag]|cp\\.async\\.bulk\\.tensor", compiled.asm["ptx"]))
    tma = [line.strip() for line in compiled.asm["ptx"].splitlines() if "cp.async.bulk.tensor" in line]
    about = {"problems": it.problems(gpu), "key": key(launch, gpu), "seconds": seconds, "copies": copies, "tma": tma[:1]}
    found.append(asdict(it) | about)
print(json.dumps(found))
"""


def start_compiling(kernels, requests):
    """A process that compiles kernels of this notebook for an H100, without Triton's interpreter."""
    folder = tempfile.TemporaryDirectory()
    sources = [textwrap.dedent(inspect.getsource(kernel.fn)) for kernel in kernels]
    source = "\n\n".join(["import triton\nimport triton.language as tl", *sources])
    (Path(folder.name) / "learned.py").write_text(source)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": folder.name + "/cache", "PYTHONPATH": os.pathsep.join([folder.name, *sys.path])}
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    process.stdin.write(json.dumps(requests))
    process.stdin.close()
    process.stdin = None
    return process, folder


def compiled_by(job):
    """Its results, one mapping per request."""
    out, errors = job[0].communicate(timeout=300)
    job[1].cleanup()
    if job[0].returncode:
        raise RuntimeError(f"the compiling process failed:\n{errors}")
    return json.loads(out)


# %% [markdown] name="compile-text"
# ### A ladder
#
# A second process compiles both kernels for an H100, in bf16 and with head_dim 128, in these sizes: queries and keys of a
# tile, warps, stages. It takes a while; it runs beside what follows.

# %% name="compile"
SIZES = [(128, 64, 8, 1), (128, 64, 8, 2), (128, 64, 4, 2), (128, 128, 8, 2), (256, 64, 8, 2), (256, 64, 16, 2)]
RUNGS = [("pointers", *size) for size in SIZES] + [("descriptors", *size) for size in SIZES[1:]]


def request(how, m, n, warps, stages):
    rest, constants = {"n": "i32", "scale": "fp32"}, {"D": 128, "BLOCK_M": m, "BLOCK_N": n}
    options = {"num_warps": warps, "num_stages": stages}
    if how == "pointers":
        types, aligned = dict.fromkeys(("Q", "K", "V", "Out"), "*bf16"), ["Q", "K", "V", "Out", "n"]
        return "tiny_attention", types | rest, constants, aligned, options
    types = {
        name: f"tensordesc<bf16[{rows}, 128]>" for name, rows in zip(("Q", "K", "V", "Out"), (m, n, n, m), strict=True)
    }
    return "described_attention", types | rest, constants, ["n"], options


if has_triton:
    kernels = (one_more_tile, tiny_attention, described_attention)
    job = start_compiling(kernels, [request(*rung) for rung in RUNGS])
    print(f"compiling {len(RUNGS)} versions for sm_90")

# %% [markdown] name="predict-registers-text"
# What do descriptors change? Not the bytes: the same tiles travel. But think of who computes addresses, and where they are
# kept. The version with pointers and tiles of 128 × 64 takes 167 registers a thread.
# <!-- printed: descriptors -->

# %% name="predict-registers"
widgets.predict("05c-registers", "The same tile with descriptors: how many registers a thread?", "registers")

# %% name="descriptors"
if has_triton:
    built = dict(zip(RUNGS, compiled_by(job), strict=True))
    pointers, descriptors = (built[how, 128, 64, 8, 2] for how in ("pointers", "descriptors"))
    assert "cp.async.bulk.tensor" in descriptors["copies"]
    assert "cp.async.bulk.tensor" not in pointers["copies"]
    assert descriptors["registers"] < pointers["registers"]
    print(f"registers a thread: {pointers['registers']} with pointers, {descriptors['registers']} with descriptors")
    print(f"copies in PTX: {pointers['copies']} with pointers, {descriptors['copies']} with descriptors")
    print("one of them:", descriptors["tma"][0][:100])
    print(widgets.reveal("05c-registers", descriptors["registers"]))
else:
    print("compiling needs Triton")

# %% [markdown] name="descriptors-reading"
# `cp.async.bulk.tensor` is the instruction of the TMA: one thread orders a tile, and a barrier in shared memory counts the
# bytes that have arrived. The registers that held addresses are free, which larger tiles need. `cp.async` (since
# Ampere) also copies in the background, but each thread orders its own 16 bytes. On a GPU without a TMA Triton compiles
# the same source to ordinary loads.
#
# Now the ladder. The last column is a **model, not a measurement**: a layer of 32 heads and 8,192 tokens without a mask,
# programs in waves, each at the pipeline's time from section 3. It knows the rates of data sheets, and nothing of
# latency, exponentials or barriers.

# %% name="predict-ladder"
widgets.predict("05c-ladder", "From three kernels to the last rung: how many times faster by this model?", "times")

# %% name="ladder"
HEADS, LENGTH = 32, 8192


def modelled(m, n, warps, stages, blocks):
    """Seconds for a layer, in waves of programs; a program has its share of an SM."""
    load, compute = 2 * n * 128 * 2 / (chip.l2_bandwidth[0] / sms), 4 * m * n * 128 / (H100.peak() / sms)
    one = traffic.pipelined_seconds(LENGTH // n, load, compute, stages)
    return waves(HEADS * LENGTH // m, sms, blocks) * one * blocks


def usable(rung):
    return has_triton and not built[rung]["problems"]


naive = 2 * HEADS * traffic.unfused_values(LENGTH, 128) / H100.bandwidth
ladder = {"tiled": ("pointers", 128, 64, 8, 1), "pipelined": ("pointers", 128, 64, 8, 2),
          "with descriptors": ("descriptors", 128, 64, 8, 2)}  # fmt: skip
if has_triton:
    blocks = {rung: max(1, occupancy("sm_90", rung[3], built[rung]["registers"], built[rung]["shared_bytes"]).blocks)
              for rung in RUNGS if usable(rung)}  # fmt: skip
    speed = {rung: modelled(*rung[1:], blocks[rung]) for rung in blocks}
    ladder["autotuned"] = min(speed, key=lambda rung: (speed[rung], built[rung]["registers"]))
    print(widgets.reveal("05c-ladder", naive / speed[ladder["autotuned"]]))

# %% name="ladder-table" jupyter={"source_hidden": true}
peak = HEADS * traffic.prompt_attention_flops(LENGTH, 128) / H100.peak()
values = HEADS * traffic.unfused_values(LENGTH, 128)
rows = [("three kernels", "", format_bytes(2 * values), "", "", "", f"{naive * 1e3:.2f} ms")]
if has_triton:
    for name, rung in ladder.items():
        it, moved = built[rung], 2 * HEADS * traffic.flash2_values(LENGTH, 128, rung[1])
        size = f"{rung[1]} x {rung[2]}, {rung[3]} warps, {rung[4]} stage{'s' * (rung[4] > 1)}"
        copy = "TMA" if it["tma"] else "cp.async" if any("cp.async" in c for c in it["copies"]) else "loads"
        shared = f"{it['shared_bytes'] / KiB:.0f} KiB"
        rows.append((name, size, format_bytes(moved), copy, it["registers"], shared, f"{speed[rung] * 1e3:.2f} ms"))
rows.append(("the products alone", "", "", "", "", "", f"{peak * 1e3:.2f} ms"))
headers = ["rung", "tile", "requested", "copies", "registers", "shared", "model"]
display(widgets.table(rows, headers))
stamped = Path(reference_impl.__file__).parent / "bench/results/gpu.json"
measured = (
    [row for row in json.loads(stamped.read_text())["rows"] if "attention" in row["metric"]]
    if stamped.is_file()
    else []
)
for row in measured:
    print(f"measured: {row['metric']}: {row['ours']} {row['unit']}")
if not measured:
    print(
        "no GPU row is stamped yet: `python -m reference_impl.bench gpu` on a GPU makes them, and this cell shows them"
    )

# %% [markdown] name="ladder-reading"
# - **Tiling** removes the traffic of the sheet. Loads and products still take turns.
# - **Stages** let them overlap. Now the loads from L2 are the longer half.
# - **Descriptors** change nothing in this model: the bytes are the same. They free registers, and the next rung needs
#   those.
# - **Tuning** tries what fits. A tile of 256 queries halves the loads. With 16 warps it spills with pointers, and fits with
#   descriptors. (A stopwatch on a GPU would rank what the model cannot tell apart; part b runs Triton's own autotuner.)
#
# What the model leaves out are the exponentials between the products, which ping-pong hides. Such roles of warps are
# written at a lower level (Gluon, CuTe); in published figures (H100, bf16, head size 128, long prompts) attention in
# Triton reaches 380 to 480 TFLOP/s, and FlashAttention-3 about 600.
# <!-- source: FlashAttention-3 (2024), causal forward at head size 128, 16k: Triton 378, FA-3 616; pytorch/benchmark #2391
# (July 2024): Triton 477, FA-3 621 -->
#
# ### Which sizes were ruled out?

# %% name="ruled-out"
if has_triton:
    rows = []
    for how, m, n, warps, stages in RUNGS:
        it = built[how, m, n, warps, stages]
        problems = "; ".join(it["problems"])
        rows.append(
            (how, f"{m} x {n}", warps, stages, it["registers"], f"{it['shared_bytes'] / KiB:.0f} KiB", problems)
        )
    display(widgets.table(rows, ["kernel", "tile", "warps", "stages", "registers", "shared", "ruled out by"]))
    assert not usable(("pointers", 256, 64, 16, 2)), "it spills"
    assert usable(("descriptors", 256, 64, 16, 2)), "it fits"
else:
    print("compiling needs Triton")

# %% [markdown] name="swap-text"
# ### Before you swap a kernel
#
# "Validate kernel compatibility" is good advice that is rarely followed. Here is an executable checklist. Three
# candidates have one realistic fault each. First, folded, the rows of a paged cache and the rule for "the same" of part
# a; then the candidate:


# %% name="rows-and-rule" jupyter={"source_hidden": true}
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


def doubled(arguments):
    return [a.double() if torch.is_tensor(a) and a.dtype in (torch.float16, torch.float32) else a for a in arguments]


def errors(found, twin, arguments, **options):
    """(error of the result, error the rule allows) against float64."""
    exact, same = twin(*doubled(arguments), **options), twin(*arguments, **options)
    allowed = 2 * (same - exact).abs().max() + 2 * torch.finfo(found.dtype).eps * exact.abs().max()
    return float((found - exact).abs().max()), float(allowed)


# %% name="candidate"
def by_sdpa(q, keys, values, table, starts, lens, scale, window=None, group=None, offset=True):
    """A candidate: SDPA per row. group: how query heads map to KV heads; offset: whether the mask is shifted."""
    out = torch.empty_like(q)
    for row, length in enumerate(lens.tolist()):
        at = slice(*starts[row : row + 2].tolist())
        slots = reference.context_slots(table[row], length, keys.shape[1])
        k, v = (c.flatten(0, 1)[slots].transpose(0, 1) for c in (keys, values))  # [kv_heads, length, d]
        copies, count = q.shape[1] // k.shape[0], at.stop - at.start
        if group == "tiled":
            k, v = k.repeat(copies, 1, 1), v.repeat(copies, 1, 1)
        else:
            k, v = k.repeat_interleave(copies, 0), v.repeat_interleave(copies, 0)
        mask = reference.causal_mask(count, length, q.device, window)
        if not offset:  # the first query attends to the first key only: right for whole prompts, wrong after a prefix
            mask = torch.ones(count, length, dtype=torch.bool, device=q.device).tril()
        found = F.scaled_dot_product_attention(q[at].transpose(0, 1), k, v, attn_mask=mask, scale=scale)
        out[at] = found.transpose(0, 1)
    return out


# %% [markdown] name="checks-text"
# The checks: layouts of heads, a chunk of a prompt behind its prefix, a window, and a batch of ragged rows in fp16.

# %% name="checks"
candidates = {
    "ours": flash_attention,
    "heads tiled": lambda *a, **o: by_sdpa(*a, group="tiled", **o),
    "no offset": lambda *a, **o: by_sdpa(*a, offset=False, **o),
    "window forgotten": lambda *a, window=None: by_sdpa(*a),
}
checks = {
    "whole prompt, MHA, fp32": (paged([(33, 33)], 4, 4, 64, torch.float32), {}),
    "GQA": (paged([(33, 33)], 4, 2, 64, torch.float32), {}),
    "MQA": (paged([(33, 33)], 4, 1, 64, torch.float32), {}),
    "chunk behind a prefix": (paged([(17, 70)], 4, 4, 64, torch.float32), {}),
    "sliding window of 20": (paged([(33, 33)], 4, 4, 64, torch.float32), {"window": 20}),
    "fp16, ragged": (paged([(20, 20), (1, 50)], 4, 4, 64), {}),
}

# %% name="predict-swap"
widgets.predict("05c-passes", "Wrong grouping of heads: how many of these six checks does it pass?", "checks")

# %% name="swap"
caught, rows = {name: [] for name in candidates}, []
for check, (case, options) in checks.items():
    marks = []
    for name, candidate in candidates.items():
        error, allowed = errors(candidate(*case, **options), reference.flash_attention, case, **options)
        ok = error <= max(allowed, 1e-5)
        marks.append("ok" if ok else f"{error:.2f} off")
        if not ok:
            caught[name].append(check)
    rows.append((check, *marks))
assert caught["ours"] == []
assert caught["heads tiled"] == ["GQA"], "with MHA and MQA both mappings are the same"
assert caught["window forgotten"] == ["sliding window of 20"]
assert "chunk behind a prefix" in caught["no offset"]
print(widgets.reveal("05c-passes", len(checks) - len(caught["heads tiled"])))
widgets.table(rows, ["check", *candidates])

# %% [markdown] name="swap-rope-text"
# Rotary positions need one more: shifting every position by the same amount must not change attention. If a chunk's
# positions restart at zero while its prefix keeps its own, this check fails.

# %% name="swap-rope"
rot_q, rot_k = torch.randn(2, 12, 1, 64)


def turned(x, positions):
    angle = positions[:, None].float() * 10_000 ** (-torch.arange(0, 64, 2) / 64)
    both = angle.repeat(1, 2)  # dimension i is paired with i + 32
    return reference.rotate(x, both.cos(), both.sin() * torch.tensor([-1.0] * 32 + [1.0] * 32))


def products(shift_q, shift_k):
    at = torch.arange(12)
    return turned(rot_q, at + shift_q)[:, 0] @ turned(rot_k, at + shift_k)[:, 0].T


print(f"all positions + 7: largest change {float((products(7, 7) - products(0, 0)).abs().max()):.1e}")
print(f"only the queries' + 7: largest change {float((products(7, 0) - products(0, 0)).abs().max()):.1f}")
types = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
print("significant bits:", {str(t).removeprefix("torch."): int(1 - math.log2(torch.finfo(t).eps)) for t in types})

# %% [markdown] name="swap-reading"
# Note that most faults pass most checks: wrong grouping passes MHA *and* MQA, a missing offset passes every whole
# prompt without a window. Low-precision types have few bits (the last line). When you change the type, compare with
# float64 and with the old kernel in the *new* type, as the rule above does, and then with a quality measure
# (chapter 18). A fixed tolerance can miss a fault in fp32 and fail a good kernel in bf16.

# %% [markdown] name="cascade-text"
# ## 5. Measure and explain
#
# ### One merge, three uses
#
# Part a merged splits by their log-sum-exp. The same function does more. **Cascade**: requests that share a prefix each
# read it separately. Instead: one pass of *all* their queries over the shared keys (several queries, one read), one pass
# each over their own, and merge. FlashInfer calls it composable attention. **Ring**: a context is distributed over
# devices; keys are passed around a ring, and each device merges the parts (chapter 12).


# %% name="merge-tools" jupyter={"source_hidden": true}
def part(q, k, v):
    """(mean, lse) of queries [n, d] over some keys; lse in base 2, -inf for no keys at all. As in part a."""
    s = q @ k.T / q.shape[-1] ** 0.5 * math.log2(math.e)
    lse = torch.logsumexp(s * math.log(2), -1) / math.log(2)
    return s.mul(math.log(2)).softmax(-1) @ v, lse


def merged(parts):
    means, lses = zip(*parts, strict=True)
    return reference.merge_splits(torch.stack(means), torch.stack(lses))


# %% name="predict-cascade"
widgets.predict(
    "05c-cascade", "8 requests, a shared prefix of 640 keys, 40 keys each: how many times fewer keys are read?", "times"
)

# %% name="cascade"
requests, prefix, own = 8, 640, 40
shared_k, shared_v = torch.randn(2, prefix, 64).double()
own_k, own_v = torch.randn(2, requests, own, 64).double()
queries = torch.randn(requests, 64).double()


def whole(i):
    """Request i alone, over its prefix and its own keys."""
    return part(queries[i : i + 1], torch.cat([shared_k, own_k[i]]), torch.cat([shared_v, own_v[i]]))[0]


first = part(queries, shared_k, shared_v)  # one read of the prefix for all
second = [part(queries[i : i + 1], own_k[i], own_v[i]) for i in range(requests)]
second = tuple(torch.cat(pieces) for pieces in zip(*second, strict=True))
torch.testing.assert_close(merged([first, second]), torch.cat([whole(i) for i in range(requests)]))
reads = [traffic.cascade_keys(requests, prefix, own, cascade) for cascade in (False, True)]
print(f"the same outputs; keys read {reads[0]:,}, with a cascade {reads[1]:,}")
widgets.reveal("05c-cascade", reads[0] / reads[1])

# %% [markdown] name="ring-text"
# The ring: four devices, each with a quarter of the keys and with queries of its own.

# %% name="ring"
devices = 4
k, v = torch.randn(2, 1000, 64).double()
held = list(zip(k.chunk(devices), v.chunk(devices), strict=True))
ring_q = torch.randn(devices, 3, 64).double()
state = [None] * devices
for _ in range(devices):
    for rank in range(devices):
        fresh_part = part(ring_q[rank], *held[rank])
        both = [fresh_part] if state[rank] is None else [state[rank], fresh_part]
        total = torch.logsumexp(torch.stack([lse for _, lse in both]) * math.log(2), 0) / math.log(2)
        state[rank] = (merged(both), total)
    held = held[-1:] + held[:-1]  # every device passes its keys to the next
for rank in range(devices):
    torch.testing.assert_close(state[rank][0], part(ring_q[rank], k, v)[0])
print(f"{devices} devices, {devices} rounds, the same outputs")

# %% [markdown] name="index-text"
# ### One index for many layouts
#
# A block table is a **block-sparse matrix**: rows are groups of queries, columns are blocks of the cache, and a row
# lists the blocks it attends to. Stored like any sparse matrix (`indptr`, `indices`), the same few lines handle a paged
# cache, ragged contiguous keys, a shared prefix and a tree of drafts (chapter 08). Kernels have one loop; layouts
# become data.


# %% name="index-loop"
def sparse_attention(q, keys, values, groups, indptr, indices, last):
    """groups: a slice of queries per row; row r sees blocks indices[indptr[r]:indptr[r+1]], `last[r]` slots of the last.

    keys, values [blocks, block_size, d]. Returns (mean, lse) of all queries; no mask inside a row.
    """
    mean, lse = torch.zeros_like(q), torch.full(q.shape[:1], -math.inf, dtype=q.dtype)
    for row, group in enumerate(groups):
        blocks = indices[indptr[row] : indptr[row + 1]]
        end = (len(blocks) - 1) * keys.shape[1] + last[row]
        mean[group], lse[group] = part(q[group], keys[blocks].flatten(0, 1)[:end], values[blocks].flatten(0, 1)[:end])
    return mean, lse


def one(i):
    return slice(i, i + 1)


# %% name="index"
q, keys, values = torch.randn(3, 64).double(), *torch.randn(2, 12, 4, 64).double()
flat_k, flat_v = keys.flatten(0, 1), values.flatten(0, 1)
layouts = {  # groups, indptr, indices, slots of the last block, block size
    "paged": ([one(0), one(1), one(2)], [0, 3, 4, 6], [7, 2, 9, 0, 11, 3], [1, 4, 2], 4),
    "ragged": ([one(0), one(1), one(2)], [0, 9, 13, 19], [*range(9), *range(20, 24), *range(30, 36)], [1, 1, 1], 1),
    "prefix": ([slice(0, 3)], [0, 2], [5, 8], [4], 4),
    "tree": ([one(0), one(1), one(2)], [0, 1, 3, 5], [40, 40, 41, 40, 42], [1, 1, 1], 1),  # drafts 1 and 2 continue 0
}
results, rows = {}, []
for name, (groups, indptr, indices, last_slots, size) in layouts.items():
    cut = [t.view(-1, size, 64) for t in (flat_k, flat_v)]
    results[name] = sparse_attention(q, *cut, groups, indptr, torch.tensor(indices), last_slots)
    rows.append((name, size, "; ".join(str(indices[indptr[i] : indptr[i + 1]]) for i in range(len(groups)))))
widgets.table(rows, ["layout", "slots a block", "blocks of each row"])

# %% [markdown] name="index-check-text"
# Prefix and tree, merged, are what speculative decoding needs: drafts that see the prefix and their ancestors. The
# engine's kernel does both in one launch: the block table gives the prefix, a bit mask the ancestors of each draft.

# %% name="index-check"
torch.testing.assert_close(results["tree"][0][2:], part(q[2:], flat_k[[40, 42]], flat_v[[40, 42]])[0])
whole_tree = merged([results["prefix"], results["tree"]])  # a prefix of 8 slots, and the drafts after it
for i, drafts in enumerate(([40], [40, 41], [40, 42])):
    seen = [*range(20, 24), *range(32, 36), *drafts]
    torch.testing.assert_close(whole_tree[i : i + 1], part(q[i : i + 1], flat_k[seen], flat_v[seen])[0])
tree_case = paged([(3, 11)], 2, 1, 64, torch.float32)
ancestors = torch.tensor([0b001, 0b011, 0b101], device=DEVICE)
found = flash_attention(*tree_case, ancestors=ancestors)
error, allowed = errors(found, reference.flash_attention, tree_case, ancestors=ancestors)
print(f"kernel, a prefix of 8 and three drafts in a tree: error {error:.1e}, allowed {allowed:.1e}")
assert error <= allowed

# %% [markdown] name="eight-text"
# ### Eight bits
#
# An 8-bit cache halves the KV bytes that decode reads, but for its scales. What does it cost in accuracy? Real keys and
# values this time: those of the course model's middle layer for 512 tokens of text. Each value is stored as a code,
# with one scale per token and head. The kernel reads codes and scales and dequantizes on the chip.


# %% name="real-keys" jupyter={"source_hidden": true}
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
kept = Kept(model.config.attention_scale, model.dtype)
engine = Engine(
    model, EngineConfig(num_blocks=64, prefix_cache="off", max_num_batched_tokens=1024), Parts(attention=kept)
)
greedy = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
engine.add(llm.encode(inspect.getsource(Engine))[:512], greedy)
while engine.has_work():
    engine.step()
layer = model.config.num_layers // 2
q, k, v = (t[:512].to(DEVICE) for t in kept.kept[layer])  # [tokens, heads, head_dim]
kv_heads, d = k.shape[1:]
table, starts = torch.arange(32, device=DEVICE).int()[None], torch.tensor([0, 64], device=DEVICE).int()
lens = torch.tensor([512], device=DEVICE).int()
real = (q[-64:].contiguous(), k.view(32, 16, kv_heads, d), v.view(32, 16, kv_heads, d), table, starts, lens, d**-0.5)
exact = reference.flash_attention(*doubled(real))


def relative(found):
    return float((found.double() - exact).norm() / exact.norm())


# %% name="stored"
def stored(content, kind):
    """Codes and scales, one per token and head; the largest value gets the largest code."""
    largest = 127 if kind is torch.int8 else torch.finfo(kind).max
    scale = content.abs().amax(-1) / largest
    codes = content / scale[..., None]
    return (codes.round() if kind is torch.int8 else codes).to(kind), scale


# %% name="predict-eight"
widgets.predict(
    "05c-e4m3",
    "e4m3 has 4 significant bits, int8 with a scale 7 and a sign: how many times larger is e4m3's error?",
    "times",
)

# %% name="eight"
off, rows = {}, [("fp32", f"{relative(flash_attention(*real)):.1e}")]
for kind in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):
    (keys, key_scale), (values, value_scale) = stored(real[1], kind), stored(real[2], kind)
    # Our kernel and most caches use e4m3; e5m2 is the twin's.
    attend = reference.flash_attention if kind is torch.float8_e5m2 else flash_attention
    found = attend(real[0], keys, values, *real[3:], key_scale=key_scale, value_scale=value_scale)
    off[kind] = relative(found)
    rows.append((str(kind).removeprefix("torch."), f"{off[kind]:.2%}"))
halved = [roofline.bytes_per_generated_token(L8, 1, 8192, kv_bytes=size).cache_read for size in (2, 1)]
print(
    f"8B, context 8,192: {format_bytes(halved[0])} of cache per token become {format_bytes(halved[1])} and the scales"
)
print(widgets.reveal("05c-e4m3", off[torch.float8_e4m3fn] / off[torch.int8]))
widgets.table(rows, ["cache", "relative error of the output"])

# %% [markdown] name="eight-reading"
# At equal bits, int8 with a scale per token and head has a smaller error here than e4m3: with a scale per row these
# keys and values need little range, and e4m3 spends four of its bits on range. e5m2 spends five. FP8 wins where scales
# are coarse and values differ widely under one scale.
#
# **FlashAttention-3 computes in FP8**, Q and K and P and V. It adds two techniques to reduce the error. *Block
# quantization*: a scale per tile instead of one per tensor. *Incoherent processing*: multiply Q and K by the same
# random orthogonal matrix, which leaves the products unchanged and spreads an outlier over all dimensions. We reproduce
# both, with a few injected outliers:


# %% name="fp8-tools"
def to_fp8(x, rows=None):
    """Rounded to e4m3 with one scale per tensor, or per tile of rows; returned as float64 again."""
    if rows is not None:
        return torch.cat([to_fp8(tile) for tile in x.split(rows)])
    scale = x.abs().max() / 448
    return (x / scale).to(torch.float8_e4m3fn).double() * scale


def fp8_attention(q, k, v, rows=None):
    s = to_fp8(q, rows) @ to_fp8(k, rows).T / q.shape[1] ** 0.5
    weights = (s - s.amax(1, keepdim=True)).exp()
    return to_fp8(weights, rows) @ to_fp8(v, rows) / weights.sum(1, keepdim=True)


def hadamard(d):
    h = torch.ones(1, 1).double()
    while len(h) < d:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h * torch.randint(0, 2, (d, 1)).mul(2).sub(1) / d**0.5  # random signs: orthogonal


# %% name="predict-fp8"
widgets.predict("05c-turned", "How many times smaller is the error with both techniques?", "times")

# %% name="fp8"
q8, k8, v8 = torch.randn(3, 512, 128).double()
outlier = torch.rand(512, 128) < 0.001  # as in the paper: a few values ten times as large
q8, k8, v8 = (x + 10 * torch.randn_like(x) * outlier for x in (q8, k8, v8))
truth, turn = part(q8, k8, v8)[0], hadamard(128)
torch.testing.assert_close((q8 @ turn) @ (k8 @ turn).T, q8 @ k8.T)  # the products do not change
ways = {
    "one scale per tensor": (q8, k8, v8),
    "a scale per 64 rows": (q8, k8, v8, 64),
    "and Q, K turned": (q8 @ turn, k8 @ turn, v8, 64),
}
rmse = {name: float((fp8_attention(*given) - truth).pow(2).mean().sqrt()) for name, given in ways.items()}
assert rmse["and Q, K turned"] < rmse["one scale per tensor"]
print(widgets.reveal("05c-turned", rmse["one scale per tensor"] / rmse["and Q, K turned"]))
widgets.table([(name, f"{error:.2e}") for name, error in rmse.items()], ["FP8", "RMSE"])

# %% [markdown] name="fp8-reading"
# Scales per tile change little here: every tile has its outliers, and a floating-point code has the same relative
# precision for a tenth of a value as for the value. They matter where tiles differ by more than the format's range. The
# rotation spreads the outliers themselves. What remains is the rounding of all four, Q, K, P and V, to four significant
# bits. (The paper reports 2.6 times less error than its own FP8 baseline.)
# <!-- source: abstract of FlashAttention-3, Shah et al., July 2024 -->

# %% [markdown] name="special-text"
# ### Specialization: constants versus compile time
#
# A constant lets the compiler eliminate code: a mask, a window, a branch. But each combination is compiled separately,
# at its first use, and in a server a request waits for that. The cell shows both sides: compile times of this machine,
# and the instructions of the engine's kernels.

# %% name="predict-special"
widgets.predict("05c-window", "Compiled in: a sliding window. How many times as many instructions?", "times")

# %% name="special"
lines = compile_table()
kinds = ("head_dim 64", "head_dim 128", "window", "tree", "skip-softmax", "fp8 cache")
found = {kind: lines[f"flash_attention, {kind}: flash_attention, sm_90"] for kind in kinds}
assert found["head_dim 128"]["key"] != found["window"]["key"]
variants = len([name for name in lines if name.endswith(", sm_90")])
print(f"{variants} variants of the engine's kernels for this GPU")
if has_triton:
    first, again = np.median([it["seconds"] for it in built.values()], axis=0)
    print(f"a kernel of this part compiles in {first:.1f} s, and comes from the cache in {again * 1e3:.0f} ms")
    assert len({it["key"] for it in built.values()}) == len(built)
print(widgets.reveal("05c-window", found["window"]["instructions"] / found["head_dim 128"]["instructions"]))
rows = [(kind, line["instructions"], line["registers"]) for kind, line in found.items()]
widgets.table(rows, ["flash attention on sm_90", "instructions", "registers"])

# %% [markdown] name="special-reading"
# - The cache on disk is keyed by source, types, constants and target. It survives a restart, not an upgrade of Triton.
# - Values that change from step to step must *not* be constants, or every step compiles: batch size, context length,
#   number of blocks. Triton goes one step further by default, as you saw in part b: integers that are 1 or divisible by
#   16 get separate versions, unless the kernel uses `do_not_specialize`. The engine's kernels do so for values that grow.
# - FlashInfer compiles an attention variant (mask, soft cap, cache type) from a template on first use, and caches it.
#   It is the same trade-off: seconds once, against a branch in the innermost loop forever.

# %% [markdown] name="explore"
# ## 6. Explore
#
# The timeline for another GPU. Change the names and run: `"A100-80GB"`, `"H100"`, `"B200"`; head_dim 64, 128 or 256. Where
# does ping-pong reach the limit of the tensor cores, and where do the exponentials set it? What would a GPU look like
# with 32 exponentials a clock?

# %% name="explore-timeline"
GPU, HEAD_DIM = "B200", 64
fig, ends = draw(GPU, HEAD_DIM)
listed = ", ".join(f"{name} {end:,.0f}" for name, end in ends.items())
show(fig, f"Timeline of both units of an SM of the {GPU}, head_dim {HEAD_DIM}. Ends in clocks: {listed}.")

# %% [markdown] name="errata"
# ## 7. What the cheat sheets get wrong
#
# **"Shared memory is programmed, the L2 cache is not: it does what it does."** The hardware fills it, and a programmer
# steers it in three ways. *Hints* on a load say what to drop first or to keep; a compiler may lose them (the pinned
# Triton does where it sends the loads of a product ahead: look for `evict_first` in the PTX). A *persisting window*
# reserves a part of the L2 for a range of addresses (CUDA, since Ampere). And the *order of programs* decides who
# shares what.
# Count that one: a product of 8,192 × 8,192 matrices, tiles of 128 × 128, one program on each SM. Programs that run
# together read the same slices at about the same time, so a wave fetches each row panel and each column panel once.

# %% name="order-count"
TILES, PANEL = 8192 // 128, 128 * 8192 * 2  # tiles a side; bytes of a panel of 128 rows or columns in 16 bits


def fetched(order):
    """Bytes that waves of programs fetch if a wave fetches each of its panels once. order: (row, column) of each program."""
    wave_list = [order[at : at + sms] for at in range(0, len(order), sms)]
    return sum(len({r for r, _ in wave}) + len({c for _, c in wave}) for wave in wave_list) * PANEL


def in_groups(height):
    """Columns of `height` tiles, one beside the other, then the next group of rows."""
    groups = [range(top, min(top + height, TILES)) for top in range(0, TILES, height)]
    return [(row, column) for rows in groups for column in range(TILES) for row in rows]


# %% name="predict-order"
widgets.predict("05c-order", "From row by row to groups of 12 rows: how many times fewer bytes from memory?", "times")

# %% name="order"
products_s = 2 * 8192**3 / H100.peak()
moved = {"row by row": fetched(in_groups(1))} | {
    f"groups of {h} rows": fetched(in_groups(h)) for h in (4, 8, 12, 16, 32)
}
assert moved["row by row"] / H100.bandwidth > products_s > moved["groups of 12 rows"] / H100.bandwidth
print(f"the products take {products_s * 1e3:.2f} ms at the peak")
print(widgets.reveal("05c-order", moved["row by row"] / moved["groups of 12 rows"]))
rows = [(name, format_bytes(size), f"{size / H100.bandwidth * 1e3:.2f} ms") for name, size in moved.items()]
widgets.table(
    [*rows, ("everything once", format_bytes(2 * TILES * PANEL), "")], ["order", "fetched", "at the memory's bandwidth"]
)

# %% [markdown] name="errata-reading"
# By this count, with the same kernel and the same tiles, the order of the programs decides whether memory or arithmetic
# is the limit. Triton's tutorial for matrix products calls it grouped ordering. In attention, programs of one head run
# side by side for the same reason: they share keys.
#
# **"On Blackwell exponentials are the bottleneck of attention."** At which head_dim? Section 3 computed it.
#
# **"Autotuning finds the best kernel."** The best of the list, for this shape, on this GPU, with what else was running.
# It cannot find what is not in the list, such as a grouped order or two groups of warps in ping-pong.
#
# **"TMA makes attention read less."** The bytes are the same. It frees registers and instructions, and that makes larger
# tiles possible, which do read less.

# %% [markdown] name="production"
# ## 8. In production
#
# As of November 2026. Names change; look them up in the version you run.
#
# **Tuning.** vLLM and SGLang ship JSON files of tuned tiles for their Triton kernels, by GPU and shape, with scripts that
# make them; without a file for a GPU they fall back to a default and log it. FlashInfer and TensorRT-LLM tune at start-up,
# and can store the result. `triton.autotune` keeps its results for the process, and on disk if asked.
#
# **Tensor descriptors.** Triton has them as `TensorDescriptor` on the host, and can make them inside a kernel; CUTLASS
# calls them TMA copies. FlashAttention-3 and 4, DeepGEMM and cuBLAS use the TMA on Hopper and Blackwell.
#
# **Overlap.** FlashAttention-3: one group of warps loads, two compute in ping-pong. FlashAttention-4: separate groups for
# loads, products, softmax and rescaling. Gluon and CuTe DSL have such roles of warps.
#
# **Cascade and trees.** FlashInfer's composable attention; vLLM has cascade attention for a prefix that all requests
# share, switched by a heuristic. Trees of drafts are chapter 08, rings chapter 12, 8-bit caches chapter 07.

# %% [markdown] name="quiz-text"
# ## 9. Quiz
#
# Tuning, overlap, copies and caches. Then build it: [lab
# 05](../../labs/05_flash_attention/flash_attention.ipynb).

# %% name="quiz"
from grader.quiz import load_quiz

widgets.quiz(load_quiz("05_flash_attention").draw(seed=3, tag="tuning"))

# %% [markdown] name="card"
# ## 10. Card
#
# - Clocks of a tile: products `4·rows·keys·d / rate`, exponentials `rows·keys / 16`. Share of exponentials at d = 128: A100
#   25 %, H100 50 %, B200 100 %; twice that at 64, half at 256. <!-- printed: rates -->
# - Ping-pong: one group's products beside the other's exponentials. At most `(products + exp) / max(products, exp)`.
# - Copies in stages: `load + (tiles − 1)·max(load, compute) + compute`. TMA: a thread orders a tile by its place; the bytes
#   stay the same, registers become free. PTX: `cp.async.bulk.tensor`.
# - Tuning: rule out by spills, shared memory and instruction; rank by time, on the GPU, for the shapes that occur.
# - The order of programs steers the L2: a wave of tiles that is nearly square fetches fewest panels.
# - One merge by log-sum-exp: splits, cascade, ring. A block table is a block-sparse index: paged, ragged, shared prefix
#   and tree are data, not kernels.
# - Swap check: MHA, GQA, MQA; chunk after a prefix; window; positions; each type against float64.
# - A constant saves instructions and costs a compilation for each of its values.
