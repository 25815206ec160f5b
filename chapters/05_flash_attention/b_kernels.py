# %% [markdown] name="title"
# # 05b · Kernels: what runs on the GPU, and what it costs to start it
#
# About 50 minutes. You need the roofline (chapter 00); part a of this chapter helps. Kernels run in Triton's interpreter here, and on the GPU if there is one.
# They are also *compiled* here, for GPUs that you do not have. Triton needs Linux (WSL and Colab count); elsewhere the
# cells that need it do nothing. The lab is [Build flash
# attention](../../labs/05_flash_attention/flash_attention.ipynb).

# %% name="setup"
import importlib.util
import inspect
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from IPython.display import display
from torch.utils._python_dispatch import TorchDispatchMode

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton has to know before the first kernel is defined

from chapters import widgets
from chapters.widgets.figure import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, figure, show, tidy
from chapters.widgets.occupancy import table
from reference_impl import LLM, Engine, EngineConfig, SamplingParams, course_model
from reference_impl.kernels import reference
from reference_impl.core.decoder import DecoderLayer
from reference_impl.models.gemma import Gemma2Layer
from reference_impl.theory import collectives, fusion, kv_cache, model_shapes, roofline, warp
from reference_impl.theory.hardware import device
from reference_impl.theory.occupancy import SMS, bytes_in_flight, occupancy, waves
from reference_impl.theory.units import KiB, format_bytes, format_seconds

torch.set_num_threads(1)
torch.manual_seed(5)
H100, L8 = device("H100"), model_shapes.model("llama-3-8b")
on_gpu = torch.cuda.is_available()
DEVICE = torch.device("cuda" if on_gpu else "cpu")
has_triton = importlib.util.find_spec("triton") is not None
known_gpu = not on_gpu or "sm_{}{}".format(*torch.cuda.get_device_capability()) in SMS
fp8_here = not on_gpu or torch.cuda.get_device_capability() >= (8, 9)
if has_triton:
    import triton
    import triton.language as tl

    print(f"Triton {triton.__version__},", "on the GPU" if on_gpu else "in the interpreter, on the CPU")
else:
    print("this machine has no Triton: cells that need it do nothing")

# %% [markdown] name="question"
# ## 1. A question with a number
#
# Before each big matrix product of a model with FP8 weights, three small things happen to every token. The layer's
# output is **added** to the residual stream. The sum is **normalised**. The result is **converted** to 8 bits for the
# product. The values are 16 bits wide, 8,192 of them per token, and each of the three steps is a kernel of its own.
#
# Suppose *one* kernel does all three. **How many times fewer bytes move between memory and chip?** The arithmetic is
# negligible, so the speedup cannot be larger than that, apart from launches.

# %% name="predict"
widgets.predict("05b-fused", "How many times fewer bytes does the one kernel move than the three?", "times")

# %% [markdown] name="idea"
# ## 2. The idea
#
# Picture a GPU as a street with a hundred kitchens. The market, where all food comes from, is far away.
#
# - An order is cut into **blocks** of work. A block is cooked in *one* kitchen (a **streaming multiprocessor**, SM) from
#   beginning to end.
# - Cooks stand in rows of 32, a **warp**, and a row does what one voice tells it: all 32 chop, or all 32 stir. If half
#   of them have to chop and the others to stir, first one half works and then the other: **divergence**.
# - What a cook holds in both hands are **registers**. What lies on the kitchen's table, for all of a block, is **shared
#   memory**. The table has 32 drawers, the **banks**; two cooks of a row who want different things from one drawer wait
#   for each other. A **barrier** means: nobody goes on before all have put their bowl on the table.
# - When a row waits for the market, another row of the same kitchen uses the stove, at once and at no cost, because all
#   cooks keep what they hold in their hands. The share of the kitchen's places for rows that are taken is the
#   **occupancy**.
# - A **kernel** is one order. It starts with empty hands and ends with everything carried back to the market. With
#   three small orders in a row, each fetches what the one before has just carried away. Doing all in one order is
#   **fusion**.

# %% name="idea-figure" jupyter={"source_hidden": true}
from matplotlib.patches import Rectangle

