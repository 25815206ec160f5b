# %% [markdown] name="title"
# # 00b · The roofline: how fast can this possibly be?
#
# How fast can this possibly be? It is the first question about any speed, and two divisions answer it: operations by one
# rate, bytes by another; the longer time is the limit. In this notebook you draw that limit for the machine you are
# sitting at, see how close real work comes to it, and learn to say which of the two has to change.
#
# About 45 minutes. You need `a_map`. Chapter 01 applies the calculation to the two phases.

# %% name="setup"
# Set-up: libraries, the course model, and the devices this notebook computes with.
import importlib.util
import json
import os
import shutil
import subprocess
import time
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton has to know before the first kernel is defined

from chapters import widgets
from chapters.widgets.figure import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, figure, show, tidy
from reference_impl import LLM, Engine, EngineConfig, SamplingParams, course_model
from reference_impl.core.linear import Linear
from reference_impl.theory import kv_cache, latency, links, model_shapes, roofline
from reference_impl.theory.hardware import DEVICES, device, hierarchy
from reference_impl.theory.units import (
    GB,
    BytesPerSecond,
    FlopPerByte,
    FlopPerSecond,
    UnitError,
    compute_utilization_ceiling,
    format_bytes,
    format_flops,
    format_seconds,
)

has_triton = importlib.util.find_spec("triton") is not None
if has_triton:
    import triton
    import triton.language as tl

torch.set_num_threads(1)  # one core, so that its own limits are easy to see
on_gpu = torch.cuda.is_available()
here, dtype = ("cuda", torch.float16) if on_gpu else ("cpu", torch.float32)
width = torch.finfo(dtype).bits // 8  # bytes of one value
h100, big, small = device("H100"), model_shapes.model("llama-3-70b"), model_shapes.model("llama-3-8b")
folder = course_model("target")
# The prefix cache is off, so that a prompt asked twice is computed twice; chapter 06 turns it on.
llm = LLM(folder, dtype="float32", kv_cache_bytes=32 * 2**20, prefix_cache="off")
model = llm.engine.model
shape = model_shapes.from_config(json.loads((folder / "config.json").read_text()), "course model")
print(f"measuring on {here} in {dtype}; the reference device is {h100.sku} ({h100.announced})")

# %% [markdown] name="question"
# ## 1. A question with a number
#
# Llama-3-70B, weights and cache in 16 bits, runs on as many H100 SXM as it needs. 128 conversations are being answered
# at once, each 8,192 tokens long. Every step writes one token for each of them. Assume perfect GPU routines (*kernels*)
# and no communication. The units that multiply matrices, the *tensor cores*, have a peak rate. **What percentage of
# their dense bf16 peak can such a step use, at most?** (bf16 is a 16-bit number format.)

# %% name="predict" jupyter={"source_hidden": true}
# The box for your guess.
widgets.predict("00b-share", "At most what percentage of the peak, 128 requests of 8,192 tokens on a 70B model?", "%")

# %% name="answer"
step = roofline.place(big, h100, 128, 8192)
print(f"a step does {step.intensity:.1f} FLOP for each byte it moves; an H100 needs {step.ridge:.0f} to be busy")
widgets.reveal("00b-share", 100 * float(step.utilization))

# %% [markdown] name="answer-reading"
# A large batch is not enough. This notebook derives both numbers.

# %% [markdown] name="idea"
# ## 2. The idea
#
# Every computation performs operations and moves bytes. The ratio of the two is its **arithmetic intensity**:
#
# $$ I = \frac{\text{operations}}{\text{bytes moved between memory and chip}} \qquad \left[\frac{\text{FLOP}}{\text{byte}}\right] $$
#
# A multiplication and an addition count as two FLOP. The bytes are those that cross between device memory and the chip:
# weights, keys and values, activations (the values passed from layer to layer). Traffic that stays on the chip counts
# as free.
#
# A device offers two rates: a peak $P$ in FLOP/s, and a bandwidth $B$ in byte/s. Each byte that arrives allows $I$
# operations, so memory can sustain $I \cdot B$ FLOP/s, and the arithmetic units never do more than $P$:
#
# $$ \text{attainable FLOP/s} = \min(P,\; I \cdot B) \qquad\qquad I_{\text{ridge}} = \frac{P}{B} $$
#
# That is the whole **roofline** (Williams, Waterman, Patterson 2009). Left of the ridge the work is *bound by
# bandwidth*: fewer bytes or a faster memory shorten it, a higher peak changes nothing. Right of the ridge it is *bound
# by compute*: fewer operations or a higher peak shorten it, a faster memory changes nothing.
#
# Keep two things apart. Intensity is a property of the **work**. The ridge is a property of a **device and a number
# format**. In the picture of the ferry (`a_map`): intensity is how many cars each crossing carries, the ridge is how
# many the terminal can handle while the ferry is under way.

# %% name="idea-figure" jupyter={"source_hidden": true}
fig = figure(7.6, 3.8)
ax = fig.subplots()
x = np.logspace(-1, 4, 200)
for precision, colour, style, side in (("bf16", INK, "-", "right"), ("fp8", PURPLE, "--", "left")):
    reach = roofline.attainable_flops(x, h100, precision) / 1e12
    ax.loglog(x, reach, color=colour, linestyle=style, label=f"roof, dense {precision}")
    ax.axvline(h100.ridge(precision), color=GREY, linestyle=":", linewidth=1)
    ridge = h100.ridge(precision)
    ax.annotate(f" ridge {precision} \n {ridge:.0f} ", (ridge, 0.5), fontsize=8, ha=side)
works = (
    ("one request, decode", roofline.step_intensity(small, 1, 2048), BLUE, "o"),
    ("32 requests, decode", roofline.step_intensity(small, 32, 2048), ORANGE, "s"),
    ("prefill of 2,048 tokens", roofline.step_intensity(small, 1, 0, 2048), GREEN, "^"),
)
for name, intensity, colour, marker in works:
    at = roofline.attainable_flops(intensity, h100) / 1e12
    ax.plot([intensity], [at], marker, color=colour, markersize=9, label=f"{name}: {intensity:,.0f} FLOP/byte")
ax.annotate("bound by bandwidth", (3.5, 2.5), rotation=37, fontsize=9, color=INK)
ax.annotate("bound by compute", (900, 620), fontsize=9, color=INK, va="top")
tidy(
    ax,
    "arithmetic intensity, FLOP per byte",
    "TFLOP/s",
    "Llama-3-8B, 16 bit, context 2,048, on one H100 SXM; activations left out",
)
ax.legend(fontsize=8, frameon=False, loc="upper left")
show(
    fig,
    "Roofline of an H100 on two log axes: a rising line up to the ridge at 295 FLOP per byte for bf16 and 591 for fp8, "
    "then flat. One request in decode lies far down on the slope, 32 requests higher up on it, a prefill of 2,048 tokens "
    "on the flat part.",
)

# %% [markdown] name="scratch-text"
# ## 3. From scratch
#
# Count it with real tensors. A layer's matrix `W` has `d_in × d_out` weights. One token takes a multiplication and an
# addition with each. How many FLOP per byte of `W` is that? It depends on how many bytes a weight takes.


# %% name="scratch"
d_in = d_out = 4096
stored = {
    "16 bit": torch.zeros(d_in, d_out, dtype=torch.bfloat16),
    "8 bit": torch.zeros(d_in, d_out, dtype=torch.int8),
    "4 bit": torch.zeros(d_in, d_out // 2, dtype=torch.uint8),  # two weights in a byte
}


def intensity(rows, weights, activations=True):
    flop = 2 * rows * d_in * d_out
    moved = weights.nbytes + (2 * rows * (d_in + d_out) if activations else 0)  # x in and y out, 16 bit
    return flop / moved


for bits, (name, W) in zip((16, 8, 4), stored.items(), strict=True):
    alone = intensity(1, W, activations=False)
    print(f"{name}: {W.nbytes:,} bytes, {2 * d_in * d_out:,} FLOP for one token: {alone:.0f} FLOP/byte")
    assert alone == roofline.weight_intensity(1, bits)

# %% [markdown] name="scratch-reading"
# **1 at 16 bit, 2 at 8 bit, 4 at 4 bit**, multiplied by the number of tokens that share the read. Only the weights
# count here. Now count the rows of `x` and `y` as well, with more and more tokens.

# %% name="grow"
grown = []
for rows in (1, 16, 64, 295, 850, 1024, 8192, 100_000):
    got, wide = intensity(rows, stored["16 bit"]), roofline.gemm_intensity(rows, 8192, 8192)
    assert np.isclose(got, roofline.gemm_intensity(rows, d_in, d_out))
    grown.append([rows, f"{got:.1f}", f"{wide:.1f}"])
print(f"limit d_in d_out / (d_in + d_out): {d_in * d_out / (d_in + d_out):.0f} at {d_in} x {d_out}, "
      f"{8192 * 8192 / (8192 + 8192):.0f} at 8192 x 8192")  # fmt: skip
widgets.table(grown, ["tokens", f"FLOP/byte at {d_in} x {d_out}", "at 8192 x 8192"])

# %% [markdown] name="grow-reading"
# Intensity is roughly the number of tokens, as long as that is far below the matrix's dimensions. Then it bends and
# saturates, because the rows themselves have to be moved. Both limits are far above 295, the ridge of an H100 in dense
# bf16, so large prefills are bound by compute there. A prompt of 64 tokens is not. (For whole steps, in the figures
# above and below, we count weights and cache only. For one token per request activations hardly matter; for a long
# prompt the true intensity is lower, as here, and still far right of the ridge.)

# %% [markdown] name="engine-text"
# ## 4. The same thing inside the engine
#
# Now a whole model, the one of this course. Give the engine some requests, let it read the prompts, and watch one
# decode step. The two helpers are folded: `decode_step` brings an engine to the step before, and `counted` runs that
# step and counts its operations where they happen, by hooks on every matrix and every attention call.


# %% name="counter" jupyter={"source_hidden": true}
class Counter(TorchFunctionMode):
    """FLOP of the layers' matrices, the output projection and attention, without masked pairs."""

    flop = 0

    def saw_matrix(self, module, inputs, output):
        self.flop += 2 * inputs[0].numel() * output.shape[-1]  # rows x in x out

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            q, keys, mask = args[0], args[1].shape[-2], kwargs.get("attn_mask")
            queries = q.shape[:-1]  # every axis but head_dim
            seen = mask.expand(*queries, keys).eq(0).sum() if mask is not None else queries.numel() * keys
            self.flop += 4 * int(seen) * q.shape[-1]  # scores and weighted sum
        out = func(*args, **kwargs)
        if func in (F.linear, torch.Tensor.matmul, torch.matmul) and out.shape[-1] == shape.vocab_size:
            self.flop += 2 * args[0].numel() * shape.vocab_size
        return out


def decode_step(batch, context):
    """An engine whose next step gives one token to each of `batch` requests that have `context` cached tokens."""
    tokens = batch * (context + 16)
    engine = Engine(
        model,
        EngineConfig(num_blocks=tokens // 16 + batch, block_size=16, max_num_batched_tokens=tokens, prefix_cache="off"),
    )
    for i in range(batch):
        prompt = [(7 * i + 3 * j) % 4000 + 16 for j in range(context)]
        engine.add(prompt, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True), request_id=f"r{i}")
    engine.step()  # all prompts
    return engine


def counted(engine):
    """FLOP of the engine's next step."""
    with Counter() as counter:
        hooks = [m.register_forward_hook(counter.saw_matrix) for m in model.modules() if isinstance(m, Linear)]
        engine.step()
    for hook in hooks:
        hook.remove()
    return counter.flop


# %% name="engine-count"
matrices = sum(linear.num_parameters() for linear in model.linears()) + model.embedding.numel()
weight_bytes = matrices * model.embedding.element_size()
each = llm.engine.kv_spec.bytes_per_token
print(f"{matrices:,} weights that every token meets, {format_bytes(weight_bytes)}; {each:,} bytes of cache per token")
found = []
for batch, context in ((1, 32), (8, 32), (8, 512)):
    engine = decode_step(batch, context)
    flop = counted(engine)
    cached = sum(row.start for row in engine.trace.steps()[-1].rows)  # tokens that were in the cache before the step
    moved = weight_bytes + (cached + batch) * each  # and each request writes one more
    assert flop == batch * latency.pass_flops(shape, 1, context)
    assert moved == roofline.step_bytes(shape, batch, context, weights=weight_bytes, kv_bytes=4)
    found.append([batch, context, format_flops(flop), format_bytes(moved), f"{flop / moved:.2f}"])
widgets.table(found, ["requests", "context", "operations", "bytes", "FLOP/byte"])

# %% [markdown] name="engine-reading"
# Operations and bytes match `reference_impl.theory` exactly. From the first row to the second, eight requests share
# one read of the weights, which is why the intensity rises nearly eight times. From the second to the third the
# contexts get longer, and it falls again: each request reads its *own* cache, and that read is not shared. Weights take
# 4 bytes each here (fp32), so one request starts at 0.5 and not at 1.

# %% [markdown] name="measure-text"
# ## 5. Measure and explain
#
# ### The roofline of the machine you are sitting at
#
# Two measurements give the roof: a long read that does almost no arithmetic, and a large matrix product whose time is
# almost all arithmetic. Times are shown, never checked. They depend on your machine and on what else it does.


# %% name="stopwatch" jupyter={"source_hidden": true}
def seconds(work, repeats=4):
    """The shortest of a few runs: the others were disturbed."""
    best, calls = float("inf"), 20 if on_gpu else 1  # a GPU queues calls: timing one alone would time its launch
    for _ in range(repeats + 1):
        if on_gpu:
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            work()
        if on_gpu:
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - started) / calls)
    return best


# %% name="roof"
stream = torch.ones((2**29 if on_gpu else 2**26), dtype=torch.float32, device=here)  # larger than the caches
n = 8192 if on_gpu else 2048
a, b = torch.randn(2, n, n, device=here).to(dtype)
my_bandwidth = stream.nbytes / seconds(stream.sum)
my_peak = 2 * n**3 / seconds(lambda: a @ b)
my_ridge = my_peak / my_bandwidth
print(
    f"read {my_bandwidth / GB:.1f} GB/s, {dtype} matrices {my_peak / 1e12:.3g} TFLOP/s: ridge {my_ridge:.1f} FLOP/byte"
)
print(
    f"H100 by its data sheet: {h100.bandwidth / GB:,.0f} GB/s, {h100.peak() / 1e12:.0f} TFLOP/s: ridge {h100.ridge():.0f}"
)

# %% [markdown] name="rows-text"
# Now place real work under it: one matrix times 1, 2, 4, ... rows. With one row this is what decode does with every
# matrix of a model; with many it is prefill, or decode for many requests at once.

# %% name="rows"
side = 8192 if on_gpu else 4096
W = torch.randn(side, side, device=here).to(dtype)
ROWS = [2**i for i in range(13 if on_gpu else 9)]
at = [roofline.gemm_intensity(rows, side, side, width) for rows in ROWS]
inputs = [torch.randn(rows, side, device=here).to(dtype) for rows in ROWS]
took = [seconds(lambda x=x: x @ W, repeats=2) for x in inputs]
reached = [2 * rows * side * side / t for rows, t in zip(ROWS, took, strict=True)]
if max(reached) > my_peak:  # no rate exceeds a peak: it was measured while other programs ran
    my_peak = max(reached)
    my_ridge = my_peak / my_bandwidth
    print(f"the peak is at least {my_peak / 1e12:.3g} TFLOP/s, the ridge at least {my_ridge:.1f}")