chip, sm = H100.chip, SMS["sm_90"]
fig = figure(7.8, 3.0)
ax = fig.subplots()
for i in range(chip.num_sms):
    ax.add_patch(Rectangle((0.25 * (i % 12), 2.5 - 0.25 * (i // 12)), 0.2, 0.2, facecolor=ORANGE if i == 5 else SKY))
ax.text(0, 2.85, f"GPU: {chip.num_sms} SMs (H100)", fontsize=9)
ax.add_patch(Rectangle((0, -0.75), 11.6, 0.35, facecolor=GREY))
ax.text(
    0.1,
    -0.58,
    f"device memory: {format_bytes(H100.capacity)}, {H100.bandwidth / 1e12:.2f} TB/s",
    fontsize=8,
    va="center",
)
ax.add_patch(Rectangle((0, -0.3), 3.0, 0.3, facecolor=PURPLE, alpha=0.5))
ax.text(0.1, -0.15, f"L2: {format_bytes(chip.l2_bytes, binary=True)}", fontsize=8, va="center")
ax.add_patch(Rectangle((4.2, -0.3), 3.6, 3.0, facecolor="white", edgecolor=ORANGE, linewidth=1.5))
ax.text(4.2, 2.85, f"one SM: {sm.partitions} quarters", fontsize=9)
for i in range(sm.partitions):
    ax.add_patch(Rectangle((4.35 + 0.87 * i, 0.55), 0.77, 1.95, facecolor=BLUE, alpha=0.3))
    ax.text(
        4.73 + 0.87 * i,
        1.5,
        f"{sm.registers // sm.partitions:,}\nregisters\n\nscheduler\n\nlanes",
        ha="center",
        va="center",
        fontsize=7,
    )
ax.add_patch(Rectangle((4.35, -0.15), 3.38, 0.55, facecolor=GREEN, alpha=0.4))
ax.text(
    6.03,
    0.12,
    f"shared memory: {sm.shared_bytes // 1024} KiB, {warp.BANKS} banks",
    ha="center",
    va="center",
    fontsize=8,
)
ax.text(8.6, 2.85, f"one warp: {sm.warp_size} threads in step", fontsize=9)
for i in range(sm.warp_size):
    ax.add_patch(Rectangle((8.6 + 0.09 * i, 1.6), 0.075, 0.9, facecolor=BLUE, alpha=0.55))
ax.text(8.6, 1.35, "one instruction for all of them", fontsize=8)
ax.text(
    8.6, 0.55, f"block: 1 to {sm.max_threads // sm.warp_size} warps of one SM,\nwith a barrier between them", fontsize=8
)
ax.text(8.6, -0.15, f"at most {sm.max_warps} warps on an SM", fontsize=8)
ax.set_xlim(-0.1, 11.7)
ax.set_ylim(-0.8, 3.1)
ax.axis("off")
show(
    fig,
    "Left a GPU of 132 small squares, its multiprocessors, above an L2 cache and device memory. In the middle one of them "
    "enlarged: four quarters, each with a share of the registers, a scheduler and lanes, above one shared memory of 32 "
    "banks. Right a warp: 32 threads that get one instruction.",
)

# %% [markdown] name="answer-text"
# The question of the top is a ledger. Per token: what does each kernel read and write? Try it on paper before you run the
# cell; the sum `x + residual` is needed again by the next layer, so it has to be written in any case.

# %% name="answer"
tokens = 64  # a decode batch: the weight of the norm is read once for all of them
chain = fusion.add_norm_quantize(tokens, 8192)
rows = []
for kernel in (*chain.kernels, chain.fused):
    moved = sum(chain.sizes[name] for name in (*kernel.reads, *kernel.writes))
    name = "one kernel" if kernel == chain.fused else kernel.name
    rows.append((name, ", ".join(kernel.reads), ", ".join(kernel.writes), round(moved / tokens)))
print(widgets.reveal("05b-fused", chain.bytes / chain.fused_bytes))
widgets.table(rows, ["kernel", "reads", "writes", "bytes per token"])

# %% [markdown] name="warp-text"
# ### What a warp's accesses cost
#
# Three rules, counted. A request of a warp to device memory moves whole **sectors** of 32 bytes. A request to shared
# memory takes as many passes as there are different words in the busiest bank. A branch is executed once for each side
# that any thread takes.

# %% name="predict-warp"
widgets.predict(
    "05b-sectors", "32 threads ask for 4 bytes each, 8 values apart. What share of the moved bytes is asked for?", "%"
)

# %% name="warp"
rows = [
    (stride, warp.strided_sectors(stride), f"{warp.useful_share(stride):.1%}", warp.strided_bank_passes(stride))
    for stride in (1, 2, 8, 32, 33)
]
assert warp.strided_bank_passes(32) == 32
assert warp.strided_bank_passes(33) == 1
threads = range(256)
branches = {"every second thread": [i % 2 for i in threads], "every second warp": [i // 32 % 2 for i in threads]}
for name, side in branches.items():
    print(f"a branch for {name}: {warp.branch_passes(side)} executions by 8 warps")
print(widgets.reveal("05b-sectors", 100 * warp.useful_share(8)))
widgets.table(rows, ["values between threads", "sectors of device memory", "asked for", "passes of shared memory"])

# %% [markdown] name="warp-reading"
# Neighbouring threads should read neighbouring values: that is **coalescing**. A tile that is 32 values wide and read
# by columns is the worst case of shared memory for values of 4 bytes, the width of a bank; with one unused value at the
# end of each row, so 33, it is the best. (Values of 2 bytes share a bank by twos, values of 8 take two banks each.) A
# CUDA programmer lays out such paddings and swizzles by hand, CUTLASS has names for them, and Triton's compiler chooses
# them itself.
#
# Why barriers? Warps of a block run in any order. Below, four of them sum a row: each writes its part into shared
# memory, and the first one adds the parts. It is run 200 times in random order, without and with a barrier.


# %% name="barrier"
def one_warp(me, parts, shared, result, barrier):
    shared[me] = parts[me]
    yield "stored"
    if barrier:
        yield "barrier"
    if me == 0:
        result.append(sum(shared))


def block_sum(parts, barrier, rng):
    """Four warps; the scheduler picks any that is not waiting at the barrier for its next step."""
    shared, result, waiting = [0] * len(parts), [], set()
    warps = {me: one_warp(me, parts, shared, result, barrier) for me in range(len(parts))}
    while warps:
        me = rng.choice([w for w in warps if w not in waiting])
        said = next(warps[me], "done")
        if said == "done":
            del warps[me]
        elif said == "barrier":
            waiting.add(me)
        if waiting == set(warps):
            waiting.clear()
    return result[0]


# %% name="predict-barrier"
widgets.predict("05b-barrier", "Without a barrier: how many of 200 sums are right?", "of 200")

# %% name="barrier-run"
rng, parts = random.Random(0), [1, 20, 300, 4000]
without, with_one = (Counter(block_sum(parts, barrier, rng) for _ in range(200)) for barrier in (False, True))
assert with_one == {sum(parts): 200}
print(f"with a barrier all 200 are {sum(parts):,}; without one there are {len(without)} different sums")
widgets.reveal("05b-barrier", without[sum(parts)])

# %% [markdown] name="occupancy-text"
# ### Occupancy: how many warps fit
#
# Registers and shared memory are allocated when a block starts and held until it ends. So they determine how many
# blocks an SM holds. The calculation below is that of NVIDIA's own calculator, and agrees with it case by case.

# %% name="occupancy-source"
print(inspect.getsource(occupancy).split('"""')[2])

# %% name="predict-occupancy"
widgets.predict(
    "05b-blocks", "4 warps a block: 64 registers a thread allow 8 blocks on an SM. How many do 65 allow?", "blocks"
)

# %% name="occupancy"
held = {r: occupancy("sm_90", num_warps=4, registers=r, shared_bytes=16 * KiB) for r in (32, 64, 65, 128, 168, 255)}
print(widgets.reveal("05b-blocks", held[65].blocks))
widgets.table(
    [
        (r, it.blocks, f"{it.warps} of {it.sm.max_warps}", f"{it.share:.0%}", ", ".join(it.binding))
        for r, it in held.items()
    ],
    ["registers a thread", "blocks", "warps", "occupancy", "limited by"],
    "4 warps and 16 KiB of shared memory a block, sm_90",
)

# %% [markdown] name="occupancy-bytes-text"
# What occupancy is *for*: memory answers late, and until it does, requests have to be on their way.

# %% name="occupancy-bytes"
LATENCY = 450 / chip.clock  # latency of device memory in seconds: published figures for an idle H100 are 400-500 clocks
needed = bytes_in_flight(H100.bandwidth, LATENCY)
per_sm = needed / chip.num_sms
print(
    f"to keep {H100.bandwidth / 1e12:.2f} TB/s busy over {LATENCY * 1e9:.0f} ns, {format_bytes(needed)} must be on their way"
)
print(f"that is {format_bytes(per_sm)} per SM")
rows = []
for loads in (1, 2, 8):
    warps_needed = int(np.ceil(per_sm / (32 * 16 * loads)))
    rows.append((loads, warps_needed, f"{warps_needed / sm.max_warps:.0%}"))
widgets.table(rows, ["loads of 16 bytes a thread at a time", "warps needed", "occupancy"])

# %% [markdown] name="occupancy-reading"
# One register more than 64 costs a whole block. But look at the last lines: what must be high is the number of *bytes
# in flight*, and a few warps with many loads each do as well as many warps with one. Kernels for matrix products and
# attention often run at an eighth of the warps, on purpose: they use the registers for large tiles. **Occupancy is a
# means, not a goal.**
#
# It also matters how blocks fill the SMs. They run in waves, and the last wave may be nearly empty:

# %% name="waves"
rows = []
for blocks in (132, 133, 264, 1024):
    rounds = waves(blocks, chip.num_sms, 1)
    rows.append((blocks, rounds, f"{blocks / (rounds * chip.num_sms):.0%}"))
widgets.table(rows, ["blocks, one per SM", "rounds", "places used"])

# %% [markdown] name="scratch-text"
# ## 3. From scratch
#
# First in plain PyTorch: residual add and RMSNorm. Then the same as one Triton kernel. In Triton you write what *one
# block* does, called a **program**, with whole rows of values at once. `tl.load` takes many addresses. Which thread
# holds which value, how warps reduce a sum, where the barriers are: you write none of that.


# %% name="scratch"
def add_then_norm(x, residual, weight, eps):
    total = x + residual  # one kernel: reads 2 rows, writes 1
    return total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps) * weight, total  # several more


if has_triton:

    @triton.jit
    def add_norm(x, residual, weight, total, normed, eps, N, BLOCK: tl.constexpr):
        row = tl.program_id(0)  # index of this block: one per row
        column = tl.arange(0, BLOCK)  # BLOCK is a power of two, a row has N values
        inside = column < N
        s = tl.load(x + row * N + column, mask=inside, other=0.0).to(tl.float32)
        s += tl.load(residual + row * N + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + row * N + column, s.to(total.dtype.element_ty), mask=inside)
        factor = tl.rsqrt(tl.sum(s * s, 0) / N + eps)  # across all threads of the block
        y = s * factor * tl.load(weight + column, mask=inside, other=0.0)
        tl.store(normed + row * N + column, y.to(normed.dtype.element_ty), mask=inside)


# %% name="scratch-run"
if has_triton:
    rows, n = 6, 1000
    x, residual = torch.randn(2, rows, n, device=DEVICE)
    weight = 1 + 0.1 * torch.randn(n, device=DEVICE)
    total, normed = torch.empty_like(x), torch.empty_like(x)
    add_norm[(rows,)](x, residual, weight, total, normed, 1e-6, n, BLOCK=1024)
    for ours, plain in zip((normed, total), add_then_norm(x, residual, weight, 1e-6), strict=True):
        torch.testing.assert_close(ours, plain)
    print("the same results as PyTorch's, from one kernel")

# %% [markdown] name="count-text"
# How many bytes does it request? The interpreter executes each load and store, so they can be counted; a folded cell does
# it. The formulas for separate kernels and for one come from `reference_impl.theory.fusion`. There is one difference:
# every program loads the weight, and theory counts it once, because the L2 cache holds it.


# %% name="counted" jupyter={"source_hidden": true}
@contextmanager
def counted():
    """Launches and bytes requested by kernels, in the interpreter; without masked lanes."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    launch, asked, Builder = GridExecutor.__call__, Counter(), InterpreterBuilder

    def size(pointers, mask):
        return int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8

    def counting_load(self, pointers, mask, *rest):
        asked["read"] += size(pointers, mask)
        return load(self, pointers, mask, *rest)

    def counting_store(self, pointers, value, mask, *rest):
        asked["written"] += size(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def counting_launch(self, *arguments, **named):
        asked["launches"] += 1
        return launch(self, *arguments, **named)

    Builder.create_masked_load, Builder.create_masked_store = counting_load, counting_store
    GridExecutor.__call__ = counting_launch
    try:
        yield asked
    finally:
        Builder.create_masked_load, Builder.create_masked_store, GridExecutor.__call__ = load, store, launch


# %% name="predict-count"
widgets.predict("05b-bytes", "6 rows of 1,000 values, 4 bytes each: how many bytes does the one kernel read?", "bytes")

# %% name="count"
interpreted = has_triton and not on_gpu
reads = (2 * 6 + 6) * 1000 * 4  # two operands and the weight, which every program loads
if interpreted:
    with counted() as asked:
        add_norm[(rows,)](x, residual, weight, total, normed, 1e-6, n, BLOCK=1024)
    chain = fusion.add_norm(rows, n, value_bytes=4)
    again = (rows - 1) * n * 4  # the weight, for every row but the first
    print(f"asked for: {dict(asked)}; theory: {chain.fused_bytes:,} bytes fused, {chain.bytes:,} as two kernels")
    assert asked["read"] + asked["written"] == chain.fused_bytes + again
    assert asked["read"] == reads
else:
    print("counting needs the interpreter: run this notebook with TRITON_INTERPRET=1 on a machine with Triton")
widgets.reveal("05b-bytes", reads)

# %% [markdown] name="compile-text"
# ### Compiling for a GPU that you do not have
#
# Triton is a compiler: it includes an assembler, and needs no GPU to generate a GPU's machine code. The only obstacle
# is the interpreter: a process uses either one. So a second process compiles, with its own cache, while you read on; a
# folded cell starts it. It is given what Triton's launcher would see: types, constants, and which pointers and integers
# are divisible by 16.

# %% name="compiler" jupyter={"source_hidden": true}
CHILD = """
import json, re, subprocess, sys, tempfile, time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
import triton, learned
from reference_impl.kernels.architectures import ARCHITECTURES
from reference_impl.kernels.compilation import compile_for, key, resources
from reference_impl.kernels.launch import Launch

def sass(cubin):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin), file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout

found = []
for kernel, gpu, types, constants, aligned, options in json.load(sys.stdin):
    launch, gpu = Launch(getattr(learned, kernel), types, constants, tuple(aligned), options), ARCHITECTURES[gpu]
    compiled = compile_for(launch, gpu)
    it = resources(launch, gpu)
    about = asdict(it) | {"problems": it.problems(gpu), "key": key(launch, gpu)}
    if "ptx" in compiled.asm:
        about |= {"ptx": compiled.asm["ptx"], "sass": sass(compiled.asm["cubin"])}
    found.append(about)
print(json.dumps(found))
"""


def start_compiling(kernel, requests):
    """A process that compiles `kernel` (defined in this notebook) once per request."""
    folder = tempfile.TemporaryDirectory()
    source = "import triton\nimport triton.language as tl\n\n" + inspect.cleandoc("\n" + inspect.getsource(kernel.fn))
    (Path(folder.name) / "learned.py").write_text(source)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": folder.name + "/cache", "PYTHONPATH": os.pathsep.join([folder.name, *sys.path])}
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    process.stdin.write(json.dumps([[kernel.fn.__name__, *request] for request in requests]))
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


# %% name="compile"
bf16 = dict.fromkeys(("x", "residual", "weight", "total", "normed"), "*bf16") | {"eps": "fp32"}
pointers = [name for name in bf16 if name != "eps"]
NORMS = {
    "N is a number of the run, any": ("sm_90", bf16 | {"N": "i32"}, {"BLOCK": 4096}, pointers, {"num_warps": 8}),
    "N ..., divisible by 16": ("sm_90", bf16 | {"N": "i32"}, {"BLOCK": 4096}, [*pointers, "N"], {"num_warps": 8}),
    "N = 4096, a constant": ("sm_90", bf16, {"N": 4096, "BLOCK": 4096}, pointers, {"num_warps": 8}),
    "N = 4001, a constant": ("sm_90", bf16, {"N": 4001, "BLOCK": 4096}, pointers, {"num_warps": 8}),
}
if has_triton:
    norm_job = start_compiling(add_norm, NORMS.values())
    print(f"compiling for {', '.join(sorted({request[0] for request in NORMS.values()}))}: {', '.join(NORMS)}")

# %% [markdown] name="matmul-text"
# While it works, here is the kernel that everything else is built on: a **tiled matrix product**. A program computes a
# tile of the result and iterates over the inner dimension. Each value it reads is used `BLOCK_N` or `BLOCK_M` times.

# %% name="matmul"
if has_triton:

    @triton.jit
    def matmul(x, w, y, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
        m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, K, BLOCK_K):  # K is a multiple of BLOCK_K
            a = tl.load(x + m[:, None] * K + (start + k)[None, :], mask=(m < M)[:, None], other=0.0)
            b = tl.load(w + n[None, :] * K + (start + k)[:, None], mask=(n < N)[None, :], other=0.0)
            acc = tl.dot(a, b, acc)
        inside = (m < M)[:, None] & (n < N)[None, :]
        tl.store(y + m[:, None] * N + n[None, :], acc.to(y.dtype.element_ty), mask=inside)

    a, b = torch.randn(2, 70, 128, device=DEVICE).to(torch.float16)
    y = torch.empty(70, 70, device=DEVICE, dtype=torch.float32)
    matmul[(3, 3)](a, b, y, 70, 70, 128, BLOCK_M=32, BLOCK_N=32, BLOCK_K=64)
    torch.testing.assert_close(y, a.float() @ b.float().T, rtol=1e-3, atol=1e-3)
    print("right, for tiles that do not divide the result")

# %% [markdown] name="matmul-tiles-text"
# The second process compiles it with these tiles: GPU, rows and columns of the result, warps, stages.

# %% name="matmul-tiles"
TILES = [
    ("sm_90", 128, 128, 4, 3), ("sm_90", 128, 128, 8, 3), ("sm_90", 128, 256, 8, 3), ("sm_90", 128, 256, 4, 3),
    ("sm_90", 128, 128, 8, 4), ("sm_90", 128, 128, 8, 8), ("sm_90", 64, 64, 4, 3), ("sm_90", 16, 64, 4, 3),
    ("sm_80", 128, 128, 8, 3), ("gfx942", 128, 128, 8, 2),
]  # fmt: skip
operands = dict.fromkeys("xwy", "*bf16") | dict.fromkeys("MNK", "i32")
requests = [
    (gpu, operands, {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": 64}, list("xwyNK"), {"num_warps": w, "num_stages": s})
    for gpu, m, n, w, s in TILES
]
if has_triton:
    matmul_job = start_compiling(matmul, requests)
    print(f"compiling {len(requests)} versions for {', '.join(sorted({gpu for gpu, *_ in TILES}))}")

# %% [markdown] name="ptx-text"
# ### Reading PTX
#
# PTX is NVIDIA's portable assembly, SASS the machine code of one GPU. You need not write either. But you can *look* for
# three things in a minute: how wide the loads are, whether the tensor cores are used, and whether registers spill.

# %% name="ptx"
if has_triton:
    norms = dict(zip(NORMS, compiled_by(norm_job), strict=True))
    wide, narrow = norms["N = 4096, a constant"], norms["N = 4001, a constant"]
    per_thread = 3 * 4096 * 2 // (8 * 32)  # bytes that each of 256 threads loads: of x, residual, weight
    loads = {name: len(re.findall(r"\bld\.global", it["ptx"])) for name, it in norms.items()}
    assert loads["N = 4096, a constant"] == per_thread // 16, "16 bytes per load"
    assert loads["N = 4001, a constant"] == per_thread // 2, "one value per load"
    print(next(line.strip() for line in wide["ptx"].splitlines() if "ld.global.v4" in line))
    rows = []
    for name, it in norms.items():
        accesses = Counter(re.findall(r"\b(?:ld|st)\.global[\w.:]*", it["ptx"]))
        listed = ", ".join(f"{count} {what}" for what, count in sorted(accesses.items()))
        rows.append((name, it["registers"], it["instructions"], listed))
    display(widgets.table(rows, ["", "registers", "instructions", "accesses in PTX"]))

# %% [markdown] name="ptx-reading"
# The same source gives eight times as many load instructions for a row of 4,001 values as for one of 4,096. A row of
# 4,001 values of 2 bytes may begin at any even address, so the compiler must not load 16 bytes at once. For 4,096 it
# can, because the number is a constant, or because Triton's launcher checked that it is divisible by 16 and compiled a
# version for that. **Alignment is a guarantee, and the compiler relies on guarantees.**

# %% [markdown] name="engine-text"
# ## 4. The same thing inside the engine
#
# The engine's kernels are in `reference_impl/kernels`, one file each, and each has a **twin** in plain torch that
# defines the right result. Here are three that fuse: add, norm and conversion to FP8; SwiGLU's gate with conversion;
# and rotary embedding with the write into the paged cache. They are checked against their twins, and counted.

# %% name="engine-kernels"
if has_triton and fp8_here:  # FP8 needs compute capability 8.9
    from reference_impl.kernels.gates_fp8 import silu_and_mul_fp8
    from reference_impl.kernels.rms_norm import _rms_norm, add_rms_norm_fp8

    print(inspect.getsource(_rms_norm.fn))
    x, residual = torch.randn(2, 6, 1024, device=DEVICE)
    weight = 1 + 0.1 * torch.randn(1024, device=DEVICE)
    for ours, twin in zip(
        add_rms_norm_fp8(x, residual, weight, 1e-6), reference.add_rms_norm_fp8(x, residual, weight, 1e-6), strict=True
    ):
        torch.testing.assert_close(ours.float(), twin.float(), rtol=0.08, atol=1e-3)  # FP8 steps are up to an eighth
    print("add, norm and FP8: as the twin, up to a step of FP8")

# %% [markdown] name="engine-count-text"
# The bytes, counted as above. Of the norm's weight, theory counts one read.

# %% name="engine-count"
if interpreted:
    with counted() as asked:
        add_rms_norm_fp8(x, residual, weight, 1e-6)
    chain, moved = fusion.add_norm_quantize(6, 1024, value_bytes=4), asked["read"] + asked["written"]
    print(
        f"add, norm, FP8: {moved:,} bytes; theory {chain.fused_bytes:,}, and {5 * 4096:,} of the weight once more per row"
    )
    assert moved == chain.fused_bytes + 5 * 4096
    with counted() as asked:
        silu_and_mul_fp8(torch.randn(6, 2048))
    chain, moved = fusion.gate_quantize(6, 1024, value_bytes=4), asked["read"] + asked["written"]
    print(f"gate and FP8: {moved:,} bytes; theory {chain.fused_bytes:,}, as three kernels {chain.bytes:,}")
    assert moved == chain.fused_bytes

# %% [markdown] name="rotary-text"
# Rotary embedding rotates the keys, which are then written straight to their slots. So the rotated keys are an
# intermediate, the only one of this chain. Values are written unchanged.

# %% name="rotary"
if has_triton:
    from reference_impl.kernels.rotate_and_write import rotate_and_write

    tokens, heads, kv_heads, d, block_size = 5, 8, 2, 64, 16
    q, k, v = (torch.randn(tokens, h, d, device=DEVICE) for h in (heads, kv_heads, kv_heads))
    angles = torch.arange(100)[:, None] * 10000.0 ** (-torch.arange(0, d, 2) / d)
    cos = torch.cat([angles.cos()] * 2, -1)[:, None].to(DEVICE)
    sin = torch.cat([-angles.sin(), angles.sin()], -1)[:, None].to(DEVICE)
    positions, slots = torch.tensor([7, 8, 9, 30, 31], device=DEVICE), torch.tensor([39, 40, 41, 3, -1], device=DEVICE)
    caches = [torch.full((2, 3, block_size, kv_heads, d), float("nan"), device=DEVICE) for _ in range(2)]
    ours = rotate_and_write(q, k, v, positions, cos, sin, *caches[0], slots)
    twin = reference.rotate_and_write(q, k, v, positions, cos, sin, *caches[1], slots)
    torch.testing.assert_close(ours, twin)
    torch.testing.assert_close(caches[0], caches[1], equal_nan=True)
    written = int(caches[0][0].isfinite().all(-1).all(-1).sum())
    print(f"as the twin; {written} slots written, the padding token (slot -1) nowhere, everything else still NaN")
    assert written == 4
chain = fusion.rotate_and_write(1, L8.num_heads, L8.num_kv_heads, L8.head_dim)
print(f"{L8.name}, per token and layer: {chain.bytes:,} bytes as two kernels, {chain.fused_bytes:,} as one; the difference is "
      f"twice the rotated keys")  # fmt: skip
assert chain.saved == 2 * chain.sizes["rotated k"]

# %% [markdown] name="engine-triton-text"
# Now the whole engine, with its Triton kernels: attention, norms, gates, rotary embedding and cache write, and for a
# few tokens the products, too. In the interpreter that is very slow, so we use the course's draft model, of two layers,
# and two tokens. They must be the same.

# %% name="engine-triton"
if interpreted:
    outputs = {}
    for backend in ("torch", "triton"):
        tried = LLM(course_model("draft"), dtype="float32", kv_cache_bytes=2**21, prefix_cache="off", attention=backend)
        request = tried.engine.add(
            tried.encode("def fibonacci(n):"), SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
        )
        tried.engine.step()
        with counted() as asked:
            tried.engine.step()
        outputs[backend] = request.output_tokens
        layers = tried.engine.model.config.num_layers
        assert (asked["launches"] > 0) == (backend == "triton")
        print(
            f"{backend:7s}tokens {outputs[backend]}; a decode step launches {asked['launches']} kernels of ours, {layers} layers"
        )
    assert outputs["torch"] == outputs["triton"]

# %% [markdown] name="where-text"
# ### Where each tensor is stored
#
# Attention again, mapped to the memory hierarchy. The tile is the engine's own choice for an H100 with heads of 128;
# the compiler's figures come from the compile table.

# %% name="where"
if has_triton:
    from reference_impl.kernels.architectures import ARCHITECTURES
    from reference_impl.kernels.flash_attention import tile_of

    n, d = 8192, 128
    tile, options = tile_of(d, 2, ARCHITECTURES["sm_90"])
    M, N, stages, threads = tile["BLOCK_M"], tile["BLOCK_N"], options["num_stages"], 32 * options["num_warps"]
    PLACES = (
        ("device memory", "Q, K, V, output of one head", 4 * n * d * 2, "read or written by whole tiles"),
        ("device memory", "block table", n // 16 * 4, "looked up for every tile of keys"),
        ("shared memory", f"tile of Q, {M} x {d}", M * d * 2, "loaded once, used for all keys"),
        ("shared memory", f"tiles of K and V, {N} x {d}", stages * 2 * N * d * 2, f"{stages} stages"),
        ("registers", f"scores, {M} x {N}, fp32", M * N * 4, "never leave"),
        ("registers", f"output so far, {M} x {d}, fp32", M * d * 4, "until the division at the end"),
        ("registers", "running maximum and sum", 2 * M * 4, "one of each per row"),
        ("nowhere", f"score matrix, {n} x {n}", n * n * 2, "what plain attention writes and reads"),
    )
    rows = [(place, what, format_bytes(size, binary=True), note) for place, what, size, note in PLACES]
    display(widgets.table(rows, ["where", "what", "bytes", ""]))

# %% [markdown] name="where-check-text"
# Does the compiler agree? Shared memory should be the tiles, and the registers of a thread its part of scores and output,
# and some more for addresses and copies.

# %% name="where-check"
if has_triton:
    line = table()["flash_attention, head_dim 128: flash_attention, sm_90"]
    held = sum(size for place, _, size, _ in PLACES if place == "shared memory")
    sums = sum(size for place, _, size, _ in PLACES if place == "registers") // 4 // threads
    print(f"shared memory: {line['shared_bytes'] / KiB:.0f} KiB, of it tiles {held / KiB:.0f}")
    print(f"registers per thread: {line['registers']}, of them scores and output {sums}")
    assert held <= line["shared_bytes"]
    assert sums < line["registers"] <= 255

# %% [markdown] name="measure-text"
# ## 5. Measure and explain
#
# ### What fusion saves in bytes
#
# Count what one kernel writes and the next reads. A chain of *n* kernels has *n* − 1 such **intermediates**. Each is
# moved twice. If it is needed again later, as the residual stream is, it has to be written anyway, and fusion saves
# only the reads.

# %% name="chains"
T, H = 64, 8192  # tokens of a decode batch, hidden size of a 70B model
CHAINS = {
    "add, norm": fusion.add_norm(T, H),
    "add, norm, FP8": fusion.add_norm_quantize(T, H),
    "silu, times up, FP8": fusion.gate_quantize(T, 28_672),
    "rotary, cache write": fusion.rotate_and_write(T, 64, 8, 128),
    "all-reduce, add, norm": fusion.all_reduce_add_norm(T, H),
}
rows = []
for name, chain in CHAINS.items():
    kept = [i for i in chain.intermediates if i in chain.kept]
    twice = sum((1 if i in kept else 2) * chain.sizes[i] for i in chain.intermediates)
    assert chain.saved == twice
    between = ", ".join(f"{i} (kept)" if i in kept else i for i in chain.intermediates)
    sizes = (format_bytes(chain.bytes), format_bytes(chain.fused_bytes))
    rows.append((name, len(chain.kernels), between, *sizes, f"{chain.bytes / chain.fused_bytes:.2f}x"))
widgets.table(rows, ["chain", "kernels", "intermediates", "separate", "fused", "fewer"])

# %% name="chains-figure" jupyter={"source_hidden": true}
fig = figure(7.4, 2.8)
ax = fig.subplots()
for y, chain in enumerate(reversed(CHAINS.values())):
    ax.barh(y + 0.2, chain.bytes / 1e6, 0.36, color=SKY, label="separate kernels" if y == 0 else None)
    ax.barh(
        y - 0.2,
        chain.fused_bytes / 1e6,
        0.36,
        color=ORANGE,
        hatch="//",
        edgecolor="white",
        label="one kernel" if y == 0 else None,
    )
    ax.text(
        chain.bytes / 1e6 + 0.15, y + 0.2, f"{chain.bytes / chain.fused_bytes:.2f}x", va="center", fontsize=8, color=INK
    )
tidy(ax, f"MB per layer, {T} tokens")
ax.set_yticks(range(len(CHAINS)), list(reversed(CHAINS)), fontsize=8)
ax.legend(fontsize=8, frameon=False, loc="lower right")
show(
    fig,
    "Bytes of five chains of kernels, separate and fused. Times fewer: "
    + ", ".join(f"{name} {chain.bytes / chain.fused_bytes:.2f}" for name, chain in CHAINS.items()) + ".",
)  # fmt: skip

# %% [markdown] name="chains-reading"
# Not three times: the inputs and the results still have to be moved, and in the question's chain they are larger than
# what was saved. If you guessed three, you counted kernels instead of bytes. `rotary, cache write` gains little in
# bytes. It is fused for another reason, which comes next.
#
# ### What launches cost
#
# A kernel has to be started. In PyTorch's eager mode the host spends some microseconds per operation (checks,
# allocation, dispatch, driver). It runs ahead of the GPU, so long kernels hide that. Short ones do not: the GPU waits
# for the host. Decode consists of short kernels. On a GPU each layer of our engine is **six launches** for a few
# tokens: four products with their neighbours, the rotary embedding with the cache write, and attention. It is nine
# where norms and gate are separate kernels. A **CUDA graph** records the launches of a whole step once, and replays
# them with one call. Between kernels a gap remains, about a microsecond, which only *fewer* kernels remove.
# <!-- tested: tests/layers/test_fused_layers.py::test_a_layer_is_six_launches_that_read_its_weights_and_little_else -->
# <!-- tested: tests/bench/test_gpu_counts.py::test_launches_of_a_layer_are_those_of_the_predictions -->

# %% name="predict-launches"
widgets.predict(
    "05b-graph", "Qwen3-0.6B on an H100, batch 1: how many times faster is a step as a CUDA graph?", "times"
)

# %% name="launches"
LAUNCH, GAP, PER_LAYER = 5e-6, 1.3e-6, 6  # seconds: orders of magnitude for machines of 2024-26; measure yours
gains, rows = {}, []
for name in ("qwen3-0.6b", "llama-3-8b"):
    shape = model_shapes.model(name)
    kernels = PER_LAYER * shape.layers
    work = kv_cache.read_bytes(shape) / H100.bandwidth  # per step, the weights are read once
    durations = [work / kernels] * kernels
    eager, graph = fusion.finish(durations, LAUNCH, GAP), fusion.finish(durations, 0, GAP) + LAUNCH
    busy = [fusion.working_share(work, per_layer * shape.layers, GAP) for per_layer in (9, 6)]
    gains[name] = eager / graph
    times = (format_seconds(work), format_seconds(eager), format_seconds(graph), f"{eager / graph:.2f}x")
    rows.append((name, kernels, f"{work / kernels * 1e6:.1f} us", *times, *(f"{share:.0%}" for share in busy)))
print(widgets.reveal("05b-graph", gains["qwen3-0.6b"]))
widgets.table(
    rows, ["", "kernels", "each", "weights alone", "eager", "graph", "gain", "GPU busy, 9 a layer", "6 a layer"]
)

# %% [markdown] name="launches-reading"
# For the 8B model the launches hide behind 23 µs of work each, and a graph gains little. For the 0.6B model the
# launches dominate. Split the 8B model over eight GPUs, and its kernels become nearly as short. That
# is why fusion pays off even where it saves few bytes: **fewer kernels, fewer gaps**.
# <!-- printed: launches -->
#
# How many kernels does a decode step launch in eager mode? The cell counts the PyTorch operations in one step of the
# course model, for one request and for eight, without views (which compute nothing). Then it computes what they would
# cost on an H100.

# %% name="predict-dispatch"
widgets.predict("05b-operations", "Eight requests decode instead of one: how many times as many operations?", "times")


# %% name="operations" jupyter={"source_hidden": true}
class Operations(TorchDispatchMode):
    """Counts the operations that torch computes."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += not operation.is_view
        return operation(*args, **(kwargs or {}))


# %% name="dispatch"
llm = LLM(course_model("target"), dtype="float32", kv_cache_bytes=32 * 2**20, prefix_cache="off", attention="torch")
model, text = llm.engine.model, llm.encode(inspect.getsource(Engine))
weights = 2 * model.num_parameters() / H100.bandwidth  # in 16 bits
counts, rows = {}, []
for requests in (1, 8):
    engine = Engine(model, EngineConfig(num_blocks=256, prefix_cache="off", attention="torch"))
    for i in range(requests):
        engine.add(text[i : i + 64], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
    for _ in range(3):  # prefill, and the first steps, which include setup
        engine.step()
    with Operations() as asked:
        engine.step()
    counts[requests] = asked.count
    eager = fusion.finish([weights / asked.count] * asked.count, LAUNCH, GAP)
    assert eager > 20 * weights, "the time of such a step is that of its launches"
    rows.append((requests, asked.count, format_seconds(weights), format_seconds(eager)))
print(widgets.reveal("05b-operations", counts[8] / counts[1]))
widgets.table(rows, ["requests", "operations", "H100: weights alone", "H100: eager"])

# %% [markdown] name="dispatch-reading"
# About as many operations for eight requests as for one, and by these costs hundreds of times as long as reading the
# weights: for a model this small an eager step on a GPU is almost all launches. That is why engines use CUDA graphs.


# %% name="best-seconds" jupyter={"source_hidden": true}
def best_seconds(call, times=15):
    """Shortest of several runs, until the GPU is done; other programs may disturb some."""
    best = float("inf")
    for _ in range(times):
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return best


# %% name="cuda-graph"
if on_gpu:
    small = torch.zeros(4096, device="cuda")

    def many():
        for _ in range(200):
            small.add_(1.0)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        many()  # warm-up before the capture
    torch.cuda.synchronize()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        many()
    before = float(small[0])
    recorded.replay()
    assert float(small[0]) == before + 200
    eager, replayed = best_seconds(many), best_seconds(recorded.replay)
    print(f"200 small kernels: eager {eager * 1e6:.0f} us, replayed {replayed * 1e6:.0f} us: {eager / replayed:.1f}x")
else:
    print("no CUDA here: with a GPU this cell records 200 small kernels and replays them with one call")

# %% [markdown] name="profile-text"
# ### Profile a forward pass: the five largest
#
# A profiler says where the time went. Theory says where it *should* have gone. Look at both. Here the course model
# prefills a prompt of 512 tokens. Operations are grouped by function, with their work next to their time: arithmetic
# for products and attention, bytes for the rest.

# %% name="profile-tools" jupyter={"source_hidden": true}
from torch.profiler import ProfilerActivity, profile


@contextmanager
def quiet():
    """The profiler's library prints to stderr on start and stop, bypassing Python."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


ROLES = {
    "matrix products": r"linear_pointwise|aten::(?:addmm|mm)$|gem[mv]|cutlass|cublas|nvjet",
    "attention": r"scaled_dot_product|flash|fmha|paged_decode|merge_splits",
    "norms": r"norm",
    "gate (silu, times up)": r"silu|act_and_mul",
    "other element by element": r"aten::(?:mul|add|addcmul|pow|div|sub|neg|cat|roll)_?$|elementwise|vectorized",
    "moving and indexing": r"copy|index|gather|scatter|slice|select|memcpy|memset",
}


def self_time(event):
    return (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3  # ms


def by_role(events):
    spent = Counter()
    for event in events:
        matching = (role for role, pattern in ROLES.items() if re.search(pattern, event.key, re.IGNORECASE))
        spent[next(matching, "all else")] += self_time(event)
    return spent


# %% name="predict-profile"
widgets.predict("05b-products", "What share of this prefill's time do matrix products take, on this machine?", "%")

# %% name="profile"
LENGTH, c = 512, model.config
engine = Engine(model, EngineConfig(num_blocks=64, prefix_cache="off", attention="torch"))
engine.add(text[:LENGTH], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
with quiet(), profile(activities=activities, with_flops=True) as profiler:
    engine.step()
    if on_gpu:
        torch.cuda.synchronize()
events = profiler.key_averages()
spent = by_role(events)
print("by their own names:", ", ".join(e.key for e in sorted(events, key=self_time, reverse=True)[:5]))
widgets.reveal("05b-products", 100 * spent["matrix products"] / spent.total())

# %% name="profile-duties"
linear = sum(weights.num_parameters() for weights in model.linears())
values = LENGTH * c.hidden_size * 4
duties = {
    "matrix products": f"{2 * (linear * LENGTH + c.vocab_size * c.hidden_size) / 1e9:.1f} GFLOP",
    "attention": f"{4 * LENGTH**2 / 2 * c.num_heads * c.head_dim * c.num_layers / 1e9:.2f} GFLOP (causal half)",
    "gate (silu, times up)": f"{format_bytes(5 * LENGTH * c.intermediate_size * 4 * c.num_layers)}, 3/5 of it if fused",
    "norms": f"{format_bytes(2 * values * 2 * c.num_layers)} without those of q and k",
}
widgets.table(
    [(role, f"{ms:.1f} ms", f"{ms / spent.total():.0%}", duties.get(role, "")) for role, ms in spent.most_common(5)],
    ["the five largest", "time", "share", "work"],
)

# %% name="profile-check"
products = sum(e.count for e in events if re.search(r"linear_pointwise|aten::(?:addmm|mm)$", e.key))
assert on_gpu or products == len(model.linears()) + 1, "each linear layer once, and the logits"
counted_flops = sum(e.flops for e in events if e.key == "aten::mm")
logits_flops = 2 * c.vocab_size * c.hidden_size
print(f"{products} products: {len(model.linears())} linear layers and the logits of one token ({logits_flops:,} FLOP)")
assert on_gpu or counted_flops >= logits_flops

# %% [markdown] name="profile-reading"
# Products do most of the arithmetic of such a prefill, attention comes next and grows with the square of the length.
# The rest, gates, norms and copies, has hardly any: the time that the table gives it is what fusion can reduce.
#
# On an NVIDIA GPU the tools are **Nsight Systems** for the timeline (gaps between kernels!) and **Nsight Compute** for
# one kernel (occupancy, bytes, stalls; as of November 2026):
#
# ```
# nsys profile --trace=cuda,nvtx -o step python serve.py     # then: nsys stats --report cuda_gpu_kern_sum step.nsys-rep
# ncu --set full --kernel-name regex:flash -c 1 python serve.py
# ```
#
# Sort the kernels by *total* time, take the five largest, and for each write down FLOPs and bytes, divide by peak and
# bandwidth, and compare. A kernel near its limit is done. If one is far from it, find the reason, and look at the gaps
# as well.

# %% [markdown] name="gemm-text"
# ### What a tile costs
#
# The second process has compiled our matrix product with several tiles. Same source, same result. `BLOCK_K` is 64
# everywhere; *warps* share a tile; *stages* are the number of operand tiles buffered in shared memory, so that the next
# one is loaded while the current one is multiplied. A thread has at most 255 registers.

# %% name="predict-gemm"
widgets.predict("05b-spills", "Of the eight tiles for sm_90, how many spill registers or do not fit?", "tiles")

# %% name="gemm"
if has_triton:
    tiles = dict(zip(TILES, compiled_by(matmul_job), strict=True))
    spills = tiles["sm_90", 128, 256, 4, 3]
    assert spills["spilled"] > 0 == tiles["sm_90", 128, 256, 8, 3]["spilled"]
    assert set(tiles["sm_90", 128, 128, 8, 3]["matrix_instructions"]) == {"HGMMA"}
    assert set(tiles["sm_90", 16, 64, 4, 3]["matrix_instructions"]) == {"HMMA"}
    assert tiles["sm_90", 128, 128, 8, 4]["shared_bytes"] > tiles["sm_90", 128, 128, 8, 3]["shared_bytes"]
    print(widgets.reveal("05b-spills", sum(bool(it["problems"]) for tile, it in tiles.items() if tile[0] == "sm_90")))
else:
    print("compiling needs Triton")

# %% name="gemm-table" jupyter={"source_hidden": true}
if has_triton:
    rows = []
    for (gpu, m, n, num_warps, stages), it in tiles.items():
        fits = not any("shared" in problem for problem in it["problems"])
        warps = occupancy(gpu, num_warps, it["registers"], it["shared_bytes"]).warps if fits else 0
        units = ", ".join(f"{count} {name}" for name, count in it["matrix_instructions"].items())
        per_flop = m * n / (m + n)  # FLOPs per byte that the tile reads, in 16 bits: 2 m n k / 2 (m k + n k)
        size = (it["registers"], f"{it['shared_bytes'] / KiB:.0f} KiB", f"{per_flop:.0f}", warps, units)
        rows.append((gpu, f"{m} x {n}", num_warps, stages, *size, "; ".join(it["problems"])))
    headers = [
        "GPU",
        "tile",
        "warps",
        "stages",
        "registers",
        "shared",
        "FLOP/byte",
        "warps per SM",
        "units",
        "problems",
    ]
    display(widgets.table(rows, headers))

# %% [markdown] name="gemm-reading"
# - **Larger tiles** reuse each byte more often. With 128 × 256 results and four warps, each thread would have to hold
#   256 accumulators: more than its 255 registers. It **spills** to memory. With eight warps each holds half, and
#   nothing spills.
# - **More stages** hide more latency and take more shared memory, until there is none left.
# - On Hopper (`sm_90`) tiles of 128 rows use `HGMMA`, which a group of four warps issues together and which reads its
#   operands from shared memory. A tile of 16 rows falls back to `HMMA`, Ampere's instruction: Hopper's has 64 rows. A
#   decode batch often *has* 16 rows or fewer. So a good kernel computes the transposed product, with the weights as the
#   64 rows.
#
# ### Autotuning
#
# Nothing above says which tile is *fastest*. That depends on shape and GPU, and is found by running them:
# **autotuning**. `triton.autotune` takes a list of configurations, drops what a function of yours rules out, runs the
# rest at the first call with a new `key`, and keeps the best. What does "best" mean without a GPU? Then it runs here in
# the interpreter, with the two things that can be known: what the compiler reported rules tiles out (spills, shared
# memory, no Hopper instruction), and the bytes that a run requests, counted, rank the rest. Guess the winner for a
# product of 512 × 512 values.

# %% name="predict-autotune"
widgets.predict("05b-tuned", "How many rows times columns has the chosen tile?", "values of the result")

# %% name="autotune"
CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": 64}, num_warps=w, num_stages=s)
    for gpu, m, n, w, s in TILES
    if gpu == "sm_90"
] if has_triton else []  # fmt: skip


def report(config):
    """What the compiler said about this configuration on sm_90."""
    tile = config.kwargs
    return tiles["sm_90", tile["BLOCK_M"], tile["BLOCK_N"], config.num_warps, config.num_stages]


def fit(configs, named_args, **constants):
    """Without spills, within shared memory, and with the matrix instruction of Hopper."""
    return [c for c in configs if not report(c)["problems"] and "HGMMA" in report(c)["matrix_instructions"]]


def requested_bytes(run, quantiles):
    """In place of a stopwatch: Triton takes the smallest number, and asks for it at three quantiles."""
    with counted() as asked:
        run()
    return [asked["read"] + asked["written"]] * 3


# %% [markdown] name="autotune-run-text"
# Three arguments, and Triton's own autotuner does the rest. On a GPU, leave out `do_bench`: the default is a stopwatch.

# %% name="autotune-run"
if has_triton:
    stopwatch = {"do_bench": requested_bytes} if interpreted else {}
    tuned = triton.autotune(CONFIGS, key=["M", "N", "K"], prune_configs_by={"early_config_prune": fit}, **stopwatch)(
        matmul
    )
    a, b = torch.randn(2, 512, 64, device=DEVICE).to(torch.float16)
    y = torch.empty(512, 512, device=DEVICE)
    tuned[lambda tile: (triton.cdiv(512, tile["BLOCK_M"]), triton.cdiv(512, tile["BLOCK_N"]))](a, b, y, 512, 512, 64)
    torch.testing.assert_close(y, a.float() @ b.float().T, rtol=1e-3, atol=1e-2)
    best = tuned.best_config
    print(f"chosen: {best}")
    print(widgets.reveal("05b-tuned", best.kwargs["BLOCK_M"] * best.kwargs["BLOCK_N"]))
    tried = {str(config): value[0] for config, value in tuned.configs_timings.items()}
    unit = "bytes" if interpreted else "ms"
    rows = []
    for config in CONFIGS:
        tile = f"{config.kwargs['BLOCK_M']} x {config.kwargs['BLOCK_N']}"
        score = tried.get(str(config))
        rows.append((tile, config.num_warps, config.num_stages, "ruled out" if score is None else score))
    display(widgets.table(rows, ["tile", "warps", "stages", f"score, {unit}"]))
    assert fit([best], {}) == [best]
    assert on_gpu or (best.kwargs["BLOCK_M"], best.kwargs["BLOCK_N"]) == (128, 256)
    assert len(tried) == len(fit(CONFIGS, {})) < len(CONFIGS)
else:
    print(widgets.reveal("05b-tuned", 128 * 256))

# %% [markdown] name="autotune-reading"
# Honest limits. The count cannot tell apart what requests the same bytes: 128 × 128 has the same score with three
# stages and with four. It knows nothing of the L2 cache, of latency, or of waves: 512 × 512 in tiles of 128 × 256 are 8
# programs, for 132 SMs, and a stopwatch may well prefer small tiles here. A GPU adds exactly these: seconds. In
# production tuning costs start-up time (each configuration is compiled and run, for each new key), so engines ship
# tables of the winners, and the engine of this course chooses from a list by shape.

# %% name="sass"
if has_triton:
    it = tiles["sm_90", 128, 128, 8, 3]
    mnemonics = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", it["sass"], re.MULTILINE)
    families = Counter(mnemonic.split(".")[0] for mnemonic in mnemonics)
    assert families["HGMMA"] == it["matrix_instructions"]["HGMMA"]
    assert families["LDL"] + families["STL"] == 0
    about = {"HGMMA": "matrix product of four warps", "LDGSTS": "device memory to shared memory, in the background",
             "BAR": "barrier", "WARPGROUP": "wait for the matrix units", "STG": "store to device memory",
             "LDGDEPBAR": "end of a stage of copies"}  # fmt: skip
    print("PTX: ", next(line.strip()[:76] for line in it["ptx"].splitlines() if "wgmma.mma_async" in line))
    print("SASS:", next(m for m in mnemonics if m.startswith("HGMMA")))
    rows = [(name, families[name], meaning) for name, meaning in about.items()]
    display(
        widgets.table(
            [*rows, ("LDL, STL", families["LDL"] + families["STL"], "spills")], ["instruction", "how many", "what"]
        )
    )

# %% [markdown] name="engine-gemm-text"
# **Your turn.** Add a line to `TILES` above, for example for a small card, `("sm_86", 64, 128, 4, 3)`. Guess first:
# does it spill, does it fit, which instruction does it use? Then run that cell and those below it.
#
# The engine's own products (`reference_impl/kernels/gemm.py` and its neighbours for FP8, 4 and 8 bits) choose a tile
# from a list by shape and GPU, compute the transposed product for few tokens, and split the inner dimension where there
# are fewer tiles than SMs (split-K).

# %% name="engine-gemm"
if has_triton and known_gpu:
    from reference_impl.kernels import gemm as tiled
    from reference_impl.kernels.gemm_fp8 import gemm_fp8
    from reference_impl.kernels.quantize_rows import quantize_rows_fp8

    W = torch.randn(96, 256, device=DEVICE, dtype=torch.float16)
    for tokens in (1, 16, 70):  # decode of one, decode of a batch, a short prompt
        x = torch.randn(tokens, 256, device=DEVICE, dtype=torch.float16)
        exact = reference.gemm(x, W)
        torch.testing.assert_close(tiled.gemm(x, W), exact, rtol=2e-3, atol=2e-2)
        print(f"{tokens} rows: in 16 bits as the twin", end="")
        if fp8_here:
            eight = *quantize_rows_fp8(x), *quantize_rows_fp8(W)  # codes and scales, of tokens and of outputs
            product = gemm_fp8(*eight, torch.float16)
            torch.testing.assert_close(product, reference.gemm_fp8(*eight, torch.float16), rtol=2e-3, atol=2e-2)
            away = (product - exact).float().norm() / exact.float().norm()
            print(f", in FP8 as its twin, {away:.1%} away from 16 bits", end="")
        print()

# %% [markdown] name="engine-tiles-text"
# And the tiles that it would choose for a product with 8,192 inputs and outputs on an H100:

# %% name="engine-tiles"
if has_triton and known_gpu:
    rows = []
    for tokens in (1, 16, 64, 256, 8192):
        tile = tiled.choose(tiled.TILES, tokens, 8192, ARCHITECTURES["sm_90"])
        turned = "W times x, turned around" if tile.block_m <= tiled.FEW_TOKENS else "x times W"
        intensity = f"{roofline.gemm_intensity(tokens, 8192, 8192):,.0f}"
        rows.append((tokens, f"{tile.block_m} x {tile.block_n}", tile.num_warps, tile.num_stages, turned, intensity))
    display(widgets.table(rows, ["tokens", "tile", "warps", "stages", "product", "FLOP per byte"]))

# %% [markdown] name="engine-gemm-reading"
# One row and a thousand rows are two different problems, which is chapter 01 at the level of a kernel: with few rows,
# at one operation per byte of weight and row, memory is the limit, and the tile only has to keep loads in flight. With
# many, the tensor cores are the limit, and the tile has to keep them fed. Whether ours match cuBLAS has to be measured
# on a GPU: `python -m reference_impl.bench kernels` measures both, and prints the percentage of the limit.

# %% [markdown] name="explore"
# ## 6. Explore
#
# The occupancy explorer: every entry of the engine's compile table, on seven GPUs. Which resource binds? What would the
# kernel gain from fewer registers? Look for: flash attention on `sm_90` (one block, by its registers, on purpose), the
# same on `sm_86` with its smaller shared memory, and `merge_splits`, a kernel of one warp, which runs out of *blocks*.

# %% name="widget"
widgets.occupancy()

# %% [markdown] name="errata-compile"
# ## 7. What the cheat sheets get wrong
#
# **"`torch.compile` fuses the custom attention kernel with its neighbours."** (E05.9) A custom operator is *opaque*:
# the compiler sees a name, shapes and types, and has to leave it intact. Here is a toy block: add and norm, then an
# operation, then add, norm and gate. The operation is attention as a custom op, or a gate as a custom op, or the same
# gate in plain PyTorch. What does the compiler do?


# %% name="errata-compile-block"
@torch.library.custom_op("inferlab::attention", mutates_args=())
def attention(q: torch.Tensor) -> torch.Tensor:
    return F.softmax(q @ q.T, -1) @ q


@torch.library.custom_op("inferlab::gate", mutates_args=())
def gate(q: torch.Tensor) -> torch.Tensor:
    return q * torch.sigmoid(q)


for op in (attention, gate):
    op.register_fake(torch.empty_like)  # all that the compiler knows: shape and type of the output


def norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def block(x, residual, weight, something):
    s = x + residual
    s = s + 0.5 * something(norm(s, weight))
    return F.silu(norm(s, weight)) * s


# %% [markdown] name="errata-compile-graph-text"
# Three versions of that block, and a backend that records the operations it is given and changes nothing:

# %% name="errata-compile-graph"
BLOCKS = {
    "attention, an op": lambda *given: block(*given, attention),
    "gate, an op": lambda *given: block(*given, gate),
    "gate, in plain sight": lambda *given: block(*given, lambda q: q * torch.sigmoid(q)),
}
inputs = (*torch.randn(2, 64, 256, device=DEVICE), torch.randn(256, device=DEVICE))


def traced(function):
    """The operations that the compiler sees, in order."""
    seen = []

    def backend(module, example_inputs):
        seen.extend(str(n.target) for n in module.graph.nodes if n.op.startswith("call"))
        return module.forward

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(function, backend=backend)(*inputs), function(*inputs))
    return seen


# %% name="errata-compile-seen"
rows = []
for name, function in BLOCKS.items():
    graph = traced(function)
    at = [i for i, target in enumerate(graph) if target.startswith("inferlab.")]
    assert len(at) == ("an op" in name), "the op is one node, whatever is inside it"
    around = (at[0], len(graph) - at[0] - 1) if at else ("none is opaque", "")
    rows.append((name, len(graph), *around))
widgets.table(rows, ["the operation", "operations seen", "before the op", "after it"])

# %% [markdown] name="errata-inductor-text"
# That is the graph. Now see what Inductor, PyTorch's compiler, generates from it. The cell reads the *generated* code
# without running it: C++ on a CPU, Triton on a GPU. (On a CPU it needs a C++ compiler; without one, only the graph
# above is shown.)

# %% name="errata-inductor-code" jupyter={"source_hidden": true}
from torch._inductor.exc import InductorError


def generated(function):
    """Names in the generated code, in the order of their calls: fused kernels and custom operators."""
    import torch._inductor.config as inductor
    from torch._inductor.utils import get_code

    torch._dynamo.reset()
    # fx_graph_cache: off, as cached code is not generated. vec_isa_ok: no test program for vector instructions.
    with inductor.patch({"fx_graph_cache": False, "cpp.vec_isa_ok": False}), torch.no_grad():
        code = get_code(torch.compile(function), *inputs)[0]
    code = code[code.index("def call(") :].split("def benchmark_compiled_module")[0]
    # A call, not a mention in a comment or in a check: `name(`, or `name.run(` for Triton kernels.
    return re.findall(
        r"^\s+(?:\w+ = )?((?:cpp|triton)_\w*fused\w*?|torch\.ops\.inferlab\.\w+)(?:\.run|\.default)?\(",
        code,
        re.MULTILINE,
    )


# %% name="errata-inductor"
try:
    found = {name: generated(function) for name, function in BLOCKS.items()}
except InductorError as error:
    if "compiler" not in str(error).lower():
        raise
    found = {}
    print(f"Inductor cannot generate code here: {str(error).splitlines()[0]}")
for name, called in found.items():
    print(f"{name}: {' | '.join(called)}")
    opaque = [i for i, target in enumerate(called) if target.startswith("torch.ops.inferlab")]
    assert len(opaque) == ("an op" in name), "the op survives, called by its name"
    assert not opaque or (opaque[0] > 0 and opaque[0] < len(called) - 1), "with kernels before and after it"
if found:
    assert len(found["gate, in plain sight"]) < len(found["gate, an op"])

# %% [markdown] name="errata-compile-reading"
# Everything before the op becomes one kernel, and everything after it another: that is where the compiler helps.
# *Across* the op nothing fuses, neither for attention nor for the simple gate. In plain PyTorch the same gate is fused
# with its neighbours. (The name of the op in a kernel's name only says what is near.) So around a custom kernel,
# compiling adds fusion **between** opaque ops, less Python, and the launches recorded as CUDA graphs. And a graph fuses
# nothing: it replays the same kernels. To fuse attention with, say, the conversion of its output to 8 bits, someone has
# to write that kernel, and a pattern in the compiler substitutes it.
#
# **"CUTLASS is a C++ template library, not a language."** (E05.10) It was. Since version 4 (2025) it also has Python
# languages, of which CuTe DSL is the first; FlashAttention-4 (2026) is written in it. What you have to know is the
# same: layouts, tiles, copies and matrix instructions as objects, and synchronization. That is what Triton hides:
#
# | | you write | decided for you |
# |---|---|---|
# | CUDA C++ | what one thread does; shared memory, barriers, copies, matrix instructions | registers |
# | CUTLASS, CuTe (C++ or Python) | tiles, layouts, pipeline stages, roles of warps, from parts that map to the hardware | registers, addresses |
# | Triton | what one block does with tiles; tile sizes, warps, stages | threads, layouts, shared memory, barriers, copies |
# | Gluon (Triton's lower level) | the same, plus layouts, shared memory and roles of warps | threads |
# | TVM, TensorRT, Inductor | the model; sometimes a schedule or a plugin | the rest |
#
# **"Triton hides warps and registers and yields near-optimal code."** (E05.11) You just saw what it hides and what it
# does not: 128 × 256 spilled with four warps and not with eight, and the compiler gave no warning. You still choose the
# number and shape of tiles, warps and stages. In published figures (H100, bf16, head size 128, long prompts) attention
# in Triton reaches 380 to 480 TFLOP/s and FlashAttention-3, in CUDA and CUTLASS, about 600. Triton makes a *good*
# kernel cheaper to write. The last bit of speed on a new GPU often needs a lower level. (And it has nothing to do with
# NVIDIA's *Triton Inference Server*.)
# <!-- source: FlashAttention-3 (2024), causal forward at head size 128, 16k: Triton 378, FA-3 616; pytorch/benchmark #2391
# (July 2024): Triton 477, FA-3 621 -->

# %% [markdown] name="errata-fusion"
# **"LayerNorm, FP8 conversion and Linear become one kernel."** (E05.12) In practice, [add + norm + convert] is one
# kernel before the product, and [activation, scale, convert] is in the end of the product, its *epilogue*. Why not the
# norm inside, too? A conversion to 8 bits needs the largest value of the row before the first multiplication, and every
# program of the product would recompute it:

# %% name="errata-fusion-cell"
x, weight, W = torch.randn(4, 256), 1 + 0.1 * torch.randn(256), torch.randn(512, 256)
factor = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
torch.testing.assert_close(norm(x, weight) @ W.T, (x @ (W * weight).T) * factor, rtol=1e-3, atol=1e-4)
print("without 8 bits RMSNorm commutes: its weight goes into the matrix, its factor to the end")
for columns in (4096, 28_672):
    print(
        f"with a scale per row first: {columns // 128} column tiles of a product would each read the whole row for it"
    )

print("\nA layer of Llama, and one of Gemma 2 and 3; look for the order of add and norm:")
print(inspect.getsource(DecoderLayer.forward))
print(inspect.getsource(Gemma2Layer.forward))

# %% [markdown] name="errata-order"
# **"All-reduce, LayerNorm, add: in this order."** (E05.12) Look at the sources above. In a Llama the result of the
# output projection `self.o` is added to the stream `x` first, and then `rms_norm` is applied to the sum, with
# `mlp_norm`. So with tensor parallelism the order is all-reduce, **add, norm**. Gemma 2 and 3 also normalise the output
# *before* the add, with `attention_output_norm`; there it is all-reduce, norm, add. The same holds for OLMo-2, which
# has no norm before attention or MLP. Fuse in the order of the given model.
#
# **A figure under the wrong caption.** (E05.15) A popular page shows norm, conversion and linear with "three round trips",
# and under it "3x for fused all-reduce + norm". These are different operations. And three kernels in a row have two
# intermediates, so two round trips:

# %% name="errata-trips"
for kernels in (2, 3, 4):
    chain = fusion.in_a_row(kernels, 1_000_000)
    print(
        f"{kernels} kernels in a row: round trips {len(chain.intermediates)}, saved {format_bytes(chain.saved)} of {format_bytes(chain.bytes)}"
    )
    assert chain.saved == 2 * (kernels - 1) * 1_000_000
reduced = CHAINS["all-reduce, add, norm"]
print(
    f"all-reduce, add, norm in one GPU's memory: {reduced.bytes / reduced.fused_bytes:.2f}x fewer bytes; what crosses the links is the same"
)
left = collectives.amdahl(0.23, 3)
print(f"if that kernel is 23 % of a step and becomes 3 times faster, the step takes {left:.1%}: {1 / left:.2f}x")

# %% [markdown] name="production"
# ## 8. In production
#
# As of November 2026. Names of options change; look them up in the version you run.
#
# **vLLM** compiles by default. Attention is one custom op, and the graph is *split* there: the pieces between two
# attentions are compiled, with patterns of its own for fusions that a compiler does not find (norm + quantization,
# all-reduce + norm). CUDA graphs are recorded per piece for mixed batches, and over the whole step for pure decode where
# the attention backend can (`FULL_AND_PIECEWISE`). **SGLang** records decode steps as graphs for a list of batch sizes
# and pads to the next. **TensorRT-LLM** today runs PyTorch models with hand-written kernels, can use `torch.compile` for
# small fusions and records graphs; its older way built a TensorRT *engine*, where the graph optimizer fuses at build
# time.
#
# **TensorRT** takes a whole network, fuses layers by patterns, tries several kernels (tactics) per layer on the GPU that
# it builds for, and freezes the result: fast to start, tied to GPU and version. **TVM** (2018) searches schedules,
# tilings and orders of loops, by a cost model, for many kinds of hardware; MLC LLM serves phones and browsers with it.
# **Inductor** fuses elementwise operations and reductions and writes Triton (GPU) or C++ (CPU); for products it calls
# libraries or picks from Triton templates.
#
# **Libraries.** cuBLAS(Lt) is what `torch.mm` calls, with epilogues for bias and activation. CUTLASS kernels are in
# vLLM, SGLang and TensorRT-LLM for FP8 and FP4; DeepGEMM compiles products for their shapes at run time. On AMD, AITER
# collects kernels in assembly, CK and Triton.
#
# **Fused all-reduce.** TensorRT-LLM, vLLM and FlashInfer have kernels that reduce over NVLink, add and normalise in
# one. They pay off for small messages, in decode; large ones are left to NCCL.

# %% [markdown] name="quiz-text"
# ## 9. Quiz
#
# Each wrong option stands for a particular mistake, and the feedback names it. Change the seed for other numbers. Then
# build attention yourself, with a report on the resources your kernel would use on an A100 and an H100: [lab
# 05](../../labs/05_flash_attention/flash_attention.ipynb).

# %% name="quiz-execution"
from grader.quiz import load_quiz

widgets.quiz(load_quiz("05_flash_attention").draw(seed=2, tag="execution"))

# %% name="quiz-fusion"
widgets.quiz(load_quiz("05_flash_attention").draw(seed=2, tag="fusion"))

# %% name="quiz-kernels"
widgets.quiz(load_quiz("05_flash_attention").draw(seed=2, tag="kernels"))

# %% [markdown] name="card"
# ## 10. Card
#
# - Grid of blocks; a block stays on one SM; a warp is 32 threads under one instruction. Registers belong to threads,
#   shared memory to blocks, and both are allocated for a block's whole lifetime.
# - Coalesced: 32 neighbours × 4 bytes = 4 sectors of 32 bytes. Shared memory: passes = most different words in one of
#   32 banks; for values of 4 bytes stride 32 is worst, 33 is best. A branch costs each side that any thread of the warp
#   takes.
# - Blocks per SM = the minimum over registers, shared memory, warps, block slots. 64 registers × 32 warps fill 65,536.
#   Occupancy is a means: what counts is bytes in flight = bandwidth × latency.
#   <!-- stands: reference_impl/theory/occupancy.py -->
# - A chain of n kernels has n − 1 intermediates; fusion saves twice their bytes, but only the read of one that is kept.
#   Add + norm + FP8: 13 → 7 bytes per value.
#   <!-- tested: tests/claims/test_chapter_05b.py::test_e05_12_add_norm_and_conversion_move_7_bytes_per_value_instead_of_13 -->
# - Decode is many short kernels: step ≥ max(work, kernels × launch). A CUDA graph removes launches, not kernels and not
#   the gaps between them; fusion removes those.
# - `torch.compile` fuses between opaque ops, never through them.
# - Triton: you choose tiles, warps, stages; it chooses threads, layouts, barriers. CuTe and Gluon leave most of those
#   to you.
# - Three things to check in machine code: width of loads (`ld.global.v4`), matrix instructions (HMMA, HGMMA), spills
#   (LDL, STL).
# - A constant saves instructions and costs a compilation per value (part c). Autotuning: rule out by what the compiler
#   says, rank by running. Values that change from step to step are neither constants nor keys.