widgets.table(
    [[rows, f"{i:.1f}", format_seconds(t), f"{W.nbytes / t / GB:.1f}", f"{r / my_peak:.0%}"]
     for rows, i, t, r in zip(ROWS, at, took, reached, strict=True)],
    ["rows", "FLOP/byte", "time", "GB/s of weights", "share of the measured matrix rate"],
)  # fmt: skip

# %% name="rows-figure" jupyter={"source_hidden": true}
fig = figure(7.4, 3.4)
ax = fig.subplots()
x = np.logspace(np.log10(at[0] / 2), np.log10(at[-1] * 2), 100)
ax.loglog(
    x, np.minimum(my_peak, x * my_bandwidth) / 1e9, color=INK, linestyle="--", label="theory: min(peak, I · bandwidth)"
)
ax.loglog(at, np.array(reached) / 1e9, "o-", color=ORANGE, label=f"measured: {side} x {side} times rows")
ax.axvline(my_ridge, color=GREY, linestyle=":", label=f"ridge of this machine: {my_ridge:.1f}")
for i in (0, len(ROWS) // 2, len(ROWS) - 1):
    ax.annotate(f"{ROWS[i]} row{'s' if ROWS[i] > 1 else ''}", (at[i], reached[i] / 1e9), textcoords="offset points",
                xytext=(6, -12), fontsize=8)  # fmt: skip
tidy(ax, "arithmetic intensity, FLOP per byte", "GFLOP/s")
ax.set_yticks([n * 10**k for k in range(8) for n in (1, 2, 5)], [f"{n * 10**k:,}" for k in range(8) for n in (1, 2, 5)])
ax.minorticks_off()
ax.set_ylim(0.5 * min(*reached, at[0] * my_bandwidth) / 1e9, 1.5 * my_peak / 1e9)
ax.legend(fontsize=8, frameon=False, loc="lower right")
show(
    fig,
    f"Measured rate of a matrix product over its arithmetic intensity, with the roofline of this machine. From {ROWS[0]} to "
    f"{ROWS[-1]} rows the points reach {', '.join(f'{r / min(my_peak, i * my_bandwidth):.0%}' for i, r in zip(at, reached, strict=True))} "
    "of the roof.",
)

# %% [markdown] name="rows-reading"
# On an idle machine the points at both ends should be near the roof and those in the middle below it. (If other
# programs run, the measurements disturb each other, and a point may even be above a roof that was measured at a bad
# moment; run the cells again when the machine is idle. A CPU whose cache holds the whole matrix also reads it faster
# than memory would.) A roof is a limit, not a promise. Near the corner both resources would have to be saturated at the
# same time, which no kernel manages; and on a CPU, the routine that is made for many rows first repacks the matrix, so
# a few rows pay for more bytes than the formula counts. A GPU's libraries select a kernel per shape and usually come
# closer. Either way you now have a question to ask of any slow kernel: *how far below which part of the roof is it?*
#
# Notice where the ridge is. A CPU core becomes compute-bound at a few to a few tens of FLOP per byte in fp32, a
# data-centre GPU at hundreds in 16 bits. So batching pays off up to much larger batches on a GPU.

# %% [markdown] name="busy-text"
# ### Busy is not the same as computing
#
# `nvidia-smi` prints "GPU-Util". It is the share of the last moments (a second or less) in which **at least one kernel
# was running**. It does not say what the kernel did. A CPU's load has the same blind spot, so you can see it here.
# Three loops run for a moment each: one copies, one multiplies a matrix by one row, one by many. (`busy`, folded, runs a
# loop and reads both clocks.)


# %% name="busy-loop" jupyter={"source_hidden": true}
def busy(work, flop, moment=0.2, moments=3):
    """(share of the time in which this process was running, share of the measured matrix rate), in the best moment."""
    best = (0.0, 0.0)
    for _ in range(moments):  # other programs can only make it less
        work()
        if on_gpu:
            torch.cuda.synchronize()
        started, cpu, times = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - started < moment:
            work()
            times += 1
            if on_gpu and times % 20 == 0:
                torch.cuda.synchronize()  # otherwise a thousand calls are queued, and the loop lasts for seconds
        if on_gpu:
            torch.cuda.synchronize()
        took = time.perf_counter() - started
        best = max(best, ((time.process_time() - cpu) / took, times * flop / took / my_peak))
    return best


# %% name="busy"
one, many, copy = torch.randn(1, side, device=here).to(dtype), torch.randn(256, side, device=here).to(dtype), W.clone()
loops = {
    "copy a matrix": (lambda: copy.copy_(W), 0),
    "matrix x 1 row": (lambda: one @ W, 2 * side * side),
    "matrix x 256 rows": (lambda: many @ W, 2 * 256 * side * side),
}
shares = {name: busy(work, flop) for name, (work, flop) in loops.items()}
most = max(running for running, _ in shares.values())
widgets.table(
    [[name, f"{running:.0%}", f"{computing:.1%}"] for name, (running, computing) in shares.items()],
    ["loop", "time in which the process runs", "arithmetic, of the measured rate"],
)

# %% [markdown] name="busy-reading"
# On an idle machine all three look equally busy. On a GPU the gap is wider, because its ridge is higher: the matrices
# of a decode step at batch 1 in 16 bits can use at most 1/295 of an H100's dense peak, and GPU-Util may still show 100
# %. Ask for a counter of the tensor cores themselves (their *pipe*) instead. DCGM, NVIDIA's monitoring of data-centre
# GPUs, calls it `DCGM_FI_PROF_PIPE_TENSOR_ACTIVE`, and `DCGM_FI_PROF_DRAM_ACTIVE` is the one for memory. Or compute the
# share of the peak from the operations your model needs, as we do: that is **MFU**, model FLOP/s utilization. With a GPU
# the next cell (folded) reads GPU-Util while a loop multiplies by one row.

# %% name="busy-gpu" jupyter={"source_hidden": true}
if on_gpu and shutil.which("nvidia-smi"):
    ask = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    asked, times, started = None, 0, time.perf_counter()
    while asked is None or asked.poll() is None:  # keep the GPU at work until the answer is there
        one @ W
        times += 1
        if asked is None and time.perf_counter() - started > 1.5:  # the counter looks back for up to a second
            asked = subprocess.Popen(ask, stdout=subprocess.PIPE, text=True)
    torch.cuda.synchronize()
    rate = times * 2 * side * side / (time.perf_counter() - started)
    print(f"GPU-Util of each GPU while one multiplies by one row: {asked.stdout.read().split()} %; "
          f"arithmetic at {rate / my_peak:.2%} of the measured rate")  # fmt: skip
else:
    print("no GPU here: on a CUDA machine this cell asks nvidia-smi while a batch-1 loop runs")

# %% [markdown] name="busy-exercise-text"
# **Exercise.** Write `my_work` so that the process runs all the time and the arithmetic stays below 15 % of the matrix
# rate, while it still does at least one operation per element of `stream`. Then say which limit of the machine binds
# it. (If the share is too high on your machine: more bytes per operation.)


# %% name="busy-exercise"
def my_work():
    """Yours to write. Must do at least stream.numel() operations; this one only copies, so it does none."""
    stream.clone()


MY_FLOP = 0  # operations of one call
running, computing = busy(my_work, MY_FLOP)
done = stream.numel() <= MY_FLOP and running > 0.8 * most and computing < 0.15
print(f"running {running:.0%}, computing {computing:.1%}, {MY_FLOP / stream.numel():.0f} FLOP per element:",
      "that is it" if done else "not there yet")  # fmt: skip

# %% [markdown] name="batch-text"
# ### A step of the engine, over batch and context
#
# Section 4 counted; now we time: steps of 1, 4 and 16 requests, with short and with longer contexts. Theory is the
# roofline of your machine from above, `max(FLOP / peak, bytes / bandwidth)`. (On a GPU that peak was measured in fp16
# and this model computes in fp32, so the floor is a little too low there.)

# %% name="batch-time"
BATCHES = (1, 4, 16, *((64,) if on_gpu else ()))
CONTEXTS = (32, 512)
measured, floor, timed = {}, {}, []
for context in CONTEXTS:
    for batch in BATCHES:
        engine = decode_step(batch, context)
        for _ in range(10):
            engine.step()
        steps = [s for s in engine.trace.steps()[1:] if len(s.rows) == batch]
        assert all(row.num_tokens == 1 for s in steps for row in s.rows)
        measured[context, batch] = min(s.finished_at - s.started_at for s in steps)
        flop = batch * latency.pass_flops(shape, 1, context)
        moved = roofline.step_bytes(shape, batch, context, weights=weight_bytes, kv_bytes=4)
        floor[context, batch] = max(flop / my_peak, moved / my_bandwidth)
        times = format_seconds(floor[context, batch]), format_seconds(measured[context, batch])
        timed.append([context, batch, f"{flop / moved:.2f}", *times])
widgets.table(timed, ["context", "requests", "FLOP/byte", "floor", "measured"])

# %% name="batch-figure" jupyter={"source_hidden": true}
fig = figure(7.6, 3.3)
ax = fig.subplots()
looks = {CONTEXTS[0]: (BLUE, "o"), CONTEXTS[1]: (ORANGE, "s")}
price = measured[CONTEXTS[0], 1] - floor[CONTEXTS[0], 1]
for context, (colour, marker) in looks.items():
    ax.plot(BATCHES, [1e3 * measured[context, b] for b in BATCHES], marker, color=colour, linestyle="-",
            label=f"measured, context {context}")  # fmt: skip
    ax.plot(BATCHES, [1e3 * (price + floor[context, b]) for b in BATCHES], color=colour, linestyle=":",
            label=f"floor + the cost of a pass, context {context}")  # fmt: skip
    ax.plot(BATCHES, [1e3 * floor[context, b] for b in BATCHES], color=colour, linestyle="--", linewidth=1,
            label=f"floor, context {context}")  # fmt: skip
ax.set_xscale("log", base=2)
ax.set_xticks(BATCHES, [str(b) for b in BATCHES])
ax.set_ylim(bottom=0)
tidy(ax, "requests in the step", "ms per step")
ax.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
show(
    fig,
    "Milliseconds per decode step of the course model over the batch, at two contexts: measured, the floor by the "
    "roofline, and the floor plus a fixed cost per pass. Measured, from 1 request to "
    f"{BATCHES[-1]}: "
    + "; ".join(f"context {n} {1e3 * measured[n, 1]:.1f} to {1e3 * measured[n, BATCHES[-1]]:.1f} ms" for n in CONTEXTS)
    + ".",
)

# %% [markdown] name="batch-reading"
# Two gaps to explain, if nothing disturbs the measurement. The first is constant: each pass also costs Python and the
# launches of many small kernels, and in a model this small that counts; the dotted line adds it, taken from the first
# point. (29 MB of weights may also fit in the cache of your CPU or GPU, and then the floor is not even a floor. On a
# large model neither matters.) The second grows: four requests with short contexts read hardly more bytes than one,
# because they share the weights. With longer contexts every request has its own cache to read and its own attention to
# compute, and the step time grows with the batch. **Batching does not save that part.** On a CPU it should grow faster
# than the dotted line: there this engine's attention is plain torch, which first gathers the keys and values of all
# requests into one padded tensor and then reads that, so it moves the cache about three times. A kernel that reads the
# blocks in place need not gather (chapter 05).
#
# ### The ceiling of decode
#
# Let the batch grow without bound. The weights' share of the bytes goes to zero, and the intensity tends to FLOP per
# sequence over cache bytes per sequence. That is a constant. Here are Llama-3-70B, weights and cache in 16 bits, and an
# H100 SXM, dense bf16:


# %% name="ceiling"
def ceiling_row(context, batches=(1, 8, 32, 128, 512)):
    reached = [f"{float(roofline.step_intensity(big, batch, context)):.1f}" for batch in batches]
    need = roofline.batch_for_ridge(big, context, h100.ridge())
    limit = f"{roofline.max_decode_intensity(big, context):.1f}"
    return [context, *reached, limit, f"batch {need:,.0f}" if np.isfinite(need) else "no batch"]


share = roofline.place(big, h100, 128, 8192).utilization
print(f"128 requests of 8,192 tokens: at most {share:.1%} of the peak, as at the top")
widgets.table(
    [ceiling_row(context) for context in (512, 2048, 8192, 131_072)],
    ["context", *(f"batch {n}" for n in (1, 8, 32, 128, 512)), "limit", "ridge reached by"],
    "FLOP per byte of a step",
)

# %% name="ceiling-figure" jupyter={"source_hidden": true}
fig = figure(7.6, 3.4)
ax = fig.subplots()
B = np.logspace(0, 4, 80)
shades = (BLUE, GREEN, ORANGE, RED)
for context, colour, style in zip((512, 2048, 8192, 131_072), shades, ("-", "--", "-.", ":"), strict=True):
    ax.loglog(B, roofline.step_intensity(big, B, context), color=colour, linestyle=style, label=f"context {context:,}")
ax.loglog(B, roofline.weight_intensity(B), color=GREY, linewidth=1, label="weights alone: one per request")
ax.axhline(h100.ridge(), color=INK, linewidth=1.2)
ax.annotate("ridge of an H100, bf16", (1.2, h100.ridge() * 1.12), fontsize=8)
ax.set_ylim(0.7, 1500)
tidy(ax, "requests in the step", "FLOP per byte of the step", "Llama-3-70B, weights and cache in 16 bits")
ax.legend(fontsize=8, frameon=False, loc="lower right")
show(
    fig,
    "Intensity of a decode step over the batch for four contexts. Only the shortest crosses the ridge of 295; at 8,192 "
    "tokens the curve flattens at 60, at 131,072 tokens at 11. The line for weights alone keeps rising.",
)

# %% name="ceiling-why"
for s, name in ((big, "llama-3-70b"), (small, "llama-3-8b")):
    attention = roofline.decode_attention_intensity(s)
    longest = roofline.compute_bound_context(s.linear_params, kv_cache.bytes_per_token(s), h100.ridge(), attention)
    print(f"{name}: attention alone {attention:.0f} FLOP/byte, at any batch; from a mean context of {longest:,.0f} tokens on "
          "no batch reaches the ridge")  # fmt: skip

# %% [markdown] name="ceiling-reading"
# In decode a cached key is used once per query head that shares it. So attention has an intensity of `query heads / KV
# heads`, the group size, with 2 bytes per value, and no batch changes that. What does raise the ceiling: a smaller
# cache per token (8-bit keys and values, fewer KV heads, one latent vector instead of heads), several new tokens per
# request (speculation), and requests that share a prefix *and* a kernel that reads it once.
#
# ### One token of a 70B model
#
# How lopsided is it? Take the round numbers of the interview question: 70 billion weights, 2 bytes each, and an H100
# SXM with 989 TFLOP/s in dense bf16 and 3.35 TB/s. Count only the weights, not attention. <!-- printed: devices -->

# %% name="one-token"
flop, moved = latency.linear_flops(70e9, 1), 70e9 * 2
print(f"compute {format_flops(flop)} / peak = {format_seconds(flop / h100.peak())}")
print(
    f"read {format_bytes(moved)} / bandwidth = {format_seconds(moved / h100.bandwidth)}, {moved / h100.bandwidth / (flop / h100.peak()):.0f} times longer"
)
try:
    latency.require_fit(moved, h100)
except ValueError as error:
    print("and on one H100:", error)

# %% [markdown] name="one-token-reading"
# The ratio is the ridge again, because the intensity is 1. And the last line is the trap: 140 GB do not fit in 80 GB,
# so "a 70B in 16 bits on an H100" is a thought experiment. Split over two or four GPUs, both times shrink alike and the
# ratio stays (messages between the GPUs come on top).
#
# ### The memory hierarchy
#
# Memory is a ladder. Each rung down has less bandwidth and, with one exception, more capacity. Which is the exception?
# Sizes and bandwidths of an H100 SXM, all its processors (*SMs*, streaming multiprocessors) together. Registers hold
# the operands of the running instructions; *shared memory* is local to one SM; the *L2* cache serves them all; device
# memory (*HBM*) is next to the chip. The first two bandwidths are width times clock, so they are limits; those of L2
# are published measurements; the others are specifications. Host memory and SSDs come in many sizes; the table shows
# common ones.


# %% name="hierarchy"
def level_row(level):
    size = " to ".join(dict.fromkeys(format_bytes(v, binary=v < 1e9) for v in level.capacity))
    speed = " to ".join(dict.fromkeys(f"{v / 1e12:,.4g}" for v in level.bandwidth))
    return [level.name, size, speed, level.note]


chip = h100.chip
print(f"per SM ({chip.num_sms} of them): registers {format_bytes(chip.register_bytes_per_sm, binary=True)}, "
      f"shared memory up to {format_bytes(chip.shared_bytes_per_sm, binary=True)}")  # fmt: skip
widgets.table([level_row(level) for level in hierarchy(h100)], ["level", "capacity", "TB/s", "what the numbers are"])

# %% name="hierarchy-figure" jupyter={"source_hidden": true}
fig = figure(7.4, 2.9)
ax = fig.subplots()
levels = hierarchy(h100)
marks = ("o", "s", "^", "D", "v", "P")
for level, marker, colour in zip(levels, marks, (BLUE, ORANGE, GREEN, RED, PURPLE, INK), strict=True):
    x, y = np.mean(level.capacity), np.mean(level.bandwidth) / 1e12
    ax.loglog([x], [y], marker, color=colour, markersize=9)
    ax.annotate(level.name, (x, y), textcoords="offset points", xytext=(8, 4), fontsize=8)
ax.set_xlim(1e7, 3e14)
ax.set_ylim(top=2e3)
tidy(ax, "capacity, bytes", "TB/s as the GPU sees it", "memory of an H100 SXM with PCIe 5")
show(
    fig,
    "Six levels of memory on two log axes. Bandwidth falls from hundreds of TB/s in registers over 31 in shared memory, "
    "5 to 12 in L2, 3.35 in device memory and 0.06 over PCIe to 0.007 from an SSD. Capacity grows from shared memory on; "
    "the registers hold a little more than that.",
)

# %% [markdown] name="levels-text"
# ### The same ladder under your notebook
#
# A processor has it too: a first-level cache per core, a second, a third that cores share, then memory. Look for them
# without a data sheet: read a set of numbers again and again, and make the set larger. Where it no longer fits into a
# level, the rate steps down to that of the next. Each set is read in two ways, of which the faster counts: with one
# call per round, whose fixed cost hides the small levels, and with one call that walks the set many times
# (`embedding_bag`, which adds rows up). The code is folded; what matters is the table and the picture.

# %% name="levels" jupyter={"source_hidden": true}
SETS = [2**i for i in range(14, 29 if on_gpu else 28)]  # bytes of a working set
ROW = 1024  # numbers in a row of the table


def read_rate(size, total=2**26):
    """Byte/s of reading a set of `size` bytes over and over, at least `total` bytes in all."""
    table = torch.ones(max(1, size // (4 * ROW)), ROW, device=here)
    rounds = max(1, total // table.nbytes)
    order = torch.arange(len(table), device=here).repeat(rounds)  # rows in order, round after round
    first = torch.zeros(1, dtype=torch.long, device=here)  # all of them into one sum

    def by_sum():
        for _ in range(rounds):
            table.sum()

    by_bag = seconds(lambda: F.embedding_bag(order, table, first, mode="sum"), repeats=2)
    return rounds * table.nbytes / min(by_bag, seconds(by_sum, repeats=2))


rates = [read_rate(size) for size in SETS]
widgets.table(
    [[format_bytes(size, binary=True), f"{rate / GB:,.1f}"] for size, rate in zip(SETS, rates, strict=True)],
    ["working set", "GB/s"],
)

# %% name="levels-figure" jupyter={"source_hidden": true}
fig = figure(7.4, 2.9)
ax = fig.subplots()
ax.loglog(SETS, np.array(rates) / GB, "o-", color=ORANGE, label=f"measured on this {here}")
ax.axhline(my_bandwidth / GB, color=GREY, linestyle=":", label="the long read of section 5")
ax.set_xticks(SETS[::2], [format_bytes(size, binary=True) for size in SETS[::2]], fontsize=8, rotation=30)
ticks = [n * 10**k for k in range(5) for n in (1, 2, 5) if min(rates) / GB / 2 < n * 10**k < 2 * max(rates) / GB]
ax.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
ax.minorticks_off()
tidy(ax, "working set", "GB/s", "reading the same set again and again")
ax.legend(fontsize=8, frameon=False)
show(
    fig,
    "Read rate over the size of the working set, measured here on two log axes: "
    + ", ".join(f"{format_bytes(s, binary=True)} {r / GB:,.0f} GB/s" for s, r in zip(SETS, rates, strict=True))
    + ".",
)

# %% [markdown] name="levels-kernel-text"
# Count the steps and compare them with the sizes of your processor's caches. (A level that one core reads as fast as the
# one above it makes no step, and a shared level is smaller for you while other programs use it.)
#
# On a GPU the same experiment needs a kernel, because a call of a library (a copy, a sum) chooses
# itself what it reads in which order and where it writes, and its result takes room in the same cache. This one, in Triton,
# is one program per SM, each of which walks its own part of a set `rounds` times and keeps the sum in registers. With a
# GPU the cell after it (folded) times sets that fit into the L1 caches, into L2, and into neither. Without one Triton's
# interpreter runs the kernel on a small set, and only the sum is checked: the interpreter's times say nothing.

# %% name="levels-kernel"
if has_triton:

    @triton.jit
    def walk(x, sums, part, rounds, BLOCK: tl.constexpr):
        first = tl.program_id(0) * part  # this program's part of the set
        total = tl.zeros([BLOCK], tl.float32)
        for step in range(rounds * (part // BLOCK)):
            at = first + (step * BLOCK) % part  # round after round over the same part
            total += tl.load(x + at + tl.arange(0, BLOCK))
        tl.store(sums + tl.program_id(0), tl.sum(total))

    def walked(programs, part, rounds):
        """(function that walks, its sums): `programs` parts of `part` numbers, each read `rounds` times."""
        x, sums = torch.ones(programs * part, device=here), torch.zeros(programs, device=here)
        return lambda: walk[(programs,)](x, sums, part, rounds, BLOCK=1024), sums

    run, sums = walked(programs=2, part=2048, rounds=3)
    run()
    assert sums.tolist() == [3 * 2048] * 2
    print("each program added its part three times")
else:
    print("Triton is not installed: pip install triton (Linux), or read on")

# %% name="levels-gpu" jupyter={"source_hidden": true}
sets = []
if has_triton and on_gpu:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for part in (2**12, 2**14, 2**16, 2**18, 2**20):  # numbers per program, one program per SM
        rounds = max(2, 2**24 // part)
        run, _ = walked(sms, part, rounds)
        rate = 4 * sms * part * rounds / seconds(run, repeats=2)
        sizes = [format_bytes(n, binary=True) for n in (4 * part, 4 * part * sms)]
        sets.append([*sizes, f"{rate / 1e12:.2f}"])
else:
    print("no GPU here: on a CUDA machine this cell shows TB/s of five working sets")
widgets.table(sets, ["per SM", "in all", "TB/s"]) if sets else None

# %% [markdown] name="devices-text"
# ### The devices of this course
#
# One table, read by every calculator and widget. A name is short for one *SKU*, the exact version on sale (last
# column); others of that name have other numbers. Peaks are dense, and the date is the month of the announcement. The
# ridge is for bf16, or fp16 where there is no bf16.


# %% name="devices"
def device_row(d):
    precision = "bf16" if "bf16" in d.dense_flops else "fp16"
    fp8 = f"{d.peak('fp8') / 1e12:,.0f}" if "fp8" in d.dense_flops else "none"
    compute = [f"{d.peak(precision) / 1e12:,.0f}", fp8]
    memory = [f"{d.bandwidth / 1e12:.2f}", f"{d.capacity / GB:.0f}", f"{d.ridge(precision):.0f}"]
    return [d.name, d.announced, *compute, *memory, f"{d.link_per_direction / GB:.0f} {d.link or d.host_link}", d.sku]


widgets.table(
    [device_row(d) for d in DEVICES.values()],
    ["device", "date", "16-bit TFLOP/s", "fp8", "TB/s", "GB", "ridge", "link GB/s, one way", "SKU"],
)

# %% name="devices-figure" jupyter={"source_hidden": true}
fig = figure(7.4, 3.2)
ax = fig.subplots()
places = {"MI300X": (8, -3, "left"), "GH200": (0, -13, "center"), "H200": (4, -13, "left")}
for d in DEVICES.values():
    peak = d.peak("bf16" if "bf16" in d.dense_flops else "fp16") / 1e12
    ax.loglog([d.bandwidth / 1e12], [peak], "o", color=BLUE)
    right, up, side = places.get(d.name, (0, 7, "center"))
    ax.annotate(d.name, (d.bandwidth / 1e12, peak), textcoords="offset points", xytext=(right, up), fontsize=8, ha=side)
x = np.array([0.2, 12])
for ridge, style in ((150, ":"), (300, "--"), (500, "-.")):
    ax.loglog(x, x * ridge, color=GREY, linestyle=style, linewidth=1, label=f"ridge {ridge}")
ax.set_ylim(40, 4000)
tidy(ax, "device memory, TB/s", "dense 16-bit TFLOP/s")
ax.legend(fontsize=8, frameon=False, loc="lower right")
show(
    fig,
    "Nine devices by memory bandwidth and dense 16-bit peak, with lines of equal ridge. Data-centre parts from A100 to "
    "B200 lie between ridges of about 150 and 300; an L4 lies near 400.",
)

# %% [markdown] name="ledger-text"
# ### The ledger of one generated token
#
# When a step is bound by bandwidth, its time is proportional to its bytes. So write down where the bytes come from, per
# generated token:
#
# $$ \frac{\text{weights}}{\text{batch}} \;+\; \text{context} \cdot \text{KV bytes per token} \;+\; \text{new KV} \;+\; \text{activations} $$
#
# Every optimization of such a step lowers one of these terms, or leaves them all alone and raises the bandwidth. Say
# which. Here is the course model, with bytes counted from the tensors the engine actually holds, and two levers
# applied:

# %% name="ledger-engine"
narrow = LLM(folder, dtype="bfloat16", kv_cache_bytes=2**20, prefix_cache="off")
for name, chosen, batch in (("float32", llm, 1), ("float32", llm, 8), ("bfloat16", narrow, 8)):
    m, past = chosen.engine.model, 512
    weights = sum(linear.num_parameters() for linear in m.linears()) * m.embedding.element_size() + m.embedding.nbytes
    slot = chosen.engine.kv_cache.data[:, :, 0, 0].nbytes  # keys and values of one token, all layers
    size = m.embedding.element_size()
    theory = roofline.bytes_per_generated_token(shape, batch, past, weights=shape.linear_params * size, kv_bytes=size)
    assert (weights / batch, past * slot, slot) == (theory.weights, theory.cache_read, theory.cache_write)
    print(f"{name:8s} batch {batch}, context {past}: weights {format_bytes(weights / batch)}, cache {format_bytes(past * slot)} "
          f"read and {format_bytes(slot)} written per token")  # fmt: skip

# %% [markdown] name="ledger-levers-text"
# And a real one: Llama-3-8B in 16 bits on an H100 SXM, one request at 8,192 tokens, then one lever at a time.
# Activations count the input and the output of every matrix once. *GQA* (grouped-query attention) lets several query
# heads share a KV head; *MHA* gives each its own. The 4-bit weights leave the output matrix in 16 bits, as most
# checkpoints do. Speculation is shown with three tokens accepted per pass: it divides
# the bytes a pass reads, and the cost of drafting is left out. The times are floors, at full bandwidth. (The weights'
# term counts what no engine can do without: all matrices, and not the table of input embeddings, of which a step looks
# up one row per token; the cell after the table prints both sizes.)

# %% name="ledger"
ledger = roofline.bytes_per_generated_token
CONTEXT = 8192
as_mha = replace(small, name="8B with MHA", num_kv_heads=small.num_heads)
four_bit = kv_cache.read_bytes(small, kv_cache.bits_per_weight(4, 128), embedding_bits=16)
base = ledger(small, 1, CONTEXT)
levers = {
    "as it is": base,
    "without GQA": ledger(as_mha, 1, CONTEXT, weights=kv_cache.read_bytes(small)),
    "4-bit weights": ledger(small, 1, CONTEXT, weights=four_bit),
    "8-bit cache": ledger(small, 1, CONTEXT, kv_bytes=1),
    "batch 16": ledger(small, 16, CONTEXT),
    "batch 16, 8-bit cache": ledger(small, 16, CONTEXT, kv_bytes=1),
    "3 tokens per pass": replace(base, weights=base.weights / 3, cache_read=base.cache_read / 3),
}
widgets.table(
    [[name, *map(format_bytes, (row.weights, row.cache_read, row.activations)),
      format_seconds(row.total / h100.bandwidth)] for name, row in levers.items()],
    ["lever", "weights", "cache", "activations", "at 3.35 TB/s"],
)  # fmt: skip


# %% [markdown] name="ledger-devices-text"
# The same bytes on faster memory, and what of the weights is only held:

# %% name="ledger-devices"
for name in ("H100", "H200", "B200"):
    print(f"the same bytes on {name}: {format_seconds(base.total / device(name).bandwidth)}")
held = kv_cache.weight_bytes(small)
print(f"in memory {format_bytes(held)} of weights; a step reads {format_bytes(base.weights)} of them")

# %% name="ledger-figure" jupyter={"source_hidden": true}
fig = figure(7.4, 3.0)
ax = fig.subplots()
names = list(levers)
left = np.zeros(len(names))
for term, colour, hatch in (("weights", BLUE, ""), ("cache_read", ORANGE, "//"), ("activations", GREEN, "..")):
    values = np.array([getattr(levers[name], term) for name in names]) / GB
    ax.barh(
        range(len(names)), values, left=left, color=colour, hatch=hatch, edgecolor="white", label=term.replace("_", " ")
    )
    left += values
ax.set_yticks(range(len(names)), names)
ax.invert_yaxis()
tidy(ax, "GB moved per generated token", title="Llama-3-8B at 8,192 tokens, 16 bit and one request unless said")
ax.legend(fontsize=8, frameon=False, loc="lower right")
show(
    fig,
    "Bytes moved per generated token of Llama-3-8B at 8,192 tokens, as stacked bars for several levers. Weights dominate "
    "with one request; at batch 16 weights and cache are about equal; activations cannot be seen.",
)

# %% [markdown] name="worked"
# ### Worked problem 2: one step of 32 requests
#
# The deployment of problem 1 (`a_map`): Llama-3-70B in 16 bits on four H100 with tensor parallelism. 69.50 of its 70.55
# billion parameters are matrices; the rest is the table of input embeddings. 32 requests with 8,192 tokens each decode
# one token.
# <!-- tested: tests/claims/test_worked_problems.py::test_worked_2_a_step_of_32_requests_is_bound_by_bandwidth -->
#
# *How many bytes and operations is the step, how long does it take at least, and what share of the peak is that? Leave
# communication out.*
#
# <details><summary>Answer</summary>
#
# Bytes: 69.50 · 10⁹ · 2 = 139.0 GB of weights, and 32 caches of 2.684 GB, 85.9 GB: **224.9 GB**. The four GPUs read at
# 4 · 3.35 = 13.4 TB/s together: **16.8 ms**.
# <!-- tested: tests/claims/test_worked_problems.py::test_worked_2_a_step_of_32_requests_is_bound_by_bandwidth -->
#
# Operations: per token 2 · 69.50 · 10⁹ = 139.0 GFLOP in the matrices and 4 · 80 layers · 64 heads · 128 · 8,192 = 21.5
# GFLOP in attention. Times 32: **5.14 TFLOP**, at 4 · 989 TFLOP/s 1.3 ms.
# <!-- tested: tests/claims/test_worked_problems.py::test_worked_2_a_step_of_32_requests_is_bound_by_bandwidth -->
#
# The longer time binds: 16.8 ms, bandwidth, and 1.3 / 16.8 = **7.7 %** of the peak. Or by intensity: 5.14 TFLOP / 224.9
# GB = 22.8 FLOP/byte, over a ridge of 295.
# <!-- tested: tests/claims/test_worked_problems.py::test_worked_2_a_step_of_32_requests_is_bound_by_bandwidth -->
#
# Which lever next? The weights are 62 % of the bytes. Fewer bits per weight move more than a smaller cache does; more
# FLOP/s move nothing.
# <!-- tested: tests/claims/test_worked_problems.py::test_worked_2_a_step_of_32_requests_is_bound_by_bandwidth -->
#
# </details>

# %% [markdown] name="explore-text"
# ## 6. Explore
#
# Put any dense model on any device. The marks are the same step at batch 1, 2, 4, ...; short grey ones do not fit in
# memory. Try these:
#
# - Raise *Requests* at 8,192 cached tokens: the point climbs to where the marks pile up, at the red line. Now set
#   *Cached tokens* to 512.
# - Set *Requests* to 1, *Cached tokens* to 0 and *New tokens* to 64, 256, 1,024: a prefill crosses the ridge.
# - Back to one new token and 8,192 cached ones for the rest.
# - *Weights* in 4 bits at one request: how far does the point move? And at 128 requests?
# - *Arithmetic* fp8: the ridge moves, the point does not. Choose the T4 and bf16, and read what it says.
# - Which steps of the 70B fit on four H100, and which do not?

# %% name="explore"
widgets.roofline("llama-3-70b", "H100", devices=4, batch=16, past=8192)

# %% [markdown] name="errata-ridge"
# ## 7. What the cheat sheets get wrong
#
# **"An H100 needs about 500 FLOP per byte at FP16."** (E00.1) Ask which line of the data sheet. Vendors tend to print
# the figure for *2:4 sparsity* first: two of every four weights are zero and skipped, which doubles the peak. No model
# here uses it. No line of an H100's data sheet gives 500:

# %% name="errata-ridge-cell"
for kind, peaks in (("dense", h100.dense_flops), ("2:4 sparse", h100.sparse_flops)):
    ridges = (f"{precision} {h100.ridge(precision, sparse=kind != 'dense'):.0f}" for precision in peaks)
    print(f"H100 SXM, {kind}: {', '.join(ridges)} FLOP/byte")
print("dense bf16:", {d.name: round(d.ridge()) for d in DEVICES.values() if "bf16" in d.dense_flops})
sixteen_bit = [(d.ridge("fp16", sparse), d.name, "2:4 sparse" if sparse else "dense") for d in DEVICES.values()
               for sparse in (False, True) if "fp16" in (d.sparse_flops if sparse else d.dense_flops)]  # fmt: skip
ridge, name, which = min(sixteen_bit, key=lambda row: abs(row[0] - 500))
print(f"the nearest to 500 in the table, 16 bit: {name}, {which}, {ridge:.0f}")

# %% [markdown] name="errata-batch1"
# **"Each weight byte gives 2 FLOP, so batch 1 has intensity 2 and batch 128 has 256."** (E00.2) Two FLOP per *weight*,
# and a 16-bit weight is two bytes. 2 and 256 belong to 8-bit weights. If the arithmetic is fp8 as well, the ridge has
# moved too.

# %% name="errata-batch1-cell"
for bits in (16, 8, 4):
    print(f"{bits:2d}-bit weights: batch 1 {roofline.weight_intensity(1, bits):.0f}, batch 128 {roofline.weight_intensity(128, bits):.0f} FLOP/byte; "
          f"weights alone reach the bf16 ridge at batch {h100.ridge() / roofline.weight_intensity(1, bits):.0f}")  # fmt: skip
print(
    f"8-bit weights and fp8 arithmetic: ridge {h100.ridge('fp8'):.0f}, reached at batch {h100.ridge('fp8') / roofline.weight_intensity(1, 8):.0f}"
)

# %% [markdown] name="errata-enough"
# **"Batch enough, and decode becomes compute-bound."** (E00.3) True of the weight matrices. For the whole step section
# 5 showed the ceiling: not with a 70B at 8,192 tokens in 16 bits on an H100, at any batch. And the caches have to fit:


# %% name="errata-enough-cell"
def enough_row(batch):
    need = kv_cache.weight_bytes(big) + kv_cache.cache_bytes(big, 8192, batch)
    at_most = float(roofline.place(big, h100, batch, 8192).utilization)
    return [batch, f"{at_most:.1%}", format_bytes(need), f"{int(np.ceil(need / (0.9 * h100.capacity)))}"]


widgets.table(
    [enough_row(batch) for batch in (8, 32, 128, 512)],
    ["requests at 8,192", "at most, of the peak", "memory", "H100s needed, at 90 %"],
)

# %% [markdown] name="errata-prefill"
# **"Prefill has intensity batch × length", "about 700", "decode is always memory-bound."** (E00.4) The first forgets
# that the rows have to be moved too, the second is one point of the curve, and the third has exceptions:

# %% name="errata-prefill-cell"
tokens = np.arange(1, 5000)
print(f"8192 x 8192: 700 FLOP/byte at {tokens[np.argmin(abs(roofline.gemm_intensity(tokens, 8192, 8192) - 700))]} tokens; 8 x 2,048 tokens give "
      f"{roofline.gemm_intensity(8 * 2048, 8192, 8192):,.0f}, not {8 * 2048:,}")  # fmt: skip
print(
    f"a prefill below about {latency.flat_prefill_tokens(h100):.0f} tokens is bound by bandwidth on an H100, like decode"
)
mla = roofline.decode_attention_intensity(model_shapes.model("deepseek-v3"))
print(
    f"latent attention with 128 heads: {mla:.0f} FLOP/byte; two tokens verified at once: {2 * mla:.0f}, above the ridge of {h100.ridge():.0f}"
)
crowd = roofline.place(small, h100, 1200, 256)
print(f"8B at 256 tokens of context, batch 1,200: {crowd.intensity:.0f} FLOP/byte, compute-bound decode; "
      f"{format_bytes(held + 1200 * kv_cache.cache_bytes(small, 257))} of weights and caches, which fit on one H100")  # fmt: skip
assert crowd.compute_bound
assert held + 1200 * kv_cache.cache_bytes(small, 257) < 0.9 * h100.capacity

# %% [markdown] name="errata-levels"
# **"Registers 20 KB at 10 TB/s, shared memory 200 KB at 19 TB/s, L2 50 MB at 5 TB/s."** (E00.5) Which row cannot be
# right? The registers: faster rungs have to be at the top, and they hold *more* than the shared memory below them. 19
# TB/s is the figure of another chip. **"50 MB of SRAM at 100 TB/s"** (E00.6) fits none of the levels, and "HBM: 80 to
# 192 GB at 2 to 5 TB/s" has aged: the cell's last line shows parts beyond it, and newer ones hold more. Quote each
# level by itself, with SKU and date.

# %% name="errata-levels-cell"
for name in ("A100-80GB", "H100"):
    c = device(name).chip
    print(f"{name:9s} registers {format_bytes(c.register_bytes_per_sm, binary=True)} per SM, {format_bytes(c.register_bytes, binary=True)} in all, "
          f"{c.register_bandwidth / 1e12:.0f} TB/s; shared {format_bytes(c.shared_bytes, binary=True)}, {c.shared_bandwidth / 1e12:.1f} TB/s")  # fmt: skip
speeds = [level.bandwidth[1] for level in hierarchy(h100)]
assert speeds == sorted(speeds, reverse=True), "bandwidth falls on every rung"
assert h100.chip.register_bytes > h100.chip.shared_bytes
print(
    "HBM in the table: "
    + ", ".join(
        f"{d.name} {d.capacity / GB:.0f} GB at {d.bandwidth / 1e12:.2f} TB/s ({d.announced})"
        for d in DEVICES.values()
        if d.bandwidth > 1.5e12
    )
)

# %% [markdown] name="errata-gap"
# **"There is a 10 to 50 times bandwidth gap between memory and compute."** (E00.7) The ratio of bytes per second to
# operations per second does not say which is ahead. The course's unit types reject the division:

# %% name="errata-gap-cell"
compute, bandwidth = FlopPerSecond(h100.peak()), BytesPerSecond(h100.bandwidth)
try:
    compute / bandwidth
except UnitError as error:
    print(error)
print(
    f"with an intensity it means something: at 1 FLOP/byte the tensor cores are at most {compute_utilization_ceiling(FlopPerByte(1.0), compute, bandwidth):.2%} busy"
)
print(f"and memory against memory: shared over device memory {h100.chip.shared_bandwidth / h100.bandwidth:.1f} times")

# %% [markdown] name="errata-nvlink"
# **"NVLink 5 gives 900 GB/s, and so does the H100's NVLink."** (E00.8) Both can only be true if one counts one
# direction and the other both. A transfer goes one way, so formulas take half of what vendors print. **"CPU memory at
# 200 GB/s"** (E14.3), listed below HBM, is what the *CPU* sees. A GPU sees the slowest part of the path: on PCIe the
# link, in a GH200 the CPU's memory, which is slower than NVLink-C2C. Whether to fetch a cache from the host or to
# recompute it depends on that:

# %% name="errata-nvlink-cell"
moved = kv_cache.cache_bytes(small, 8192)
again = latency.prefill_seconds(small, 8192, h100, mfu=0.5)
for name in ("H100", "GH200"):
    host = next(level for level in hierarchy(device(name)) if level.name == "host memory")
    print(f"8,192 tokens of Llama-3-8B ({format_bytes(moved)}) from the host, {name}: {host.bandwidth[0] / GB:.0f} GB/s "
          f"({host.note}), {format_seconds(links.transfer_seconds(moved, host.bandwidth[0]))}")  # fmt: skip
print(f"computing them again at half of an H100's peak: {format_seconds(again)}; fetching wins above "
      f"{links.break_even_bandwidth(moved, again) / GB:.1f} GB/s")  # fmt: skip
wires = [links.link(name) for name in ("NVLink 4", "NVLink 5", "NVLink-C2C", "PCIe 5 x16")]
widgets.table(
    [[wire.name, f"{wire.per_direction / GB:.0f}", f"{wire.both_directions / GB:,.0f}"] for wire in wires],
    ["link", "GB/s one way", "both ways"],
)

# %% [markdown] name="errata-flash"
# **"FlashAttention and PagedAttention are the answer to decode's bandwidth."** (E05.14) Put them in the ledger.
# FlashAttention keeps the scores on the chip; in decode there is one row of them per head and layer. PagedAttention
# saves *capacity*: it moves the same keys and values. (It may let a larger batch fit, and that lowers the weights'
# term.) The cell below shows what does lower the bytes, each against one request in 16 bits:

# %% name="errata-flash-cell"
scores = 2 * 2 * 2 * small.layers * small.num_heads * CONTEXT  # scores and softmax, each written and read, 2 bytes each
print(f"8B at {CONTEXT:,}: weights {format_bytes(base.weights)}, cache {format_bytes(base.cache_read)}, scores if written out "
      f"{format_bytes(scores)}: {scores / base.total:.2%} of the bytes")  # fmt: skip
fewer = {name: 1 - levers[name].total / base.total
         for name in ("4-bit weights", "8-bit cache", "batch 16", "3 tokens per pass")}  # fmt: skip
fewer["GQA, against MHA"] = 1 - base.total / levers["without GQA"].total
widgets.table([[name, f"{share:.1%}"] for name, share in fewer.items()], ["lever", "fewer bytes per token"])

# %% [markdown] name="errata-formula"
# The intensity formula itself is missing from some sheets, lost in rendering (E19.4). It is given in section 2, and
# section 3 asserts its values.

# %% [markdown] name="production"
# ## 8. In production
#
# As of November 2026. Names of counters and options change; look them up in the version you run.
#
# **Counters.** `nvidia-smi` and DCGM's `DCGM_FI_DEV_GPU_UTIL` say whether any kernel ran. On data-centre GPUs the
# profiling fields (`DCGM_FI_PROF_PIPE_TENSOR_ACTIVE`, `DCGM_FI_PROF_DRAM_ACTIVE`, `DCGM_FI_PROF_SM_ACTIVE`) say which
# part of the chip was active. Put those beside it on a dashboard.
#
# **Nsight Compute** can draw a roofline per kernel, in its hierarchical form with the counted bytes of each memory
# level. There you see how far below the roof a kernel is, as in our section 5.
#
# **Engines** work on the same terms. A decode step leaves arithmetic units idle, and chunks of prompts can use them, up
# to a token budget (chapter 03). vLLM's V1 engine does that by default. TensorRT-LLM and SGLang have switches for it
# (`enable_chunked_prefill`; `--enable-mixed-chunk`). All three offer weights in 8 and 4 bit and an 8-bit cache, which
# lower two terms of the ledger (chapter 07).

# %% [markdown] name="quiz-text"
# ## 9. Quiz
#
# Change the seed for other numbers. This chapter has no lab of its own: you write the generation loop of `a_map` in
# [lab 02](../../labs/02_kv_cache/kv_cache.ipynb).

# %% name="quiz"
from grader.quiz import load_quiz

widgets.quiz(load_quiz("00_orientation").draw(seed=1, tag="roofline"))

# %% [markdown] name="card"
# ## 10. Card
#
# - `I = FLOP / bytes moved`. Attainable = `min(peak, I · bandwidth)`. Ridge = `peak / bandwidth`.
# - H100 SXM, dense: 295 FLOP/byte in bf16, 591 in fp8. Name SKU, precision, dense or sparse.
# - Weights alone: `2 · tokens / bytes per weight`. Batch 1: 1 in 16 bits, 2 in 8 bits, 4 in 4 bits.
# - A matrix `d_in × d_out` in 16 bits saturates at `d_in · d_out / (d_in + d_out)`.
# - Attention in decode: `query heads / KV heads` at 2 bytes a value, whatever the batch. So decode has a ceiling:
#   `FLOP per sequence / cache bytes per sequence`.
# - Step floor = `max(FLOP / peak, bytes / bandwidth)`, on a deployment that fits.
# - Bytes per generated token = `weights / batch + context · KV bytes + new KV + activations`. Say which term a lever
#   lowers, or that it raises bandwidth.
# - "GPU-Util" says that some kernel was running. MFU and the tensor-pipe counter say how much was computed.
# - Quote the bandwidth of the path, in one direction. A path is only as fast as its slowest link.
